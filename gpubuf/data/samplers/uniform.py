"""Uniform sampling, with and without replacement."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.recording import refuse_in_capture
from gpubuf.data.samplers.base import UNBOUND, Drawn, Sampler, demand, is_count, positions_below
from gpubuf.data.storage.placement import IndexBytes
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.kernels.rows import SIZE


class SamplerWithoutReplacement(Sampler):
    """Every row once an epoch.

    A permutation is used up batch by batch, and a new one drawn when it ends (which sets ``ran_out``) or when the
    number of stored rows changes.

    Args:
        drop_last: end the epoch before a batch that could not be filled. Otherwise the last batch of an epoch is
            what remains, and may be shorter than asked for.
        shuffle: False visits the rows in storage order.
        replacement: accepted for compatibility.
    """

    def __init__(self, drop_last: bool = False, shuffle: bool = True, *, replacement: bool = False) -> None:
        super().__init__()
        self.drop_last = drop_last
        self.shuffle = shuffle
        self._remaining: Tensor | None = None
        self._size = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}(drop_last={self.drop_last}, shuffle={self.shuffle})"

    def _permutation(self, storage: TensorStorage) -> Tensor:
        return self.order_of(len(storage), storage.device, self.shuffle)

    def choose(self, n: int) -> tuple[Tensor, dict[Any, Tensor]]:
        """The next rows of the epoch. No host sync.

        Raises:
            ValueError: ``drop_last`` is set and fewer than ``n`` rows are stored.
        """
        storage = self.storage
        refuse_in_capture(
            "the host decides which rows of an epoch come next: sample without replacement outside of the step"
        )
        if self.drop_last and len(storage) < n:
            raise ValueError(
                f"The batch size ({n}) is greater than the storage capacity in use, {len(storage)} rows, and "
                "drop_last=True forbids repeats"
            )
        if self._remaining is None or self._size != len(storage):
            self._remaining, self._size = self._permutation(storage), len(storage)
        flat, remaining = self._remaining[:n], self._remaining[n:]
        left = remaining.numel()
        ran_out = left == 0 or (self.drop_last and left < n)
        if ran_out:
            remaining = self._permutation(storage)
        # In one step: an interrupt may come at any call.
        self._remaining, self.ran_out = remaining, ran_out
        return flat, {}

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

    def forget_storage(self) -> None:
        super().forget_storage()
        self._remaining, self._size = None, 0

    def empty(self) -> None:
        super().empty()
        self.forget_storage()

    def index_bytes(self, shape: tuple[int, ...], device_type: str) -> IndexBytes:
        return IndexBytes(index=8 * math.prod(shape))

    def memory(self) -> IndexBytes:
        # The rest of an epoch is a view of the whole.
        return IndexBytes(index=0 if self._remaining is None else self._remaining.untyped_storage().nbytes())

    def move(self) -> None:
        super().move()
        if self._remaining is not None:
            self._remaining = self._remaining.to(self.storage.device)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "remaining": self._remaining, "size": self._size, "ran_out": self.ran_out}

    def load_state_dict(self, state: dict[str, Any], order: Tensor | None = None) -> None:
        super().load_state_dict(state, order)
        remaining = state["remaining"]
        if order is not None or remaining is None:
            # The rows lie elsewhere now: begin a new epoch.
            self._remaining, self._size = None, 0
        else:
            self._remaining, self._size = remaining.to(self.storage.device, copy=True), state["size"]
        self.ran_out = state["ran_out"]

    def check_state(self, state: dict[str, Any], capacity: int, size: int) -> None:
        super().check_state(state, capacity, size)
        remaining = state["remaining"]
        demand(is_count(state["size"]) and type(state["ran_out"]) is bool, "the checkpoint's epoch is damaged")
        demand(remaining is None or positions_below(remaining, size), "the checkpoint's epoch is damaged")


class RandomSampler(Sampler):
    """Rows drawn uniformly, with replacement, in the launch that copies them.

    Args:
        replacement: False makes a :class:`SamplerWithoutReplacement` of the other arguments.
    """

    without_replacement = SamplerWithoutReplacement

    def __init__(self, *, replacement: bool = True) -> None:
        super().__init__()
        self.require_replacement(replacement)

    def choose(self, n: int) -> tuple[Tensor, dict[Any, Tensor]]:
        """Uniform positions. No host sync."""
        storage = self.storage
        uniform = self.random_state(storage.device).uniform(n)
        # The device's count: in a CUDA graph the host's would stay that of the capture.
        size = storage.ring[SIZE]
        return torch.minimum((uniform * size).to(torch.int64), size - 1), {}

    def draw(self, n: int) -> Drawn:
        """Choose and gather in one launch. No host sync."""
        reader = self.reader
        if reader is None:
            raise RuntimeError(UNBOUND)
        tensors, index, generation = reader.sample_uniform(self.random_state(reader.device).state, n)
        return Drawn(tensors, index, generation, {})
