/* RowSlab of gym_trace/ring/row_slab.py in C: the same methods, the same answers, the same bytes in the slab.
 *
 * What each method does is told there, and what the bytes mean in docs/FORMAT.md, section 8. Here is only how.
 *
 * - Memory is written through put() and commit() alone, at offsets that row_at() or the log have checked against the buffer that
 *   is held. The layout is checked when it comes in.
 * - Other people's code (__bool__) runs before anything is looked at, and nothing that was looked at before is used after it.
 * - A mark is stored after all that it vouches for, by the compiler and by the processor: other processes read along.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
#define NPY_TARGET_VERSION NPY_1_22_API_VERSION
#include <numpy/arrayobject.h>
#include <numpy/random/bitgen.h>

#if PY_LITTLE_ENDIAN != 1
#error "slabs are little-endian"
#endif

#define ABI 7 /* of what Python expects of this module, in gym_trace/recording/core.py */

enum { HEADER = 64, ENTRY = 56, COMMIT_AT = 48, RESERVE = 4 * ENTRY, HAS_LEAD = 1 };
enum { START = 1, FLAG = 3, VALUE = 6, CHANGES = 7 };
enum { SAYS_TERMINATED = 1, SAYS_TRUNCATED = 2, MOST_DIMENSIONS = 32, MOST_NODES = 64, MOST_TEXT = 4096 };
static const int64_t NEVER = (int64_t)1 << 62;
static const int64_t EXACT_INTEGERS = (int64_t)1 << 53;
static const int64_t MOST_BYTES = (int64_t)1 << 40; /* of a row or slab, so that no sum of offsets overflows */

static PyObject *pcg64_type;    /* numpy.random.PCG64 */
static PyObject *log_full;      /* gym_trace.ring.log.LogFull */
static PyObject *log_entries;   /* gym_trace.ring.log.entries */
static PyObject *leaf_type;     /* gym_trace.model.layout.Leaf */
static long flag_terminated, flag_truncated, outcome_terminated, outcome_truncated;

/* A value that an observation or action consists of: of fixed size, in the row; without dtype a text, in the log; large, what
 * of it has changed, in the log. */
typedef struct {
    PyArray_Descr *dtype;
    PyTypeObject *scalar; /* the type of its scalars; NULL if it has dimensions or another byte order */
    int dimensions;
    npy_intp shape[MOST_DIMENSIONS];
    int64_t size;  /* of it in the row */
    int64_t large; /* its size, if it is large */
    PyArrayObject *before, *ready; /* the value before, and whether it can be compared; see deltas.DeltaPacker */
    int64_t most;                  /* words that may have changed */
    uint32_t *changes;             /* has room for so many places, and the words after them */
} Leaf;

/* A leaf, or what has so many children: those that follow. */
typedef struct {
    Leaf leaf;
    Py_ssize_t children; /* IS_LEAF */
    PyObject *keys;      /* of a Dict: a tuple of texts and integers */
} Node;

enum { IS_LEAF = -1 };

/* An observation or action. */
typedef struct {
    Node nodes[MOST_NODES];
    int count;       /* of nodes; 0: there are some that are not known here, all values are declined */
    int logs;        /* whether it is not one value of fixed size */
    uint32_t column; /* of the first leaf */
    int64_t size;    /* of it in the row */
} Tree;

typedef struct {
    PyObject_HEAD
    Tree action, observation;
    int64_t size, asked, reward, done; /* of a row, and offsets in it */
    PyObject *memory;                  /* a memoryview */
    Py_buffer buffer;                  /* of it, held as long as it is there */
    uint64_t tag;                      /* the sequence number, where marks have it */
    unsigned long long sequence, rows;
    long long logged;
    int64_t at;            /* of the next row */
    int64_t position;      /* of the next entry of the log; 0: begin() was never called */
    uint64_t count;        /* of entries */
    int64_t floor, least;  /* at must not be below floor for ask(); floor is never below least */
    int64_t noted, noted_end;      /* where the log has the texts of the observation in the last row ... */
    unsigned long long noted_rows; /* if so many rows are complete */
    char ended, only_floats, asks, answers;
} RowSlab;

/* -- memory --------------------------------------------------------------------------------------------------------- */

static inline void put(RowSlab *self, int64_t offset, const void *bytes, int64_t size)
{
    memcpy((char *)self->buffer.buf + offset, bytes, (size_t)size);
}

static inline void put_padded(RowSlab *self, int64_t offset, const void *bytes, int64_t size, int64_t room)
{
    size = size < room ? size : room;
    put(self, offset, bytes, size);
    memset((char *)self->buffer.buf + offset + size, 0, (size_t)(room - size));
}

static inline void commit(RowSlab *self, int64_t offset, uint64_t mark)
{
    atomic_store_explicit((_Atomic uint64_t *)((char *)self->buffer.buf + offset), mark, memory_order_release);
    atomic_signal_fence(memory_order_seq_cst);
}

/* The offset of the next row, -1 if it is not in the slab, below the log. */
static inline int64_t row_at(const RowSlab *self)
{
    return self->position && self->at >= self->position && self->at + self->size <= self->buffer.len ? self->at : -1;
}

static PyObject *no_room(void)
{
    PyErr_SetString(PyExc_ValueError, "there is no room for a row");
    return NULL;
}

static inline void set_floor(RowSlab *self)
{
    int64_t above_log = self->position + RESERVE;
    self->floor = above_log > self->least ? above_log : self->least;
}

/* -- large values --------------------------------------------------------------------------------------------------- */

enum { BLOCK = 1024, PART = 64 }; /* bytes that are compared at once: first many, and of those that differ, few */

static inline int64_t least(int64_t first, int64_t second)
{
    return first < second ? first : second;
}

/* The places of words of 1, 2, 4 or 8 bytes that differ. Returns how many; -1 if they are more than most. */
static inline __attribute__((always_inline)) int64_t places_of_width(const char *old, const char *new, int64_t bytes,
                                                                     const int width, uint32_t *places, int64_t most)
{
    int64_t count = 0;
    for (int64_t block = 0; block < bytes; block += BLOCK) {
        int64_t end = least(block + BLOCK, bytes);
        if (!memcmp(old + block, new + block, (size_t)(end - block))) {
            continue;
        }
        for (int64_t part = block; part < end; part += PART) {
            int64_t stop = least(part + PART, end);
            if (!memcmp(old + part, new + part, (size_t)(stop - part))) {
                continue;
            }
            for (int64_t word = part; word < stop; word += width) {
                if (memcmp(old + word, new + word, (size_t)width)) {
                    if (count == most) {
                        return -1;
                    }
                    places[count++] = (uint32_t)(word / width);
                }
            }
        }
    }
    return count;
}

/* The same; to the compiler the width is a constant, so that words are compared without calls. */
static int64_t find_changes(const char *old, const char *new, int64_t bytes, int width, uint32_t *places, int64_t most)
{
    switch (width) {
    case 1:
        return places_of_width(old, new, bytes, 1, places, most);
    case 2:
        return places_of_width(old, new, bytes, 2, places, most);
    case 4:
        return places_of_width(old, new, bytes, 4, places, most);
    default:
        return places_of_width(old, new, bytes, 8, places, most);
    }
}

/* Copies the words in these places, and has the value before have them. */
static void take_changes(char *old, const char *new, int width, const uint32_t *places, int64_t count, char *words)
{
    for (int64_t i = 0; i < count; i++, words += width) {
        int64_t at = (int64_t)places[i] * width;
        memcpy(words, new + at, (size_t)width);
        memcpy(old + at, new + at, (size_t)width);
    }
}

/* -- values --------------------------------------------------------------------------------------------------------- */

