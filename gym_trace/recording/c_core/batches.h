/* Copies batches of a vector environment to the columns of a slab. */
#pragma once
#include "values.h"

enum { MOST_COPIED = 256 << 10 }; /* bytes; NumPy copies larger batches, because it releases the interpreter lock */

/* True if a batch has the dtype and shape of an item of a column. */
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

/* Copies a matrix that is not C-contiguous, several times as fast as NumPy. */
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
        PyErr_SetString(PyExc_TypeError, "put_batches() takes a tuple of columns, a time, and a list of one batch per column");
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
            PyErr_SetString(PyExc_IndexError, "time out of range");
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
