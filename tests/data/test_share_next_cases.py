"""Observations stored once: all small rings, single cases, graphs, compiled code, interrupts."""

from __future__ import annotations

import contextlib
import functools
import itertools

import pytest
import torch
from tensordict import TensorDict

from gpubuf import LazyTensorStorage
from gpubuf.kernels import _launching as launching
from gpubuf.kernels._registry import triton_on_cpu
from gpubuf.kernels.rows import LOST
from tests.support.interrupts import interrupted
from tests.support.shared_rows import Ring, Stream, check, same_bytes, shared


def episodes(n: int, breaks: list[bool], first: int = 0) -> TensorDict:
    """``n`` rows of one environment: row i is not continued by the row behind it if ``breaks[i]``."""
    now = torch.arange(first, first + n, dtype=torch.float32)
    coming = now + 1
    for i, broken in enumerate(breaks[:n]):
        if broken:
            coming[i] = -1 - now[i]
    wide = [values[:, None].expand(n, 6).contiguous() for values in (now, coming)]
    return TensorDict({"observation": wide[0], "next": {"observation": wide[1]}}, [n])


def storage_of(capacity: int, **arguments) -> LazyTensorStorage:
    return LazyTensorStorage(capacity, share_next=True, **({"next_capacity": capacity} | arguments))


@pytest.mark.parametrize("capacity", [1, 3])
def test_every_small_ring(capacity):
    """Case 39: all patterns of breaks over two laps, in writes of every size."""
    total = 2 * capacity + 2
    index = torch.arange(capacity)
    for breaks in itertools.product([False, True], repeat=total):
        rows = episodes(total, list(breaks))
        for size in range(1, capacity + 2):
            storage, written = storage_of(capacity), 0
            while written < total:
                storage.append(rows[written : written + size])
                written = min(written + size, total)
                n = min(written, capacity)
                found = storage.plans.batch.assemble(storage.gather(index[:n])[0])
                due = rows[written - 1 - (written - 1 - index[:n]) % capacity]
                assert torch.equal(found["observation"], due["observation"])
                assert torch.equal(found["next", "observation"], due["next", "observation"])


@pytest.mark.parametrize("capacity", [2, 3])
def test_every_write_in_place(capacity):
    """Cases 39 and 40: each row of each small ring, overwritten by one that is continued or not."""
    total = capacity + 2
    for breaks in itertools.product([False, True], repeat=total):
        for written in range(1, total + 1):
            n = min(written, capacity)
            for row, other in itertools.product(range(n), (0.5, None)):
                storage = storage_of(capacity)
                storage.append(episodes(written, list(breaks)))
                due = storage[:].clone()
                # An observation that was the next one of the row before, or a new one.
                value = other if other is not None else float(due["observation"][(row + 1) % n, 0])
                new = TensorDict(
                    {
                        "observation": torch.full((1, 6), value),
                        "next": {"observation": due["observation"][None, (row + 1) % n].clone()},
                    },
                    [1],
                )
                storage.write(torch.tensor([row]), new)
                due[row] = new[0]
                found = storage[:]
                assert torch.equal(found["observation"], due["observation"])
                assert torch.equal(found["next", "observation"], due["next", "observation"])


def test_final_observations():
    """Case 39: of a truncated row the true final one, not the reset's; of the newest row; at the seam."""
    storage = storage_of(5, next_capacity=2)
    # Rows 2 and 6 end episodes.
    rows = episodes(9, [False, False, True, False, False, False, True])
    storage.append(rows[:3])
    assert storage[2]["next", "observation"][0] == -3  # the newest one, pending
    storage.append(rows[3:5])
    assert storage[2]["next", "observation"][0] == -3  # aside
    assert storage.sharing.used == 1
    storage.append(rows[5:6])
    # Over the seam: the row behind row 4 is at position 0.
    assert storage[4]["next", "observation"][0] == 5
    assert storage[0]["next", "observation"][0] == 6
    storage.append(rows[6:9])
    assert storage.sharing.used == 1
    assert [storage[i]["next", "observation"][0].item() for i in range(5)] == [6, -7, 8, 9, 5]


def test_an_environment_in_progress_needs_no_room_aside():
    """Case 39: a write of several steps that ends in the middle of trajectories."""
    stream, ring = Stream(1, 4, breaks=0), Ring(40)
    buffer = shared(40, envs=4, next_capacity=4)
    for n in (3, 1, 5, 7, 12):
        rows = stream.steps(n)
        buffer.extend(rows)
        ring.extend(rows)
        check(buffer, ring)
        assert buffer.storage.sharing.used == 0


def test_lost_rows_are_faults_on_a_gpu(backend):
    """Case 40: the CPU refuses, a GPU counts. Other rows come back all the same."""
    storage = storage_of(8, next_capacity=2)
    storage.append(episodes(2, []))
    rows = episodes(6, [True] * 6, first=2)
    if backend == "numba":
        with pytest.raises(RuntimeError, match="next_capacity=2"):
            storage.append(rows)
        assert len(storage) == 2
        return
    storage.append(rows)
    assert (storage.sharing.links == LOST).sum() == 3
    with pytest.raises(IndexError, match=r"^3 rows .*next_capacity"):
        storage.refresh()
    assert storage[3]["next", "observation"][0] == -4
    with pytest.raises(ValueError, match="lost"):
        storage_of(9).load_state_dict(storage.state_dict())


# Graphs and compiled code


# Interrupts


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("write", ["extend", "in place"])
def test_a_write_that_is_interrupted_between_its_launches(write, place, monkeypatch):
    """Case 54: on a GPU a write is several launches; the next operation makes all of them again."""
    stream, buffer, ring = Stream(5), shared(12), Ring(12)
    index, other, launches = [3, 8], Stream(6).rows_at(2), itertools.count()
    with triton_on_cpu():
        rows = stream.steps(17)
        buffer.extend(rows)
        ring.extend(rows)

        def launch(*args, **kwargs) -> None:
            if next(launches) == place:
                raise KeyboardInterrupt
            launching.launch(*args, **kwargs)

        rows = stream.steps(5)
        with monkeypatch.context() as patch:
            patch.setattr("gpubuf.kernels.rows._launch.launch", launch)
            with contextlib.suppress(KeyboardInterrupt):
                if write == "extend":
                    buffer.extend(rows)
                else:
                    buffer[torch.tensor(index)] = other
        if write == "extend":
            ring.extend(rows)
        elif place:
            # Before the first launch the next observations are read that are to be kept.
            ring.write(index, other)
        check(buffer, ring)


def test_an_interrupted_write_in_place():
    """Case 54: the rows before those that are written keep their next observations."""
    place, outcomes = 0, set()
    while True:
        stream, buffer, ring = Stream(5, breaks=0), shared(12), Ring(12)
        rows = stream.steps(17)
        buffer.extend(rows)
        ring.extend(rows)
        index, rows = [3, 8], Stream(6).rows_at(2)
        if not interrupted(functools.partial(buffer.__setitem__, torch.tensor(index), rows), place):
            break
        changed = same_bytes(buffer[torch.tensor(index)], rows)
        outcomes.add(changed)
        if changed:
            ring.write(index, rows)
        check(buffer, ring)
        place += 1
    assert outcomes == {False, True}
