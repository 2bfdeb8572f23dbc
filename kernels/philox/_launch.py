"""Launches the Philox kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from gpubuf.kernels._launching import cdiv, launch
from gpubuf.kernels.philox import check_request
from gpubuf.kernels.philox._triton import philox_uniform_kernel

BLOCK = 512


def uniform(rng: Tensor, n: int) -> Tensor:
    """``n`` uniforms; see :data:`gpubuf.kernels.philox.uniform`."""
    check_request(rng, n)
    out = torch.empty(n, dtype=torch.float64, device=rng.device)
    if n:
        launch(philox_uniform_kernel, cdiv(n, BLOCK), rng, out, n, BLOCK=BLOCK)
    return out
