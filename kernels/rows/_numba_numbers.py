"""Elements of any dtype as numbers on the CPU, and numbers as elements.

Rows are numbers in an array of their own in between: float32, float64 or int64, as the contract says. Addresses of
elements may have any alignment.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gpubuf.kernels._jit import jit
from gpubuf.kernels._primitives import emitted, repeated
from gpubuf.kernels.rows import CODEC_OFFSET, SCALE

# Codes of dtypes, as in the contract.
U8, I8, I16, I32, I64, F16, BF16, F32, F64, BOOL = range(10)


@jit(forceinline=True)
def is_integer(code):  # type: ignore[no-untyped-def]
    return code <= I64 or code == BOOL


@jit(forceinline=True)
def float_of(bits):  # type: ignore[no-untyped-def]
    """The float64 that an entry of ``fields`` has the bits of."""
    return np.int64(bits).view(np.float64)


@jit(forceinline=True)
def is_coded(field):  # type: ignore[no-untyped-def]
    """Whether a field has a codec."""
    return float_of(field[SCALE]) != 1 or float_of(field[CODEC_OFFSET]) != 0


_I8, _I16, _I32, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()

# Elements that the commonest conversions take at a time. Rows are often too short for what LLVM makes of a loop.
_LANES = 8


def _element(builder: Any, base: Any, i: Any, kind: Any) -> Any:
    return builder.gep(builder.inttoptr(base, kind.as_pointer()), [i], source_etype=kind)


def _reader(kind: Any, number: Any, convert: Any = lambda builder, element: element) -> Any:
    def read(builder: Any, base: Any, i: Any) -> Any:
        return convert(builder, builder.load(_element(builder, base, i, kind), align=1, typ=kind))

    return emitted(number(types.int64, types.int64))(read)


def _writer(kind: Any, number: Any, convert: Any = lambda builder, value: value) -> Any:
    def write(builder: Any, base: Any, i: Any, value: Any) -> None:
        builder.store(convert(builder, value), _element(builder, base, i, kind), align=1)

    return emitted(types.void(types.int64, types.int64, number))(write)


def _like(value: Any, kind: Any) -> Any:
    """A type of so many elements as a value has."""
    return ir.VectorType(kind, value.type.count) if isinstance(value.type, ir.VectorType) else kind


def _bits(value: Any, bits: int) -> Any:
    """An int32 for each element of a value."""
    kind = _like(value, _I32)
    return ir.Constant(kind, [bits] * kind.count if isinstance(kind, ir.VectorType) else bits)


def _number(builder: Any, value: Any, bits: int) -> Any:
    return builder.bitcast(_bits(value, bits), _like(value, _F32))


def _half_to_float(builder: Any, half: Any) -> Any:
    """IEEE binary16 to binary32 in integer arithmetic, which runs on every processor.

    Exponent and mantissa move to their place in a float32. A product with 2**-112 corrects the exponent, infinity and
    NaN included; subnormals are what lies above one half after their mantissa was put after it.
    """
    i32, f32 = _like(half, _I32), _like(half, _F32)
    word = builder.shl(builder.zext(half, i32), _bits(half, 16))
    sign = builder.and_(word, _bits(half, 0x80000000))
    magnitude = builder.add(word, word)
    raised = builder.add(builder.lshr(magnitude, _bits(half, 4)), _bits(half, 0xE0 << 23))
    normal = builder.fmul(builder.bitcast(raised, f32), _number(builder, half, (127 - 112) << 23))
    after_half = builder.or_(builder.lshr(magnitude, _bits(half, 17)), _bits(half, 126 << 23))
    subnormal = builder.fsub(builder.bitcast(after_half, f32), _number(builder, half, 126 << 23))
    is_subnormal = builder.icmp_unsigned("<", magnitude, _bits(half, 1 << 27))
    chosen = builder.select(is_subnormal, builder.bitcast(subnormal, i32), builder.bitcast(normal, i32))
    return builder.bitcast(builder.or_(sign, chosen), f32)


def _float_to_half(builder: Any, value: Any) -> Any:
    """Binary32 to binary16, rounded to the nearest, half to even: an addition rounds where the mantissa will end.

    Products with 2**112 and 2**-110 make infinity of what is too large. The addend has the exponent of the value, and
    of the smallest normal number at least, so that subnormals are rounded at their last bit.
    """
    i32, f32 = _like(value, _I32), _like(value, _F32)
    word = builder.bitcast(value, i32)
    sign = builder.and_(word, _bits(value, 0x80000000))
    magnitude = builder.add(word, word)
    positive = builder.bitcast(builder.and_(word, _bits(value, 0x7FFFFFFF)), f32)
    scaled = builder.fmul(positive, _number(builder, value, (127 + 112) << 23))
    scaled = builder.fmul(scaled, _number(builder, value, (127 - 110) << 23))
    exponent = builder.and_(magnitude, _bits(value, 0xFF000000))
    least = _bits(value, 0x71000000)
    exponent = builder.select(builder.icmp_unsigned("<", exponent, least), least, exponent)
    addend = builder.add(builder.lshr(exponent, _bits(value, 1)), _bits(value, 0x07800000))
    rounded = builder.bitcast(builder.fadd(builder.bitcast(addend, f32), scaled), i32)
    upper = builder.and_(builder.lshr(rounded, _bits(value, 13)), _bits(value, 0x7C00))
    bits = builder.add(upper, builder.and_(rounded, _bits(value, 0xFFF)))
    is_nan = builder.icmp_unsigned(">", magnitude, _bits(value, 0xFF000000))
    bits = builder.select(is_nan, _bits(value, 0x7E00), bits)
    return builder.trunc(builder.or_(builder.lshr(sign, _bits(value, 16)), bits), _like(value, _I16))


def _bfloat_to_float(builder: Any, bits: Any) -> Any:
    word = builder.zext(bits, _like(bits, _I32))
    return builder.bitcast(builder.shl(word, _bits(bits, 16)), _like(bits, _F32))


def _float_to_bfloat(builder: Any, value: Any) -> Any:
    """The upper half of the bits, rounded to the nearest, half to even."""
    word = builder.bitcast(value, _like(value, _I32))
    odd = builder.and_(builder.lshr(word, _bits(value, 16)), _bits(value, 1))
    rounded = builder.lshr(builder.add(builder.add(word, _bits(value, 0x7FFF)), odd), _bits(value, 16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, _bits(value, 0x7FC0), rounded), _like(value, _I16))


def _byte_to_float(builder: Any, byte: Any) -> Any:
    return builder.uitofp(byte, _like(byte, _F32))


def _nonzero(builder: Any, byte: Any) -> Any:
    return builder.zext(builder.icmp_unsigned("!=", byte, ir.Constant(_I8, 0)), _I8)


read_u8 = _reader(_I8, types.uint8)
_read_i8 = _reader(_I8, types.int8)
_read_i16 = _reader(_I16, types.int16)
read_i32 = _reader(_I32, types.int32)
read_i64 = _reader(ir.IntType(64), types.int64)
_read_f16 = _reader(_I16, types.float32, _half_to_float)
_read_bf16 = _reader(_I16, types.float32, _bfloat_to_float)
read_f32 = _reader(_F32, types.float32)
_read_f64 = _reader(ir.DoubleType(), types.float64)
_read_bool = _reader(_I8, types.uint8, _nonzero)
_write_8 = _writer(_I8, types.uint8)
_write_16 = _writer(_I16, types.uint16)
write_32 = _writer(_I32, types.uint32)
_write_64 = _writer(ir.IntType(64), types.int64)
_write_f16 = _writer(_I16, types.float32, _float_to_half)
_write_bf16 = _writer(_I16, types.float32, _float_to_bfloat)
write_f32 = _writer(_F32, types.float32)
_write_f64 = _writer(ir.DoubleType(), types.float64)


def _vector(builder: Any, base: Any, i: Any, kind: Any) -> Any:
    pointer = builder.bitcast(_element(builder, base, i, kind), ir.VectorType(kind, _LANES).as_pointer())
    return builder.load(pointer, align=1, typ=ir.VectorType(kind, _LANES))


def _store(builder: Any, value: Any, base: Any, i: Any, kind: Any) -> None:
    place = builder.bitcast(_element(builder, base, i, kind), value.type.as_pointer())
    builder.store(value, place, align=1)


def _block(kind: Any, convert: Any, result: Any) -> Any:
    """``block(source, target, i)``: convert elements ``i .. i + _LANES - 1``."""

    def block(builder: Any, source: Any, target: Any, i: Any) -> None:
        _store(builder, convert(builder, _vector(builder, source, i, kind)), target, i, result)

    return emitted(types.void(types.int64, types.int64, types.int64))(block)


_block_f16 = _block(_I16, _half_to_float, _F32)
_block_bf16 = _block(_I16, _bfloat_to_float, _F32)
_block_u8 = _block(_I8, _byte_to_float, _F32)
_block_to_f16 = _block(_F32, _float_to_half, _I16)
_block_to_bf16 = _block(_F32, _float_to_bfloat, _I16)


@emitted(types.void(*[types.int64] * 3, *[types.float32] * 2, *[types.int64] * 2))
def _block_normalised(
    builder: Any, source: Any, mean: Any, factor: Any, low: Any, high: Any, target: Any, i: Any
) -> None:
    """Normalise and cut ``_LANES`` elements from i on."""
    numbers, mean, factor = (_vector(builder, base, i, _F32) for base in (source, mean, factor))
    numbers = builder.fmul(builder.fsub(numbers, mean), factor)
    low, high = (repeated(builder, bound, numbers.type.count) for bound in (low, high))
    numbers = builder.select(builder.fcmp_ordered("<", numbers, low), low, numbers)
    numbers = builder.select(builder.fcmp_ordered(">", numbers, high), high, numbers)
    _store(builder, numbers, target, i, _F32)


def _llvm_of_float(name: str, result: Any, suffix: str) -> Any:
    @intrinsic
    def apply(typingctx, value):  # type: ignore[no-untyped-def]
        out = result or value

        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            bits = 32 if signature.args[0] == types.float32 else 64
            kind = ir.FunctionType(context.get_value_type(signature.return_type), [args[0].type])
            function = builder.module.globals.get(f"{name}.{suffix}f{bits}")
            if function is None:
                function = ir.Function(builder.module, kind, f"{name}.{suffix}f{bits}")
            return builder.call(function, args)

        return out(value), codegen

    return apply


# To the nearest integer, half to even.
_rounded: Any = _llvm_of_float("llvm.rint", None, "")

# Cut to the range of int64; NaN becomes 0.
_to_i64: Any = _llvm_of_float("llvm.fptosi.sat", types.int64, "i64.")


@jit
def decode_f32(address, code, n, target):  # type: ignore[no-untyped-def]
    """The ``n`` elements at an address, float16, bfloat16 or uint8, as float32 at another. False: another dtype."""
    if code not in (BF16, F16, U8):
        return False
    if n < _LANES:
        for i in range(n):
            if code == BF16:
                write_f32(target, i, _read_bf16(address, i))
            elif code == F16:
                write_f32(target, i, _read_f16(address, i))
            else:
                write_f32(target, i, np.float32(read_u8(address, i)))
        return True
    # The last block overlaps with the one before.
    for i in range(0, n, _LANES):
        first = min(i, n - _LANES)
        if code == BF16:
            _block_bf16(address, target, first)
        elif code == F16:
            _block_f16(address, target, first)
        else:
            _block_u8(address, target, first)
    return True


@jit
def encode_f32(address, n, code, target):  # type: ignore[no-untyped-def]
    """As :func:`decode_f32` the other way round, to float16 or bfloat16."""
    if code not in (BF16, F16):
        return False
    if n < _LANES:
        for i in range(n):
            if code == BF16:
                _write_bf16(target, i, read_f32(address, i))
            else:
                _write_f16(target, i, read_f32(address, i))
        return True
    for i in range(0, n, _LANES):
        first = min(i, n - _LANES)
        if code == BF16:
            _block_to_bf16(address, target, first)
        else:
            _block_to_f16(address, target, first)
    return True


@jit
def normalise_f32(address, mean, factor, low, high, n, target):  # type: ignore[no-untyped-def]
    """``(number - mean) * factor``, cut to bounds, of the ``n`` float32 at an address, to another one."""
    if n >= _LANES:
        for i in range(0, n, _LANES):
            _block_normalised(address, mean, factor, low, high, target, min(i, n - _LANES))
        return
    for i in range(n):
        number = (read_f32(address, i) - read_f32(mean, i)) * read_f32(factor, i)
        number = low if number < low else number
        write_f32(target, i, high if number > high else number)


@jit
def decode(address, code, n, out):  # type: ignore[no-untyped-def]
    """The ``n`` elements at an address as numbers in ``out``."""
    if code == F32:
        for i in range(n):
            out[i] = read_f32(address, i)
    elif code == BF16:
        for i in range(n):
            out[i] = _read_bf16(address, i)
    elif code == F16:
        for i in range(n):
            out[i] = _read_f16(address, i)
    elif code == U8:
        for i in range(n):
            out[i] = read_u8(address, i)
    elif code == BOOL:
        for i in range(n):
            out[i] = _read_bool(address, i)
    elif code == F64:
        for i in range(n):
            out[i] = _read_f64(address, i)
    elif code == I8:
        for i in range(n):
            out[i] = _read_i8(address, i)
    elif code == I16:
        for i in range(n):
            out[i] = _read_i16(address, i)
    elif code == I32:
        for i in range(n):
            out[i] = read_i32(address, i)
    else:
        for i in range(n):
            out[i] = read_i64(address, i)


@jit(forceinline=True)
def _bounds(code):  # type: ignore[no-untyped-def]
    """Least and greatest number of an integer dtype."""
    if code == U8:
        return 0, 255
    if code == I8:
        return -128, 127
    if code == I16:
        return -(1 << 15), (1 << 15) - 1
    if code == I32:
        return -(1 << 31), (1 << 31) - 1
    return -(1 << 63), ~(-1 << 63)


@jit(forceinline=True)
def _write_integer(address, i, code, value):  # type: ignore[no-untyped-def]
    if code in (U8, I8):
        _write_8(address, i, value)
    elif code == I16:
        _write_16(address, i, value)
    elif code == I32:
        write_32(address, i, value)
    else:
        _write_64(address, i, value)


@jit
def encode(numbers, n, code, address):  # type: ignore[no-untyped-def]
    """Floats as elements of a dtype, to an address. Returns how many do not fit: NaN, or beyond an integer's range."""
    misfits = 0
    if code == F32:
        for i in range(n):
            write_f32(address, i, numbers[i])
    elif code == BF16:
        for i in range(n):
            _write_bf16(address, i, numbers[i])
    elif code == F16:
        for i in range(n):
            _write_f16(address, i, numbers[i])
    elif code == F64:
        for i in range(n):
            _write_f64(address, i, numbers[i])
    elif code == BOOL:
        for i in range(n):
            _write_8(address, i, numbers[i] != 0)
    else:
        least, greatest = _bounds(code)
        # The greatest one is not a float where it has 31 or 63 bits, the next one is.
        bottom, top = float(least), -float(least) if least < 0 else 256.0
        for i in range(n):
            number = _rounded(numbers[i])
            misfits += not (number >= bottom and number < top)
            _write_integer(address, i, code, min(max(_to_i64(number), least), greatest))
    return misfits


@jit
def encode_integers(numbers, n, code, address):  # type: ignore[no-untyped-def]
    """As :func:`encode`, of int64 numbers to an integer dtype or bool."""
    misfits = 0
    if code == BOOL:
        for i in range(n):
            _write_8(address, i, numbers[i] != 0)
        return misfits
    least, greatest = _bounds(code)
    for i in range(n):
        misfits += numbers[i] < least or numbers[i] > greatest
        _write_integer(address, i, code, min(max(numbers[i], least), greatest))
    return misfits


@jit
def encode_flags(source, stride, written, n, target):  # type: ignore[no-untyped-def]
    """``n`` rows of one number each as bytes that are 1 where the number is not zero; whether it was done."""
    if written not in (I64, F32):
        return False
    for i in range(n):
        at = source + i * stride
        _write_8(target, i, read_i64(at, 0) != 0 if written == I64 else read_f32(at, 0) != 0)
    return True
