"""Batches that are processed in the launch that copies the rows and by transforms, against plain torch operations.

Processing in the life of a buffer: checkpoints, copies, refused writes, graphs, compiled code.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf import capture
from gpubuf.data import (
    Clip,
    Compose,
    LazyTensorStorage,
    Mirror,
    MixedReplayBuffer,
    Normalize,
    RandomShift,
    ReplayBuffer,
    RewardScale,
    TensorDictReplayBuffer,
)
from gpubuf.data.processing.statistics import _kept
from gpubuf.integrations.torchrl import TensorDictMaxValueWriter
from tests.contracts import first_quick
from tests.support.counted_launches import counted_launches
from tests.support.fake_cuda import fake_cuda, no_blocking_copies
from tests.support.graph_recorder import RecordedCuda
from tests.support.interpreter import triton_on_cpu
from tests.support.processing_setup import Twins, apart, close, generator, normalised, shifted, steps, uniforms

SWAP, SEED = ([2, 0, 1], [1.0, -1.0, 0.5]), 5


Apply = Callable[[TensorDict, Twins, Any], None]
"""What a process does to a batch, by plain torch operations: the batch, the buffers, random numbers of the rows."""


def keys_of(batch: TensorDict, *names: str) -> list[Any]:
    """The keys at the root and their twins under "next"."""
    return [key for key in batch.keys(True, True) if key in names or (key[0] == "next" and key[-1] in names)]


def normalising(*names: str, clip: float = math.inf) -> tuple[Any, Apply]:
    def apply(batch: TensorDict, twins: Twins, uniform: Any) -> None:
        for key in keys_of(batch, *names):
            found = normalised(batch[key], twins.rows(key if isinstance(key, str) else key[-1])).clamp(-clip, clip)
            batch[key] = found.to(batch[key].dtype)

    return Normalize(list(names), clip=None if clip == math.inf else clip), apply


def scaling(gamma: float, most: float) -> tuple[Any, Apply]:
    """OFFPOLICY.md, section 2 C: also sums of rewards."""

    def apply(batch: TensorDict, twins: Twins, uniform: Any) -> None:
        total, returns = 0.0, []
        for data in twins.written:
            for reward, done in zip(data["next", "reward"].tolist(), data["next", "done"].tolist(), strict=True):
                returns.append(total := reward[0] + total)
                total = 0.0 if done[0] else gamma * total
        spread = torch.tensor(returns, dtype=torch.float64)
        batch["next", "reward"] /= max(math.sqrt(spread.var(correction=0) + 1e-8), spread.abs().max().item() / most)

    return RewardScale(gamma, most), apply


def clipping(key: Any, low: float, high: float) -> tuple[Any, Apply]:
    def apply(batch: TensorDict, twins: Twins, uniform: Any) -> None:
        for each in keys_of(batch, key) or [key]:
            batch[each] = batch[each].clamp(low, high)

    return Clip(key, low, high), apply


def mirroring() -> tuple[Any, Apply]:
    """All keys of a row or none, by the next random number of torch."""
    images = {"observation": SWAP, "action": ([1, 0], -1.0)}

    def apply(batch: TensorDict, twins: Twins, uniform: Any) -> None:
        which = torch.rand(len(batch), generator=generator(SEED)) < 0.5
        for name, (order, sign) in images.items():
            for key in keys_of(batch, name):
                image = batch[key][:, order] * torch.tensor(sign)
                batch[key] = torch.where(which.unsqueeze(-1), image, batch[key])

    return Mirror(images), apply


def shifting(pad: int) -> tuple[Any, Apply]:
    """Pixel by pixel; observation and next observation apart."""

    def apply(batch: TensorDict, twins: Twins, uniform: Any) -> None:
        drawn = torch.floor(uniform * (2 * pad + 1)).long() - pad
        for key in keys_of(batch, "pixels"):
            at = 2 * twins.processed._pipeline.options((key,) if isinstance(key, str) else key)["pair"]
            rows = [shifted(row, *drawn[i, at : at + 2].tolist()) for i, row in enumerate(batch[key])]
            batch[key] = torch.stack(rows)

    return RandomShift("pixels", pad), apply


SHORT = {"dtypes": {"observation": torch.bfloat16, "action": torch.float16}}
ONCE = {"share_next": ["observation"]}
BOTH = {**ONCE, "dtypes": {"observation": torch.bfloat16}}
#: What is done, in this order, and to which buffers.
WAYS: dict[str, tuple[Callable[[], list[tuple[Any, Apply]]], dict[str, Any]]] = {
    "normalised": (lambda: [normalising("observation", "action", clip=2)], {}),
    "stored short": (lambda: [normalising("observation", "action")], {"storage": SHORT, "envs": 2, "n_steps": 3}),
    "stored once": (lambda: [normalising("observation")], {"storage": ONCE, "n_steps": 3, "prioritized": True}),
    "both": (lambda: [normalising("observation")], {"storage": BOTH, "envs": 2, "prioritized": True}),
    "fractions": (lambda: [normalising("pixels")], {"storage": {"batch_dtypes": {"pixels": torch.float32}}}),
    "rewards": (
        lambda: [scaling(0.9, 5.0), clipping(("next", "reward"), -1.5, 9), clipping(("next", "reward"), -9, 1.5)],
        {},
    ),
    "sums of rewards": (lambda: [scaling(0.9, 5.0)], {"n_steps": 3}),
    "mirrored": (lambda: [mirroring()], {"prioritized": True}),
    "shifted": (lambda: [shifting(2)], {}),
    "shifted, stored once": (lambda: [shifting(2)], {"storage": {"share_next": ["pixels"]}}),
    "shifted floats": (lambda: [shifting(1)], {"storage": {"dtypes": {"pixels": torch.float32}}}),
    "all": (
        lambda: [
            shifting(1),
            normalising("observation"),
            mirroring(),
            clipping("observation", -0.7, 0.7),
            scaling(0.9, 5.0),
        ],
        {"n_steps": 2},
    ),
}


@pytest.mark.parametrize("name", WAYS)
def test_batches_are_what_torch_makes_of_them(backend, name):
    """With the statistics of all rows that were ever written, at every draw. What is not named stays as it is."""
    made, options = WAYS[name]
    objects, steps = zip(*made(), strict=True)
    twins = Twins(*objects, **{"gamma": 0.9, **options})
    for number, n in enumerate((5, 1, 30, 25) if backend == "numba" else (20, 5)):
        twins.write(n, number)
        pipeline = twins.processed._pipeline
        uniform = None if pipeline is None or pipeline.noise is None else uniforms(pipeline, 16)
        torch.manual_seed(SEED)
        plain, processed = twins.sample()
        due = plain.clone()
        for step in steps:
            step(due, twins, uniform)
        for key in due.keys(True, True):
            assert processed[key].dtype is due[key].dtype, key
            if due[key].is_floating_point():
                close(processed[key].double(), due[key].double(), 2e-5)
            else:
                assert torch.equal(processed[key], due[key]), key
        if options.get("prioritized"):
            for buffer, batch in ((twins.plain, plain), (twins.processed, processed)):
                buffer.update_tensordict_priority(batch.set("td_error", torch.arange(16.0) + number))


def test_bytes_are_no_fractions():
    with pytest.raises(ValueError, match="batch_dtypes"):
        Twins(Normalize("pixels")).write(3, 0)


def test_buffers_that_share_statistics_in_one_batch():
    """Online and offline rows: one object for both, which learns from both."""
    normalize = Normalize("observation")
    parts = [ReplayBuffer(storage=LazyTensorStorage(32), process=[normalize]) for _ in range(2)]
    data = [steps(20, seed=seed) for seed in range(2)]
    for buffer, rows in zip(parts, data, strict=True):
        buffer.extend(rows)
    batch, info = MixedReplayBuffer(parts, batch_size=16).sample(return_info=True)
    every = torch.cat([rows["observation"] for rows in data]).double()
    plain = torch.stack([data[b]["observation"][i] for b, i in zip(info["buffer"], info["index"], strict=True)])
    close(batch["observation"].double(), normalised(plain, every), 2e-5)


@pytest.mark.parametrize("prioritized", first_quick([True, False]))
def test_launches(prioritized):
    """A batch takes one launch more than the choice by priority. A write takes one a key that is learnt from, and two
    for rewards, beside those that it takes anyway."""
    process = (
        Normalize(["observation", "action"], clip=2),
        RewardScale(0.9),
        Mirror({"observation": SWAP}),
        RandomShift("pixels"),
    )
    twins = Twins(*process, prioritized=prioritized, n_steps=3, storage={"share_next": ["observation"]})
    twins.write(20, 0)
    with triton_on_cpu(), counted_launches() as launched:
        twins.processed.sample()
    assert launched.total() == 1 + prioritized, launched
    counts = []
    for buffer in (twins.plain, twins.processed):
        with triton_on_cpu(), counted_launches() as launched:
            buffer.extend(twins.written[0][:3])
        counts.append(launched.total())
    assert counts[1] - counts[0] == 4, launched


def objects() -> list[Any]:
    return [
        Normalize("observation", clip=3),
        RewardScale(0.9),
        Mirror({"action": ([1, 0], -1)}),
        RandomShift("pixels", 1),
        Clip("action", -1, 1),
    ]


def new(*given_objects: Any, **arguments: Any) -> TensorDictReplayBuffer:
    chosen = apart(*(given_objects or objects()))
    given = {"storage": LazyTensorStorage(64), "batch_size": 8, **chosen, **arguments}
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
    restored.update(steps(10, seed=2))
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
        (new(RandomShift("pixels")), "all", "processing"),
    ):
        before = [] if other is plain else state_of(other)
        with pytest.raises(ValueError, match=text):
            other.load(tmp_path / folder)
        assert other is plain or all(torch.equal(a, b) for a, b in zip(before, state_of(other), strict=True))


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
    assert new(process=RandomShift("pixels", 1))._pipeline.steps[0].pad == 1
    for other in (Clip("action", -1, 1), Mirror({"action": ([1, 0], 1)}), RewardScale(0.9), lambda data: data):
        with pytest.raises(TypeError, match=r"process takes Normalize and RandomShift: give .* as transform="):
            new(process=[other])
    plain = ReplayBuffer(storage=LazyTensorStorage(4), process=[])
    assert plain._recipe.is_plain


def test_statistics_among_the_transforms():
    """They learn whether they come before the first row or after it, and normalise in their turn."""
    normalize, scale, early = Normalize("observation"), RewardScale(0.9), RewardScale(0.9)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(64), batch_size=8)
    buffer.append_transform(Compose(Clip("observation", 0, 1), early))
    buffer.extend(steps(10))
    before = buffer.sample()
    buffer.append_transform(normalize).append_transform(scale)
    batch = buffer.sample()
    assert torch.equal(batch["observation"], steps(10)["observation"].clamp(0, 1)[batch["index"]])
    with pytest.raises(ValueError, match="nowhere"):
        buffer.append_transform(RewardScale(0.9, keys="nowhere"))
    assert len(buffer.transform) == 4
    buffer.extend(steps(20, seed=1))
    assert normalize.count().tolist() == [20] * 3
    assert early.count().item() == 30
    batch, rows = buffer.sample(), torch.cat([steps(10), steps(20, seed=1)])
    due = rows["next", "reward"][batch["index"]] * early.factor() * scale.factor()
    close(batch["next", "reward"], due, 1e-6)
    close(batch["observation"], normalize(rows[batch["index"]]["observation"].clamp(0, 1)), 1e-6)
    assert before["observation"].max() <= 1
    again = copy.deepcopy(buffer)
    again.extend(steps(5))
    assert again._pipeline.steps[-1].count().item() == 25
    assert scale.count().item() == 20
    assert again.sample()["next", "reward"].isfinite().all()


def test_rewards_are_clipped_before_a_sum_where_they_are_written():
    """CASES 79."""
    clip = Clip(("next", "reward"), -1.0, 1.0)
    summed, single = (TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=32, n_steps=2) for _ in "ab")
    summed.append_transform(clip)
    single.append_transform(clip, invert=True)
    data = steps(2, ends=0)
    data["next", "reward"] = torch.tensor([[5.0], [5.0]])
    for buffer, due in ((summed, 1.0), (single, 1.99)):
        buffer.extend(data)
        batch = buffer.sample()
        close(batch["next", "reward"][batch["steps_to_next_obs"] == 2].max(), torch.tensor(due), 1e-6)


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
        torch.manual_seed(SEED)
        buffer = new(*process)
        buffer.extend(steps(30))
        buffer.sample()
        step: Any = lambda data, buffer=buffer: cycle(buffer, data)  # noqa: E731
        if graphs:
            machine = RecordedCuda().install(monkeypatch)
            machine.memory = buffer.storage.columns.parts
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
            storage=LazyTensorStorage(64, device="cuda"), batch_size=8, n_steps=2, **apart(*process)
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
