"""Rows of storages of two dimensions have the shape in which they were written, as with TorchRL.

Coordinates in storages of two dimensions: each within its own dimension.

Case 52: a coordinate out of range in one dimension is a legal row of another.
"""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch.overrides import TorchFunctionMode

from gpubuf import LazyTensorStorage, TensorDictPrioritizedReplayBuffer
from gpubuf.data import ReplayBuffer, TensorDictReplayBuffer
from gpubuf.data.storage.indexing import as_positions, ravel
from gpubuf.kernels.rows import FAULTS
from gpubuf.kernels.sum_tree import NO_ROW
from tests.support.fake_cuda import fake_cuda
from tests.support.interpreter import triton_on_cpu
from tests.support.torchrl_buffers.two_dimensions import rows


def buffers(**options):
    """A buffer that gives views of its rows, and one that makes copies, both written to."""
    for own in ({}, {"dtypes": {"a": torch.int32}}):
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(12, ndim=2, **own), **options)
        buffer.extend(rows(2, 5, options.get("dim_extend")))
        yield buffer


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


def test_rows_that_are_not_tensordicts(backend):
    buffer = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2))
    buffer.extend(torch.arange(6.0).view(2, 3))
    assert buffer[:].tolist() == [[0, 1, 2], [3, 4, 5]]
    buffer[1] = torch.tensor([7.0, 8.0, 9.0])
    assert buffer[0:2, 1].tolist() == [1, 8]
    tree = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2))
    tree.extend({"x": torch.arange(6.0).view(2, 3)})
    assert tree[:]["x"].shape == tree["x"].shape == (2, 3)


ENVS, STEPS = 3, 4
OUTSIDE = [(0, 3), (0, 7), (1, -4), (4, 0), (-5, 2), (2**40, 0), (0, -(2**40)), (-1, 3)]


def filled(steps: int = STEPS, room: int = STEPS) -> TensorDictPrioritizedReplayBuffer:
    """Row [t, e] holds 10 t + e, and has the priority 1."""
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(room * ENVS, ndim=2)
    )
    number = 10 * torch.arange(steps) + torch.arange(ENVS).unsqueeze(-1)
    buffer.extend(TensorDict({"x": number}, [ENVS, steps]))
    return buffer


def weights(buffer: TensorDictPrioritizedReplayBuffer) -> list[float]:
    return buffer.sampler.tree.leaves[: len(buffer)].tolist()


def forms(coordinates: tuple[int, int]):
    """An index of one row, in all ways in which it may be given."""
    t, e = coordinates
    return [[list(coordinates)], torch.tensor([coordinates]), (torch.tensor([t]), torch.tensor([e])), ([t], [e])]


@pytest.mark.parametrize("coordinates", OUTSIDE)
@pytest.mark.parametrize("form", range(4))
def test_a_coordinate_out_of_range_raises_and_changes_nothing(coordinates, form):
    buffer = filled()
    index = forms(coordinates)[form]
    one = TensorDict({"x": torch.tensor([99])}, [1])
    for act in (
        lambda: buffer.update_priority(index, 5.0),
        lambda: buffer.mark_update(index),
        lambda: buffer[index],
        lambda: buffer.storage[index],
        lambda: buffer.__setitem__(index, one),
    ):
        with pytest.raises(IndexError, match=r"coordinate -?\d+ is out of range in dimension [01].*\[4, 3\]"):
            act()
    assert weights(buffer) == [1] * 12
    assert buffer[:]["x"].max() == 32


@pytest.mark.parametrize("steps", [2, STEPS])
def test_negative_coordinates_count_from_the_end_of_their_dimension(steps):
    """In the first one from the last step stored, as ``buffer[-1]`` does."""
    buffer = filled(steps)
    last = 10 * (steps - 1)
    assert buffer[[[0, -1]]]["x"].tolist() == [2]
    assert buffer[[[-1, 0], [-1, -3], [-steps, 1]]]["x"].tolist() == [last, last, 1]
    buffer[(torch.tensor([-1, 0]), torch.tensor([-1, -2]))] = TensorDict({"x": torch.tensor([7, 8])}, [2])
    assert buffer.storage[(torch.tensor([steps - 1, 0]), torch.tensor([2, 1]))]["x"].tolist() == [7, 8]
    buffer.update_priority([[0, -1], [-1, 0]], torch.tensor([5.0, 6.0]))
    assert weights(buffer) == [1, 1, 5, *[1] * (3 * steps - 6), 6, 1, 1]
    buffer.mark_update([[-1, -1]])
    assert weights(buffer)[-1] == 6


def test_steps_that_are_not_stored_cannot_be_read():
    buffer = filled(2)
    for index in ([[2, 0]], [[-3, 0]]):
        with pytest.raises(IndexError, match="out of range"):
            buffer[index]
    # As in one dimension, where they are gone since: their priorities are dropped.
    buffer.update_priority([[2, 0]], 5.0)
    assert weights(buffer) == [1] * 6


def test_positions_and_empty_indices_are_taken_as_they_are():
    buffer = filled()
    buffer.update_priority(torch.tensor([11, -1, 0]), torch.tensor([5.0, 6.0, 7.0]))
    assert weights(buffer) == [7, *[1] * 10, 5]
    buffer.update_priority(torch.empty(0, 2, dtype=torch.int64), torch.empty(0))
    assert len(buffer[torch.empty(0, 2, dtype=torch.int64)]) == 0


def test_three_dimensions():
    shape = (2, 3, 4)
    index = torch.cartesian_prod(*(torch.arange(-n, n) for n in shape))
    expected = torch.arange(24).view(shape)[tuple(index.unbind(-1))]
    assert torch.equal(ravel(index, shape), expected)
    for dim, length in enumerate(shape):
        for beyond in (length, -length - 1):
            outside = torch.zeros(1, 3, dtype=torch.int64)
            outside[0, dim] = beyond
            with pytest.raises(IndexError, match=f"coordinate {beyond} is out of range in dimension {dim}"):
                ravel(outside, shape)


class TestWithoutTheHost:
    """On a GPU nothing can raise."""

    def test_on_a_gpu_nothing_waits_for_the_host(self):
        with fake_cuda():
            index = torch.zeros(5, 2, dtype=torch.int64, device="cuda")
            assert as_positions(index, (STEPS, ENVS), index.device).shape == (5,)

    def test_such_rows_are_counted_and_not_touched(self):
        """What the kernels do with the position that such coordinates have there."""
        buffer = filled()
        outside = torch.tensor([NO_ROW])
        with triton_on_cpu():
            tensors, generation = buffer.storage.plans.batch.gather(outside)
            assert [tensor.item() for tensor in tensors] == [0]
            assert generation.item() == -1
            buffer.storage.write(outside, TensorDict({"x": torch.tensor([99])}, [1]))
            buffer.sampler.update_priority(outside, 5.0, storage=buffer.storage)
        assert buffer.storage.ring.counters[FAULTS] == 2
        assert buffer.sampler.tree.refused == 1
        assert weights(buffer) == [1] * 12
        assert buffer[:]["x"].max() == 32
