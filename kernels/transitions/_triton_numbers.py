"""Transitions on the GPU: numbers of every dtype, as bits in memory and as integers or floats in arithmetic.

A *code* is the place of a dtype in :data:`gpubuf.kernels.transitions.DTYPES`. Codes are scalars, so that all threads of
a program take one branch. The halves are made of bits where the compiler and its interpreter round differently.
"""

import triton
import triton.language as tl

from gpubuf.kernels import transitions

UINT8 = tl.constexpr(0)
INT8 = tl.constexpr(1)
INT16 = tl.constexpr(2)
INT32 = tl.constexpr(3)
INT64 = tl.constexpr(4)
FLOAT16 = tl.constexpr(5)
BFLOAT16 = tl.constexpr(6)
FLOAT32 = tl.constexpr(7)
FLOAT64 = tl.constexpr(8)
BOOL = tl.constexpr(9)
OPAQUE = tl.constexpr(transitions.OPAQUE)

# Arithmetic: these helpers neither load nor store.


@triton.jit
def is_float(code):
    """Whether a dtype has fractions."""
    return (code >= FLOAT16) & (code <= FLOAT64)


@triton.jit
def item_shift(code):
    """Binary logarithm of the bytes of an element, int64."""
    two = (code == INT16) | (code == FLOAT16) | (code == BFLOAT16)
    four = (code == INT32) | (code == FLOAT32)
    eight = (code == INT64) | (code == FLOAT64)
    return two.to(tl.int64) + 2 * four.to(tl.int64) + 3 * eight.to(tl.int64)


@triton.jit
def limits(code):
    """(least, greatest) number of an integer dtype."""
    bits = tl.where(code == UINT8, 8, tl.where(code == INT8, 7, tl.where(code == INT16, 15, 31)))
    bits = tl.where(code == INT64, 63, bits)
    greatest = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64) >> (63 - bits)
    return tl.where(code == UINT8, 0, -greatest - 1), greatest


@triton.jit
def integers_of(bits, code):
    """The numbers that bits of an integer dtype say; both int64, and of the bits the lowest count."""
    if code == INT8:
        number = bits.to(tl.int8).to(tl.int64)
    elif code == INT16:
        number = bits.to(tl.int16).to(tl.int64)
    elif code == INT32:
        number = bits.to(tl.int32).to(tl.int64)
    elif code == INT64:
        number = bits
    elif code == BOOL:
        number = ((bits & 255) != 0).to(tl.int64)
    else:
        number = bits & 255
    return number


@triton.jit
def floats_of(bits, code, FLOAT: tl.constexpr):
    """The numbers that bits of any dtype say, in float32 or float64."""
    if code == FLOAT32:
        number = bits.to(tl.int32).to(tl.float32, bitcast=True).to(FLOAT)
    elif code == FLOAT16:
        number = bits.to(tl.int16).to(tl.float16, bitcast=True).to(FLOAT)
    elif code == BFLOAT16:
        number = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True).to(FLOAT)
    elif code == FLOAT64:
        number = bits.to(tl.float64, bitcast=True).to(FLOAT)
    elif code == UINT8:
        # As 32 bits: images are large, and 64 bits convert at a quarter of the rate.
        number = (bits.to(tl.int32) & 255).to(FLOAT)
    else:
        number = integers_of(bits, code).to(FLOAT)
    return number


@triton.jit
def nearest_even(number, FLOAT: tl.constexpr):
    """The nearest whole numbers, halves to the even one."""
    # From here on floats have no fractions; adding it makes the hardware round.
    whole = 8388608.0 if FLOAT.primitive_bitwidth == 32 else 4503599627370496.0
    size = tl.abs(number)
    rounded = (size + whole) - whole
    return tl.where(size < whole, tl.where(number < 0, -rounded, rounded), number)


@triton.jit
def integer_bits(number, code):
    """(bits, whether the number fits) of int64 numbers as an integer dtype; others are cut to the range."""
    if code == BOOL:
        cut = (number != 0).to(tl.int64)
    else:
        least, greatest = limits(code)
        cut = tl.minimum(tl.maximum(number, least), greatest)
    return cut, (cut == number) | (code == BOOL)


@triton.jit
def whole_bits(number, code, FLOAT: tl.constexpr):
    """(bits, whether it fits) of whole numbers in float32 or float64 as an integer dtype; NaN becomes 0."""
    least, greatest = limits(code)
    # The numbers beyond: powers of two, exact in any float.
    beyond = greatest.to(FLOAT) + 1
    fits = (number >= least.to(FLOAT)) & (number < beyond)
    cut = tl.where(number >= beyond, greatest, tl.where(number == number, least, 0))
    return tl.where(fits, tl.where(fits, number, 0).to(tl.int64), cut), fits


@triton.jit
def bfloat16_bits(number):
    """float32 rounded to bfloat16, halves to the even one, as int64 bits."""
    bits = number.to(tl.int32, bitcast=True)
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
    return tl.where(number == number, rounded, 0x7FC0).to(tl.int64)


@triton.jit
def float_bits(number, code, FLOAT: tl.constexpr):
    """(bits, whether the number fits) of float32 or float64 numbers as any dtype.

    As an integer they are rounded and cut to the range. NaN becomes 0 there.
    """
    fits = (number == number) | (number != number)
    if code == FLOAT32:
        bits = number.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64)
    elif code == FLOAT16:
        bits = number.to(tl.float32).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int64)
    elif code == BFLOAT16:
        bits = bfloat16_bits(number.to(tl.float32))
    elif code == FLOAT64:
        bits = number.to(tl.float64).to(tl.int64, bitcast=True)
    elif code == BOOL:
        bits = (number != 0).to(tl.int64)
    else:
        bits, fits = whole_bits(nearest_even(number, FLOAT), code, FLOAT)
    return bits, fits


