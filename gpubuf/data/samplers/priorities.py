"""Priorities and indices as they are given: as vectors on a device, with masks, and the checks of exponents."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from gpubuf.data.recording import current
from gpubuf.data.storage.indexing import as_positions
from gpubuf.data.storage.layout import MASK_KEY, check_dense
from gpubuf.data.storage.schema import as_numbers
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.kernels.rows import SIZE
from gpubuf.kernels.sum_tree import NO_ROW, SMALLEST


class CountError(RuntimeError, ValueError):
    """There are not as many priorities or generations as rows."""


def vector(values: Tensor, dtype: torch.dtype, like: Tensor) -> Tensor:
    """``values`` as a contiguous ``[n]`` on the device of ``like``; as they are if they are so already.

    Numbers of float64 that float32 would round to 0 become the smallest normal one, of their sign: a small priority is
    drawn, a negative one refused.

    Raises:
        TypeError: rows or generations are not integers.
    """
    if (
        values.dtype is not dtype
        or values.dim() != 1
        or values.requires_grad
        # the number of the device, -1 for the CPU: cheaper to compare than torch.device
        or values.get_device() != like.get_device()
        or values.is_meta
        or values.layout is not torch.strided
    ):
        check_dense("rows, priorities or generations", values)
        if dtype is torch.int64 and (values.is_floating_point() or values.dtype is torch.bool):
            raise TypeError(f"rows and generations are integers, not {values.dtype}")
        values = values.detach().to(like.device).reshape(-1)
        if values.dtype is torch.float64:
            values = torch.where(values == 0, values, values.sign() * values.abs().clamp(min=SMALLEST))
        values = values.to(dtype)
    return values if values.is_contiguous() else values.contiguous()


def masks_of(told: Tensor | None, collected: Any) -> list[Tensor]:
    """Masks of the elements of a batch that have a priority; none: all of them have one.

    Args:
        told: what a loss says, at :func:`~gpubuf.data.storage.layout.priority_mask_key` of the batch.
        collected: the entry of the batch that has :data:`~gpubuf.data.storage.layout.MASK_KEY`, or None.
    """
    steps = collected.get(MASK_KEY[1], None) if isinstance(collected, TensorDictBase) else None
    return [mask for mask in (told, steps) if mask is not None]


def masks_in(data: TensorDictBase, keys: Sequence[Any], priority: Tensor) -> list[Tensor]:
    """Masks of the elements of ``priority`` that are not padding, as a batch says under ``keys``."""
    padded = (data.get(key, None) for key in keys)
    return [~each for each in padded if each is not None and each.numel() == priority.numel()]


def rows_of(masks: Sequence[Tensor], n: int) -> Tensor:
    """Which of ``n`` rows have an element that each of the masks lets count: bool ``[n]``."""
    return functools.reduce(torch.logical_and, [mask.reshape(n, mask.numel() // max(n, 1)).any(-1) for mask in masks])


def rows_at(index: Any, storage: TensorStorage) -> Tensor:
    """The flat positions of stored rows. Of others on a GPU it is ``NO_ROW``, without a sync.

    Raises:
        IndexError: no row is stored there.
    """
    positions = as_positions(index, storage.shape, storage.device, lambda: storage.steps_stored)
    if not storage.initialized or not positions.numel():
        return positions
    if not positions.is_cpu or type(positions) is not Tensor:
        return torch.where(positions < storage.ring.counters[SIZE], positions, NO_ROW)
    if int(positions.max()) >= len(storage):
        raise IndexError(f"index {int(positions.max())} is out of range: {len(storage)} rows are stored")
    return positions


def priority_vectors(
    index: Tensor, priority: Any, generation: Tensor | None, like: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows, and a priority and maybe a generation for each of them, on the device of ``like``.

    One priority stands for all.

    Raises:
        CountError: there are not as many as rows.
    """
    index = vector(index, torch.int64, like)
    n = index.numel()
    if not isinstance(priority, Tensor):
        # Filled on the device itself: a copy from the host can't be captured in a graph.
        number = isinstance(priority, int | float)
        priority = (
            torch.full((n,), priority, dtype=torch.float64, device=like.device) if number else as_numbers(priority)
        )
    if priority.numel() == 1 and n != 1:
        priority = priority.reshape(1).expand(n)
    priority = vector(priority, torch.float32, like)
    given = {"priorities": priority.numel()}
    if generation is not None:
        generation = vector(generation, torch.int64, like)
        given["generations"] = generation.numel()
    if set(given.values()) != {n}:
        raise CountError(f"{n} rows are addressed, but given are {given}")
    return index, priority, generation


def exponent(name: str, value: float) -> float:
    """``value``, checked.

    Raises:
        ValueError: it is not a finite number of at least 0.
    """
    if not 0.0 <= value < math.inf:
        raise ValueError(f"{name} must be finite and not negative, but is {value}")
    return float(value)


def refuse_negative(alpha: float = 0.0, beta: float | Tensor = 0.0) -> None:
    """Raise for negative exponents in TorchRL's words. All else that is wrong with them is found later.

    Raises:
        ValueError: one is negative.
    """
    if alpha < 0:
        raise ValueError(f"alpha must be greater or equal than 0, got alpha={alpha}")
    if not isinstance(beta, Tensor) and beta < 0:
        raise ValueError(f"beta must be greater or equal to 0, got beta={beta}")


def refuse_unusable(priority: Tensor) -> None:
    """Raise for priorities that no tree takes, before rows that bring them are written. Synchronises.

    Raises:
        ValueError: one is NaN, infinite or negative.
    """
    if not bool(((priority >= 0) & priority.isfinite()).all()):
        raise ValueError("priorities must be finite and non-negative; nothing was written")


def check_beta(beta: float | Tensor) -> None:
    """Check the exponent of the importance weights. The value of a tensor is checked only if that costs no sync.

    It costs none on the CPU, outside of a capture, whose replays have other values.

    Raises:
        ValueError: it is negative or not finite, or a tensor of several elements.
    """
    if not isinstance(beta, Tensor):
        exponent("beta", beta)
        return
    if beta.numel() != 1:
        raise ValueError(f"beta must be a single number, not of shape {list(beta.shape)}")
    if beta.is_cpu and type(beta) is Tensor and not current.recording:
        exponent("beta", beta.item())
