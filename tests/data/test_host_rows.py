"""Rows with data that are not tensors: text and other values, in lists on the host beside the tensors."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, is_non_tensor, tensorclass

from gpubuf.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    Mirror,
    MixedReplayBuffer,
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictReplayBuffer,
    TensorStorage,
)
from gpubuf.data.recording import CaptureError, Recording, recorded
from gpubuf.integrations.torchrl import TensorDictMaxValueWriter
from gpubuf.kernels.rows import NoRoomError
from tests.contracts.buffers import flat
from tests.support.interrupts import interrupted


def rows(n: int, first: int = 0) -> TensorDict:
    """``n`` rows whose text says their number."""
    number = torch.arange(first, first + n)
    told = [f"row {i}" for i in number.tolist()]
    inner = TensorDict({"number": number.float(), "text": NonTensorStack(*told)}, [n])
    return TensorDict({"number": number, "text": NonTensorStack(*told), "inner": inner, "kind": "same"}, [n])


def numbers(data: TensorDict) -> list[int]:
    """The numbers of rows, after a check that tensors and text agree."""
    found = data["number"].reshape(-1).tolist()
    text, inner = data.get("text"), data["inner"].get("text")
    assert is_non_tensor(text)
    assert text.batch_size == data.batch_size == inner.batch_size
    for told in (text.tolist(), inner.tolist()):
        assert [told] if isinstance(told, str) else flat(told) == [f"row {i}" for i in found]
    assert set(flat([data.get("kind").tolist()])) == {"same"}
    return found


def filled(n: int = 6, capacity: int = 10, **kwargs: Any) -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=4, **kwargs)
    buffer.extend(rows(n))
    return buffer


def test_one_value_for_all_rows_and_values_of_other_types():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=8)
    values = [None, 2.5, {"key": [1]}, [1, 2]]
    for value in values:
        buffer.add(TensorDict({"a": torch.zeros(()), "value": NonTensorData(value)}))
    assert buffer[:].get("value").tolist() == values
    buffer.extend(TensorDict({"a": torch.zeros(2), "value": NonTensorData("all", batch_size=[2])}, [2]))
    assert buffer[:].get("value").tolist() == ["all", "all", *values[2:]]


def test_text_that_is_written_back_is_whole_and_in_range():
    """CASES 54, 75: keys of both kinds are written, or none; an index that is no row's is an error."""
    index, generation = torch.tensor([1]), torch.ones(1, dtype=torch.int64)
    new = TensorDict({"number": torch.tensor([7]), "text": NonTensorStack("new")}, [1])
    for place in range(5000):
        buffer = ReplayBuffer(storage=LazyTensorStorage(4), writer=RoundRobinWriter(track_generations=True))
        buffer.extend(TensorDict({"number": torch.arange(3), "text": NonTensorStack(*"abc")}, [3]))
        update = functools.partial(buffer.update_if_present, index, new, generation=generation)
        interrupt = interrupted(update, place)
        found = buffer[index]
        assert (int(found["number"]) == 7) == (found.get("text").tolist() == ["new"])
        if interrupt is None:
            break
    with pytest.raises(IndexError, match="out of range"):
        buffer.update_if_present(torch.tensor([9]), new.exclude("number"), generation=generation)


def test_rows_that_are_overwritten_keep_their_text_where_next_observations_are_shared_too():
    """CASES 54: an interrupt may come between the two changes, each of which has several steps."""
    number = torch.arange(4.0).view(-1, 1)
    after = {"observation": number + 1, "done": torch.zeros(4, 1, dtype=torch.bool)}
    steps = TensorDict({"observation": number, "text": NonTensorStack(*"abcd"), "next": TensorDict(after, [4])}, [4])
    new = steps[:1].clone()
    new["observation"], new["text"] = torch.full((1, 1), 7.0), NonTensorStack("new")
    for place in range(5000):
        buffer = ReplayBuffer(storage=LazyTensorStorage(8, share_next=True))
        buffer.extend(steps)
        interrupt = interrupted(functools.partial(buffer.__setitem__, torch.tensor([1]), new), place)
        found = buffer[torch.tensor([1])]
        assert (float(found["observation"]) == 7) == (found.get("text").tolist() == ["new"])
        assert float(buffer[torch.tensor([0])]["next", "observation"]) == 1
        if interrupt is None:
            break


