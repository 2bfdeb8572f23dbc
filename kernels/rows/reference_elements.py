"""What becomes of the elements of a row: codecs and processing, in plain torch. Slow, and read by tests only."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpubuf.kernels.rows import OPAQUE, SUM, Field, dtype_code

#: In place of memory that a field does not have.
ABSENT = torch.empty(0)


@dataclass
class Key:
    """A field and its memory: ``column``, ``entries`` and ``pending`` have rows of elements."""

    field: Field
    column: Tensor
    written: torch.dtype
    batch: torch.dtype
    mean: Tensor = ABSENT
    factor: Tensor = ABSENT
    permutation: Tensor = ABSENT
    sign: Tensor = ABSENT
    entries: Tensor = ABSENT
    pending: Tensor = ABSENT


def is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and dtype_code(dtype) != OPAQUE


def cut(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers as elements. Those of integers are rounded, half to even, and cut to the range."""
    if not is_integer(dtype) or dtype is torch.bool or numbers.dtype is dtype:
        return numbers.to(dtype)
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    return torch.tensor([0 if math.isnan(x) else min(max(x, low), high) for x in rounded(numbers)], dtype=dtype)


def rounded(numbers: Tensor) -> list[Any]:
    return [round(x) if math.isfinite(x) else x for x in numbers.reshape(-1).tolist()]


def has_codec(key: Key) -> bool:
    return (key.field.scale, key.field.offset) != (1, 0)


def encoded(key: Key, source: Tensor) -> Tensor:
    """Written rows as they are stored."""
    dtype = key.column.dtype
    if not source.numel() or (key.written is dtype and not has_codec(key)):
        return source
    numbers = source
    if has_codec(key) or not (is_integer(source.dtype) and is_integer(dtype)):
        numbers = source.to(torch.float64 if torch.float64 in (source.dtype, dtype) else torch.float32)
    if has_codec(key):
        numbers = (numbers - numbers.new_tensor(key.field.offset)) / numbers.new_tensor(key.field.scale)
    if is_integer(dtype) and dtype is not torch.bool:
        fits = [x == x and torch.iinfo(dtype).min <= x <= torch.iinfo(dtype).max for x in rounded(numbers)]
        if not all(fits):
            raise ValueError(f"a number does not fit {dtype}")
    return cut(numbers.reshape(-1), dtype).view(source.shape)


def numbers_of(key: Key, stored: Tensor) -> Tensor:
    summed = key.field.row == SUM and is_integer(stored.dtype)
    wide = summed or torch.float64 in (stored.dtype, key.batch)
    numbers = stored.to(torch.float64 if wide else torch.float32)
    if not has_codec(key):
        return numbers
    return numbers * numbers.new_tensor(key.field.scale) + numbers.new_tensor(key.field.offset)


def discounted(key: Key, rows: list[int], gamma: float) -> Tensor:
    terms = [numbers_of(key, key.column[row]) for row in rows]
    total, discount = terms[0].double(), 1.0
    for term in terms[1:]:
        discount *= gamma
        total = total + discount * term.double()
    return total.to(terms[0].dtype)


def shifted(elements: Tensor, field: Field, down: int, right: int) -> Tensor:
    y = (torch.arange(field.height) + down).clamp(0, field.height - 1)
    x = (torch.arange(field.width) + right).clamp(0, field.width - 1)
    return elements.view(-1, field.height, field.width)[:, y][:, :, x].reshape(-1)


def computed(key: Key, stored: Tensor, summed: Tensor, mirrored: bool, shift: tuple[int, int]) -> Tensor:
    """A row of the batch from a stored row, or from numbers if those are given instead."""
    field = key.field
    mirrored = mirrored and key.permutation is not ABSENT
    bounded = (field.low, field.high) != (-math.inf, math.inf)
    as_integers = is_integer(stored.dtype) and is_integer(key.batch)
    moved = summed is ABSENT and (stored.dtype is key.batch or as_integers)
    if moved and not (mirrored or has_codec(key) or bounded or key.mean is not ABSENT):
        result = cut(stored, key.batch)
    else:
        numbers = numbers_of(key, stored) if summed is ABSENT else summed
        if mirrored:
            numbers = numbers[key.permutation.long()] * key.sign.to(numbers.dtype)
        if key.mean is not ABSENT:
            numbers = (numbers - key.mean.to(numbers.dtype)) * key.factor.to(numbers.dtype)
        low, high = numbers.new_tensor([field.low, field.high])
        numbers = torch.where(numbers < low, low, numbers)
        result = cut(torch.where(numbers > high, high, numbers), key.batch)
    return shifted(result, field, *shift) if field.pad else result
