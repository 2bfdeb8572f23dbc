"""Launches the Philox kernel."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from gpubuf.kernels.philox import check_request
from gpubuf.kernels.philox._triton import philox_uniform_kernel

BLOCK = 512


def uniform(rng: Tensor, n: int) -> Tensor:
    """``n`` uniforms; see :data:`gpubuf.kernels.philox.uniform`."""
    check_request(rng, n)
    out = torch.empty(n, dtype=torch.float64, device=rng.device)
    if n:
        philox_uniform_kernel[(triton.cdiv(n, BLOCK),)](rng, out, n, BLOCK=BLOCK)
    return out
