"""How close the result of an operation must be to the truth: no further than what PyTorch has in the same dtype."""

from __future__ import annotations

from torch import Tensor


def assert_no_worse(ours: Tensor, plain: Tensor, truth: Tensor, tolerance: float) -> None:
    """``ours`` is not further from the truth than ``plain``, PyTorch's in the same dtype, plus a tolerance."""
    assert ours.shape == truth.shape
    if truth.numel() == 0:
        return
    size = float(truth.abs().max()) + 1
    error = float((ours.double() - truth).abs().max())
    allowed = float((plain.double() - truth).abs().max()) + tolerance * size
    assert error <= allowed, f"{error} > {allowed}"
