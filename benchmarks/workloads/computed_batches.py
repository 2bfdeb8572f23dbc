"""Buffers whose batches are computed from rows, beside those whose batches are copies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.measure.in_turn import Contender
from benchmarks.peers.sources import transitions

BATCHES = (256, 4096)
ROWS = 1_000_000
#: Rows with observations of :data:`WIDE` numbers.
WIDE, WIDE_ROWS = 310, 200_000
GAMMA = 0.99

Draw = Callable[[int], object]


def steps(n: int, observation: int = WIDE) -> TensorDict:
    """Steps of one environment: each next observation is the observation of the next row, but for 1 row in 500."""
    rows = transitions(n, observation, 6)
    following = rows["observation"].roll(-1, 0)
    following[rows["next", "done"].view(-1)] += 1
    rows["next", "observation"] = following
    return rows


def drawn(draw: Draw) -> Contender:
    """Batches of every size."""
    return Contender({f"batch of {n}": functools.partial(draw, n) for n in BATCHES})


def buffer_of(rows: TensorDict, storage: Mapping[str, Any] | None = None, **options: Any) -> Draw:
    """``sample`` of our buffer, full of these rows."""
    from gpubuf.data import LazyTensorStorage, TensorDictReplayBuffer

    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(len(rows), **(storage or {})), **options)
    for start in range(0, len(rows), 65_536):
        buffer.extend(rows[start : start + 65_536])
    return buffer.sample


def n_step() -> dict[str, Contender]:
    """Transitions of several steps."""
    rows = steps(ROWS, 17)
    options: dict[str, dict[str, Any]] = {"n = 1": {}}
    options |= {f"n = {n}": {"n_steps": n, "gamma": GAMMA} for n in (3, 8)}
    return {name: drawn(buffer_of(rows, **chosen)) for name, chosen in options.items()}


def observations() -> dict[str, Contender]:
    """Observations twice per row, once, and in two bytes."""
    rows = steps(WIDE_ROWS)
    half = {"observation": torch.bfloat16}
    return {
        "float32": drawn(buffer_of(rows)),
        "share_next": drawn(buffer_of(rows, {"share_next": True})),
        "share_next, n = 3": drawn(buffer_of(rows, {"share_next": True}, n_steps=3, gamma=GAMMA)),
        "bfloat16": drawn(buffer_of(rows, {"dtypes": half})),
        "bfloat16, share_next": drawn(buffer_of(rows, {"dtypes": half, "share_next": True})),
        "float32, half as wide": drawn(buffer_of(steps(WIDE_ROWS, WIDE // 2))),
    }


def normalised() -> dict[str, Contender]:
    """Observations normalised with running statistics: in the launch, and after it."""
    from gpubuf.data import Normalize

    rows = steps(WIDE_ROWS)
    plain = buffer_of(rows)
    variance, mean = torch.var_mean(rows["observation"], 0)
    factor = (variance + 1e-8).rsqrt()

    def after(n: int) -> object:
        batch: Any = plain(n)
        for key in ("observation", ("next", "observation")):
            batch[key] = (batch[key] - mean) * factor
        return batch

    return {
        "as stored": drawn(plain),
        "normalised while copied": drawn(buffer_of(rows, process=[Normalize(["observation"])])),
        "normalised by torch": drawn(after),
    }
