"""What follows the rows of a storage, and what asks something of them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar, Protocol
from weakref import ref

from torch import Tensor

from gpubuf.data.storage.layout import RowLayout
from gpubuf.data.storage.placement import IndexBytes
from gpubuf.data.storage.plan import Recipe
from gpubuf.data.storage.schema import Schema


class Follower(Protocol):
    """What a storage keeps about its rows: marks, ends, returns, what is no tensor, next observations stored once."""

    @property
    def nbytes(self) -> int:
        """Bytes that are taken beside the rows on the device that does the work."""

    def on_write(self, index: Tensor) -> None:
        """Rows were written at ``index``, int64 ``[n]``, flat. Can be done again. No host sync."""

    def rebuild(self) -> None:
        """Rows were changed in place: compute anew what is derived from them. O(capacity). No host sync."""

    def clear(self) -> None:
        """All rows are forgotten. No host sync."""

    def state(self, size: int) -> dict[str, Any]:
        """Entries of the storage's state, for its first ``size`` rows: views. May synchronise."""

    def load(self, state: dict[str, Any], order: Tensor | None) -> None:
        """Restore :meth:`state`, after the rows. ``order``: as :meth:`TensorStorage.load_state_dict` returns it."""


class Listener(Protocol):
    """A sampler of a buffer with the storage. It refers to the storage, which tells it of all that happens to rows."""

    #: Names of attributes with what is known about the rows. Graphs use them as they are.
    parts: ClassVar[tuple[str, ...]]
    #: Whether it draws by where trajectories end.
    follows_trajectories: ClassVar[bool]

    @property
    def listens_to_writes(self) -> bool:
        """Whether :meth:`on_write` does anything."""

    def on_write(self, positions: Tensor, priority: Tensor | None) -> None:
        """As :meth:`Follower.on_write`, once for every write. ``priority``: float32 ``[n]``, if rows came with some."""

    def rows_changed(self) -> None:
        """As :meth:`Follower.rebuild`."""

    def depends_on(self, keys: Collection[int]) -> bool:
        """Whether :meth:`rows_changed` reads any of these stored keys (positions in the layout)."""

    def mark_update(self, index: Any) -> None:
        """Rows at ``index`` were written by others: they are new, and :meth:`rows_changed`, too."""

    def on_end(self) -> None:
        """The newest rows were marked as ends of their trajectories."""

    def mend(self) -> None:
        """An operation was interrupted: compute anew what is derived from rows or priorities."""

    def empty(self) -> None:
        """All rows are forgotten, or replaced by others."""

    def free(self) -> None:
        """All rows are forgotten, and memory is released."""

    def move(self) -> None:
        """The rows are on another device: follow them. May synchronise."""

    def check_rows(self, layout: RowLayout, ndim: int) -> None:
        """Raise if the first rows, which are about to be written, lack what it needs."""

    def index_bytes(self, shape: tuple[int, ...], device_type: str) -> IndexBytes:
        """Bytes that it needs for a storage of ``shape`` to come."""


class Reader(Protocol):
    """Reads rows in a way of its own, and needs to know something of them, such as where trajectories end."""

    recipe: Recipe

    @property
    def needs_ends(self) -> bool:
        """Whether it has to know where trajectories end."""

    def check_rows(self, schema: Schema) -> None:
        """Raise if rows of ``schema`` lack what it needs."""


#: Marks come before what reads them.
_ORDER = ("marks", "ends", "returns", "host", "sharing")


class Followers:
    """All that follow the rows of a storage: what it keeps about them itself, and the samplers of its buffers.

    Attributes:
        own: what the storage keeps. Marks come before what reads them. A captured write holds this tuple: it stays the
            same while they are the same, as the next ones do.
        listeners: weak references to the samplers.
        write_listeners: to those that hear of writes.
        priority: of the rows of the write that is under way, float32 ``[n]``; None: they came without.
    """

    def __init__(self) -> None:
        self.own: tuple[Follower, ...] = ()
        self._kept: dict[str, Follower | None] = {}
        self.listeners: tuple[ref[Listener], ...] = ()
        self.write_listeners: tuple[ref[Listener], ...] = ()
        self.priority: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without samplers: a copy of their buffer has others, and none of what the storage keeps: it connects."""
        return {"own": (), "_kept": {}, "listeners": (), "write_listeners": (), "priority": None}

    def keep(self, **kept: Follower | None) -> None:
        """Tell what the storage keeps about its rows: marks, ends, returns, host, sharing. None: it keeps none."""
        self._kept |= kept
        found = tuple([each for name in _ORDER if (each := self._kept.get(name)) is not None])
        if found != self.own:
            self.own = found

    def join(self, listener: Listener) -> None:
        """Tell a sampler of all that happens to the rows, for as long as it exists."""
        self._tell([*self._others(listener), listener])

    def leave(self, listener: Listener) -> None:
        """Tell it of nothing any more."""
        self._tell(self._others(listener))

    def _others(self, listener: Listener) -> list[Listener]:
        return [each for each in self.samplers if each is not listener]

    def _tell(self, listeners: list[Listener]) -> None:
        self.listeners = tuple(map(ref, listeners))
        self.write_listeners = tuple(ref(each) for each in listeners if each.listens_to_writes)

    @property
    def samplers(self) -> list[Listener]:
        """The samplers that exist."""
        return [found for each in self.listeners if (found := each()) is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of what the storage keeps."""
        return sum(each.nbytes for each in self.own)

    def on_write(self, index: Tensor) -> None:
        """Rows were written at ``index``, int64 ``[n]``, flat. Can be done again. No host sync."""
        for follower in self.own:
            follower.on_write(index)
        for each in self.write_listeners:
            if (sampler := each()) is not None:
                sampler.on_write(index, None if self.priority is None else self.priority[-index.numel() :])

    def rebuild(self) -> None:
        """Rows were changed in place: compute anew what is known about them. O(capacity). No host sync."""
        self.rebuild_own()
        for sampler in self.samplers:
            sampler.rows_changed()

    def rebuild_own(self) -> None:
        """:meth:`rebuild` what the storage keeps."""
        for follower in self.own:
            follower.rebuild()

    def mark_update(self, index: Any) -> None:
        """Rows at ``index`` were written by others: treat them as new. O(capacity). No host sync."""
        self.rebuild_own()
        for sampler in self.samplers:
            sampler.mark_update(index)

    def on_end(self) -> None:
        """The newest rows were marked as ends of their trajectories."""
        for sampler in self.samplers:
            sampler.on_end()

    def mend(self) -> None:
        """An operation was interrupted: compute anew what is known about rows. O(capacity). No host sync."""
        self.rebuild_own()
        for sampler in self.samplers:
            sampler.mend()

    def clear(self) -> None:
        """All rows are forgotten. No host sync."""
        for follower in self.own:
            follower.clear()
        for sampler in self.samplers:
            sampler.empty()

    def free(self) -> None:
        """All rows are forgotten, and memory is released."""
        self.own, self._kept = (), {}
        for sampler in self.samplers:
            sampler.free()

    def move(self) -> None:
        """The rows are elsewhere: samplers follow them. May synchronise."""
        for sampler in self.samplers:
            sampler.move()

    @property
    def follow_trajectories(self) -> bool:
        """Whether a sampler draws by where trajectories end."""
        return any(sampler.follows_trajectories for sampler in self.samplers)

    def depends_on(self, keys: Collection[int]) -> bool:
        """Whether a sampler has to :meth:`rebuild` where these stored keys change."""
        return any(sampler.depends_on(keys) for sampler in self.samplers)
