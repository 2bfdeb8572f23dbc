"""Checkpoints of buffers: what is saved comes back, into which buffers, and how little is written again."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict, tensorclass
from torch import nn

from gpubuf import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
)
from gpubuf.kernels._registry import triton_on_cpu
from tests.support.checkpoint_setup import CAPACITY, SAMPLERS, new, numbers, used
from tests.support.transitions import same, transitions

# Exactly as it was


@pytest.mark.parametrize("file_bytes", [None, 200])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_restored_run_goes_on_with_the_same_batches(sampler, file_bytes, tmp_path):
    """CASES.md 18: the buffer is exactly full."""
    check_that_a_restored_run_goes_on(sampler, file_bytes, tmp_path)


@pytest.mark.parametrize("sampler", ["random", "prioritized"])
def test_a_restored_run_goes_on_in_the_kernels_of_the_gpu(sampler, tmp_path):
    """CASES.md 18: the same through Triton's interpreter."""
    with triton_on_cpu():
        check_that_a_restored_run_goes_on(sampler, 200, tmp_path)


def check_that_a_restored_run_goes_on(sampler: str, file_bytes: int | None, tmp_path: Path) -> None:
    buffer, other = used(sampler), new(sampler)
    buffer.save(tmp_path / "c", file_bytes=file_bytes)
    other.load(tmp_path / "c")
    assert len(other) == CAPACITY
    for _ in range(3):
        assert same(buffer.sample(12), other.sample(12))
    for one in (buffer, other):
        one.extend(transitions(13, start=85))
    for _ in range(3):
        assert same(buffer.sample(12), other.sample(12))
    assert numbers(buffer) == numbers(other)


@pytest.mark.parametrize("n", [0, 1, 59, 60, 61, 120])
def test_every_fill(n, tmp_path):
    """CASES.md 18: empty, almost full, exactly full, once and twice round."""
    buffer, other = new("random"), new("random")
    buffer.extend(transitions(n))
    buffer.save(tmp_path, file_bytes=300)
    other.extend(transitions(7, start=1000))
    other.load(tmp_path)
    assert len(other) == min(n, CAPACITY)
    if n:
        assert other.write_count == n
        assert numbers(other) == numbers(buffer)
        assert same(buffer.sample(8), other.sample(8))
    else:
        with pytest.raises(RuntimeError):
            other.sample(1)


def test_a_buffer_that_was_emptied(tmp_path):
    buffer, other = used(), used()
    buffer.empty()
    buffer.save(tmp_path)
    other.load(tmp_path)
    assert len(other) == 0
    assert other.write_count == buffer.write_count
    for one in (buffer, other):
        one.extend(transitions(5))
    assert same(buffer.sample(8), other.sample(8))


def test_a_stream_that_no_sample_has_used_yet_is_saved(tmp_path):
    buffer, other = new("random"), new("random")
    buffer.extend(transitions(50))
    buffer.save(tmp_path)
    other.load(tmp_path)
    assert same(buffer.sample(20), other.sample(20))


def test_the_largest_priority_is_saved_and_the_capacity_stays(tmp_path):
    """CASES.md 10: a new row of the restored buffer gets the largest priority given before the save."""
    buffer, other = used(n=30), new()
    buffer.update_priority(torch.arange(4), torch.tensor([1.0, 9.0, 2.0, 1.0]))
    buffer.update_priority(torch.arange(4), 0.5)
    buffer.save(tmp_path)
    other.load(tmp_path)
    assert other.storage.max_size == CAPACITY
    assert other.storage.shape == (CAPACITY,)
    for one in (buffer, other):
        one.extend(transitions(1, start=30))
    leaves = other.sampler._tree.leaves[:CAPACITY]
    torch.testing.assert_close(leaves[30], torch.tensor(9.0**0.7), rtol=1e-5, atol=0)
    assert torch.equal(leaves, buffer.sampler._tree.leaves[:CAPACITY])


