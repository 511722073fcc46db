/* Defines the Python type RowSlab. */
#pragma once
#include "layout.h"
#include "rows.h"
#include "state.h"

/* Returns the leaf of a column; NULL if it is not supported. */
static Leaf *leaf_of(Tree *tree, long long column)
{
    for (int i = 0, leaf = 0; i < tree->count; i++) {
        if (tree->nodes[i].children == IS_LEAF && tree->column + leaf++ == column) {
            return &tree->nodes[i].leaf;
        }
    }
    return NULL;
}

/* follow(column, before, ready, most) */
static PyObject *follow(RowSlab *self, PyObject *args)
{
    long long column, most;
    PyArrayObject *before, *ready;
    if (!PyArg_ParseTuple(args, "LO!O!L:follow", &column, &PyArray_Type, &before, &PyArray_Type, &ready, &most)) {
        return NULL;
    }
    Leaf *leaf = leaf_of(&self->observation, column);
    leaf = leaf == NULL ? leaf_of(&self->action, column) : leaf;
    if (leaf == NULL) {
        Py_RETURN_NONE;
    }
    npy_intp width = PyArray_ITEMSIZE(before);
    if (!leaf->large || !PyArray_ISCARRAY(before) || !is_number(PyArray_DESCR(before)) ||
        PyArray_NBYTES(before) != leaf->large || leaf->large > UINT32_MAX ||
        (width != 1 && width != 2 && width != 4 && width != 8) || PyArray_TYPE(ready) != NPY_BOOL ||
        PyArray_SIZE(ready) != 1 || most < 0 || most > leaf->large / width) {
        PyErr_SetString(PyExc_ValueError, "follow(): not a large leaf, or arrays that do not match it");
        return NULL;
    }
    forget_before(leaf);
    leaf->changes = PyMem_Malloc((size_t)(most ? most : 1) * (size_t)(4 + width));
    if (leaf->changes == NULL) {
        return PyErr_NoMemory();
    }
    leaf->before = (PyArrayObject *)Py_NewRef(before);
    leaf->ready = (PyArrayObject *)Py_NewRef(ready);
    leaf->most = most;
    Py_RETURN_NONE;
}

static int init(RowSlab *self, PyObject *args, PyObject *names)
{
    static char *words[] = {"layout", "fast_actions", "fast_results", "result_bytes", NULL};
    PyObject *layout;
    int fast_actions = 1, fast_results = 1;
    long long result_bytes = 0;
    if (self->size) {
        PyErr_SetString(PyExc_TypeError, "RowSlab can be initialized only once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, names, "O|ppL:RowSlab", words, &layout, &fast_actions, &fast_results,
                                     &result_bytes)) {
        return -1;
    }
    int64_t size, column;
    if (read_number(layout, "size", &size) || read_number(layout, "action_column", &column) ||
        read_number(layout, "asked", &self->asked) || read_number(layout, "reward", &self->reward) ||
        read_number(layout, "done", &self->done) || read_tree(layout, "action", &self->action) ||
        read_tree(layout, "observation", &self->observation)) {
        return -1;
    }
    int64_t asked = self->asked, reward = self->reward, done = self->done;
    if (asked < 0 || asked % 8 || asked > MOST_BYTES || reward != asked + 8 || done < reward + 8 || done % 8 ||
        done > MOST_BYTES || size != done + 8 || column < 0 || column > UINT32_MAX || result_bytes < 0 ||
        result_bytes > MOST_BYTES || (self->action.count && self->action.size > asked) ||
        (self->observation.count && self->observation.size > done - reward - 8)) {
        PyErr_SetString(PyExc_ValueError, "invalid layout of rows");
        return -1;
    }
    self->size = size;
    self->action.column = (uint32_t)column;
    self->fast_actions = (char)fast_actions;
    self->fast_results = (char)fast_results;
    self->result_bytes = result_bytes;
    self->logged = -1;
    self->floor = self->least = NEVER;
    return 0;
}

static void dealloc(RowSlab *self)
{
    forget_tree(&self->action);
    forget_tree(&self->observation);
    if (self->memory != NULL) {
        PyBuffer_Release(&self->buffer);
        Py_DECREF(self->memory);
    }
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef methods[] = {
    {"begin", (PyCFunction)begin, METH_VARARGS, NULL},
    {"move", (PyCFunction)move, METH_O, NULL},
    {"follow", (PyCFunction)follow, METH_VARARGS, NULL},
    {"disable_fast_path", (PyCFunction)disable_fast_path, METH_NOARGS, NULL},
    {"enable_fast_path", (PyCFunction)enable_fast_path, METH_O, NULL},
    {"is_between_episodes", (PyCFunction)is_between_episodes, METH_NOARGS, NULL},
    {"has_room", (PyCFunction)has_room, METH_VARARGS, NULL},
    {"only_floats", (PyCFunction)only_floats, METH_O, NULL},
    {"record_action", (PyCFunction)record_action, METH_O, NULL},
    {"record_result", (PyCFunction)(void (*)(void))record_result, METH_FASTCALL, NULL},
    {"record_packed_action", (PyCFunction)record_packed_action, METH_O, NULL},
    {"record_packed_result", (PyCFunction)record_packed_result, METH_VARARGS, NULL},
    {"record_initial", (PyCFunction)record_initial, METH_O, NULL},
    {"start", (PyCFunction)(void (*)(void))start, METH_FASTCALL, NULL},
    {"flag", (PyCFunction)flag, METH_VARARGS, NULL},
    {"append", (PyCFunction)(void (*)(void))append, METH_VARARGS | METH_KEYWORDS, NULL},
    {"drop", (PyCFunction)drop, METH_O, NULL},
    {"pending_action", (PyCFunction)pending_action, METH_NOARGS, NULL},
    {"last_row", (PyCFunction)last_row, METH_NOARGS, NULL},
    {"last_texts", (PyCFunction)last_texts, METH_NOARGS, NULL},
    {"entries", (PyCFunction)entries, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"rows", T_ULONGLONG, offsetof(RowSlab, rows), READONLY, NULL},
    {"logged", T_LONGLONG, offsetof(RowSlab, logged), READONLY, NULL},
    {"initial", T_LONGLONG, offsetof(RowSlab, initial), 0, NULL},
    {"sequence", T_ULONGLONG, offsetof(RowSlab, sequence), READONLY, NULL},
    {"memory", T_OBJECT_EX, offsetof(RowSlab, memory), READONLY, NULL},
    {"ended", T_BOOL, offsetof(RowSlab, ended), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject RowSlabType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "gym_trace.recording._core.RowSlab",
    .tp_doc = "Writes rows to a slab, like gym_trace.format.ring.row_slab.RowSlab.",
    .tp_basicsize = sizeof(RowSlab),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)init,
    .tp_dealloc = (destructor)dealloc,
    .tp_methods = methods,
    .tp_members = members,
};
