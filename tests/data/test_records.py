"""Small keys of a row side by side in one record: how they lie, and that nobody sees it but by the addresses."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import TensorDict

from gpubuf.data import LazyTensorStorage, TensorDictReplayBuffer, TensorStorage
from tests.support.transitions import same, transitions


def buffer(storage=None) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(40) if storage is None else storage,
        batch_size=16,
        generator=torch.Generator().manual_seed(3),
    )


@pytest.mark.parametrize("way", ["state", "checkpoint"])
@pytest.mark.parametrize("to_packed", [True, False])
def test_packed_rows_load_into_others_and_back(tmp_path, way, to_packed):
    plain = TensorStorage(transitions(40).apply(torch.zeros_like))
    source, target = (buffer(plain), buffer()) if to_packed else (buffer(), buffer(plain))
    source.empty()
    for start in (0, 30):
        source.extend(transitions(30, start))
    if way == "state":
        target.load_state_dict(source.state_dict())
    else:
        source.save(tmp_path / "saved")
        target.load(tmp_path / "saved")
    assert same(target[:], source[:])


@pytest.mark.parametrize("given", [False, True])
def test_pickle_writes_every_row_once(given):
    """Rows given to the storage share no record, even where they share memory."""
    both = torch.zeros(2, 4096, 3)
    rows = TensorDict({"a": both[0], "b": both[1]}, [4096])
    each = buffer(TensorStorage(rows) if given else LazyTensorStorage(4096))
    each.empty()
    each.extend(rows.apply(lambda key: key + torch.arange(4096.0)[:, None]))
    written = pickle.dumps(each)
    assert len(written) < (2.5 if given else 1.2) * each.storage.nbytes
    other = pickle.loads(written)
    assert same(other[:], each[:])
    assert other.memory() == each.memory()
