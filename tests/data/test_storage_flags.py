"""Numbers that are stored as flags."""

import math

import pytest
import torch
from tensordict import TensorDict

from gpubuf.data import LazyTensorStorage


@pytest.mark.parametrize("strided", [False, True], ids=["", "strided"])
@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([0.0, -0.0, 1.0, -2.5, math.nan, math.inf, 1e-45, 0.0, 3.0]),
        torch.tensor([0, 1, -1, 256, 1 << 40, -(1 << 63), 0, 2, 1 << 8]),
        torch.tensor([0.0, 1e-300, math.nan, -0.0], dtype=torch.float64),
        torch.tensor([0, 255, 1, 2], dtype=torch.uint8),
    ],
    ids=["float32", "int64", "float64", "uint8"],
)
def test_numbers_become_flags_as_torch_makes_them(backend, values, strided):
    """Nine rows of one number each: what is not zero is True."""
    given = torch.stack([values, values], 1)[:, 0] if strided else values
    storage = LazyTensorStorage(16, dtypes={"flag": torch.bool})
    storage.append(TensorDict({"flag": given, "other": torch.arange(len(values))}, batch_size=[len(values)]))
    found = storage[torch.arange(len(values))]["flag"]
    assert torch.equal(found, values.bool().to(values.dtype))
