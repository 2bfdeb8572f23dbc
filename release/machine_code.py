"""The machine code of the CPU kernels, as a C extension that needs no Numba: setup.py builds it into a wheel.

Numba compiles every kernel to an object file. machine_code.c is linked with them: it has the two functions of Numba's
runtime that kernels call, and what is generated here, a function per kernel that Python calls.
"""

import importlib
import os
from pathlib import Path

from setuptools import Extension
from setuptools.command.build_ext import build_ext

#: LLVM's and GCC's name of what a processor must have: AVX2, BMI and FMA, those of 2013 and later.
PROCESSOR = "x86-64-v3"
#: The oldest Python, whose stable ABI the extension uses.
PYTHON = (3, 11)

_HERE = Path(__file__).parent
_TYPES = {"int64": "int64_t", "float64": "double", "bool": "char"}
_FROM_PYTHON = {"int64": "PyLong_AsLongLong", "float64": "PyFloat_AsDouble", "bool": "(char)PyObject_IsTrue"}
_TO_PYTHON = {"int64": "PyLong_FromLongLong", "float64": "PyFloat_FromDouble", "bool": "PyBool_FromLong"}
#: Functions that a kernel may call: of the C library, and of machine_code.c.
_CALLED = {"memcpy", "memmove", "memset", "NRT_MemInfo_alloc_aligned", "NRT_MemInfo_call_dtor"}

_CALL = """
int32_t {symbol}({result} *, void **{types});
static PyObject *call_{symbol}(PyObject *self, PyObject *const *given, Py_ssize_t count)
{{
    {result} result = 0;
    void *error;
    int32_t status;
    if (count != {count})
        return wrong_count({count}, count);
{conversions}
    if (PyErr_Occurred())
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = {symbol}(&result, &error{values});
    Py_END_ALLOW_THREADS
    return IS_ERROR(status) ? PyErr_NoMemory() : {to_python};
}}
"""


def extension() -> Extension:
    """What setup.py names, for :class:`Build`."""
    version = "0x{:02X}{:02X}0000".format(*PYTHON)
    return Extension(
        "gpubuf.kernels._machine_code",
        ["release/machine_code.c"],
        define_macros=[("Py_LIMITED_API", version)],
        extra_compile_args=["-fvisibility=hidden"],
        extra_link_args=["-Wl,--strip-all"],
        py_limited_api=True,
    )


class Build(build_ext):
    """Compiles the kernels of the tree that setup.py is in, then the extension."""

    def build_extension(self, ext: Extension) -> None:
        folder = Path(self.build_temp)
        folder.mkdir(parents=True, exist_ok=True)
        ext.include_dirs, ext.extra_objects = [str(folder)], compile_kernels(folder)
        super().build_extension(ext)


def compile_kernels(folder: Path) -> list[str]:
    """Write an object file per kernel and calls.h into ``folder``; returns the paths of the object files."""
    # Numba reads them when it is imported. No features beside those of the processor's name.
    os.environ |= {"NUMBA_CPU_NAME": PROCESSOR, "NUMBA_CPU_FEATURES": ""}
    from gpubuf.kernels import _jit

    root = Path(_jit.__file__).parent
    for path in sorted(root.rglob("_numba_*.py")):
        importlib.import_module(".".join(("gpubuf.kernels", *path.relative_to(root).with_suffix("").parts)))
    objects, calls, methods = [], [], []
    for number, kernel in enumerate(_jit._kernels.values()):
        symbol = f"kernel_{number}"
        path = folder / f"{symbol}.o"
        code, arguments, result = _compiled(kernel, symbol)
        path.write_bytes(code)
        objects.append(str(path))
        calls.append(_call(symbol, arguments, result))
        methods.append(f'{{"{kernel.name}", (PyCFunction)(void (*)(void))call_{symbol}, METH_FASTCALL, NULL}}, \\\n')
    defined = f'#define STAMP "{_jit.source_stamp()}"\n#define PROCESSOR "{PROCESSOR}"\n'
    (folder / "calls.h").write_text("".join([*calls, defined, "#define METHODS \\\n", *methods, "\n"]))
    return objects


def _compiled(kernel, symbol: str) -> tuple[bytes, list[str], str]:
    """An object file with the kernel as ``symbol``, and the types of its arguments and of its result."""
    from llvmlite import binding

    from gpubuf.kernels import _jit

    dispatcher = _jit.jit(kernel.function, error_model="numpy")
    dispatcher.compile(_jit.signature_of(kernel.function))
    (compiled,) = dispatcher.overloads.values()
    module = binding.parse_assembly(compiled.library.get_llvm_str())
    function = module.get_function(compiled.fndesc.llvm_func_name)
    function.name, function.visibility = symbol, "hidden"
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration:
            if value.name != symbol:
                value.linkage = "internal"
        elif not value.name.startswith("llvm.") and value.name not in _CALLED:
            raise RuntimeError(f"{kernel.name} needs {value.name}, which only Numba has")
    # Position-independent, unlike what Numba makes for its own process.
    target = binding.Target.from_default_triple()
    machine = target.create_target_machine(cpu=PROCESSOR, opt=3, reloc="pic", codemodel="default")
    return (
        machine.emit_object(module),
        [str(kind) for kind in compiled.signature.args],
        str(compiled.signature.return_type),
    )


def _call(symbol: str, arguments: list[str], result: str) -> str:
    names = [f"a{i}" for i in range(len(arguments))]
    conversions = [
        f"    {_TYPES[kind]} {name} = {_FROM_PYTHON[kind]}(given[{i}]);"
        for i, (kind, name) in enumerate(zip(arguments, names, strict=True))
    ]
    return _CALL.format(
        symbol=symbol,
        # Of a function that returns nothing there is an address too.
        result=_TYPES.get(result, "int64_t"),
        types="".join(f", {_TYPES[kind]}" for kind in arguments),
        count=len(arguments),
        conversions="\n".join(conversions),
        values="".join(f", {name}" for name in names),
        to_python=f"{_TO_PYTHON[result]}(result)" if result in _TO_PYTHON else "Py_NewRef(Py_None)",
    )
