"""Writes max_value.json: what TorchRL's TensorDictMaxValueWriter keeps of some streams of rows, and what it returns.

Run it where TorchRL 0.14.1 is installed, from the root of the repository:
``python -m tests.support.torchrl_buffers.max_value``. Ranks differ from each other: which of two equal rows leaves
first is each library's own affair. So is which of the free places a row of a batch takes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

FILE = Path(__file__).with_suffix(".json")

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


if __name__ == "__main__":
    import torchrl.data

    FILE.write_text(json.dumps(story(torchrl.data)) + "\n")
