"""Whether rows follow each other in time, or the environments in turn: advice that never changes what is stored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpubuf.data.arguments import warn
from gpubuf.data.recording import host_can_read
from gpubuf.data.storage.layout import as_key
from gpubuf.data.storage.plan import Recipe
from gpubuf.data.storage.schema import NEXT_KEY, continued_keys, default_ends
from gpubuf.data.storage.storage import TensorStorage

# How much of a storage is compared at a look, and how much of it is searched at a time.
_ROWS, _BYTES, _CHUNK_BYTES = 512, 1 << 20, 1 << 23
# The share of rows that has to fit, for episodes may end without a flag, and how many rows tell.
_ENOUGH, _FEW = 0.9, 16
# So many rows ahead may be the next observation of a single environment, as in n-step transitions.
_AHEAD = 16
# In a whole storage so many rows are looked for first, and so many distances to them are tried at a time.
_PROBES, _DISTANCES = 8, 4096
# The first rows tell: with so many stored the looks end.
_LAST_LOOK = 4096


class _Steps(NamedTuple):
    """Rows as they are compared.

    Attributes:
        numbers: observations, float32 ``[n, width]``.
        now, coming: observations and next ones, as bytes, ``[n, n_bytes]``.
        ended: bool ``[n]``, whether a row ends an episode.
    """

    numbers: Tensor
    now: Tensor
    coming: Tensor
    ended: Tensor


class _Reader:
    """Reads from a storage what can be compared: the keys of one shape and dtype at the root and under ``"next"``.

    Args:
        storage: holds the rows.
        end_keys: flags that end an episode; none: those that :func:`default_ends` finds.

    Attributes:
        comparable: whether rows can be compared. Not those whose next observations may be several steps ahead.
        chunk: how many rows are read at a time where all are searched.
        most: how many rows are compared at a look.
    """

    def __init__(self, storage: TensorStorage, end_keys: Sequence[Any] | None) -> None:
        layout = storage.written_layout
        self._storage, place = storage, {leaf.key: number for number, leaf in enumerate(layout.leaves)}
        # Flags tell too little: most rows have the same.
        roots = [
            place[key] for key in continued_keys(layout.leaves) if layout.leaves[place[key]].dtype is not torch.bool
        ]
        self._pairs = [(root, place[NEXT_KEY, *layout.leaves[root].key]) for root in roots]
        ends = map(as_key, end_keys) if end_keys else default_ends(place.__contains__)
        self._ends = [place[key] for key in ends if key in place]
        width = sum(layout.leaves[root].row_bytes for root in roots)
        self.comparable = width > 0 and layout.position(("steps_to_next_obs",)) is None
        self.chunk = max(_CHUNK_BYTES // max(layout.row_bytes, 1), 1)
        self.most = max(min(_ROWS, _BYTES // max(width, 1), self.chunk), _FEW)

    def __call__(self, rows: Tensor) -> _Steps:
        """Rows at int64 ``[n]``, counted from position 0, also beyond the end of the ring."""
        n, storage = len(rows), self._storage
        tensors = storage.rows.as_written((rows % storage.max_size).to(storage.device))
        now, coming = ([tensors[pair[side]].reshape(n, -1).cpu() for pair in self._pairs] for side in (0, 1))
        numbers = [torch.view_as_real(t).flatten(1) if t.is_complex() else t for t in now]
        ended = torch.zeros(n, dtype=torch.bool, device="cpu")
        for key in self._ends:
            ended |= tensors[key].reshape(n, -1).bool().any(1).cpu()
        return _Steps(torch.cat([t.float() for t in numbers], 1), _as_bytes(now), _as_bytes(coming), ended)


def _as_bytes(keys: list[Tensor]) -> Tensor:
    return torch.cat([values.contiguous().view(torch.uint8) for values in keys], 1)


def _span(first: int, n: int) -> Tensor:
    return torch.arange(first, first + n, device="cpu")


def _share(found: Tensor) -> float:
    """The share of bools that are set; 0 of none."""
    return found.double().mean().item() if len(found) else 0.0


def environments_in_turn(
    storage: TensorStorage, end_keys: Sequence[Any] | None = None, size: int = 0, run: int = 0
) -> int | None:
    """How many environments take turns in a storage of one.

    The observations tell. The next observation of row p is stored again in row p + 1 or, if E environments take turns,
    in row p + E. The size of the writes says which E to look at: with one row per environment, row p of a write goes on
    in row p of the next one. Without it the first rows have to show it. A single environment whose next observations
    are E steps ahead looks alike: :func:`_take_turns` tells the two apart, as long as E is small.

    Synchronises if the storage is not on the CPU.

    Args:
        storage: holds the rows.
        end_keys: flags that end an episode; None: the usual ones.
        size, run: rows of each of the newest writes, and of all of these together; 0: unknown.

    Returns:
        1 if rows follow each other, E if they do so E rows apart; None if nothing tells (yet): no key is stored both at
        the root and under ``"next"``, or next steps may be several steps ahead.
    """
    read = _Reader(storage, end_keys)
    if not read.comparable or storage.shape[1:].numel() > 1 or len(storage) < 2:
        return None
    by_size = _next_write_goes_on(storage, read, size, run)
    if by_size and size > _AHEAD:
        return size
    first = read(_span(0, min(len(storage), read.most)))
    if by_size and _take_turns(first, size, sized=True):
        return size
    n, going_on = len(first.ended), (~first.ended).nonzero().squeeze(-1)

    def follow(apart: int) -> Tensor:
        """Which of the rows that go on, and have a row so far after them, go on there."""
        before = going_on[going_on < n - apart]
        return (first.coming[before] == first.now[before + apart]).all(1)

    in_order = follow(1)
    if in_order.any():
        return 1 if _share(in_order) >= _ENOUGH else None
    if len(going_on) == 0:
        return None
    start = int(going_on[0])
    candidates = (first.coming[start] == first.now[start:]).all(1).nonzero().squeeze(-1).tolist()
    for apart in candidates:
        if apart > 1 and len(found := follow(apart)) > 1 and bool(found.all()):
            return int(apart) if _take_turns(first, apart) else None
    return None


def _next_write_goes_on(storage: TensorStorage, read: _Reader, size: int, run: int) -> bool:
    """Whether rows go on where the next write has its row of the same number, and not in the row after them.

    Compared are the newest rows of the ``run`` that was written ``size`` rows at a time.
    """
    n = min(run - size, len(storage) - size, read.most)
    if size < 2 or n < _FEW:
        return False
    before, after = (read(_span(storage.written - n - back, n)) for back in (size, 0))
    open_rows = ~before.ended
    goes_on = (before.coming == after.now).all(1)[open_rows]
    in_order = (before.coming[:-1] == before.now[1:]).all(1)[open_rows[:-1]]
    return len(goes_on) >= _FEW and _share(goes_on) >= _ENOUGH and _share(in_order) < 0.5


def _take_turns(first: _Steps, apart: int, *, sized: bool = False) -> bool:
    """Whether rows that go on ``apart`` rows later are of environments in turn, not of one that looks so far ahead.

    If they are of one environment, the last ``apart`` rows of an episode all end it and share its last observation.
    Also neighbouring rows are nearer to each other than rows ``apart``. Neither holds for environments in turn.

    Args:
        first: the first rows of a storage.
        apart: number of rows, at least 2.
        sized: whether each write had so many rows, which is a reason to take them for environments.
    """
    numbers, _, coming, ended = first
    n = len(ended)
    first_ends = (ended[1:] & ~ended[:-1]).nonzero().squeeze(-1) + 1
    runs = [slice(start, min(start + apart, n)) for start in first_ends.tolist() if start + 1 < n]
    in_common = [bool(ended[run].all()) and bool((coming[run] == coming[run][:1]).all()) for run in runs]
    if runs and all(in_common):
        return False
    going_on = (~ended[: n - apart]).nonzero().squeeze(-1)
    beside, later = ((numbers[going_on + by] - numbers[going_on]).abs().mean().item() for by in (1, apart))
    # Observations without any order are about as far from one row as from the other: then the ends tell.
    return beside > 2 * later or ((bool(runs) or sized) and not beside < 0.9 * later)


def continues_across(storage: TensorStorage, end_keys: Sequence[Any] | None = None) -> bool | None:
    """Whether the rows of a storage ``[T, E]`` continue from one environment to the next, instead of in time.

    Batches that were written in the other order of time and environments look so. Synchronises if the storage is not on
    the CPU.

    Returns:
        False if rows continue in time; None if nothing tells (yet).
    """
    read, envs = _Reader(storage, end_keys), storage.shape[1:].numel()
    beside = min(envs, read.most // 2)
    steps = min(storage.steps_stored, read.most // beside)
    if not read.comparable or min(steps, beside) < 2:
        return None
    first = read((_span(0, steps)[:, None] * envs + _span(0, beside)).flatten())
    now, coming, ended = (part.unflatten(0, (steps, beside)) for part in (first.now, first.coming, first.ended))
    if ((coming[:-1] == now[1:]).all(2) & ~ended[:-1]).any():
        return False
    across = (coming[:, :-1] == now[:, 1:]).all(2)[~ended[:, :-1]]
    # Some episodes may end without a flag.
    return True if len(across) > 1 and _share(across) > 0.5 else None


def turns_in(storage: TensorStorage) -> int | None:
    """How many environments take turns in a storage of one, whose rows don't follow each other; None: nothing tells.

    Searches all rows for those that continue the oldest ones. Synchronises.
    """
    read, n = _Reader(storage, None), len(storage)
    if not read.comparable or storage.shape[1:].numel() > 1:
        return None
    oldest = storage.written - n
    first = read(_span(oldest, min(n, read.most)))
    going_on, coming = (~first.ended).nonzero(), _codes(first.coming)
    chunks = [_span(oldest + begin, min(read.chunk, n - begin)) for begin in range(0, n, read.chunk)]
    now = torch.cat([_codes(read(chunk).now) for chunk in chunks])

    def fits(rows: Tensor, apart: Tensor) -> Tensor:
        """The share of rows ``[n, 1]`` that go on so far apart ``[k]``, for each distance."""
        place = rows + apart
        stored = place < n
        same = (coming[rows] == now[place.clamp(max=n - 1)]) & stored
        return same.sum(0) / stored.sum(0).clamp(min=1)

    # Two steps of all environments are stored, at least.
    for apart in _span(2, max(n // 2 - 1, 0)).split(_DISTANCES):
        apart = apart[fits(going_on[:_PROBES], apart) > 0.5]
        found = apart[fits(going_on, apart) >= _ENOUGH]
        if len(found):
            return int(found[0])
    return None


def _codes(rows: Tensor) -> Tensor:
    """A number for each row of bytes ``[n, width]``: equal ones for equal rows, int64 ``[n]``."""
    generator = torch.Generator("cpu").manual_seed(0)
    weights = torch.randint(-(2**63), 2**63 - 1, (rows.shape[1],), generator=generator, device="cpu")
    return (rows.to(torch.int64) * weights).sum(1)


class Looks:
    """When the order of rows is looked at: with 2 rows, and again with twice as many. And how rows were written so far.

    Attributes:
        at: how many rows are written at the next look; infinity: there is none.
        size, run: rows of each of the newest writes, and of all of these together.
    """

    def __init__(self) -> None:
        self.at: float = 2
        self.size = self.run = 0

    def wrote(self, n: int) -> None:
        """A write had ``n`` rows."""
        self.run = self.run + n if n == self.size else n
        self.size = n

    def again(self, written: int) -> None:
        """Nothing told, with so many rows written."""
        # Two writes are compared, however large they are.
        self.at = 2 * written if written <= max(_LAST_LOOK, 2 * self.size) else math.inf


class RowOrder:
    """Warns of rows that continue where windows of rows don't: of environments that take turns in a storage of one, and
    of batches in the other order of time and environments.

    Args:
        recipe: of the buffer.
        dim_extend: the dimension of a written batch along which time runs.
        refused: whether the sampler refuses environments that take turns, when it draws.
    """

    def __init__(self, recipe: Recipe, dim_extend: int, refused: bool) -> None:
        self._recipe, self._dim_extend, self._refused = recipe, dim_extend, refused
        self._looks, self._written = Looks(), 0

    def look(self, storage: TensorStorage) -> None:
        """Look at the rows after a write, where they are on the CPU.

        Raises:
            UserWarning: as a warning: they continue elsewhere.
        """
        looks = self._looks
        if looks.at == math.inf:
            return
        written = storage.written
        looks.wrote(written - self._written)
        self._written = written
        if written < looks.at or not host_can_read(storage.rows.table):
            return
        # Rows of writers that take turns are cut.
        known = storage.marks.by_writers or self._recipe.traj_key is not None
        looks.at = math.inf
        if storage.ndim > 2 or known or (storage.ndim == 1 and self._refused):
            return
        ends = self._recipe.end_keys
        apart = environments_in_turn(storage, ends, looks.size, looks.run)
        across = None if apart is None else apart > 1
        if across is None and storage.ndim == 2:
            across = continues_across(storage, ends)
        if across is None:
            looks.again(written)
        elif across and storage.ndim == 2:
            time = self._dim_extend
            warn(
                f"rows continue along dimension {1 - time}, not {time}: transpose, or pass dim_extend={1 - time}; "
                f"time is read along dimension {time} of a batch, so that windows of several steps mix environments",
            )
        elif across:
            steps = self._recipe.n_steps
            what = f"n_steps={steps} mixes" if steps > 1 else "windows of several steps mix"
            warn(
                f"the rows of {apart} environments take turns in this 1-D storage, so that {what} them: use a storage "
                "with ndim=2 and batches of shape [envs, steps]",
            )
