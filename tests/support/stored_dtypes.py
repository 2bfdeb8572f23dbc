"""Storages that keep the rows of tests/support in other dtypes, without loss: whoever uses them sees no difference."""

from __future__ import annotations

from typing import Any

import torch

from gpubuf.data import Codec

#: For `transitions` of numbers below 250: every number has the same value in these.
LOSSLESS: dict[Any, torch.dtype | Codec] = {
    "observation": torch.bfloat16,
    "action": torch.float32,
    "pixels": Codec(torch.float16, scale=0.5, offset=3.0),
    ("next", "reward"): torch.float16,
    ("next", "step"): torch.int16,
    ("next", "done"): torch.uint8,
}

#: Bytes of a row of `transitions` then, beside those of the same rows as they are written.
LOSSLESS_BYTES = 6 + 4 + 14 + 6 + 2 + 1 + 2
WRITTEN_BYTES = 12 + 8 + 7 + 12 + 2 + 1 + 8
