/* The slab that is being filled, and how its memory is written. */
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

#if PY_LITTLE_ENDIAN != 1
#error "slabs are little-endian"
#endif

enum { HEADER = 64, ENTRY = 56, COMMIT_AT = 48, RESERVE = 4 * ENTRY, HAS_LEAD = 1 };
enum { START = 1, FLAG = 3, VALUE = 6, CHANGES = 7 };
enum { SAYS_TERMINATED = 1, SAYS_TRUNCATED = 2, MOST_DIMENSIONS = 32, MOST_NODES = 64, MOST_TEXT = 4096 };
static const int64_t NEVER = (int64_t)1 << 62;
static const int64_t EXACT_INTEGERS = (int64_t)1 << 53;
static const int64_t MOST_BYTES = (int64_t)1 << 40; /* of a row or slab, so that no sum of offsets overflows */

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
    int64_t room;          /* bytes of the log that ask() leaves for the answer */
    int64_t noted, noted_end;      /* where the log has the texts of the observation in the last row ... */
    unsigned long long noted_rows; /* if so many rows are complete */
    char ended, only_floats, asks, answers;
} RowSlab;

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
    int64_t above_log = self->position + RESERVE + self->room;
    self->floor = above_log > self->least ? above_log : self->least;
}
