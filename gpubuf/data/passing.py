"""Buffers that get to other processes: forked, spawned, or through queues, pipes and pools.

A copy in another process says which one has the buffer: it would not hear of a write, and refuses it there.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import weakref
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

from gpubuf.data.storage.storage import TensorStorage

_BYTES, _OWNER = "_bytes", "_owner"


class Passed(Protocol):
    """A buffer, as other processes get it."""

    @property
    def storage(self) -> TensorStorage:
        """The storage."""

    def __reduce_ex__(self, protocol: Any, /) -> Any: ...


class Forked(Protocol):
    """The parts of a buffer, as a forked process has them."""

    def begin_anew(self) -> None:
        """Go on where no other thread is."""


#: Those of all buffers of this process.
living = weakref.WeakSet[Forked]()


def register(cls: type[Passed]) -> None:
    """Let multiprocessing pass buffers of a class, by what :func:`packed` makes of their state."""
    ForkingPickler.register(cls, _passed)


def packed(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a copy, as it goes to where it is asked for.

    A process that is being spawned gets bytes: torch would pass it the memory of tensors as open files, and fails
    if two tensors share it.
    """
    return state if get_spawning_popen() is None else {_BYTES: pickle.dumps(state), _OWNER: os.getpid()}


def unpacked(state: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
    """The state that was packed, and the process that has the buffer; None: this one."""
    owner = state.get(_OWNER)
    return (pickle.loads(state[_BYTES]) if _BYTES in state else state), (None if owner == os.getpid() else owner)


def _passed(buffer: Passed) -> Any:
    if get_spawning_popen() is not None:
        return buffer.__reduce_ex__(2)
    return _arrived, (os.getpid(), pickle.dumps(buffer))


def _arrived(sender: int, content: bytes) -> Passed:
    """A buffer from a queue. Its parent's stays that of the parent; any other is a message, which the reader owns."""
    buffer: Passed = pickle.loads(content)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid == sender:
        buffer.storage.owner = sender
    return buffer


def _after_fork() -> None:
    for parts in list(living):
        parts.begin_anew()


os.register_at_fork(after_in_child=_after_fork)
