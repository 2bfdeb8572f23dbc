"""Buffers that get to other processes: forked, spawned, or through queues, pipes and pools.

A buffer with writers that a process is started with writes to the one it was made from: see
:mod:`gpubuf.data.ingress.remote`. Any other is a copy there, which says which process has the buffer: that would not
hear of a write, and the copy refuses it. It draws other random numbers than the buffer and all other copies.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any
from weakref import WeakKeyDictionary

from gpubuf.data.ingress.remote import Link, remote_parts
from gpubuf.data.operation import Operation
from gpubuf.data.parts import Assembled, Parts
from gpubuf.system import at_fork

# What goes to a process that is being spawned: the state of a buffer, and who has that.
_BYTES, _OWNER = "_bytes", "_owner"
# In such a state: what a writer is made of, or the number of a copy.
_LINK, _NUMBER = "_link", "_number"


#: All buffers of this process, and to how many processes each was handed.
living = WeakKeyDictionary[Assembled, int]()
# What buffers were before a fork: memory of a GPU can't be given back there.
_inherited: list[Parts] = []


def begin(buffer: Assembled) -> Operation:
    """Connect the parts of a buffer that was made here, and know it. Returns what runs its operations."""
    buffer.parts.connect()
    living[buffer] = 0
    return buffer.parts.operation


def register(cls: type[Assembled]) -> None:
    """Let multiprocessing pass buffers of a class."""
    ForkingPickler.register(cls, _passed)


def state_of(buffer: Assembled) -> dict[str, Any]:
    """A copy of everything as of one moment; what a process that is started writes by. Synchronises.

    A process that is being spawned gets bytes: torch would pass it the memory of tensors as open files, and fails
    if two tensors share it.
    """
    if not _starting():
        return buffer.operation.run(_copied, buffer)
    number = _begin_handing(buffer)
    if buffer.parts.intake is not None:
        state: dict[str, Any] = {_LINK: _link_of(buffer)}
    else:
        state = {**buffer.operation.run(_copied, buffer), _NUMBER: number}
    return {_BYTES: pickle.dumps(state), _OWNER: os.getpid()}


def restore(buffer: Assembled, state: dict[str, Any]) -> None:
    """Make a buffer what :func:`state_of` another one says."""
    owner = state.get(_OWNER)
    if owner is not None:
        state = pickle.loads(state[_BYTES])
    if _LINK in state:
        _write_to(buffer, owner, state[_LINK])
        return
    number = state.pop(_NUMBER, None)
    vars(buffer).update(state)
    buffer.parts.storage.owner = None if owner == os.getpid() else owner
    buffer.operation = begin(buffer)
    if number is not None:
        buffer.parts.draw_apart(number)


def _starting() -> bool:
    """Whether what is pickled goes to a process that is being spawned."""
    return get_spawning_popen() is not None


def _copied(buffer: Assembled) -> dict[str, Any]:
    buffer.parts.settle()
    return copy.deepcopy({name: value for name, value in vars(buffer).items() if name != "operation"})


def _begin_handing(buffer: Assembled) -> int:
    """Before a process is started: let it find the queues of writers. Returns the number of its copy."""
    if buffer.parts.intake is not None:
        buffer.parts.intake.share()
    living[buffer] += 1
    return living[buffer]


def _link_of(buffer: Assembled) -> Link:
    """What is left of a buffer with writers in a process that writes to it."""
    parts = buffer.parts
    assert parts.intake is not None
    more = {name: value for name, value in vars(buffer).items() if name not in ("parts", "operation")}
    client, storage = parts.intake.link(), parts.storage
    return Link(client, storage.max_size, storage.ndim, parts.batch_size, parts.time_dim, more)


def _write_to(buffer: Assembled, owner: int | None, link: Link) -> None:
    """Be a writer to the buffer of a process."""
    vars(buffer).update(link.more)
    buffer.parts = remote_parts(owner, link)
    buffer.operation = buffer.parts.operation
    living.setdefault(buffer, 0)


def _passed(buffer: Assembled) -> Any:
    if _starting():
        return buffer.__reduce_ex__(2)
    return _arrived, (os.getpid(), _begin_handing(buffer), pickle.dumps(buffer))


def _arrived(sender: int, number: int, content: bytes) -> Assembled:
    """A buffer from a queue. Its parent's stays that of the parent; any other is a message, which the reader owns."""
    buffer: Assembled = pickle.loads(content)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid == sender:
        buffer.parts.storage.owner = sender
        buffer.parts.draw_apart(number)
    return buffer


def _before_fork() -> None:
    for buffer in list(living):
        _begin_handing(buffer)


def _after_fork() -> None:
    """No other thread is here: a new lock, no batch ahead, and random streams of its own.

    If a thread of the parent was in the middle of an operation, the next one here finishes it. Of a buffer with
    writers its rows are not here any more: it writes to that of the parent.
    """
    for buffer, number in list(living.items()):
        if buffer.parts.intake is None:
            buffer.parts.begin_anew(number)
        else:
            _inherited.append(buffer.parts)
            _write_to(buffer, os.getppid(), _link_of(buffer))


at_fork(before=_before_fork, after_in_child=_after_fork)
