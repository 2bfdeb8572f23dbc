"""Data that the buffer tests share."""

from __future__ import annotations

import torch
from tensordict import TensorDict


def transitions(n: int, start: int = 0, device: str = "cpu") -> TensorDict:
    """``n`` transitions, row i made of the number ``start + i`` in every key, of several dtypes and row sizes."""
    i = torch.arange(start, start + n, device=device)
    column = i.unsqueeze(-1)
    return TensorDict(
        {
            "observation": column.expand(n, 3).to(torch.float32),
            "action": column.to(torch.float64),
            "pixels": (column % 251).to(torch.uint8).expand(n, 7),
            "next": TensorDict(
                {
                    "observation": column.expand(n, 3).to(torch.float32) + 1,
                    "reward": column.to(torch.bfloat16),
                    "done": column % 5 == 0,
                    "step": i,
                },
                batch_size=[n],
            ),
        },
        batch_size=[n],
    )


def same(a: TensorDict, b: TensorDict) -> bool:
    """Whether two batches have the same keys, dtypes and bytes. Only one of them may carry its ``"index"``."""
    keys_a, keys_b = set(a.keys(True, True)), set(b.keys(True, True))
    if not keys_a ^ keys_b <= {"index"}:
        return False
    return all(a[k].dtype is b[k].dtype and torch.equal(a[k], b[k]) for k in keys_a & keys_b)
