"""Batches on a GPU at the price of their launches.

A batch that is asked for as one before differs from that in its memory alone. So the launches of a draw are noted once,
with their arguments, and repeated into a *slot*: memory for all that the draw makes, with views of it that are ready.

A slot is used again when nobody holds its memory: no tensor that a batch gave out or that was made of one, nothing that
autograd has saved, no variable. Each batch has tensors of its own in it, for users may do anything to those they get.
The memory then goes back to the allocator and is asked for anew, so that it is reused as that of any tensor is:
on its stream, and not before the work of other streams that ``record_stream`` has named.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from operator import attrgetter, is_, itemgetter
from sys import getrefcount
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpubuf.data.recording import Recording, recorded, runs_now
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.kernels._launching import Call, Ready, Torch, launches_noted, with_arguments
from gpubuf.kernels._registry import NAMESPACE, on_gpu

MAX_BYTES = 1 << 24
"""Slots of more bytes are not kept: to make their batch takes longer than to prepare it."""

SLOTS = 4
"""Of a size, at most: who keeps more batches has them made in the general way."""

_KEPT = 16
_NOTED = 2
_NOTHING = -1
_ALIGNMENT = 512

aten = torch.ops.aten
_MAKES = {
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default,
    aten.new_empty_strided.default,
}  # fmt: skip
_VIEWS = {
    aten.alias.default, aten.as_strided.default, aten.detach.default, aten.expand.default, aten.permute.default,
    aten.select.int, aten.set_.source_Storage_storage_offset, aten.slice.Tensor, aten.squeeze.dim, aten.transpose.int,
    aten._unsafe_view.default, aten.unsqueeze.default, aten.view.default, aten.view.dtype,
}  # fmt: skip
# What computes a tensor: from its arguments and the result to a function that computes it again, into that.
_COMPUTES: dict[Any, Callable[..., Callable[[], Any]]] = {
    aten.arange.default: lambda n, out: functools.partial(torch.arange, n, out=out),
    aten.bitwise_or.Tensor: lambda x, y, out: functools.partial(torch.bitwise_or, x, y, out=out),
    aten.clone.default: lambda x, out: functools.partial(out.copy_, x),
    aten.lt.Tensor: lambda x, y, out: functools.partial(torch.lt, x, y, out=out),
    aten.zeros_like.default: lambda like, out: out.zero_,
}
# The same of what changes its first argument, which it returns.
_CHANGES = {aten.fill_.Scalar: lambda x, value, out: functools.partial(x.fill_, value)}

_new: Callable[..., TensorDict] = TensorDict._new_unsafe
# A tensor in the same memory, with a version counter of its own.
_alias: Callable[[Tensor], Tensor] = attrgetter("data")
_modes, _functions = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_storage_uses: Callable[[int], int] = torch._C._storage_Use_Count


class _Noted(Recording):
    """The work on the host that goes with a draw; and whether launches and that are all it does."""

    def __init__(self) -> None:
        super().__init__()
        self.repeatable = True

    def refuse(self, reason: str) -> None:
        self.repeatable = False

    @property
    def actions(self) -> tuple[list[Callable[[], None]], list[Callable[[], None]]]:
        """What is to be done before and after each run."""
        return [*self._before.values()], [*self._after]


class _Watch(TorchDispatchMode):
    """Sees the memory that a draw takes, and whether it does anything but that, views of it, and launches.

    Args:
        notes: are told.
        calls: the launches so far, to which functions of torch are added.
    """

    def __init__(self, notes: _Noted, calls: list[Call]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._notes, self._calls = notes, calls
        self.made: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == NAMESPACE:
            with self:
                return on_gpu(func)(*args)
        out = func(*args, **(kwargs or {}))
        if func in _MAKES or func in _COMPUTES:
            self.made.append(out)
        again = _COMPUTES.get(func) or (_CHANGES.get(func) if self._has_made(args[:1]) else None)
        if again is not None:
            self._calls.append(Call(Torch(again), 1, (*args, out)))
        elif func not in _MAKES and func not in _VIEWS:
            self._notes.repeatable = False
        return out

    def _has_made(self, arguments: tuple[Any, ...]) -> bool:
        """Whether these are tensors in memory that the draw has taken."""
        made = {each.untyped_storage()._cdata for each in self.made}
        return all(isinstance(each, Tensor) and each.untyped_storage()._cdata in made for each in arguments)


class _Place:
    """Where a tensor lies in the memory of a slot."""

    def __init__(self, tensor: Tensor, start: int) -> None:
        self._model = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._at = (start // tensor.itemsize + tensor.storage_offset(), tensor.shape, tensor.stride())

    def tensor(self, memory: torch.UntypedStorage) -> Tensor:
        """It."""
        return self._model.data.set_(memory, *self._at)


def _taking(numbers: Iterable[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """What takes those of a list, and maybe its last one besides."""
    return itemgetter(*numbers, _NOTHING, _NOTHING)


class _Form:
    """How a batch is made of a list of tensors, the last of which is None.

    Args:
        batch: what has been made.
        number: of a tensor in that list.
    """

    def __init__(self, batch: Any, number: Callable[[Any], int]) -> None:
        self._kind, self._has_info = type(batch), batch.has_info
        # The info, and the levels of a TensorDict from the root on: names, and what takes their tensors from the list.
        self._levels: list[Any] = [(tuple(batch.info), _taking(map(number, batch.info.values())))]
        # Which of them goes where, the innermost first, with batch size and device.
        self._links: list[tuple[int, int, str, tuple[Any, Any]]] = []
        self._root: Any = None
        if type(batch.data) is TensorDict:
            self._root = batch.data.batch_size, batch.data.device
            self._enter(batch.data, number)
            self._links.reverse()
        else:
            self._levels.append((range(len(batch.data)), _taking(map(number, batch.data))))

    def _enter(self, data: TensorDict, number: Callable[[Any], int]) -> None:
        own, entries = len(self._levels), dict(data.items())
        levels = {name: value for name, value in entries.items() if type(value) is TensorDict}
        # In the order of the entries, which is that of a batch.
        numbers = (_NOTHING if name in levels else number(value) for name, value in entries.items())
        self._levels.append((tuple(entries), _taking(numbers)))
        for name, level in levels.items():
            self._links.append((len(self._levels), own, name, (level.batch_size, level.device)))
            self._enter(level, number)

    def batch(self, tensors: list[Any]) -> Any:
        """The batch."""
        levels: list[dict[Any, Any]] = []
        for names, take in self._levels:
            levels.append(dict(zip(names, take(tensors), strict=False)))
        for level, outer, name, options in self._links:
            levels[outer][name] = _new(levels[level], *options, nested=False)
        data: Any = _new(levels[1], *self._root, nested=False) if self._root else [*levels[1].values()]
        return self._kind(data, levels[0], False, self._has_info)


class _Prepared:
    """The launches of a draw, and the slots that they are repeated into.

    Args:
        calls: what it has launched.
        notes: the work on the host that goes with it.
        made: the memory that it has taken.
        batch: what it has made.

    Attributes:
        n_bytes: of a slot.
        complete: whether all of the batch lies in ``made``.
    """

    def __init__(self, calls: list[Call], notes: _Noted, made: list[Tensor], batch: Any) -> None:
        self._before, self._after = notes.actions
        self._slots: list[_Slot] = []
        self._device, self.n_bytes = made[0].device, 0
        starts: dict[int, int] = {}
        for tensor in made:
            memory = tensor.untyped_storage()
            starts[memory._cdata] = self.n_bytes
            self.n_bytes += -(-memory.nbytes() // _ALIGNMENT) * _ALIGNMENT
        places: dict[int, _Place] = {}

        def placed(value: Any) -> Any:
            """A tensor in what was made as its place; anything else as it is."""
            start = starts.get(value.untyped_storage()._cdata) if isinstance(value, Tensor) else None
            return value if start is None else places.setdefault(id(value), _Place(value, start))

        results: dict[int, Any] = {}

        def number(value: Any) -> int:
            results.setdefault(id(value), placed(value))
            return [*results].index(id(value))

        self._calls = with_arguments(calls, placed)
        self._form = _Form(batch, number)
        self._results = [*results.values()]
        self.complete = all(isinstance(each, _Place) for each in self._results)

    @property
    def kept_bytes(self) -> int:
        """Bytes of its slots."""
        return self.n_bytes * len(self._slots)

    def again(self, storage: TensorStorage) -> Any:
        """The batch of one more draw from a storage. None: all slots are in use."""
        for slot in self._slots:
            if _storage_uses(slot.cdata) + getrefcount(slot.memory) == slot.users:
                break
        else:
            if len(self._slots) == SLOTS:
                return None
            slot = _Slot(self.n_bytes, self._device, self._calls, self._results)
            self._slots.append(slot)
        for action in self._before:
            action()
        if self._after:
            storage.changing(self._fill, slot)
        else:
            slot.fill()
        # Nobody has seen these: what was done to those of another batch stays there.
        return self._form.batch([*map(_alias, slot.tensors), None])

    def _fill(self, slot: _Slot) -> None:
        slot.fill()
        for action in self._after:
            action()


class _Slot:
    """Memory for a batch, and the launches into it.

    Args:
        n_bytes: of the memory.
        device: where it is.
        calls: the launches, with places for the tensors in it.
        results: the places of the batch's tensors.

    Attributes:
        tensors: those of the batch, which nobody else gets.
        memory, cdata: the memory: Python's one object for it, and where that of C++ is.
        users: how many hold the memory, tensors as well as variables of Python, if nobody else does.
    """

    def __init__(self, n_bytes: int, device: torch.device, calls: list[Call], results: list[_Place]) -> None:
        self._n_bytes = n_bytes
        self._ready: dict[int, Ready] = {}
        self.memory = torch.empty(n_bytes, dtype=torch.uint8, device=device).untyped_storage()
        self.cdata = self.memory._cdata
        of_place = functools.cache(lambda place: place.tensor(self.memory))
        self._calls = with_arguments(calls, lambda each: of_place(each) if isinstance(each, _Place) else each)
        self.tensors = [*map(of_place, results)]
        self.users = _storage_uses(self.cdata) + getrefcount(self.memory)

    def fill(self) -> None:
        """Launch into the slot, which is free."""
        memory = self.memory
        memory.resize_(0)
        memory.resize_(self._n_bytes)
        address = memory.data_ptr()
        ready = self._ready.get(address)
        if ready is None:
            # Where two streams take turns, so do a few addresses.
            if len(self._ready) == SLOTS:
                self._ready.clear()
            ready = self._ready[address] = Ready(self._calls, self.tensors[0].get_device())
        ready.launch()


class PreparedBatches:
    """The batches of a buffer, each of which is prepared when one like it has come before.

    What is prepared holds on to the rows, and to what the sampler knows of them: :meth:`forget` lets go.

    Args:
        batches: the buffer's :class:`~gpubuf.data.batches.Batches`.
    """

    def __init__(self, batches: Any) -> None:
        # Weakly, for they hold this: rows are released with the buffer, and not when garbage is collected.
        self._batches, sampler = weakref.ref(batches), batches.sampler
        # A draw that leaves nothing behind on the host, but in the random stream, and says what it reads.
        self._can_repeat = sampler.drawn_state == () and sampler.settings is not None and sampler.shards is None
        self._can_repeat &= batches.relabel is None
        names = ("_random", "reader", *sampler.parts, *(sampler.settings or ()))
        others = ("reader.placed", "storage.ring.rewritten", "transform.is_empty", "writer.track_generations")
        self._state = attrgetter(*others, *(f"sampler.{name}" for name in names))
        self._known: dict[tuple[Any, ...], Any] = {}
        self._at: tuple[Any, ...] = (None,)

    def forget(self) -> None:
        """Let go of all that is prepared."""
        self._known, self._at = {}, (None,)

    def kept_bytes(self) -> int:
        """Bytes of all slots, also of those whose batch somebody holds."""
        return sum(each.kept_bytes for each in self._known.values() if type(each) is _Prepared)

    def draw(self, *request: Any) -> Any:
        """What :meth:`Batches.drawn` gives for ``request``. Called within an operation."""
        batches: Any = self._batches()
        if not self._can_repeat or not runs_now() or _modes() or _functions():
            return batches.drawn(*request)
        try:
            state = self._state(batches)
        except AttributeError:
            # A part that is made at the first draw has none yet.
            return batches.drawn(*request)
        if not all(map(is_, state, self._at)):
            self.forget()
            self._at = state
        known = self._known.get(request, 0)
        if type(known) is _Prepared:
            # An empty storage has its error.
            made = known.again(batches.storage) if batches.storage.ring.size else None
            return made or batches.drawn(*request)
        if not known and len(self._known) >= _KEPT:
            self._known.clear()
        # The first launches of a kernel compile it, and what is drawn for the first time is made.
        self._known[request] = known + 1
        return self._noted(batches, request) if known + 1 == _NOTED else batches.drawn(*request)

    def _noted(self, batches: Any, request: tuple[Any, ...]) -> Any:
        """A batch whose launches are noted, to be repeated."""
        notes, calls = _Noted(), list[Call]()
        try:
            with recorded(notes), launches_noted(calls), _Watch(notes, calls) as watch:
                batch = batches.drawn(*request)
        except BaseException:
            notes.abandon()
            raise
        for action in notes.actions[1]:
            action()
        plain = type(batch.data) in (TensorDict, list) and not batch.ran_out and not torch.is_inference_mode_enabled()
        if notes.repeatable and plain and watch.made:
            prepared = _Prepared(calls, notes, watch.made, batch)
            if prepared.complete and prepared.n_bytes <= MAX_BYTES:
                self._known[request] = prepared
        return batch
