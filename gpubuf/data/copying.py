"""Copies of buffers, for pickle and deepcopy, and the buffers of a forked process.

A copy has memory of its own: rows, priorities, index, and a random stream that goes on from the same point. Batches
that were prepared ahead stay behind, and locks are new. ``torch.multiprocessing`` would move the tensors that it sends
to shared memory, away from the addresses that the kernels know: it is given those of a copy.
"""

from __future__ import annotations

import copy
import os
import pickle
import secrets
import weakref
from multiprocessing.context import get_spawning_popen
from typing import Any, Self

from gpubuf.data.lock import BufferLock
from gpubuf.data.mending import Mending
from gpubuf.data.prefetch import Prefetcher
from gpubuf.data.processing.pipeline import Pipeline
from gpubuf.data.recording import REPLAY

_BYTES = "_bytes"
# A copy gets new ones.
_OF_THE_PROCESS = ("_lock", "_prefetcher", "_batches", "_columns")


class Copyable(Mending):
    """Lets a buffer be pickled, copied and forked.

    A mixin, because Python looks for these methods on the class of the object that it copies.
    """

    _lock: BufferLock
    _prefetcher: Prefetcher
    _pipeline: Pipeline | None

    def _assemble(self) -> None:
        raise NotImplementedError

    def _connect(self, prefetch: int) -> None:
        """Give the buffer a lock and a queue, and make them known."""
        self._lock = BufferLock(self._storage, self._mend)
        self._sampler.bind(self._storage, self._lock)
        self._prefetcher = Prefetcher(prefetch, self._lock)
        if self._pipeline is not None:
            self._pipeline.attach(self._lock)
        self._assemble()
        _buffers.add(self)

    def __getstate__(self) -> dict[str, Any]:
        """A copy of everything as of one moment. Synchronises."""
        with self._lock, self._prefetcher.quiet():
            if self._storage.initialized:
                # A stream that is seeded only later would not be the same in the copy.
                self._sampler.random_state(self._storage.device)
            state = {name: value for name, value in vars(self).items() if name not in _OF_THE_PROCESS}
            state = {**copy.deepcopy(state), "_prefetch": self._prefetcher.depth}
        # A process that is being spawned gets bytes: torch would pass it the memory of tensors as open files, and fails
        # if two tensors share it.
        return state if get_spawning_popen() is None else {_BYTES: pickle.dumps(state)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if _BYTES in state:
            state = pickle.loads(state[_BYTES])
        prefetch = state.pop("_prefetch")
        vars(self).update(state)
        self._connect(prefetch)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        other = type(self).__new__(type(self))
        other.__setstate__(self.__getstate__())
        return other


_buffers: weakref.WeakSet[Copyable] = weakref.WeakSet()


def _after_fork() -> None:
    """In a forked process: give every buffer a new lock and an empty queue, since no other thread is there.

    The process gets random streams of its own, because its siblings have the same memory. If a thread of the parent was
    in the middle of an operation, the next one here finishes it.
    """
    for buffer in list(_buffers):
        lock, storage = buffer._lock, buffer._storage
        if not lock.held and not lock._lock.acquire(False) and storage.initialized:
            storage.unfinished = storage.unfinished or REPLAY
        lock.renew()
        buffer._prefetcher = Prefetcher(buffer._prefetcher.depth, lock)
        buffer._assemble()
        pipeline = buffer._pipeline
        for random in (buffer._sampler._random, None if pipeline is None else pipeline.random):
            # A process forked from one that uses CUDA can't use it.
            if random is not None and not random.state.is_cuda:
                random.manual_seed(secrets.randbits(63))


os.register_at_fork(after_in_child=_after_fork)
