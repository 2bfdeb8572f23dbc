"""What a writer does wrong, or a learner changes, harms neither: rows are refused, dropped and counted, or stored."""

import gc
import os
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from gpubuf import Codec, LazyTensorStorage, SliceSampler, TensorDictReplayBuffer, Writers
from tests.support.written_rows import batch, columns

POISON = 77


def buffer_of(writers: Any = 2, capacity: int = 1000, storage: Any = None, **parts: Any) -> TensorDictReplayBuffer:
    made = LazyTensorStorage(capacity, **(storage or {}))
    return TensorDictReplayBuffer(made, batch_size=parts.pop("batch_size", 8), writers=writers, **parts)


def numbers(buffer: Any) -> list[int]:
    found: list[int] = buffer[:]["number"][:, 0].tolist()
    return found


def dropped(buffer: Any) -> list[int]:
    return [place.dropped for place in buffer.writers.counters()]


# Rows that no buffer can take


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 300.0, -1.0])
@pytest.mark.parametrize("codec", [torch.uint8, Codec(torch.uint8, 2.0, 0.0)])
def test_a_number_that_no_column_holds_is_refused_at_the_client(bad: float, codec: Any):
    """Case 80: not by the learner, whose every call would fail."""
    bad = bad if codec is torch.uint8 else 2 * bad
    buffer = buffer_of(storage={"dtypes": {"x": codec}})
    example = TensorDict({"x": torch.zeros(1, 2)}, [1])
    client = buffer.client(example)
    wrong = torch.tensor([[1.0, bad], [2.0, 2.0]])
    for write in (lambda: client.extend(TensorDict({"x": wrong}, [2])), lambda: client.extend_columns({"x": wrong})):
        with pytest.raises(ValueError, match=r"key 'x' holds torch.uint8, which has no room for"):
            write()
    client.extend(TensorDict({"x": torch.full((1, 2), 255.0 if codec is torch.uint8 else 510.0)}, [1]))
    assert (len(buffer), dropped(buffer)) == (1, [0, 0])


class Poisoned(torch.nn.Module):
    """Refuses rows whose number is :data:`POISON`, as a transform of a user's may."""

    error: type[Exception] = ValueError

    def forward(self, data: TensorDict) -> TensorDict:
        return data

    def inv(self, data: TensorDict) -> TensorDict:
        if (data["number"] == POISON).any():
            raise self.error("poison")
        return data


@pytest.mark.parametrize("error", [ValueError, KeyError, RuntimeError])
def test_rows_that_the_learner_refuses_are_dropped_and_counted(error: type[Exception], tmp_path: Path):
    """Case 80: all others are stored, it is said once, and what is after a gap does not follow what is before it."""
    transform = Poisoned()
    transform.error = error
    buffer = buffer_of(Writers(2, run=1), n_steps=3, transform=transform, batch_size=500)
    one, other = (buffer.client(batch(0, 0, 1)) for _ in range(2))
    for first in (0, 75, 90):
        one.extend(batch(1, first, 5, 1000))
    other.extend(batch(2, 0, 3, 1000))
    with pytest.warns(UserWarning, match="rows of writers were dropped, for the buffer can't take them: .*poison") as told:
        assert len(buffer) == 17
        one.extend(batch(1, POISON, 1, 1000))
        assert buffer.save(tmp_path) > 0
    assert len(told) == 1
    assert dropped(buffer) == [2, 0]
    assert numbers(buffer) == [0, 1, 2, 3, 4, 75, 76, 78, 79, 90, 91, 92, 93, 94, 0, 1, 2]
    drawn = buffer.sample()
    steps = dict(zip(drawn["index"].tolist(), drawn["steps_to_next_obs"][:, 0].tolist(), strict=True))
    assert [steps[row] for row in (5, 6, 7)] == [2, 1, 3]
    one.extend(batch(1, 100, 2, 1000))
    assert len(buffer) == 19
    restored = buffer_of(2, n_steps=3, transform=Poisoned())
    restored.load(tmp_path)
    assert len(restored) == 17


def test_no_room_aside_drops_what_has_none():
    """Case 80, 40."""
    buffer = buffer_of(1, 20, {"share_next": True, "next_capacity": 2})
    client = buffer.client(batch(0, 0, 1))
    for first in (0, 10, 20, 30):
        client.extend(batch(0, first, 1))
    with pytest.warns(UserWarning, match="no room aside"):
        assert len(buffer) == 3
    assert dropped(buffer) == [1]
    assert numbers(buffer) == [0, 10, 20]


def other_rows(n: int) -> TensorDict:
    return TensorDict({"other": torch.zeros(n, 3)}, [n])


@pytest.mark.parametrize("how", ["own write", "load", "set_storage"])
def test_a_buffer_of_other_rows_turns_its_writers_away(how: str, tmp_path: Path):
    """Case 80: rows that wait are dropped, writers are told, and new clients write what the buffer has now."""
    kept = buffer_of(None)
    kept.extend(other_rows(4))
    kept.save(tmp_path)
    buffer = buffer_of()
    client, idle = (buffer.client(batch(0, 0, 1)) for _ in range(2))
    with pytest.warns(UserWarning, match="the buffer has rows of other keys, shapes or dtypes") as told:
        if how == "own write":
            buffer.extend(other_rows(4))
        elif how == "load":
            buffer.load(tmp_path)
        else:
            buffer.extend(batch(0, 0, 1))
            buffer.set_storage(LazyTensorStorage(100))
            buffer.extend(other_rows(4))
        client.extend(batch(0, 0, 3))
        assert buffer[:]["other"].shape == (4, 3)
        buffer.save(tmp_path / "again")
    assert (len(told), dropped(buffer)) == (1, [3, 0])
    for each in (client, idle):
        with pytest.raises(RuntimeError, match="has rows of other keys, shapes or dtypes now: ask it for a client"):
            each.extend(batch(0, 3, 1))
    with pytest.raises(ValueError, match="keys differ"):
        buffer.client(batch(0, 0, 1))
    buffer.client().extend(other_rows(2))
    assert len(buffer) == 6
