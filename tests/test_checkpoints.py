"""Checkpoints of buffers: what is saved comes back, into which buffers, and how little is written again."""

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict, tensorclass
from torch import nn

from benchmarks import checkpoints as benchmark
from gpubuf import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorStorage,
)
from gpubuf.data import checkpoint_files, checkpoints
from gpubuf.kernels._registry import triton_on_cpu
from tests.transitions import same, transitions

CAPACITY = 60
SAMPLERS: dict[str, Callable[[], object]] = {
    "random": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(CAPACITY, 0.7, 0.5),
    "slices": lambda: SliceSampler(slice_len=3),
    "slices without replacement": lambda: SliceSamplerWithoutReplacement(slice_len=3),
    "prioritized slices": lambda: PrioritizedSliceSampler(CAPACITY, 0.7, 0.5, slice_len=3),
}


def new(sampler: str = "prioritized", capacity: int = CAPACITY, **arguments) -> TensorDictReplayBuffer:
    made = SAMPLERS[sampler]()
    if capacity != CAPACITY:
        made = PrioritizedSampler(capacity, 0.7, 0.5)
    return TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), sampler=made, **arguments)


def used(sampler: str = "prioritized", n: int = 85) -> TensorDictReplayBuffer:
    """A buffer that has gone round, with priorities, in the middle of an epoch."""
    buffer = new(sampler)
    buffer.extend(transitions(n))
    batch = buffer.sample(12)
    if "prioritized" in sampler:
        buffer.update_priority(batch["index"], torch.rand(len(batch)) * 5)
    return buffer


def numbers(buffer: ReplayBuffer) -> list[int]:
    return buffer[:]["next", "step"].tolist()


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
    watched = [*other.storage._tensors, tree.leaves, tree.hyper, ring, rng]
    before = [tensor.data_ptr() for tensor in watched]
    other.load(tmp_path)
    after = [*other.storage._tensors, other.sampler._tree.leaves, other.sampler._tree.hyper, other.storage.ring]
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

    rows = transitions(21).view(7, 3)
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


# How little is written


def test_only_changed_rows_are_written(tmp_path):
    """1 % of the rows are new: less than 5 % of the bytes are written."""
    buffer = new(capacity=20_000)
    for start in range(0, 20_000, 5_000):
        buffer.extend(transitions(5_000, start=start))
    full = buffer.save(tmp_path, file_bytes=10_000)
    assert full.bytes == full.bytes_written == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert full.files == full.files_written == len(list(tmp_path.iterdir()))
    buffer.extend(transitions(200, start=20_000))
    update = buffer.save(tmp_path, file_bytes=10_000)
    assert update.bytes_written < 0.05 * full.bytes_written
    assert update.bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    other = new(capacity=20_000)
    other.load(tmp_path)
    assert numbers(other) == numbers(buffer)
    other.extend(transitions(200, start=20_200))
    assert other.save(tmp_path, file_bytes=10_000).bytes_written < 0.05 * full.bytes_written


