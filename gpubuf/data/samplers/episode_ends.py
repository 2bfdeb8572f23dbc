"""The ends of trajectories: stored flags, stored identifiers, or a fixed tensor of either."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.storage.layout import Key, RowLayout, address, as_key, inside
from gpubuf.data.storage.schema import check_tells_ends
from gpubuf.data.storage.tensor_storage import TensorStorage
from gpubuf.kernels.rows import table_entry

#: Keys of identifiers of trajectories, tried in this order if no key is given.
TRAJECTORY_KEYS: tuple[Key, ...] = (("collector", "traj_ids"), ("episode",))
END_KEY: Key = ("next", "done")

# How much of a storage is compared to find out whether its rows are in order.
_ROWS, _BYTES = 512, 1 << 20


@dataclass(frozen=True)
class Signal:
    """Tells where the trajectories of a storage end.

    Attributes:
        table: int64 ``[K, 5]``, entries of a table of :mod:`gpubuf.kernels.rows`, on the storage's device.
        by_id: the rows are identifiers, whose change ends a trajectory, instead of flags.
        assumed: the flags were chosen by default, not by the user.
        tensor: the tensor that the table points to, if that is not the storage.
        positions: which keys of the storage the table points to, otherwise.
    """

    table: Tensor
    by_id: bool
    assumed: bool = False
    tensor: Tensor | None = None
    positions: tuple[int, ...] = ()

    def moved(self, storage: TensorStorage) -> Signal:
        """The same signal, after the storage has moved."""
        if self.tensor is not None:
            return fixed_signal(storage, self.tensor, self.by_id)
        return dataclasses.replace(self, table=_addresses(storage, self.positions))


def _addresses(storage: TensorStorage, positions: Sequence[int]) -> Tensor:
    return _with_breaks(storage, torch.stack([storage.table[position] for position in positions]))


def _with_breaks(storage: TensorStorage, table: Tensor) -> Tensor:
    """Entries, and those of the flags that the storage sets where rows are not continued."""
    return table if storage.breaks is None else torch.cat([table, storage.breaks.entries])


def signal_keys(
    layout: RowLayout, ndim: int, end_keys: Sequence[Any] | None = None, traj_key: Any | None = None
) -> tuple[tuple[int, ...], bool]:
    """Which keys of a row tell where trajectories end: their positions in the layout, and whether they are identifiers.

    Identifiers come first if a key for them is given, or no key at all: then :data:`TRAJECTORY_KEYS` are tried, and
    :data:`END_KEY`. If the kind that was asked for is missing, the other one is used, with a warning.

    Raises:
        KeyError: neither is there.
        RuntimeError: the rows are objects.
        ValueError: the rows are themselves batches.
    """
    if layout.nested_batch:
        raise ValueError(
            f"the rows of the storage have batch dimensions of their own, {list(layout.nested_batch)}: to keep the "
            f"steps of several environments, give the storage ndim={ndim + len(layout.nested_batch)}"
        )
    asked = traj_key is not None or end_keys is not None
    by_ends = (False, tuple(as_key(key) for key in end_keys) if end_keys is not None else (END_KEY,))
    by_ids = [(True, (as_key(traj_key),))] if traj_key is not None else [(True, (key,)) for key in TRAJECTORY_KEYS]
    choices = [by_ends, *by_ids] if end_keys is not None and traj_key is None else [*by_ids, by_ends]
    for by_id, keys in choices:
        positions = tuple(position for key in keys if (position := layout.position(key)) is not None)
        if not positions:
            continue
        if asked and (by_id, keys) != choices[0]:
            warnings.warn(
                f"{list(choices[0][1])} is not stored: trajectories are told apart by {list(keys)} instead",
                stacklevel=2,
            )
        return positions, by_id
    if not layout.leaves:
        # TorchRL's sentence, and what to do.
        raise RuntimeError(
            "Could not get a tensordict out of the storage, which is required for SliceSampler to compute the "
            "trajectories. Its rows are objects: use a LazyTensorStorage"
        )
    raise KeyError(
        f"nothing tells where trajectories end: none of {[key for _, keys in choices for key in keys]} is stored; the "
        f"storage has {[leaf.key for leaf in layout.leaves]}"
    )


def stored_signal(storage: TensorStorage, end_keys: Sequence[Any] | None = None, traj_key: Any | None = None) -> Signal:
    """The stored keys that :func:`signal_keys` names, and where they are.

    Raises:
        ValueError: they are stored in a way that does not tell.
    """
    positions, by_id = signal_keys(storage.layout, storage.ndim, end_keys, traj_key)
    check_tells_ends(storage.form, positions, by_id)
    assumed = end_keys is None and traj_key is None and not by_id
    return Signal(_addresses(storage, positions), by_id, assumed, positions=positions)


def fixed_signal(storage: TensorStorage, values: Tensor, by_id: bool) -> Signal:
    """A tensor ``[n]`` with an entry for each of the storage's first n rows.

    Raises:
        ValueError: it has fewer entries than rows are stored, or more than there is room for.
    """
    n = values.numel()
    if not len(storage) <= n <= storage.max_size:
        raise ValueError(
            f"a fixed signal has an entry for every row: it has {n}, the storage {len(storage)} rows of at most "
            f"{storage.max_size}"
        )
    full = torch.zeros(storage.max_size, dtype=values.dtype, device=storage.device)
    full[:n].copy_(values.reshape(-1))
    table = torch.tensor([table_entry(address(full), full.element_size())]).to(storage.device, non_blocking=True)
    return Signal(_with_breaks(storage, table), by_id, tensor=full)


def interleaved_environments(storage: TensorStorage, end_keys: Sequence[Any] | None = None) -> int | None:
    """How many environments take turns in a storage of one.

    The observations tell. The next observation of row p is stored again in row p + 1 or, if E environments take turns,
    in row p + E. A single environment whose next observations are E steps ahead looks alike: :func:`_take_turns` tells
    the two apart. Synchronises if the storage is not on the CPU.

    Returns:
        1 if rows follow each other, E if they do so E rows apart; None if nothing tells (yet): no key is stored both at
        the root and under ``"next"``, or next steps may be several steps ahead.
    """
    envs = math.prod(storage.shape[1:])
    rows = _first_rows(storage, end_keys) if envs == 1 else None
    if rows is None:
        return None
    values, coming, now, ended = (part.flatten(0, 1) for part in rows)
    n, going_on = len(ended), (~ended).nonzero().squeeze(-1)

    def follow(apart: int) -> Tensor:
        """Which of the rows that go on, and have a row so far behind them, go on there."""
        before = going_on[going_on < n - apart]
        return (coming[before] == now[before + apart]).all(1)

    if follow(1).any():
        return 1
    if len(going_on) == 0:
        return None
    start = int(going_on[0])
    candidates = (coming[start] == now[start:]).all(1).nonzero().squeeze(-1).tolist()
    for apart in candidates:
        if apart > 1 and len(found := follow(apart)) > 1 and bool(found.all()):
            return int(apart) if _take_turns(values, coming, ended, apart) else None
    return None


def _first_rows(storage: TensorStorage, end_keys: Sequence[Any] | None) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Of the first steps ``[T, E]``: observations as numbers, the next ones and these as bytes, and whether rows end.

    None: they can't be compared, or there are fewer than two.
    """
    layout = storage.written_layout
    if layout.position(("steps_to_next_obs",)) is not None:
        return None
    pairs = [
        leaf.key
        for leaf in layout.leaves
        if leaf.key[0] == "next" and layout.position(leaf.key[1:]) is not None and leaf.dtype is not torch.bool
    ]
    width = sum(layout.leaves[layout.position(key) or 0].row_bytes for key in pairs)
    envs = math.prod(storage.shape[1:])
    steps = min(storage.steps_stored, max(min(_ROWS, _BYTES // max(width, 1)) // envs, 2))
    if width == 0 or steps * envs < 2:
        return None
    data = inside(layout, storage[:steps], storage.ndim).cpu()

    def of(keys: list[Key], form: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.cat([form(data.get(key).reshape(steps, envs, -1).contiguous()) for key in keys], 2)

    coming, now = (of(keys, lambda value: value.view(torch.uint8)) for keys in (pairs, [key[1:] for key in pairs]))
    ended = torch.zeros(steps, envs, dtype=torch.bool)
    for key in [END_KEY] if end_keys is None else end_keys:
        if layout.position(as_key(key)) is not None:
            ended |= data.get(as_key(key)).reshape(steps, envs, -1).any(2)
    return of([key[1:] for key in pairs], _numbers), coming, now, ended


def continues_across(storage: TensorStorage, end_keys: Sequence[Any] | None = None) -> bool | None:
    """Whether the rows of a storage ``[T, E]`` continue from one environment to the next, instead of in time.

    Batches that were written in the other order of time and environments look so. Synchronises if the storage is not on
    the CPU.

    Returns:
        False if rows continue in time; None if nothing tells (yet).
    """
    first = _first_rows(storage, end_keys)
    if first is None or min(first[-1].shape) < 2:
        return None
    _, coming, now, ended = first
    if ((coming[:-1] == now[1:]).all(2) & ~ended[:-1]).any():
        return False
    across = (coming[:, :-1] == now[:, 1:]).all(2)[~ended[:, :-1]]
    # Some episodes may end without a flag.
    return True if across.numel() > 1 and across.float().mean() > 0.5 else None


def _numbers(values: Tensor) -> Tensor:
    return (torch.view_as_real(values) if values.is_complex() else values).float()


def _take_turns(now: Tensor, coming: Tensor, ended: Tensor, apart: int) -> bool:
    """Whether rows that go on ``apart`` rows later are of environments in turn, not of one that looks so far ahead.

    If they are of one environment, the last ``apart`` rows of an episode all end it and share its last observation.
    Also neighbouring rows are nearer to each other than rows ``apart``. Neither holds for environments in turn.

    Args:
        now: observations, ``[n, width]``.
        coming: the next ones, as bytes, ``[n, n_bytes]``.
        ended: bool ``[n]``, whether a row ends an episode.
        apart: number of rows, at least 2.
    """
    n = len(ended)
    first_ends = (ended[1:] & ~ended[:-1]).nonzero().squeeze(-1) + 1
    runs = [slice(start, min(start + apart, n)) for start in first_ends.tolist() if start + 1 < n]
    in_common = [bool(ended[run].all()) and bool((coming[run] == coming[run][:1]).all()) for run in runs]
    if runs and all(in_common):
        return False
    going_on = (~ended[: n - apart]).nonzero().squeeze(-1)
    beside, later = ((now[going_on + by] - now[going_on]).abs().mean().item() for by in (1, apart))
    # Observations without any order are about as far from one row as from the other: then the ends tell.
    return beside > 2 * later or (bool(runs) and not beside < 0.9 * later)
