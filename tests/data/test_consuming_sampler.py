"""Rows leave a buffer after they were drawn so many times, and new ones take their places."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpubuf.data import (
    ConsumingSampler,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.support.fuzzing import examples
from tests.support.torchrl_buffers.consuming import rows


def buffer_of(capacity: int = 8, count: int = 1, seed: int = 3) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(capacity),
        sampler=ConsumingSampler(count),
        generator=torch.Generator().manual_seed(seed),
    )


@given(
    st.integers(1, 7),
    st.integers(1, 3),
    st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=14),
    st.integers(0, 2**31),
)
@examples(60)
def test_a_model_follows(capacity, count, operations, seed):
    buffer = buffer_of(capacity, count, seed)
    stored: dict[int, list[int]] = {}  # number and draws by place
    consumed: list[int] = []
    next_number = 0
    for writes, n in operations:
        left = {place for place, (_, draws) in stored.items() if draws < count}
        assert len(buffer) == len(left)
        if writes:
            index = buffer.extend(rows(n, next_number)).tolist()
            if n < capacity:
                free = [place for place in consumed if stored[place][1] >= count]
                assert index[: len(free)] == free[:n]
                assert len(set(index)) == n
                # No row that is left goes while there is another place.
                overwritten = sum(place in left for place in index)
                assert overwritten == max(0, n - len(free) - (capacity - len(stored)))
            # Of more rows than the capacity the newest stay; the others are nowhere, -1.
            for i, place in ((i, place) for i, place in enumerate(index) if place >= 0):
                stored[place] = [next_number + i, 0]
                consumed = [other for other in consumed if other != place]
            next_number += n
        elif left:
            batch = buffer.sample(n)
            places, numbers = batch["index"].tolist(), batch["number"].tolist()
            assert len(set(places)) == len(places) == min(n, len(left))
            for place, number in zip(places, numbers, strict=True):
                assert place in left
                assert stored[place][0] == number
                stored[place][1] += 1
                if stored[place][1] == count:
                    consumed.append(place)
        else:
            with pytest.raises(RuntimeError, match="Cannot sample from an empty storage"):
                buffer.sample(n)


def test_columns_and_single_rows_take_the_places_too():
    buffer = buffer_of(4)
    buffer.extend(rows(3))
    drawn = buffer.sample(2)["index"].tolist()
    assert buffer.add(rows(1, 10)[0]) == drawn[0]
    buffer.extend_columns({"number": torch.tensor([11, 12])})
    assert sorted(buffer[:]["number"][drawn].tolist()) == [10, 11]
    assert len(buffer) == 4


@pytest.mark.parametrize("shape", [(), (1,)])
def test_objects_of_any_shape_take_the_places_of_those_consumed(shape):
    """A list of numbers was taken for a batch, by the shape of the first one."""
    buffer = ReplayBuffer(storage=ListStorage(4), consume_after_n_samples=1)
    buffer.extend([torch.full(shape, i) for i in range(3)])
    first = set(buffer.sample(2).reshape(-1).tolist())
    buffer.extend([torch.full(shape, i) for i in (3, 4, 5)])
    assert len(buffer) == 4
    assert set(buffer.sample(9).reshape(-1).tolist()) == {0, 1, 2, 3, 4, 5} - first
    buffer.add(torch.full(shape, 6))
    assert buffer.sample(1).reshape(-1).tolist() == [6]
