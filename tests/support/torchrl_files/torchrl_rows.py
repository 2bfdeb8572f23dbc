"""The rows of the folders in ``torchrl/``, for the script that writes them and the tests that read them."""

from typing import Any

import torch
from tensordict import TensorDict


def transitions(n: int, first: int = 0) -> TensorDict:
    step = torch.arange(first, first + n)
    return TensorDict(
        {
            "observation": step[:, None] + torch.tensor([0.0, 0.25, 0.5]),
            "action": step[:, None].double() / 4,
            "pixels": step[:, None, None].expand(n, 2, 2).to(torch.uint8),
            "collector": {"traj_ids": step // 4},
            "next": {
                "observation": step[:, None] + torch.tensor([1.0, 1.25, 1.5]),
                "reward": -step[:, None].bfloat16(),
                "done": ((step + 1) % 4 == 0)[:, None],
            },
        },
        [n],
    )


def filled(buffer: Any, *sizes: int) -> Any:
    """A buffer of either library, written to in batches of these sizes."""
    first = 0
    for n in sizes:
        buffer.extend(transitions(n, first))
        first += n
    return buffer


def configurations(lib: Any) -> dict[str, Any]:
    """The buffers of either library that are in the folders."""
    buffer, storage = lib.TensorDictReplayBuffer, lib.LazyTensorStorage
    made = {
        "wrapped": filled(buffer(storage=storage(8), batch_size=4), 6, 5),
        "full": filled(buffer(storage=lib.LazyMemmapStorage(8)), 8),
        "partial": filled(buffer(storage=storage(16)), 6),
        "tensor": lib.ReplayBuffer(storage=storage(5)),
        "two_dimensions": buffer(storage=storage(12, ndim=2)),
        "prioritized": filled(buffer(storage=storage(8), sampler=lib.PrioritizedSampler(8, 0.5, 0.25, eps=0.0)), 6),
    }
    made["tensor"].extend(torch.arange(3) * 1.5)
    made["two_dimensions"].extend(transitions(8).reshape(2, 4))
    made["two_dimensions"].extend(transitions(6, 100).reshape(2, 3))
    made["prioritized"].update_priority(torch.arange(1, 5), torch.tensor([4.0, 9.0, 0.25, 0.0]))
    return made
