"""CASES 83: rows and addresses beyond 2**31, and indices that equal the capacity, in memory that is mostly not there.

What must notice a fault is proved: faults are planted at the end.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from gpubuf.kernels import config, rows, sum_tree, trajectories
from gpubuf.kernels.config import CPU_FAN_OUT, SliceConfig, UpdateConfig
from gpubuf.kernels.rows import _cpu as plain_rows
from gpubuf.kernels.rows import dtype_code, table_entry
from gpubuf.kernels.sum_tree import REFUSED, Tree, level_sizes
from gpubuf.kernels.sum_tree import _cpu as plain_tree
from gpubuf.kernels.trajectories import NO_ROW, Rule
from tests.contracts.trajectories import laid_out
from tests.kernels.reference.philox import uniforms
from tests.support.interpreter import triton_on_cpu
from tests.support.planting import planted

AROUND = 2**38
"""Bytes before and after a tensor: more than a wrong offset of 32 bits can lead away from it."""


def sparse(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of zeros, in zeros. What is never touched takes no memory."""
    n_bytes = math.prod(shape) * dtype.itemsize
    # Linux's MAP_NORESERVE, which Python names from 3.13 on.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
    try:
        memory = mmap.mmap(-1, n_bytes + 2 * AROUND, flags=flags)
    except OSError as error:
        pytest.skip(f"there is no virtual memory of {n_bytes + 2 * AROUND} bytes: {error}")
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, np.uint8))[AROUND : AROUND + n_bytes].view(dtype).view(shape)


@contextlib.contextmanager
def refused(backend: str):
    """An index that equals the capacity raises on the CPU. On a GPU it is masked."""
    with contextlib.nullcontext() if backend == "triton" else pytest.raises(IndexError):
        yield


@pytest.fixture(params=["numba", "triton", "plain"])
def backend(request: pytest.FixtureRequest):
    """Numba's kernels or Triton's, or the plain definitions."""
    with triton_on_cpu(request.param == "triton"):
        yield request.param


# Rows

SMALL, LARGE, ENVS = 600_000_009, 5_000_000_013, 3
capacities = pytest.mark.parametrize("capacity", [SMALL, LARGE])


def values_of(rows: torch.Tensor) -> list[torch.Tensor]:
    """What is in rows, by their number."""
    return [(rows % 9973)[:, None] * 100.0 + torch.arange(17), (rows % 251).to(torch.uint8)[:, None]]


Kinds = tuple[tuple[int, torch.dtype], ...]
COPIED: Kinds = ((68, torch.float32), (1, torch.uint8))


def parts(arena: torch.Tensor, n: int, kinds: Kinds = COPIED) -> list[torch.Tensor]:
    """What an arena has of each key, by the bytes of a row and the dtype."""
    offsets = rows.arena_offsets([width for width, _ in kinds], n)[0]
    return [arena[at:][: n * kind[0]].view(kind[1]).view(n, -1) for at, kind in zip(offsets, kinds, strict=True)]


