"""Compiles the CPU kernels with Numba, into object files that need neither Numba nor its runtime."""

import functools
import shutil
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.core.codegen import AOTCPUCodegen
from numba.core.compiler import Flags, compile_extra
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

from gpubuf.kernels._machine_code import (
    PROCESSORS,
    SHIPPED,
    TYPE_ERROR,
    Kernel,
    file_name,
    kernels,
    of_function,
    target_machine,
    write,
)

_POINTER, _I32, _I64 = cgutils.voidptr_t, ir.IntType(32), ir.IntType(64)
# C functions of Python that turn an argument into a number, and a result into an object.
_FROM_PYTHON = {
    types.int64: ("PyLong_AsLongLong", _I64),
    types.float64: ("PyFloat_AsDouble", ir.DoubleType()),
    types.boolean: ("PyObject_IsTrue", _I32),
}
_TO_PYTHON = {
    types.int64: ("PyLong_FromLongLong", _I64),
    types.float64: ("PyFloat_FromDouble", ir.DoubleType()),
    types.boolean: ("PyBool_FromLong", _I64),
}


def kernel(function: Callable[..., Any]) -> Kernel:
    """A kernel of a function, which is compiled at the first call, from its parameters: not from the arguments.

    The parameters say the signature: a float or a bool is annotated so, an address or a count, which are int64, is not.
    The kernel returns such a number or nothing, releases the GIL, and divides as NumPy does.

    A process compiles only the kernels that it uses, each in half a second to several seconds. A function in a function
    is one kernel for each choice of the outer variables that it uses, which are numbers and dtypes.
    """
    cells = function.__closure__ or ()
    chosen = "".join(f"-{getattr(cell.cell_contents, '__name__', cell.cell_contents)}" for cell in cells)
    module = function.__module__.removeprefix("gpubuf.kernels.")
    return of_function(f"{module}.{function.__qualname__.replace('<locals>.', '')}{chosen}", function, object_code)


def jit(function: Any = None, **options: Any) -> Any:
    """A helper of kernels, compiled once for its types and without the code that a call from Python needs.

    Numba would compile it anew for each constant that is passed to it. LLVM finds the constants where it inlines it,
    which ``forceinline`` asks for. Numba's own ``inline="always"`` copies a helper into its callers before types are
    known, and infers the types in each of them: that takes longer than everything else.
    """
    if function is None:
        return functools.partial(jit, **options)
    unwrapped: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    helper: Any = numba.njit(**options, **unwrapped)(function)
    template = helper.get_call_template
    helper.get_call_template = lambda args, keywords: template(tuple(map(numba.types.unliteral, args)), keywords)

    # A call from Python (tests make them) finds no machine code here, and goes to a copy that it can enter.
    copy = functools.cache(lambda: numba.njit(**options)(function))
    helper._insert = lambda *_: None
    helper._compile_for_args = lambda *_: copy()
    return helper


class _Codegen(AOTCPUCodegen):
    """Numba's generator of object files, for exactly the processor of this machine."""

    def _customize_tm_features(self) -> str:
        features: str = binding.get_host_cpu_features().flatten()
        return features


@functools.cache
def _target(processor: str) -> Any:
    target = cpu_target.target_context
    target.refresh()
    generator: Any = AOTCPUCodegen if processor else _Codegen
    codegen = generator("gpubuf", processor or "host")
    return target.subtarget(_internal_codegen=codegen, aot_mode=True)


def object_code(function: Callable[..., Any], symbol: str, processor: str = "") -> bytes:
    """An object file with a function of :func:`kernel`, its entry from Python, ``symbol``, and ``symbol_plain``.

    It is for this processor, or for all of one of :data:`gpubuf.kernels._machine_code.PROCESSORS`.
    """
    kinds, found = {float: types.float64, bool: types.boolean, int: types.int64}, function.__annotations__
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    flags: Any = Flags()
    flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = flags.nrt = True
    flags.error_model = "numpy"
    target = _target(processor)
    with global_compiler_lock:
        arguments = tuple(kinds[found.get(name, int)] for name in names)
        compiled = compile_extra(cpu_target.typing_context, target, function, arguments, None, flags, {})
        library = compiled.library
        module = ir.Module(symbol)
        _runtime(module)
        _plain(module, f"{symbol}_plain", target, compiled.fndesc)
        _entry(module, symbol, target, compiled.fndesc)
        library.add_ir_module(module)
        whole = binding.parse_bitcode(library.emit_bitcode())
    machine = target_machine(binding, processor)
    for value in (*whole.functions, *whole.global_variables):
        if not value.is_declaration:
            value.linkage = "external" if value.name in (symbol, f"{symbol}_plain") else "internal"
        elif not value.name.startswith("llvm."):
            # Numba's own are only here while something is compiled.
            own = value.name.startswith(("NRT_", "numba_"))
            if own or binding.address_of_symbol(value.name) is None:
                raise RuntimeError(f"{symbol} needs {value.name}, which is not in every process")
    code: bytes = machine.emit_object(whole)
    return code


def ship() -> None:
    """Compile all kernels for the processors of :data:`PROCESSORS`, into the folder that a wheel brings along."""
    shutil.rmtree(SHIPPED, ignore_errors=True)
    for each in kernels():
        for processor in PROCESSORS:
            write(SHIPPED / file_name(each.name, processor), object_code(each.function, each.symbol, processor))


