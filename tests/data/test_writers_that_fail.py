"""What a writer does wrong, or a learner changes, harms neither: rows are refused, dropped and counted, or stored."""

import contextlib
import functools
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gpubuf import Codec, LazyTensorStorage, SliceSampler, TensorDictReplayBuffer, Writers
from tests.support.writer_histories import planted
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
    with pytest.warns(UserWarning, match="were dropped, for the buffer can't take them: .*poison") as told:
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
    if how == "own write":
        buffer.extend(other_rows(4))
    elif how == "load":
        buffer.load(tmp_path)
    else:
        buffer.extend(batch(0, 0, 1))
        buffer.set_storage(LazyTensorStorage(100))
        buffer.extend(other_rows(4))
    client.extend(batch(0, 0, 3))
    with pytest.warns(UserWarning, match="the buffer has rows of other keys, shapes or dtypes") as told:
        len(buffer)
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


def test_a_counter_that_a_writer_set_wrong_adds_no_row():
    """Case 80: rows that it did write are there, and its next ones."""
    buffer = buffer_of(Writers(2, queue_steps=16), n_steps=2)
    one, other = (buffer.client(batch(0, 0, 1)) for _ in range(2))
    one.extend(batch(1, 0, 3))
    other.extend(batch(2, 0, 3))
    assert len(buffer) == 6
    for wrong in (10**6, 3 + 17, -5, 2**63 - 1):
        one._queues.publish(0, wrong)
        other.extend(batch(2, 5, 1))
        with pytest.warns(UserWarning, match="dropped") if wrong == 10**6 else contextlib.nullcontext():
            buffer.writers.take(everything=True)
        assert buffer.sample().shape == (8,)
    assert len(buffer) == 10
    one.extend(batch(1, 3, 2))
    buffer.writers.take(everything=True)
    assert numbers(buffer) == [0, 1, 2, 0, 1, 2, 5, 5, 5, 5, 3, 4]


def test_memory_that_a_writer_cuts_off_kills_nobody():
    """Case 80: it can't."""
    buffer = buffer_of()
    client = buffer.client(batch(0, 0, 1))
    client.extend(batch(0, 0, 3))
    for size in (0, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(client._queues._handle, size)
    assert len(buffer) == 3


# Waiting that nothing can end


def test_rows_that_never_fit_are_not_waited_for():
    """Case 81: ``min_rows`` above the capacity."""
    with pytest.raises(ValueError, match="min_rows=51 rows never fit into a buffer of 50"):
        buffer_of(Writers(1, ratio=1.0, min_rows=51), 50)
    buffer = buffer_of(Writers(1, ratio=1.0, min_rows=50), 50)
    with pytest.raises(ValueError, match="min_rows=50 rows never fit into a buffer of 20"):
        buffer.set_storage(LazyTensorStorage(20))


@pytest.mark.parametrize("how", ["empty", "free", "load"])
def test_an_emptied_buffer_counts_samples_anew(how: str, tmp_path: Path):
    """Case 81: learner and writer would wait for each other for ever."""
    options = Writers(1, ratio=4.0, margin=40.0, min_rows=20, timeout=0.2)
    buffer = buffer_of(options)
    buffer_of(None).save(tmp_path) if how == "load" else None
    client = buffer.client(batch(0, 0, 1))
    for _ in range(2):
        client.extend(batch(0, 0, 25))
        for _ in range(5):
            buffer.sample()
        buffer.load(tmp_path) if how == "load" else getattr(buffer, how)()
        with pytest.raises(TimeoutError, match="8 samples more than 0 wait for rows"):
            buffer.sample()


def test_a_write_beyond_the_margin_goes_in_parts():
    """Case 81: the learner draws between them. A batch that has no room beside a step is refused."""
    buffer = buffer_of(Writers(1, ratio=4.0, margin=8.0, timeout=20.0))
    client = buffer.client(batch(0, 0, 1))
    writer = threading.Thread(target=client.extend, args=(batch(0, 0, 40),))
    writer.start()
    for _ in range(19):
        buffer.sample()
    writer.join()
    assert numbers(buffer) == list(range(40))
    with pytest.raises(ValueError, match=r"a batch of 16 samples is more than twice margin=8.0 has room for"):
        buffer.sample(batches=2)


# What is acknowledged


def close_while_they_write() -> tuple[list[int], list[int], Any]:
    """Of three writers how many rows are in the buffer as ``close()`` returns, and were acknowledged in the end."""
    buffer = buffer_of(Writers(3, run=1, timeout=0.5), 1 << 20)
    clients = [buffer.client(batch(0, 0, 1)) for _ in range(3)]
    acknowledged = [0, 0, 0]

    def write(number: int) -> None:
        with contextlib.suppress(RuntimeError, TimeoutError):
            while True:
                clients[number].extend_columns(columns(number, acknowledged[number], 1))
                acknowledged[number] += 1

    threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    while min(acknowledged) < 20:
        len(buffer)
    buffer.writers.close()
    # Now, for a program that saves now has no more: what is acknowledged after this is lost.
    stored = torch.bincount(buffer[:]["writer"][:, 0], minlength=3).tolist()
    for thread in threads:
        thread.join()
    return stored, acknowledged, buffer


def test_what_is_acknowledged_before_close_is_there():
    """Case 82: and after it nothing is. What was refused as it was written may be there."""
    for _ in range(20):
        stored, acknowledged, buffer = close_while_they_write()
        assert all(there - told in (0, 1) for there, told in zip(stored, acknowledged, strict=True))
        assert len(buffer) == sum(stored)
        with pytest.raises(RuntimeError, match="takes no more rows"):
            buffer.client()


def test_what_is_acknowledged_after_close_shows():
    """As by a writer who looks four times a second whether the buffer was closed."""
    with planted("acknowledged after the close"):
        stored, acknowledged, _ = close_while_they_write()
    assert sum(acknowledged) > sum(stored) + 3


@pytest.mark.parametrize("parts", [{"n_steps": 2}, {"sampler": functools.partial(SliceSampler, slice_len=2)}, {}])
def test_a_first_sample_finds_what_was_acknowledged(parts: dict[str, Any]):
    """Case 82: runs that are shorter than wanted are no reason to call the buffer empty."""
    for use in (lambda buffer: buffer.can_sample(), lambda buffer: len(buffer.sample()) == 8, len):
        buffer = buffer_of(**parts)
        buffer.client(batch(0, 0, 1)).extend(batch(0, 0, 5))
        assert use(buffer)


def test_a_buffer_that_goes_away_ends_its_thread_and_tells_its_writers():
    """Case 82: with ``writers.start()``; its memory and files go with it."""
    files = len(os.listdir("/proc/self/fd"))
    buffer = buffer_of()
    buffer.writers.start()
    client = buffer.client(batch(0, 0, 1))
    client.extend(batch(0, 0, 3))
    thread, queues = buffer.writers._thread[0], weakref.ref(client._queues)
    gone = weakref.ref(buffer.writers)
    del buffer
    thread.join(20)
    assert not thread.is_alive()
    assert gone() is None
    with pytest.raises(RuntimeError, match="takes no more rows: it was closed, or is gone"):
        client.extend(batch(0, 3, 1))
    del client
    assert queues() is None
    assert len(os.listdir("/proc/self/fd")) == files
