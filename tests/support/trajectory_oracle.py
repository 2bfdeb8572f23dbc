"""The trajectory index in plain Python: everything is recomputed from the list of the steps in the ring.

Steps are counted by *age* here: 0 is the oldest step in the ring, the last one the newest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Trajectory(NamedTuple):
    """Steps ``first .. last`` (ages) of environment ``env``."""

    env: int
    first: int
    last: int

    @property
    def length(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True)
class OracleRule:
    """As :class:`gpubuf.kernels.trajectories.Rule`, by enumeration."""

    slice_len: int
    min_len: int = 1
    before: int = 0
    after: int = 0
    by_transition: bool = False

    def offsets(self, length: int) -> list[int]:
        """All virtual offsets of a trajectory of that length, the lowest first."""
        if length < self.min_len:
            return []
        steps = min(self.slice_len, length)
        legal = []
        for offset in range(-steps, length + 1):
            cut_before, cut_after = max(0, -offset), max(0, offset + steps - length)
            if cut_before <= self.before and cut_after <= self.after and max(cut_before, cut_after) < steps:
                legal.append(offset)
        return legal

    def weight(self, length: int) -> int:
        offsets = len(self.offsets(length))
        return offsets if self.by_transition else min(offsets, 1)

    def covered(self, length: int, offset: int) -> tuple[int, int]:
        """(first step, number of steps) within the trajectory of the slice at a virtual offset."""
        inside = [s for s in range(offset, offset + min(self.slice_len, length)) if 0 <= s < length]
        return inside[0], len(inside)


class Model:
    """A ring of ``steps`` steps of ``envs`` environments, with one signal (a flag or an identifier) for each row."""

    def __init__(self, steps: int, envs: int, by_id: bool, written: int = 0) -> None:
        self.steps, self.envs, self.by_id = steps, envs, by_id
        self.written = written
        self.ring: deque[Sequence[Hashable]] = deque(maxlen=steps)

    def write(self, batch: Sequence[Sequence[Hashable]]) -> None:
        """Append steps, each a list of one signal for every environment."""
        self.ring.extend(batch)
        self.written += len(batch)

    def empty(self) -> None:
        """Forget all steps; the next one is written at position 0."""
        self.ring.clear()
        self.written = -(-self.written // self.steps) * self.steps

    @property
    def size(self) -> int:
        return len(self.ring)

    def position(self, age: int) -> int:
        return (self.written - self.size + age) % self.steps

    def row(self, env: int, age: int) -> int:
        return self.position(age) * self.envs + env

    def is_end(self, env: int, age: int) -> bool:
        """Whether the step's flag is set; the virtual end is not a flag."""
        if not self.by_id:
            return bool(self.ring[age][env])
        return age + 1 < self.size and self.ring[age][env] != self.ring[age + 1][env]

    def trajectories(self) -> list[Trajectory]:
        found = []
        for env in range(self.envs):
            first = 0
            for age in range(self.size):
                if self.is_end(env, age) or age == self.size - 1:
                    found.append(Trajectory(env, first, age))
                    first = age + 1
        return found

    def ends(self) -> list[int]:
        """All words of the bitmap and its summaries, as signed 64-bit integers."""
        set_bits = {
            (self.position(age), env) for env in range(self.envs) for age in range(self.size) if self.is_end(env, age)
        }
        words: list[int] = []
        places = self.steps
        while True:
            places = -(-places // 64)
            level = [0] * (places * self.envs)
            for place, env in set_bits:
                level[place // 64 * self.envs + env] |= 1 << place % 64
            words += [word - 2**64 if word >> 63 else word for word in level]
            if places == 1:
                return words
            set_bits = {(place // 64, env) for place, env in set_bits}

    def word(self, trajectory: Trajectory) -> int:
        return self.position(trajectory.last) // 64 * self.envs + trajectory.env

    def sums(self, rule: OracleRule, fan_out: int) -> list[int]:
        """All levels of the sum tree, each padded to whole nodes, and the root."""
        level = [0] * (-(-self.steps // 64) * self.envs)
        for trajectory in self.trajectories():
            level[self.word(trajectory)] += rule.weight(trajectory.length)
        result: list[int] = []
        while True:
            level += [0] * (-len(level) % fan_out)
            result += level
            level = [sum(level[at : at + fan_out]) for at in range(0, len(level), fan_out)]
            if len(level) == 1:
                return result + level

    def units(self, rule: OracleRule) -> list[tuple[Trajectory, int]]:
        """(trajectory, place in it) of every unit of weight: word by word, by rising step within a word."""
        in_order = sorted(self.trajectories(), key=lambda t: (self.word(t), self.position(t.last)))
        return [(t, place) for t in in_order for place in range(rule.weight(t.length))]

    def draw(
        self, rule: OracleRule, uniforms: Sequence[float], rank: Sequence[int] | None
    ) -> tuple[list[int], list[int], list[bool]]:
        """(index, length, last) that the contract promises for these uniforms, two for each slice."""
        units = self.units(rule)
        slices = []
        for i in range(len(uniforms) // 2):
            u, v = uniforms[2 * i], uniforms[2 * i + 1]
            unit = min(int(u * len(units)), len(units) - 1) if rank is None else rank[i]
            trajectory, place = units[unit]
            offsets = rule.offsets(trajectory.length)
            if not rule.by_transition:
                place = min(int(v * len(offsets)), len(offsets) - 1)
            first, length = rule.covered(trajectory.length, offsets[place])
            slices.append([self.row(trajectory.env, trajectory.first + first + s) for s in range(length)])
        return laid_out(slices, rule.slice_len)

    def trajectory_of(self, row: int) -> Trajectory | None:
        """None where the row is not stored."""
        return self.by_row().get(row)

    def by_row(self) -> dict[int, Trajectory]:
        return {self.row(t.env, age): t for t in self.trajectories() for age in range(t.first, t.last + 1)}

    def age(self, row: int) -> int:
        return next(age for age in range(self.size) if self.position(age) == row // self.envs)

    def slices(self, starts: Sequence[int], slice_len: int) -> tuple[list[int], list[int], list[bool]]:
        trajectories = self.by_row()
        found = []
        for row in starts:
            trajectory, age = trajectories[row], self.age(row)
            last = min(trajectory.last, age + slice_len - 1)
            found.append([self.row(trajectory.env, a) for a in range(age, last + 1)])
        return laid_out(found, slice_len)

    def bounds(self, row: int) -> tuple[int, int, int]:
        trajectory = self.by_row()[row]
        first, last = (self.row(trajectory.env, age) for age in (trajectory.first, trajectory.last))
        return first, last, trajectory.length

    def legal_rows(self, need: int, starts_too: bool) -> set[int]:
        return {
            self.row(t.env, age)
            for t in self.trajectories()
            for age in range(t.first, t.last + 1)
            if t.last - age + 1 >= need or (starts_too and age == t.first)
        }

    def touched_rows(self, n: int, need: int) -> set[int]:
        """The newest ``n`` steps, ``need - 1`` before them and the one after, whether or not they are stored."""
        cursor = self.written % self.steps
        places = {(cursor + d) % self.steps for d in range(-n - need + 1, 1)}
        return {place * self.envs + env for place in places for env in range(self.envs)}


def laid_out(slices: Sequence[Sequence[int]], slice_len: int) -> tuple[list[int], list[int], list[bool]]:
    """Slices as one flat list of rows, the last row of each repeated; their lengths; the flags of their last steps."""
    index, last = [], []
    for rows in slices:
        index += [rows[min(s, len(rows) - 1)] for s in range(slice_len)]
        last += [s == len(rows) - 1 for s in range(slice_len)]
    return index, [len(rows) for rows in slices], last
