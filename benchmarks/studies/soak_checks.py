"""The invariants of a buffer under load, whatever several threads do to it.

Every row follows from its number alone, so that any row can be checked anywhere.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf import PrioritizedSampler, PrioritizedSliceSampler, SliceSampler, TensorDictReplayBuffer
from gpubuf.kernels.sum_tree import MAX_PRIORITY

ALPHA, EPS = 0.7, 1e-8
SLICE = 8
LONGEST_EPISODE = 60


class BrokenInvariantError(Exception):
    """The buffer did something that it must not do."""


def require(holds: object, text: str) -> None:
    if not holds:
        raise BrokenInvariantError(text)


# Rows


class Rows:
    """The rows of an endless run of episodes of random lengths, each a function of its number."""

    def __init__(self, seed: int, episodes: int = 1024) -> None:
        lengths = torch.randint(1, LONGEST_EPISODE + 1, (episodes,), generator=torch.Generator().manual_seed(seed))
        self._bounds, self._episodes, self._period = lengths.cumsum(0), episodes, int(lengths.sum())

    def episode(self, number: Tensor) -> Tensor:
        within = torch.searchsorted(self._bounds, number % self._period, right=True)
        return number // self._period * self._episodes + within

    def __call__(self, number: Tensor) -> TensorDict:
        """The rows of these numbers, int64 ``[n]``, in several dtypes."""
        column, episode = number.unsqueeze(-1), self.episode(number)
        mixed = column * 0x5851F42D4C957F2D + 0x14057B7EF767814F
        rows = TensorDict(
            {
                "number": number,
                "episode": episode,
                "wide": column + torch.arange(12, dtype=torch.float64),
                "observation": (mixed >> torch.arange(0, 34, 2) & 0xFFFF).float(),
                "half": (number % 2048).half(),
                "next": {
                    "number": (number + 1).int(),
                    "byte": (column % 251).to(torch.uint8),
                    "done": (self.episode(number + 1) != episode).unsqueeze(-1),
                },
            },
            number.shape,
        )
        return rows.set("checksum", checksum(rows))

    def between(self, start: int, stop: int) -> TensorDict:
        return self(torch.arange(start, stop))


def cut(rows: TensorDict, start: int, stop: int) -> TensorDict:
    """``rows[start:stop]``, without the functions that refer to themselves which tensordict 0.15 leaves behind there:
    garbage that would count as a leak.
    """
    parts = {
        key: cut(value, start, stop) if isinstance(value, TensorDict) else value[start:stop]
        for key, value in rows.items()
    }
    return TensorDict(parts, [stop - start])


def checksum(rows: TensorDict) -> Tensor:
    """One number of all that a row holds, but for the end flag, which slices set; int64 ``[n]``."""
    parts = (
        rows["number"],
        rows["episode"],
        rows["wide"].view(torch.int64).sum(-1),
        rows["observation"].view(torch.int32).sum(-1),
        rows["half"].view(torch.int16),
        rows["next", "number"],
        rows["next", "byte"].squeeze(-1),
    )
    total = torch.zeros_like(rows["number"])
    for part in parts:
        total = total * 1_000_003 + part
    return total


def check_rows(found: TensorDict, rows: Rows, slices: bool = False) -> None:
    """Every row is whole, and the one that its number says. ``slices``: the last of every slice counts as an end."""
    due = rows(found["number"])
    require(torch.equal(checksum(found), found["checksum"]), "a row does not fit its checksum")
    if slices:
        due["next", "done"][SLICE - 1 :: SLICE] = True
    for key in due.keys(True, True):
        require(torch.equal(found[key], due[key]), f"{key!r} of a row is not that of its number")


def check_batch(batch: TensorDict, rows: Rows, capacity: int, floor: int, written: int, slices: bool) -> None:
    """A batch that was drawn when at least ``floor`` and at most ``written`` rows had been written."""
    check_rows(batch, rows, slices)
    number = batch["number"]
    require(torch.equal(batch["index"], number % capacity), "the index of a row is not where it lies")
    oldest, newest = int(number.min()), int(number.max())
    require(newest < written, f"row {newest} of {written}")
    require(oldest >= floor - capacity, f"row {oldest} was replaced when the batch was drawn, after {floor}")
    require(newest - oldest < capacity, "rows of one batch that can't have been stored together")
    if "priority_weight" in batch.keys():
        weight = batch["priority_weight"]
        require(((weight > 0) & (weight <= 1)).all(), "an importance weight is outside of (0, 1]")
    if slices:
        step, episode = number.view(-1, SLICE), batch["episode"].view(-1, SLICE)
        require((step - step[:, :1] == torch.arange(SLICE)).all(), "the steps of a slice don't follow each other")
        require((episode == episode[:, :1]).all(), "a slice leaves its episode")


# The buffer as a whole


def newest_numbers(buffer: TensorDictReplayBuffer) -> Tensor:
    """The number of the row at every position."""
    last, capacity = buffer.write_count - 1, buffer.storage.max_size
    return last - (last - torch.arange(len(buffer))) % capacity


def check_tree(sampler: PrioritizedSampler, number: Tensor, written: int, rows: Rows) -> None:
    """The root is the sum of the leaves that count, and these are the ones that should."""
    tree = sampler.tree
    leaves = tree.leaves[: number.numel()].double()
    require(((leaves > 0) & leaves.isfinite()).all(), "a weight is not positive and finite")
    # A restored sampler that has not drawn yet has not asked where slices may start: all of its leaves count.
    if isinstance(sampler, PrioritizedSliceSampler) and tree.eligible is not None:
        last = number + SLICE - 1
        due = (last < written) & (rows.episode(last) == rows.episode(number))
        position = torch.arange(number.numel())
        eligible = (tree.eligible[position // 64] >> position % 64 & 1).bool()
        require(torch.equal(eligible, due), "slices may start at other rows than marked")
        leaves = leaves[due]
    total, due_total = float(tree.total), float(leaves.sum())
    require(abs(total - due_total) <= 1e-12 * due_total, f"the tree's root is {total}, its leaves sum to {due_total}")


def check_index(sampler: SliceSampler, buffer: TensorDictReplayBuffer, rows: Rows) -> None:
    """The trajectories are the episodes that are stored, and as many are eligible as are long enough."""
    found = sampler.trajectories()
    stored = torch.arange(buffer.write_count - len(buffer), buffer.write_count)
    _, length = rows.episode(stored).unique_consecutive(return_counts=True)
    require(torch.equal(found.length, length), "the index has other trajectories than the storage")
    total, recount = int(sampler.trajectory_index.total), int((found.length >= SLICE).sum())
    require(total == recount, f"{total} eligible trajectories by the index, {recount} by a recount")


def check_all(buffer: TensorDictReplayBuffer, rows: Rows) -> None:
    """Everything in the buffer fits everything else, at one moment."""
    with buffer._lock:
        written, size, sampler = buffer.write_count, len(buffer), buffer.sampler
        require(size == min(written, buffer.storage.max_size), f"{size} rows after {written} were written")
        number, stored = newest_numbers(buffer), buffer[:]
        require(torch.equal(stored["number"], number), "the stored rows are not the newest")
        check_rows(stored, rows)
        if isinstance(sampler, PrioritizedSampler):
            check_tree(sampler, number, written, rows)
        if isinstance(sampler, SliceSampler):
            check_index(sampler, buffer, rows)


def counters(buffer: TensorDictReplayBuffer) -> dict[str, float]:
    """The counters that may only rise."""
    with buffer._lock:
        counts = {"write_count": float(buffer.write_count), "len": float(len(buffer))}
        if isinstance(buffer.sampler, PrioritizedSampler):
            counts["max_priority"] = float(buffer.sampler.tree.scalars[MAX_PRIORITY])
        return counts


def check_rising(before: dict[str, float], now: dict[str, float]) -> None:
    for name, value in now.items():
        require(value >= before.get(name, value), f"{name} fell from {before.get(name)} to {value}")


def priorities(number: Tensor, turn: int) -> Tensor:
    """A priority for every row, over seven orders of magnitude; the same one for the same row."""
    return 10.0 ** ((number * 7919 + turn) % 7 - 3) * (1 + number % 10)


def update_late(buffer: TensorDictReplayBuffer, batch: TensorDict, turn: int) -> int:
    """Give priorities to a batch sampled long ago. Rows replaced since keep theirs; returns how many these are."""
    priority = priorities(batch["number"], turn)
    batch["td_error"] = priority
    index = batch["index"]
    with buffer._lock:
        sampler = buffer.sampler
        assert isinstance(sampler, PrioritizedSampler)
        same = buffer[index]["number"] == batch["number"]
        before = sampler.tree.leaves[index]
        buffer.update_tensordict_priority(batch)
        after = sampler.tree.leaves[index]
    due = ((priority.double() + EPS) ** ALPHA).float()
    require(torch.equal(after[~same], before[~same]), "a priority went to a row that had been replaced")
    require(torch.allclose(after[same], due[same], rtol=1e-5), "a late priority of a row that is there was lost")
    return int((~same).sum())
