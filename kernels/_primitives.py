"""What compiled loops are made of: memory by address, and elementary functions.

``tensor.data_ptr()`` takes 0.1 µs and passing an integer next to nothing. ``tensor.numpy()`` takes 0.7 µs, and passing
an array more. A CPU kernel therefore takes addresses, and opens views on them.

The elementary functions have neither calls nor branches, so that LLVM vectorises the loops. ``math.exp`` and its like
call the C library for one element at a time, which takes 15 ns instead of 1 ns. The functions here are accurate to a
few units in the last place of float64.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

import inspect
import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from gpubuf.kernels._jit import jit


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
as_u32 = _pointer_cast(types.uint32)


def _load(number: Any, kind: Any) -> Any:
    return emitted(number(types.int64))(
        lambda builder, address: builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)
    )


def _store(number: Any, kind: Any) -> Any:
    def store(builder: Any, address: Any, value: Any) -> None:
        builder.store(value, builder.inttoptr(address, kind.as_pointer()), align=1)

    return emitted(types.void(types.int64, number))(store)


#: ``load_i64(address)``: a number from an address of any alignment; ``store_i64(address, number)``.
load_i64, store_i64 = _load(types.int64, ir.IntType(64)), _store(types.int64, ir.IntType(64))
load_i32, store_i32 = _load(types.int32, ir.IntType(32)), _store(types.int32, ir.IntType(32))
load_f32, store_f32 = _load(types.float32, ir.FloatType()), _store(types.float32, ir.FloatType())


@emitted(types.int64(types.int64))
def lowest_bit(builder: Any, word: Any) -> Any:
    """``lowest_bit(word)``: position of the lowest set bit of an int64; 64 where there is none."""
    return builder.cttz(word, ir.IntType(1)(0))


@emitted(types.int64(types.int64))
def highest_bit(builder: Any, word: Any) -> Any:
    """``highest_bit(word)``: position of the highest set bit of an int64; -1 where there is none."""
    return builder.sub(ir.IntType(64)(63), builder.ctlz(word, ir.IntType(1)(0)))


@emitted(types.void(types.int64, types.int64, types.int64))
def copy_bytes(builder: Any, destination: Any, source: Any, n_bytes: Any) -> None:
    """``copy_bytes(destination, source, n_bytes)``: memcpy on integer addresses; the regions must not overlap.

    A copy of a constant, small size is inlined.
    """
    target, origin = (builder.inttoptr(address, ir.IntType(8).as_pointer()) for address in (destination, source))
    cgutils.raw_memcpy(builder, target, origin, n_bytes, 1)


@emitted(types.void(types.int64, types.int64))
def stream_line(builder: Any, destination: Any, source: Any) -> None:
    """``stream_line(destination, source)``: 64 bytes to a multiple of 64, past the caches; see :func:`fence`.

    Memory that is not in a cache is otherwise read before it is written.
    """
    line = ir.VectorType(ir.IntType(64), 8).as_pointer()
    value = builder.load(builder.inttoptr(source, line), align=1)
    store = builder.store(value, builder.inttoptr(destination, line), align=64)
    store.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))


@emitted(types.void())
def fence(builder: Any) -> None:
    """``fence()``: whoever sees what is written after this sees what was written before, streamed lines included."""
    builder.fence("seq_cst")


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


def _bitcast(source: Any, target: Any, ir_type: ir.Type) -> Any:
    return emitted(target(source))(lambda builder, value: builder.bitcast(value, ir_type))


#: The bits of a number as an integer, and back.
bits_of = _bitcast(types.float64, types.int64, ir.IntType(64))
float_of_bits = _bitcast(types.int64, types.float64, ir.DoubleType())
#: The float32 of the same bits.
f32_of_bits = _bitcast(types.uint32, types.float32, ir.FloatType())

# Adding 1.5 * 2**52 leaves the nearest integer in the low bits of the significand.
_SHIFTER = 1.5 * 2.0**52
_LOG2_E = 1 / math.log(2)
# log(2) in two pieces: the first has few enough bits that its products with small integers are exact.
_LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_LARGEST_EXPONENT = 708.0


@jit(forceinline=True)
def exp_below_700(x):  # type: ignore[no-untyped-def]
    """exp(x) for x < 700; values below 1e-307 come out as 0, NaN as NaN.

    x = k log 2 + r with |r| <= log(2) / 2, and the Taylor polynomial of exp(r) to r^13. Its terms are added pairwise:
    a sum in turn, where each addition waits for the one before, takes 1.8 times as long.
    """
    z = x if x > -_LARGEST_EXPONENT else -_LARGEST_EXPONENT
    shifted = z * _LOG2_E + _SHIFTER
    k = shifted - _SHIFTER
    r = (z - k * _LN2_HIGH) - k * _LN2_LOW
    r2 = r * r
    r4 = r2 * r2
    r8 = r4 * r4
    p0 = (1.0 + r) + r2 * (0.5 + r * (1 / 6))
    p4 = (1 / 24 + r * (1 / 120)) + r2 * (1 / 720 + r * (1 / 5040))
    p8 = (1 / 40320 + r * (1 / 362880)) + r2 * (1 / 3628800 + r * (1 / 39916800))
    p12 = 1 / 479001600 + r * (1 / 6227020800)
    p = (p0 + r4 * p4) + r8 * (p8 + r4 * p12)
    power = float_of_bits((bits_of(shifted) + 1023) << 52)
    out = p * power if x > -_LARGEST_EXPONENT else 0.0
    return out if x == x else x


@jit(forceinline=True)
def log_of_normal(x):  # type: ignore[no-untyped-def]
    """log(x) for positive normal x, and any number for other x (see :func:`is_positive_normal`).

    x = 2^k m with m in [sqrt(1/2), sqrt(2)): log(x) = k log 2 + 2 atanh((m - 1) / (m + 1)). The terms of the series
    are added pairwise, as in :func:`exp_below_700`.
    """
    bits = bits_of(x)
    # The exponent that brings the significand below sqrt(2) to the 1, and above it to the 1/2.
    k = (bits - 0x3FE6A09E667F3BCD) >> 52
    m = float_of_bits(bits - (k << 52))
    exponent = float_of_bits(k + bits_of(_SHIFTER)) - _SHIFTER
    t = (m - 1) / (m + 1)
    t2 = t * t
    t4 = t2 * t2
    t8 = t4 * t4
    p0 = (1 / 3 + t2 * (1 / 5)) + t4 * (1 / 7 + t2 * (1 / 9))
    p8 = (1 / 11 + t2 * (1 / 13)) + t4 * (1 / 15 + t2 * (1 / 17))
    p16 = 1 / 19 + t2 * (1 / 21)
    p = (p0 + t8 * p8) + t8 * t8 * p16
    return exponent * _LN2_HIGH + (exponent * _LN2_LOW + (2 * t + 2 * t * (t2 * p)))


@jit(forceinline=True)
def is_positive_normal(x):  # type: ignore[no-untyped-def]
    """Whether :func:`log_of_normal` may be asked."""
    return x >= 2.2250738585072014e-308 and x <= 1.7976931348623157e308
