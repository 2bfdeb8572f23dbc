"""Samplers: which rows a batch is made of."""

from __future__ import annotations

import math
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpubuf.data.runtime.recording import recording, refuse
from gpubuf.data.samplers.random_state import RandomState
from gpubuf.data.storages.indexing import as_positions
from gpubuf.data.storages.layout import RowLayout
from gpubuf.data.storages.placement import IndexBytes
from gpubuf.data.storages.tensor_storage import Storage, TensorStorage
from gpubuf.kernels.rows import SIZE


class Draw(NamedTuple):
    """What a sampler hands to its buffer: gathered rows, where they lie, and what is known about them."""

    tensors: list[Tensor]
    positions: Tensor  # int64 [n], flat
    generation: Tensor  # int64 [n]
    info: dict[Any, Tensor]
    batch_size: tuple[int, ...] | None = None  # of tensors and info where it is not [n]


def tensor_storage(storage: Storage) -> TensorStorage:
    """``storage``, checked to be one that can be sampled now.

    Raises:
        TypeError: it is not tensor-backed.
        RuntimeError: it is empty.
    """
    if not isinstance(storage, TensorStorage):
        raise TypeError(f"gpubuf's samplers need a TensorStorage, got {type(storage).__name__}")
    # Compiled code may not depend on the number of rows; its operations find an empty ring out by themselves.
    if not torch.compiler.is_compiling() and len(storage) == 0:
        raise RuntimeError("cannot sample from an empty storage")
    return storage