@pytest.mark.parametrize("seed", range(12))
def test_increments_hold_whatever_happened_in_between(seed, tmp_path):
    """Writes of every size, in place and through views, empties, loads: the checkpoint is the buffer every time."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> int:
        return int(torch.randint(n, (), generator=generator))

    buffer, other, number = new(), new(), 0
    for turn in range(14):
        for _ in range(draw(4)):
            n = draw(75) if draw(3) == 0 else draw(9)
            buffer.extend(transitions(n, start=number))
            number += n
            kind = draw(9)
            if kind == 0:
                buffer.empty()
            if len(buffer) == 0:
                continue
            position = draw(len(buffer))
            if kind == 1:
                buffer[[position, 0]] = transitions(2, start=number + 1000)
            elif kind == 2:
                buffer[position : position + 3]["next", "step"].add_(10_000)
            elif kind == 3:
                buffer.update_priority(torch.tensor([position]), draw(10) + 0.5)
            elif kind == 4 and turn > 0:
                buffer.load(tmp_path)
        buffer.save(tmp_path, file_bytes=300)
        other.load(tmp_path)
        assert other.write_count == buffer.write_count
        if buffer.initialized and len(buffer):
            assert same(other[:], buffer[:])
            assert torch.equal(other.sampler._tree.leaves, buffer.sampler._tree.leaves)


def test_a_lost_or_shortened_file_is_written_again(tmp_path):
    buffer, other = used(), new()
    buffer.save(tmp_path, file_bytes=300)
    first, second, *_ = sorted(tmp_path.glob("rows-*"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    assert buffer.save(tmp_path, file_bytes=300).files_written == 4
    other.load(tmp_path)
    assert numbers(other) == numbers(buffer)


def test_the_checkpoint_of_another_buffer_is_no_base(tmp_path):
    """Two buffers that have written as many rows each take turns in one folder."""
    first, second, other = new(), new(), new()
    first.extend(transitions(50))
    second.extend(transitions(50, start=500))
    for _ in range(2):
        for buffer in (first, second):
            saved = buffer.save(tmp_path, file_bytes=300)
            assert saved.bytes_written == saved.bytes
            other.load(tmp_path)
            assert numbers(other) == numbers(buffer)


def test_several_folders_at_a_time(tmp_path):
    buffer, other = new(), new()
    for turn in range(4):
        buffer.extend(transitions(7, start=7 * turn))
        buffer.save(tmp_path / str(turn % 2), file_bytes=300)
        other.load(tmp_path / str(turn % 2))
        assert numbers(other) == numbers(buffer)


def test_changes_that_leave_no_trace_need_a_full_save(tmp_path):
    buffer, other = used(), new()
    buffer.save(tmp_path)
    buffer[3:4]["next", "step"].numpy()[:] = -1
    buffer.save(tmp_path, incremental=False)
    other.load(tmp_path)
    assert other[3]["next", "step"] == -1


def test_the_users_own_tensors(tmp_path):
    """Changed in place by their owner."""
    data = transitions(10)
    buffer, other = ReplayBuffer(storage=TensorStorage(data)), ReplayBuffer(storage=LazyTensorStorage(10))
    buffer.save(tmp_path)
    data["action"].zero_()
    buffer.save(tmp_path)
    other.load(tmp_path)
    assert other[:]["action"].tolist() == [[0.0]] * 10


def test_large_tensors_beside_the_rows_lie_in_files_of_their_own(tmp_path):
    buffer, other = used(), new()
    buffer.save(tmp_path, file_bytes=64)
    assert len(list(tmp_path.glob("tensor-*"))) == 4
    other.load(tmp_path)
    assert same(buffer.sample(30), other.sample(30))
    buffer.update_priority(torch.tensor([2]), 7.0)
    buffer.save(tmp_path, file_bytes=64)
    other.load(tmp_path)
    assert torch.equal(other.sampler._tree.leaves, buffer.sampler._tree.leaves)


# The folder


def test_files_of_others_stay(tmp_path):
    for name in ("notes.txt", "rows-1.safetensors", "model.safetensors"):
        (tmp_path / name).write_text("mine")
    buffer = used()
    left = tmp_path / checkpoint_files.file_name("rows", [3], "0123456789abcdef")
    left.write_text("left by a killed save")
    for _ in range(3):
        buffer.extend(transitions(20))
        buffer.save(tmp_path)
    assert not left.exists()
    assert len(list(tmp_path.iterdir())) == 3 + 3
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_manifest_of_another_program_is_not_replaced(tmp_path):
    (tmp_path / "manifest.json").write_text('{"name": "a web app"}')
    with pytest.raises(ValueError, match="would be overwritten"):
        used().save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_a_damaged_checkpoint_is_replaced(tmp_path):
    buffer, other = used(), new()
    buffer.save(tmp_path)
    (tmp_path / "manifest.json").write_bytes((tmp_path / "manifest.json").read_bytes()[:-40])
    buffer.save(tmp_path)
    other.load(tmp_path)
    assert numbers(other) == numbers(buffer)


def test_a_missing_checkpoint(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
            new().load(path)
    assert not (tmp_path / "none").exists()


def test_what_cannot_be_saved_leaves_the_previous_checkpoint(tmp_path):
    class Odd(nn.Module):
        def forward(self, data):
            return data

        def get_extra_state(self):
            return {"set": set()}

    buffer, other = used("random"), new("random")
    buffer.save(tmp_path)
    buffer.append_transform(Odd())
    buffer.extend(transitions(10))
    with pytest.raises(TypeError, match="set"):
        buffer.save(tmp_path)
    other.load(tmp_path)
    assert other.write_count == 85


@pytest.mark.parametrize("file_bytes", [0, -1])
def test_sizes_of_files_are_checked(file_bytes, tmp_path):
    with pytest.raises(ValueError, match="at least 1"):
        used().save(tmp_path, file_bytes=file_bytes)


def test_torchrl_names(tmp_path):
    buffer = used()
    for number, save in enumerate([buffer.dump, buffer.dumps]):
        other = new()
        save(tmp_path / str(number))
        other.loads(str(tmp_path / str(number)))
        assert numbers(other) == numbers(buffer)


def test_progress(tmp_path, capsys, monkeypatch):
    buffer = used()
    buffer.save(tmp_path, progress=True)
    assert "saving" in capsys.readouterr().err
    buffer.load(tmp_path, progress=True)
    captured = capsys.readouterr()
    assert "loading" in captured.err
    assert not captured.out
    buffer.save(tmp_path)
    assert not capsys.readouterr().err
    monkeypatch.setattr(checkpoints, "_has_rich", lambda: False)
    with pytest.raises(ImportError, match="pip install rich"):
        buffer.save(tmp_path, progress=True)


def test_a_bar_by_default_for_large_ones_on_a_terminal(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(checkpoints, "_BAR_BYTES", 100)
    monkeypatch.setattr(checkpoints, "_has_rich", lambda: shown.append(True))
    buffer = used()
    buffer.save(tmp_path)
    assert not shown
    monkeypatch.setattr(sys, "stderr", types.SimpleNamespace(isatty=lambda: True))
    buffer.save(tmp_path)
    assert shown


@pytest.mark.parametrize(
    ("length", "capacity", "item", "file_bytes", "pieces"),
    [
        (0, 10, 4, None, 0),
        (10, 10, 4, None, 1),
        (10, 10, 4, 1, 10),
        (10, 10, 0, None, 1),
        (1_000_000, 1_000_000, 166, None, 128),
        (500_000, 1_000_000, 166, None, 64),
        (1_000_000, 1_000_000, 4, None, 4),
        (1_000_000, 1_000_000, 16_000, None, 239),
    ],
)
def test_how_rows_are_cut(length, capacity, item, file_bytes, pieces):
    spans = checkpoints._spans(length, capacity, item, file_bytes)
    assert abs(len(spans) - pieces) <= pieces // 50
    assert [0, *(stop for _, stop in spans)] == [*(start for start, _ in spans), length]


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


def test_the_benchmark_runs(tmp_path, capsys):
    benchmark.main(["--rows", "2000", "--repeats", "1", "--folder", str(tmp_path), "--out", str(tmp_path / "out.json")])
    out = capsys.readouterr().out
    assert "1 % changed: " in out
    names = [row["operation"] for row in json.loads((tmp_path / "out.json").read_text())["results"]]
    assert names == ["save", "disk: write", "save after 1 %", "load, from the disk", "load, from memory", "disk: read"]
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_memory_mapped_rows(tmp_path):
    def make(name: str) -> ReplayBuffer:
        return ReplayBuffer(storage=LazyMemmapStorage(CAPACITY, scratch_dir=str(tmp_path / name)))

    buffer, other = make("a"), make("b")
    for start in (0, 50):
        buffer.extend(transitions(50, start=start))
        buffer.save(tmp_path / "c", file_bytes=300)
        other.load(tmp_path / "c")
        assert numbers(other) == numbers(buffer)
        assert same(buffer.sample(8), other.sample(8))


def test_saving_goes_on_after_a_buffer_was_freed(tmp_path):
    buffer, other = used(), new()
    buffer.save(tmp_path, file_bytes=300)
    buffer.free()
    buffer.extend(transitions(60, start=300))
    buffer.save(tmp_path, file_bytes=300)
    other.load(tmp_path)
    assert numbers(other) == list(range(300, 360))
    other.free()
    other.load(tmp_path)
    assert numbers(other) == list(range(300, 360))
