/* LaneSlab of gym_trace/format/ring/lanes/slab.py in C: same methods, same results, same bytes in the slab. */
#pragma once
#include "batches.h"
#include "layout.h"
#include "state.h"

enum { MOST_BATCHES = MOST_NODES + 3 };

typedef struct {
    PyObject_HEAD
    Tree action, observation;
    PyObject *memory; /* a memoryview */
    Py_buffer buffer; /* buffer of memory, held as long as memory */
    uint64_t tag;     /* sequence number, shifted to its position in marks */
    uint64_t count;   /* number of log entries */
    unsigned long long sequence, steps;
    long long position, end, last; /* offsets in the log: see the Python twin */
    long long until, times;
    PyObject *actions, *results; /* tuples of columns, time first; NULL: record_action() falls back */
    unsigned int code;           /* type of the rewards: type_code() in Python */
    char same_step, is_disabled, is_waiting;
} LaneSlab;

static int lane_init(LaneSlab *self, PyObject *args, PyObject *names)
{
    static char *words[] = {"observation", "action", "times", "same_step", NULL};
    PyObject *observation, *action;
    long long times;
    int same_step;
    if (self->times) {
        PyErr_SetString(PyExc_TypeError, "LaneSlab can be initialized only once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, names, "OOLp:LaneSlab", words, &observation, &action, &times, &same_step)) {
        return -1;
    }
    if (times < 1 || times > UINT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "a slab has 1 to 2**32 - 1 steps");
        return -1;
    }
    PyObject *no_deltas = PyTuple_New(0);
    int failed = no_deltas == NULL || read_root(observation, no_deltas, &self->observation) < 0 ||
                 read_root(action, no_deltas, &self->action) < 0;
    Py_XDECREF(no_deltas);
    if (failed) {
        return -1;
    }
    self->times = times;
    self->same_step = (char)same_step;
    self->is_disabled = 1;
    return 0;
}

static void lane_dealloc(LaneSlab *self)
{
    forget_tree(&self->action);
    forget_tree(&self->observation);
    Py_XDECREF(self->actions);
    Py_XDECREF(self->results);
    if (self->memory != NULL) {
        PyBuffer_Release(&self->buffer);
        Py_DECREF(self->memory);
    }
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* begin(memory, sequence, log) */
static PyObject *lane_begin(LaneSlab *self, PyObject *args)
{
    PyObject *memory;
    unsigned long long sequence;
    long long log;
    if (!PyArg_ParseTuple(args, "O!KL:begin", &PyMemoryView_Type, &memory, &sequence, &log)) {
        return NULL;
    }
    if (sequence > UINT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "sequence number exceeds 32 bits");
        return NULL;
    }
    Py_ssize_t length = PyMemoryView_GET_BUFFER(memory)->len;
    if (log < SLAB_HEADER || log % 8 || log > length - ENTRY) {
        PyErr_SetString(PyExc_ValueError, "no room for a log");
        return NULL;
    }
    Py_INCREF(memory);
    if (hold_memory(&self->memory, &self->buffer, memory) < 0) {
        return NULL;
    }
    Py_CLEAR(self->actions);
    Py_CLEAR(self->results);
    begin_memory(&self->buffer, sequence);
    commit(&self->buffer, log + COMMIT_AT, 0);
    self->sequence = sequence;
    self->tag = (uint64_t)sequence << 32;
    self->count = self->steps = 0;
    self->position = log;
    self->end = self->last = self->buffer.len;
    self->is_waiting = 0;
    self->is_disabled = 1;
    Py_RETURN_NONE;
}

/* expect(actions, results, code) */
static PyObject *lane_expect(LaneSlab *self, PyObject *args)
{
    PyObject *actions, *results;
    long code;
    if (!PyArg_ParseTuple(args, "O!O!l:expect", &PyTuple_Type, &actions, &PyTuple_Type, &results, &code)) {
        return NULL;
    }
    if (code < 0 || code > UINT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "number out of range for a type of rewards");
        return NULL;
    }
    Py_XSETREF(self->actions, Py_NewRef(actions));
    Py_XSETREF(self->results, Py_NewRef(results));
    self->code = (unsigned int)code;
    Py_RETURN_NONE;
}

static PyObject *lane_disable_fast_path(LaneSlab *self, PyObject *Py_UNUSED(ignored))
{
    self->is_disabled = 1;
    Py_RETURN_NONE;
}

static PyObject *lane_enable_fast_path(LaneSlab *self, PyObject *until)
{
    long long time = PyLong_AsLongLong(until);
    if (time == -1 && PyErr_Occurred()) {
        return NULL;
    }
    self->until = time;
    self->is_disabled = 0;
    Py_RETURN_NONE;
}