/* Whether a dtype is one of NumPy's own numbers, which can be compared and copied without running other people's code. */
static inline int is_number(const PyArray_Descr *dtype)
{
    return PyTypeNum_ISNUMBER(dtype->type_num) || PyTypeNum_ISBOOL(dtype->type_num);
}

/* Whether an array has the dtype and shape of a leaf. */
static inline int fits(const Leaf *leaf, PyArrayObject *array)
{
    PyArray_Descr *dtype = PyArray_DESCR(array);
    if (dtype != leaf->dtype && !(is_number(dtype) && PyArray_EquivTypes(dtype, leaf->dtype))) {
        return 0;
    }
    return PyArray_NDIM(array) == leaf->dimensions &&
           PyArray_CompareLists(PyArray_DIMS(array), leaf->shape, leaf->dimensions);
}

/* The bytes of a value, as long as it is held. */
typedef struct {
    const void *bytes;
    int64_t length; /* of a text; of changes, how many words */
    PyObject *held; /* what they belong to, if nobody else holds it */
    char scalar[32]; /* of two long doubles, at most */
} Value;

/* An int of Python, where the leaf is an integer. */
static int read_integer(const Leaf *leaf, PyObject *object, Value *value)
{
    if (leaf->scalar == NULL || !PyTypeNum_ISINTEGER(leaf->dtype->type_num)) {
        return -1;
    }
    int overflow, bits = (int)leaf->size * 8, is_signed = PyTypeNum_ISSIGNED(leaf->dtype->type_num) != 0;
    long long number = PyLong_AsLongLongAndOverflow(object, &overflow);
    uint64_t bytes = (uint64_t)number;
    if (overflow > 0 && !is_signed && bits == 64) {
        bytes = PyLong_AsUnsignedLongLong(object);
        if (PyErr_Occurred()) {
            PyErr_Clear();
            return -1;
        }
    }
    else if (overflow || (!is_signed && number < 0)) {
        return -1;
    }
    else if (bits < 64) {
        long long limit = 1LL << (bits - is_signed);
        if (number >= limit || number < -limit) {
            return -1;
        }
    }
    memcpy(value->scalar, &bytes, 8);
    return 0;
}

static int read_text(PyObject *object, Value *value)
{
    if (!PyUnicode_CheckExact(object)) {
        return -1;
    }
    Py_ssize_t length;
    value->bytes = PyUnicode_AsUTF8AndSize(object, &length);
    if (value->bytes == NULL) { /* it has surrogates */
        PyErr_Clear();
        return -1;
    }
    value->length = length;
    return length > MOST_TEXT ? -1 : 0;
}

/* Finds what has changed of a large value. */
static int read_large(const Leaf *leaf, PyObject *object, Value *value)
{
    PyArrayObject *array = (PyArrayObject *)object;
    if (leaf->before == NULL || !*(npy_bool *)PyArray_DATA(leaf->ready) || !PyArray_CheckExact(object) ||
        !fits(leaf, array) || !PyArray_IS_C_CONTIGUOUS(array)) {
        return -1;
    }
    value->bytes = PyArray_DATA(array);
    value->length = find_changes(PyArray_DATA(leaf->before), value->bytes, leaf->large,
                                 (int)PyArray_ITEMSIZE(leaf->before), leaf->changes, leaf->most);
    return value->length < 0 ? -1 : 0;
}

/* Reads a value that is exactly as its leaf says, and if it is large, like the one before. Returns -1, with nothing held, of any other: it is declined. */
static int read_value(const Leaf *leaf, PyObject *object, Value *value)
{
    value->held = NULL;
    value->bytes = value->scalar;
    if (leaf->dtype == NULL) {
        return read_text(object, value);
    }
    if (leaf->large) {
        return read_large(leaf, object, value);
    }
    if (PyLong_CheckExact(object)) {
        return read_integer(leaf, object, value);
    }
    if (PyArray_CheckExact(object)) {
        PyArrayObject *array = (PyArrayObject *)object;
        if (!fits(leaf, array)) {
            return -1;
        }
        if (!PyArray_IS_C_CONTIGUOUS(array)) {
            array = (PyArrayObject *)PyArray_NewCopy(array, NPY_CORDER);
            if (array == NULL) {
                PyErr_Clear();
                return -1;
            }
            value->held = (PyObject *)array;
        }
        value->bytes = PyArray_DATA(array);
        return 0;
    }
    if (leaf->scalar == NULL || Py_TYPE(object) != leaf->scalar) {
        return -1;
    }
    PyArray_ScalarAsCtype(object, value->scalar);
    return 0;
}

/* Bytes of a text as MessagePack. */
static inline int64_t text_bytes(int64_t length)
{
    return length + (length < 32 ? 1 : length < 256 ? 2 : 3);
}

/* Bytes that a value takes of the log. */
static inline int64_t log_bytes(const Leaf *leaf, const Value *value)
{
    if (leaf->dtype != NULL && !leaf->large) {
        return 0;
    }
    int64_t bytes = leaf->large ? value->length * (4 + PyArray_ITEMSIZE(leaf->before)) : text_bytes(value->length);
    return ENTRY + ((bytes + 7) & ~(int64_t)7);
}

/* The leaves of an observation or action. */
typedef struct {
    Value values[MOST_NODES];
    int count;
    int64_t log; /* bytes of the log that they take */
} Parts;

static void let_go(Parts *parts)
{
    for (int i = 0; i < parts->count; i++) {
        Py_XDECREF(parts->values[i].held);
    }
}

/* Whether a dict can be asked for any text or integer without running other people's code. */
static int has_plain_keys(PyObject *dict)
{
    Py_ssize_t at = 0;
    PyObject *key;
    while (PyDict_Next(dict, &at, &key, NULL)) {
        if (!PyUnicode_CheckExact(key) && !PyLong_CheckExact(key)) {
            return 0;
        }
    }
    return 1;
}

