"""Whether a buffer can take a state that was read from files: all of it is checked before any of it is used.

Checksums say that a file is as it was written; these checks say that what was written fits this buffer, and that no
number in it leads outside of anything.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpubuf.data.checkpoints.manifest import Manifest, need
from gpubuf.data.samplers.base import SamplerWithoutReplacement
from gpubuf.data.samplers.prioritized import PrioritizedSampler
from gpubuf.data.samplers.slices_without_replacement import SliceSamplerWithoutReplacement
from gpubuf.data.samplers.sum_tree import SumTree
from gpubuf.kernels.sum_tree import REFUSED
from gpubuf.kernels.trajectories import Rule

if TYPE_CHECKING:
    from gpubuf.data.buffers.replay_buffer import ReplayBuffer


def check(buffer: ReplayBuffer, manifest: Manifest, state: dict[str, Any]) -> None:
    """Raise unless ``buffer`` can take ``state``. The rows' keys, shapes and dtypes are checked by the storage.

    Raises:
        ValueError: it can't; the text states both sides.
    """
    try:
        for name in ("_storage", "_sampler", "_writer", "_transforms"):
            need(isinstance(state[name], dict), f"the checkpoint's {name} is a {type(state[name]).__name__}")
        _check_storage(buffer, manifest, state["_storage"])
        _check_sampler(buffer, state["_storage"], state["_sampler"])
        _check_transforms(buffer, state["_transforms"])
        batch_size = state["_batch_size"]
        need(batch_size is None or _is_count(batch_size, 1), f"the checkpoint's batch size is {batch_size!r}")
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        # Of another type than all that a save writes.
        raise ValueError(f"the checkpoint's state can't be used: {error!r}") from None


def _is_count(value: Any, at_least: int = 0) -> bool:
    return type(value) is int and at_least <= value < 2**63


def _check_storage(buffer: ReplayBuffer, manifest: Manifest, state: dict[str, Any]) -> None:
    need(_is_count(state["max_size"], 1), f"the checkpoint's capacity is {state['max_size']!r}")
    need(type(state["initialized"]) is bool, "the checkpoint doesn't say whether rows were written")
    rows = manifest.rows
    need(state["initialized"] == (rows is not None), "the checkpoint's state and its rows contradict each other")
    if rows is None:
        return
    written, size, capacity, shape = state["written"], state["size"], state["max_size"], tuple(state["shape"])
    need(all(_is_count(n) for n in (written, size, *shape)), f"the checkpoint's counters are {written!r} and {size!r}")
    need(
        (written, size, capacity) == (manifest.written, manifest.size, manifest.capacity),
        "the checkpoint's state and its manifest contradict each other",
    )
    per_step = math.prod(shape[1:])
    need(
        per_step > 0 and math.prod(shape) == capacity and size <= min(capacity, written) and written % per_step == 0,
        f"{size} rows of {written} written in a ring of shape {shape} are impossible",
    )
    need(
        rows.batch_shape == (size // per_step, *shape[1:]) and size % per_step == 0,
        f"the checkpoint says that it holds {size} rows of shape {shape}, its files are of {rows.batch_shape}",
    )
    need(
        len(shape) == buffer.storage.ndim,
        f"the checkpoint's rows have shape {shape}, the storage has {buffer.storage.ndim} dimension(s)",
    )


def _check_sampler(buffer: ReplayBuffer, storage: dict[str, Any], state: dict[str, Any]) -> None:
    sampler = buffer.sampler
    own = type(sampler).__name__
    need(state["type"] == own, f"the checkpoint is of a buffer with a {state['type']}, this buffer has a {own}")
    random = state["random"]
    if random is not None:
        is_state = isinstance(random, dict) and _is_tensor(random["state"], torch.int64, (3,))
        need(is_state, "the checkpoint's random state is not int64 [3]")
    if isinstance(sampler, PrioritizedSampler):
        _check_priorities(storage["max_size"], state)
    if isinstance(sampler, SamplerWithoutReplacement):
        remaining, size = state["remaining"], state["size"]
        need(_is_count(size) and type(state["ran_out"]) is bool, "the checkpoint's epoch is damaged")
        need(remaining is None or _positions_below(remaining, storage["size"]), "the checkpoint's epoch is damaged")
    if isinstance(sampler, SliceSamplerWithoutReplacement):
        ranks, epoch = state["ranks"], state["epoch"]
        need(type(state["ran_out"]) is bool, "the checkpoint's epoch is damaged")
        if ranks is not None:
            # At most one trajectory a row.
            need(_positions_below(ranks, storage["size"]), "the checkpoint's epoch is damaged")
            need(len(epoch) == 1 + len(Rule._fields) and all(_is_count(int(n)) for n in epoch), "its rule is damaged")


def _check_priorities(capacity: int, state: dict[str, Any]) -> None:
    for name in ("alpha", "beta", "eps"):
        number = state[name]
        need(
            type(number) in (int, float) and math.isfinite(number) and number >= 0,
            f"the checkpoint's {name} is {number!r}",
        )
    tree = state["tree"]
    if tree is None:
        return
    need(isinstance(tree, dict), "the checkpoint's tree is damaged")
    leaves = tree["leaves"]
    need(
        tree["capacity"] == capacity and _is_tensor(leaves, torch.float32, (capacity,)),
        f"the checkpoint's priorities are not those of {capacity} rows",
    )
    need(bool(((leaves >= 0) & leaves.isfinite()).all()), "the checkpoint's priorities must be finite and not negative")
    # Its exponents are checked by a tree; one that has refused priorities is never saved.
    SumTree(1).load_state_dict({"capacity": 1, "leaves": torch.zeros(1), "hyper": tree["hyper"]})
    need(float(tree["hyper"][REFUSED]) == 0, "the checkpoint's tree has refused priorities")


def _check_transforms(buffer: ReplayBuffer, state: dict[str, Any]) -> None:
    own = buffer.transform.state_dict()
    need(
        set(own) == set(state),
        f"the checkpoint's transforms have the entries {sorted(state)}, the buffer's have {sorted(own)}",
    )
    for name, value in own.items():
        if isinstance(value, Tensor):
            other = state[name]
            found = tuple(other.shape) if isinstance(other, Tensor) else type(other).__name__
            due = tuple(value.shape)
            need(found == due, f"transform entry {name}: the buffer has {due}, the checkpoint {found}")


def _is_tensor(value: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    return isinstance(value, Tensor) and value.dtype is dtype and tuple(value.shape) == shape


def _positions_below(value: Any, bound: int) -> bool:
    if not isinstance(value, Tensor) or value.dtype is not torch.int64 or value.dim() != 1:
        return False
    return bool(((value >= 0) & (value < bound)).all())
