"""Rows of storages of two dimensions have the shape in which they were written, as with TorchRL."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch.overrides import TorchFunctionMode

from gpubuf.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from tests.support.torchrl_buffers.two_dimensions import rows


def buffers(**options):
    """A buffer that gives views of its rows, and one that makes copies, both written to."""
    for own in ({}, {"dtypes": {"a": torch.int32}}):
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(12, ndim=2, **own), **options)
        buffer.extend(rows(2, 5, options.get("dim_extend")))
        yield buffer


@pytest.mark.parametrize("dim_extend", [None, 0, 1])
def test_indices_go_by_the_written_shape(backend, dim_extend):
    written = rows(2, 5, dim_extend)
    for buffer in buffers(dim_extend=dim_extend):
        for index in (slice(None), 1, -1, slice(1, None), ..., (1, 0), (slice(None), slice(1, 2))):
            found = buffer[index]
            assert (found.exclude("index") == written[index]).all(), index
            # The index of a row is that of the storage, in whatever shape the rows are given.
            where = found["index"].reshape(-1, 2)
            assert torch.equal(buffer[where]["a"], found["a"].reshape(-1))


def test_indices_that_no_row_has(backend):
    for buffer in buffers():
        for index, error in (
            (2, IndexError),
            ((0, 5), IndexError),
            ((0, 0, 0), IndexError),
            (slice(5, 2, -1), ValueError),
        ):
            with pytest.raises(error):
                buffer[index]
        assert buffer[5:].shape == (0, 5)
        assert buffer[1, 3:1].shape == (0,)


def test_one_row_of_many_lists_no_others(backend):
    """A list of the positions of all rows is larger than they are, with a large buffer of few columns."""

    class Sizes(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                sizes.append(out.untyped_storage().nbytes())
            return out

    sizes = []
    buffer = ReplayBuffer(storage=LazyTensorStorage(2**16, ndim=2, dtypes={"a": torch.int32}))
    buffer.extend(TensorDict({"a": torch.arange(2**16).view(2, -1)}, [2, 2**15]))
    with Sizes():
        assert buffer[1, 77]["a"] == 2**15 + 77
        assert buffer[:, 7:9]["a"].tolist() == [[7, 8], [2**15 + 7, 2**15 + 8]]
    assert sizes
    assert max(size for size in sizes if size != buffer.storage.nbytes) < 2**10


@pytest.mark.parametrize("dim_extend", [None, 0])
def test_rows_are_written_as_they_are_read(backend, dim_extend):
    for buffer in buffers(dim_extend=dim_extend):
        due = buffer[:].clone()
        for index in (slice(None), 1, slice(0, 1), (1, 0), (slice(None), 1)):
            new = due[index].exclude("index").apply(lambda value: value + 50)
            buffer[index] = new
            due[index] = due[index].exclude("index").apply(lambda value: value + 50).set("index", due[index]["index"])
            assert (buffer[:] == due).all(), index
        buffer["a"] = due["a"] - 7
        buffer["next", "b"] = 3
        assert torch.equal(buffer["a"], due["a"] - 7)
        assert buffer["next", "b"].eq(3).all()


def test_positions_are_those_of_samples(backend):
    buffer = next(buffers())
    batch, info = buffer.sample(6, return_info=True)
    assert torch.equal(buffer[info["index"]]["a"], batch["a"])
    assert torch.equal(buffer[info["index"].unbind(-1)]["a"], batch["a"])
    assert buffer[[0, 3]]["a"].tolist() == [0, 6]


def test_rows_that_are_not_tensordicts(backend):
    buffer = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2))
    buffer.extend(torch.arange(6.0).view(2, 3))
    assert buffer[:].tolist() == [[0, 1, 2], [3, 4, 5]]
    buffer[1] = torch.tensor([7.0, 8.0, 9.0])
    assert buffer[0:2, 1].tolist() == [1, 8]
    tree = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2))
    tree.extend({"x": torch.arange(6.0).view(2, 3)})
    assert tree[:]["x"].shape == tree["x"].shape == (2, 3)