@triton.jit
def decoded_numbers(bits, code, scale, offset, FLOAT: tl.constexpr):
    """stored * scale + offset; scale and offset are float64 scalars."""
    number = floats_of(bits, code, FLOAT)
    if (scale != 1) | (offset != 0):
        # Exact in float64 and rounded before the sum: nothing here that may be contracted to one rounding.
        scaled = (number.to(tl.float64) * scale.to(FLOAT).to(tl.float64)).to(FLOAT)
        number = scaled + offset.to(FLOAT)
    return number


@triton.jit
def _upper(number):
    """float64 numbers without the lower half of their digits, so that products of two are exact."""
    return (number.to(tl.int64, bitcast=True) & -0x8000000).to(tl.float64, bitcast=True)


@triton.jit
def _rest_of(number, factor, other):
    """number - factor * other for a product that is nearly the number, exactly."""
    a = _upper(factor)
    b = factor - a
    c = _upper(other)
    d = other - c
    return ((number - a * c) - a * d - b * c) - b * d


@triton.jit
def ratio(number, divisor):
    """number / divisor in float64, a block by a scalar, as the exact division, which is a call: around it values spill.

    It multiplies by a reciprocal, which Newton's method improves, and corrects the result by what is left.
    """
    # To a divisor of 1 .. 2, and a number with the same ratio.
    bits = divisor.to(tl.int64, bitcast=True)
    exponent = (bits >> 52) & 0x7FF
    number *= ((2046 - exponent) << 52).to(tl.float64, bitcast=True)
    divisor = ((bits & ~(0x7FF << 52)) | (1023 << 52)).to(tl.float64, bitcast=True)
    inverse = (1.0 / divisor.to(tl.float32)).to(tl.float64)
    for _ in tl.static_range(3):
        inverse += inverse * _rest_of(1.0, inverse, divisor)
    guess = number * inverse
    rest = _rest_of(number, guess, divisor)
    # Nothing to correct where there is no rest, or no number.
    return tl.where((rest != 0) & (tl.abs(guess) < 1e300), guess + rest * inverse, guess)


@triton.jit
def _as_float32(number, narrow):
    """float64 numbers, rounded to float32 if ``narrow``."""
    return tl.where(narrow, number.to(tl.float32).to(tl.float64), number)


@triton.jit
def encoded_floats(bits, written, stored, scale, offset, narrow):
    """(bits, whether they fit) of (written - offset) / scale, in float64, or as float32 computes it if ``narrow``.

    Differences and ratios of float32 numbers may be rounded twice: they are never so near to the middle of two.
    """
    number = floats_of(bits, written, tl.float32).to(tl.float64) if narrow else floats_of(bits, written, tl.float64)
    if (scale != 1) | (offset != 0):
        number = _as_float32(number - _as_float32(offset, narrow), narrow)
        number = _as_float32(ratio(number, _as_float32(scale, narrow)), narrow)
    return float_bits(number, stored, tl.float64)


@triton.jit
def encoded_bits(bits, written, stored, scale, offset):
    """(bits of the stored dtype, whether the numbers fit) of bits of the written dtype."""
    if ((scale == 1) & (offset == 0)) & ((is_float(written) | is_float(stored)) == 0):
        found, fits = integer_bits(integers_of(bits, written), stored)
    else:
        narrow = (written != FLOAT64) & (stored != FLOAT64)
        found, fits = encoded_floats(bits, written, stored, scale, offset, narrow)
    return found, fits


# Memory


@triton.jit
def load_as(address, mask, DTYPE: tl.constexpr):
    return tl.load(address.to(tl.pointer_type(DTYPE)), mask=mask, other=0).to(tl.int64)


@triton.jit
def load_aligned_bits(address, shift, mask):
    """Elements of ``1 << shift`` bytes at int64 addresses, as int64; what lies above their bits is undefined."""
    if shift == 2:
        bits = load_as(address, mask, tl.int32)
    elif shift == 1:
        bits = load_as(address, mask, tl.int16)
    elif shift == 0:
        bits = load_as(address, mask, tl.int8)
    else:
        bits = load_as(address, mask, tl.int64)
    return bits


@triton.jit
def load_bits(address, shift, unit, mask):
    """As :func:`load_aligned_bits`, of addresses that are multiples of ``1 << unit``.

    Elements that are not aligned are put together of bytes.
    """
    if unit < shift:
        bits = address * 0
        for byte in range(0, 1 << shift):
            bits |= load_as(address + byte, mask, tl.uint8) << (byte * 8)
    else:
        bits = load_aligned_bits(address, shift, mask)
    return bits


@triton.jit
def store_as(address, bits, mask, DTYPE: tl.constexpr):
    tl.store(address.to(tl.pointer_type(DTYPE)), bits.to(DTYPE), mask=mask)


@triton.jit
def store_bits(address, bits, shift, unit, mask):
    """The opposite of :func:`load_bits`."""
    if unit < shift:
        for byte in range(0, 1 << shift):
            store_as(address + byte, bits >> (byte * 8), mask, tl.int8)
    elif shift == 2:
        store_as(address, bits, mask, tl.int32)
    elif shift == 1:
        store_as(address, bits, mask, tl.int16)
    elif shift == 0:
        store_as(address, bits, mask, tl.int8)
    else:
        store_as(address, bits, mask, tl.int64)
