"""A trajectory index with a storage of signals, beside the model in plain Python that it must agree with.

Steps are counted by *age* here: 0 is the oldest step in the ring, the last one the newest. Trajectories, and the slices
drawn from them, are those of :mod:`gpubuf.kernels.trajectories.reference`.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from gpubuf.kernels import philox, rows, trajectories
from gpubuf.kernels.trajectories import Rule
from tests.kernels.reference import trajectories as reference
from tests.kernels.reference.philox import uniforms
from tests.support.interpreter import triton_on_cpu_enabled


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
        self.written = -(-self.written // (2 * self.steps)) * 2 * self.steps

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

    def counted(self, past: int, before: int = 0) -> list[list[int]]:
        """What counts of every trajectory: the oldest ``past`` steps do not, where rows were lost."""
        late = past if rows.has_lost(self.written, self.size, self.steps) else 0
        left_out = {self.row(env, age) for env in range(self.envs) for age in range(min(late, self.size))}
        return reference.counted(self.trajectories(), left_out, before)

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
        for trajectory in self.counted(rule.past):
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

    def touched_rows(self, n: int, need: int, oldest: int) -> set[int]:
        """The newest ``n`` steps, ``need - 1`` before them and the oldest after, whether or not they are stored."""
        cursor = self.written % self.steps
        places = {(cursor + d) % self.steps for d in range(-n - need + 1, oldest)}
        return {place * self.envs + env for place in places for env in range(self.envs)}


def laid_out(slices: Sequence[Sequence[int]], slice_len: int) -> tuple[list[int], list[int], list[bool]]:
    """Slices as one flat list of rows, the last row of each repeated; their lengths; the flags of their last steps."""
    index, last = [], []
    for of_slice in slices:
        index += [of_slice[min(s, len(of_slice) - 1)] for s in range(slice_len)]
        last += [s == len(of_slice) - 1 for s in range(slice_len)]
    return index, [len(of_slice) for of_slice in slices], last


def some(numbers: list[int], n: int = 24) -> list[int]:
    """All of them, or about ``n``, the first one among them, where the slow interpreter looks at them."""
    return numbers[:: max(len(numbers) // n, 1)] if triton_on_cpu_enabled() else numbers


class Index:
    """The tensors of an index and its storage, written through the operations, and the model.

    Flags take ``row_bytes`` bytes, of which a random one is not zero; identifiers are little-endian numbers. With
    ``split``, the steps from there on lie in another memory: behind a gap.
    """

    def __init__(
        self,
        steps: int,
        envs: int = 1,
        rule: Rule | None = None,
        *,
        by_id: bool = False,
        row_bytes: int = 1,
        keys: int = 1,
        fan_out: int = 16,
        laps: int = 0,
        seed: int = 0,
        split: int | None = None,
        record: int = 0,
    ) -> None:
        self.steps, self.envs, self.fan_out = steps, envs, fan_out
        self.rule = rule or Rule(4)
        self.by_id, self.row_bytes = by_id, row_bytes
        self.model = Model(steps, envs, by_id, written=laps * steps)
        self.ends, self.sums = trajectories.new_index(steps, envs, fan_out, "cpu")
        # What was never written may hold anything.
        self.split = steps * envs if split is None else split * envs
        self.gap = 0 if split is None else 24
        n = steps * envs + self.gap
        # The rows of a key may lie inside records that are wider than they are.
        stride = max(record, row_bytes)
        self.storage = [torch.full((n, stride), 205, dtype=torch.uint8)[:, :row_bytes] for _ in range(keys)]
        entries = [
            rows.table_entry(key.data_ptr(), row_bytes, stride=stride)
            if split is None
            else rows.table_entry(
                key.data_ptr(), row_bytes, self.split, key[self.split + self.gap :].data_ptr(), stride=stride
            )
            for key in self.storage
        ]
        self.signals = torch.tensor(entries)
        self.ring = rows.new_ring("cpu")
        self.ring[rows.WRITTEN] = laps * steps * envs
        self.eligible = torch.zeros(trajectories.eligible_words(steps * envs), dtype=torch.int64)
        self.random = random.Random(seed)
        self.current = [1] * envs

    def shape(self) -> tuple[int, int]:
        return self.steps, self.envs

    def store(self, n: int, chance: float) -> None:
        """Write ``n`` random steps, each the last of its trajectory with a given chance; the index is not told."""
        batch: list[list[int]] = []
        for _ in range(n):
            if self.by_id:
                self.current = [(c + (self.random.random() < chance)) % 256 for c in self.current]
                batch.append(list(self.current))
            else:
                batch.append([int(self.random.random() < chance) for _ in range(self.envs)])
        for step in batch:
            place = self.model.written % self.steps
            for env, value in enumerate(step):
                row = place * self.envs + env
                row += 0 if row < self.split else self.gap
                for key in self.storage:
                    key[row] = 0
                key = self.random.choice(self.storage)
                at = 0 if self.by_id else self.random.randrange(self.row_bytes)
                key[row, at] = value
            self.model.write([step])
        self.ring[rows.WRITTEN] += n * self.envs
        self.ring[rows.SIZE] = self.model.size * self.envs

    def update(self, n: int) -> None:
        trajectories.update(
            self.ends,
            self.sums,
            self.ring,
            self.signals,
            self.by_id,
            n,
            *self.shape(),
            self.fan_out,
            *self.rule,
        )

    def write(self, n: int, chance: float = 0.1) -> None:
        self.store(n, chance)
        self.update(n)

    def empty(self) -> None:
        """As a buffer does it."""
        self.model.empty()
        self.ring[rows.WRITTEN] = self.model.written * self.envs
        self.ring[rows.SIZE] = 0
        self.ends.zero_()
        self.sums.zero_()
        self.eligible.zero_()

    def resum(self) -> None:
        trajectories.resum(self.ends, self.sums, self.ring, *self.shape(), self.fan_out, *self.rule)

    def draw(self, rng: Tensor, n: int, rank: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        return trajectories.draw(self.ends, self.sums, self.ring, rng, rank, n, *self.shape(), self.fan_out, *self.rule)

    def slices(self, start: Tensor, slice_len: int) -> tuple[Tensor, Tensor, Tensor]:
        return trajectories.slices(self.ends, self.ring, start, slice_len, *self.shape())

    def bounds(self, row: Tensor) -> Tensor:
        return trajectories.bounds(self.ends, self.ring, row, *self.shape())

    def update_eligible(self, n: int, need: int, starts_too: bool, *back: int) -> Tensor:
        tensors = self.eligible, self.ends, self.ring
        return trajectories.update_eligible(*tensors, n, need, starts_too, *self.shape(), *back)

    def eligible_rows(self) -> set[int]:
        return {row for row in range(self.steps * self.envs) if self.eligible[row // 64].item() >> row % 64 & 1}

    def assert_state(self) -> None:
        """Bits, summaries and sums are those of the model."""
        assert self.ends.tolist() == self.model.ends()
        assert self.sums.tolist() == self.model.sums(self.rule, self.fan_out)
        assert self.ring.tolist()[2:] == [0, 0]

    def assert_bounds(self) -> None:
        """Bounds of every row in the ring."""
        bounds = reference.bounds(self.model.trajectories())
        by_row = some(sorted(bounds))
        found = self.bounds(torch.tensor(by_row, dtype=torch.int64))
        expected = [bounds[row] for row in by_row]
        assert [tuple(column) for column in found.T.tolist()] == expected

    def assert_draws(self, n: int, seed: int = 5, offset: int = 2**33 + 7) -> None:
        """Draws by uniforms, and by every rank, are those of the model."""
        units = reference.units(self.model.counted(self.rule.past), self.rule, self.envs)
        if not units:
            return
        # Each is drawn by a program of its own.
        for rank in (None, some(list(range(len(units))), 6)):
            count = n if rank is None else len(rank)
            rng = philox.new_state(seed, "cpu")
            rng[philox.OFFSET] = offset
            drawn = self.draw(rng, count, None if rank is None else torch.tensor(rank))
            assert rng.tolist() == [seed, offset + 2 * count, 0]
            expected = reference.draw(units, self.rule, uniforms(seed, offset, 2 * count), rank)
            assert tuple(part.tolist() for part in drawn) == laid_out(expected, self.rule.slice_len)

    def assert_slices(self, slice_len: int) -> None:
        """Slices from every row in the ring."""
        rest = reference.rest_of(self.model.trajectories())
        by_row = some(sorted(rest))
        found = self.slices(torch.tensor(by_row, dtype=torch.int64), slice_len)
        expected = laid_out([rest[row][:slice_len] for row in by_row], slice_len)
        assert tuple(part.tolist() for part in found) == expected

    def store_rewards(self, elements: int, dtype: torch.dtype, low: int = -3, high: int = 4) -> None:
        """Give every row of the storage a new reward, of whole numbers, which sum exactly by a discount of a half."""
        numbers = [self.random.randint(low, high) for _ in range(self.steps * self.envs * elements)]
        self.rewards = torch.tensor(numbers).view(self.steps * self.envs, elements).to(dtype)

    def update_returns(self, returns: Tensor, n: int, rule: trajectories.ReturnRule) -> None:
        entry = torch.tensor([rows.table_entry(self.rewards.data_ptr(), self.rewards[0].nbytes)])
        numbers = torch.tensor(rule, dtype=torch.float64)
        tensors, code = (returns, self.ends, self.ring, entry, numbers), rows.dtype_code(self.rewards.dtype)
        trajectories.update_returns(*tensors, code, n, *self.shape())

    def returns(self, rule: trajectories.ReturnRule) -> dict[int, list[float]]:
        """The returns to go of every row in the ring."""
        found: dict[int, list[float]] = {}
        for trajectory in self.model.trajectories():
            value = [math.nan if self.model.is_virtual_end(trajectory[-1]) else 0.0] * self.rewards.shape[1]
            for row in reversed(trajectory):
                rewards = self.rewards[row].tolist()
                pairs = zip(rewards, value, strict=True)
                value = [reward * rule.scale + rule.offset + rule.gamma * later for reward, later in pairs]
                found[row] = value
        return found

    def assert_eligible(self, n: int, need: int, starts_too: bool, before: int = 0, past: int = 0) -> None:
        """The eligible rows after a write of ``n`` steps, and the list of those that were looked at."""
        touched = self.update_eligible(n, need, starts_too, before, past).tolist()
        assert set(touched) == self.model.touched_rows(n, need, max(before, past) + 1)
        assert len(touched) == trajectories.touched_rows(n, need, *self.shape(), before, past)
        assert self.eligible_rows() == reference.eligible_starts(self.model.counted(past, before), need, starts_too)