class Sampler:
    """Base class of samplers. A sampler of one's own implements :meth:`sample`.

    Attributes:
        ran_out: whether an epoch has ended with the last batch; iteration over the buffer stops there.
        turn: the lock of the sampler's buffer, for what users call on the sampler itself.
    """

    ran_out: bool = False
    turn: AbstractContextManager[Any] = nullcontext()

    def __init__(self) -> None:
        # Not only in the class: compiled code depends on where an attribute is.
        self.ran_out = False
        self._random: RandomState | None = None
        self._generator: torch.Generator | None = None

    def __getstate__(self) -> dict[str, Any]:
        """All but the lock of the buffer, which gives a copy its own."""
        return {name: value for name, value in vars(self).items() if name != "turn"}

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Choose rows.

        Args:
            storage: the storage to choose from.
            batch_size: number of rows.

        Returns:
            The index of the rows (int64 ``[n]``; ``[n, ndim]`` for storages of several dimensions), and a dict of
            what else there is to say about each of them, by key.
        """
        raise NotImplementedError

    def draw(self, storage: TensorStorage, batch_size: int) -> Draw:
        """Choose rows and gather them; overridden where one launch does both."""
        index, info = self.sample(storage, batch_size)
        flat = as_positions(index, storage.shape, storage.device)
        tensors, generation = storage.gather(flat)
        return Draw(tensors, flat, generation, dict(info))

    def random_state(self, device: torch.device | str) -> RandomState:
        """The random stream, created at its first use: seeded by ``set_rng``, else by torch's global generator."""
        state = self._random
        if state is None:
            refuse("the sampler draws for the first time, which seeds its random stream: sample once before")
            state = self._random = RandomState(generator=self._generator, device=device)
        noted = recording()
        if noted is not None:
            noted.holds(self, "_random")
        return state

    def order_of(self, n: int, device: torch.device, shuffle: bool) -> Tensor:
        """The numbers below ``n``, int64 ``[n]``: in an order from the random stream, or else rising. No host sync."""
        if not shuffle:
            return torch.arange(n, device=device)
        # Sorting independent uniforms gives every order the same probability, and the same order on every device.
        return self.random_state(device).uniform(n).argsort()

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Start a new random stream, seeded by ``generator`` (None: by torch's global one)."""
        self._generator, self._random = generator, None

    def register_storage(self, storage: Storage) -> None:
        """Called when the sampler becomes part of a buffer: raise if it can't serve ``storage``."""

    def check_rows(self, layout: RowLayout, ndim: int) -> None:
        """Called before the first rows are written: raise if they lack what the sampler needs."""

    def on_write(self, index: Tensor, storage: TensorStorage, priority: Tensor | None) -> None:
        """Called once for every write, with the flat positions of its surviving rows."""

    def update_priority(
        self, index: Any, priority: Any, *, storage: Storage | None = None, generation: Tensor | None = None
    ) -> None:
        """Warns: this sampler has no priorities."""
        warnings.warn(f"update_priority() was called on a {type(self).__name__}, which has no priorities", stacklevel=2)

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Rows were written elsewhere: nothing to do without priorities."""

    def empty(self) -> None:
        """Forget everything about the rows."""
        self.ran_out = False

    def mend(self, storage: TensorStorage) -> None:
        """Compute anew what is derived from rows or priorities: an operation was interrupted that was changing it."""

    def free(self) -> None:
        """Forget everything about the rows, and release its memory."""
        self.empty()

    def index_bytes(self, shape: tuple[int, ...], device_type: str) -> IndexBytes:
        """What the sampler takes for a storage of ``shape`` (``[rows]`` or ``[steps, envs]``), before it exists."""
        return IndexBytes()

    def memory(self) -> IndexBytes:
        """What the sampler takes now."""
        return IndexBytes()

    @property
    def random_bytes(self) -> int:
        """Bytes of the random state, once there is one."""
        return 0 if self._random is None else self._random.state.nbytes

    def move(self, storage: TensorStorage) -> None:
        """Go on where ``storage`` has moved to: called after its rows are in their new place. May synchronise."""
        if self._random is not None:
            self._random = self._random.to(storage.device)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the sampler needs to go on with the same batches. Synchronises."""
        return {"type": type(self).__name__, "random": self._random.state_dict() if self._random else None}

    def load_state_dict(self, state: dict[str, Any], storage: TensorStorage, order: Tensor | None = None) -> None:
        """Restore :meth:`state_dict`.

        Args:
            state: the state.
            storage: the storage, restored before.
            order: what :meth:`TensorStorage.load_state_dict` returned.
        """
        if state["random"] is not None:
            self.random_state(storage.device).load_state_dict(state["random"])


class RandomSampler(Sampler):
    """Rows drawn uniformly, with replacement, in the launch that copies them."""

    def __new__(cls, *args: Any, replacement: bool = True, **kwargs: Any) -> Any:
        if cls is RandomSampler and not replacement:
            return SamplerWithoutReplacement(*args, **kwargs)
        return super().__new__(cls)

    def __init__(self, *, replacement: bool = True) -> None:
        super().__init__()

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Uniform indices. No host sync."""
        storage = tensor_storage(storage)
        uniform = self.random_state(storage.device).uniform(batch_size)
        # The device's count: the host's is that of the capture where this is part of a CUDA graph.
        size = storage.ring[SIZE]
        flat = torch.minimum((uniform * size).to(torch.int64), size - 1)
        return storage.unravel(flat), {}

    def draw(self, storage: TensorStorage, batch_size: int) -> Draw:
        """Choose and gather in one launch. No host sync."""
        storage = tensor_storage(storage)
        tensors, index, generation = storage.sample_uniform(self.random_state(storage.device).state, batch_size)
        return Draw(tensors, index, generation, {})


class SamplerWithoutReplacement(Sampler):
    """Every row once an epoch.

    A permutation is used up batch by batch, and a new one drawn when it ends (which sets ``ran_out``) or when the
    number of stored rows changes.

    Args:
        drop_last: end the epoch before a batch that could not be filled. Otherwise the last batch of an epoch is
            what remains, and may be shorter than asked for.
        shuffle: False visits the rows in storage order.
    """

    def __init__(self, drop_last: bool = False, shuffle: bool = True) -> None:
        super().__init__()
        self.drop_last = drop_last
        self.shuffle = shuffle
        self._remaining: Tensor | None = None
        self._size = 0

    def _permutation(self, storage: TensorStorage) -> Tensor:
        return self.order_of(len(storage), storage.device, self.shuffle)

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """The next rows of the epoch. No host sync.

        Raises:
            ValueError: ``drop_last`` is set and fewer than ``batch_size`` rows are stored.
        """
        storage = tensor_storage(storage)
        refuse("the host decides which rows of an epoch come next: sample without replacement outside of the step")
        if self.drop_last and len(storage) < batch_size:
            raise ValueError(
                f"batch size {batch_size} exceeds the {len(storage)} stored rows, and drop_last=True forbids repeats"
            )
        if self._remaining is None or self._size != len(storage):
            self._remaining, self._size = self._permutation(storage), len(storage)
        flat, remaining = self._remaining[:batch_size], self._remaining[batch_size:]
        left = remaining.numel()
        ran_out = left == 0 or (self.drop_last and left < batch_size)
        if ran_out:
            remaining = self._permutation(storage)
        # In one step: an interrupt may come at any call.
        self._remaining, self.ran_out = remaining, ran_out
        return storage.unravel(flat), {}

    def empty(self) -> None:
        super().empty()
        self._remaining, self._size = None, 0

    def index_bytes(self, shape: tuple[int, ...], device_type: str) -> IndexBytes:
        return IndexBytes(index=8 * math.prod(shape))

    def memory(self) -> IndexBytes:
        # What is left of an epoch is a view of the whole.
        return IndexBytes(index=0 if self._remaining is None else self._remaining.untyped_storage().nbytes())

    def move(self, storage: TensorStorage) -> None:
        super().move(storage)
        if self._remaining is not None:
            self._remaining = self._remaining.to(storage.device)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "remaining": self._remaining, "size": self._size, "ran_out": self.ran_out}

    def load_state_dict(self, state: dict[str, Any], storage: TensorStorage, order: Tensor | None = None) -> None:
        super().load_state_dict(state, storage, order)
        remaining = state["remaining"]
        if order is not None or remaining is None:
            # The rows lie elsewhere now: begin a new epoch.
            self._remaining, self._size = None, 0
        else:
            self._remaining, self._size = remaining.to(storage.device, copy=True), state["size"]
        self.ran_out = state["ran_out"]
