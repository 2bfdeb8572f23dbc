"""The dtype that a key is stored in, and the way between its numbers and those that are written."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.recording import capturing, current_recording
from gpubuf.kernels.rows import FAULTS
from gpubuf.kernels.transitions import DTYPES


@dataclass(frozen=True)
class Codec:
    """How the numbers of a key are stored: ``stored = (written - offset) / scale``, and back.

    Integers are rounded to the nearest, half to even. Numbers that don't fit an integer dtype are refused at the write
    (on a GPU they are cut to the range, and count as faults).

    A codec lies between floating-point numbers and what is stored. Integers are taken as they are: pixels that are
    written as uint8 come out as float32, scaled, if ``batch_dtypes`` says so.

    Args:
        dtype: of what is stored.
        scale: of the numbers.
        offset: of the numbers.

    Raises:
        TypeError: ``dtype`` is no dtype.
        ValueError: the dtype can't be converted, or has no room for a scale (``torch.bool``); or ``scale`` is 0, or
            one of the two is not finite.
    """

    dtype: torch.dtype
    scale: float = 1.0
    offset: float = 0.0

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        object.__setattr__(self, "scale", float(self.scale))
        object.__setattr__(self, "offset", float(self.offset))
        if self.scale == 0 or not (math.isfinite(self.scale) and math.isfinite(self.offset)):
            raise ValueError(f"a codec needs a finite scale other than 0, and a finite offset, got {self}")
        if self.dtype is torch.bool and (self.scale, self.offset) != (1.0, 0.0):
            raise ValueError(f"flags have neither scale nor offset, got {self}")


def check_dtype(dtype: torch.dtype) -> None:
    """Check that the numbers of a dtype can be converted.

    Raises:
        TypeError: it is no dtype.
        ValueError: they can't.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"expected a torch.dtype, got {dtype!r}")
    if dtype in DTYPES:
        return
    known = ", ".join(str(each).removeprefix("torch.") for each in DTYPES)
    if "float8" in str(dtype):
        raise ValueError(
            f"{dtype} can't be converted: GPUs of compute capability 8.0, such as the A100, have no instruction for "
            f"it. Choose one of {known}; a Codec scales numbers to int8 or uint8"
        )
    raise ValueError(f"{dtype} can't be converted: choose one of {known}")


def host_can_read(tensor: Tensor) -> bool:
    """Whether the host may look at a tensor's values now, without waiting for a GPU."""
    if torch.compiler.is_compiling() or current_recording() is not None or capturing():
        return False
    return tensor.is_cpu and type(tensor) is Tensor


def as_numbers(value: Any) -> Tensor:
    """A tensor, or numbers of Python's and NumPy's as one: without loss, which float32 for Python's floats would be."""
    tensor = torch.as_tensor(value)
    from_python = tensor.dtype is torch.float32 and not hasattr(value, "dtype")
    return torch.as_tensor(value, dtype=torch.float64) if from_python else tensor.detach()


def stored_as(
    values: Tensor, dtype: torch.dtype, name: str, ring: Tensor | None = None, *, exact: bool = False
) -> Tensor:
    """``values`` in the dtype of a key, as ``to()`` of tensors converts them, if the key has room for them.

    Args:
        values: real numbers of any dtype; complex ones for a complex key.
        dtype: of the key.
        name: of the key.
        ring: counters of the storage: what a GPU, or captured or compiled code, can't refuse is cut to the range, NaN
            becomes 0 in an integer, and each row with such a number counts as a fault.
        exact: refuse numbers that are rounded, too, and in flags others than 0 and 1.

    Raises:
        ValueError: a number is out of the range of the dtype, or NaN and the dtype has none; not on a GPU, and not in
            captured or compiled code.
    """
    if values.dtype is dtype:
        return values
    if values.is_complex() and not dtype.is_complex:
        raise ValueError(f"key {name} holds {dtype}, which has no room for {values.dtype}")
    if dtype.is_floating_point or dtype.is_complex:
        out = values.to(dtype)
        lost = (out if dtype.is_complex else out.to(torch.float64)).isfinite() != values.isfinite()
    elif dtype is torch.bool:
        out, lost = values != 0, values.isnan()
    else:
        out, lost = _whole(values, dtype)
    if exact:
        lost = lost | (out.to(values.dtype) != values)
    if host_can_read(values):
        if bool(lost.any()):
            raise ValueError(f"key {name} holds {dtype}, which has no room for {values[lost][0].item()!r}")
    elif ring is not None:
        ring[FAULTS].add_(lost.reshape(lost.shape[0] if lost.dim() else 1, -1).any(1).sum().to(ring.device))
    return out


def _whole(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Numbers as integers, cut to their range, and which of them are out of it."""
    limits = torch.iinfo(dtype)
    if values.is_floating_point():
        numbers = values.to(torch.float64).trunc()
        # The number beyond is a power of two, which float64 has.
        least, beyond = float(limits.min), float(limits.max + 1)
        held = (numbers >= least) & (numbers < beyond)
        numbers = torch.where(numbers.isnan(), 0.0, numbers)
        return numbers.clamp(least, math.nextafter(beyond, 0)).to(dtype), ~held
    numbers = values.to(torch.int64)
    greatest = min(limits.max, 2**63 - 1)
    out = numbers.clamp(max(limits.min, -(2**63)), greatest)
    # Numbers of uint64 above those of int64 are negative here.
    huge = (numbers < 0) if values.dtype is torch.uint64 else torch.zeros_like(numbers, dtype=torch.bool)
    return torch.where(huge, greatest, out).to(dtype), huge | (out != numbers)
