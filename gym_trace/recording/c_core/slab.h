/* Structures of RowSlab, and functions that write to its memory. */
#pragma once

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
#include "../../format/c_kernels/constants.h"

#if PY_LITTLE_ENDIAN != 1
#error "slabs are little-endian"
#endif

enum { ENTRY = sizeof(LogEntry), COMMIT_AT = offsetof(LogEntry, mark) };
enum { MOST_DIMENSIONS = 32, MOST_NODES = 64, MOST_TEXT = 4096 };
static const int64_t NEVER = (int64_t)1 << 62;
static const int64_t EXACT_INTEGERS = (int64_t)1 << 53;
/* Limit for rows and slabs, so that sums of offsets cannot overflow. */
static const int64_t MOST_BYTES = (int64_t)1 << 40;

/* A leaf of an observation or action. Values of fixed size are in the row; texts (dtype is NULL) and the changes of
 * large values are in the log. */
typedef struct {
    PyArray_Descr *dtype;
    PyTypeObject *scalar; /* NumPy type of the value; NULL if it has dimensions or a foreign byte order */
    int dimensions;
    int64_t size;                  /* bytes in the row */
    int64_t large;                 /* bytes of a large value; otherwise 0 */
    PyArrayObject *before, *ready; /* the previous value, and whether it can be compared; see deltas.DeltaPacker */
    int64_t most;                  /* maximum number of changed words */
    uint32_t *changes;             /* buffer for `most` positions, followed by the words */
    npy_intp shape[MOST_DIMENSIONS];
} Leaf;

/* A leaf, or an inner node, which is followed by its children. */
typedef struct {
    Py_ssize_t children; /* number of children, or IS_LEAF */
    PyObject *keys;      /* of a Dict: a tuple of str and int */
    Leaf leaf;
} Node;

enum { IS_LEAF = -1 };

/* An observation or action. */
typedef struct {
    int count;       /* number of nodes; 0: unsupported, always falls back to Python */
    int logs;        /* false for a single value of fixed size */
    uint32_t column; /* column of the first leaf */
    int64_t size;    /* bytes in the row */
    Node nodes[MOST_NODES];
} Tree;

typedef struct {
    PyObject_HEAD
    int64_t size, asked, reward, done; /* size of a row, and offsets in it */
    PyObject *memory;                  /* a memoryview */
    Py_buffer buffer;                  /* buffer of memory, held as long as memory */
    uint64_t tag;                      /* sequence number, shifted to its position in marks */
    unsigned long long sequence, rows;
    long long logged;
    int64_t at;                     /* offset of the next row */
    int64_t position;               /* offset of the next log entry; 0: begin() was never called */
    uint64_t count;                 /* number of log entries */
    int64_t floor, least;           /* record_action() falls back if at is below floor, see set_floor() */
    int64_t result_bytes;           /* log bytes that record_action() leaves for the result */
    int64_t texts_begin, texts_end; /* offsets in the log of the texts of the last observation */
    unsigned long long texts_rows;  /* the number of rows at which these offsets are valid */
    long long initial;              /* the row of the last initial observation; negative: in an earlier slab */
    char ended, only_floats, fast_actions, fast_results;
    Tree action, observation;
} RowSlab;

/* Returns the bytes of a log entry with a payload of this size. */
static inline int64_t entry_bytes(int64_t payload)
{
    return ENTRY + ((payload + 7) & ~(int64_t)7);
}

static inline void put(const Py_buffer *buffer, int64_t offset, const void *bytes, int64_t size)
{
    memcpy((char *)buffer->buf + offset, bytes, (size_t)size);
}

static inline void put_padded(const Py_buffer *buffer, int64_t offset, const void *bytes, int64_t size, int64_t room)
{
    size = size < room ? size : room;
    put(buffer, offset, bytes, size);
    memset((char *)buffer->buf + offset + size, 0, (size_t)(room - size));
}

static inline void commit(const Py_buffer *buffer, int64_t offset, uint64_t mark)
{
    atomic_store_explicit((_Atomic uint64_t *)((char *)buffer->buf + offset), mark, memory_order_release);
    atomic_signal_fence(memory_order_seq_cst);
}

/* Returns the offset of the next row; -1 if it does not fit between the log and the end of the slab. */
static inline int64_t row_at(const RowSlab *self)
{
    return self->position && self->at >= self->position && self->at + self->size <= self->buffer.len ? self->at : -1;
}

static PyObject *no_room(void)
{
    PyErr_SetString(PyExc_ValueError, "no room for a row");
    return NULL;
}

/* Sets the floor: `least`, which is NEVER while the fast path is disabled, or more if the log needs it. After the end of
 * an episode, only start() lets steps in again. */
static inline void set_floor(RowSlab *self)
{
    int64_t above_log = self->ended ? NEVER : self->position + RESERVE + self->result_bytes;
    self->floor = above_log > self->least ? above_log : self->least;
}
