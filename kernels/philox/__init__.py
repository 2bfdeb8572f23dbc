"""Random numbers: Philox4x32-10, the same variates from Triton and from the CPU.

State lives in a tensor ``rng``, int64 ``[3]`` = (seed, offset, ticket), so that a captured CUDA graph
draws new numbers at every replay. Variate ``i`` of a call is a pure function of (seed, offset + i):
key = the 64-bit seed (low word, high word), counter = (low and high word of offset + i, 0, 0); its
uniform takes the first two output words ``(hi, lo)`` as ``((hi << 32 | lo) >> 11) * 2**-53``, a float64
in [0, 1) with all its 53 bits random. A call of ``n`` variates moves the offset by ``n``.

The ticket is scratch of the GPU kernels: the program that takes the last one advances the
offset (``take_ticket`` and ``advance_state`` in ``_triton.py``). It is zero between calls.

Reference: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpubuf.kernels._registry import define

SEED, OFFSET, TICKET = range(3)
"""Places in a random state."""

RESOLUTION = 2.0**-53
"""Uniforms are multiples of this."""


def new_state(seed: int, device: torch.device | str) -> Tensor:
    """A fresh random state: int64 ``[3]`` on ``device`` at offset 0. Any 64-bit seed."""
    signed = (seed + 2**63) % 2**64 - 2**63
    return torch.tensor([signed, 0, 0], dtype=torch.int64, device="cpu").to(device)


def check_state(rng: Tensor) -> None:
    """Raise unless ``rng`` is a random state that a kernel may address: int64 ``[3]``, contiguous."""
    if rng.dtype is not torch.int64:
        raise TypeError(f"the random state must be int64, not {rng.dtype}")
    if rng.dim() != 1 or rng.numel() != 3 or not rng.is_contiguous():
        raise ValueError(f"the random state must be contiguous, of shape [3], not of shape {list(rng.shape)}")


def check_request(rng: Tensor, n: int) -> None:
    """Raise unless ``n`` variates can be drawn from ``rng``."""
    check_state(rng)
    if n < 0:
        raise ValueError(f"the number of draws must not be negative, but is {n}")


uniform = define(
    "philox_uniform(Tensor(a!) rng, int n) -> Tensor",
    __name__,
    fake=lambda rng, n: rng.new_empty(n, dtype=torch.float64),
)
"""``uniform(rng, n)``: ``n`` float64 uniforms in [0, 1), ``[n]``; advances ``rng`` by ``n``. No host sync."""
