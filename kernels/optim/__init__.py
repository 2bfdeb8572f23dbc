"""The step of an optimiser: AdamW, unit rows and averaged targets of all parameters, in one pass over memory.

The parameters of one step form *buckets*: up to :data:`MAX_ENTRIES` tensors of one dtype on one device. A bucket is one
launch on a GPU, and on a CPU a call of PyTorch's fused AdamW for each group. An *entry* of a bucket is a parameter with
its two moments, or a tensor that is only the source of a target, or both. The kernels read the entries by address,
through ``table``: int64 ``[E, 9]``, an :func:`entry` each. Gradients have new addresses at every step, so they are
arguments.

``tiles``: int64 ``[T, 2]`` = (entry, number of the tile in it), the work of each program, made by :func:`tiles_of`.

``hyper``: float64 ``[G, 9]``, a row for each group of parameters, read on the device: a captured graph sees changes.

Arithmetic is float64 for float64 parameters, and float32 for float32 and bfloat16 ones. Moments and their arithmetic
are never bfloat16. Tensors are dense; an entry's tensors (gradient, moments, target) have the strides of its parameter.

A row of a weight is normalised by the program that updates it: each program has whole rows, so the sum of squares needs
neither a second launch nor atomics, and its order, and with it every bit, is always the same.

References: Loshchilov & Hutter, "Decoupled Weight Decay Regularization", arXiv 1711.05101; Kingma & Ba, "Adam", arXiv
1412.6980; Lillicrap et al., "Continuous control with deep reinforcement learning", arXiv 1509.02971 (the targets).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from gpubuf.kernels._registry import define

PARAM, EXP_AVG, EXP_AVG_SQ, TARGET, NUMEL, GROUP, LENGTH, INNER, NORM = range(9)
"""Columns of a table. TARGET is 0 where there is none, LENGTH is 0 where rows are not normalised.

A row has LENGTH elements, INNER elements apart, and its norm becomes NORM, the bits of a float64.
"""
ENTRY = 9

LR, BETA1, BETA2, EPS, WEIGHT_DECAY, TAU, LOG2_BETA1, LOG2_BETA2, MAX_NORM = range(9)
"""Columns of the hyperparameters."""
HYPER = 9

MAX_ENTRIES = 64
"""Entries of a bucket: the addresses of gradients are arguments of a kernel, which every program searches."""

TILE = 1024
"""Elements of a program."""
ROW_TILE = (1, 256)
"""Rows, and elements of them at a time, of a program whose rows are contiguous."""
STRIDED_TILE = (16, 16)
"""Elements of rows at a time, and rows, of a program whose rows are strided."""

SMALLEST_NORM = 1e-12
"""Rows that are shorter are divided by this."""

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
"""Of parameters."""


def moment_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the moments, and of the arithmetic, of parameters of ``dtype``."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def address(tensor: Tensor) -> int:
    """The address of a tensor; a fake one has a shape and a device but no memory, and its kernels never run."""
    return 0 if isinstance(tensor, FakeTensor) else tensor.data_ptr()


def row_shape(tensor: Tensor, dim: int) -> tuple[int, int]:
    """(length, inner) of the rows of a dense tensor along ``dim``: their elements, and the distance between these."""
    length = tensor.shape[dim]
    return length, tensor.stride(dim) if length > 1 else 1


def entry(
    param: Tensor,
    moments: tuple[Tensor, Tensor] | None = None,
    target: Tensor | None = None,
    group: int = 0,
    unit_dim: int | None = None,
    norm: float = 1.0,
) -> list[int]:
    """The entry of a tensor in a table.

    Args:
        param: the parameter, or the source of a target.
        moments: its two moments; None if it is only a source.
        target: follows the parameter; None: there is none.
        group: row of the hyperparameters.
        unit_dim: dimension along which rows have length ``norm`` after a step; None: they are free.
        norm: that length.
    """
    first, second = (0, 0) if moments is None else map(address, moments)
    length, inner = (0, 1) if unit_dim is None or not param.numel() else row_shape(param, unit_dim)
    (bits,) = struct.unpack("q", struct.pack("d", norm))
    follower = 0 if target is None else address(target)
    return [address(param), first, second, follower, param.numel(), group, length, inner, bits]


def tiles_of(entries: Sequence[Sequence[int]]) -> list[list[int]]:
    """(entry, number) of every tile of a bucket. There is at least one, as the steps are counted by a program."""
    tiles = []
    for number, (*_, numel, _, length, inner, _) in enumerate(entries):
        if length == 0:
            count = -(-numel // TILE)
        elif inner == 1:
            count = -(-numel // (length * ROW_TILE[0]))
        else:
            count = numel // (length * inner) * -(-inner // STRIDED_TILE[1])
        tiles += [[number, tile] for tile in range(count)]
    return tiles or [[0, 0]]


adamw = define(
    "optim_adamw(Tensor table, Tensor tiles, Tensor hyper, Tensor?[] grads, bool[] averages, Tensor? norm,"
    " Tensor(a!) steps, Tensor(b!) ticket, Tensor(c!)[] params, Tensor(d!)[] moments, Tensor(e!)[] targets,"
    " bool aligned, bool unit_rows) -> ()",
    __name__,
    fake=lambda *_: None,
)
"""One step for a bucket. For every entry with a gradient g, with t the entry's step, counted from 1::

    g = g * min(1, max_norm / (norm + 1e-6))                 if ``norm`` is given
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g^2
    p = p * (1 - lr * weight_decay) - lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
    p = p * NORM / |p| for every row of p                    if LENGTH is not 0

and then for every entry that has a target and ``averages``, with or without a gradient: target += tau * (p - target).

Args:
    table, tiles, hyper: see above.
    grads: one for each entry, of its parameter's dtype and strides; None leaves parameter, moments and step alone.
    averages: one for each entry: whether its target moves.
    norm: float ``[1]`` or ``[]``, the norm of all gradients; None: they are not clipped. Read on the device.
    steps: float32 ``[E]``, the steps of each entry so far.
    ticket: int64 ``[1]``, scratch of a GPU, zero between calls.
    params, moments, targets: the tensors that the table's addresses belong to: they say what the operation writes.
        ``params`` has one for each entry.
    aligned: whether all addresses in the table are divisible by 16. A GPU moves such tensors in wider accesses.
    unit_rows: whether LENGTH is not 0 anywhere.

A gradient that is not finite spreads, as with ``torch.optim.AdamW``. No host sync.

Raises:
    ValueError: there are not as many gradients as entries, or one has another dtype, size or device than its parameter.
"""