/* Appends an entry; sets its row, length and mark. Returns 0; -1 with LogFull(bytes). */
static int lane_append_entry(LaneSlab *self, LogEntry *entry, const void *payload, int64_t length)
{
    if (self->memory == NULL || length > self->buffer.len || self->position + entry_bytes(length) + ENTRY > self->end) {
        PyObject *bytes = PyLong_FromLongLong(entry_bytes(length));
        if (bytes != NULL) {
            PyErr_SetObject(log_full, bytes);
            Py_DECREF(bytes);
        }
        return -1;
    }
    self->count += 1;
    entry->row = (uint32_t)self->steps;
    entry->length = (uint32_t)length;
    entry->mark = self->tag | self->count;
    write_entry(&self->buffer, self->position, entry, payload);
    self->position += entry_bytes(length);
    self->steps += entry->kind == LOG_STEP;
    self->is_waiting = entry->kind == LOG_ACTIONS;
    return 0;
}

static inline int lane_has_room(const LaneSlab *self)
{
    return self->memory != NULL && self->steps < (unsigned long long)self->times &&
           self->position + 2 * ENTRY <= self->end;
}

static PyObject *lane_record_action(LaneSlab *self, PyObject *actions)
{
    PyObject *batches[MOST_BATCHES], *columns = self->actions;
    if (self->is_disabled || self->is_waiting || self->position > self->last || columns == NULL ||
        !lane_has_room(self)) {
        Py_RETURN_FALSE;
    }
    int count = leaves_of(&self->action, actions, batches);
    Py_INCREF(columns); /* while NumPy copies, another thread may run */
    int done = count < 0 ? 0 : put_batches(columns, (npy_intp)self->steps, batches, count);
    Py_DECREF(columns);
    if (done > 0) {
        LogEntry entry = {.kind = LOG_ACTIONS};
        done = lane_append_entry(self, &entry, "", 0) < 0 ? -1 : 1;
    }
    return done < 0 ? NULL : PyBool_FromLong(done);
}

/* Returns 1 if a flag in an item of a column is set. */
static int is_any_set(PyArrayObject *column, npy_intp item)
{
    const char *flags = PyArray_BYTES(column) + item * PyArray_STRIDE(column, 0);
    if (PyArray_NDIM(column) != 2 || PyArray_ITEMSIZE(column) != 1) {
        return 1;
    }
    for (npy_intp lane = 0; lane < PyArray_DIM(column, 1); lane++) {
        if (flags[lane * PyArray_STRIDE(column, 1)]) {
            return 1;
        }
    }
    return 0;
}

/* record_result(observations, rewards, terminations, truncations) */
static PyObject *lane_record_result(LaneSlab *self, PyObject *const *args, Py_ssize_t given)
{
    PyObject *batches[MOST_BATCHES], *columns = self->results;
    if (given != 4) {
        PyErr_SetString(PyExc_TypeError, "record_result() takes observations, rewards, terminations, truncations");
        return NULL;
    }
    if (!self->is_waiting || columns == NULL || !lane_has_room(self)) {
        Py_RETURN_FALSE;
    }
    LogEntry entry = {
        .kind = LOG_STEP,
        .column = self->code,
        .c = nanoseconds(CLOCK_REALTIME),
        .d = nanoseconds(MONOTONIC),
    };
    int count = entry.d > self->until ? -1 : leaves_of(&self->observation, args[0], batches);
    if (count < 0) {
        Py_RETURN_FALSE;
    }
    memcpy(batches + count, args + 1, 3 * sizeof(PyObject *));
    npy_intp item = (npy_intp)self->steps;
    Py_INCREF(columns); /* while NumPy copies, another thread may run */
    int done = put_batches(columns, item, batches, count + 3);
    /* At the end of an episode, Python stores the last observation, too. */
    for (int i = count + 1; done > 0 && self->same_step && i < count + 3; i++) {
        done = !is_any_set((PyArrayObject *)PyTuple_GET_ITEM(columns, i), item);
    }
    Py_DECREF(columns);
    if (done > 0) {
        done = lane_append_entry(self, &entry, "", 0) < 0 ? -1 : 1;
    }
    return done < 0 ? NULL : PyBool_FromLong(done);
}

