"""Calls on buffers whose rows leave when they were drawn. It tells what does not depend on random numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDict

from tests.support.torchrl_buffers.edits import outcome


def rows(n: int, start: int = 0) -> TensorDict:
    """``n`` rows that tell which they are."""
    return TensorDict({"number": torch.arange(start, start + n)}, [n])


def together(batches: Iterable[list[int]]) -> list[int]:
    """All rows of some batches."""
    return [number for batch in batches for number in batch]


def story(data: Any) -> dict[str, Any]:
    """What buffers of ``data``, a module, do."""
    buffer = data.TensorDictReplayBuffer(
        storage=data.LazyTensorStorage(8), sampler=data.ConsumingSampler(), batch_size=3
    )
    told: dict[str, Any] = {"written": buffer.extend(rows(4)).tolist()}
    drawn = [buffer.sample()["number"].tolist()]
    told["left"] = [len(buffer), len(buffer.storage), buffer.can_sample()]
    drawn.append(buffer.sample()["number"].tolist())
    told["sizes"] = [len(batch) for batch in drawn]
    told["drawn"] = sorted(together(drawn))
    told["none left"] = [len(buffer), buffer.can_sample(), outcome(buffer.sample), buffer.write_count]
    told["places of consumed rows first"] = sorted(buffer.extend(rows(6, 10)).tolist())
    told["full"] = [sorted(buffer.extend(rows(2, 20)).tolist()), len(buffer)]
    told["all"] = sorted(together(batch["number"].tolist() for batch in buffer))
    told["after the epoch"] = [len(buffer), sorted(buffer.extend(rows(8, 30)).tolist()), len(buffer)]
    buffer.sample()
    told["no consumed row is left before others go"] = [len(buffer.extend(rows(5, 40)).unique()), len(buffer)]
    buffer.empty()
    told["emptied"] = [len(buffer), buffer.extend(rows(2)).tolist(), len(buffer)]

    twice = data.TensorDictReplayBuffer(
        storage=data.LazyTensorStorage(8), consume_after_n_samples=2, batch_size=4, sampler=data.RandomSampler()
    )
    twice.extend(rows(6))
    batches = [batch["number"].tolist() for batch in twice]
    told["twice"] = sorted(together(batches))
    told["no row twice in a batch"] = all(len(set(batch)) == len(batch) for batch in batches)
    told["added"] = [bool(twice.add(rows(1, 90)[0]) < 6), len(twice)]
    told["errors"] = [
        outcome(lambda value=value: data.ReplayBuffer(consume_after_n_samples=value, storage=data.LazyTensorStorage(4)))
        for value in (0, True, 1.5, "2")
    ]
    told["other samplers"] = [
        outcome(
            lambda sampler=sampler, n=n, prefetch=prefetch: data.ReplayBuffer(
                storage=data.LazyTensorStorage(4),
                sampler=sampler,
                consume_after_n_samples=n,
                prefetch=prefetch,
                batch_size=2,
            )
        )
        for sampler, n, prefetch in (
            (data.SamplerWithoutReplacement(), 1, None),
            (data.ConsumingSampler(3), 2, None),
            (data.ConsumingSampler(3), 3, None),
            (data.ConsumingSampler(3), None, 2),
        )
    ]
    return told
