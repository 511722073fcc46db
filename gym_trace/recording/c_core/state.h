/* Methods of RowSlab for the whole slab: its memory, free space, and last row. */
#pragma once
#include "log.h"

static PyObject *log_entries; /* gym_trace.format.ring.log.entries */

/* Replaces the held memoryview, and steals the reference to the new one.
 * Returns -1 with an exception if the new one is invalid. */
static int hold_memory(PyObject **held, Py_buffer *held_buffer, PyObject *memory)
{
    Py_buffer buffer, before = *held_buffer;
    if (memory == NULL || PyObject_GetBuffer(memory, &buffer, PyBUF_WRITABLE) < 0) {
        Py_XDECREF(memory);
        return -1;
    }
    if (buffer.len < SLAB_HEADER + ENTRY + 8 || buffer.len > MOST_BYTES || buffer.len % 8 ||
        (uintptr_t)buffer.buf % 8) {
        PyErr_SetString(PyExc_ValueError, "invalid memory of a slab: too small or not aligned");
        PyBuffer_Release(&buffer);
        Py_DECREF(memory);
        return -1;
    }
    PyObject *old = *held;
    *held_buffer = buffer;
    *held = memory;
    if (before.obj != NULL) {
        PyBuffer_Release(&before);
    }
    Py_XDECREF(old);
    return 0;
}

/* Empties a slab and sets its sequence number. */
static void begin_memory(const Py_buffer *buffer, uint64_t sequence)
{
    char zeros[64] = {0};
    put(buffer, SLAB_HEADER, zeros, 64);
    commit(buffer, 0, sequence);
}

static PyObject *begin(RowSlab *self, PyObject *args)
{
    PyObject *memory;
    unsigned long long sequence;
    if (!PyArg_ParseTuple(args, "O!K:begin", &PyMemoryView_Type, &memory, &sequence)) {
        return NULL;
    }
    if (sequence > UINT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "sequence number exceeds 32 bits");
        return NULL;
    }
    if (!self->size) {
        return no_room();
    }
    Py_INCREF(memory);
    if (hold_memory(&self->memory, &self->buffer, memory) < 0) {
        return NULL;
    }
    begin_memory(&self->buffer, sequence);
    self->sequence = sequence;
    self->tag = (uint64_t)sequence << 32;
    self->initial -= (long long)self->rows;
    self->rows = self->count = self->texts_rows = 0;
    self->logged = -1;
    self->ended = 0;
    self->only_floats = 1;
    self->at = self->buffer.len - self->size;
    self->position = SLAB_HEADER;
    self->floor = self->least = NEVER;
    Py_RETURN_NONE;
}

static PyObject *move(RowSlab *self, PyObject *memory)
{
    int64_t before = self->buffer.len;
    if (!self->position || !PyMemoryView_Check(memory) || PyMemoryView_GET_BUFFER(memory)->len < before) {
        PyErr_SetString(PyExc_ValueError, "move(): not a larger memoryview, or begin() was never called");
        return NULL;
    }
    Py_INCREF(memory);
    if (hold_memory(&self->memory, &self->buffer, memory) < 0) {
        return NULL;
    }
    self->at += self->buffer.len - before;
    self->floor = self->least = NEVER;
    Py_RETURN_NONE;
}

static PyObject *disable_fast_path(RowSlab *self, PyObject *Py_UNUSED(ignored))
{
    self->floor = self->least = NEVER;
    Py_RETURN_NONE;
}

static PyObject *enable_fast_path(RowSlab *self, PyObject *most_rows)
{
    long long most = PyLong_AsLongLong(most_rows);
    if (most == -1 && PyErr_Occurred()) {
        return NULL;
    }
    if (!self->position) {
        return no_room();
    }
    int64_t length = self->buffer.len;
    if (self->fast_actions) {
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

static PyObject *is_between_episodes(RowSlab *self, PyObject *Py_UNUSED(ignored))
{
    return PyBool_FromLong(self->ended && self->least != NEVER && self->logged < (long long)self->rows);
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
    int64_t at = SLAB_HEADER;
    uint32_t row = 0;
    for (unsigned long long i = 0; i < count && at + ENTRY <= self->position; i++) {
        const LogEntry *entry = (const LogEntry *)((const char *)self->buffer.buf + at);
        row = entry->row;
        at += entry_bytes(entry->length);
    }
    if (!self->position || count > self->count || at > self->position) {
        PyErr_SetString(PyExc_ValueError, "the log has fewer entries");
        return NULL;
    }
    commit(&self->buffer, at + COMMIT_AT, 0);
    self->position = at;
    self->texts_rows = at < self->texts_end ? 0 : self->texts_rows;
    self->count = count;
    self->logged = count ? (long long)row : -1;
    set_floor(self);
    if (row_at(self) >= at + ENTRY) {
        commit(&self->buffer, self->at + self->asked, 0);
        commit(&self->buffer, self->at + self->done, 0);
    }
    Py_RETURN_NONE;
}

static PyObject *pending_action(RowSlab *self, PyObject *Py_UNUSED(ignored))
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
    int is_current = self->rows && self->texts_rows == self->rows;
    for (int64_t at = self->texts_begin; texts != NULL && is_current && at + ENTRY <= self->texts_end;) {
        const LogEntry *entry = (const LogEntry *)((const char *)self->buffer.buf + at);
        at += entry_bytes(entry->length);
        if (at > self->texts_end) {
            break;
        }
        if (entry->kind != LOG_VALUE) {
            continue;
        }
        PyObject *number = PyLong_FromUnsignedLong(entry->column);
        PyObject *text = PyBytes_FromStringAndSize((const char *)(entry + 1), (Py_ssize_t)entry->length);
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
    PyObject *found = PyObject_CallFunction(log_entries, "OiLK", self->memory, SLAB_HEADER, (long long)self->position,
                                            self->sequence);
    PyObject *list = found == NULL ? NULL : PySequence_List(found);
    Py_XDECREF(found);
    return list;
}
