"""Batches that are processed in the launch that copies the rows, against plain torch operations after the fact."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

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
from tests.support.counted_launches import counted_launches
from tests.support.processing_setup import Twins, close, normalised, shifted, steps, uniforms

SWAP = ([2, 0, 1], [1.0, -1.0, 0.5])


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


def mirroring(mode: str) -> tuple[Any, Apply]:
    """All keys of a row or none, by its first random number; or the second half of the rows."""
    images = {"observation": SWAP, "action": ([1, 0], -1.0)}

    def apply(batch: TensorDict, twins: Twins, uniform: Any) -> None:
        which = torch.arange(len(batch)) >= len(batch) // 2 if mode == "double" else uniform[:, 0] < 0.5
        for name, (order, sign) in images.items():
            for key in keys_of(batch, name):
                image = batch[key][:, order] * torch.tensor(sign)
                batch[key] = torch.where(which.unsqueeze(-1), image, batch[key])

    return Mirror(images, mode=mode), apply


def shifting(pad: int) -> tuple[Any, Apply]:
    """Pixel by pixel; observation and next observation apart."""

    def apply(batch: TensorDict, twins: Twins, uniform: Any) -> None:
        drawn = torch.floor(uniform[:, 1:] * (2 * pad + 1)).long() - pad
        for key in keys_of(batch, "pixels"):
            at = 2 * twins.processed._pipeline.options((key,) if isinstance(key, str) else key)["pair"]
            rows = [shifted(row, *drawn[i, at : at + 2].tolist()) for i, row in enumerate(batch[key])]
            batch[key] = torch.stack(rows)

    return RandomShift("pixels", pad), apply


SHORT = {"dtypes": {"observation": torch.bfloat16, "action": torch.float16}}
ONCE = {"share_next": ["observation"]}
BOTH = {**ONCE, "dtypes": {"observation": torch.bfloat16}}
#: What is done, in the order in which it is done in whatever order it is given, and to which buffers.
WAYS: dict[str, tuple[Callable[[], list[tuple[Any, Apply]]], dict[str, Any]]] = {
    "normalised": (lambda: [normalising("observation", "action", clip=2)], {}),
    "stored short": (lambda: [normalising("observation", "action")], {"storage": SHORT, "envs": 2, "n_steps": 3}),
    "stored once": (lambda: [normalising("observation")], {"storage": ONCE, "n_steps": 3, "prioritized": True}),
    "both": (lambda: [normalising("observation")], {"storage": BOTH, "envs": 2, "prioritized": True}),
    "fractions": (lambda: [normalising("pixels")], {"storage": {"batch_dtypes": {"pixels": torch.float32}}}),
    "rewards": (lambda: [scaling(0.9, 5.0), clipping(("next", "reward"), -1.5, 1.5)], {}),
    "sums of rewards": (lambda: [scaling(0.9, 5.0)], {"n_steps": 3}),
    "mirrored": (lambda: [mirroring("random")], {}),
    "doubled": (lambda: [mirroring("double")], {"prioritized": True}),
    "shifted": (lambda: [shifting(2)], {}),
    "shifted, stored once": (lambda: [shifting(2)], {"storage": {"share_next": ["pixels"]}}),
    "shifted floats": (lambda: [shifting(1)], {"storage": {"dtypes": {"pixels": torch.float32}}}),
    "all": (
        lambda: [
            mirroring("double"),
            normalising("observation"),
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
    twins = Twins(*objects[::-1], **{"gamma": 0.9, **options})
    for number, n in enumerate((5, 1, 30, 25) if backend == "numba" else (20, 5)):
        twins.write(n, number)
        pipeline = twins.processed._pipeline
        uniform = None if pipeline.noise is None else uniforms(pipeline, 16)
        plain, processed = twins.sample()
        due = torch.cat([plain, plain]) if processed.batch_size == (32,) else plain.clone()
        for step in steps:
            step(due, twins, uniform)
        for key in due.keys(True, True):
            assert processed[key].dtype is due[key].dtype, key
            if due[key].is_floating_point():
                close(processed[key].double(), due[key].double(), 2e-5)
            else:
                assert torch.equal(processed[key], due[key]), key
        if options.get("prioritized"):
            for buffer, batch in ((twins.plain, plain), (twins.processed, processed[:16])):
                buffer.update_tensordict_priority(batch.set("td_error", torch.arange(16.0) + number))


def test_bytes_are_no_fractions():
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


@pytest.mark.parametrize("prioritized", [False, True])
def test_launches(interpreter, prioritized):
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
    with counted_launches() as launched:
        twins.processed.sample()
    assert launched.total() == 1 + prioritized, launched
    counts = []
    for buffer in (twins.plain, twins.processed):
        with counted_launches() as launched:
            buffer.extend(twins.written[0])
        counts.append(launched.total())
    assert counts[1] - counts[0] == 4, launched