class Rows:
    """A storage of rows of 68 bytes and of one, written more than three times, and a row behind its last one.

    Attributes:
        places: rows in all parts of it.
        index: the same, every other one counted from the end.
        generation: how often they were written.
    """

    def __init__(self, backend: str, capacity: int) -> None:
        self.capacity, self.steps = capacity, capacity // ENVS
        self.operations: Any = plain_rows if backend == "plain" else rows
        self.columns = [sparse(torch.float32, capacity + 1, 17), sparse(torch.uint8, capacity + 1, 1)]
        self.table = torch.tensor([table_entry(column.data_ptr(), column[0].nbytes) for column in self.columns])
        self.ring = torch.tensor([3 * capacity + 5 * ENVS, capacity, 0, 0])
        places = [0, 1, 13, 2**31 // 68 + 1, 2**32 // 68 + 3, 2**31 - 1, 2**31, 2**32 + 9, capacity - 4, capacity - 1]
        self.places = torch.tensor([place for place in places if place < capacity])
        self.index = self.places - capacity * (torch.arange(len(self.places)) % 2)
        self.generation = 3 + (self.places < 5 * ENVS).long()

    def fill(self, places: torch.Tensor) -> None:
        for column, values in zip(self.columns, values_of(places), strict=True):
            column[places] = values

    def assert_at(self, places: torch.Tensor, values: list[torch.Tensor]) -> None:
        for column, expected in zip(self.columns, values, strict=True):
            assert torch.equal(column[places], expected)

    def gather(self, index: torch.Tensor, table: Any = None, kinds: Kinds = COPIED, reading: tuple[Any, ...] = ()):
        """(what is of each key in the batch, generations)."""
        n_bytes = rows.arena_offsets([width for width, _ in kinds], len(index))[1]
        table = self.table if table is None else table
        arena, generation = self.operations.gather(table, self.ring, index, self.capacity, n_bytes, *reading)
        return parts(arena, len(index), kinds), generation


@capacities
def test_gathered_rows(backend, capacity):
    store = Rows(backend, capacity)
    store.fill(store.places)
    found, generation = store.gather(store.index)
    assert all(map(torch.equal, found, values_of(store.places)))
    assert torch.equal(generation, store.generation)


@capacities
def test_sampled_rows(backend, capacity):
    store, n = Rows(backend, capacity), 100
    drawn = torch.tensor([int(u * capacity) for u in uniforms(5, 2**33, n)])
    store.fill(drawn)
    rng, n_bytes = torch.tensor([5, 2**33, 0]), rows.arena_offsets([68, 1], n)[1]
    arena, index, _ = store.operations.sample(store.table, store.ring, rng, n, capacity, n_bytes)
    assert torch.equal(index, drawn)
    assert all(map(torch.equal, parts(arena, n), values_of(drawn)))


@capacities
def test_written_rows(backend, capacity):
    """In place, but for one that was overwritten meanwhile; and at the seam."""
    store = Rows(backend, capacity)
    store.fill(store.places)
    given = values_of(store.places + 1)
    store.generation[3] -= 1
    store.operations.write(store.table, given, store.ring, store.index, capacity, store.generation)
    for new, old in zip(given, values_of(store.places), strict=True):
        new[3] = old[3]
    store.assert_at(store.places, given)
    store.ring[0] = 4 * capacity - ENVS
    added = (store.ring[0] + torch.arange(9)) % capacity
    index = store.operations.extend(store.table, values_of(added), store.ring, 9, capacity)
    assert torch.equal(index, added)
    store.assert_at(added, values_of(added))
    assert store.ring.tolist() == [4 * capacity - ENVS + 9, capacity, 0, 0]


@capacities
@pytest.mark.parametrize("last", [True, False])
def test_rows_at_the_capacity(backend, capacity, last):
    """The row behind the last one, or the one before the first."""
    store, outside = Rows(backend, capacity), capacity if last else -capacity - 1
    index, places = torch.tensor([outside, 1]), torch.tensor([outside % (capacity + 1), 1])
    store.fill(places)
    with refused(backend):
        found, generation = store.gather(index)
        assert generation.tolist() == [-1, 4]
        assert not any(part[0].any() for part in found)
    with refused(backend):
        store.operations.write(store.table, values_of(places + 9), store.ring, index, capacity)
    store.assert_at(places[:1], values_of(places[:1]))
    assert store.ring[3] == (2 if backend == "triton" else 0)


@capacities
def test_computed_rows(backend, capacity):
    """Windows of three steps of three environments, and next observations that lie aside."""
    store, kinds = Rows(backend, capacity), (COPIED[0], *COPIED, (8, torch.int64))
    aside, pending = sparse(torch.float32, 40, 17), values_of(torch.arange(ENVS))[0]
    links, owners = sparse(torch.int32, capacity), rows.new_links(1, 40, "cpu")[1]
    ends = sparse(torch.int64, -(-store.steps // 64) * ENVS)

    def field(kind: int, column: int, dtype: torch.dtype, elements: int) -> list[int]:
        entry, code = store.table[column].tolist() if kind != rows.STEPS else [0] * 5, dtype_code(dtype)
        memory = {"entries": aside.data_ptr(), "pending": pending.data_ptr(), "side_stride": 68}
        given = memory if kind == rows.NEXT else {}
        return rows.Field(*entry, kind, code, code, code, elements, **given).encoded()

    table = torch.tensor([
        field(rows.DRAWN, 0, torch.float32, 17), field(rows.NEXT, 0, torch.float32, 17),
        field(rows.LAST, 1, torch.uint8, 1), field(rows.STEPS, 0, torch.int64, 1),
    ])  # fmt: skip
    table[3, 1] = 8
    newest, step, env = 4, store.places // ENVS, store.places % ENVS
    # The trajectory of one row ends there.
    end = len(step) // 2
    ends[step[end] // 64 * ENVS + env[end]] = 1 << int(step[end] % 64)
    length = torch.minimum((newest - step) % store.steps + 1, torch.tensor(3))
    length[end] = 1
    last = (step + length - 1) % store.steps
    following = torch.where(last == newest, 0, (last + 1) % store.steps * ENVS + env)
    store.fill(torch.cat((store.places, last * ENVS + env, following)))
    assert (last == newest).any()

    def check(n_steps: int, expected: list[torch.Tensor]) -> None:
        found, generation = store.gather(store.index, table, kinds, (ends, links, None, ENVS, n_steps))
        assert all(map(torch.equal, found, expected))
        assert torch.equal(generation, store.generation)

    observation, next_one, flag = values_of(store.places)[0], values_of(following)[0], values_of(last * ENVS + env)[1]
    next_one[last == newest] = pending[env[last == newest]]
    check(3, [observation, next_one, flag, length[:, None]])
    given, none = values_of(store.places + 5)[0], torch.empty(0)
    store.operations.relink(table, [none, given, none, none], store.ring, store.index, capacity, ENVS, links, owners)
    check(1, [observation, given, values_of(store.places)[1], torch.ones_like(length)[:, None]])


# The sum tree

FAN_OUT = {"numba": CPU_FAN_OUT, "triton": 4, "plain": 4}


class Weights:
    """A tree of rows that all weigh 1, of which only the nodes above some rows are there, and their brothers."""

    def __init__(self, backend: str, capacity: int, places: list[int]) -> None:
        self.operations: Any = plain_tree if backend == "plain" else sum_tree
        self.capacity, self.fan_out, self.places = capacity, FAN_OUT[backend], places
        self.sizes = level_sizes(capacity, self.fan_out)
        leaves = sparse(torch.float32, -(-capacity // self.fan_out) * self.fan_out)
        nodes, scalars = sparse(torch.float64, 3, sum(self.sizes)), torch.tensor([1.0, 1.0, 0.0, -1.0, 0.0]).double()
        self.tree = Tree(leaves, nodes, scalars, None, capacity, self.fan_out)
        self.weights: dict[int, float] = {}
        for row in places:
            leaves[row // self.fan_out * self.fan_out :][: self.fan_out] = 1
            for level, start, node in self.above(row):
                first, size = node // self.fan_out * self.fan_out, self.sizes[level - 1]
                # Short levels are recomputed as a whole, or all between the first and the last row of a mark.
                for brother in range(size) if size <= 128 else range(first, first + self.fan_out):
                    nodes[:, start + brother] = torch.tensor(self.expected(level, brother), dtype=torch.float64)
        leaves[capacity:] = 0

    def above(self, row: int) -> list[tuple[int, int, int]]:
        """(level, where it starts, number of the node in it) of all nodes above a row."""
        return [(k + 1, sum(self.sizes[:k]), row // self.fan_out ** (k + 1)) for k in range(len(self.sizes))]

    def expected(self, level: int, node: int) -> tuple[float, float, float]:
        """Sum, minimum and maximum of a node."""
        first, end = (min(each * self.fan_out**level, self.capacity) for each in (node, node + 1))
        if end == first:
            return 0.0, math.inf, 0.0
        named = [weight for row, weight in self.weights.items() if first <= row < end]
        every = [*named, 1.0] if len(named) < end - first else named
        return end - first - len(named) + sum(named), min(every), max(every)

    def assert_nodes(self) -> None:
        leaves, nodes = self.tree.leaves, self.tree.nodes
        assert [leaves[row].item() for row in self.places] == [self.weights.get(row, 1.0) for row in self.places]
        assert not leaves[self.capacity :].any()
        for row in self.places:
            for level, start, node in self.above(row):
                assert tuple(nodes[:, start + node].tolist()) == self.expected(level, node), (row, level)


@capacities
@pytest.mark.parametrize("stratified", [False, True])
def test_drawn_rows(backend, capacity, stratified):
    n = 16
    parts = [(i + u) / n if stratified else u for i, u in enumerate(uniforms(5, 2**33, n))]
    drawn = [int(part * capacity) for part in parts]
    weights = Weights(backend, capacity, drawn)
    index, weight = weights.operations.draw(*weights.tree, torch.tensor([5, 2**33, 0]), n, stratified)
    assert index.tolist() == drawn
    assert weight.tolist() == [1.0] * n


# Of 600 million rows the lowest levels are full: a node behind their last one is the first of the next level.
@pytest.mark.parametrize(("capacity", "single"), [(600_000_000, True), (LARGE, True), (LARGE, False)])
def test_new_priorities(backend, capacity, single):
    """Updated and marked; a row that was overwritten meanwhile, and one behind the last, are not."""
    beyond = [place for place in (2**31, 2**32 + 5) if place < capacity]
    places = [0, 1, 7, 2**29 + 1, *beyond, capacity - 2, capacity - 1]
    weights, ring = Weights(backend, capacity, places), torch.tensor([2 * capacity + 7, capacity, 0, 0])
    tree, n = weights.tree, len(places)
    index, priority = torch.tensor(places), 2.0 + torch.arange(n)
    generation = 2 + (index < 7).long()
    generation[3] -= 1
    with config.using(sum_tree_update=UpdateConfig(single, 64, 16, 4)):
        weights.operations.update(*tree, ring, index, priority, generation)
        weights.weights = {row: 2.0 + i for i, row in enumerate(places) if i != 3}
        weights.assert_nodes()
        for entry in (capacity, -2):
            wrong = torch.tensor([entry, places[1]])
            with refused(backend):
                weights.operations.update(*tree, ring, wrong, torch.tensor([9.0, 3.0]), None)
            with refused(backend):
                weights.operations.mark(*tree, wrong[:1], False)
            with refused(backend):
                weights.operations.refresh(*tree, wrong)
            weights.assert_nodes()
        assert tree.scalars[REFUSED] == (2 if backend == "triton" else 0)
        weights.operations.mark(*tree, index[-3:], False)
        weights.weights |= dict.fromkeys(places[-3:], 1.0 + n)
        weights.assert_nodes()


# Trajectories

STEPS = 2**37 + 37


class Trajectories:
    """Five steps in each of several places, with an end in the last one of all environments, and in some of one."""

    def __init__(self) -> None:
        self.shape, self.rule, n = (STEPS, ENVS), Rule(4), 5
        self.ends = sparse(torch.int64, sum(trajectories.bit_levels(*self.shape)))
        self.sums = sparse(torch.int64, sum(trajectories.level_sizes(*self.shape, 16)))
        self.last: list[list[int]] = [[] for _ in range(ENVS)]
        flags = sparse(torch.uint8, STEPS * ENVS)
        signals = torch.tensor([table_entry(flags.data_ptr(), 1)])
        for begin in (9, 2**31 // ENVS, 2**36 + 3, STEPS - 2):
            steps = [(begin + i) % STEPS for i in range(n)]
            for env in range(ENVS):
                self.last[env] += (steps[1], steps[-1]) if env == 1 else steps[-1:]
                flags[[step * ENVS + env for step in self.last[env]]] = 1
            self.ring = torch.tensor([(7 * STEPS + begin + n) * ENVS, STEPS * ENVS, 0, 0])
            trajectories.update(self.ends, self.sums, self.ring, signals, False, n, *self.shape, 16, *self.rule)
        self.cursor = steps[-1] + 1
        self.final = {step * ENVS + env for env, of_env in enumerate(self.last) for step in of_env}
        near = [(step + by) % STEPS for step in self.last[1] for by in (0, 1, 2**33)]
        self.asked = [step * ENVS + i % ENVS for i, step in enumerate(near)]

    def age(self, row: int) -> int:
        return (row // ENVS - self.cursor) % STEPS

    def row(self, age: int, env: int) -> int:
        return (age + self.cursor) % STEPS * ENVS + env

    def of(self, row: int) -> tuple[int, int]:
        """The ages of the first and the last step of the trajectory of a row."""
        ages = sorted((step - self.cursor) % STEPS for step in self.last[row % ENVS])
        return max((end + 1 for end in ages if end < self.age(row)), default=0), min(
            end for end in ages if end >= self.age(row)
        )

    def assert_bounds(self) -> None:
        found = trajectories.bounds(self.ends, self.ring, torch.tensor(self.asked), *self.shape)
        for row, of_row in zip(self.asked, found.T.tolist(), strict=True):
            first, last = self.of(row)
            assert of_row == [self.row(first, row % ENVS), self.row(last, row % ENVS), last - first + 1]


@pytest.mark.parametrize("backend", ["numba", "triton"], indirect=True)
@pytest.mark.parametrize("block_envs", [4, 0])
def test_written_trajectories(backend, block_envs):
    """Bits, summaries and sums: on a GPU by one program, or in a launch a stage."""
    rule = config.index_update
    with mock.patch.object(config, "index_update", lambda *args: replace(rule(*args), block_envs=block_envs)):
        index = Trajectories()
    for row in index.asked:
        step, env = divmod(row, ENVS)
        assert index.ends[step // 64 * ENVS + env].item() >> step % 64 & 1 == (row in index.final)
    assert index.sums[-1] == len(index.final)
    words = Counter(row // ENVS // 64 * ENVS + row % ENVS for row in index.final)
    assert {word: index.sums[word].item() for word in words} == words
    with triton_on_cpu(False):
        index.assert_bounds()


@pytest.mark.parametrize("backend", ["numba", "triton"], indirect=True)
def test_slices(backend):
    """Bounds, slices from rows and drawn ones, and where they may begin."""
    with triton_on_cpu(False):
        index = Trajectories()
    index.assert_bounds()
    from_rows, ends, offset = [], sorted(index.final, key=lambda row: (row // ENVS // 64, row % ENVS, row)), 2**33
    for row in index.asked:
        steps = range(index.age(row), index.of(row)[1] + 1)[:4]
        from_rows.append([index.row(age, row % ENVS) for age in steps])
    found = trajectories.slices(index.ends, index.ring, torch.tensor(index.asked), 4, *index.shape)
    assert tuple(part.tolist() for part in found) == laid_out(from_rows, 4)
    for rank in (None, torch.arange(len(ends))):
        drawn, uniform = [], uniforms(5, offset, 2 * len(ends))
        for i in range(len(ends)):
            end = ends[int(uniform[2 * i] * len(ends)) if rank is None else i]
            first, last = index.of(end)
            begin = first + int(uniform[2 * i + 1] * max(last - first - 2, 1))
            drawn.append([index.row(age, end % ENVS) for age in range(begin, last + 1)[:4]])
        rng, rule = torch.tensor([5, offset, 0]), (*index.shape, 16, *index.rule)
        with config.using(trajectories_draw=SliceConfig(16, 4, 4)):
            found = trajectories.draw(index.ends, index.sums, index.ring, rng, rank, len(ends), *rule)
        assert tuple(part.tolist() for part in found) == laid_out(drawn, 4)
    eligible = sparse(torch.int64, trajectories.eligible_words(STEPS * ENVS))
    touched = trajectories.update_eligible(eligible, index.ends, index.ring, 5, 3, True, *index.shape).tolist()
    assert set(touched) == {index.row(age, env) for age in range(-7, 1) for env in range(ENVS)}
    for row in touched:
        age, (first, last) = index.age(row), index.of(row)
        assert eligible[row // 64].item() >> row % 64 & 1 == (last - age >= 2 or age == first)
    # On the CPU the plain definition would look at every step to say what is wrong.
    if backend == "triton":
        beyond = torch.tensor([STEPS * ENVS])
        assert trajectories.bounds(index.ends, index.ring, beyond, *index.shape).tolist() == [[NO_ROW], [NO_ROW], [0]]
        assert trajectories.slices(index.ends, index.ring, beyond, 1, *index.shape)[1].tolist() == [0]


# What is noticed

TILES, READ, WRITE = "rows._triton_tiles", "rows._triton", "rows._triton_write"
TREE, NODES = "sum_tree._triton:sum_tree_draw_kernel", "sum_tree._triton_update"
SEARCH, UPDATE = "trajectories._triton", "trajectories._triton_update"
INT32, FLOAT32 = ".to(tl.int32)", ".to(tl.float32)"

#: A function and some of its text, another one in its place, and the call of a test that fails then.
FAULTS: list[tuple[str, str, str, tuple[Any, ...]]] = [
    (f"{TILES}:row_address", "+ position * stride", f"+ (position * stride){INT32}", (test_gathered_rows, SMALL)),
    (f"{TILES}:row_address", "+ position * stride", f"+ (position * stride){INT32}", (test_written_rows, SMALL)),
    (f"{READ}:rows_gather_kernel", "address(position", f"address(position{INT32}", (test_gathered_rows, LARGE)),
    (f"{READ}:rows_sample_kernel", "address(position", f"address(position{INT32}", (test_sampled_rows, LARGE)),
    (f"{READ}:place_address", "entry_ptr, place)", f"entry_ptr, place{INT32})", (test_computed_rows, LARGE)),
    (f"{READ}:load_following", "links_ptr + row,", f"links_ptr + row{INT32},", (test_computed_rows, LARGE)),
    (f"{WRITE}:rows_write_kernel", "address(position", f"address(position{INT32}", (test_written_rows, LARGE)),
    (f"{WRITE}:rows_extend_kernel", "address(position", f"address(position{INT32}", (test_written_rows, LARGE)),
    (f"{TILES}:draw_position", "(seed, counter)", f"(seed, counter){FLOAT32}", (test_sampled_rows, LARGE)),
    (f"{TILES}:normalise", "position < capacity", "position <= capacity", (test_rows_at_the_capacity, SMALL, True)),
    ("rows._cpu:_found", "index >= capacity", "index > capacity", (test_rows_at_the_capacity, SMALL, True)),
    (TREE, "leaves_ptr + leaf)", f"leaves_ptr + leaf{INT32})", (test_drawn_rows, LARGE, False)),
    (TREE, "(seed, offset + i)", f"(seed, offset + i){FLOAT32}", (test_drawn_rows, LARGE, False)),
    (f"{NODES}:stage_claim", "bits_ptr + row", f"bits_ptr + row{INT32}", (test_new_priorities, LARGE, True)),
    (f"{NODES}:stage_claim", "(row >= capacity)", "(row > capacity)", (test_new_priorities, LARGE, True)),
    (f"{NODES}:stage_mark", "leaves_ptr + row", f"leaves_ptr + row{INT32}", (test_new_priorities, LARGE, True)),
    (f"{NODES}:stage_mark", "row < capacity", "row <= capacity", (test_new_priorities, LARGE, True)),
    (f"{NODES}:_own_nodes", "row < capacity", "row <= capacity", (test_new_priorities, 600_000_000, True)),
    (f"{NODES}:_recompute", "n_nodes * MAXIMUM", f"(n_nodes * MAXIMUM){INT32}", (test_new_priorities, LARGE, True)),
    (f"{UPDATE}:_byte_before", "ends_ptr + word", f"ends_ptr + word{INT32}", (test_written_trajectories, 4)),
    (f"{UPDATE}:_load_flags", "step * envs + env", f"(step * envs + env){INT32}", (test_written_trajectories, 4)),
    (f"{UPDATE}:stage_weights", "node, weight", f"node{INT32}, weight", (test_written_trajectories, 0)),
    (f"{UPDATE}:stage_bits", "(byte >> 3) * envs", f"(byte >> 3){INT32} * envs{INT32}", (test_written_trajectories, 4)),
    (f"{SEARCH}:nearest_end", "read * envs + env", f"(read * envs + env){INT32}", (test_slices,)),
    (f"{SEARCH}:scaled", "((uniform *", f"((uniform{FLOAT32} *", (test_slices,)),
    (f"{SEARCH}:locate", "row < steps * envs", "row <= steps * envs", (test_slices,)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("where", "before", "after", "call"), FAULTS, ids=[f"{call[0].__name__}-{where}" for where, *_, call in FAULTS]
)
def test_planted_faults_are_noticed(where, before, after, call):
    test, *arguments = call
    name = "plain" if "_cpu" in where else "triton"
    noticed = pytest.raises((AssertionError, pytest.fail.Exception))
    with planted(where, before, after), triton_on_cpu(name == "triton"), noticed:
        test(name, *arguments)
