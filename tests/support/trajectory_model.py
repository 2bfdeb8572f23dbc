"""A ring of steps in plain Python, and the tensors that a trajectory index of it must hold.

Steps are counted by *age* here: 0 is the oldest step in the ring, the last one the newest. Trajectories, and the slices
drawn from them, are those of :mod:`gpubuf.kernels.trajectories.reference`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

from gpubuf.kernels.trajectories import Rule, reference


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

    def trajectories(self) -> list[list[int]]:
        """The rows of every trajectory."""
        return reference.trajectories(list(self.ring), self.steps, self.envs, self.written, self.by_id)

    def is_virtual_end(self, row: int) -> bool:
        """Whether a trajectory ends here only because it is still in progress: there is no flag."""
        newest = self.size > 0 and row // self.envs == self.position(self.size - 1)
        return newest and (self.by_id or not self.ring[-1][row % self.envs])

    def ends(self) -> list[int]:
        """All words of the bitmap and its summaries, as signed 64-bit integers."""
        lasts = [trajectory[-1] for trajectory in self.trajectories()]
        set_bits = {(row // self.envs, row % self.envs) for row in lasts if not self.is_virtual_end(row)}
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

    def sums(self, rule: Rule, fan_out: int) -> list[int]:
        """All levels of the sum tree, each padded to whole nodes, and the root."""
        level = [0] * (-(-self.steps // 64) * self.envs)
        for trajectory in self.trajectories():
            step, env = divmod(trajectory[-1], self.envs)
            weight = len(reference.offsets(rule, len(trajectory)))
            level[step // 64 * self.envs + env] += weight if rule.by_transition else min(weight, 1)
        result: list[int] = []
        while True:
            level += [0] * (-len(level) % fan_out)
            result += level
            level = [sum(level[at : at + fan_out]) for at in range(0, len(level), fan_out)]
            if len(level) == 1:
                return result + level

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
