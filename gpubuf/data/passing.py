"""Buffers that get to other processes: forked, spawned, or through queues, pipes and pools.

A buffer with writers that a process is started with writes to the one it was made from: see
:mod:`gpubuf.data.ingress.remote`. Any other is a copy there, which says which process has the buffer: that would not
hear of a write, and the copy refuses it. It draws other random numbers than the buffer and all other copies.
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

    def begin_handing(self) -> int:
        """Before a process is started. Returns the number of its copy."""
        ...

    def draw_apart(self, number: int) -> None:
        """Go on with random numbers of a copy's own."""

    def __reduce_ex__(self, protocol: Any, /) -> Any: ...

    def begin_anew(self) -> None:
        """Go on in a forked process, where no other thread is."""


#: All buffers of this process.
living = weakref.WeakSet[Passed]()


def register(cls: type[Passed]) -> None:
    """Let multiprocessing pass buffers of a class, by what :func:`packed` makes of their state."""
    ForkingPickler.register(cls, _passed)


def starting() -> bool:
    """Whether what is pickled goes to a process that is being spawned."""
    return get_spawning_popen() is not None


def packed(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a copy, as it goes to where it is asked for.

    A process that is being spawned gets bytes: torch would pass it the memory of tensors as open files, and fails
    if two tensors share it.
    """
    return state if not starting() else {_BYTES: pickle.dumps(state), _OWNER: os.getpid()}


def unpacked(state: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
    """The state that was packed, and the process that has the buffer; None: this one."""
    owner = state.get(_OWNER)
    return (pickle.loads(state[_BYTES]) if _BYTES in state else state), (None if owner == os.getpid() else owner)


def _passed(buffer: Passed) -> Any:
    if starting():
        return buffer.__reduce_ex__(2)
    return _arrived, (os.getpid(), buffer.begin_handing(), pickle.dumps(buffer))


def _arrived(sender: int, number: int, content: bytes) -> Passed:
    """A buffer from a queue. Its parent's stays that of the parent; any other is a message, which the reader owns."""
    buffer: Passed = pickle.loads(content)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid == sender:
        buffer.storage.owner = sender
        buffer.draw_apart(number)
    return buffer


def _before_fork() -> None:
    for buffer in list(living):
        buffer.begin_handing()


def _after_fork() -> None:
    for buffer in list(living):
        buffer.begin_anew()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
