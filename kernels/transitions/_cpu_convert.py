"""Elements of any dtype as numbers on the CPU, and numbers as elements.

Rows are numbers in an array of their own in between: float32, float64 or int64, as the contract says. Addresses of
elements may have any alignment.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gpubuf.kernels._jit import jit

# Codes of dtypes, as in the contract.
U8, I8, I16, I32, I64, F16, BF16, F32, F64, BOOL = range(10)

_I16, _I32, _F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()


def _element(builder: Any, base: Any, i: Any, kind: Any) -> Any:
    return builder.gep(builder.inttoptr(base, kind.as_pointer()), [i], source_etype=kind)


def _reader(kind: Any, number: Any, convert: Any = None) -> Any:
    @intrinsic
    def read(typingctx, base, i):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            element = builder.load(_element(builder, args[0], args[1], kind), align=1, typ=kind)
            return element if convert is None else convert(builder, element)

        return number(types.int64, types.int64), codegen

    return read


def _writer(kind: Any, number: Any, convert: Any = None) -> Any:
    @intrinsic
    def write(typingctx, base, i, value):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            element = args[2] if convert is None else convert(builder, args[2])
            builder.store(element, _element(builder, args[0], args[1], kind), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, number), codegen

    return write


def _bits(value: int) -> Any:
    return ir.Constant(_I32, value)


def _number(builder: Any, bits: int) -> Any:
    return builder.bitcast(_bits(bits), _F32)


def _half_to_float(builder: Any, half: Any) -> Any:
    """IEEE binary16 to binary32 in integer arithmetic, which runs on every processor, and vectorises.

    Exponent and mantissa move to their place in a float32. A product with 2**-112 corrects the exponent, infinity and
    NaN included; subnormals are what lies above one half after their mantissa was put behind it.
    """
    word = builder.shl(builder.zext(half, _I32), _bits(16))
    sign = builder.and_(word, _bits(0x80000000))
    magnitude = builder.add(word, word)
    raised = builder.add(builder.lshr(magnitude, _bits(4)), _bits(0xE0 << 23))
    normal = builder.fmul(builder.bitcast(raised, _F32), _number(builder, (127 - 112) << 23))
    behind_half = builder.or_(builder.lshr(magnitude, _bits(17)), _bits(126 << 23))
    subnormal = builder.fsub(builder.bitcast(behind_half, _F32), _number(builder, 126 << 23))
    is_subnormal = builder.icmp_unsigned("<", magnitude, _bits(1 << 27))
    chosen = builder.select(is_subnormal, builder.bitcast(subnormal, _I32), builder.bitcast(normal, _I32))
    return builder.bitcast(builder.or_(sign, chosen), _F32)


def _float_to_half(builder: Any, value: Any) -> Any:
    """Binary32 to binary16, rounded to the nearest, half to even: an addition rounds where the mantissa will end.

    Products with 2**112 and 2**-110 make infinity of what is too large. The addend has the exponent of the value, and
    of the smallest normal number at least, so that subnormals are rounded at their last bit.
    """
    word = builder.bitcast(value, _I32)
    sign = builder.and_(word, _bits(0x80000000))
    magnitude = builder.add(word, word)
    positive = builder.bitcast(builder.and_(word, _bits(0x7FFFFFFF)), _F32)
    scaled = builder.fmul(positive, _number(builder, (127 + 112) << 23))
    scaled = builder.fmul(scaled, _number(builder, (127 - 110) << 23))
    exponent = builder.and_(magnitude, _bits(0xFF000000))
    least = _bits(0x71000000)
    exponent = builder.select(builder.icmp_unsigned("<", exponent, least), least, exponent)
    addend = builder.bitcast(builder.add(builder.lshr(exponent, _bits(1)), _bits(0x07800000)), _F32)
    rounded = builder.bitcast(builder.fadd(addend, scaled), _I32)
    upper = builder.and_(builder.lshr(rounded, _bits(13)), _bits(0x7C00))
    bits = builder.add(upper, builder.and_(rounded, _bits(0xFFF)))
    is_nan = builder.icmp_unsigned(">", magnitude, _bits(0xFF000000))
    bits = builder.select(is_nan, _bits(0x7E00), bits)
    return builder.trunc(builder.or_(builder.lshr(sign, _bits(16)), bits), _I16)


def _bfloat_to_float(builder: Any, bits: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(bits, _I32), _bits(16)), _F32)


def _float_to_bfloat(builder: Any, value: Any) -> Any:
    """The upper half of the bits, rounded to the nearest, half to even."""
    word = builder.bitcast(value, _I32)
    odd = builder.and_(builder.lshr(word, _bits(16)), _bits(1))
    rounded = builder.lshr(builder.add(builder.add(word, _bits(0x7FFF)), odd), _bits(16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, _bits(0x7FC0), rounded), _I16)


def _nonzero(builder: Any, byte: Any) -> Any:
    return builder.zext(builder.icmp_unsigned("!=", byte, ir.Constant(ir.IntType(8), 0)), ir.IntType(8))


read_u8 = _reader(ir.IntType(8), types.uint8)
_read_i8 = _reader(ir.IntType(8), types.int8)
_read_i16 = _reader(_I16, types.int16)
read_i32 = _reader(_I32, types.int32)
read_i64 = _reader(ir.IntType(64), types.int64)
_read_f16 = _reader(_I16, types.float32, _half_to_float)
_read_bf16 = _reader(_I16, types.float32, _bfloat_to_float)
read_f32 = _reader(_F32, types.float32)
_read_f64 = _reader(ir.DoubleType(), types.float64)
_read_bool = _reader(ir.IntType(8), types.uint8, _nonzero)
_write_8 = _writer(ir.IntType(8), types.uint8)
_write_16 = _writer(_I16, types.uint16)
write_32 = _writer(_I32, types.uint32)
_write_64 = _writer(ir.IntType(64), types.int64)
_write_f16 = _writer(_I16, types.float32, _float_to_half)
_write_bf16 = _writer(_I16, types.float32, _float_to_bfloat)
write_f32 = _writer(_F32, types.float32)
_write_f64 = _writer(ir.DoubleType(), types.float64)


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
        # The greatest one is not a float where it has 31 or 63 bits, the one behind it is.
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
