"""The machine code of the CPU kernels, as a C extension that needs no Numba: setup.py builds it into a wheel.

Numba compiles every kernel to an object file for each of :data:`PROCESSORS`. machine_code.c is linked with them: it has
the two functions of Numba's runtime that kernels call, and what is generated here, a function per object file that
Python calls.
"""

import importlib
import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension
from setuptools.command.build_ext import build_ext

#: LLVM's and GCC's names of what a processor must have, the fastest first: AVX-512, or AVX2, BMI and FMA.
PROCESSORS = ("x86-64-v4", "x86-64-v3")
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
        included, chosen = [], []
        for processor in PROCESSORS:
            into = folder / processor
            into.mkdir(parents=True, exist_ok=True)
            # Numba reads them when it is imported. No features beside those of the processor's name.
            variables = {"NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": "", "PYTHONPATH": str(_HERE.parent)}
            command = [sys.executable, "-m", "release.machine_code", processor, str(into)]
            subprocess.run(command, env=os.environ | variables, check=True)
            ext.extra_objects += map(str, sorted(into.glob("*.o")))
            included.append(f'#include "{processor}/calls.h"\n')
            chosen.append(f'    if (__builtin_cpu_supports("{processor}")) \\\n        return {_name(processor)}; \\\n')
        (folder / "calls.h").write_text("".join([*included, "#define CHOOSE \\\n", *chosen, "\n"]))
        ext.include_dirs = [str(folder)]
        super().build_extension(ext)


def _name(processor: str) -> str:
    return processor.replace("-", "_")


def compile_kernels(processor: str, folder: Path) -> None:
    """Write an object file per kernel and calls.h into ``folder``."""
    from gpubuf.kernels import _jit

    root = Path(_jit.__file__).parent
    for path in sorted(root.rglob("_numba_*.py")):
        importlib.import_module(".".join(("gpubuf.kernels", *path.relative_to(root).with_suffix("").parts)))
    calls, methods = [], []
    for number, kernel in enumerate(_jit._kernels.values()):
        symbol = f"{_name(processor)}_{number}"
        code, arguments, result = _compiled(kernel, symbol, processor)
        (folder / f"{symbol}.o").write_bytes(code)
        calls.append(_call(symbol, arguments, result))
        methods.append(f'    {{"{kernel.name}", (PyCFunction)(void (*)(void))call_{symbol}, METH_FASTCALL, NULL}},\n')
    table = f"\nstatic PyMethodDef {_name(processor)}[] = {{\n{''.join(methods)}    {{NULL, NULL, 0, NULL}},\n}};\n"
    stamp = f'\n#undef STAMP\n#define STAMP "{_jit.source_stamp()}"\n'
    (folder / "calls.h").write_text("".join([*calls, table, stamp]))


def _compiled(kernel, symbol: str, processor: str) -> tuple[bytes, list[str], str]:
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
    machine = target.create_target_machine(cpu=processor, opt=3, reloc="pic", codemodel="default")
    signature = compiled.signature
    return machine.emit_object(module), [str(kind) for kind in signature.args], str(signature.return_type)


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


if __name__ == "__main__":
    compile_kernels(sys.argv[1], Path(sys.argv[2]))
