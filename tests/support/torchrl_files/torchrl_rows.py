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
