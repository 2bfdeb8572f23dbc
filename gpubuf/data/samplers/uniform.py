"""Uniform sampling: with replacement, without it, and of rows that leave after they were drawn so many times."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from gpubuf.data.recording import refuse_in_capture
from gpubuf.data.samplers.base import UNBOUND, Drawn, Sampler, is_count, is_tensor, positions_below
from gpubuf.data.samplers.shards import Shards
from gpubuf.data.storage.indexing import as_positions
from gpubuf.data.storage.layout import Data, RowLayout, batch_shape
from gpubuf.data.storage.list_storage import ListStorage
from gpubuf.data.storage.placement import IndexBytes
from gpubuf.data.storage.storage import Storage, TensorStorage
from gpubuf.kernels.rows import SIZE
from gpubuf.serialization import need


class EpochSampler(Sampler):
    """Base class of samplers without replacement: each of so many things once an epoch, then all of them again.

    Args:
        drop_last, shuffle: as for :class:`SamplerWithoutReplacement`.
    """

    row_tensors = ("_left",)
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

    def __init__(self, drop_last: bool = False, shuffle: bool = True, *, replacement: bool = False) -> None:
        super().__init__(drop_last, shuffle)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(drop_last={self.drop_last}, shuffle={self.shuffle})"

    def choose(self, n: int) -> tuple[Tensor, dict[Any, Tensor]]:
        """The next rows of the epoch. No host sync.

        Raises:
            ValueError: ``drop_last`` is set and fewer than ``n`` rows are stored.
        """
        refuse_in_capture(
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

    def __init__(self, *, replacement: bool = True, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.require_replacement(replacement)
        self.shards = Shards.of(process_group)

    def _weights(self, n: int) -> dict[Any, Tensor]:
        """The info of ``n`` rows."""
        if self.shards is None:
            return {}
        return {"priority_weight": self.shards.weights(self.storage.ring[SIZE], n)}

    def choose(self, n: int) -> tuple[Tensor, dict[Any, Tensor]]:
        """Uniform positions. No host sync."""
        storage, info = self.storage, self._weights(n)
        uniform = self.random_state(storage.device).uniform(n)
        # The device's count: in a CUDA graph the host's would stay that of the capture.
        size = storage.ring[SIZE]
        return torch.minimum((uniform * size).to(torch.int64), size - 1), info

    def draw(self, n: int) -> Drawn:
        """Choose and gather in one launch. No host sync."""
        reader = self.reader
        if reader is None:
            raise RuntimeError(UNBOUND)
        info = {} if self.shards is None else self._weights(n)
        tensors, index, generation = reader.sample_uniform(self.random_state(reader.device).state, n)
        return Drawn(tensors, index, generation, info)


class ConsumingSampler(Sampler):
    """Rows drawn uniformly, each at most ``max_sample_count`` times; then it is consumed.

    A batch has no row twice. It is shorter than asked for if fewer rows are left; with none left, sampling raises, and
    iteration ends. ``len(buffer)`` is the number of rows left. New rows take the places of consumed ones, in the order
    in which these were consumed, before others are overwritten.

    A draw takes O(rows), and synchronises with a GPU: how many rows are left decides how large the batch is. The buffer
    can't have ``prefetch``, and the storage has one dimension.

    Args:
        max_sample_count: how many times a row is drawn.

    Raises:
        TypeError: it is no int.
        ValueError: it is below 1.
    """

    consumes = True
    row_tensors = ("_drawn",)

    def __init__(self, max_sample_count: int = 1) -> None:
        super().__init__()
        self.max_sample_count = checked_count("max_sample_count", max_sample_count)
        # How often each row was drawn, and the number of the draw that consumed it: int64 [2, capacity].
        self._drawn: Tensor | None = None
        self._draws = 0
        # Where rows are overwritten that are not consumed, once there is no other place.
        self._cursor = 0

    def check_storage(self, storage: TensorStorage) -> None:
        """Check that the storage fits.

        Raises:
            ValueError: it has several dimensions.
        """
        if storage.ndim > 1:
            raise ValueError(f"a ConsumingSampler serves 1-dimensional storages, this one has ndim={storage.ndim}")
        super().check_storage(storage)

    def check_rows(self, layout: RowLayout, ndim: int) -> None:
        refuse_in_capture("a ConsumingSampler lets the host decide where rows go: write outside of the step")

    def _counts(self) -> Tensor:
        storage = self.storage
        if self._drawn is None:
            self._drawn = torch.zeros(2, storage.max_size, dtype=torch.int64, device=storage.device)
        return self._drawn

    def _left(self) -> Tensor:
        """Which of the stored rows may be drawn: bool ``[size]``."""
        return self._counts()[0, : len(self.storage)] < self.max_sample_count

    def available(self) -> int:
        """Number of rows left. Synchronises."""
        return int(self._left().sum()) if self._storage is not None and self._storage.initialized else 0

    def can_sample(self, storage: TensorStorage, batch_size: int) -> bool:
        """Whether there is a row left. Synchronises."""
        self._serve(storage)
        return self.available() > 0

    def choose(self, n: int) -> tuple[Tensor, dict[Any, Tensor]]:
        """Positions of rows that are left, none of them twice. Synchronises.

        Raises:
            RuntimeError: there are none.
        """
        refuse_in_capture("a ConsumingSampler lets the host decide how large a batch is: sample outside of the step")
        storage, drawn, left = self.storage, self._counts(), self._left()
        available = int(left.sum())
        if available == 0:
            self.ran_out = True
            raise RuntimeError(
                "Cannot sample from an empty storage: no new rows were written since all have been drawn "
                f"{self.max_sample_count} times"
            )
        uniform = self.random_state(storage.device).uniform(left.numel())
        # Of numbers from an order without ties every choice of rows has the same probability.
        positions = torch.where(left, uniform, -1.0).topk(min(n, available)).indices
        drawn[0].index_add_(0, positions, torch.ones_like(positions))
        drawn[1].index_copy_(0, positions, self._draws + torch.arange(positions.numel(), device=positions.device))
        self._draws += positions.numel()
        self.ran_out = not bool(self._left().any())
        return positions, {}

    def choose_batches(self, n: int, batches: int) -> tuple[Tensor, dict[Any, Tensor]]:
        """As :meth:`choose`, one batch after the other.

        Raises:
            RuntimeError: too few rows are left.
        """
        found = [self.choose(n)[0] for _ in range(batches)]
        return torch.cat(found), {}

    # Writing

    def write(self, append: Callable[[Data], Tensor], data: Data) -> Tensor:
        """Write a batch: to the places of consumed rows, to empty ones, and over the others. Synchronises.

        Args:
            append: writes rows at the storage's cursor, and returns their positions.
            data: ``[n]`` rows.

        Returns:
            Their positions, int64 ``[n]``.
        """
        storage = self.storage
        if isinstance(storage, ListStorage):
            data = storage.as_items(data)
        n = len(data) if isinstance(data, list) else batch_shape(data, 1)[0]
        if not storage.initialized or n >= storage.max_size:
            return append(data)
        size, capacity = len(storage), storage.max_size
        counts, numbers = self._counts()[:, :size]
        consumed = (counts >= self.max_sample_count).nonzero().squeeze(-1)
        free = consumed[numbers[consumed].argsort()][:n]
        fresh = min(n - free.numel(), capacity - size)
        rest = n - free.numel() - fresh
        if rest:
            taken = set(free.tolist())
            # The rows written now are never among these: they are fewer than the capacity.
            places = [place % capacity for place in range(self._cursor, self._cursor + capacity)]
            own = [place for place in places if place not in taken and place < size][:rest]
            self._cursor = (own[-1] + 1) % capacity
            free = torch.cat((free, torch.tensor(own, device=free.device)))
        inside = free.numel() - rest
        found = [free[:inside]]
        if free.numel():
            chosen = torch.cat((torch.arange(inside, device="cpu"), torch.arange(n - rest, n, device="cpu"))).to(
                free.device
            )
            storage.write(free, data if not fresh and n == free.numel() else _chosen(data, chosen))
            storage.counters.rewrite(free)
        if fresh:
            found.append(append(data[inside : inside + fresh]))
        return torch.cat((*found, free[inside:]))

    def on_write(self, positions: Tensor, priority: Tensor | None) -> None:
        """New rows may be drawn as often as any."""
        self._counts()[0].index_fill_(0, positions, 0)
        self.ran_out = False

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Rows were written elsewhere: they count as new."""
        self._serve(storage)
        own = self.storage
        self.on_write(as_positions(index, own.shape, own.device), None)

    # The life of the rows

    def forget_storage(self) -> None:
        super().forget_storage()
        self._draws = self._cursor = 0

    def empty(self) -> None:
        super().empty()
        self.forget_storage()

    def index_bytes(self, shape: tuple[int, ...], device_type: str) -> IndexBytes:
        return IndexBytes(index=16 * math.prod(shape))

    def state_dict(self) -> dict[str, Any]:
        drawn = None if self._drawn is None else self._drawn[:, : len(self.storage)].clone()
        return {**super().state_dict(), "drawn": drawn, "draws": self._draws, "cursor": self._cursor}

    def load_state_dict(self, state: dict[str, Any], order: Tensor | None = None) -> None:
        super().load_state_dict(state, order)
        drawn = state["drawn"]
        self._drawn, self._draws, self._cursor = None, state["draws"], state["cursor"] if order is None else 0
        if drawn is not None:
            drawn = drawn.to(self.storage.device)
            self._counts()[:, : drawn.shape[1]].copy_(drawn if order is None else drawn[:, order.to(drawn.device)])
        self.ran_out = False

    def check_state(self, state: dict[str, Any], capacity: int, size: int) -> None:
        super().check_state(state, capacity, size)
        drawn = state["drawn"]
        need(drawn is None or is_tensor(drawn, torch.int64, (2, size)), f"the checkpoint has no counts of {size} rows")
        need(is_count(state["draws"]) and is_count(state["cursor"]), "the checkpoint's draws are damaged")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(max_sample_count={self.max_sample_count}, left={self.available()})"


def _chosen(data: Data, rows: Tensor) -> Data:
    return [data[row] for row in rows.tolist()] if isinstance(data, list) else data[rows]


def checked_count(name: str, value: Any) -> int:
    """A number of samples as users give it.

    Raises:
        TypeError: it is no int.
        ValueError: it is below 1.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a positive int, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return int(value)
