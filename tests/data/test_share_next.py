"""Observations stored once: rows come back as they were written, whatever is written, overwritten and read."""

from __future__ import annotations

import random

import pytest
import torch
from tensordict import TensorDict

from gpubuf import LazyMemmapStorage, LazyTensorStorage
from gpubuf.data.storage.share_next import entries_of
from gpubuf.kernels._registry import triton_on_cpu
from tests.support.shared_rows import WIDTH, Ring, Stream, check, shared


@pytest.mark.parametrize(("seed", "envs"), [(0, None), (3, 3), (5, None)])
def test_rows_are_what_was_written(seed, envs):
    """Case 39: random writes, breaks, wraps, in-place writes, and an empty buffer in between."""
    use_at_random(random.Random(seed), envs, seed, [0, 20, 100], turns=25)


@pytest.mark.parametrize(("seed", "envs"), [(1, None), (2, 3)])
def test_rows_are_what_was_written_on_a_gpu(seed, envs):
    """Case 39: the same in the kernels of the GPU."""
    with triton_on_cpu():
        use_at_random(random.Random(seed), envs, seed, [0, 20], turns=8)


def use_at_random(choose: random.Random, envs: int | None, seed: int, breaks: list[int], turns: int) -> None:
    stream, steps = Stream(seed, envs, breaks=choose.choice(breaks)), choose.randrange(2, 12)
    capacity = steps * (envs or 1)
    buffer, ring = shared(capacity, envs=envs), Ring(capacity)
    for _ in range(turns):
        what = choose.randrange(10)
        if what == 0:
            buffer.empty()
            ring.empty()
        elif what < 4 and len(ring):
            index = [choose.randrange(len(ring)) for _ in range(choose.randrange(1, 4))]
            rows = stream.rows_at(len(index))
            buffer.storage.write(torch.tensor(index), rows)
            ring.write(index, rows)
        else:
            rows = stream.steps(choose.randrange(0, steps + 3))
            buffer.extend(rows)
            ring.extend(rows)
        check(buffer, ring)


# Capacity of the memory aside


@pytest.mark.parametrize(
    ("capacity", "envs", "asked", "due"),
    [
        (10_000, 1, None, 1250),
        (1000, 1, None, 256),
        (100, 1, None, 100),
        (4096, 1024, None, 1024),
        (512, 512, None, 512),
        (100, 1, 7, 7),
        (100, 1, 1000, 100),
        (10_001, 1, None, 1251),
    ],
)
def test_room_aside(capacity, envs, asked, due):
    """An eighth of the rows, at least 256 and one an environment, never more than rows."""
    assert entries_of(capacity, envs, asked) == due


def test_a_write_without_room_is_refused():
    """Case 40: nothing is written, and the text says how many rows are not continued and what to do."""
    stream, ring = Stream(breaks=100), Ring(20)
    buffer = shared(20, next_capacity=3)
    rows = stream.steps(3)
    buffer.extend(rows)
    ring.extend(rows)
    before = buffer.storage.sharing.used
    with pytest.raises(RuntimeError, match=r"next_capacity=3 .*share_next=False.*ndim=2"):
        buffer.extend(stream.steps(9))
    check(buffer, ring)
    assert buffer.storage.sharing.used == before


def test_entries_come_free_with_their_rows():
    """Case 40: what is overwritten gives its entry back, so that a ring of episodes goes on for ever."""
    capacity, episode = 24, 6
    buffer, ring = shared(capacity, next_capacity=5), Ring(capacity)
    stream = Stream(breaks=0)
    for step in range(200):
        rows = stream.steps(1)
        if step % episode == episode - 1:
            # The next episode begins with a reset.
            stream.now = [torch.full((WIDTH,), float(step))]
        buffer.extend(rows)
        ring.extend(rows)
        assert buffer.storage.sharing.used <= 4
    check(buffer, ring)


def test_a_write_in_place_without_room_is_refused():
    """Case 40: the rows are what they were."""
    capacity = 12
    buffer, ring, stream = shared(capacity, next_capacity=2), Ring(capacity), Stream(breaks=0)
    rows = stream.steps(9)
    buffer.extend(rows)
    ring.extend(rows)
    other = Stream(seed=5).rows_at(2)
    with pytest.raises(RuntimeError, match="next_capacity=2"):
        buffer[torch.tensor([2, 6])] = other
    check(buffer, ring)
    buffer[torch.tensor([8])] = other[:1]
    ring.write([8], other[:1])
    check(buffer, ring)


# Which keys


def td(n: int = 4, **keys: torch.Tensor) -> TensorDict:
    following = {name.removeprefix("next_"): value for name, value in keys.items() if name.startswith("next_")}
    own = {name: value for name, value in keys.items() if not name.startswith("next_")}
    return TensorDict({**own, "next": TensorDict(following, [n])}, [n])


def test_keys_that_are_found():
    """Equal ones, but for flags and rewards."""
    data = td(
        large=torch.zeros(4, 5),
        next_large=torch.zeros(4, 5),
        small=torch.zeros(4, 4),
        next_small=torch.zeros(4, 4),
        done=torch.zeros(4, 1, dtype=torch.bool),
        next_done=torch.zeros(4, 1, dtype=torch.bool),
        other=torch.zeros(4, 5),
        next_other=torch.zeros(4, 5, dtype=torch.float64),
        shape=torch.zeros(4, 6),
        next_shape=torch.zeros(4, 3, 2),
        alone=torch.zeros(4, 9),
    )
    storage = LazyTensorStorage(8, share_next=True)
    storage.append(data)
    assert set(storage.sharing.keys) == {("small",), ("large",)}
    named = LazyTensorStorage(8, share_next=["large", "done"])
    named.append(data)
    assert set(named.sharing.keys) == {("done",), ("large",)}
    for one in (storage, named):
        assert set(one[:].keys(True, True)) == set(data.keys(True, True))


def test_wrong_keys():
    data = td(a=torch.zeros(4, 5), next_b=torch.zeros(4, 5))
    with pytest.raises(ValueError, match=r"finds no key.*but for flags and rewards"):
        LazyTensorStorage(8, share_next=True).append(data)
    with pytest.raises(ValueError, match=r"names 'a', but \('next', 'a'\) is not stored"):
        LazyTensorStorage(8, share_next=["a"]).append(data)
    with pytest.raises(ValueError, match="names 'b', but 'b' is not stored"):
        LazyTensorStorage(8, share_next=["b"]).append(data)
    unequal = td(a=torch.zeros(4, 5), next_a=torch.zeros(4, 5, dtype=torch.float64))
    with pytest.raises(ValueError, match="only equal ones can share a column"):
        LazyTensorStorage(8, share_next=["a"]).append(unequal)
    with pytest.raises(ValueError, match="next_capacity must be a whole number of at least 1"):
        LazyTensorStorage(8, share_next=True, next_capacity=0)
    with pytest.raises(ValueError, match="next_capacity is for storages with share_next"):
        LazyTensorStorage(8, next_capacity=3)
    with pytest.raises(TypeError, match="list of keys"):
        LazyTensorStorage(8, share_next="observation")
    with pytest.raises(NotImplementedError, match="share_next"):
        LazyMemmapStorage(8, share_next=True)
