/* States of random generators. */
#pragma once
#include "slab.h"

static PyObject *pcg64_type;   /* numpy.random.PCG64 */
static PyObject *capsule_name; /* "capsule" */

/* NumPy's layout on compilers with 128-bit integers; gym_trace.recording.core checks that it applies. */
typedef struct {
    struct {
        uint64_t state[2], inc[2];
    } *numbers;
    int has_uint32;
    uint32_t uinteger;
} PCG64;

/* pcg64_state(bit generator, parts): parts are the bytes between the numbers. Returns None unless it is a PCG64. */
static PyObject *pcg64_state(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    char bytes[512], *at = bytes;
    if (count != 2 || !PyTuple_CheckExact(args[1]) || PyTuple_GET_SIZE(args[1]) != 4) {
        PyErr_SetString(PyExc_TypeError, "pcg64_state() takes a bit generator and four parts");
        return NULL;
    }
    if (Py_TYPE(args[0]) != (PyTypeObject *)pcg64_type) {
        Py_RETURN_NONE;
    }
    PyObject *capsule = PyObject_GetAttr(args[0], capsule_name);
    bitgen_t *generator = capsule == NULL ? NULL : PyCapsule_GetPointer(capsule, "BitGenerator");
    Py_XDECREF(capsule); /* the generator holds it */
    if (generator == NULL) {
        return NULL;
    }
    const PCG64 *pcg = generator->state;
    for (int i = 0; i < 4; i++) {
        PyObject *part = PyTuple_GET_ITEM(args[1], i);
        if (!PyBytes_CheckExact(part) || PyBytes_GET_SIZE(part) > 64) {
            PyErr_SetString(PyExc_TypeError, "parts must have at most 64 bytes");
            return NULL;
        }
        memcpy(at, PyBytes_AS_STRING(part), (size_t)PyBytes_GET_SIZE(part));
        at += PyBytes_GET_SIZE(part);
        if (i < 2) {
            memcpy(at, i ? pcg->numbers->inc : pcg->numbers->state, 16);
            at[16] = 0;
            at += 17;
        } else if (i == 2) {
            *at++ = pcg->has_uint32 ? 1 : 0;
        } else {
            for (int shift = 24; shift >= 0; shift -= 8) {
                *at++ = (char)(pcg->uinteger >> shift);
            }
        }
    }
    return PyBytes_FromStringAndSize(bytes, at - bytes);
}
