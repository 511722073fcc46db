/* Appends entries to the log of a slab: values without a fixed size, and ends of episodes. */
#pragma once
#include "values.h"

static PyObject *log_full; /* gym_trace.format.ring.log.LogFull */

static int64_t nanoseconds(clockid_t clock)
{
    struct timespec now = {0, 0};
    clock_gettime(clock, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

#ifdef __APPLE__
#define MONOTONIC CLOCK_UPTIME_RAW /* the clock of time.monotonic_ns() */
#else
#define MONOTONIC CLOCK_MONOTONIC
#endif

/* Writes an entry, its mark last, and clears the mark of the next entry, which ends the log. */
static void write_entry(const Py_buffer *buffer, int64_t at, const LogEntry *entry, const void *payload)
{
    put(buffer, at + ENTRY, payload, entry->length);
    commit(buffer, at + entry_bytes(entry->length) + COMMIT_AT, 0);
    put(buffer, at, entry, COMMIT_AT);
    commit(buffer, at + COMMIT_AT, entry->mark);
}

/* Appends an entry; sets its row, length and mark. Returns 0; -1 with LogFull. */
static int append_entry(RowSlab *self, LogEntry *entry, const void *payload, int64_t length)
{
    int64_t at = self->position;
    if (!at || length > self->buffer.len || at + entry_bytes(length) + ENTRY > self->at) {
        PyErr_SetNone(log_full);
        return -1;
    }
    self->count += 1;
    entry->row = (uint32_t)self->rows;
    entry->length = (uint32_t)length;
    entry->mark = self->tag | self->count;
    write_entry(&self->buffer, at, entry, payload);
    self->position = at + entry_bytes(length);
    self->logged = (long long)self->rows;
    set_floor(self);
    return 0;
}

/* Appends a text as MessagePack. Returns 0; -1 with LogFull. */
static int append_text(RowSlab *self, uint32_t column, const Value *value)
{
    LogEntry entry = {.kind = LOG_VALUE, .column = column};
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
    LogEntry entry = {.kind = LOG_CHANGES, .column = column, .a = value->length};
    int64_t width = PyArray_ITEMSIZE(leaf->before);
    copy_changes(PyArray_DATA(leaf->before), value->bytes, (int)width, leaf->changes, value->length,
                 (char *)(leaf->changes + value->length));
    return append_entry(self, &entry, leaf->changes, value->length * (4 + width));
}

/* Appends the texts and changes of an observation or action. Returns 0; -1 with LogFull. */
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

/* Appends the end of an episode. flags: see read_flags(). */
static int append_flag(RowSlab *self, int flags)
{
    LogEntry entry = {
        .kind = LOG_FLAG,
        .flags = (uint16_t)flags,
        .a = flags & FRAGMENT_TERMINATED ? OUTCOME_TERMINATED : OUTCOME_TRUNCATED,
        .c = nanoseconds(CLOCK_REALTIME),
        .d = nanoseconds(MONOTONIC),
    };
    if (append_entry(self, &entry, "", 0) < 0) {
        return -1;
    }
    self->ended = 1;
    set_floor(self);
    return 0;
}
