/* Copies batches of a vector environment to the columns of a slab. */
#pragma once
#include "values.h"
#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { MOST_COPIED = 256 << 10 }; /* bytes; for larger batches, the interpreter lock is released */
enum { STREAMED = 4096 };         /* bytes; larger rows are copied past the caches */
/* Rows of a matrix in a column ordered by lane. They are often a multiple of 4,096 bytes apart, and the cache of a core
 * has at least so many lines for such addresses. */
enum { ROWS_AT_ONCE = 8 };

/* Returns 1 if a batch has the dtype and shape of an item of a column. */
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

/* Returns the bytes per row of a batch, or 0 if the rows of the column have gaps. */
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

/* Returns 1 if the elements of each row of a batch are adjacent and in order. */
static int has_whole_rows(PyArrayObject *batch)
{
    npy_intp bytes = PyArray_ITEMSIZE(batch);
    for (int i = PyArray_NDIM(batch) - 1; i > 0; i--) {
        if (PyArray_STRIDE(batch, i) != bytes && PyArray_DIM(batch, i) != 1) {
            return 0;
        }
        bytes *= PyArray_DIM(batch, i);
    }
    return 1;
}

/* Copies a matrix whose rows have gaps, several times as fast as NumPy. */
static inline __attribute__((always_inline)) void put_matrix(char *to, npy_intp stride, PyArrayObject *batch,
                                                             const int width)
{
    const char *from = PyArray_BYTES(batch);
    npy_intp rows = PyArray_DIM(batch, 0), items = PyArray_DIM(batch, 1);
    npy_intp down = PyArray_STRIDE(batch, 0), across = PyArray_STRIDE(batch, 1);
    npy_intp some = stride == items * width ? rows : ROWS_AT_ONCE;
    for (npy_intp first = 0; first < rows; first += some) {
        npy_intp end = rows - first < some ? rows : first + some;
        for (npy_intp j = 0; j < items; j++) {
            for (npy_intp i = first; i < end; i++) {
                memcpy(to + i * stride + j * width, from + i * down + j * across, (size_t)width);
            }
        }
    }
}

/* Copies large rows past the caches, as no one reads them soon: that takes half the time. */
static void stream_rows(char *to, npy_intp stride, const char *from, npy_intp down, npy_intp count, size_t bytes)
{
    for (npy_intp i = 0; i < count; i++, to += stride, from += down) {
        size_t at = 0;
#ifdef __SSE2__
        at = -(uintptr_t)to & 15;
        memmove(to, from, at);
        for (; at + 64 <= bytes; at += 64) {
            for (size_t j = at; j < at + 64; j += 16) {
                _mm_stream_si128((__m128i *)(to + j), _mm_loadu_si128((const __m128i *)(from + j)));
            }
        }
#endif
        memmove(to + at, from + at, bytes - at);
    }
#ifdef __SSE2__
    _mm_sfence(); /* the rows must arrive before the mark that covers them */
#endif
}

/* Copies a batch to an item of a column; is_like_item() must hold. Returns 0; -1 with an exception. */
static int put_batch(PyArrayObject *column, npy_intp item, PyArrayObject *batch)
{
    npy_intp bytes = bytes_in_a_row(column, batch), width = PyArray_ITEMSIZE(batch);
    int is_matrix = PyArray_NDIM(batch) == 2 && (width == 4 || width == 8), is_whole = has_whole_rows(batch);
    int is_streamed = is_whole && bytes >= STREAMED;
    if (!bytes || !(is_whole || is_matrix) || (PyArray_NBYTES(batch) > MOST_COPIED && !is_streamed)) {
        return PySequence_SetItem((PyObject *)column, item, (PyObject *)batch);
    }
    char *to = PyArray_BYTES(column) + item * PyArray_STRIDE(column, 0);
    const char *from = PyArray_BYTES(batch);
    npy_intp count = PyArray_DIM(batch, 0), stride = PyArray_STRIDE(column, 1), down = PyArray_STRIDE(batch, 0);
    if (is_streamed) {
        Py_INCREF(column);
        Py_INCREF(batch);
        PyThreadState *state = PyArray_NBYTES(batch) > MOST_COPIED ? PyEval_SaveThread() : NULL;
        stream_rows(to, stride, from, down, count, (size_t)bytes);
        if (state != NULL) {
            PyEval_RestoreThread(state);
        }
        Py_DECREF(batch);
        Py_DECREF(column);
        return 0;
    }
    if (!is_whole) {
        width == 4 ? put_matrix(to, stride, batch, 4) : put_matrix(to, stride, batch, 8);
        return 0;
    }
    if (stride == bytes && (down == bytes || count == 1)) {
        memmove(to, from, (size_t)(bytes * count));
        return 0;
    }
    for (npy_intp i = 0; i < count; i++) {
        memcpy(to + i * stride, from + i * down, (size_t)bytes);
    }
    return 0;
}

/* Copies batches to columns[item]. Returns 1; 0, without copying, if one does not match its column;
 * -1 with an exception. */
static int put_batches(PyObject *columns, npy_intp item, PyObject *const *batches, int count)
{
    if (PyTuple_GET_SIZE(columns) != count) {
        return 0;
    }
    for (int i = 0; i < count; i++) {
        PyObject *column = PyTuple_GET_ITEM(columns, i);
        if (!is_like_item(column, batches[i]) || item >= PyArray_DIM((PyArrayObject *)column, 0)) {
            return 0;
        }
    }
    int failed = 0;
    for (int i = 0; i < count && !failed; i++) {
        failed = put_batch((PyArrayObject *)PyTuple_GET_ITEM(columns, i), item, (PyArrayObject *)batches[i]) < 0;
    }
    return failed ? -1 : 1;
}
