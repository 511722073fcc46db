/* The log of a slab: everything without a fixed size. */
#pragma once
#include "values.h"

static PyObject *log_full; /* gym_trace.format.ring.log.LogFull */
static long flag_terminated, flag_truncated, outcome_terminated, outcome_truncated;

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

/* Writes an entry, its mark last, and ends the log after it. */
static void write_entry(const Py_buffer *buffer, int64_t at, uint64_t mark, uint32_t row, const Entry *entry,
                        const void *payload, int64_t length)
{
    char bytes[COMMIT_AT];
    uint32_t size = (uint32_t)length, column = entry->column;
    uint16_t kind = (uint16_t)entry->kind, flags = (uint16_t)entry->flags;
    memcpy(bytes, &row, 4);
    memcpy(bytes + 4, &size, 4);
    memcpy(bytes + 8, &kind, 2);
    memcpy(bytes + 10, &flags, 2);
    memcpy(bytes + 12, &column, 4);
    memcpy(bytes + 16, entry->numbers, 32);
    put(buffer, at + ENTRY, payload, length);
    commit(buffer, at + entry_bytes(length) + COMMIT_AT, 0);
    put(buffer, at, bytes, COMMIT_AT);
    commit(buffer, at + COMMIT_AT, mark);
}

/* Appends an entry. Returns 0; -1 with LogFull. */
static int append_entry(RowSlab *self, const Entry *entry, const void *payload, int64_t length)
{
    int64_t at = self->position;
    if (!at || length > self->buffer.len || at + entry_bytes(length) + ENTRY > self->at) {
        PyErr_SetNone(log_full);
        return -1;
    }
    self->count += 1;
    write_entry(&self->buffer, at, self->tag | self->count, (uint32_t)self->rows, entry, payload, length);
    self->position = at + entry_bytes(length);
    self->logged = (long long)self->rows;
    set_floor(self);
    return 0;
}

/* Appends a text as MessagePack. Returns 0; -1 with LogFull. */
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

/* Appends the changes of a large value, and makes it the previous value. Returns 0; -1 with LogFull. */
static int append_changes(RowSlab *self, uint32_t column, const Leaf *leaf, const Value *value)
{
    Entry entry = {CHANGES, 0, column, {value->length, 0, 0, 0}};
    int64_t width = PyArray_ITEMSIZE(leaf->before);
    take_changes(PyArray_DATA(leaf->before), value->bytes, (int)width, leaf->changes, value->length,
                 (char *)(leaf->changes + value->length));
    return append_entry(self, &entry, leaf->changes, value->length * (4 + width));
}

/* Appends the leaves of an observation or action that belong to the log. Returns 0; -1 with LogFull. */
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

static int append_flag(RowSlab *self, int flags)
{
    Entry entry = {FLAG, 0, 0, {0, 0, 0, 0}};
    int is_terminated = flags & IS_TERMINATED;
    entry.flags = (unsigned int)((is_terminated ? flag_terminated : 0) | (flags & IS_TRUNCATED ? flag_truncated : 0));
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
