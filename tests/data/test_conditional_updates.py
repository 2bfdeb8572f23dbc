"""``update_if_present`` with TorchRL's arguments: versions, and a result that says which entries were written."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gpubuf.data import LazyTensorStorage, ListStorage, ReplayBuffer, RoundRobinWriter, TensorDictReplayBuffer
from tests.support.fake_cuda import fake_cuda, no_blocking_copies


def rows(n: int) -> TensorDict:
    """``n`` rows with values and versions."""
    return TensorDict({"value": torch.zeros(n), "deep": {"v": torch.arange(n) % 4}}, [n])


def filled(n: int = 8) -> TensorDictReplayBuffer:
    writer = RoundRobinWriter(track_generations=True)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(n), writer=writer)
    buffer.extend(rows(n))
    return buffer


def test_what_contradicts_itself_is_refused():
    buffer = filled()
    index = torch.arange(2)
    given = {"index": index, "generation": buffer.writer.generations_of(index)}
    value = {"value": torch.ones(2)}
    for arguments, kind, text in (
        ({}, TypeError, "data or as patch"),
        ({"data": rows(2), "patch": value}, TypeError, "not both"),
        ({"patch": value, "version": 3}, ValueError, "belong together"),
        ({"patch": value, "version_key": "value", "version": 3}, ValueError, "may not appear in patch"),
        ({"patch": value, "version_key": "missing", "version": 3}, ValueError, "not stored"),
        ({"patch": value, "version_key": "missing", "version": 3}, KeyError, "^version_key 'missing' is not stored$"),
        ({"patch": value, "version_key": "deep.v", "version": 3}, KeyError, "Dotted-string"),
        ({"patch": {"missing": torch.ones(2)}}, KeyError, "^key 'missing' is not stored; the storage has"),
        ({"patch": value, "version_key": ("deep", "v"), "version": torch.arange(3)}, ValueError, "version must be"),
        ({"patch": {"value": torch.ones(3)}}, ValueError, "2 rows"),
    ):
        with pytest.raises(kind, match=text):
            buffer.update_if_present(**given, **arguments)
        future = buffer.submit_update_if_present(**given, **arguments)
        assert isinstance(future.exception(), kind)
    assert (buffer[:]["value"] == 0).all()


def test_a_row_that_was_never_written_is_stale():
    """Its generation is -1, which counted as live: the result said that it was updated."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8))
    buffer.extend(rows(5))
    index = torch.tensor([1, 7])
    generation = buffer.writer.generations_of(index)
    assert generation[1] == -1
    result = buffer.update_if_present(index=index, generation=generation, patch={"value": torch.ones(2)})
    assert result.updated.tolist() == [True, False]
    assert (result.stale_count, len(buffer)) == (1, 5)


def test_objects_have_no_conditional_updates():
    buffer = ReplayBuffer(storage=ListStorage(4))
    buffer.extend([1, 2])
    assert not buffer.storage.supports_conditional_update
    with pytest.raises(NotImplementedError, match="conditional"):
        buffer.update_if_present(index=torch.arange(1), generation=torch.ones(1), patch={"a": torch.ones(1)})


def test_the_form_with_data_takes_versions_too():
    buffer = filled(3)
    index = torch.tensor([0, 1, 2, 1])
    batch = TensorDict({"value": torch.tensor([1.0, 2.0, 3.0, 4.0])}, [4])
    generation = buffer.writer.generations_of(index)
    assert buffer.update_if_present(index, batch, generation=generation) is None
    assert buffer[:]["value"].tolist() == [1.0, 4.0, 3.0]
    version = torch.tensor([0, 5, 1, 3])
    result = buffer.update_if_present(
        index, batch * 10, generation=generation, version_key=("deep", "v"), version=version
    )
    assert result is not None
    assert result.updated.tolist() == [True, True, False, False]
    assert buffer[:]["value"].tolist() == [10.0, 20.0, 3.0]
    assert buffer[:]["deep", "v"].tolist() == [0, 5, 2]


def test_no_host_sync():
    with fake_cuda():
        writer = RoundRobinWriter(track_generations=True)
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100, device="cuda"), writer=writer)
        data = TensorDict(
            {
                "value": torch.empty(40, device="cuda"),
                "version": torch.empty(40, dtype=torch.int64, device="cuda"),
            },
            [40],
        )
        index = buffer.extend(data)
        with no_blocking_copies():
            generation = writer.generations_of(index)
            result = buffer.update_if_present(
                index=index,
                generation=generation,
                patch={"value": data["value"]},
                version_key="version",
                version=data["version"],
            )
            assert result.updated.shape == (40,)
            assert buffer.submit_update_if_present(index=index, generation=generation, patch=data).done()
