"""Entries of a batch as losses read them: shapes per row, weights, masks, joint batches, and reductions."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor

from gpubuf.kernels import td
from gpubuf.kernels._operations import computing_dtype
from gpubuf.modules.fast_call import entry


def one_of(choices: Collection[Any], value: Any, argument: str) -> Any:
    """``value``; ValueError if it is none of ``choices``."""
    # By type too: 1 is equal to True.
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ValueError(f"{argument} must be one of {list(choices)}, got {value!r}")
    return value


def next_key(key: NestedKey) -> NestedKey:
    """The key that holds the value of ``key`` after the step."""
    following: NestedKey = unravel_key(("next", key))
    return following


def per_row(tensor: Tensor, shape: torch.Size, name: str) -> Tensor:
    """``tensor`` with one element for every row of a loss of ``shape``.

    Trailing dimensions of size 1 beyond those of the loss are dropped; missing ones are added on the right; dimensions
    of size 1 are broadcast. So a loss ``[B, n_agents]`` accepts ``[B]``, ``[B, 1]``, ``[B, n_agents]``,
    ``[B, n_agents, 1]`` and ``[B, 1, 1]``. A tensor that already has one element per row is returned as it is, whatever
    its trailing dimensions of size 1: the operations read rows, not shapes.

    Raises:
        ValueError: no such reading exists.
    """
    own = list(tensor.shape)
    while len(own) > len(shape) and own[-1] == 1:
        own.pop()
    if own == list(shape):
        return tensor
    own += [1] * (len(shape) - len(own))
    if len(own) != len(shape) or any(a not in (1, b) for a, b in zip(own, shape, strict=True)):
        raise ValueError(
            f"{name!r} of shape {list(tensor.shape)} does not fit a loss of shape {list(shape)}: it may lack "
            "dimensions on the right, have dimensions of size 1, and have trailing dimensions of size 1"
        )
    return tensor.reshape(own).expand(shape)


def trimmed(flag: Tensor) -> Tensor:
    """``flag`` without trailing dimensions of size 1, one dimension at least."""
    while flag.ndim > 1 and flag.shape[-1] == 1:
        flag = flag.squeeze(-1)
    return flag


def aligned(*flags: Tensor) -> list[Tensor]:
    """``flags``, of bool or a number, as bool with the same number of dimensions: added on the right, or trimmed."""
    cut = [trimmed(flag.bool()) for flag in flags]
    dims = max(flag.ndim for flag in cut)
    return [flag.reshape(flag.shape + (1,) * (dims - flag.ndim)) for flag in cut]


def rows_of(flag: Tensor, like: Tensor) -> Tensor:
    """A flag per row, shaped to broadcast against an observation ``like``, ``[*batch, *features]``.

    Trailing dimensions of size 1 of the flag are dropped. A flag with more batch dimensions than the observation (one
    per agent, for a state that agents share) holds for a row where it holds for all of them.
    """
    flag = trimmed(flag)
    while flag.ndim > max(like.ndim - 1, 1):
        flag = flag.all(-1)
    return flag.reshape(flag.shape + (1,) * (like.ndim - flag.ndim))


#: Entries of a batch that, where present, say which rows count; all that are there must agree.
AUTO_LOSS_MASK_KEYS: tuple[NestedKey, ...] = (("collector", "mask"), "shifted_valid")

#: Entry that :func:`without_ended` adds to the batch as networks see it: which rows have a target. It is one more mask
#: of what compares values with targets, and of what else is made of the next states.
HAS_TARGET = "_has_target"


#: Entry that :func:`without_masked` adds to the batch as networks see it: which rows count. gpubuf's batch norms take
#: their statistics from these alone.
COUNTS = "_counts"


def next_state(tensordict: TensorDictBase) -> TensorDictBase:
    """The entries of the next step in a TensorDict of their own."""
    following: TensorDictBase | None = tensordict.get("next", None)
    if following is None:
        raise KeyError(f"the batch has no 'next', where the step after is; its keys are {sorted(tensordict.keys())}")
    return following.copy()


def maybe(tensordict: TensorDictBase, key: NestedKey) -> Tensor | None:
    """The tensor at ``key``, or None. That a batch has none costs a fifth of what ``get`` takes to find out."""
    root = key if isinstance(key, str) else key[0]
    found: Tensor | None = tensordict.get(key, None) if root in tensordict.keys() else None
    return found


def joint_mask(tensordict: TensorDictBase, keys: Iterable[NestedKey], shape: torch.Size) -> Tensor | None:
    """True for the rows that every mask at ``keys`` lets count, one element per row; None if there is no mask."""
    mask = None
    for key in keys:
        each = maybe(tensordict, key)
        if each is not None:
            each = per_row(each, shape, str(key))
            mask = each if mask is None else mask.reshape(shape) & each.reshape(shape)
    return mask


def leaf_keys(tensordict: TensorDictBase, keys: Iterable[NestedKey]) -> list[NestedKey]:
    """``keys``, with those of the tensors in it in the place of each that has a TensorDict."""
    found: dict[NestedKey, None] = {}
    for key in keys:
        value: Any = entry(tensordict, key)
        parts = [(key, part) for part in value.keys(True, True)] if isinstance(value, TensorDictBase) else [key]
        found.update(dict.fromkeys(map(unravel_key, parts)))
    return list(found)


def counting_rows(tensordict: TensorDictBase, keys: Iterable[NestedKey]) -> Tensor | None:
    """:data:`COUNTS` for each row of what a network reads at ``keys``, ``[*batch]``; None if every row counts."""
    counts = maybe(tensordict, COUNTS)
    if counts is None:
        return None
    # A sequence names among its inputs also what its own parts write, where these name the parts of an entry.
    given = [key for key in keys if maybe(tensordict, key) is not None]
    found = (entry(tensordict, key) for key in leaf_keys(tensordict, given))
    like = next((value for value in found if value.is_floating_point()), None)
    if like is None:
        return None
    flags = ~rows_of(~counts, like)
    # The last dimension has the features.
    return flags if like.ndim < 2 else flags.expand(*like.shape[:-1], 1).squeeze(-1)


def without_masked(
    tensordict: TensorDictBase, mask_keys: Iterable[NestedKey], keys: Iterable[NestedKey]
) -> TensorDictBase:
    """The batch as networks and targets see it: in masked rows, no NaN and nothing infinite.

    The gradient of such a row is 0, but 0 times NaN reaches the parameters. These elements are taken from the first row
    that counts instead, so that no network sees an observation that it can't take. Other elements stay.
    If no row counts, they become 0.

    Args:
        tensordict: the batch.
        mask_keys: where masks may be.
        keys: entries that networks or targets read.

    Returns:
        A shallow copy, in which the entries at ``keys`` are new, with :data:`COUNTS`; the batch itself without a mask.
    """
    given = [mask for mask in (maybe(tensordict, key) for key in mask_keys) if mask is not None]
    if not given:
        return tensordict
    every = functools.reduce(torch.logical_and, aligned(*given))
    out = tensordict.copy().set(COUNTS, every.reshape(every.shape + (1,) * (tensordict.ndim - every.ndim)))
    for key in leaf_keys(tensordict, keys):
        value = entry(tensordict, key)
        if not value.is_floating_point():
            continue
        counts = ~rows_of(~every, value)
        rows = value.flatten(0, value.ndim - 2) if value.ndim > 1 else value
        flags = counts.expand(*value.shape[:-1], 1).flatten() if value.ndim > 1 else counts.expand(value.shape)
        first = rows.index_select(0, flags.int().argmax().reshape(1)).squeeze(0)
        # If no row counts, that is a masked one.
        first = torch.where(first.isfinite(), first, 0)
        out.set(key, torch.where(counts | value.isfinite(), value, first))
    return out


def without_ended(
    tensordict: TensorDictBase, keys: Iterable[NestedKey], terminated: Tensor, done: Tensor
) -> TensorDictBase:
    """The batch as networks see it with ``skip_done_states``: in rows that have ended, no next state that isn't one.

    A terminated row has its own state in the place of the next. So has a row that is done, not terminated, and whose
    next state is not finite throughout: it would bootstrap from a value that nobody knows, so it has no target. A row
    is what one flag stands for.

    Args:
        tensordict: the batch.
        keys: the states that networks read.
        terminated: flags, of bool or a number; NaN is true.
        done: likewise.

    Returns:
        A shallow copy, in which the next states are new, with :data:`HAS_TARGET`.
    """
    terminated, done = aligned(terminated, done)
    ended, dims = terminated | done, done.ndim
    out, lost = tensordict.copy(), torch.zeros_like(ended)
    for key in leaf_keys(tensordict, keys):
        own, after = entry(tensordict, key), entry(tensordict, next_key(key))
        replaced = rows_of(terminated, after)
        if after.is_floating_point():
            rows = min(dims, max(after.ndim - 1, 1))
            unknown = ~(after.isfinite().flatten(rows).all(-1) if after.ndim > rows else after.isfinite())
            lost = lost | (ended & ~terminated & unknown.reshape(unknown.shape + (1,) * (dims - rows)))
            replaced = replaced | (rows_of(ended, after) & unknown.reshape(unknown.shape + (1,) * (after.ndim - rows)))
        out.set(next_key(key), torch.where(replaced, own, after))
    return out.set(HAS_TARGET, (~lost).reshape(lost.shape + (1,) * (tensordict.ndim - dims)))


def joined(present: TensorDictBase, following: TensorDictBase, keys: Iterable[NestedKey]) -> TensorDictBase:
    """The entries at ``keys`` of both, the rows of ``following`` after those of ``present``: ``[2 B, *rest]``.

    Where ``present`` says which rows count, both rows of a transition do, or neither.
    """
    out = TensorDict({}, batch_size=[2 * rows for rows in present.batch_size[:1]])
    for key in keys:
        out.set(key, torch.cat([entry(present, key), entry(following, key)]))
    counts = maybe(present, COUNTS)
    return out if counts is None else out.set(COUNTS, torch.cat([counts, counts]))


REDUCTIONS = {"none": td.NONE, "mean": td.MEAN, "sum": td.SUM}
LOSS_FUNCTIONS = {"l1": td.L1, "l2": td.L2, "smooth_l1": td.SMOOTH_L1, "huber": td.SMOOTH_L1}


def reduced(rows: Tensor, weight: Tensor | None, mask: Tensor | None, reduction: str) -> Tensor:
    """One number (or the weighted rows) of per-row losses, in float32 or float64; see :mod:`gpubuf.kernels.td`.

    In plain operations, for losses without a kernel of their own.
    """
    rows = rows.to(computing_dtype(rows))
    if weight is None and mask is None:
        if reduction == "none":
            return rows
        # The mean of nothing is 0, as in the kernels.
        return rows.mean() if reduction == "mean" and rows.numel() else rows.sum()
    w = torch.ones_like(rows) if weight is None else weight.reshape(rows.shape).to(rows.dtype)
    if mask is not None:
        counts = mask.reshape(rows.shape).bool()
        rows, w = torch.where(counts, rows, 0), torch.where(counts, w, 0)
    if reduction == "none":
        return w * rows
    total = (w * rows).sum()
    if reduction == "sum":
        return total
    mass = w.sum()
    return total / torch.where(mass == 0, 1, mass)
