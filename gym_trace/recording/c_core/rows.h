/* Records rows: the action and the results of a step, and starts of episodes. */
#pragma once
#include "log.h"

static inline void complete_row(RowSlab *self, int64_t at)
{
    commit(&self->buffer, at + self->done, self->tag | (self->rows + 1));
    self->at = at - self->size;
    self->rows += 1;
}

/* Writes the leaves of fixed size to a row, followed by zeros. */
static void put_parts(RowSlab *self, int64_t at, const Tree *tree, const Parts *parts, int64_t room)
{
    const Value *value = parts->values;
    int64_t end = at + room;
    for (int i = 0; i < tree->count; i++) {
        const Node *node = &tree->nodes[i];
        if (node->children == IS_LEAF) {
            put(&self->buffer, at, value->bytes, node->leaf.size);
            at += node->leaf.size;
            value += 1;
        }
    }
    put_padded(&self->buffer, at, "", 0, end - at);
}

/* Returns 1 if a row fits at an offset, and `log` bytes fit in the log. */
static inline int has_room_for(const RowSlab *self, int64_t at, int64_t log)
{
    return at >= 0 && at >= self->position + RESERVE + log;
}

static PyObject *record_action(RowSlab *self, PyObject *action)
{
    Parts parts;
    int64_t at = row_at(self);
    if (at < 0 || at < self->floor || read_parts(&self->action, action, &parts) < 0) {
        Py_RETURN_FALSE;
    }
    int accepted = has_room_for(self, at, parts.log + self->result_bytes);
    int failed = accepted ? append_parts(self, &self->action, &parts) : 0;
    if (accepted && !failed) {
        put_parts(self, at, &self->action, &parts, self->asked);
        commit(&self->buffer, at + self->asked, self->tag | (self->rows + 1));
    }
    release_parts(&parts);
    return failed ? NULL : PyBool_FromLong(accepted);
}

static int read_result(const RowSlab *self, PyObject *observation, PyObject *reward, Parts *parts, double *number)
{
    return read_reward(self, reward, number) < 0 ? -1 : read_parts(&self->observation, observation, parts);
}

/* Completes a row with an observation; action and reward are already written.
 * texts_begin, texts_end: offsets of its texts in the log. */
static void complete_with(RowSlab *self, int64_t at, const Parts *parts, int64_t texts_begin, int64_t texts_end)
{
    put_parts(self, at + self->reward + 8, &self->observation, parts, self->done - self->reward - 8);
    complete_row(self, at);
    self->texts_begin = texts_begin;
    self->texts_end = texts_end;
    self->texts_rows = self->rows;
}

static PyObject *record_result(RowSlab *self, PyObject *const *args, Py_ssize_t count)
{
    double reward;
    Parts parts;
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "record_result() takes observation, reward, terminated, truncated");
        return NULL;
    }
    if (!is_plain_flag(args[2]) || !is_plain_flag(args[3])) { /* fall back before __bool__ runs; read again after it */
        if (read_result(self, args[0], args[1], &parts, &reward) < 0) {
            Py_RETURN_FALSE;
        }
        release_parts(&parts);
    }
    int flags = read_flags(args[2], args[3]);
    if (flags < 0) {
        return NULL;
    }
    if (read_result(self, args[0], args[1], &parts, &reward) < 0) {
        Py_RETURN_FALSE;
    }
    int64_t at = row_at(self), texts_begin = self->position, texts_end = texts_begin;
    int accepted = self->observation.logs ? has_room_for(self, at, parts.log + 2 * ENTRY) : at >= 0, failed = 0;
    if (accepted) {
        failed = append_parts(self, &self->observation, &parts) < 0;
        texts_end = self->position;
        failed = failed || (flags && append_flag(self, flags) < 0);
    }
    if (accepted && !failed) {
        put(&self->buffer, at + self->reward, &reward, 8);
        complete_with(self, at, &parts, texts_begin, texts_end);
    }
    release_parts(&parts);
    return failed ? NULL : PyBool_FromLong(accepted);
}