def test_no_view_of_old_tensors_is_left_behind(tmp_path):
    """CASES.md 34: memory stays where it is, so that views and captured graphs see what was loaded."""
    buffer, other = used(n=40), used(n=85)
    buffer.save(tmp_path, file_bytes=300)
    view = other[:]["next", "step"]
    tree, ring, rng = other.sampler._tree, other.storage.ring, other.sampler.random_state("cpu").state
    watched = [*other.storage.row_tensors, tree.leaves, tree.scalars, ring, rng]
    before = [tensor.data_ptr() for tensor in watched]
    other.load(tmp_path)
    after = [*other.storage.row_tensors, other.sampler._tree.leaves, other.sampler._tree.scalars, other.storage.ring]
    after.append(other.sampler.random_state("cpu").state)
    assert [tensor.data_ptr() for tensor in after] == before
    assert view[:40].tolist() == list(range(40))
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    other.extend(transitions(60, start=500))
    other.update_priority(torch.arange(60), 3.0)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files


# Kinds of rows


def test_steps_of_several_environments(tmp_path):
    def make() -> ReplayBuffer:
        return ReplayBuffer(storage=LazyTensorStorage(12, ndim=2), dim_extend=0, sampler=SliceSampler(slice_len=2))

    rows = transitions(21).view(3, 7).transpose(0, 1)
    buffer, other = make(), make()
    buffer.extend(rows)
    buffer.save(tmp_path, file_bytes=150)
    other.load(tmp_path)
    assert other.storage.shape == (4, 3)
    assert same(buffer[:], other[:])
    assert same(buffer.sample(6), other.sample(6))
    with pytest.raises(ValueError, match=r"shape \(4, 3\).*1 dimension"):
        ReplayBuffer(storage=LazyTensorStorage(12), sampler=SliceSampler(slice_len=2)).load(tmp_path)


def test_rows_that_are_one_tensor(tmp_path):
    buffer, other = (ReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(2))
    buffer.extend(torch.arange(14.0).view(7, 2))
    buffer.save(tmp_path, file_bytes=20)
    other.load(tmp_path)
    assert torch.equal(other[:], buffer[:])


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("keys", ["some", "all"])
@pytest.mark.parametrize("on", [nullcontext, triton_on_cpu])
def test_keys_of_no_width(storage, keys, on, tmp_path):
    """Keys whose rows have no elements are stored, sampled, overwritten and saved, also where all keys are so."""

    def rows(n: int, start: int = 0) -> TensorDict:
        found = TensorDict({"none": torch.zeros(n, 0), "inner": torch.zeros(n, 3, 0, 2, dtype=torch.int64)}, [n])
        return found.set("number", torch.arange(start, start + n)) if keys == "some" else found

    buffer, other = (ReplayBuffer(storage=storage(10), batch_size=4) for _ in range(2))
    with on():
        buffer.extend(rows(7))
        buffer.extend(rows(6, start=7))
        buffer[2:4] = rows(2, start=100)
        buffer.save(tmp_path, file_bytes=50)
        other.load(tmp_path)
        for batch, n in ((buffer.sample(), 4), (other.sample(), 4), (other[:], 10), (other[[1, 2]], 2)):
            assert (batch["none"].shape, batch["inner"].shape) == ((n, 0), (n, 3, 0, 2))
    assert (len(other), other.write_count) == (10, 13)
    if keys == "some":
        assert other[:]["number"].tolist() == [10, 11, 100, 101, 4, 5, 6, 7, 8, 9]


def test_nested_batch_dimensions(tmp_path):
    agents = TensorDict({"obs": torch.rand(5, 3, 2)}, [5, 3])
    buffer, other = (ReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(2))
    buffer.extend(TensorDict({"agents": agents, "reward": torch.rand(5)}, [5]))
    buffer.save(tmp_path, file_bytes=50)
    other.load(tmp_path)
    assert other[:]["agents"].batch_size == (5, 3)
    assert same(other[:], buffer[:])


@tensorclass
class Pair:
    a: torch.Tensor
    b: torch.Tensor


