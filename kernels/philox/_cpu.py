"""Philox in plain NumPy."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gpubuf.kernels.philox import OFFSET, RESOLUTION, check_request

_LOW, _WORD = np.uint64(0xFFFFFFFF), np.uint64(32)
_P, _Q = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)


def uniforms_at(seed: int, positions: Tensor) -> Tensor:
    """The uniforms at stream positions (int64), in their shape: float64."""
    # NumPy's unsigned integers: their operations are short, and PyTorch has few for them.
    position = positions.numpy().view(np.uint64)
    x0, x1 = position & _LOW, position >> _WORD
    x2 = x3 = np.zeros_like(position)
    keys = _keys(seed & 0xFFFFFFFF, 0x9E3779B9), _keys((seed >> 32) & 0xFFFFFFFF, 0xBB67AE85)
    for key_0, key_1 in zip(*keys, strict=True):
        p, q = x0 * _P, x2 * _Q
        x0, x1, x2, x3 = (q >> _WORD) ^ x1 ^ key_0, q & _LOW, (p >> _WORD) ^ x3 ^ key_1, p & _LOW
    bits = (x0 << np.uint64(21)) | (x1 >> np.uint64(11))
    return torch.from_numpy(bits.view(np.int64)).double() * RESOLUTION


def _keys(word: int, step: int) -> list[np.uint64]:
    return [np.uint64((word + step * i) & 0xFFFFFFFF) for i in range(10)]


def uniform(rng: Tensor, n: int) -> Tensor:
    """``n`` uniforms; see :data:`gpubuf.kernels.philox.uniform`."""
    check_request(rng, n)
    seed, offset, _ = rng.tolist()
    rng[OFFSET] += n
    return uniforms_at(seed, torch.arange(n, device="cpu") + offset)