static PyObject *record_packed_action(RowSlab *self, PyObject *action)
{
    Py_buffer bytes;
    if (PyObject_GetBuffer(action, &bytes, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    int64_t at = row_at(self);
    if (at >= 0) {
        put_padded(&self->buffer, at, bytes.buf, bytes.len, self->asked);
        commit(&self->buffer, at + self->asked, self->tag | (self->rows + 1));
    }
    PyBuffer_Release(&bytes);
    if (at < 0) {
        return no_room();
    }
    Py_RETURN_NONE;
}

static PyObject *record_packed_result(RowSlab *self, PyObject *args)
{
    Py_buffer bytes;
    double number;
    PyObject *terminated, *truncated;
    if (!PyArg_ParseTuple(args, "y*dOO:record_packed_result", &bytes, &number, &terminated, &truncated)) {
        return NULL;
    }
    int flags = read_flags(terminated, truncated), failed = flags < 0;
    int64_t at = row_at(self);
    if (!failed && at < 0) {
        no_room();
        failed = 1;
    }
    if (!failed && flags) {
        failed = append_flag(self, flags) < 0;
    }
    if (!failed) {
        put(&self->buffer, at + self->reward, &number, 8);
        put_padded(&self->buffer, at + self->reward + 8, bytes.buf, bytes.len, self->done - self->reward - 8);
        complete_row(self, at);
    }
    PyBuffer_Release(&bytes);
    if (failed) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *record_initial(RowSlab *self, PyObject *observation)
{
    Py_buffer bytes;
    if (PyObject_GetBuffer(observation, &bytes, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    int64_t at = row_at(self);
    if (at >= 0) {
        put_padded(&self->buffer, at, "", 0, self->reward + 8); /* no action, no mark, no reward */
        put_padded(&self->buffer, at + self->reward + 8, bytes.buf, bytes.len, self->done - self->reward - 8);
        complete_row(self, at);
        self->ended = 0;
    }
    PyBuffer_Release(&bytes);
    if (at < 0) {
        return no_room();
    }
    Py_RETURN_NONE;
}

/* start((episode, lane, seed, reset_record, utc, monotonic), observation) */
static PyObject *start(RowSlab *self, PyObject *const *args, Py_ssize_t count)
{
    static const int places[] = {0, 2, 4, 5};
    int64_t numbers[4];
    Parts parts;
    if (count != 2 || !PyTuple_CheckExact(args[0]) || PyTuple_GET_SIZE(args[0]) != 6 ||
        !PyBytes_CheckExact(PyTuple_GET_ITEM(args[0], 3))) {
        PyErr_SetString(PyExc_TypeError, "start() takes a Start and an observation");
        return NULL;
    }
    for (int i = 0; i < 4; i++) {
        numbers[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(args[0], places[i]));
    }
    if (PyErr_Occurred()) {
        return NULL;
    }
    LogEntry entry = {
        .kind = LOG_START,
        .flags = START_HAS_INITIAL,
        .a = numbers[0],
        .b = numbers[1],
        .c = numbers[2],
        .d = numbers[3],
    };
    PyObject *record = PyTuple_GET_ITEM(args[0], 3);
    int64_t length = PyBytes_GET_SIZE(record), at = row_at(self), texts_begin = self->position;
    if (!self->fast_results || self->least == NEVER || length > self->buffer.len ||
        read_parts(&self->observation, args[1], &parts) < 0) {
        Py_RETURN_FALSE;
    }
    int accepted = has_room_for(self, at, parts.log + entry_bytes(length)), failed = 0;
    if (accepted) {
        failed = append_parts(self, &self->observation, &parts) < 0;
        int64_t texts_end = self->position;
        failed = failed || append_entry(self, &entry, PyBytes_AS_STRING(record), length) < 0;
        if (!failed) {
            put_padded(&self->buffer, at, "", 0, self->reward + 8);
            complete_with(self, at, &parts, texts_begin, texts_end);
            self->initial = (long long)self->rows - 1;
            self->ended = 0;
            set_floor(self);
        }
    }
    release_parts(&parts);
    return failed ? NULL : PyBool_FromLong(accepted);
}

static PyObject *flag(RowSlab *self, PyObject *args)
{
    PyObject *terminated, *truncated;
    if (!PyArg_ParseTuple(args, "OO:flag", &terminated, &truncated)) {
        return NULL;
    }
    int flags = read_flags(terminated, truncated);
    if (flags < 0 || append_flag(self, flags) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *append(RowSlab *self, PyObject *args, PyObject *names)
{
    static char *words[] = {"kind", "payload", "flags", "column", "a", "b", "c", "d", NULL};
    long long kind, flags = 0, column = 0, n[4] = {0, 0, 0, 0};
    Py_buffer payload = {0};
    if (!PyArg_ParseTupleAndKeywords(args, names, "L|y*LLLLLL:append", words, &kind, &payload, &flags, &column, &n[0],
                                     &n[1], &n[2], &n[3])) {
        return NULL;
    }
    int failed = kind < 0 || kind > UINT16_MAX || flags < 0 || flags > UINT16_MAX || column < 0 || column > UINT32_MAX;
    if (failed) {
        PyErr_SetString(PyExc_OverflowError, "number out of range for a log entry");
    } else {
        LogEntry entry = {
            .kind = (uint16_t)kind,
            .flags = (uint16_t)flags,
            .column = (uint32_t)column,
            .a = n[0],
            .b = n[1],
            .c = n[2],
            .d = n[3],
        };
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
