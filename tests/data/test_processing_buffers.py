"""Processing in the life of a buffer: checkpoints, copies, prefetch, refused writes, graphs, compiled code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf import capture
from gpubuf.data import (
    Clip,
    LazyTensorStorage,
    Mirror,
    Normalize,
    RandomShift,
    ReplayBuffer,
    RewardScale,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from gpubuf.data.processing.statistics import _kept
from tests.support.fake_cuda import fake_cuda, no_blocking_copies
from tests.support.graph_recorder import RecordedCuda
from tests.support.processing_setup import close, generator, normalised, steps


def objects() -> list[Any]:
    return [
        Normalize("observation", clip=3),
        RewardScale(0.9),
        Mirror({"action": ([1, 0], -1)}),
        RandomShift("pixels", 1),
        Clip("action", -1, 1),
    ]


def new(*process: Any, **arguments: Any) -> TensorDictReplayBuffer:
    given = {"storage": LazyTensorStorage(64), "batch_size": 8, "process": process or objects(), **arguments}
    return TensorDictReplayBuffer(**given, generator=generator(5))


def same(a: TensorDict, b: TensorDict) -> bool:
    return bool((a == b).all())


def state_of(buffer: ReplayBuffer) -> list[Tensor]:
    return [tensor.clone() for step in buffer._pipeline.steps for tensor in step.tensors()]


def test_frozen_statistics_are_frozen_in_a_checkpoint(tmp_path: Path):
    normalize = Normalize("observation")
    buffer = new(normalize)
    buffer.extend(steps(30))
    normalize.eval()
    buffer.save(tmp_path)
    restored = Normalize("observation")
    other = new(restored)
    other.load(tmp_path)
    other.extend(steps(30))
    assert not restored.training
    assert restored.count().tolist() == [30] * 3
    restored.train()
    other.extend(steps(1))
    assert restored.count().tolist() == [31] * 3


def test_checkpoints_of_other_processing_are_refused(tmp_path: Path):
    buffer = new()
    buffer.extend(steps(30))
    buffer.save(tmp_path / "all")
    plain = TensorDictReplayBuffer(storage=LazyTensorStorage(64), batch_size=8)
    plain.extend(steps(30))
    plain.save(tmp_path / "none")
    for other, folder, text in (
        (plain, "all", "give it `process`"),
        (buffer, "none", "nothing of that"),
        (new(Clip("action", -1, 1)), "all", "processing"),
    ):
        before = [] if other is plain else state_of(other)
        with pytest.raises(ValueError, match=text):
            other.load(tmp_path / folder)
        assert other is plain or all(torch.equal(a, b) for a, b in zip(before, state_of(other), strict=True))
    wide = new(Normalize("observation"))
    wide.extend(steps(3, width=5))
    narrow = new(Normalize("observation"))
    narrow.extend(steps(3))
    with pytest.raises(ValueError, match="elements"):
        wide.load_state_dict(narrow.state_dict())


def test_a_load_that_fails_puts_the_statistics_back():
    class Stubborn(torch.nn.Module):
        def forward(self, data: TensorDict) -> TensorDict:
            return data

        def load_state_dict(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("no")

    source = new()
    source.extend(steps(30))
    state = source.state_dict()
    buffer = new()
    buffer.extend(steps(5, seed=3))
    before = state_of(buffer)
    state["_writer"] = None
    buffer._writer.load_state_dict = Stubborn().load_state_dict
    with pytest.raises(RuntimeError, match="no"):
        buffer.load_state_dict(state)
    for a, b in zip(before, state_of(buffer), strict=True):
        assert torch.equal(a, b)


def test_refused_writes_teach_nothing():
    normalize, scale = Normalize("observation"), RewardScale(0.9, envs=2)
    buffer = new(normalize, scale)
    with pytest.raises(ValueError, match="2 environments, but 3 rows"):
        buffer.extend(steps(3))
    assert not buffer.initialized
    buffer.extend(steps(4))
    before = state_of(buffer)
    for bad in (steps(2).exclude("action"), steps(3), steps(2, width=4)):
        with pytest.raises(ValueError, match=r"missing|environments|shape"):
            buffer.extend(bad)
    buffer.extend(steps(4)[:0])
    for a, b in zip(before, state_of(buffer), strict=True):
        assert torch.equal(a, b)


def test_a_single_object_will_do_and_others_are_refused():
    assert new(process=Clip("action", -1, 1))._pipeline.steps[0].high == 1
    with pytest.raises(TypeError, match="process takes"):
        new(process=[lambda data: data])
    plain = ReplayBuffer(storage=LazyTensorStorage(4), process=[])
    assert plain._recipe.is_plain


def test_indexing_gives_rows_as_they_were_written():
    buffer, data = new(Normalize("observation")), steps(10)
    buffer.extend(data)
    assert torch.equal(buffer[:]["observation"], data["observation"])
    assert torch.equal(buffer[[3, 4]]["observation"], data["observation"][3:5])


def test_statistics_outlive_the_rows():
    normalize = Normalize("observation")
    buffer = new(normalize)
    data = [steps(20, seed=seed) for seed in range(3)]
    for rows in data[:2]:
        buffer.extend(rows)
        buffer.empty()
    buffer.free()
    buffer.extend(data[2])
    batch = buffer.sample()
    plain = data[2]["observation"][batch["index"]]
    every = torch.cat([rows["observation"] for rows in data]).double()
    close(batch["observation"].double(), normalised(plain, every), 2e-5)


def test_a_batch_has_the_statistics_of_its_draw():
    """A prefetched one those of the moment at which it was prepared."""
    normalize = Normalize("observation")
    buffer = new(normalize, prefetch=2)
    first, second = steps(20), steps(20, seed=1)
    buffer.extend(first)
    buffer.sample()
    # Two batches are being prepared; a write waits for neither, but makes draws that are due first.
    buffer.extend(second)
    for due in (first["observation"], first["observation"], torch.cat((first, second))["observation"]):
        batch = buffer.sample()
        plain = torch.cat((first, second))["observation"][batch["index"]]
        close(batch["observation"].double(), normalised(plain, due.double()), 2e-5)


# Graphs, compiled code, and nothing that waits


def cycle(buffer: ReplayBuffer, data: TensorDict) -> TensorDict:
    batch = buffer.sample()
    buffer.extend(data)
    return batch


def test_replays_learn_on(monkeypatch: pytest.MonkeyPatch):
    """Case 44: statistics in a captured graph move, are frozen and thawed from outside, and draw new random numbers."""
    found = []
    for graphs in (False, True):
        process = objects()
        buffer = new(*process)
        buffer.extend(steps(30))
        buffer.sample()
        step: Any = lambda data, buffer=buffer: cycle(buffer, data)  # noqa: E731
        if graphs:
            machine = RecordedCuda().install(monkeypatch)
            machine.memory = buffer.storage.row_tensors
            step = capture(step, warmup=2)
        batches = []
        for number in range(9):
            if number == 4:
                process[0].eval()
            if number == 6:
                process[0].train()
            batches.append(step(steps(5, seed=number)).clone())
        found.append((batches, state_of(buffer)))
        if graphs:
            assert machine.log.count("replay") == 7
        assert process[0].count().tolist() == [30 + 5 * 7] * 3
    (eager, learnt), (replayed, learnt_too) = found
    assert all(same(a, b) for a, b in zip(eager, replayed, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(learnt, learnt_too, strict=True))


def test_nothing_waits_for_the_gpu():
    with fake_cuda():
        process = [*objects()[1:], Normalize("observation", update="manual")]
        buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(64, device="cuda"), batch_size=8, process=process, n_steps=2
        )
        data = steps(6).apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda"))
        buffer.extend(data)
        buffer.sample()
        with no_blocking_copies():
            for _ in range(3):
                buffer.extend(data)
                batch = buffer.sample()
            process[-1].update(data)
            process[-1].eval()(batch)
            process[0].reset()
            process[-1].mean()
        assert batch["observation"].device.type == "cuda"
        assert batch["pixels"].shape == (8, 2, 4, 5)


def test_a_prefix_and_its_whole_are_normalised_apart():
    """The actor's part of the critic's observation, which is stored once."""
    normalize = Normalize(["observation", "critic_observation"])
    storage = LazyTensorStorage(64, prefixes={"observation": "critic_observation"})
    buffer = new(normalize, storage=storage)
    data = steps(40)
    data["critic_observation"] = torch.cat((data["observation"], data["action"]), -1)
    data["next", "critic_observation"] = torch.cat((data["next", "observation"], data["action"]), -1)
    buffer.extend(data)
    batch = buffer.sample()
    for key in ("observation", "critic_observation"):
        close(batch[key].double(), normalised(data[key][batch["index"]], data[key].double()), 2e-5)


def test_the_state_follows_the_rows_to_another_device():
    with fake_cuda():
        buffer = new()
        buffer.extend(steps(6))
        pipeline = buffer._pipeline
        assert pipeline.noise.device.type == "cpu"
        pipeline.bind(buffer.storage.batch_layout.leaves, 1, torch.device("cuda"))
        assert {tensor.device.type for step in pipeline.steps for tensor in step.tensors()} == {"cuda"}
        assert pipeline.noise.device.type == "cuda"


def test_rows_that_are_not_kept_do_not_count():
    """A writer that keeps the best rows rejects the others; those are in no batch."""
    processing = Normalize("observation")
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(4), writer=TensorDictMaxValueWriter("rank"), process=[processing]
    )
    kept = []
    for numbers in ([3.0, 1.0, 4.0, 1.5, 5.0], [9.0, 2.0], [0.0, 0.5]):
        rows = torch.tensor(numbers)
        index = buffer.extend(TensorDict({"observation": rows.unsqueeze(-1), "rank": rows}, [len(rows)]))
        kept += rows[index >= 0].tolist()
    assert float(processing.count()) == len(kept) == 5
    torch.testing.assert_close(float(processing.mean()), sum(kept) / 5)


def test_rows_that_are_not_kept_do_not_count_on_a_gpu():
    with fake_cuda():
        found = _kept(torch.zeros(3, 2, device="cuda"), torch.ones(3, dtype=torch.bool, device="cuda"))
        assert (found.shape, found.dtype) == ((3, 2), torch.float64)
