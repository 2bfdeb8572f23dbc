"""Writers: where the next rows go. Most write round-robin, the oldest rows first to be overwritten."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from gpubuf import serialization
from gpubuf.data.arguments import as_tensor, describe_type
from gpubuf.data.hindsight import Hindsight
from gpubuf.data.recording import DERIVED
from gpubuf.data.samplers.base import Sampler
from gpubuf.data.storage import memmap_files as files
from gpubuf.data.storage.indexing import as_positions
from gpubuf.data.storage.layout import Data
from gpubuf.data.storage.plan import Recipe
from gpubuf.data.storage.storage import Storage, TensorStorage

#: Root keys that a TensorDict writer derives at sampling time instead of storing them.
DERIVED_KEYS = frozenset({"index", "index_generation"})
_CURSOR_FILE = "metadata.json"
_STATE_FILE = "gpubuf.safetensors"


class Writer:
    """Base class of writers (the type that buffers accept).

    Attributes:
        in_order: declares that rows lie in the order in which they were written, up to the seam of the ring.
    """

    in_order: ClassVar[bool] = True
    _storage: TensorStorage
    _served: Sampler | None = None

    def __init__(self, compilable: bool = False) -> None:
        """``compilable`` is accepted for compatibility: every operation can be compiled."""

    def register_storage(self, storage: Storage) -> None:
        """Tell the writer which storage it writes to.

        Raises:
            TypeError: the storage is not tensor-backed.
        """
        if not isinstance(storage, TensorStorage):
            raise TypeError(f"gpubuf's writers need a TensorStorage, got {describe_type(storage)}")
        self._storage = storage

    def attach(self, sampler: Sampler, recipe: Recipe, relabel: Hindsight | None) -> None:
        """Called by the buffer, with its other parts: raise if the writer can't serve them."""
        self._served = sampler

    def __repr__(self) -> str:
        tracks = "track_generations=True" if self.tracks_generations else ""
        return f"{type(self).__name__}({tracks})"

    def extend(self, data: Data) -> Tensor:
        """Write a batch; returns the rows' flat positions, int64 ``[n]``: -1 for rows that were not written."""
        raise NotImplementedError

    def add(self, data: Data) -> int | Tensor | None:
        """Write one row (of one step of all environments, for storages of several dimensions).

        The buffer's ``add`` does that, and applies transforms. Returns as :meth:`added`; above one dimension the index.
        """
        cursor = self._storage.cursor
        index = self.extend(self._storage.as_batch(data, 0))
        if self._storage.ndim > 1:
            return self._storage.unravel(index)
        return cursor if self.in_order else self.added(index)

    def added(self, index: Tensor) -> int | Tensor | None:
        """The result of the buffer's ``add``, from that of :meth:`extend`, of a row that did not go to the cursor.

        On a CPU an int, or None if the row was not kept; on a GPU the index itself, to wait for nothing.
        """
        if not index.is_cpu:
            return index
        place = int(index)
        return None if place < 0 else place

    def empty(self, recount: bool = False) -> None:
        """The buffer has forgotten every row. ``recount``: :attr:`write_count` begins again at 0."""

    def mend(self) -> None:
        """An operation was interrupted that may have written rows. What is derived from them is to be made anew."""

    def check_writable(self) -> None:
        """Called before rows are changed, added or forgotten: raise if the writer allows none of that."""

    @property
    def write_count(self) -> int:
        """Number of rows written since the buffer was made, or since ``empty()``."""
        return self._storage.rows_written

    # Generations

    @property
    def tracks_generations(self) -> bool:
        """Whether samples that have no priorities carry ``"index_generation"`` too."""
        return bool(getattr(self, "track_generations", False))

    def generations_of(self, index: Any) -> Tensor:
        """How often each row's place was written. No host sync.

        A row with another generation than at an earlier moment has been overwritten since. Generations move on when a
        row is written by :meth:`extend` or :meth:`write_at`, and when the buffer is emptied; not when a stored row is
        changed (``set_``, ``update_if_present``). It is the number that samples carry as ``"index_generation"``, and
        there is one whether they do or not.

        Args:
            index: an int, a sequence or a tensor, of flat positions; for storages of several dimensions ``[..., ndim]``
                coordinates, or a tuple of one tensor per dimension.

        Returns:
            int64 of the shape of the index, on its device if it is a tensor: 1 and more, and -1 where no row is stored,
            also for an index of -1 (all coordinates), which :meth:`extend` returns of rows that are gone already.
        """
        storage = self._storage
        where = index.device if isinstance(index, Tensor) else torch.device("cpu")
        asked = torch.stack([as_tensor(i) for i in index], -1) if isinstance(index, tuple) else index
        asked = as_tensor(asked)
        shape = asked.shape[:-1] if storage.ndim > 1 and asked.ndim > 1 else asked.shape
        if not storage.initialized:
            return torch.full(shape, -1, dtype=torch.int64, device=where)
        positions = as_positions(asked, storage.shape, storage.device, handles=True)
        return storage.generations(positions).reshape(shape).to(where)

    def write_at(self, index: Any, data: Data) -> Tensor:
        """Write rows over stored ones, at places of your own, without moving the cursor.

        They count as new: their generations move on, and a prioritized sampler gives them the priority of new rows. A
        sampler of slices indexes all rows anew. No host sync.

        Args:
            index: as for ``buffer[index]``: ints, slices, sequences, tensors. Of duplicates the last one wins.
            data: ``[n]`` rows, or one row without a batch dimension.

        Returns:
            The index, as a tensor.

        Raises:
            IndexError: no row is stored there (CPU; on a GPU nothing is written at places beyond the capacity).
            ValueError: a key, shape or dtype differs from the storage's.
            RuntimeError: nothing has been written yet.
        """
        sampler, storage = self._served, self._storage
        with nullcontext() if sampler is None else sampler.lock:
            self.check_writable()
            positions = as_positions(storage.coordinates(index), storage.shape, storage.device)
            before = storage.begin(DERIVED)
            storage.write(positions, data.unsqueeze(0) if isinstance(data, Tensor) and isinstance(index, int) else data)
            storage.counters.rewrite(positions)
            if sampler is not None:
                sampler.mark_update(positions)
            storage.end(before)
        return torch.as_tensor(index, device="cpu") if isinstance(index, int) else storage.unravel(positions)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Everything that the writer needs to go on."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`, after the storage has been restored."""

    def dumps(self, path: Any) -> None:
        """Write cursor and count into a folder, as TorchRL does, and :meth:`state_dict`. The buffer saves all of it.

        Synchronises.
        """
        folder, storage = Path(path), self._storage
        folder.mkdir(parents=True, exist_ok=True)
        per_step = math.prod(storage.shape[1:])
        place = {"cursor": storage.cursor // per_step, "write_count": self.write_count // per_step}
        files.write_json(folder / _CURSOR_FILE, place)
        serialization.save(folder / _STATE_FILE, self.state_dict())

    def loads(self, path: Any) -> None:
        """Restore what :meth:`dumps`, or that of TorchRL's writers, has written, after the storage has its rows.

        Raises:
            ValueError: the files are missing or damaged, or don't fit the rows of the storage.
        """
        folder, storage = Path(path), self._storage
        file = folder / _CURSOR_FILE
        content = files.read_json(file)
        cursor, count = (files.read_count(content, name, file) for name in ("cursor", "write_count"))
        if storage.initialized and self.in_order:
            steps, per_step, size = storage.shape[0], math.prod(storage.shape[1:]), len(storage)
            full = size == storage.max_size
            if cursor >= steps or (not full and cursor * per_step != size):
                raise ValueError(
                    f"{file}: the cursor is at step {cursor}, but {size} of {storage.max_size} rows are stored"
                )
            if full:
                written = count if count >= steps and count % steps == cursor else steps + cursor
                storage.counters.set(written * per_step, size)
        if (folder / _STATE_FILE).exists():
            self.load_state_dict(serialization.load(folder / _STATE_FILE))

    def check_state(self, state: dict[str, Any], capacity: int, size: int) -> None:
        """Raise unless ``state``, which was read from files, can be loaded; as :meth:`Sampler.check_state`."""


class RoundRobinWriter(Writer):
    """Writes at the cursor and moves it, modulo the capacity. The cursor itself is the storage's device counter.

    Args:
        compilable: accepted for compatibility; every operation can be compiled.
        track_generations: whether uniform samples carry ``"index_generation"`` in their info. Prioritized ones
            always do, since a priority that returns late is recognised by it.
    """

    def __init__(self, compilable: bool = False, *, track_generations: bool = False) -> None:
        self.track_generations = track_generations

    def extend(self, data: Data) -> Tensor:
        """Write a batch at the cursor. No host sync. See :meth:`TensorStorage.append`."""
        return self._storage.append(data)

    @property
    def _cursor(self) -> int:
        """The step that the next rows go to, as programs for TorchRL read it."""
        return self._storage.cursor // math.prod(self._storage.shape[1:])


class TensorDictRoundRobinWriter(RoundRobinWriter):
    """A :class:`RoundRobinWriter` for buffers whose samples carry ``"index"``.

    The position of a row is known when it is read, so that an ``"index"`` in the data (that of a batch sampled
    before, say) is not stored.
    """

    def register_storage(self, storage: Storage) -> None:
        super().register_storage(storage)
        self._storage.ignored_keys = DERIVED_KEYS


class ImmutableDatasetWriter(Writer):
    """A writer for data that stay as they are: whatever adds, changes or forgets rows raises a RuntimeError.

    The rows are those of a :class:`TensorStorage` that was given its tensors, or of a checkpoint. Priorities can be
    set. ``buffer.storage`` is not protected: it belongs to whoever made it.
    """

    WRITING_ERR = (
        "the rows of this buffer can't be changed: it has an ImmutableDatasetWriter; set_writer() gives it another"
    )

    def check_writable(self) -> None:
        """Raise.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(self.WRITING_ERR)

    def extend(self, data: Data) -> Tensor:
        """Raise as :meth:`check_writable`."""
        self.check_writable()
        raise AssertionError

    def dumps(self, path: Any) -> None:
        """Nothing: there is no cursor."""

    def loads(self, path: Any) -> None:
        """Nothing."""
