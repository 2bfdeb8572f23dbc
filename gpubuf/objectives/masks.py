"""Importance weights and masks of a batch: which rows count, and how much."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from gpubuf.modules.plain import entry
from gpubuf.objectives.shapes import per_row, rows_of

#: Entries of a batch that, where present, say which rows count; all that are there must agree.
AUTO_LOSS_MASK_KEYS: tuple[NestedKey, ...] = (("collector", "mask"), "shifted_valid")


def mask_keys(chosen: NestedKey | None) -> tuple[NestedKey, ...]:
    """The keys of masks: :data:`AUTO_LOSS_MASK_KEYS` for "auto", none for None, otherwise ``chosen``."""
    return AUTO_LOSS_MASK_KEYS if chosen == "auto" else () if chosen is None else (chosen,)


def maybe(tensordict: TensorDictBase, key: NestedKey) -> Tensor | None:
    """The tensor at ``key``, or None. That a batch has none costs a fifth of what ``get`` takes to find out."""
    root = key if isinstance(key, str) else key[0]
    found: Tensor | None = tensordict.get(key, None) if root in tensordict.keys() else None
    return found


def none_in(tensordict: TensorDictBase, keys: Iterable[NestedKey]) -> bool:
    """Whether the batch has none of ``keys``, by their first parts. A loss asks it several times, of most batches."""
    present = tensordict.keys()
    for key in keys:  # noqa: SIM110 - a generator would take longer than this
        if (key if isinstance(key, str) else key[0]) in present:
            return False
    return True


def importance_weight(
    tensordict: TensorDictBase, key: NestedKey, wanted: bool | str, shape: torch.Size
) -> Tensor | None:
    """The weights of a loss of ``shape``, one element per row, or None.

    Args:
        tensordict: the batch.
        key: of the weights.
        wanted: True, False, or "auto": where the batch has them.
        shape: of the loss.

    Raises:
        KeyError: weights are wanted, and the batch has none.
    """
    if wanted not in (True, "auto"):
        return None
    weight = maybe(tensordict, key)
    if weight is not None:
        return per_row(weight, shape, str(key))
    if wanted is True:
        raise KeyError(f"use_prioritized_weights=True, but the batch has no {key!r}")
    return None


def joint_mask(tensordict: TensorDictBase, keys: Iterable[NestedKey], shape: torch.Size) -> Tensor | None:
    """True for the rows that every mask at ``keys`` lets count, one element per row; None if there is no mask."""
    mask = None
    for key in keys:
        each = maybe(tensordict, key)
        if each is not None:
            each = per_row(each, shape, str(key))
            mask = each if mask is None else mask.reshape(shape) & each.reshape(shape)
    return mask


def masks_in(tensordict: TensorDictBase, keys: Iterable[NestedKey]) -> list[Tensor]:
    """The masks that the batch has at ``keys``, as they are."""
    return [mask for mask in (maybe(tensordict, key) for key in keys) if mask is not None]


def without_masked(tensordict: TensorDictBase, masks: Sequence[Tensor], keys: Iterable[NestedKey]) -> TensorDictBase:
    """The batch as networks and targets see it: in masked rows, no NaN and nothing infinite.

    The gradient of such a row is 0, but 0 times NaN reaches the parameters. These elements are taken from the first row
    that counts instead, so that no network sees an observation that it can't take. Other elements stay.
    If no row counts, they become 0.

    Args:
        tensordict: the batch.
        masks: what :func:`masks_in` found.
        keys: entries that networks or targets read.

    Returns:
        A shallow copy, in which the entries at ``keys`` are new.
    """
    out = tensordict.copy()
    for key in keys:
        value = entry(tensordict, key)
        if not value.is_floating_point():
            continue
        counts = None
        for mask in masks:
            masked = rows_of(~mask.bool(), value)
            counts = ~masked if counts is None else counts & ~masked
        assert counts is not None
        rows = value.flatten(0, value.ndim - 2) if value.ndim > 1 else value
        flags = counts.expand(*value.shape[:-1], 1).flatten() if value.ndim > 1 else counts.expand(value.shape)
        first = rows.index_select(0, flags.int().argmax().reshape(1)).squeeze(0)
        # If no row counts, that is a masked one.
        first = torch.where(first.isfinite(), first, 0)
        out.set(key, torch.where(counts | value.isfinite(), value, first))
    return out
