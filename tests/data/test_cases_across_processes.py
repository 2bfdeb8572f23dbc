"""The cases of priorities and trajectories, met by rows that a client writes, and by shards on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

from gpubuf import (
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
    Writers,
)
from gpubuf.data import Normalize
from tests.support.ranks import run_ranks
from tests.support.written_rows import batch

CAPACITY = 11
Writes = Callable[[Callable[[TensorDict], Any], Any], None]
Priorities = Callable[[int, int], Any]


def rows(first: int, n: int, priority: Any = None, episode: int = 7, writer: int = 0) -> TensorDict:
    out = batch(writer, first, n, episode)
    return out if priority is None else out.set("td_error", torch.as_tensor(priority))


def in_sizes(*sizes: int) -> Writes:
    """Writes of these sizes, row numbers going on."""

    def write(extend: Callable[[TensorDict], Any], buffer: Any) -> None:
        first = 0
        for n in sizes:
            extend(rows(first, n))
            first += n

    return write


def brought(priority: Priorities, *sizes: int) -> tuple[Writes, Priorities]:
    """The same with priorities that the rows bring along."""

    def write(extend: Callable[[TensorDict], Any], buffer: Any) -> None:
        first = 0
        for n in sizes:
            extend(rows(first, n, priority(first, n)))
            first += n

    return write, priority


def raised_between(extend: Callable[[TensorDict], Any], buffer: Any) -> None:
    extend(rows(0, 5))
    buffer.update_priority(torch.tensor([1, 3, 3, -1]), torch.tensor([2.0, 9.0, 5.0, 70.0]))
    extend(rows(5, 3))


def late_priority(extend: Callable[[TensorDict], Any], buffer: Any) -> None:
    extend(rows(0, CAPACITY))
    drawn = buffer.sample()
    extend(rows(CAPACITY, 6))
    buffer.update_tensordict_priority(drawn.set("td_error", torch.full((400,), 50.0)))
    extend(rows(CAPACITY + 6, 1))


def float_priorities(first: int, n: int) -> torch.Tensor:
    return 1.0 + torch.arange(first, first + n)


def each_alone(extend: Callable[[TensorDict], Any], buffer: Any) -> None:
    for number in range(5):
        extend(rows(number, 1, episode=1))


#: What is written, and the priorities that rows bring.
SCENARIOS: dict[str, tuple[Writes, Priorities | None]] = {
    "5: exactly full": (in_sizes(4, 7), None),
    "6: alpha once": brought(float_priorities, 3, 4),
    "9: of float64": brought(lambda first, n: float_priorities(first, n).double(), 3, 4),
    "9: of int64": brought(lambda first, n: float_priorities(first, n).long(), 3, 4),
    "9: [B, 1]": brought(lambda first, n: float_priorities(first, n).unsqueeze(1), 3, 4),
    "10, 11: the maximum so far, duplicates": (raised_between, None),
    "12: late priorities": (late_priority, None),
    "13: over the seam": brought(float_priorities, 8, 6),
    "15: larger than the ring": (in_sizes(4, 25, 2), None),
    "15: up to the seam": (in_sizes(6, 5, 3), None),
    "15: many times round": (in_sizes(*[3] * 400), None),
    "20: trajectories of length 1": (each_alone, None),
    "21: a trajectory in progress": (in_sizes(2, 2, 1), None),
}


def prioritized(**more: Any) -> TensorDictReplayBuffer:
    sampler = PrioritizedSampler(CAPACITY, 0.7, 0.5)
    storage = LazyTensorStorage(CAPACITY)
    buffer = TensorDictReplayBuffer(storage, sampler=sampler, batch_size=400, n_steps=2, gamma=1.0, **more)
    buffer.set_rng(torch.Generator().manual_seed(3))
    return buffer


def kept(buffer: TensorDictReplayBuffer) -> dict[str, Any]:
    """All that the buffer knows of its rows, and a batch."""
    drawn = buffer.sample()
    return {
        **{str(key): value for key, value in buffer[:].items(True, True)},
        **{f"drawn {key}": value for key, value in drawn.items(True, True)},
        **{f"tree {key}": torch.as_tensor(value) for key, value in buffer.sampler.tree.state_dict().items()},
    }


@pytest.mark.parametrize("name", SCENARIOS)
def test_rows_of_a_client_are_rows_of_the_learner(name: str):
    """Cases 5, 6, 9 to 13, 15, 20, 21: what a client writes is as if the learner had written it, to the bit."""
    write, priority = SCENARIOS[name]
    own, shared = prioritized(), prioritized(writers=Writers(1, run=1))
    write(own.extend, own)
    client = shared.client(rows(0, 1, None if priority is None else priority(0, 1)))

    def send(batch: TensorDict) -> None:
        client.extend(batch)
        shared.writers.take(everything=True)

    write(send, shared)
    expected, found = kept(own), kept(shared)
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        assert torch.equal(value, found[key]), key


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_writer_hears_of_a_priority_that_no_tree_takes(bad: float, dtype: torch.dtype):
    """Case 8: and not the learner, who could neither take the rows nor refuse them."""
    example = rows(0, 1, torch.ones(1, dtype=dtype))
    buffer = prioritized(writers=Writers(2, run=1))
    good, other = (buffer.client(example) for _ in range(2))
    for write in (other.extend, lambda batch: other.extend_columns(dict(batch.items(True, True)))):
        with pytest.raises(ValueError, match="finite and non-negative; nothing was written"):
            write(rows(0, 2, torch.tensor([1.0, bad], dtype=dtype)))
    good.extend(rows(0, 2, torch.ones(2, dtype=dtype)))
    other.extend(rows(0, 1, torch.ones(1, dtype=dtype), writer=1))
    assert len(buffer) == 3


def test_numbers_that_are_not_priorities_are_the_rows_own():
    """Case 8: without priorities in the sampler, and in a buffer that reads none from rows, NaN is data."""

    def buffer_of(kind: type, prioritized: bool) -> Any:
        sampler = PrioritizedSampler(CAPACITY, 0.7, 0.5) if prioritized else None
        return kind(LazyTensorStorage(CAPACITY), sampler=sampler, batch_size=4, writers=1)

    for buffer in (buffer_of(TensorDictReplayBuffer, False), buffer_of(ReplayBuffer, True)):
        client = buffer.client(rows(0, 1, [1.0]))
        client.extend(rows(0, 2, [1.0, float("nan")]))
        assert buffer[:]["td_error"].isnan().tolist() == [False, True]
    buffer = buffer_of(ReplayBuffer, True)
    buffer.client(torch.zeros(1, 2)).extend(-torch.ones(3, 2))
    assert (buffer[:] == -1).all()


SLICE = 3


def on_shard(rank: int, size: int) -> dict[str, Any]:
    """What each case comes to on one of the ranks."""
    group, found = dist.group.WORLD, dict[str, Any]()

    def filled(sampler: Any, data: TensorDict, capacity: int = 100) -> TensorDictReplayBuffer:
        buffer = TensorDictReplayBuffer(LazyTensorStorage(capacity), sampler=sampler, batch_size=600)
        buffer.set_rng(torch.Generator().manual_seed(rank))
        buffer.extend(data)
        return buffer

    def shard(**options: Any) -> PrioritizedSampler:
        return PrioritizedSampler(100, 0.5, 1.0, process_group=group, **options)

    index = torch.arange(20)
    buffer = filled(shard(), rows(0, 20))
    try:
        buffer.update_priority(index[:2], torch.tensor([1.0, float("nan") if rank else 1.0]))
        found["8"] = ""
    except ValueError as error:
        found["8"] = str(error)

    # Two ranks of equal rows: weights are of all of them, for every alpha.
    for alpha in (0.0, 2.0):
        buffer = filled(shard(), rows(0, 10))
        buffer.sampler.alpha = alpha
        buffer.update_priority(index[:10], torch.full((10,), 1.0 + rank))
        found[f"14: {alpha}"] = buffer.sample()["priority_weight"].unique()

    small = filled(shard(), rows(0, 10), 10)
    late = small.sample()
    small.extend(rows(10, 4))
    small.update_tensordict_priority(late.set("td_error", torch.full((600,), 100.0)))
    drawn = small.sample()
    found["12"] = (drawn["index"] < 4).float().mean().item()
    try:
        filled(SliceSampler(slice_len=SLICE, process_group=group), rows(0, 4, episode=1 + rank * 9)).sample()
        found["25"] = ""
    except (RuntimeError, ValueError) as error:
        found["25"] = str(error)
    return found


def test_shards_meet_the_cases():
    """Cases 8, 12, 14, 25 on two ranks, whose shards differ. The law of what they draw is in test_shards.py."""
    for rank, found in enumerate(run_ranks(on_shard, 2)):
        assert ("entry 1, for row 1, is nan; no priority has been changed" in found["8"]) == bool(rank)
        # By the global sum 10 * (1 + 4) and the least of its weights, times what the rank has more than its half.
        assert found["14: 0.0"].tolist() == [1.0]
        torch.testing.assert_close(found["14: 2.0"], torch.tensor([0.4]))
        # Four rows of weight 1 beside six of 10; had they been given the priorities of those before them, 0.4.
        assert found["12"] < 0.15
        assert "of 2 ranks those numbered [0] have no row that can be drawn" in found["25"]


def statistics(rank: int, size: int) -> dict[str, Any]:
    """What ranks know of rows that rank 0 alone has written, that none has, and of rows of two sizes."""
    group, found = dist.group.WORLD, dict[str, Any]()

    def all_reduced(written: torch.Tensor | None, times: int = 1) -> Any:
        step = Normalize("x")
        buffer = TensorDictReplayBuffer(LazyTensorStorage(20), process=[step], batch_size=4)
        for time in range(times):
            if written is not None:
                buffer.extend(TensorDict({"x": written}, [len(written)]))
            try:
                step.all_reduce(group)
            except (RuntimeError, ValueError) as error:
                return str(error)
            if time and rank:
                buffer.extend(TensorDict({"x": torch.full((3, 2), 5.0)}, [3]))
                step.all_reduce(group)
            elif time:
                step.all_reduce(group)
        return [step.count().reshape(-1), step.mean().reshape(-1)]

    rows_of_one = torch.tensor([[1.0, 3.0], [2.0, 5.0]]) if rank == 0 else None
    found["one"] = all_reduced(rows_of_one)
    found["later"] = all_reduced(rows_of_one, 2)
    found["none"] = all_reduced(None)
    found["sizes"] = all_reduced(torch.ones(2, 2 + rank))
    return found


def test_a_rank_without_rows_takes_part_in_statistics():
    """Case 81: the others would wait for it for ever."""
    for found in run_ranks(statistics, 2):
        assert [each.tolist() for each in found["one"]] == [[2.0, 2.0], [1.5, 4.0]]
        # Four rows of rank 0, and three of the other one later.
        assert found["later"][0].tolist() == [7.0, 7.0]
        torch.testing.assert_close(found["later"][1], torch.tensor([21 / 7, 31 / 7], dtype=torch.float64))
        assert "knows nothing yet" in found["none"]
        assert "the ranks have rows of [2, 3] elements under 'x'" in found["sizes"]
