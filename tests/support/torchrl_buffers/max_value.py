"""Streams of rows of which the best stay. Ranks differ: which of two equal rows leaves is each library's affair."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

STREAMS: dict[str, dict[str, Any]] = {
    "one place": {"capacity": 1, "sizes": [3, 4, 1], "seed": 0},
    "small batches": {"capacity": 10, "sizes": [4, 4, 4, 3, 1, 5], "seed": 1},
    "large batches": {"capacity": 5, "sizes": [12, 3, 30], "seed": 2},
    "sum of several": {"capacity": 6, "sizes": [4, 8, 8], "seed": 3, "shape": (3, 1)},
    "mean of several": {"capacity": 6, "sizes": [4, 8, 8], "seed": 4, "shape": (3, 1), "reduction": "mean"},
    "max of several": {"capacity": 6, "sizes": [4, 8, 8], "seed": 5, "shape": (3, 1), "reduction": "max"},
    "min of several": {"capacity": 6, "sizes": [4, 8, 8], "seed": 6, "shape": (3, 1), "reduction": "min"},
    "median of several": {"capacity": 6, "sizes": [4, 8, 8], "seed": 7, "shape": (3, 1), "reduction": "median"},
}


def batches(sizes: list[int], seed: int, shape: tuple[int, ...] = (1,)) -> list[TensorDict]:
    """Rows with ranks that differ, and a number each."""
    generator = torch.Generator().manual_seed(seed)
    n = sum(sizes)
    elements = torch.Size((n, *shape)).numel()
    # Sums of different powers differ.
    ranks = torch.randperm(elements, generator=generator).double().mul(0.37).sin().reshape(n, *shape)
    rows = TensorDict({"number": torch.arange(n), "next": {"reward": ranks}}, [n])
    return list(rows.split(sizes))


def story(data: Any) -> dict[str, Any]:
    """What buffers of ``data``, a module, keep and return."""
    told: dict[str, Any] = {}
    for name, stream in STREAMS.items():
        writer = data.TensorDictMaxValueWriter(reduction=stream.get("reduction", "sum"))
        buffer = data.TensorDictReplayBuffer(
            storage=data.LazyTensorStorage(stream["capacity"]), writer=writer, batch_size=2
        )
        steps = []
        for rows in batches(stream["sizes"], stream["seed"], stream.get("shape", (1,))):
            index = buffer.extend(rows.clone())
            kept = rows["number"][index >= 0].tolist()
            assert torch.equal(buffer[index[index >= 0]]["number"], rows["number"][index >= 0])
            steps.append([kept, len(set(index.tolist()) - {-1}), sorted(buffer[:]["number"].tolist())])
        told[name] = steps
    adding = data.TensorDictReplayBuffer(
        storage=data.LazyTensorStorage(3), writer=data.TensorDictMaxValueWriter(rank_key="number"), batch_size=2
    )
    added = []
    for number in (5, 2, 7, 1, 3, 9, 5):
        index = adding.add(TensorDict({"number": torch.tensor(number)}, []))
        added.append([index if index is None else int(index), sorted(adding[:]["number"].tolist())])
    told["add"] = added
    return told