/* record_step(actions, observations, rewards, terminations, truncations, utc, monotonic) */
static PyObject *lane_record_step(LaneSlab *self, PyObject *const *args, Py_ssize_t given)
{
    PyObject *acted[MOST_BATCHES], *batches[MOST_BATCHES], *actions = self->actions, *results = self->results;
    if (given != 7) {
        PyErr_SetString(PyExc_TypeError, "record_step() takes actions, four results, two times");
        return NULL;
    }
    LogEntry asked = {.kind = LOG_ACTIONS}, entry = {.kind = LOG_STEP, .column = self->code};
    entry.c = PyLong_AsLongLong(args[5]);
    entry.d = PyLong_AsLongLong(args[6]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (self->is_waiting || self->position > self->last || actions == NULL || results == NULL || !lane_has_room(self) ||
        self->position + 3 * ENTRY > self->end) {
        Py_RETURN_FALSE;
    }
    int count = leaves_of(&self->action, args[0], acted), more = leaves_of(&self->observation, args[1], batches);
    if (count < 0 || more < 0) {
        Py_RETURN_FALSE;
    }
    memcpy(batches + more, args + 2, 3 * sizeof(PyObject *));
    npy_intp item = (npy_intp)self->steps;
    Py_INCREF(actions); /* while NumPy copies, another thread may run */
    Py_INCREF(results);
    int done = put_batches(actions, item, acted, count);
    done = done > 0 ? put_batches(results, item, batches, more + 3) : done;
    for (int i = more + 1; done > 0 && self->same_step && i < more + 3; i++) { /* see record_result() */
        done = !is_any_set((PyArrayObject *)PyTuple_GET_ITEM(results, i), item);
    }
    Py_DECREF(actions);
    Py_DECREF(results);
    if (done > 0) {
        done = lane_append_entry(self, &asked, "", 0) < 0 || lane_append_entry(self, &entry, "", 0) < 0 ? -1 : 1;
    }
    return done < 0 ? NULL : PyBool_FromLong(done);
}

/* append(kind, payload, column, a, c, d) */
static PyObject *lane_append(LaneSlab *self, PyObject *args, PyObject *names)
{
    static char *words[] = {"kind", "payload", "column", "a", "c", "d", NULL};
    long long kind, column = 0, a = 0, c = 0, d = 0;
    Py_buffer payload = {0};
    if (!PyArg_ParseTupleAndKeywords(args, names, "L|y*LLLL:append", words, &kind, &payload, &column, &a, &c, &d)) {
        return NULL;
    }
    int failed = kind < 0 || kind > UINT16_MAX || column < 0 || column > UINT32_MAX;
    if (failed) {
        PyErr_SetString(PyExc_OverflowError, "number out of range for a log entry");
    } else {
        LogEntry entry = {.kind = (uint16_t)kind, .column = (uint32_t)column, .a = a, .c = c, .d = d};
        failed = lane_append_entry(self, &entry, payload.obj == NULL ? "" : payload.buf, payload.len) < 0;
    }
    if (payload.obj != NULL) {
        PyBuffer_Release(&payload);
    }
    if (failed) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *lane_left(LaneSlab *self, PyObject *Py_UNUSED(ignored))
{
    return PyLong_FromLongLong(self->end - self->position - ENTRY);
}

static PyMethodDef lane_methods[] = {
    {"begin", (PyCFunction)lane_begin, METH_VARARGS, NULL},
    {"expect", (PyCFunction)lane_expect, METH_VARARGS, NULL},
    {"disable_fast_path", (PyCFunction)lane_disable_fast_path, METH_NOARGS, NULL},
    {"enable_fast_path", (PyCFunction)lane_enable_fast_path, METH_O, NULL},
    {"record_action", (PyCFunction)lane_record_action, METH_O, NULL},
    {"record_result", (PyCFunction)(void (*)(void))lane_record_result, METH_FASTCALL, NULL},
    {"record_step", (PyCFunction)(void (*)(void))lane_record_step, METH_FASTCALL, NULL},
    {"append", (PyCFunction)(void (*)(void))lane_append, METH_VARARGS | METH_KEYWORDS, NULL},
    {"left", (PyCFunction)lane_left, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef lane_members[] = {
    {"memory", T_OBJECT_EX, offsetof(LaneSlab, memory), READONLY, NULL},
    {"sequence", T_ULONGLONG, offsetof(LaneSlab, sequence), READONLY, NULL},
    {"steps", T_ULONGLONG, offsetof(LaneSlab, steps), READONLY, NULL},
    {"position", T_LONGLONG, offsetof(LaneSlab, position), READONLY, NULL},
    {"end", T_LONGLONG, offsetof(LaneSlab, end), READONLY, NULL},
    {"last", T_LONGLONG, offsetof(LaneSlab, last), 0, NULL},
    {"is_waiting", T_BOOL, offsetof(LaneSlab, is_waiting), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject LaneSlabType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "gym_trace.recording._core.LaneSlab",
    .tp_doc = "Writes steps of all lanes to a slab, like gym_trace.format.ring.lanes.slab.LaneSlab.",
    .tp_basicsize = sizeof(LaneSlab),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)lane_init,
    .tp_dealloc = (destructor)lane_dealloc,
    .tp_methods = lane_methods,
    .tp_members = lane_members,
};
