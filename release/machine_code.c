/* Kernels that Numba has compiled, as functions of Python. calls.h is generated: their tables, one for each kind of
   processor, and CHOOSE, which returns that of this one. */

#include <Python.h>

#include <stdint.h>
#include <stdlib.h>

/* What kernels need of Numba's runtime: memory of arrays, behind the header that Numba gives it. */

typedef struct {
    size_t references;
    void *destructor, *about;
    void *data;
    size_t size;
    void *allocator;
} Memory;

Memory *NRT_MemInfo_alloc_aligned(size_t size, uint32_t alignment)
{
    size_t most = sizeof(Memory) + alignment;
    Memory *memory = size <= SIZE_MAX - most ? malloc(size + most) : NULL;
    if (memory != NULL) {
        uintptr_t after = (uintptr_t)(memory + 1) + alignment - 1;
        *memory = (Memory){1, NULL, NULL, (void *)(after - after % alignment), size, NULL};
    }
    return memory;
}

void NRT_MemInfo_call_dtor(Memory *memory)
{
    free(memory);
}

/* Numba's calling convention: a status, the address of the result, and that of an exception. */

#define IS_ERROR(status) ((status) != 0 && (status) != -2)

static PyObject *wrong_count(Py_ssize_t expected, Py_ssize_t given)
{
    return PyErr_Format(PyExc_TypeError, "expected %zd arguments, not %zd", expected, given);
}

#include "calls.h"

static PyMethodDef *methods_for_this_processor(void)
{
    __builtin_cpu_init();
    CHOOSE
    return NULL;
}

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_machine_code", NULL, -1};

PyMODINIT_FUNC PyInit__machine_code(void)
{
    PyMethodDef *methods = methods_for_this_processor();
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL || (methods != NULL && PyModule_AddFunctions(module, methods) < 0) ||
        PyModule_AddStringConstant(module, "stamp", STAMP) < 0 ||
        PyModule_AddIntConstant(module, "runs_here", methods != NULL) < 0) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
