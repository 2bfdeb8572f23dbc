"""Philox on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from gpubuf.kernels._machine_code import named
from gpubuf.kernels.philox import check_request

_uniform = named("philox._cpu_kernels.uniform")


def uniform(rng: Tensor, n: int) -> Tensor:
    """``n`` uniforms; see :data:`gpubuf.kernels.philox.uniform`."""
    check_request(rng, n)
    out = torch.empty(n, dtype=torch.float64, device="cpu")
    _uniform(rng.data_ptr(), n, out.data_ptr())
    return out
