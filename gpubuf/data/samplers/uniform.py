"""Uniform sampling, with replacement and without it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from gpubuf.data.recording import at_replays, current
from gpubuf.data.samplers.base import Drawn, Sampler, is_count, positions_below
from gpubuf.data.samplers.shards import Shards
from gpubuf.data.storage.placement import IndexBytes
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.kernels.rows import SIZE
from gpubuf.serialization import need


class EpochSampler(Sampler):
    """Base class of samplers without replacement: each of so many things once an epoch, then all of them again.

    Args:
        drop_last, shuffle: as for :class:`SamplerWithoutReplacement`.
    """

    row_tensors = ("_left",)
    drawn_state: ClassVar[tuple[str, ...] | None] = ("_left", "_of")
    # The names in a state of what is left, and of what it is an epoch of.
    _saved_as: ClassVar[tuple[str, str]] = ("remaining", "size")

    def __init__(self, drop_last: bool, shuffle: bool) -> None:
        Sampler.__init__(self)
        self.drop_last, self.shuffle = drop_last, shuffle
        # What is left of the epoch, int64; and what it is an epoch of: another one begins when that changes.
        self._left: Tensor | None = None
        self._of: Any = None

    def _next(self, n: int, of: Any, count: Callable[[], int]) -> Tensor:
        """The next ``n`` numbers of the epoch of ``of``, or what is left of it. No host sync, but in ``count``.

        Args:
            n: how many.
            of: what the epoch is of.
            count: how many numbers there are; called where an epoch begins.

        Raises:
            ValueError: ``drop_last`` is set and there are fewer than ``n``.
        """
        left = self._left if self._of == of else None
        if left is None or (self.drop_last and left.numel() < n):
            left = self.order_of(count(), self.storage.device, self.shuffle)
        if self.drop_last and left.numel() < n:
            raise ValueError(
                f"The batch size ({n}) is greater than the storage capacity in use, {left.numel()} rows or "
                "trajectories that can be drawn, and drop_last=True forbids repeats"
            )
        ran_out = left.numel() - n < (n if self.drop_last else 1)
        # At the end, in one step: an interrupt may come at any call.
        self._left, self._of, self.ran_out = None if ran_out else left[n:], of, ran_out
        return left[:n]

    def forget_storage(self) -> None:
        super().forget_storage()
        self._of = None

    def empty(self) -> None:
        super().empty()
        self._left = self._of = None

    def state_dict(self) -> dict[str, Any]:
        # What was restored of TorchRL's is an epoch of nothing until a batch is drawn.
        left = None if self._left is None or self._of is None else self._left.clone()
        epoch = dict(zip(self._saved_as, (left, self._of), strict=True))
        return {**super().state_dict(), **epoch, "ran_out": self.ran_out}

    def load_state_dict(self, state: dict[str, Any], order: Tensor | None = None) -> None:
        super().load_state_dict(state, order)
        left, of = (state[name] for name in self._saved_as)
        self.ran_out = state["ran_out"]
        # Rows that lie elsewhere now begin a new epoch.
        there = left is not None and order is None
        self._left, self._of = (left.to(self.storage.device, copy=True), of) if there else (None, None)

    def check_state(self, state: dict[str, Any], capacity: int, size: int) -> None:
        super().check_state(state, capacity, size)
        left, of = (state[name] for name in self._saved_as)
        counts = of if isinstance(of, list) else [0 if of is None else of]
        usable = type(state["ran_out"]) is bool and all(is_count(int(count)) for count in counts)
        # Of trajectories there is at most one a row.
        need(usable and (left is None or positions_below(left, size)), "the checkpoint's epoch is damaged")


class SamplerWithoutReplacement(EpochSampler):
    """Every row once an epoch.

    A permutation is used up batch by batch, and a new one drawn when it has ended (which sets ``ran_out``) or when the
    number of stored rows changes.

    Args:
        drop_last: end the epoch before a batch that could not be filled. Otherwise the last batch of an epoch is
            what remains, and may be shorter than asked for.
        shuffle: False visits the rows in storage order.
        replacement: accepted for compatibility.
    """

    drawn_state = EpochSampler.drawn_state

    def __init__(self, drop_last: bool = False, shuffle: bool = True, *, replacement: bool = False) -> None:
        super().__init__(drop_last, shuffle)

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
        return self._next(n, size, lambda: size), {}

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

    def __init__(self, *, replacement: bool = True, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.require_replacement(replacement)
        self.shards = Shards.of(process_group)

    def _weights(self, n: int) -> dict[Any, Tensor]:
        """The info of ``n`` rows."""
        return {"priority_weight": self.shards.weights(self.storage.ring[SIZE], n)} if self.shards else {}

    def choose(self, n: int) -> tuple[Tensor, dict[Any, Tensor]]:
        """Uniform positions. No host sync."""
        storage, info = self.storage, self._weights(n)
        uniform = self.random_state(storage.device).uniform(n)
        # The device's count: in a CUDA graph the host's would stay that of the capture.
        size = storage.ring[SIZE]
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
