"""Small keys of a row side by side in one record: how they lie, and that nobody sees it but by the addresses."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import TensorDict

import gpubuf
from gpubuf.data import LazyTensorStorage, TensorDictReplayBuffer, TensorStorage
from gpubuf.kernels import rows
from tests.support.transitions import same, transitions


def buffer(storage=None) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(40) if storage is None else storage,
        batch_size=16,
        generator=torch.Generator().manual_seed(3),
    )


@pytest.mark.parametrize(("size", "shape"), [(40, (40,)), (40, (10, 4)), (1, (1,)), (4, (1, 4))])
def test_packed_rows_are_ordinary_tensors(backend, size, shape):
    """Written, drawn, read and overwritten as rows of one tensor a key are, also where a dimension has length 1."""
    ndim, envs = len(shape), shape[-1] if len(shape) == 2 else 1

    def shaped(n, start):
        # A batch is [environments, steps].
        data = transitions(n, start)
        return data if ndim == 1 else data.view(envs, n // envs)

    packed = buffer(LazyTensorStorage(size, ndim=ndim))
    plain = buffer(TensorStorage(transitions(size).apply(torch.zeros_like).view(shape), ndim=ndim))
    plain.empty()
    for start, n in ((0, 12), (12, 24), (36, 16)):
        for each in (packed, plain):
            each.extend(shaped(n, start))
    table = packed.storage.table[:, rows.ROW_STRIDE].tolist()
    strides = {leaf.key: stride for leaf, stride in zip(packed.storage.layout.leaves, table, strict=True)}
    assert strides["observation",] == strides["next", "observation"] == 24
    assert strides["pixels",] == 7
    assert packed.storage.nbytes == plain.storage.nbytes
    assert same(packed[:], plain[:])
    batch = packed.sample()
    assert all(value.is_contiguous() for value in batch.values(True, True))
    assert same(batch, plain.sample())
    assert gpubuf.plan(transitions(5), size).rows == packed.storage.nbytes


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
