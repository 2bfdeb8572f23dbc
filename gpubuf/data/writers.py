"""Writers: where the next rows go. Most write round-robin, the oldest rows first to be overwritten."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from gpubuf.data.arguments import as_tensor, describe_type
from gpubuf.data.hindsight import Hindsight
from gpubuf.data.samplers.base import Sampler
from gpubuf.data.storage.containers import Data
from gpubuf.data.storage.indexing import as_positions
from gpubuf.data.storage.plan import Recipe
from gpubuf.data.storage.storage import TensorStorage

#: Root keys that a TensorDict writer derives at sampling time instead of storing them.
DRAWN_KEYS = frozenset({"index", "index_generation"})


class Writer:
    """Base class of writers (the type that buffers accept).

    Attributes:
        in_order: declares that rows lie in the order in which they were written, up to the seam of the ring.
        track_generations: whether samples that have no priorities carry ``"index_generation"`` too.
    """

    in_order: ClassVar[bool] = True
    track_generations: bool = False
    _storage: TensorStorage

    def __init__(self, compilable: bool = False) -> None:
        """``compilable`` is accepted for compatibility: every operation can be compiled."""

    def register_storage(self, storage: TensorStorage) -> None:
        """Tell the writer which storage it writes to.

        Raises:
            TypeError: the storage is not tensor-backed.
        """
        if not isinstance(storage, TensorStorage):
            raise TypeError(f"gpubuf's writers need a TensorStorage, got {describe_type(storage)}")
        self._storage = storage

    def attach(self, sampler: Sampler, recipe: Recipe, relabel: Hindsight | None) -> None:
        """Called by the buffer, with its other parts: raise if the writer can't serve them."""

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
        """Called before rows are changed, added or forgotten: raise if the writer allows none of that.

        Raises:
            RuntimeError: the rows are a copy of those of another process: see :meth:`TensorStorage.check_owned`.
        """
        self._storage.check_owned()

    @property
    def write_count(self) -> int:
        """Number of rows written since the buffer was made, or since ``empty()``."""
        return self._storage.rows_written

    # Generations

    @property
    def tracks_generations(self) -> bool:
        """Whether samples that have no priorities carry ``"index_generation"`` too."""
        return self.track_generations

    def generations_of(self, index: Any) -> Tensor:
        """How often each row's place was written. No host sync.

        A row with another generation than at an earlier moment has been overwritten since. Generations move on when a
        row is written by :meth:`extend`, and when the buffer is emptied; not when a stored row is changed
        (``update_if_present``). It is the number that samples carry as ``"index_generation"``, and
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

    # State

    def state_dict(self) -> dict[str, Any]:
        """Everything that the writer needs to go on."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`, after the storage has been restored.

        Raises:
            ValueError: the state is not one of this writer's.
        """
        Writer.check_state(self, state, 0, 0)

    def check_state(self, state: dict[str, Any], capacity: int, size: int) -> None:
        """Raise unless ``state``, which was read from files, can be loaded; as :meth:`Sampler.check_state`."""
        if state.keys() != self.state_dict().keys():
            raise ValueError(
                f"{sorted(state)} are no state of a {type(self).__name__}: cursor and counts are the storage's, and "
                "come with load_state_dict of the buffer"
            )


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
        """Write a batch at the cursor. No host sync. See :meth:`TensorStorage.append`, and :meth:`check_writable`."""
        storage = self._storage
        # Past a call: most writes come here.
        if storage.owner is not None:
            storage.check_owned()
        return storage.append(data)

    @property
    def _cursor(self) -> int:
        """The step that the next rows go to, as programs for TorchRL read it."""
        return self._storage.cursor // math.prod(self._storage.shape[1:])


class TensorDictRoundRobinWriter(RoundRobinWriter):
    """A :class:`RoundRobinWriter` for buffers whose samples carry ``"index"``.

    The position of a row is known when it is read, so that an ``"index"`` in the data (that of a batch sampled
    before, say) is not stored.
    """

    def register_storage(self, storage: TensorStorage) -> None:
        super().register_storage(storage)
        self._storage.allocation.ignored_keys = DRAWN_KEYS


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
