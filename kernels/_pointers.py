"""Numba views of memory given by address.

``tensor.data_ptr()`` takes 0.1 µs and passing an integer next to nothing. ``tensor.numpy()`` takes 0.7 µs, and passing
an array more. A CPU kernel therefore takes addresses, and opens views on them.
"""

# Numba reads annotations of nothing here, and its intrinsics need real types: no `from __future__ import annotations`.

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


def emitted(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Makes an intrinsic of a function that emits it: of an LLVM builder and of the values of the arguments.

    The function returns a value, a list of them for a tuple, or None for nothing. ``signature`` is one of Numba's, such
    as ``types.int64(types.int64)``.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            value = emit(builder, *args)
            if isinstance(value, list):
                return context.make_tuple(builder, signature.return_type, value)
            return context.get_dummy_value() if value is None else value

        def typed(typingctx, *arguments):  # type: ignore[no-untyped-def]
            return signature, codegen

        # Numba asks for the arguments one by one. The builder stands in the place of its typing context.
        typed.__signature__ = inspect.signature(emit)  # type: ignore[attr-defined]
        return intrinsic(typed)

    return decorate


def _pointer_cast(element: Any) -> Any:
    @intrinsic
    def as_pointer(typingctx, address):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            return builder.inttoptr(args[0], context.get_value_type(types.CPointer(element)))

        return types.CPointer(element)(types.int64), codegen

    return as_pointer


as_f32 = _pointer_cast(types.float32)
as_f64 = _pointer_cast(types.float64)
as_i64 = _pointer_cast(types.int64)
as_u8 = _pointer_cast(types.uint8)
as_u16 = _pointer_cast(types.uint16)
as_u32 = _pointer_cast(types.uint32)


@emitted(types.int64(types.int64))
def load_i64(builder: Any, address: Any) -> Any:
    """``load_i64(address)``: eight bytes from an address of any alignment."""
    return builder.load(builder.inttoptr(address, ir.IntType(64).as_pointer()), align=1)


@emitted(types.void(types.int64, types.int64))
def store_i64(builder: Any, address: Any, value: Any) -> None:
    """``store_i64(address, value)``: eight bytes to an address of any alignment."""
    builder.store(value, builder.inttoptr(address, ir.IntType(64).as_pointer()), align=1)


@emitted(types.void(types.int64, types.int64, types.int64))
def copy_bytes(builder: Any, destination: Any, source: Any, n_bytes: Any) -> None:
    """``copy_bytes(destination, source, n_bytes)``: memcpy on integer addresses; the regions must not overlap.

    A copy of a constant, small size is inlined.
    """
    target, origin = (builder.inttoptr(address, ir.IntType(8).as_pointer()) for address in (destination, source))
    cgutils.raw_memcpy(builder, target, origin, n_bytes, 1)


def _prefetch_into(level: int) -> Any:
    @emitted(types.void(types.int64))
    def prefetch_line(builder: Any, address: Any) -> None:
        byte_pointer, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte_pointer, i32, i32, i32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        # read access; LLVM's locality of 3 is the first-level cache; data cache
        builder.call(function, [builder.inttoptr(address, byte_pointer), i32(0), i32(4 - level), i32(1)])

    return prefetch_line


#: ``prefetch(address)``: ask the processor to load a cache line, into all cache levels; never faults.
prefetch = _prefetch_into(1)

#: The same into the second level only, which has room for several times as many outstanding misses.
prefetch_l2 = _prefetch_into(2)


@intrinsic
def _call(typingctx, address, arguments):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        values = cgutils.unpack_tuple(builder, args[1])
        kind = ir.FunctionType(context.get_value_type(types.int64), [value.type for value in values])
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), values)

    return types.int64(types.int64, arguments), codegen


#: ``call(address, arguments)``: call the kernel that is at an address with a tuple of int64 and float64; returns int64.
#: For a large kernel that few calls need: Numba would make it part of each caller, and compile it with each of them.
call: Any = _call
