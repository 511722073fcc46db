/* RowSlab of gym_trace/format/ring/row_slab.py and LaneSlab of gym_trace/format/ring/lanes/slab.py in C:
 * same methods, same results, same bytes in the slab. Those files document the methods, and docs/FORMAT.md, section 8,
 * the bytes.
 *
 * - Only put() and commit() write memory, at offsets that row_at() or the log have checked against the held buffer, and
 *   put_batch(), to an item of an array. Layouts are checked in init().
 * - User code (__bool__) may run before values are read, but not between reading and writing them.
 * - A mark is stored after the data that it covers, with release order, because other processes may be reading.
 */
#include "generators.h"
#include "lane_slab.h"
#include "lanes.h"
#include "row_slab.h"

static PyObject *found_in(const char *module, const char *name)
{
    PyObject *home = PyImport_ImportModule(module);
    PyObject *found = home == NULL ? NULL : PyObject_GetAttrString(home, name);
    Py_XDECREF(home);
    return found;
}

static PyMethodDef functions[] = {
    {"pcg64_state", (PyCFunction)(void (*)(void))pcg64_state, METH_FASTCALL, NULL},
    {"lane_fragments", (PyCFunction)lane_fragments, METH_VARARGS, NULL},
    {"lane_rows", (PyCFunction)lane_rows, METH_VARARGS, NULL},
    {"changed_words", (PyCFunction)(void (*)(void))changed_words, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_core", .m_size = -1, .m_methods = functions};

PyMODINIT_FUNC PyInit__core(void)
{
    import_array();
    pcg64_type = found_in("numpy.random", "PCG64");
    capsule_name = PyUnicode_InternFromString("capsule");
    log_full = found_in("gym_trace.format.ring.log", "LogFull");
    log_entries = found_in("gym_trace.format.ring.log", "entries");
    leaf_type = found_in("gym_trace.data.layout", "Leaf");
    if (PyErr_Occurred() || PyType_Ready(&RowSlabType) < 0 || PyType_Ready(&LaneSlabType) < 0) {
        return NULL;
    }
    PyObject *core = PyModule_Create(&module);
    if (core == NULL || PyModule_AddIntConstant(core, "ABI", CORE_ABI) < 0 ||
        PyModule_AddObjectRef(core, "RowSlab", (PyObject *)&RowSlabType) < 0 ||
        PyModule_AddObjectRef(core, "LaneSlab", (PyObject *)&LaneSlabType) < 0) {
        Py_XDECREF(core);
        return NULL;
    }
    return core;
}
