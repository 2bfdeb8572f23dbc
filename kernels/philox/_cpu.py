"""Philox in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from gpubuf.kernels.philox import OFFSET, RESOLUTION, check_request

_LOW = 0xFFFFFFFF


def uniforms_at(seed: int, positions: Tensor) -> Tensor:
    """The uniforms at stream positions (int64), in their shape: float64."""
    x0, x1 = positions & _LOW, (positions >> 32) & _LOW
    x2 = x3 = torch.zeros_like(positions)
    key_0, key_1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(10):
        # Modulo 2^64, so that their words are those of unsigned products.
        p, q = x0 * 0xD2511F53, x2 * 0xCD9E8D57
        x0, x1, x2, x3 = ((q >> 32) & _LOW) ^ x1 ^ key_0, q & _LOW, ((p >> 32) & _LOW) ^ x3 ^ key_1, p & _LOW
        key_0, key_1 = (key_0 + 0x9E3779B9) & _LOW, (key_1 + 0xBB67AE85) & _LOW
    return ((x0 << 21) | (x1 >> 11)).double() * RESOLUTION


def uniform(rng: Tensor, n: int) -> Tensor:
    """``n`` uniforms; see :data:`gpubuf.kernels.philox.uniform`."""
    check_request(rng, n)
    seed, offset, _ = rng.tolist()
    rng[OFFSET] += n
    return uniforms_at(seed, torch.arange(n, device="cpu") + offset)
