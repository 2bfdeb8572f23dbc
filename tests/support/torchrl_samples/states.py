"""States of TorchRL's samplers, recorded.

Run with a Python that has TorchRL, it writes the file that the tests read:
``.peers/torchrl/bin/python -m tests.support.torchrl_samples.states``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

RECORDED = Path(__file__).with_suffix(".json")
PRIORITIES = [0.5, 2.0, 0.0, 4.0, 1.0]


def new(library: Any, sampler: Any) -> Any:
    """A buffer with 5 rows in room for 8."""
    buffer = library.TensorDictReplayBuffer(storage=library.LazyTensorStorage(8), sampler=sampler, batch_size=2)
    buffer.extend(TensorDict({"number": torch.arange(5)}, [5]))
    return buffer


def prioritized(library: Any) -> Any:
    """A buffer whose priorities are :data:`PRIORITIES`."""
    buffer = new(library, library.PrioritizedSampler(8, 0.5, 0.25, eps=0.0))
    buffer.update_priority(torch.arange(5), torch.tensor(PRIORITIES))
    return buffer


def main() -> None:
    """Record."""
    import torchrl.data

    from tests.support.torchrl_samples.plain_trees import replace_trees

    replace_trees()
    found: dict[str, Any] = {}
    state = prioritized(torchrl.data).sampler.state_dict()
    for name in ("_sum_tree", "_min_tree"):
        state[name] = state[name].values
    found["prioritized"] = state
    buffer = new(torchrl.data, torchrl.data.SamplerWithoutReplacement(drop_last=True))
    buffer.sample()
    found["epoch"] = dict(buffer.sampler.state_dict())
    found["random"] = new(torchrl.data, torchrl.data.RandomSampler()).sampler.state_dict()
    RECORDED.write_text(json.dumps(found, indent=1, default=_plain) + "\n")


def _plain(value: Any) -> Any:
    return value.tolist()


if __name__ == "__main__":
    main()
