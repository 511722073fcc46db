/* Reads observations, actions, rewards and flags, or falls back to Python. */
#pragma once
#include "changes.h"

/* Returns 1 for NumPy's own numeric dtypes, which can be compared and copied without running user code. */
static inline int is_number(const PyArray_Descr *dtype)
{
    return PyTypeNum_ISNUMBER(dtype->type_num) || PyTypeNum_ISBOOL(dtype->type_num);
}

/* Returns 1 if an array has the dtype and shape of a leaf. */
static inline int fits(const Leaf *leaf, PyArrayObject *array)
{
    PyArray_Descr *dtype = PyArray_DESCR(array);
    if (dtype != leaf->dtype && !(is_number(dtype) && PyArray_EquivTypes(dtype, leaf->dtype))) {
        return 0;
    }
    int same = PyArray_NDIM(array) == leaf->dimensions;
    for (int i = 0; same && i < leaf->dimensions; i++) {
        same = PyArray_DIM(array, i) == leaf->shape[i];
    }
    return same;
}

/* The bytes of a value. */
typedef struct {
    const void *bytes;
    int64_t length;  /* length of a text, or number of changed words */
    PyObject *held;  /* owner of the bytes, if only this reference keeps it alive */
    char scalar[32]; /* bytes of a scalar: at most two long doubles */
} Value;

/* Reads a Python int for an integer leaf. */
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
    } else if (overflow || (!is_signed && number < 0)) {
        return -1;
    } else if (bits < 64) {
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
    if (value->bytes == NULL) { /* contains surrogates */
        PyErr_Clear();
        return -1;
    }
    value->length = length;
    return length > MOST_TEXT ? -1 : 0;
}

/* Finds the changed words of a large value. Returns -1 if Python must store the value. */
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

/* Reads a value that has exactly the type of its leaf.
 * Returns -1, without holding a reference, for any other value: Python handles it. */
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

/* Returns the size of a text as MessagePack. */
static inline int64_t text_bytes(int64_t length)
{
    return length + (length < 32 ? 1 : length < 256 ? 2 : 3);
}

/* Returns the bytes that a value takes in the log. */
static inline int64_t log_bytes(const Leaf *leaf, const Value *value)
{
    if (leaf->dtype != NULL && !leaf->large) {
        return 0;
    }
    int64_t bytes = leaf->large ? value->length * (4 + PyArray_ITEMSIZE(leaf->before)) : text_bytes(value->length);
    return entry_bytes(bytes);
}

/* The values of the leaves of an observation or action. */
typedef struct {
    int count;
    int64_t log; /* their log bytes */
    Value values[MOST_NODES];
} Parts;

static void release_parts(Parts *parts)
{
    for (int i = 0; i < parts->count; i++) {
        Py_XDECREF(parts->values[i].held);
    }
}

/* Returns 1 if looking up a str or int in a dict runs no user code. */
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

/* Appends the values of the leaves below a node to leaves; runs no user code.
 * Returns -1 if the value has another structure. */
static int find_leaves(const Tree *tree, int *next, PyObject *object, PyObject **leaves, int *count)
{
    const Node *node = &tree->nodes[(*next)++];
    if (node->children == IS_LEAF) {
        leaves[(*count)++] = object;
        return 0;
    }
    if (node->keys != NULL) {
        if (!PyDict_CheckExact(object) || PyDict_GET_SIZE(object) != node->children || !has_plain_keys(object)) {
            return -1;
        }
    } else if (!(PyTuple_CheckExact(object) || PyList_CheckExact(object)) ||
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
        if (find_leaves(tree, next, part, leaves, count) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Finds the values of all leaves, as borrowed references.
 * Returns their number; -1 if the value has another structure. */
static int leaves_of(const Tree *tree, PyObject *object, PyObject **leaves)
{
    int next = 0, count = 0;
    return !tree->count || find_leaves(tree, &next, object, leaves, &count) < 0 ? -1 : count;
}

/* Reads an observation or action whose leaves all have exactly their types.
 * Returns -1, without holding a reference, for any other: Python handles it. */
static int read_parts(const Tree *tree, PyObject *object, Parts *parts)
{
    PyObject *leaves[MOST_NODES];
    parts->count = 0;
    parts->log = 0;
    if (!tree->logs) { /* the usual case, faster */
        parts->count = read_value(&tree->nodes[0].leaf, object, &parts->values[0]) == 0;
        return parts->count - 1;
    }
    int found = leaves_of(tree, object, leaves);
    for (int i = 0; parts->count < found; i++) {
        const Node *node = &tree->nodes[i];
        if (node->children != IS_LEAF) {
            continue;
        }
        Value *value = &parts->values[parts->count];
        if (read_value(&node->leaf, leaves[parts->count], value) < 0) {
            release_parts(parts);
            return -1;
        }
        parts->count += 1;
        parts->log += log_bytes(&node->leaf, value);
    }
    return found < 0 ? -1 : 0;
}

static int read_reward(const RowSlab *self, PyObject *reward, double *number)
{
    if (!self->only_floats || !self->fast_results) {
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

/* Returns 1 if testing the truth of an object runs no user code. */
static inline int is_plain_flag(PyObject *flag)
{
    return PyBool_Check(flag) || Py_TYPE(flag) == &PyBoolArrType_Type;
}

/* Reads both flags. Returns FRAGMENT_TERMINATED | FRAGMENT_TRUNCATED; -1 with an exception. */
static inline int read_flags(PyObject *terminated, PyObject *truncated)
{
    int first = terminated == Py_False ? 0 : PyObject_IsTrue(terminated);
    int second = first < 0 ? -1 : truncated == Py_False ? 0 : PyObject_IsTrue(truncated);
    return second < 0 ? -1 : first * FRAGMENT_TERMINATED | second * FRAGMENT_TRUNCATED;
}
