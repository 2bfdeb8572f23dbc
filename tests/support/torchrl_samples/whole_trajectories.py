"""Buffers whose rows are trajectories: what TorchRL gives, recorded.

Run with a Python that has TorchRL, it writes the file that the tests read:
``.peers/torchrl/bin/python -m tests.support.torchrl_samples.whole_trajectories``.
TorchRL's compiled trees need not load there: plain ones take their place.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

RECORDED = Path(__file__).with_suffix(".json")
KINDS = ("uniform", "generations", "prioritized")
REDUCTIONS = ("max", "min", "mean", "median")
ERRORS = [[1.0, 5.0, 2.0, 4.0], [0.5, 0.25, 0.125, 3.0], [7.0, 7.0, 1.0, 2.0]]


def rows(n: int, steps: int, device: str = "cpu") -> TensorDict:
    """``n`` trajectories of ``steps`` steps."""
    a, b = torch.zeros(n, steps, device=device), torch.zeros(n, steps, 2, device=device)
    return TensorDict({"a": a, "b": b}, [n, steps])


def new(library: Any, kind: str, reduction: str = "max") -> Any:
    """A buffer of a library's own classes with 5 rows of 4 steps."""
    options: dict[str, Any] = {}
    if kind == "generations":
        options["writer"] = library.TensorDictRoundRobinWriter(track_generations=True)
    elif kind == "prioritized":
        options["sampler"] = library.PrioritizedSampler(10, 1.0, 1.0, eps=0.0, reduction=reduction)
    buffer = library.TensorDictReplayBuffer(storage=library.LazyTensorStorage(10), batch_size=3, **options)
    buffer.extend(rows(5, 4))
    return buffer


def described(data: Any) -> dict[str, list[Any]]:
    """Shape and dtype of every entry, and the batch size of a TensorDict."""
    entries = data.items(True, True) if isinstance(data, TensorDict) else data.items()
    found = {key: [list(value.shape), str(value.dtype)] for key, value in entries}
    return found | {"batch_size": list(data.batch_size)} if isinstance(data, TensorDict) else found


def reads(buffer: Any) -> dict[str, Any]:
    """What a buffer gives, described."""
    batch, info = buffer.sample(return_info=True)
    several = torch.tensor([1, 2])
    found = {"sample": batch, "info": info, "all": buffer[:], "some": buffer[:3], "one": buffer[1]}
    return {name: described(data) for name, data in (found | {"several": buffer[several]}).items()}


def update(buffer: Any) -> None:
    """Give rows 0, 1 and 2 the errors of :data:`ERRORS`, one for each step."""
    batch = buffer.sample()
    batch["td_error"] = torch.tensor(ERRORS)
    batch["index"] = torch.arange(3).unsqueeze(1).expand(3, 4)
    buffer.update_tensordict_priority(batch.exclude("index_generation"))


def main() -> None:
    """Record."""
    import torchrl.data

    from tests.support.torchrl_samples.plain_trees import replace_trees

    replace_trees()
    found: dict[str, Any] = {"reads": {kind: reads(new(torchrl.data, kind)) for kind in KINDS}, "leaves": {}}
    for reduction in REDUCTIONS:
        buffer = new(torchrl.data, "prioritized", reduction)
        update(buffer)
        found["leaves"][reduction] = buffer.sampler._sum_tree.values[:5].tolist()
    RECORDED.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
