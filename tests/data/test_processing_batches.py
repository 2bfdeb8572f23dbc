"""Batches that are processed in the launch that copies the rows, against plain torch operations after the fact."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf.data import (
    Clip,
    LazyTensorStorage,
    Mirror,
    MixedReplayBuffer,
    Normalize,
    RandomShift,
    ReplayBuffer,
    RewardScale,
)
from tests.support.processing_setup import Twins, close, generator, normalised, shifted, steps, uniforms

OBSERVATIONS = ("observation", ("next", "observation"))
SWAP = ([2, 0, 1], [1.0, -1.0, 0.5])


def alike(processed: TensorDict, plain: TensorDict, *but: Any) -> None:
    """All keys but those are the same."""
    for key in set(plain.keys(True, True)) - set(but):
        assert torch.equal(processed[key], plain[key]), key


STORAGES = [
    {},
    {"dtypes": {"observation": torch.bfloat16, "action": torch.float16}},
    {"share_next": ["observation"]},
    {"share_next": ["observation"], "dtypes": {"observation": torch.bfloat16}},
]


@pytest.mark.parametrize(
    ("storage", "envs", "n_steps", "prioritized"),
    [(0, None, 1, False), (1, 2, 3, False), (2, None, 3, True), (3, 2, 1, True)],
)
def test_normalised_batches(backend, storage, envs, n_steps, prioritized):
    """As torch does it after the fact, with the mean and variance of all rows ever written, at every draw."""
    storage = STORAGES[storage]
    options = {"gamma": 0.9, "n_steps": n_steps}
    twins = Twins(
        Normalize(["observation", "action"], clip=2), envs=envs, prioritized=prioritized, storage=storage, **options
    )
    for number, n in enumerate((5, 1, 30, 25)):
        twins.write(n, number)
        plain, processed = twins.sample()
        alike(processed, plain, *OBSERVATIONS, "action")
        for key in (*OBSERVATIONS, "action"):
            expected = normalised(plain[key], twins.rows("action" if key == "action" else "observation"))
            assert processed[key].dtype is plain[key].dtype
            close(processed[key].double(), expected.clamp(-2, 2), 2e-5)


@pytest.mark.parametrize("n_steps", [1, 3])
def test_scaled_rewards(n_steps):
    """OFFPOLICY.md, section 2 C: also sums of rewards."""
    scale = RewardScale(0.9, 5.0)
    twins = Twins(scale, Clip(("next", "reward"), -1.5, 1.5), n_steps=n_steps, gamma=0.9)
    for number in range(4):
        twins.write(12, number)
        plain, processed = twins.sample()
        alike(processed, plain, ("next", "reward"))
        total, returns = 0.0, []
        for data in twins.written:
            for reward, done in zip(data["next", "reward"].tolist(), data["next", "done"].tolist(), strict=True):
                returns.append(total := reward[0] + total)
                total = 0.0 if done[0] else 0.9 * total
        spread = torch.tensor(returns, dtype=torch.float64)
        divisor = max(math.sqrt(spread.var(correction=0) + 1e-8), spread.abs().max().item() / 5)
        close(processed["next", "reward"], (plain["next", "reward"] / divisor).clamp(-1.5, 1.5), 1e-5)


def mirrored(rows: Tensor, image: tuple[list[int], Any]) -> Tensor:
    return rows[:, image[0]] * torch.tensor(image[1])


@pytest.mark.parametrize("prioritized", [False, True])
def test_doubled_batches(prioritized):
    """n drawn rows, and their mirror images, in the same order."""
    images = {"observation": SWAP, "action": ([1, 0], -1.0)}
    twins = Twins(Mirror(images, mode="double"), prioritized=prioritized)
    twins.write(40, 0)
    plain, processed = twins.sample()
    assert processed.batch_size == (32,)
    first, second = processed[:16], processed[16:]
    alike(first, plain)
    alike(second, plain, *OBSERVATIONS, "action")
    for key in OBSERVATIONS:
        close(second[key], mirrored(plain[key], SWAP), 1e-7)
    close(second["action"], mirrored(plain["action"], images["action"]), 1e-7)
    if prioritized:
        twins.processed.update_tensordict_priority(processed)


def test_rows_mirrored_by_chance():
    """All keys of a row or none, by its first random number; the twin below "next" too."""
    images = {"observation": SWAP, "action": ([1, 0], -1.0)}
    twins = Twins(Mirror(images))
    twins.write(40, 0)
    for _ in range(3):
        is_mirrored = uniforms(twins.processed._pipeline, 16)[:, :1] < 0.5
        plain, processed = twins.sample()
        alike(processed, plain, *OBSERVATIONS, "action")
        for key in (*OBSERVATIONS, "action"):
            image = images["action" if key == "action" else "observation"]
            close(processed[key], torch.where(is_mirrored, mirrored(plain[key], image), plain[key]), 1e-7)


@pytest.mark.parametrize("storage", [{}, {"share_next": ["pixels"]}, {"dtypes": {"pixels": torch.float32}}])
def test_shifted_images(storage):
    """Pixel by pixel; observation and next observation apart."""
    twins = Twins(RandomShift("pixels", 2), storage=storage)

    def write(n: int, seed: int) -> None:
        data = steps(n, seed=seed)
        data["next", "pixels"] = data["pixels"].roll(-1, 0)
        for buffer in (twins.plain, twins.processed):
            buffer.extend(data)

    for number in range(3):
        write(20, number)
        drawn = torch.floor(uniforms(twins.processed._pipeline, 16)[:, 1:] * 5).long() - 2
        plain, processed = twins.sample()
        alike(processed, plain, "pixels", ("next", "pixels"))
        for pair, key in enumerate(("pixels", ("next", "pixels"))):
            options = twins.processed._pipeline.options((key,) if isinstance(key, str) else key)
            at = 2 * options["pair"]
            due = [shifted(row, *drawn[i, at : at + 2].tolist()) for i, row in enumerate(plain[key])]
            assert torch.equal(processed[key], torch.stack(due)), pair


def test_shifts_are_even():
    """Each of the 25 shifts of a pad of 2 is as likely: chi-square with 24 degrees of freedom."""
    each = 100
    image = torch.arange(81, dtype=torch.uint8).view(1, 1, 9, 9).expand(4, 1, 9, 9).contiguous()
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), process=[RandomShift("pixels", 2)], batch_size=25 * each)
    buffer.set_rng(generator(3))
    buffer.extend(TensorDict({"pixels": image}, [4]))
    centres = buffer.sample()["pixels"][:, 0, 4, 4]
    counts = torch.bincount(centres.long(), minlength=81)
    assert int((counts > 0).sum()) == 25
    assert float(((counts[counts > 0] - float(each)) ** 2 / each).sum()) < 60


def test_the_order_is_fixed():
    """Mirrored, then normalised, then clipped, in whatever order the objects are given."""
    objects = [Clip("observation", -0.7, 0.7), Normalize("observation"), Mirror({"observation": SWAP}, mode="double")]
    for given in (objects, objects[::-1]):
        twins = Twins(*given)
        twins.write(40, 0)
        plain, processed = twins.sample()
        rows = twins.rows("observation")
        for key in OBSERVATIONS:
            both = torch.cat((plain[key], mirrored(plain[key], SWAP)))
            close(processed[key].double(), normalised(both, rows).clamp(-0.7, 0.7), 2e-5)


def test_a_batch_dtype_decides_what_can_be_normalised():
    """Bytes of images become fractions."""
    normalize = Normalize("pixels")
    twins = Twins(normalize, storage={"batch_dtypes": {"pixels": torch.float32}})
    twins.write(40, 0)
    plain, processed = twins.sample()
    rows = torch.cat([data["pixels"] for data in twins.written]).flatten(1).double()
    close(processed["pixels"].double(), normalised(plain["pixels"], rows), 2e-5)
    with pytest.raises(ValueError, match="batch_dtypes"):
        Twins(Normalize("pixels")).write(3, 0)


def test_several_batches_in_one_draw():
    twins = Twins(Normalize("observation"))
    twins.write(40, 0)
    plain, processed = (buffer.sample(batches=3) for buffer in (twins.plain, twins.processed))
    assert processed.batch_size == (3, 16)
    expected = normalised(plain["observation"].view(48, 3), twins.rows("observation"))
    close(processed["observation"].view(48, 3).double(), expected, 2e-5)
    doubled = Twins(Mirror({"observation": SWAP}, mode="double"))
    doubled.write(40, 0)
    with pytest.raises(ValueError, match="one batch at a time"):
        doubled.processed.sample(batches=3)


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
    mirror = Mirror({"observation": SWAP}, mode="double")
    doubled = ReplayBuffer(storage=LazyTensorStorage(32), process=[mirror])
    doubled.extend(data[0])
    with pytest.raises(ValueError, match="several buffers"):
        MixedReplayBuffer([doubled, parts[0]], batch_size=16).sample()


FAMILIES = ("rows", "sum_tree", "trajectories", "moments", "philox")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that are launched."""
    names: list[str] = []
    for family in FAMILIES:
        module = importlib.import_module(f"gpubuf.kernels.{family}._launch")

        def launch(kernel: Any, *arguments: Any, own: Any = module.launch, **options: Any) -> None:
            names.append(kernel.__name__)
            own(kernel, *arguments, **options)

        monkeypatch.setattr(module, "launch", launch)
    return names


@pytest.mark.parametrize("prioritized", [False, True])
def test_launches(launched, interpreter, prioritized):
    """A batch takes one launch more than the choice by priority. A write takes one a key that is learnt from, and two
    for rewards, beside those that it takes anyway."""
    process = (
        Normalize(["observation", "action"], clip=2),
        RewardScale(0.9),
        Mirror({"observation": SWAP}, mode="double"),
        RandomShift("pixels"),
    )
    twins = Twins(*process, prioritized=prioritized, n_steps=3, storage={"share_next": ["observation"]})
    twins.write(20, 0)
    launched.clear()
    twins.processed.sample()
    assert len(launched) == 1 + prioritized, launched
    counts = []
    for buffer in (twins.plain, twins.processed):
        launched.clear()
        buffer.extend(twins.written[0])
        counts.append(len(launched))
    assert counts[1] - counts[0] == 4, launched