def test_tensorclasses(tmp_path):
    buffer, other, empty = (ReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(3))
    pair = Pair(a=torch.rand(6, 2), b=torch.arange(6), batch_size=[6])
    buffer.extend(pair)
    buffer.save(tmp_path)
    other.extend(pair[:1])
    other.load(tmp_path)
    assert isinstance(other[:], Pair)
    assert torch.equal(other[:].b, pair.b)
    empty.load(tmp_path)
    assert isinstance(empty[:], TensorDict)
    assert torch.equal(empty[:]["a"], pair.a)


def test_keys_in_another_order(tmp_path):
    buffer, other = (ReplayBuffer(storage=LazyTensorStorage(4)) for _ in range(2))
    buffer.extend(TensorDict({"a": torch.zeros(3), "b": torch.ones(3)}, [3]))
    other.extend(TensorDict({"b": torch.rand(1), "a": torch.rand(1)}, [1]))
    buffer.save(tmp_path)
    other.load(tmp_path)
    assert other[:]["a"].tolist() == [0, 0, 0]
    assert other[:]["b"].tolist() == [1, 1, 1]


def test_state_of_transforms(tmp_path):
    class Normalise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, data):
            return data

    buffer, other = (ReplayBuffer(storage=LazyTensorStorage(4), transform=Normalise()) for _ in range(2))
    buffer.extend(transitions(2))
    buffer.transform.steps[0].transform.mean.fill_(3.0)
    buffer.save(tmp_path)
    other.load(tmp_path)
    assert other.transform.steps[0].transform.mean.tolist() == [3.0] * 3
    without = ReplayBuffer(storage=LazyTensorStorage(4))
    with pytest.raises(ValueError, match="transforms have the entries"):
        without.load(tmp_path)
    assert not without.initialized


# Other buffers


@pytest.mark.parametrize("n", [20, 60, 85, 170])
def test_a_larger_buffer_takes_the_rows_oldest_first(n, tmp_path):
    buffer, larger = used(n=n), new(capacity=100)
    buffer.save(tmp_path, file_bytes=400)
    larger.load(tmp_path)
    stored = min(n, CAPACITY)
    assert numbers(larger) == list(range(n - stored, n))
    assert larger.storage.cursor == stored
    by_number = dict(zip(numbers(buffer), buffer.sampler._tree.leaves.tolist(), strict=False))
    assert larger.sampler._tree.leaves[:stored].tolist() == [by_number[i] for i in range(n - stored, n)]


@pytest.mark.parametrize("n", [60, 85])
def test_a_smaller_buffer_is_refused(n, tmp_path):
    used(n=n).save(tmp_path)
    small = new(capacity=59)
    with pytest.raises(ValueError, match="60 rows, the storage has room for 59"):
        small.load(tmp_path)
    assert not small.initialized


def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path):
    buffer = used()
    buffer.save(tmp_path)
    other = new()
    other.extend(transitions(5).exclude("action").set("reward", torch.rand(5)))
    before = other[:].clone()
    with pytest.raises(ValueError, match=r"missing \[\('reward',\)\], extra \[\('action',\)\]"):
        other.load(tmp_path)
    assert same(other[:], before)
    other = new()
    other.extend(transitions(5).float())
    with pytest.raises(ValueError, match=r"float32.*float64"):
        other.load(tmp_path)
    with pytest.raises(ValueError, match="PrioritizedSampler, this buffer has a RandomSampler"):
        new("random").load(tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_between_devices(tmp_path):
    def make(device: str) -> TensorDictReplayBuffer:
        sampler = PrioritizedSampler(CAPACITY, 0.7, 0.5)
        return TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY, device=device), sampler=sampler)

    for source, target in (("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")):
        buffer, other = make(source), make(target)
        buffer.extend(transitions(85, device=source))
        buffer.update_priority(torch.arange(10, device=source), 3.0)
        buffer.save(tmp_path / source, file_bytes=300)
        other.load(tmp_path / source)
        assert numbers(other) == numbers(buffer)
        assert torch.equal(buffer.sample(20)["index"].cpu(), other.sample(20)["index"].cpu())
        other.extend(transitions(1, device=target))
        assert other.save(tmp_path / source, file_bytes=300).files_written < 6
