"""The dtype that a key is stored in, and the way between its numbers and those that are written."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

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