def _function(module: Any, name: str, result: Any, *arguments: Any) -> Any:
    return cgutils.get_or_insert_function(module, ir.FunctionType(result, arguments), name)


def _called(builder: Any, target: Any, compiled: Any, arguments: Any) -> tuple[Any, Any]:
    """Status and result of the compiled function."""
    convention = target.call_conv
    kind = convention.get_function_type(compiled.restype, compiled.argtypes)
    callee = cgutils.get_or_insert_function(builder.module, kind, compiled.llvm_func_name)
    found: tuple[Any, Any] = convention.call_function(
        builder, callee, compiled.restype, compiled.argtypes, arguments, attrs=("noinline",)
    )
    return found


def _plain(module: Any, name: str, target: Any, compiled: Any) -> None:
    """What compiled code calls: a C function of the arguments."""
    numbers = [target.get_value_type(kind) for kind in compiled.argtypes]
    function = _function(module, name, target.get_value_type(compiled.restype), *numbers)
    builder = ir.IRBuilder(function.append_basic_block())
    builder.ret(_called(builder, target, compiled, function.args)[1])


def _entry(module: Any, name: str, target: Any, compiled: Any) -> None:
    """What Python calls: a ``METH_FASTCALL`` function of itself, an array of arguments, and how many they are."""
    function = _function(module, name, _POINTER, _POINTER, _POINTER.as_pointer(), _I64)
    builder = ir.IRBuilder(function.append_basic_block())
    _, given, count = function.args
    expected = len(compiled.argtypes)
    with builder.if_then(builder.icmp_signed("!=", count, _I64(expected)), likely=False):
        error = cgutils.add_global_variable(module, ir.IntType(8), TYPE_ERROR)
        text = cgutils.global_constant(
            builder, f"{name}_arity", cgutils.make_bytearray(f"{name} takes {expected} arguments\0".encode())
        )
        complain = _function(module, "PyErr_SetString", ir.VoidType(), _POINTER, _POINTER)
        builder.call(complain, [error, builder.bitcast(text, _POINTER)])
        builder.ret(_POINTER(None))
    numbers = []
    for i, kind in enumerate(compiled.argtypes):
        converter, number = _FROM_PYTHON[kind]
        value = builder.call(
            _function(module, converter, number, _POINTER), [builder.load(builder.gep(given, [_I64(i)]))]
        )
        numbers.append(builder.icmp_signed("!=", value, _I32(0)) if kind is types.boolean else value)
    failed = builder.call(_function(module, "PyErr_Occurred", _POINTER), [])
    with builder.if_then(cgutils.is_not_null(builder, failed), likely=False):
        builder.ret(_POINTER(None))
    thread = builder.call(_function(module, "PyEval_SaveThread", _POINTER), [])
    status, result = _called(builder, target, compiled, numbers)
    builder.call(_function(module, "PyEval_RestoreThread", ir.VoidType(), _POINTER), [thread])
    with builder.if_then(status.is_error, likely=False):
        # Kernels raise nothing themselves.
        builder.ret(builder.call(_function(module, "PyErr_NoMemory", _POINTER), []))
    if compiled.restype is types.none:
        nothing = cgutils.add_global_variable(module, ir.IntType(8), "_Py_NoneStruct")
        builder.call(_function(module, "Py_IncRef", ir.VoidType(), _POINTER), [nothing])
        builder.ret(nothing)
    else:
        maker, number = _TO_PYTHON[compiled.restype]
        if compiled.restype is types.boolean:
            result = builder.zext(result, number)
        builder.ret(builder.call(_function(module, maker, _POINTER, number), [result]))


def _runtime(module: Any) -> None:
    """The two functions of Numba's runtime that arrays need, on memory that begins with its header.

    The header has a count of references, three that stay empty, and the address and the size of what follows.
    """
    size_of_header = 48
    allocate = _function(module, "NRT_MemInfo_alloc_aligned", _POINTER, _I64, _I32)
    builder = ir.IRBuilder(allocate.append_basic_block())
    size, alignment = allocate.args
    alignment = builder.zext(alignment, _I64)
    header = builder.call(
        _function(module, "malloc", _POINTER, _I64),
        [builder.add(builder.add(size, alignment), _I64(size_of_header))],
    )
    with builder.if_then(cgutils.is_null(builder, header), likely=False):
        builder.ret(header)
    after = builder.add(builder.ptrtoint(header, _I64), builder.add(alignment, _I64(size_of_header - 1)))
    data = builder.sub(after, builder.urem(after, alignment))
    words = builder.bitcast(header, _I64.as_pointer())
    for i, word in enumerate((_I64(1), _I64(0), _I64(0), data, size, _I64(0))):
        builder.store(word, builder.gep(words, [_I64(i)]))
    builder.ret(header)
    destroy = _function(module, "NRT_MemInfo_call_dtor", ir.VoidType(), _POINTER)
    builder = ir.IRBuilder(destroy.append_basic_block())
    builder.call(_function(module, "free", ir.VoidType(), _POINTER), destroy.args)
    builder.ret_void()