class Frames:
    """An array that makes itself when it is asked, as LazyFrames do."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return self.values


class Foreign(Frames):
    """An array of a library that speaks DLPack, as JAX does."""

    def __dlpack__(self, **options):
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.values.__dlpack_device__()


@pytest.mark.parametrize("kind", [Frames, Foreign])
def test_arrays_of_other_libraries_become_tensors_wherever_they_lie(kind):
    """CASES 75. A TensorDict keeps them as one object each; they are rows all the same."""
    values = np.arange(8, dtype=np.float32).reshape(4, 2)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(16), batch_size=2)
    buffer.extend(TensorDict({"a": kind(values)}, [4]))
    buffer.extend(TensorDict({"a": kind(values)}, [4]))
    buffer.extend({"a": kind(values)})
    buffer.add({"a": kind(values[1])})
    assert torch.equal(buffer[:]["a"], torch.from_numpy(np.concatenate([values, values, values, values[1:2]])))
    plain = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=2)
    plain.extend(kind(values))
    plain.add(kind(values[0]))
    assert torch.equal(plain[:], torch.from_numpy(np.concatenate([values, values[:1]])))
    with pytest.raises(ValueError, match=r"an array of shape \(4, 2\) lies in a TensorDict of \[3\]"):
        buffer.extend(TensorDict({"a": kind(values)}, [3]))
    assert len(buffer) == 13
    # A row by itself, rows that are stacked, columns, and what is written back.
    single = ReplayBuffer(storage=LazyTensorStorage(8), writer=RoundRobinWriter(track_generations=True))
    single.add(TensorDict({"a": kind(values[0])}, []))
    single.extend([TensorDict({"a": kind(row)}, []) for row in values[1:3]])
    single.extend_columns({"a": kind(values[3:])})
    assert torch.equal(single[:]["a"], torch.from_numpy(values))
    back = TensorDict({"a": kind(values[:2])}, [2])
    single.update_if_present(torch.tensor([2, 3]), back, generation=torch.ones(2, dtype=torch.int64))
    assert torch.equal(single[:]["a"], torch.from_numpy(values[[0, 1, 0, 1]]))


def test_arrays_that_pytorch_does_not_take_as_they_are():
    """CASES 75. In the other order of bytes; and of a library whose DLPack can't pass on what it has."""

    class Refuses(Frames):
        def __dlpack__(self, **options):
            raise BufferError("not this dtype")

        def __dlpack_device__(self):
            return torch.zeros(0).__dlpack_device__()

    buffer = ReplayBuffer(storage=LazyTensorStorage(8))
    for values in (np.arange(3, dtype=">f4"), Refuses(np.arange(3, dtype=np.float32))):
        buffer.extend({"a": values})
    assert torch.equal(buffer[:]["a"], torch.arange(3.0).repeat(2))
    alone = type("Alone", (), {name: vars(Refuses)[name] for name in ("__dlpack__", "__dlpack_device__")})
    with pytest.raises(BufferError, match="not this dtype"):
        buffer.extend({"a": alone()})


