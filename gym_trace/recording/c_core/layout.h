/* Reads layouts of observations and actions. */
#pragma once
#include "values.h"

static PyObject *leaf_type; /* gym_trace.data.layout.Leaf */

static int read_number(PyObject *object, const char *name, int64_t *number)
{
    PyObject *found = PyObject_GetAttrString(object, name);
    *number = found == NULL ? -1 : PyLong_AsLongLong(found);
    Py_XDECREF(found);
    return PyErr_Occurred() ? -1 : 0;
}

static void forget_before(Leaf *leaf)
{
    Py_CLEAR(leaf->before);
    Py_CLEAR(leaf->ready);
    PyMem_Free(leaf->changes);
    leaf->changes = NULL;
}

static void forget_tree(Tree *tree)
{
    for (int i = 0; i < MOST_NODES; i++) {
        Py_CLEAR(tree->nodes[i].leaf.dtype);
        Py_CLEAR(tree->nodes[i].keys);
        forget_before(&tree->nodes[i].leaf);
        tree->nodes[i].leaf.large = tree->nodes[i].leaf.size = 0;
    }
    tree->count = 0;
    tree->size = 0;
}

/* Reads dtype and shape of a leaf. Returns 1 if they are supported, otherwise 0; -1 with an exception. */
static int read_leaf(PyObject *layout, Leaf *leaf)
{
    PyObject *dtype = PyObject_GetAttrString(layout, "dtype");
    PyObject *shape = dtype == NULL ? NULL : PyObject_GetAttrString(layout, "shape");
    int known = shape == NULL ? -1 : dtype == Py_None;
    if (known || !PyArray_DescrCheck(dtype) || !is_number((PyArray_Descr *)dtype) || !PyTuple_Check(shape) ||
        PyTuple_GET_SIZE(shape) > MOST_DIMENSIONS) {
        goto done;
    }
    PyArray_Descr *type = (PyArray_Descr *)dtype;
    int64_t size = PyDataType_ELSIZE(type);
    leaf->dimensions = (int)PyTuple_GET_SIZE(shape);
    for (int i = 0; i < leaf->dimensions; i++) {
        npy_intp length = PyLong_AsSsize_t(PyTuple_GET_ITEM(shape, i));
        if (length < 0 || (length && size > MOST_BYTES / length)) {
            known = PyErr_Occurred() ? -1 : 0;
            goto done;
        }
        leaf->shape[i] = length;
        size *= length;
    }
    known = 1;
    leaf->size = size;
    leaf->dtype = type;
    Py_INCREF(type);
    leaf->scalar = leaf->dimensions == 0 && PyArray_ISNBO(type->byteorder) ? type->typeobj : NULL;
done:
    Py_XDECREF(dtype);
    Py_XDECREF(shape);
    return known;
}

/* Returns the keys of a Dict as a tuple; NULL for a Tuple, or with an exception. */
static PyObject *read_keys(PyObject *layout)
{
    PyObject *keys = PyObject_GetAttrString(layout, "keys");
    PyObject *tuple = keys == NULL || keys == Py_None ? NULL : PySequence_Tuple(keys);
    Py_XDECREF(keys);
    return tuple;
}

/* Reads a node of a layout and its descendants. Returns 1 if all are supported, otherwise 0; -1 with an exception. */
static int read_node(PyObject *layout, PyObject *deltas, Tree *tree)
{
    if (tree->count == MOST_NODES) {
        return 0;
    }
    Node *node = &tree->nodes[tree->count++];
    int is_leaf = PyObject_IsInstance(layout, leaf_type);
    if (is_leaf) {
        int is_delta = is_leaf < 0 ? -1 : PySequence_Contains(deltas, layout);
        node->children = IS_LEAF;
        int known = is_delta < 0 ? -1 : read_leaf(layout, &node->leaf);
        if (known > 0 && is_delta) {
            node->leaf.large = node->leaf.size;
            node->leaf.size = 0;
        }
        tree->size += node->leaf.size;
        return tree->size > MOST_BYTES ? 0 : known;
    }
    PyObject *children = PyObject_GetAttrString(layout, "children");
    PyObject *below = children == NULL ? NULL : PySequence_Tuple(children);
    Py_XDECREF(children);
    node->keys = below == NULL ? NULL : read_keys(layout);
    node->children = below == NULL ? 0 : PyTuple_GET_SIZE(below);
    int known = PyErr_Occurred() ? -1 : node->keys == NULL || PyTuple_GET_SIZE(node->keys) == node->children;
    for (Py_ssize_t i = 0; known > 0 && node->keys != NULL && i < node->children; i++) {
        PyObject *key = PyTuple_GET_ITEM(node->keys, i);
        known = PyUnicode_CheckExact(key) || PyLong_CheckExact(key);
    }
    for (Py_ssize_t i = 0; known > 0 && i < node->children; i++) {
        known = read_node(PyTuple_GET_ITEM(below, i), deltas, tree);
    }
    Py_XDECREF(below);
    return known;
}

/* Reads a layout. deltas: the leaves that are stored as changes. Returns -1 with an exception; 0 otherwise, also if the
 * layout is not supported. */
static int read_root(PyObject *root, PyObject *deltas, Tree *tree)
{
    forget_tree(tree);
    int known = read_node(root, deltas, tree);
    if (known <= 0) {
        forget_tree(tree);
    }
    tree->logs = tree->count != 1 || tree->nodes[0].leaf.dtype == NULL || tree->nodes[0].leaf.large;
    return known < 0 ? -1 : 0;
}

static int read_tree(PyObject *layout, const char *name, Tree *tree)
{
    PyObject *root = PyObject_GetAttrString(layout, name);
    PyObject *deltas = root == NULL ? NULL : PyObject_GetAttrString(layout, "delta_leaves");
    int failed = deltas == NULL ? -1 : read_root(root, deltas, tree);
    Py_XDECREF(root);
    Py_XDECREF(deltas);
    return failed;
}
