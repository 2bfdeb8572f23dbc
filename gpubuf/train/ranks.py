"""Several processes that train one agent together: what torchrun starts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

_T = TypeVar("_T")

#: Words of the seeds of ranks, so that neighbouring ones share none: 2**64 over the golden ratio.
_STRIDE = 0x9E3779B97F4A7C15


class Ranks:
    """The ranks of a process group, each with environments and a shard of the buffer of its own, and the same networks.

    Args:
        process_group: For draws and gradients: on the device of the training.
        control: For what the hosts agree on: a group of Gloo, of the same ranks.

    Attributes:
        size, rank: How many, and which of them this process is.
        first: Whether it is the one that writes and evaluates.
    """

    def __init__(self, process_group: dist.ProcessGroup, control: dist.ProcessGroup) -> None:
        self.process_group, self._control = process_group, control
        self.size, self.rank = process_group.size(), process_group.rank()
        self.first = self.rank == 0

    def seed(self, seed: int) -> int:
        """The seed of this rank: of the first one, the seed of the run."""
        return (seed + self.rank * _STRIDE) % 2**64

    def average(self, parameters: Sequence[Tensor], weight: Tensor) -> None:
        """Make every gradient that of the pooled batch of all ranks. One flat all-reduce, no host sync with NCCL.

        Losses are ``sum(w l) / sum(w)`` over a rank's rows. That of the pooled rows is the mean of the ranks' losses in
        proportion to their ``sum(w)``. A plain mean would cancel the factor of each shard.

        Args:
            parameters: Those with a gradient have one on every rank.
            weight: ``sum(w)`` of this rank's batch, 0-dim.
        """
        gradients = [each.grad for each in parameters if each.grad is not None]
        weight = weight.reshape(1).float()
        flat = torch.cat([*(gradient.flatten() for gradient in gradients), torch.ones_like(weight)]) * weight
        dist.all_reduce(flat, group=self.process_group)
        flat /= flat[-1].clone()
        start = 0
        for gradient in gradients:
            gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is set on any rank: the same answer on all of them. Waits for them."""
        found = torch.tensor([int(flag)], device="cpu")
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._control)
        return bool(found)

    def told(self, value: _T) -> _T:
        """The value of the first rank, on all of them."""
        values: list[Any] = [value]
        dist.broadcast_object_list(values, group=self._control, group_src=0)
        found: _T = values[0]
        return found


@contextmanager
def ranks_of_torchrun() -> Iterator[Ranks | None]:
    """The ranks that torchrun has started, if it has and they are several; else None.

    Tensors on a GPU go through NCCL, those on the host through Gloo.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "LOCAL_RANK" not in os.environ:
        yield None
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group()
    try:
        world = dist.group.WORLD
        assert world is not None
        yield Ranks(world, dist.new_group(backend="gloo"))
    finally:
        dist.destroy_process_group()
