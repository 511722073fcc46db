/* Finds the words of a large value that differ from the previous value. */
#pragma once
#include "slab.h"

enum { BLOCK = 1024, PART = 64 }; /* bytes per comparison: first a block, then parts of a block that differs */

static inline int64_t least(int64_t first, int64_t second)
{
    return first < second ? first : second;
}

/* Finds the positions of words of 1, 2, 4 or 8 bytes that differ. Returns their number; -1 if it exceeds most. */
static inline __attribute__((always_inline)) int64_t changes_of_width(const char *old, const char *new, int64_t bytes,
                                                                      const int width, uint32_t *positions,
                                                                      int64_t most)
{
    int64_t count = 0;
    for (int64_t block = 0; block < bytes; block += BLOCK) {
        int64_t end = least(block + BLOCK, bytes);
        if (!memcmp(old + block, new + block, (size_t)(end - block))) {
            continue;
        }
        for (int64_t part = block; part < end; part += PART) {
            int64_t stop = least(part + PART, end);
            if (!memcmp(old + part, new + part, (size_t)(stop - part))) {
                continue;
            }
            for (int64_t word = part; word < stop; word += width) {
                if (memcmp(old + word, new + word, (size_t)width)) {
                    if (count == most) {
                        return -1;
                    }
                    positions[count++] = (uint32_t)(word / width);
                }
            }
        }
    }
    return count;
}

/* Calls changes_of_width with a constant width, so that the compiler inlines the comparison of words. */
static int64_t find_changes(const char *old, const char *new, int64_t bytes, int width, uint32_t *positions,
                            int64_t most)
{
    switch (width) {
    case 1: return changes_of_width(old, new, bytes, 1, positions, most);
    case 2: return changes_of_width(old, new, bytes, 2, positions, most);
    case 4: return changes_of_width(old, new, bytes, 4, positions, most);
    default: return changes_of_width(old, new, bytes, 8, positions, most);
    }
}

/* Copies the changed words to words and to the previous value. */
static void copy_changes(char *old, const char *new, int width, const uint32_t *positions, int64_t count, char *words)
{
    for (int64_t i = 0; i < count; i++, words += width) {
        int64_t at = (int64_t)positions[i] * width;
        memcpy(words, new + at, (size_t)width);
        memcpy(old + at, new + at, (size_t)width);
    }
}

static PyObject *changed_words(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t given)
{
    long long most = given == 3 ? PyLong_AsLongLong(args[2]) : 0;
    if (most == -1 && PyErr_Occurred()) {
        return NULL;
    }
    PyArrayObject *old = given == 3 && PyArray_CheckExact(args[0]) ? (PyArrayObject *)args[0] : NULL;
    PyArrayObject *new = given == 3 && PyArray_CheckExact(args[1]) ? (PyArrayObject *)args[1] : NULL;
    if (old == NULL || new == NULL || !PyArray_ISCARRAY(old) || !PyArray_IS_C_CONTIGUOUS(new) ||
        PyDataType_REFCHK(PyArray_DESCR(old)) || PyDataType_REFCHK(PyArray_DESCR(new)) ||
        PyArray_NBYTES(old) != PyArray_NBYTES(new) || PyArray_NBYTES(old) > UINT32_MAX || most < 0) {
        PyErr_SetString(PyExc_TypeError, "changed_words() takes two contiguous arrays of equal size, and a number");
        return NULL;
    }
    int64_t bytes = PyArray_NBYTES(old);
    int width = (int)PyArray_ITEMSIZE(old);
    if ((width != 1 && width != 2 && width != 4 && width != 8) || bytes % width) {
        PyErr_SetString(PyExc_TypeError, "words must have 1, 2, 4 or 8 bytes");
        return NULL;
    }
    most = most < bytes / width ? most : bytes / width;
    uint32_t *positions = PyMem_Malloc((size_t)(most ? most : 1) * sizeof(uint32_t));
    if (positions == NULL) {
        return PyErr_NoMemory();
    }
    char *before = PyArray_DATA(old);
    const char *value = PyArray_DATA(new);
    int64_t count = find_changes(before, value, bytes, width, positions, most);
    PyObject *changes = NULL;
    if (count >= 0) {
        changes = PyBytes_FromStringAndSize(NULL, count * (4 + width));
    }
    if (changes != NULL) {
        memcpy(PyBytes_AS_STRING(changes), positions, (size_t)count * 4);
        copy_changes(before, value, width, positions, count, PyBytes_AS_STRING(changes) + count * 4);
    }
    PyMem_Free(positions);
    if (count < 0) {
        Py_RETURN_NONE;
    }
    return changes;
}
