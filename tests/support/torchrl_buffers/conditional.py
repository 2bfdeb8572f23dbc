"""Writes conditional.json: what TorchRL's buffers write back, and say about it, with and without versions.

Run it where TorchRL 0.14.1 is installed, from the root of the repository:
``python -m tests.support.torchrl_buffers.conditional``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

FILE = Path(__file__).with_suffix(".json")


def rows(n: int) -> TensorDict:
    """``n`` rows with values and versions."""
    return TensorDict({"value": torch.zeros(n), "deep": {"v": torch.arange(n) % 4}}, [n])


def story(data: Any) -> dict[str, Any]:
    """Updates of buffers of ``data``, a module: what they say, and the rows after them."""
    told: dict[str, Any] = {}
    generator = torch.Generator().manual_seed(0)
    for case in range(12):
        versioned, newer = case % 3 > 0, case % 3 == 2
        writer = data.TensorDictRoundRobinWriter(track_generations=True)
        buffer = data.TensorDictReplayBuffer(storage=data.LazyTensorStorage(8), writer=writer, batch_size=4)
        index = buffer.extend(rows(8))
        generation = writer.generations_of(index)
        buffer.extend(rows(3))
        chosen = torch.randint(0, 8, (12,), generator=generator)
        arguments: dict[str, Any] = {"index": chosen, "generation": generation[chosen]}
        if versioned:
            version = torch.randint(0, 5, (12,), generator=generator)
            arguments |= {"version_key": ("deep", "v"), "version": 2 if case > 8 else version, "require_newer": newer}
        submit = buffer.submit_update_if_present if case % 2 else buffer.update_if_present
        result = submit(patch={"value": torch.arange(12.0) + 1}, **arguments)
        if case % 2:
            result = result.result()
        told[str(case)] = {
            "updated": result.updated.tolist(),
            "rejected": None if result.version_rejected is None else result.version_rejected.tolist(),
            "counts": [result.updated_count, result.version_rejected_count, result.stale_count],
            "shape": list(result.batch_size),
            "values": buffer[:]["value"].tolist() if versioned else (buffer[:]["value"] > 0).tolist(),
            "versions": buffer[:]["deep", "v"].tolist(),
        }
    return told


if __name__ == "__main__":
    import torchrl.data

    FILE.write_text(json.dumps(story(torchrl.data), separators=(",", ":")) + "\n")
