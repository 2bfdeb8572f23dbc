"""What a buffer is made of in a process that was handed it: its rows go to the buffer of the process that has it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from gpubuf.data.ingress.client import WriterClient
from gpubuf.data.operation import Operation
from gpubuf.data.parts import Parts
from gpubuf.data.storage.containers import tensors_of
from gpubuf.data.storage.lazy import LazyTensorStorage
from gpubuf.data.writers import Writer

_T = TypeVar("_T")


def _elsewhere(owner: int | None) -> RuntimeError:
    return RuntimeError(
        f"this is a buffer of process {owner}, to which this process writes: extend(), add(), extend_columns(), "
        "add_columns(), len() and write_count work here, all else there. To read and sample here, start this process "
        "with a copy, copy.deepcopy(buffer)"
    )


class Link(NamedTuple):
    """What is left of a buffer with writers in a process that writes to it.

    Attributes:
        client: writes the rows; None: nothing had said what a row is.
        capacity, ndim: of the storage.
        batch_size, time_dim: of the buffer.
        more: attributes of its class.
    """

    client: WriterClient | None
    capacity: int
    ndim: int
    batch_size: int | None
    time_dim: int
    more: dict[str, Any]


class RemoteStorage(LazyTensorStorage):
    """Has no rows, but the number of them."""

    def check_owned(self) -> None:
        """Refuse what writes past the buffer."""
        raise _elsewhere(self.owner)

    def append(self, data: Any) -> Tensor:
        """Refuse: the rows would stay here."""
        raise _elsewhere(self.owner)

    def empty(self, recount: bool = False) -> None:
        """Refuse: there are none here."""
        raise _elsewhere(self.owner)

    def load_state_dict(self, state: Any) -> Any:
        """Refuse: there are none here."""
        raise _elsewhere(self.owner)

    def get(self, index: Any) -> Any:
        """Refuse to read."""
        raise _elsewhere(self.owner)


class Remote(Operation):
    """Runs what writes, and refuses all else with one sentence. It has the place of the operation and of the intake.

    Args:
        client: writes the rows; None: nothing had said what a row is.
        storage: what the buffer has in place of its storage.
    """

    def __init__(self, client: WriterClient | None, storage: RemoteStorage) -> None:
        super().__init__(storage)
        self._client = client

    def run(self, action: Callable[..., _T], *args: Any, **named: Any) -> _T:
        """Refuse what does not write rows."""
        raise _elsewhere(self.storage.owner)

    def write(self, action: Callable[..., _T], *args: Any, **named: Any) -> _T:
        """``action(*args, **named)``, which writes rows by the client, with their priorities if they have some."""
        return action(*args, **named) if named.get("update_priority") is None else self.run(action)

    def mend(self) -> None:
        """Called before the host's mirror is read: the numbers are those of the buffer."""
        rows, count = self.writes_by().written
        self.storage.ring.set_counters(count, min(rows, self.storage.max_size))

    def client(self, example: Any = None) -> WriterClient:
        """Another client of the same buffer."""
        return copy.copy(self.writes_by())

    def share(self) -> None:
        """As :meth:`Intake.share`: the queues are there."""

    def link(self) -> WriterClient | None:
        """As :meth:`Intake.link`."""
        return self._client

    def writes_by(self) -> WriterClient:
        """What writes the rows.

        Raises:
            RuntimeError: nothing had said what a row is.
        """
        if self._client is None:
            raise RuntimeError(
                f"this is a buffer of process {self.storage.owner}, which did not know what a row is when it started "
                "this process: write a batch before, or call client(example)"
            )
        return self._client


class RemoteWrites:
    """Sends rows, in the place of :class:`gpubuf.data.writing.Writes`.

    Args:
        remote: where they go.
    """

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    def extend(self, data: Any, priority: object = None) -> Tensor:
        """Send a batch. Where its rows will lie is not known here: their index is -1."""
        n, ndim = self._remote.writes_by().extend(data), self._remote.storage.ndim
        return torch.full((n,) if ndim == 1 else (n, ndim), -1, device="cpu")

    def prepared(self, data: Any, one_row: bool = False) -> None:
        """Nothing is: rows are sent."""

    def columns(self, columns: Any, one_step: bool) -> bool:
        """Send rows, an array per key."""
        self._remote.writes_by().write_columns(columns, one_step=one_step)
        return True

    def as_tensors(self, data: Any) -> Any:
        """Dicts, lists and arrays without NumPy's."""
        return tensors_of(data)

    def refuse_batch(self, data: Any) -> None:
        """The client has refused it."""

    @property
    def keys(self) -> list[Any]:
        """The keys of a row in the order of its columns."""
        return self._remote.writes_by().column_keys


class RemoteWriter(Writer):
    """Says that nobody knows here where a row goes."""

    in_order = False

    def extend(self, data: Any) -> Tensor:
        """Refuse: the buffer's own ``extend`` sends rows."""
        raise _elsewhere(self._storage.owner)


def remote_parts(owner: int | None, link: Link) -> Parts:
    """The parts of a buffer in a process that writes to that of another, process ``owner``."""
    storage = RemoteStorage(link.capacity, ndim=link.ndim)
    storage.owner = owner if link.client is None else link.client.learner
    parts = Parts(storage, batch_size=link.batch_size, dim_extend=link.time_dim)
    parts.connect()
    remote: Any = Remote(link.client, storage)
    parts.operation = parts.intake = parts.batches.operation = remote
    writes: Any = RemoteWrites(remote)
    parts.writes, parts.writer = writes, RemoteWriter()
    parts.writer.register_storage(storage)
    return parts
