"""Slices in plain Python: a model of a ring of steps, which recomputes every trajectory and every possible slice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from tensordict import TensorDict

from gpubuf import LazyTensorStorage, ReplayBuffer, SliceSampler, TensorDictReplayBuffer


@dataclass
class Row:
    """One stored row: its number, unique in the whole run, where it is, whether it ends its trajectory, its id."""

    number: int
    position: int
    done: bool
    episode: int


@dataclass
class SliceModel:
    """A ring of ``steps`` steps of ``envs`` environments, as one list a environment, the oldest row first."""

    steps: int
    envs: int
    by_id: bool = False
    rows: list[list[Row]] = field(init=False)
    written: int = field(init=False, default=0)
    episode: int = field(init=False, default=0)
    current: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.rows = [[] for _ in range(self.envs)]
        self.current = [self.new_episode() for _ in range(self.envs)]

    def new_episode(self) -> int:
        self.episode += 1
        return self.episode

    def write(self, done: Sequence[Sequence[bool]]) -> TensorDict:
        """Write steps, ``done[step][env]``; returns them as a batch ``[envs, steps]`` (``[steps]`` of one env)."""
        table: list[list[Row]] = [[] for _ in range(self.envs)]
        for step in done:
            cursor = self.written % self.steps
            for env, flag in enumerate(step):
                number = self.written * self.envs + env
                row = Row(number, cursor * self.envs + env, flag, self.current[env])
                if flag:
                    self.current[env] = self.new_episode()
                table[env].append(row)
                self.rows[env] = [*self.rows[env], row][-self.steps :]
            self.written += 1
        return batch_of(table)

    def empty(self) -> None:
        self.rows = [[] for _ in range(self.envs)]
        self.written = -(-self.written // (2 * self.steps)) * 2 * self.steps

    def trajectories(self) -> list[list[Row]]:
        """Environment by environment, the oldest first."""
        found: list[list[Row]] = []
        for rows in self.rows:
            trajectory: list[Row] = []
            for i, row in enumerate(rows):
                trajectory.append(row)
                other_next = i + 1 < len(rows) and rows[i + 1].episode != row.episode
                if (other_next if self.by_id else row.done) or i == len(rows) - 1:
                    found.append(trajectory)
                    trajectory = []
        return found

    def slices(
        self, slice_len: int, strict: bool = True, before: int = 0, after: int = 0, by_transition: bool = False
    ) -> dict[tuple[int, ...], Fraction]:
        """Probability of every slice, as a tuple of row numbers."""
        eligible = [t for t in self.trajectories() if len(t) >= slice_len or not strict]
        offsets = {}
        for i, t in enumerate(eligible):
            m = min(slice_len, len(t))
            offsets[i] = range(-min(before, m - 1), len(t) - m + min(after, m - 1) + 1)
        places = sum(map(len, offsets.values()))
        found: dict[tuple[int, ...], Fraction] = {}
        for i, t in enumerate(eligible):
            m = min(slice_len, len(t))
            for offset in offsets[i]:
                numbers = tuple(row.number for row in t[max(offset, 0) : offset + m])
                share = Fraction(1, places) if by_transition else Fraction(1, len(eligible) * len(offsets[i]))
                found[numbers] = found.get(numbers, Fraction(0)) + share
        return found

    def starts(self, need: int, starts_too: bool) -> dict[int, int]:
        """Position of every row from which a prioritized slice may start, by its number."""
        return {
            row.number: row.position
            for t in self.trajectories()
            for i, row in enumerate(t)
            if len(t) - i >= need or (starts_too and i == 0)
        }


def batch_of(table: Sequence[Sequence[Row]]) -> TensorDict:
    """Rows ``[envs][steps]`` as a batch ``[envs, steps]``, or ``[steps]`` of one environment."""

    def column(values: list[list[int]], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.tensor(values, dtype=dtype)
        return tensor[0] if len(table) == 1 else tensor

    done = column([[row.done for row in rows] for rows in table], torch.bool).unsqueeze(-1)
    number = column([[row.number for row in rows] for rows in table], torch.int64)
    return TensorDict(
        {
            "number": number,
            "trajectory": column([[row.episode for row in rows] for rows in table], torch.int64),
            "is_init": number.unsqueeze(-1) % 7 == 0,
            "next": {"done": done, "terminated": done & (number % 2 == 0).unsqueeze(-1)},
        },
        batch_size=number.shape,
    )


def split(batch: TensorDict) -> list[tuple[int, ...]]:
    """The slices of a flat batch, told apart by ``("next", "truncated")``, as tuples of row numbers."""
    found: list[tuple[int, ...]] = []
    current: list[int] = []
    flags = batch["next", "truncated"].reshape(-1).tolist()
    for number, last in zip(batch["number"].reshape(-1).tolist(), flags, strict=True):
        current.append(number)
        if last:
            found.append(tuple(current))
            current = []
    assert not current, "the last slice has no last step"
    return found


def episodes(*lengths: int) -> list[list[bool]]:
    """Done flags of one environment: episodes of these lengths; a last one of 0 leaves the one before in progress."""
    flags: list[list[bool]] = []
    for length in lengths:
        if length == 0:
            flags[-1] = [False]
        flags += [[i == length - 1] for i in range(length)]
    return flags


def filled(sampler: SliceSampler, flags: list[list[bool]], capacity: int = 1000) -> tuple[ReplayBuffer, SliceModel]:
    envs = len(flags[0])
    model = SliceModel(capacity // envs, envs)
    storage = LazyTensorStorage(capacity, ndim=1 if envs == 1 else 2)
    buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler)
    buffer.extend(model.write(flags))
    return buffer, model