def test_what_can_not_be_rows_is_refused_with_its_key():
    """CASES 75. None of it was an error: nothing was written, or one object in each row."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=2)
    for wrong, message in [
        ({"a": [[1, 2], [3]]}, r"key \('a',\) has rows of different shapes"),
        ({"a": np.zeros(2), "next": {"b": object()}}, r"key \('next', 'b'\) holds a object, which is no array"),
        ({"a": np.array(["x", "y"])}, "key 'a': can't convert np.ndarray"),
        (TensorDict({"text": NonTensorStack("x", "y")}, [2]), r"no key of the rows is a tensor: \['text'\]"),
    ]:
        with pytest.raises(TypeError, match=message):
            buffer.extend(wrong)
    assert not buffer.initialized
    buffer.extend({"a": np.zeros(2), "text": ["x", "y"], "same": "z"})
    assert buffer[:].get("text").tolist() == ["x", "y"]
    text = TensorDict({"text": NonTensorStack("p", "q")}, [2])
    for wrong, message in [
        (TensorDict({"a": NonTensorStack("p", "q")}, [2]), "key 'a' is not a tensor, and none of the storage's"),
        (text[:1], r"'text': 2 rows are addressed, the batch has \[1\]"),
        (NonTensorStack("p", "q"), r"key \(\) is not a tensor"),
    ]:
        with pytest.raises(ValueError, match=message):
            buffer.update_if_present(torch.tensor([0, 1]), wrong, generation=torch.ones(2, dtype=torch.int64))
    buffer[0:2] = TensorDict({"a": torch.ones(2, dtype=torch.float64), **text, "same": "z"}, [2])
    assert buffer[:].get("text").tolist() == ["p", "q"]


def test_a_batch_that_does_not_fit_is_refused_and_nothing_written():
    buffer = filled()
    for wrong, match in (
        (rows(2).exclude("text"), "missing 'text'"),
        (rows(2).set("text", torch.zeros(2)), "missing 'text', not a tensor"),
        (rows(2).set("more", NonTensorStack("a", "b")), "extra"),
        (rows(2).exclude("number"), "number"),
    ):
        with pytest.raises(ValueError, match=match):
            buffer.extend(wrong)
    with pytest.raises(ValueError, match="text"):
        buffer[0] = rows(1).exclude("text")[0]
    assert numbers(buffer[:]) == list(range(6))
    assert numbers(buffer.sample())
    once = TensorDictReplayBuffer(storage=LazyTensorStorage(6, share_next=True, next_capacity=1), batch_size=4)
    number = torch.arange(7)
    once.extend(rows(6).set("next", {"number": number[1:]}))
    with pytest.raises(NoRoomError):
        once.extend(rows(3, 6).set("next", {"number": number[:3]}))
    assert numbers(once[:]) == list(range(6))
    plain = ReplayBuffer(storage=LazyTensorStorage(4))
    plain.extend(TensorDict({"a": torch.zeros(2)}, [2]))
    with pytest.raises(ValueError, match="text"):
        plain.extend(TensorDict({"a": torch.zeros(2), "text": "new"}, [2]))


@tensorclass
class Step:
    """A tensorclass with a field of text."""

    number: torch.Tensor
    text: str


def test_tensorclasses():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=3)
    buffer.extend([Step(number=torch.tensor(i), text=f"row {i}", batch_size=[]) for i in range(3)])
    batch = buffer.sample()
    assert isinstance(batch, Step)
    assert list(batch.text) == [f"row {i}" for i in batch.number.tolist()]
    assert buffer[1].text == "row 1"
    other = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=3)
    other.load_state_dict(buffer.state_dict())
    assert isinstance(other[:], Step)
    assert list(other[:].text) == ["row 0", "row 1", "row 2"]


def test_a_state_with_other_keys_is_refused(tmp_path: Path):
    buffer = filled()
    state = buffer.state_dict()
    state["_storage"]["host"][0]["rows"].pop()
    with pytest.raises(ValueError, match="does not have 6 rows"):
        filled(2).load_state_dict(state)
    other = ReplayBuffer(storage=LazyTensorStorage(10))
    other.extend(rows(2).exclude("text", "kind", ("inner", "text")))
    with pytest.raises(ValueError, match="not tensors"):
        filled(2).load_state_dict({**buffer.state_dict(), "_storage": other.state_dict()["_storage"]})
    assert numbers(buffer[:]) == list(range(6))
    unsaved = ReplayBuffer(storage=LazyTensorStorage(4))
    unsaved.extend(TensorDict({"a": torch.zeros(1), "value": NonTensorData(object(), batch_size=[1])}, [1]))
    with pytest.raises(TypeError, match="host"):
        unsaved.save(tmp_path / "objects")


def test_tensors_beside_text_are_changed_in_place():
    buffer = filled()
    buffer[[1, 2]] = rows(2, 40)
    assert numbers(buffer[:]) == [0, 40, 41, 3, 4, 5]
    batch = buffer.sample()
    generation = buffer.writer.generations_of(batch["index"])
    gone = generation.clone()
    gone[batch["index"] == batch["index"][0]] += 1
    changed = batch.set("number", batch["number"] + 1).set("text", "changed")
    buffer.update_if_present(batch["index"], changed, generation=gone)
    due = {int(row) for row in batch["index"]} - {int(batch["index"][0])}
    assert [text == "changed" for text in buffer[:].get("text").tolist()] == [row in due for row in range(6)]
    buffer[:] = rows(6)
    assert numbers(buffer[:]) == list(range(6))
    assert "'text': on the host" in repr(buffer)


def test_other_shapes_of_storage():
    steps = TensorDictReplayBuffer(storage=LazyTensorStorage(12, ndim=2), dim_extend=0, batch_size=5)
    steps.extend(rows(8).exclude("inner").view(4, 2))
    told = steps[:].get("text").tolist()
    assert flat(told) == [f"row {i}" for i in steps[:]["number"].view(-1).tolist()]
    steps.extend(rows(8, 8).exclude("inner").view(4, 2))
    assert flat(steps[:].get("text").tolist()) == [f"row {i}" for i in steps[:]["number"].view(-1).tolist()]
    whole = ReplayBuffer(storage=LazyTensorStorage(5), batch_size=3)
    whole.extend(rows(8).exclude("inner").view(4, 2))
    batch = whole.sample()
    assert batch.get("text").batch_size == (3, 2)
    assert flat(batch.get("text").tolist()) == [f"row {i}" for i in batch["number"].view(-1).tolist()]
    full = ReplayBuffer(storage=TensorStorage(rows(4)), batch_size=3)
    assert numbers(full[:]) == [0, 1, 2, 3]
    full.extend(rows(2, 4))
    assert numbers(full[:]) == [4, 5, 2, 3]


def test_what_changes_batches_keeps_them_with_their_rows():
    mirror = Mirror({"value": ([1, 0], 1.0)})
    mirrored = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=4, transform=mirror)
    mirrored.extend(rows(6).exclude("inner").set("value", torch.ones(6, 2)))
    batch = mirrored.sample()
    for found in (batch, torch.cat([batch, mirror.mirrored(batch)])):
        assert found.get("text").tolist() == [f"row {i}" for i in found["number"].tolist()]
    converted = TensorDictReplayBuffer(storage=LazyTensorStorage(10, dtypes={"number": torch.int16}), batch_size=4)
    converted.extend(rows(6))
    assert numbers(converted.sample())
    assert numbers(converted[:]) == list(range(6))


def test_what_is_refused(tmp_path: Path):
    buffer = filled()
    with recorded(Recording()), pytest.raises(CaptureError, match="outside of the step"):
        buffer.extend(rows(1))
    assert numbers(buffer[:]) == list(range(6))
    with pytest.raises(ValueError, match="not tensors"):
        MixedReplayBuffer([buffer, filled()], batch_size=4).sample()
    with pytest.raises(NotImplementedError, match="LazyTensorStorage"):
        ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path / "rows")).extend(rows(2))
    best = TensorDictReplayBuffer(storage=LazyTensorStorage(4), writer=TensorDictMaxValueWriter(rank_key="number"))
    with pytest.raises(ValueError, match="has no rank"):
        best.extend(rows(2))
    assert not best.initialized
    n_step = {"next": {"reward": torch.ones(4, 1), "done": torch.zeros(4, 1, dtype=torch.bool), "text": "late"}}
    with pytest.raises(ValueError, match="those of other rows"):
        ReplayBuffer(storage=LazyTensorStorage(4), n_steps=2).extend(TensorDict(n_step, [4]))
    with pytest.raises(TypeError, match="a TensorDict holds such data"):
        ReplayBuffer(storage=LazyTensorStorage(4)).extend({"a": TensorDict({"text": "x"}, [2])})
