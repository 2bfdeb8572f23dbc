"""Uniform sampling, with replacement and without it."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpubuf.data.recording import at_replays, current
from gpubuf.data.samplers.base import Drawn, Sampler
from gpubuf.data.samplers.shards import Shards
from gpubuf.data.storage.placement import IndexBytes
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.kernels.rows import SIZE


class SamplerWithoutReplacement(Sampler):
    """Every row once an epoch.

    A permutation is used up batch by batch, and a new one drawn when it has ended (which sets ``ran_out``) or when the
    number of stored rows changes.

    Args:
        drop_last: end the epoch before a batch that could not be filled. Otherwise the last batch of an epoch is
            what remains, and may be shorter than asked for.
        shuffle: False visits the rows in storage order.
        replacement: accepted for compatibility.
    """

    row_tensors = ("_left",)
    drawn_state = ("_left", "_of")
    epoch_as = ("remaining", "size")

    def __init__(self, drop_last: bool = False, shuffle: bool = True, *, replacement: bool = False) -> None:
        super().__init__()
        self.drop_last, self.shuffle = drop_last, shuffle

    def __repr__(self) -> str:
        return f"{type(self).__name__}(drop_last={self.drop_last}, shuffle={self.shuffle})"

    def choose(self, n: int) -> tuple[Tensor, dict[Any, Tensor]]:
        """The next rows of the epoch. No host sync.

        Raises:
            ValueError: ``drop_last`` is set and fewer than ``n`` rows are stored.
        """
        at_replays().refuse(
            "the host decides which rows of an epoch come next: sample without replacement outside of the step"
        )
        size = len(self.storage)
        return self.next_of_epoch(n, size, lambda: size), {}

    def choose_batches(self, n: int, batches: int) -> tuple[Tensor, dict[Any, Tensor]]:
        """The next rows. A batch that an epoch can't fill goes on with the next one; with ``drop_last`` it is left out.

        ``ran_out`` says whether an epoch has ended in any of them.
        """
        found, need, ran_out = list[Tensor](), n * batches, False
        while need > 0:
            rows, _ = self.choose(n if self.drop_last else need)
            found.append(rows)
            need -= rows.numel()
            ran_out |= self.ran_out
        self.ran_out = ran_out
        return torch.cat(found), {}

    def can_sample(self, storage: TensorStorage, batch_size: int) -> bool:
        return len(storage) >= (batch_size if self.drop_last else 1)

    def index_bytes(self, shape: tuple[int, ...], device_type: str) -> IndexBytes:
        return IndexBytes(index=8 * math.prod(shape))


class RandomSampler(Sampler):
    """Rows drawn uniformly, with replacement, in the launch that copies them.

    Args:
        replacement: False makes a :class:`SamplerWithoutReplacement` of the other arguments.
        process_group: ranks that hold a shard each. Every batch then has ``"priority_weight"``, float32: the number of
            rows of this rank's shard, divided by the mean of the ranks' (docs/scale.md). One all-gather of 24 bytes per
            rank and draw, no host sync with NCCL. Of one rank all weights are 1.

    Raises:
        TypeError: ``process_group`` is none, or this process is not one of its ranks.
    """

    without_replacement = SamplerWithoutReplacement
    drawn_state = ()
    settings = ()

    def __init__(self, *, replacement: bool = True, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.require_replacement(replacement)
        self.shards = Shards.of(process_group)

    def _weights(self, n: int) -> dict[Any, Tensor]:
        """The info of ``n`` rows."""
        return {"priority_weight": self.shards.weights(self.storage.ring.counters[SIZE], n)} if self.shards else {}

    def choose(self, n: int) -> tuple[Tensor, dict[Any, Tensor]]:
        """Uniform positions. No host sync."""
        storage, info = self.storage, self._weights(n)
        uniform = self.random_state(storage.device).uniform(n)
        # The device's count: in a CUDA graph the host's would stay that of the capture.
        size = storage.ring.counters[SIZE]
        return torch.minimum((uniform * size).to(torch.int64), size - 1), info

    def draw(self, n: int) -> Drawn:
        """Choose and gather in one launch. No host sync."""
        # Past calls where there is nothing to do: every sample comes here.
        info = self._weights(n) if self.shards else {}
        random = self._random
        if not random or current.recording:
            random = self.random_state(self.reader.device)
        tensors, index, generation = self.reader.sample_uniform(random.state, n)
        return Drawn(tensors, index, generation, info)