static int read_part(const Tree *tree, int *next, PyObject *object, Parts *parts)
{
    const Node *node = &tree->nodes[(*next)++];
    if (node->children == IS_LEAF) {
        Value *value = &parts->values[parts->count];
        if (read_value(&node->leaf, object, value) < 0) {
            return -1;
        }
        parts->count += 1;
        parts->log += log_bytes(&node->leaf, value);
        return 0;
    }
    if (node->keys != NULL) {
        if (!PyDict_CheckExact(object) || PyDict_GET_SIZE(object) != node->children || !has_plain_keys(object)) {
            return -1;
        }
    }
    else if (!(PyTuple_CheckExact(object) || PyList_CheckExact(object)) ||
             PySequence_Fast_GET_SIZE(object) != node->children) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < node->children; i++) {
        PyObject *part = node->keys == NULL ? PySequence_Fast_GET_ITEM(object, i)
                                            : PyDict_GetItemWithError(object, PyTuple_GET_ITEM(node->keys, i));
        if (part == NULL) {
            PyErr_Clear();
            return -1;
        }
        if (read_part(tree, next, part, parts) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Reads a value whose leaves are all exactly as they should be. Returns -1, with nothing held, of any other: it is declined. */
static int read_parts(const Tree *tree, PyObject *object, Parts *parts)
{
    int next = 0;
    parts->count = 0;
    parts->log = 0;
    if (!tree->count || read_part(tree, &next, object, parts) < 0) {
        let_go(parts);
        return -1;
    }
    return 0;
}

static int read_reward(const RowSlab *self, PyObject *reward, double *number)
{
    if (!self->only_floats || !self->answers) {
        return -1;
    }
    if (PyFloat_CheckExact(reward) || Py_TYPE(reward) == &PyDoubleArrType_Type) {
        *number = PyFloat_AS_DOUBLE(reward);
        return 0;
    }
    if (PyLong_CheckExact(reward)) {
        int overflow;
        long long exact = PyLong_AsLongLongAndOverflow(reward, &overflow);
        *number = (double)exact;
        return overflow || exact > EXACT_INTEGERS || exact < -EXACT_INTEGERS ? -1 : 0;
    }
    return -1;
}

/* Whether an object can be asked whether it is true without running other people's code. */
static inline int is_plain_flag(PyObject *flag)
{
    return PyBool_Check(flag) || Py_TYPE(flag) == &PyBoolArrType_Type;
}

/* Reads both flags. Returns what they say, SAYS_TERMINATED | SAYS_TRUNCATED; -1 with an exception. */
static inline int read_flags(PyObject *terminated, PyObject *truncated)
{
    int first = terminated == Py_False ? 0 : PyObject_IsTrue(terminated);
    int second = first < 0 ? -1 : truncated == Py_False ? 0 : PyObject_IsTrue(truncated);
    return second < 0 ? -1 : first * SAYS_TERMINATED | second * SAYS_TRUNCATED;
}

/* -- the log -------------------------------------------------------------------------------------------------------- */

typedef struct {
    unsigned int kind, flags, column;
    int64_t numbers[4];
} Entry;

static int64_t nanoseconds(clockid_t clock)
{
    struct timespec now = {0, 0};
    clock_gettime(clock, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

#ifdef __APPLE__
#define MONOTONIC CLOCK_UPTIME_RAW /* as time.monotonic_ns() */
#else
#define MONOTONIC CLOCK_MONOTONIC
#endif

/* Appends an entry. Returns 0, -1 with LogFull. */
static int append_entry(RowSlab *self, const Entry *entry, const void *payload, int64_t length)
{
    int64_t at = self->position;
    if (!at || length > self->buffer.len || at + ENTRY + ((length + 7) & ~(int64_t)7) + ENTRY > self->at) {
        PyErr_SetNone(log_full);
        return -1;
    }
    int64_t following = at + ENTRY + ((length + 7) & ~(int64_t)7);
    char bytes[COMMIT_AT];
    uint32_t row = (uint32_t)self->rows, size = (uint32_t)length, column = entry->column;
    uint16_t kind = (uint16_t)entry->kind, flags = (uint16_t)entry->flags;
    memcpy(bytes, &row, 4);
    memcpy(bytes + 4, &size, 4);
    memcpy(bytes + 8, &kind, 2);
    memcpy(bytes + 10, &flags, 2);
    memcpy(bytes + 12, &column, 4);
    memcpy(bytes + 16, entry->numbers, 32);
    put(self, at + ENTRY, payload, length);
    commit(self, following + COMMIT_AT, 0);
    put(self, at, bytes, COMMIT_AT);
    self->count += 1;
    commit(self, at + COMMIT_AT, self->tag | self->count);
    self->position = following;
    self->logged = (long long)self->rows;
    set_floor(self);
    return 0;
}

/* Appends a text, as MessagePack. Returns 0, -1 with LogFull. */
static int append_text(RowSlab *self, uint32_t column, const Value *value)
{
    Entry entry = {VALUE, 0, column, {0, 0, 0, 0}};
    unsigned char packed[MOST_TEXT + 3];
    size_t length = (size_t)value->length, head = (size_t)text_bytes(value->length) - length;
    packed[0] = (unsigned char)(head == 1 ? 0xa0 | length : head == 2 ? 0xd9 : 0xda);
    packed[1] = (unsigned char)(head == 2 ? length : length >> 8);
    packed[2] = (unsigned char)length;
    memcpy(packed + head, value->bytes, length);
    return append_entry(self, &entry, packed, (int64_t)(head + length));
}

/* Appends what has changed of a large value, which is the one before from then on. Returns 0, -1 with LogFull. */
static int append_changes(RowSlab *self, uint32_t column, const Leaf *leaf, const Value *value)
{
    Entry entry = {CHANGES, 0, column, {value->length, 0, 0, 0}};
    int64_t width = PyArray_ITEMSIZE(leaf->before);
    take_changes(PyArray_DATA(leaf->before), value->bytes, (int)width, leaf->changes, value->length,
                 (char *)(leaf->changes + value->length));
    return append_entry(self, &entry, leaf->changes, value->length * (4 + width));
}

/* Appends those leaves of an observation or action that are in the log. Returns 0, -1 with LogFull. */
static int append_parts(RowSlab *self, const Tree *tree, const Parts *parts)
{
    uint32_t column = tree->column;
    const Value *value = parts->values;
    for (int i = 0; parts->log && i < tree->count; i++) {
        if (tree->nodes[i].children != IS_LEAF) {
            continue;
        }
        const Leaf *leaf = &tree->nodes[i].leaf;
        if ((leaf->dtype == NULL && append_text(self, column, value) < 0) ||
            (leaf->large && append_changes(self, column, leaf, value) < 0)) {
            return -1;
        }
        column += 1;
        value += 1;
    }
    return 0;
}

static int append_flag(RowSlab *self, int said)
{
    Entry entry = {FLAG, 0, 0, {0, 0, 0, 0}};
    int is_terminated = said & SAYS_TERMINATED;
    entry.flags = (unsigned int)((is_terminated ? flag_terminated : 0) | (said & SAYS_TRUNCATED ? flag_truncated : 0));
    entry.numbers[0] = is_terminated ? outcome_terminated : outcome_truncated;
    entry.numbers[2] = nanoseconds(CLOCK_REALTIME);
    entry.numbers[3] = nanoseconds(MONOTONIC);
    if (append_entry(self, &entry, "", 0) < 0) {
        return -1;
    }
    self->ended = 1;
    self->floor = self->least = NEVER;
    return 0;
}

/* -- rows ----------------------------------------------------------------------------------------------------------- */

static inline void complete_row(RowSlab *self, int64_t at)
{
    commit(self, at + self->done, self->tag | (self->rows + 1));
    self->at = at - self->size;
    self->rows += 1;
}

/* Puts the leaves of fixed size where a row has them, and zeros after them. */
static void put_parts(RowSlab *self, int64_t at, const Tree *tree, const Parts *parts, int64_t room)
{
    const Value *value = parts->values;
    int64_t end = at + room;
    for (int i = 0; i < tree->count; i++) {
        const Node *node = &tree->nodes[i];
        if (node->children == IS_LEAF) {
            put(self, at, value->bytes, node->leaf.size);
            at += node->leaf.size;
            value += 1;
        }
    }
    put_padded(self, at, "", 0, end - at);
}

/* Whether there is room for a row at an offset, and so much in the log. */
static inline int has_room_for(const RowSlab *self, int64_t at, int64_t log)
{
    return at >= 0 && at >= self->position + RESERVE + log;
}

static PyObject *ask(RowSlab *self, PyObject *action)
{
    Parts parts;
    int64_t at = row_at(self);
    if (at < 0 || at < self->floor || read_parts(&self->action, action, &parts) < 0) {
        Py_RETURN_FALSE;
    }
    int accepted = has_room_for(self, at, parts.log), failed = accepted ? append_parts(self, &self->action, &parts) : 0;
    if (accepted && !failed) {
        put_parts(self, at, &self->action, &parts, self->asked);
        commit(self, at + self->asked, self->tag | (self->rows + 1));
    }
    let_go(&parts);
    return failed ? NULL : PyBool_FromLong(accepted);
}

static int read_answer(const RowSlab *self, PyObject *observation, PyObject *reward, Parts *parts, double *number)
{
    return read_reward(self, reward, number) < 0 ? -1 : read_parts(&self->observation, observation, parts);
}

/* Puts down a row with an observation; action and reward are there. Texts are in the log, from an offset on. */
static void complete_with(RowSlab *self, int64_t at, const Parts *parts, int64_t noted, int64_t noted_end)
{
    put_parts(self, at + self->reward + 8, &self->observation, parts, self->done - self->reward - 8);
    complete_row(self, at);
    self->noted = noted;
    self->noted_end = noted_end;
    self->noted_rows = self->rows;
}

static PyObject *answer(RowSlab *self, PyObject *const *args, Py_ssize_t count)
{
    double reward;
    Parts parts;
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "answer() takes observation, reward, terminated, truncated");
        return NULL;
    }
    if (!is_plain_flag(args[2]) || !is_plain_flag(args[3])) { /* asked only of what is not declined, but before it is read */
        if (read_answer(self, args[0], args[1], &parts, &reward) < 0) {
            Py_RETURN_FALSE;
        }
        let_go(&parts);
    }
    int said = read_flags(args[2], args[3]);
    if (said < 0) {
        return NULL;
    }
    if (read_answer(self, args[0], args[1], &parts, &reward) < 0) {
        Py_RETURN_FALSE;
    }
    int64_t at = row_at(self), noted = self->position, noted_end = noted;
    int accepted = self->observation.logs ? has_room_for(self, at, parts.log + 2 * ENTRY) : at >= 0, failed = 0;
    if (accepted) {
        failed = append_parts(self, &self->observation, &parts) < 0;
        noted_end = self->position;
        failed = failed || (said && append_flag(self, said) < 0);
    }
    if (accepted && !failed) {
        put(self, at + self->reward, &reward, 8);
        complete_with(self, at, &parts, noted, noted_end);
    }
    let_go(&parts);
    return failed ? NULL : PyBool_FromLong(accepted);
}

static PyObject *ask_packed(RowSlab *self, PyObject *action)
{
    Py_buffer bytes;
    if (PyObject_GetBuffer(action, &bytes, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    int64_t at = row_at(self);
    if (at >= 0) {
        put_padded(self, at, bytes.buf, bytes.len, self->asked);
        commit(self, at + self->asked, self->tag | (self->rows + 1));
    }
    PyBuffer_Release(&bytes);
    if (at < 0) {
        return no_room();
    }
    Py_RETURN_NONE;
}

static PyObject *answer_packed(RowSlab *self, PyObject *args)
{
    Py_buffer bytes;
    double number;
    PyObject *terminated, *truncated;
    if (!PyArg_ParseTuple(args, "y*dOO:answer_packed", &bytes, &number, &terminated, &truncated)) {
        return NULL;
    }
    int said = read_flags(terminated, truncated), failed = said < 0;
    int64_t at = row_at(self);
    if (!failed && at < 0) {
        no_room();
        failed = 1;
    }
    if (!failed && said) {
        failed = append_flag(self, said) < 0;
    }
    if (!failed) {
        put(self, at + self->reward, &number, 8);
        put_padded(self, at + self->reward + 8, bytes.buf, bytes.len, self->done - self->reward - 8);
        complete_row(self, at);
    }
    PyBuffer_Release(&bytes);
    if (failed) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *lead(RowSlab *self, PyObject *observation)
{
    Py_buffer bytes;
    if (PyObject_GetBuffer(observation, &bytes, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    int64_t at = row_at(self);
    if (at >= 0) {
        put_padded(self, at, "", 0, self->reward + 8); /* no action, not asked, no reward */
        put_padded(self, at + self->reward + 8, bytes.buf, bytes.len, self->done - self->reward - 8);
        complete_row(self, at);
        self->ended = 0;
    }
    PyBuffer_Release(&bytes);
    if (at < 0) {
        return no_room();
    }
    Py_RETURN_NONE;
}

/* start(episode, seed, utc, monotonic, kept, observation) */
static PyObject *start(RowSlab *self, PyObject *const *args, Py_ssize_t count)
{
    Entry entry = {START, HAS_LEAD, 0, {0, 0, 0, 0}};
    Parts parts;
    if (count != 6 || !PyBytes_CheckExact(args[4])) {
        PyErr_SetString(PyExc_TypeError, "start() takes episode, seed, two times, bytes, observation");
        return NULL;
    }
    for (int i = 0; i < 4; i++) {
        entry.numbers[i] = PyLong_AsLongLong(args[i]);
    }
    if (PyErr_Occurred()) {
        return NULL;
    }
    int64_t length = PyBytes_GET_SIZE(args[4]), at = row_at(self), noted = self->position;
    if (!self->answers || length > self->buffer.len || read_parts(&self->observation, args[5], &parts) < 0) {
        Py_RETURN_FALSE;
    }
    int accepted = has_room_for(self, at, parts.log + ENTRY + ((length + 7) & ~(int64_t)7)), failed = 0;
    if (accepted) {
        failed = append_parts(self, &self->observation, &parts) < 0;
        int64_t noted_end = self->position;
        failed = failed || append_entry(self, &entry, PyBytes_AS_STRING(args[4]), length) < 0;
        if (!failed) {
            put_padded(self, at, "", 0, self->reward + 8);
            complete_with(self, at, &parts, noted, noted_end);
            self->ended = 0;
        }
    }
    let_go(&parts);
    return failed ? NULL : PyBool_FromLong(accepted);
}

static PyObject *flag(RowSlab *self, PyObject *args)
{
    PyObject *terminated, *truncated;
    if (!PyArg_ParseTuple(args, "OO:flag", &terminated, &truncated)) {
        return NULL;
    }
    int said = read_flags(terminated, truncated);
    if (said < 0 || append_flag(self, said) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *append(RowSlab *self, PyObject *args, PyObject *names)
{
    static char *words[] = {"kind", "payload", "flags", "column", "a", "b", "c", "d", NULL};
    Entry entry = {0, 0, 0, {0, 0, 0, 0}};
    long long kind, flags = 0, column = 0, n[4] = {0, 0, 0, 0};
    Py_buffer payload = {0};
    if (!PyArg_ParseTupleAndKeywords(args, names, "L|y*LLLLLL:append", words, &kind, &payload, &flags, &column, &n[0],
                                     &n[1], &n[2], &n[3])) {
        return NULL;
    }
    int failed = kind < 0 || kind > UINT16_MAX || flags < 0 || flags > UINT16_MAX || column < 0 || column > UINT32_MAX;
    if (failed) {
        PyErr_SetString(PyExc_OverflowError, "a number does not fit an entry of the log");
    }
    else {
        entry.kind = (unsigned int)kind;
        entry.flags = (unsigned int)flags;
        entry.column = (unsigned int)column;
        for (int i = 0; i < 4; i++) {
            entry.numbers[i] = n[i];
        }
        failed = append_entry(self, &entry, payload.obj == NULL ? "" : payload.buf, payload.len);
    }
    if (payload.obj != NULL) {
        PyBuffer_Release(&payload);
    }
    if (failed) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* -- the rest of the slab ------------------------------------------------------------------------------------------- */

/* Holds other memory, a new reference to a memoryview, from now on. Returns -1 with an exception if it will not do. */
static int hold_memory(RowSlab *self, PyObject *memory)
{
    Py_buffer buffer, before = self->buffer;
    if (memory == NULL || PyObject_GetBuffer(memory, &buffer, PyBUF_WRITABLE) < 0) {
        Py_XDECREF(memory);
        return -1;
    }
    if (buffer.len < HEADER + ENTRY + 8 || buffer.len > MOST_BYTES || buffer.len % 8 || (uintptr_t)buffer.buf % 8) {
        PyErr_SetString(PyExc_ValueError, "a slab is aligned, and has room for a header");
        PyBuffer_Release(&buffer);
        Py_DECREF(memory);
        return -1;
    }
    PyObject *old = self->memory;
    self->buffer = buffer;
    self->memory = memory;
    if (before.obj != NULL) {
        PyBuffer_Release(&before);
    }
    Py_XDECREF(old);
    return 0;
}

static PyObject *begin(RowSlab *self, PyObject *args)
{
    PyObject *memory;
    unsigned long long sequence;
    if (!PyArg_ParseTuple(args, "O!K:begin", &PyMemoryView_Type, &memory, &sequence)) {
        return NULL;
    }
    if (sequence > UINT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "a sequence number has 32 bits");
        return NULL;
    }
    if (!self->size) {
        return no_room();
    }
    Py_INCREF(memory);
    if (hold_memory(self, memory) < 0) {
        return NULL;
    }
    char zeros[64] = {0};
    put(self, HEADER, zeros, 64);
    commit(self, 0, sequence);
    self->sequence = sequence;
    self->tag = (uint64_t)sequence << 32;
    self->rows = self->count = self->noted_rows = 0;
    self->logged = -1;
    self->ended = 0;
    self->only_floats = 1;
    self->at = self->buffer.len - self->size;
    self->position = HEADER;
    self->floor = self->least = NEVER;
    Py_RETURN_NONE;
}

static PyObject *hold(RowSlab *self, PyObject *Py_UNUSED(ignored))
{
    self->floor = self->least = NEVER;
    Py_RETURN_NONE;
}

static PyObject *release(RowSlab *self, PyObject *most_rows)
{
    long long most = PyLong_AsLongLong(most_rows);
    if (most == -1 && PyErr_Occurred()) {
        return NULL;
    }
    if (!self->position) {
        return no_room();
    }
    int64_t length = self->buffer.len;
    if (self->asks) {
        most = most < 0 ? 0 : most;
        self->least = most > length / self->size ? 0 : length - most * self->size;
        set_floor(self);
    }
    Py_RETURN_NONE;
}

static PyObject *has_room(RowSlab *self, PyObject *args)
{
    long long log_bytes = 0;
    if (!PyArg_ParseTuple(args, "|L:has_room", &log_bytes)) {
        return NULL;
    }
    return PyBool_FromLong(row_at(self) >= 0 && log_bytes <= MOST_BYTES &&
                           self->at >= self->position + RESERVE + log_bytes);
}

static PyObject *only_floats(RowSlab *self, PyObject *only)
{
    int is_true = PyObject_IsTrue(only);
    if (is_true < 0) {
        return NULL;
    }
    self->only_floats = (char)is_true;
    Py_RETURN_NONE;
}

static PyObject *drop(RowSlab *self, PyObject *most)
{
    unsigned long long count = PyLong_AsUnsignedLongLong(most);
    if (count == (unsigned long long)-1 && PyErr_Occurred()) {
        return NULL;
    }
    int64_t at = HEADER;
    uint32_t row = 0, length;
    for (unsigned long long i = 0; i < count && at + ENTRY <= self->position; i++) {
        memcpy(&row, (const char *)self->buffer.buf + at, 4);
        memcpy(&length, (const char *)self->buffer.buf + at + 4, 4);
        at += ENTRY + (((int64_t)length + 7) & ~(int64_t)7);
    }
    if (!self->position || count > self->count || at > self->position) {
        PyErr_SetString(PyExc_ValueError, "there are not so many entries in the log");
        return NULL;
    }
    commit(self, at + COMMIT_AT, 0);
    self->position = at;
    self->noted_rows = at < self->noted_end ? 0 : self->noted_rows;
    self->count = count;
    self->logged = count ? (long long)row : -1;
    set_floor(self);
    if (row_at(self) >= at + ENTRY) {
        commit(self, self->at + self->asked, 0);
        commit(self, self->at + self->done, 0);
    }
    Py_RETURN_NONE;
}

static PyObject *asked(RowSlab *self, PyObject *Py_UNUSED(ignored))
{
    uint64_t mark;
    int64_t at = row_at(self);
    if (at < self->position + ENTRY) {
        Py_RETURN_NONE;
    }
    const char *row = (const char *)self->buffer.buf + at;
    memcpy(&mark, row + self->asked, 8);
    if (mark != (self->tag | (self->rows + 1))) {
        Py_RETURN_NONE;
    }
    return PyBytes_FromStringAndSize(row, self->asked);
}

static PyObject *last_row(RowSlab *self, PyObject *Py_UNUSED(ignored))
{
    if (!self->rows) {
        return PyBytes_FromStringAndSize(NULL, 0);
    }
    const char *row = (const char *)self->buffer.buf + self->at + self->size;
    return PyBytes_FromStringAndSize(row + self->reward + 8, self->done - self->reward - 8);
}

static PyObject *last_texts(RowSlab *self, PyObject *Py_UNUSED(ignored))
{
    PyObject *texts = PyDict_New();
    int is_noted = self->rows && self->noted_rows == self->rows;
    for (int64_t at = self->noted; texts != NULL && is_noted && at + ENTRY <= self->noted_end;) {
        uint32_t length, column;
        uint16_t kind;
        const char *entry = (const char *)self->buffer.buf + at;
        memcpy(&length, entry + 4, 4);
        memcpy(&kind, entry + 8, 2);
        memcpy(&column, entry + 12, 4);
        at += ENTRY + (((int64_t)length + 7) & ~(int64_t)7);
        if (at > self->noted_end) {
            break;
        }
        if (kind != VALUE) {
            continue;
        }
        PyObject *number = PyLong_FromUnsignedLong(column);
        PyObject *text = PyBytes_FromStringAndSize(entry + ENTRY, (Py_ssize_t)length);
        if (number == NULL || text == NULL || PyDict_SetItem(texts, number, text) < 0) {
            Py_CLEAR(texts);
        }
        Py_XDECREF(number);
        Py_XDECREF(text);
    }
    return texts;
}

static PyObject *entries(RowSlab *self, PyObject *Py_UNUSED(ignored))
{
    if (self->memory == NULL) {
        return PyList_New(0);
    }
    PyObject *found = PyObject_CallFunction(log_entries, "OiLK", self->memory, HEADER, (long long)self->position,
                                            self->sequence);
    PyObject *list = found == NULL ? NULL : PySequence_List(found);
    Py_XDECREF(found);
    return list;
}

static PyObject *orphan(RowSlab *self, PyObject *Py_UNUSED(ignored))
{
    if (self->memory != NULL) {
        PyObject *copy = PyByteArray_FromStringAndSize(self->buffer.buf, self->buffer.len);
        PyObject *memory = copy == NULL ? NULL : PyMemoryView_FromObject(copy);
        Py_XDECREF(copy);
        if (hold_memory(self, memory) < 0) {
            return NULL;
        }
    }
    Py_RETURN_NONE;
}

/* -- large values by themselves ------------------------------------------------------------------------------------- */

static PyObject *changed_words(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t given)
{
    long long most = given == 3 ? PyLong_AsLongLong(args[2]) : 0;
    if (most == -1 && PyErr_Occurred()) {
        return NULL;
    }
    PyArrayObject *old = given == 3 && PyArray_CheckExact(args[0]) ? (PyArrayObject *)args[0] : NULL;
    PyArrayObject *new = given == 3 && PyArray_CheckExact(args[1]) ? (PyArrayObject *)args[1] : NULL;
    if (old == NULL || new == NULL || !PyArray_ISCARRAY(old) || !PyArray_IS_C_CONTIGUOUS(new) ||
        PyDataType_REFCHK(PyArray_DESCR(old)) || PyDataType_REFCHK(PyArray_DESCR(new)) ||
        PyArray_NBYTES(old) != PyArray_NBYTES(new) || PyArray_NBYTES(old) > UINT32_MAX || most < 0) {
        PyErr_SetString(PyExc_TypeError, "two contiguous arrays of as many bytes are needed, and a number");
        return NULL;
    }
    int64_t bytes = PyArray_NBYTES(old);
    int width = (int)PyArray_ITEMSIZE(old);
    if ((width != 1 && width != 2 && width != 4 && width != 8) || bytes % width) {
        PyErr_SetString(PyExc_TypeError, "words have 1, 2, 4 or 8 bytes");
        return NULL;
    }
    most = most < bytes / width ? most : bytes / width;
    uint32_t *places = PyMem_Malloc((size_t)(most ? most : 1) * sizeof(uint32_t));
    if (places == NULL) {
        return PyErr_NoMemory();
    }
    char *before = PyArray_DATA(old);
    const char *value = PyArray_DATA(new);
    int64_t count = find_changes(before, value, bytes, width, places, most);
    PyObject *changes = NULL;
    if (count >= 0) {
        changes = PyBytes_FromStringAndSize(NULL, count * (4 + width));
    }
    if (changes != NULL) {
        memcpy(PyBytes_AS_STRING(changes), places, (size_t)count * 4);
        take_changes(before, value, width, places, count, PyBytes_AS_STRING(changes) + count * 4);
    }
    PyMem_Free(places);
    if (count < 0) {
        Py_RETURN_NONE;
    }
    return changes;
}

/* -- the type ------------------------------------------------------------------------------------------------------- */

static int read_number(PyObject *object, const char *name, int64_t *number)
{
    PyObject *found = PyObject_GetAttrString(object, name);
    *number = found == NULL ? -1 : PyLong_AsLongLong(found);
    Py_XDECREF(found);
    return PyErr_Occurred() ? -1 : 0;
}

static void forget_before(Leaf *leaf)
{
    Py_CLEAR(leaf->before);
    Py_CLEAR(leaf->ready);
    PyMem_Free(leaf->changes);
    leaf->changes = NULL;
}

static void forget_tree(Tree *tree)
{
    for (int i = 0; i < MOST_NODES; i++) {
        Py_CLEAR(tree->nodes[i].leaf.dtype);
        Py_CLEAR(tree->nodes[i].keys);
        forget_before(&tree->nodes[i].leaf);
        tree->nodes[i].leaf.large = tree->nodes[i].leaf.size = 0;
    }
    tree->count = 0;
    tree->size = 0;
}

/* Reads dtype and shape of a leaf. Returns 1 if its values are known here, otherwise 0; -1 with an exception. */
static int read_leaf(PyObject *layout, Leaf *leaf)
{
    PyObject *dtype = PyObject_GetAttrString(layout, "dtype");
    PyObject *shape = dtype == NULL ? NULL : PyObject_GetAttrString(layout, "shape");
    int known = shape == NULL ? -1 : dtype == Py_None;
    if (known || !PyArray_DescrCheck(dtype) || !is_number((PyArray_Descr *)dtype) || !PyTuple_Check(shape) ||
        PyTuple_GET_SIZE(shape) > MOST_DIMENSIONS) {
        goto done;
    }
    PyArray_Descr *type = (PyArray_Descr *)dtype;
    int64_t size = PyDataType_ELSIZE(type);
    leaf->dimensions = (int)PyTuple_GET_SIZE(shape);
    for (int i = 0; i < leaf->dimensions; i++) {
        npy_intp length = PyLong_AsSsize_t(PyTuple_GET_ITEM(shape, i));
        if (length < 0 || (length && size > MOST_BYTES / length)) {
            known = PyErr_Occurred() ? -1 : 0;
            goto done;
        }
        leaf->shape[i] = length;
        size *= length;
    }
    known = 1;
    leaf->size = size;
    leaf->dtype = type;
    Py_INCREF(type);
    leaf->scalar = leaf->dimensions == 0 && PyArray_ISNBO(type->byteorder) ? type->typeobj : NULL;
done:
    Py_XDECREF(dtype);
    Py_XDECREF(shape);
    return known;
}

/* The keys of a Dict as a tuple; None of anything else than texts and integers, and of a Tuple. */
static PyObject *read_keys(PyObject *layout)
{
    PyObject *keys = PyObject_GetAttrString(layout, "keys");
    PyObject *tuple = keys == NULL || keys == Py_None ? NULL : PySequence_Tuple(keys);
    Py_XDECREF(keys);
    return tuple;
}

/* Reads a node of a layout and those below it. Returns 1 if all are known here, otherwise 0; -1 with an exception. */
static int read_node(PyObject *layout, PyObject *deltas, Tree *tree)
{
    if (tree->count == MOST_NODES) {
        return 0;
    }
    Node *node = &tree->nodes[tree->count++];
    int is_leaf = PyObject_IsInstance(layout, leaf_type);
    if (is_leaf) {
        int is_delta = is_leaf < 0 ? -1 : PySequence_Contains(deltas, layout);
        node->children = IS_LEAF;
        int known = is_delta < 0 ? -1 : read_leaf(layout, &node->leaf);
        if (known > 0 && is_delta) {
            node->leaf.large = node->leaf.size;
            node->leaf.size = 0;
        }
        tree->size += node->leaf.size;
        return tree->size > MOST_BYTES ? 0 : known;
    }
    PyObject *children = PyObject_GetAttrString(layout, "children");
    PyObject *below = children == NULL ? NULL : PySequence_Tuple(children);
    Py_XDECREF(children);
    node->keys = below == NULL ? NULL : read_keys(layout);
    node->children = below == NULL ? 0 : PyTuple_GET_SIZE(below);
    int known = PyErr_Occurred() ? -1 : node->keys == NULL || PyTuple_GET_SIZE(node->keys) == node->children;
    for (Py_ssize_t i = 0; known > 0 && node->keys != NULL && i < node->children; i++) {
        PyObject *key = PyTuple_GET_ITEM(node->keys, i);
        known = PyUnicode_CheckExact(key) || PyLong_CheckExact(key);
    }
    for (Py_ssize_t i = 0; known > 0 && i < node->children; i++) {
        known = read_node(PyTuple_GET_ITEM(below, i), deltas, tree);
    }
    Py_XDECREF(below);
    return known;
}

static int read_tree(PyObject *layout, const char *name, Tree *tree)
{
    forget_tree(tree);
    PyObject *root = PyObject_GetAttrString(layout, name);
    PyObject *deltas = root == NULL ? NULL : PyObject_GetAttrString(layout, "delta_leaves");
    int known = deltas == NULL ? -1 : read_node(root, deltas, tree);
    if (known <= 0) {
        forget_tree(tree);
    }
    tree->logs = tree->count != 1 || tree->nodes[0].leaf.dtype == NULL || tree->nodes[0].leaf.large;
    Py_XDECREF(root);
    Py_XDECREF(deltas);
    return known < 0 ? -1 : 0;
}

/* The leaf of a column; NULL if it is not one that is known here. */
static Leaf *leaf_of(Tree *tree, long long column)
{
    for (int i = 0, leaf = 0; i < tree->count; i++) {
        if (tree->nodes[i].children == IS_LEAF && tree->column + leaf++ == column) {
            return &tree->nodes[i].leaf;
        }
    }
    return NULL;
}

/* follow(column, before, ready, most) */
static PyObject *follow(RowSlab *self, PyObject *args)
{
    long long column, most;
    PyArrayObject *before, *ready;
    if (!PyArg_ParseTuple(args, "LO!O!L:follow", &column, &PyArray_Type, &before, &PyArray_Type, &ready, &most)) {
        return NULL;
    }
    Leaf *leaf = leaf_of(&self->observation, column);
    leaf = leaf == NULL ? leaf_of(&self->action, column) : leaf;
    if (leaf == NULL) {
        Py_RETURN_NONE;
    }
    npy_intp width = PyArray_ITEMSIZE(before);
    if (!leaf->large || !PyArray_ISCARRAY(before) || !is_number(PyArray_DESCR(before)) ||
        PyArray_NBYTES(before) != leaf->large || leaf->large > UINT32_MAX ||
        (width != 1 && width != 2 && width != 4 && width != 8) || PyArray_TYPE(ready) != NPY_BOOL ||
        PyArray_SIZE(ready) != 1 || most < 0 || most > leaf->large / width) {
        PyErr_SetString(PyExc_ValueError, "there is no large value of this kind");
        return NULL;
    }
    forget_before(leaf);
    leaf->changes = PyMem_Malloc((size_t)(most ? most : 1) * (size_t)(4 + width));
    if (leaf->changes == NULL) {
        return PyErr_NoMemory();
    }
    leaf->before = (PyArrayObject *)Py_NewRef(before);
    leaf->ready = (PyArrayObject *)Py_NewRef(ready);
    leaf->most = most;
    Py_RETURN_NONE;
}

static int init(RowSlab *self, PyObject *args, PyObject *names)
{
    static char *words[] = {"layout", "asks", "answers", NULL};
    PyObject *layout;
    int asks = 1, answers = 1;
    if (self->size) {
        PyErr_SetString(PyExc_TypeError, "a slab is made once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, names, "O|pp:RowSlab", words, &layout, &asks, &answers)) {
        return -1;
    }
    int64_t size, column;
    if (read_number(layout, "size", &size) || read_number(layout, "action_column", &column) || read_number(layout, "asked", &self->asked) ||
        read_number(layout, "reward", &self->reward) || read_number(layout, "done", &self->done) ||
        read_tree(layout, "action", &self->action) || read_tree(layout, "observation", &self->observation)) {
        return -1;
    }
    int64_t asked = self->asked, reward = self->reward, done = self->done;
    if (asked < 0 || asked % 8 || asked > MOST_BYTES || reward != asked + 8 || done < reward + 8 || done % 8 ||
        done > MOST_BYTES || size != done + 8 || column < 0 || column > UINT32_MAX || (self->action.count && self->action.size > asked) ||
        (self->observation.count && self->observation.size > done - reward - 8)) {
        PyErr_SetString(PyExc_ValueError, "there are no rows of this layout");
        return -1;
    }
    self->size = size;
    self->action.column = (uint32_t)column;
    self->asks = (char)asks;
    self->answers = (char)answers;
    self->logged = -1;
    self->floor = self->least = NEVER;
    return 0;
}

static void dealloc(RowSlab *self)
{
    forget_tree(&self->action);
    forget_tree(&self->observation);
    if (self->memory != NULL) {
        PyBuffer_Release(&self->buffer);
        Py_DECREF(self->memory);
    }
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef methods[] = {
    {"begin", (PyCFunction)begin, METH_VARARGS, NULL},
    {"follow", (PyCFunction)follow, METH_VARARGS, NULL},
    {"hold", (PyCFunction)hold, METH_NOARGS, NULL},
    {"release", (PyCFunction)release, METH_O, NULL},
    {"has_room", (PyCFunction)has_room, METH_VARARGS, NULL},
    {"only_floats", (PyCFunction)only_floats, METH_O, NULL},
    {"ask", (PyCFunction)ask, METH_O, NULL},
    {"answer", (PyCFunction)(void (*)(void))answer, METH_FASTCALL, NULL},
    {"ask_packed", (PyCFunction)ask_packed, METH_O, NULL},
    {"answer_packed", (PyCFunction)answer_packed, METH_VARARGS, NULL},
    {"lead", (PyCFunction)lead, METH_O, NULL},
    {"start", (PyCFunction)(void (*)(void))start, METH_FASTCALL, NULL},
    {"flag", (PyCFunction)flag, METH_VARARGS, NULL},
    {"append", (PyCFunction)(void (*)(void))append, METH_VARARGS | METH_KEYWORDS, NULL},
    {"drop", (PyCFunction)drop, METH_O, NULL},
    {"asked", (PyCFunction)asked, METH_NOARGS, NULL},
    {"last_row", (PyCFunction)last_row, METH_NOARGS, NULL},
    {"last_texts", (PyCFunction)last_texts, METH_NOARGS, NULL},
    {"entries", (PyCFunction)entries, METH_NOARGS, NULL},
    {"orphan", (PyCFunction)orphan, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"rows", T_ULONGLONG, offsetof(RowSlab, rows), READONLY, NULL},
    {"logged", T_LONGLONG, offsetof(RowSlab, logged), READONLY, NULL},
    {"sequence", T_ULONGLONG, offsetof(RowSlab, sequence), READONLY, NULL},
    {"memory", T_OBJECT_EX, offsetof(RowSlab, memory), READONLY, NULL},
    {"ended", T_BOOL, offsetof(RowSlab, ended), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject RowSlabType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "gym_trace.recording._core.RowSlab",
    .tp_doc = "The slab that is being filled with rows, as gym_trace.ring.row_slab.RowSlab.",
    .tp_basicsize = sizeof(RowSlab),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)init,
    .tp_dealloc = (destructor)dealloc,
    .tp_methods = methods,
    .tp_members = members,
};

/* -- generators ----------------------------------------------------------------------------------------------------- */

/* As NumPy has it where the compiler knows integers of 128 bits; gym_trace.recording.core looks whether that is so. */
typedef struct {
    struct {
        uint64_t state[2], inc[2];
    } *numbers;
    int has_uint32;
    uint32_t uinteger;
} PCG64;

/* pcg64_state(bit generator, parts): what lies between the numbers is in parts; None of anything but a PCG64. */
static PyObject *pcg64_state(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    char bytes[512], *at = bytes;
    if (count != 2 || !PyTuple_CheckExact(args[1]) || PyTuple_GET_SIZE(args[1]) != 4) {
        PyErr_SetString(PyExc_TypeError, "pcg64_state() takes a bit generator and four parts");
        return NULL;
    }
    if (Py_TYPE(args[0]) != (PyTypeObject *)pcg64_type) {
        Py_RETURN_NONE;
    }
    PyObject *capsule = PyObject_GetAttrString(args[0], "capsule");
    bitgen_t *generator = capsule == NULL ? NULL : PyCapsule_GetPointer(capsule, "BitGenerator");
    Py_XDECREF(capsule); /* the generator holds it */
    if (generator == NULL) {
        return NULL;
    }
    const PCG64 *pcg = generator->state;
    for (int i = 0; i < 4; i++) {
        PyObject *part = PyTuple_GET_ITEM(args[1], i);
        if (!PyBytes_CheckExact(part) || PyBytes_GET_SIZE(part) > 64) {
            PyErr_SetString(PyExc_TypeError, "parts are of at most 64 bytes");
            return NULL;
        }
        memcpy(at, PyBytes_AS_STRING(part), (size_t)PyBytes_GET_SIZE(part));
        at += PyBytes_GET_SIZE(part);
        if (i < 2) {
            memcpy(at, i ? pcg->numbers->inc : pcg->numbers->state, 16);
            at[16] = 0;
            at += 17;
        } else if (i == 2) {
            *at++ = pcg->has_uint32 ? 1 : 0;
        } else {
            for (int shift = 24; shift >= 0; shift -= 8) {
                *at++ = (char)(pcg->uinteger >> shift);
            }
        }
    }
    return PyBytes_FromStringAndSize(bytes, at - bytes);
}

static PyObject *found_in(const char *module, const char *name)
{
    PyObject *home = PyImport_ImportModule(module);
    PyObject *found = home == NULL ? NULL : PyObject_GetAttrString(home, name);
    Py_XDECREF(home);
    return found;
}

static long number_in(const char *module, const char *name)
{
    PyObject *found = found_in(module, name);
    long number = found == NULL ? -1 : PyLong_AsLong(found);
    Py_XDECREF(found);
    return number;
}

/* -- lanes ---------------------------------------------------------------------------------------------------------- */

enum { MOST_COPIED = 256 << 10 }; /* bytes at once: NumPy lets go of the interpreter lock while it copies more */

/* Whether a batch is an array just like an item of a column. */
static int is_like_item(PyObject *column, PyObject *batch)
{
    if (!PyArray_CheckExact(column) || !PyArray_CheckExact(batch)) {
        return 0;
    }
    PyArrayObject *items = (PyArrayObject *)column, *array = (PyArrayObject *)batch;
    PyArray_Descr *dtype = PyArray_DESCR(array), *other = PyArray_DESCR(items);
    int dimensions = PyArray_NDIM(array);
    return (dtype == other || (is_number(dtype) && PyArray_EquivTypes(dtype, other))) && is_number(other) &&
           PyArray_NDIM(items) == dimensions + 1 &&
           PyArray_CompareLists(PyArray_DIMS(array), PyArray_DIMS(items) + 1, dimensions);
}

/* The bytes of a row of a batch, if items of the column have rows without gaps; otherwise 0. */
static npy_intp bytes_in_a_row(PyArrayObject *column, PyArrayObject *batch)
{
    npy_intp bytes = PyArray_ITEMSIZE(batch);
    if (PyArray_NDIM(batch) < 1 || !PyArray_ISWRITEABLE(column)) {
        return 0;
    }
    for (int i = PyArray_NDIM(column) - 1; i > 1; i--) {
        if (PyArray_STRIDE(column, i) != bytes) {
            return 0;
        }
        bytes *= PyArray_DIM(column, i);
    }
    return bytes;
}

/* Copies a matrix that is not in order, as those are that were made column by column: NumPy takes several times as long. */
static inline __attribute__((always_inline)) void put_matrix(char *to, npy_intp stride, PyArrayObject *batch, const int width)
{
    const char *from = PyArray_BYTES(batch);
    npy_intp rows = PyArray_DIM(batch, 0), items = PyArray_DIM(batch, 1);
    npy_intp down = PyArray_STRIDE(batch, 0), across = PyArray_STRIDE(batch, 1);
    for (npy_intp j = 0; j < items; j++) {
        for (npy_intp i = 0; i < rows; i++) {
            memcpy(to + i * stride + j * width, from + i * down + j * across, (size_t)width);
        }
    }
}

static int put_batch(PyArrayObject *column, PyObject *time, npy_intp item, PyArrayObject *batch)
{
    npy_intp bytes = bytes_in_a_row(column, batch), width = PyArray_ITEMSIZE(batch);
    int is_matrix = PyArray_NDIM(batch) == 2 && (width == 4 || width == 8);
    if (!bytes || !(PyArray_IS_C_CONTIGUOUS(batch) || is_matrix) || PyArray_NBYTES(batch) > MOST_COPIED) {
        return PyObject_SetItem((PyObject *)column, time, (PyObject *)batch);
    }
    char *to = PyArray_BYTES(column) + item * PyArray_STRIDE(column, 0);
    const char *from = PyArray_BYTES(batch);
    npy_intp count = PyArray_DIM(batch, 0), stride = PyArray_STRIDE(column, 1);
    if (!PyArray_IS_C_CONTIGUOUS(batch)) {
        width == 4 ? put_matrix(to, stride, batch, 4) : put_matrix(to, stride, batch, 8);
        return 0;
    }
    if (stride == bytes) {
        memmove(to, from, (size_t)(bytes * count));
        return 0;
    }
    for (npy_intp i = 0; i < count; i++) {
        memcpy(to + i * stride, from + i * bytes, (size_t)bytes);
    }
    return 0;
}

/* put_batches(columns, time, batches), as in gym_trace/ring/lanes/slab.py. */
static PyObject *put_batches(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 3 || !PyTuple_CheckExact(args[0]) || !PyList_CheckExact(args[2]) ||
        PyTuple_GET_SIZE(args[0]) != PyList_GET_SIZE(args[2])) {
        PyErr_SetString(PyExc_TypeError, "put_batches() takes a tuple of columns, a time, a list of as many batches");
        return NULL;
    }
    Py_ssize_t time = PyLong_AsSsize_t(args[1]), number = PyTuple_GET_SIZE(args[0]);
    if (time == -1 && PyErr_Occurred()) {
        return NULL;
    }
    for (Py_ssize_t i = 0; i < number; i++) {
        PyObject *column = PyTuple_GET_ITEM(args[0], i);
        if (!is_like_item(column, PyList_GET_ITEM(args[2], i))) {
            Py_RETURN_FALSE;
        }
        if (time < 0 || time >= PyArray_DIM((PyArrayObject *)column, 0)) {
            PyErr_SetString(PyExc_IndexError, "the columns have no such time");
            return NULL;
        }
    }
    for (Py_ssize_t i = 0; i < number; i++) {
        PyArrayObject *column = (PyArrayObject *)PyTuple_GET_ITEM(args[0], i);
        if (put_batch(column, args[1], time, (PyArrayObject *)PyList_GET_ITEM(args[2], i)) < 0) {
            return NULL;
        }
    }
    Py_RETURN_TRUE;
}

static PyMethodDef functions[] = {
    {"put_batches", (PyCFunction)(void (*)(void))put_batches, METH_FASTCALL, NULL},
    {"pcg64_state", (PyCFunction)(void (*)(void))pcg64_state, METH_FASTCALL, NULL},
    {"changed_words", (PyCFunction)(void (*)(void))changed_words, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_core", .m_size = -1, .m_methods = functions};

PyMODINIT_FUNC PyInit__core(void)
{
    import_array();
    pcg64_type = found_in("numpy.random", "PCG64");
    log_full = found_in("gym_trace.ring.log", "LogFull");
    log_entries = found_in("gym_trace.ring.log", "entries");
    leaf_type = found_in("gym_trace.model.layout", "Leaf");
    flag_terminated = number_in("gym_trace.format.wire", "TERMINATED");
    flag_truncated = number_in("gym_trace.format.wire", "TRUNCATED");
    PyObject *outcomes = found_in("gym_trace.model.vocabulary", "Outcome");
    if (PyErr_Occurred()) {
        return NULL;
    }
    PyObject *terminated = PyObject_GetAttrString(outcomes, "TERMINATED");
    PyObject *truncated = PyObject_GetAttrString(outcomes, "TRUNCATED");
    outcome_terminated = terminated == NULL ? -1 : PyLong_AsLong(terminated);
    outcome_truncated = truncated == NULL ? -1 : PyLong_AsLong(truncated);
    Py_XDECREF(terminated);
    Py_XDECREF(truncated);
    Py_DECREF(outcomes);
    if (PyErr_Occurred() || PyType_Ready(&RowSlabType) < 0) {
        return NULL;
    }
    PyObject *core = PyModule_Create(&module);
    if (core == NULL || PyModule_AddIntConstant(core, "ABI", ABI) < 0 ||
        PyModule_AddObjectRef(core, "RowSlab", (PyObject *)&RowSlabType) < 0) {
        Py_XDECREF(core);
        return NULL;
    }
    return core;
}
