"""Putting a state into a buffer: all of it, or nothing.

What can be verified is verified before anything changes. For what only shows when it is tried (transforms and samplers
of the user's own, memory that runs out) the buffer remembers what it was, and is put back.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType, TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from gpubuf.data.checkpoints.parts import Parts
from gpubuf.data.checkpoints.validate import check_processing
from gpubuf.data.concurrency.locking import BufferLock
from gpubuf.data.concurrency.pinning import copied, tensors_of
from gpubuf.data.samplers.base import Sampler
from gpubuf.data.storages import host_memory
from gpubuf.data.storages.forms import Form
from gpubuf.data.storages.layout import Data, Pieces
from gpubuf.data.storages.linking import Repeated
from gpubuf.data.storages.row_memory import Storage
from gpubuf.data.storages.tensor_storage import TensorStorage


def restore(parts: Parts, state: dict[str, Any]) -> int | None:
    """Restore the state of a buffer whose lock is held. See :meth:`gpubuf.ReplayBuffer.load_state_dict`.

    Returns:
        The batch size of the state.
    """
    storage, sampler, ahead, transform = parts.storage, parts.sampler, parts.prefetcher, parts.transform
    batch_size: int | None = state["_batch_size"]
    rows, queue = dict(state["_storage"]), state.get("_prefetch", [])
    kind = state["_sampler"]["type"]
    if kind != type(sampler).__name__:
        raise ValueError(f"the state is that of a {kind}, this buffer has a {type(sampler).__name__}")
    ahead.check(queue)
    check_processing(parts.processing, state)
    if rows["initialized"]:
        rows["rows"] = Pieces.of(rows["rows"], storage.ndim)
        if not storage.initialized:
            _check_rows(sampler, storage, storage.form_for(rows))
            shape = storage.full_shape(tuple(rows["shape"]))
            storage.beside = sampler.index_beside(storage.requested_device, shape)
        storage.check_state(rows)
    processing = parts.processing
    with ahead.quiet(), _put_back_on_failure(*(part for part in (transform, processing) if part is not None)):
        transform.load_state_dict(state["_transforms"])
        if processing is not None:
            processing.load_state_dict(state["_processing"])
        slots = ahead.prepared(queue, parts.pin_memory) if storage.initialized else None
        with _Replacement(parts) as replacement:
            order = storage.load_state_dict(replacement.watched(rows))
            replacement.begun = True
            sampler.load_state_dict(state["_sampler"], order)
            parts.writer.load_state_dict(state["_writer"])
            if slots is None:
                slots = ahead.prepared(queue, parts.pin_memory)
        ahead.replace(slots)
    return batch_size


def _check_rows(sampler: Sampler, storage: TensorStorage, form: Form) -> None:
    try:
        sampler.check_rows(form.written, storage.ndim)
        storage.check_rows(form)
    except (LookupError, RuntimeError, TypeError) as error:
        raise ValueError(f"the buffer can't serve the rows of the state: {error}") from error


# The rows


class _Replacement:
    """Puts storage, sampler and writer back where something fails.

    Rows that are to be replaced are copied to the host first, where the sampler or the writer is not gpubuf's own, and
    there is room. For gpubuf's own all is verified beforehand: only an interruption or a lack of memory is left. Rows
    that are lost then leave an empty buffer behind, never a mixture.

    Attributes:
        begun: whether rows may have been replaced.
    """

    def __init__(self, parts: Parts) -> None:
        self._storage, self._sampler, self._writer = parts.storage, parts.sampler, parts.writer
        self._fresh = not self._storage.initialized
        self._kept = None if self._fresh or all(map(_is_own, (self._sampler, self._writer))) else _kept(self._storage)
        self._counters = (0, 0) if self._fresh else (self._storage.written, len(self._storage))
        self._skipped = self._storage.written - self._storage.rows_written
        self._laps = self._storage._laps
        self._before = Before(self._sampler, self._writer) if self._fresh or self._kept is not None else None
        self.begun = False

    def watched(self, state: dict[str, Any]) -> dict[str, Any]:
        """The storage's state; :attr:`begun` is set when the first of its rows are asked for."""
        if not state["initialized"]:
            return state
        example, parts = state["rows"]
        return {**state, "rows": Pieces(example, Repeated(functools.partial(self._watched, parts)))}

    def _watched(self, parts: Iterable[tuple[int, Data]]) -> Iterator[tuple[int, Data]]:
        self.begun = True
        yield from parts

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is None:
            return
        storage = self._storage
        if self._fresh:
            if storage.relocatable:
                storage.free()
                storage._laps = self._laps
            else:
                storage.empty()
        elif self._kept is not None:
            storage.load_state_dict(self._kept)
        elif self.begun:
            storage.empty()
            self._sampler.empty()
            error.add_note("the rows were being replaced: the buffer is empty now")
        else:
            storage.counters.set(*self._counters)
            storage.counters.skipped = self._skipped
        if self._before is not None:
            self._before.put_back()


def _is_own(component: object) -> bool:
    return type(component).__module__.partition(".")[0] == __name__.partition(".")[0]


def _kept(storage: TensorStorage) -> dict[str, Any] | None:
    """A copy of a storage's state on the host; None where that would take more than half of the free memory."""
    state = storage.state_dict()
    if 2 * sum(tensor.nbytes for tensor in tensors_of(state)) > host_memory.free().host:
        return None
    views = {name: state[name] for name in ("rows", "sharing") if name in state}
    return state | {name: copied(value, torch.device("cpu")) for name, value in views.items()}


# Objects

_NO_PARTS = (Storage, BufferLock, type, ModuleType, FunctionType, MethodType)


class Before:
    """Remembers objects with all their parts: attributes, containers and tensors.

    Tensors are put back into the memory that they had, so that captured graphs and views see it. Looked into is what is
    gpubuf's own, a module of PyTorch, or of the same Python module as what refers to it.
    """

    def __init__(self, *objects: object) -> None:
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._seen: dict[int, object] = {}
        for thing in objects:
            self._note(vars(thing), type(thing).__module__)

    def _note(self, value: Any, home: str) -> None:
        if id(value) in self._seen or isinstance(value, _NO_PARTS):
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self._tensors.append((value, value.detach().clone()))
        elif isinstance(value, (dict, list, set, deque, tuple)):
            if not isinstance(value, tuple):
                self._containers.append((value, value.copy()))
            for item in list(value.values()) if isinstance(value, dict) else value:
                self._note(item, home)
        elif hasattr(value, "__dict__") and (
            isinstance(value, nn.Module) or _is_own(value) or type(value).__module__ == home
        ):
            self._note(vars(value), type(value).__module__)

    def put_back(self) -> None:
        """Make all of it what it was."""
        for container, before in self._containers:
            container.clear()
            (container.extend if isinstance(container, (list, deque)) else container.update)(before)
        with torch.no_grad():
            for tensor, before in self._tensors:
                tensor.copy_(before)


@contextmanager
def _put_back_on_failure(*objects: object) -> Iterator[None]:
    before = Before(*objects)
    try:
        yield
    except BaseException:
        before.put_back()
        raise
