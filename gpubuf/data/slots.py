"""Batches on a GPU at the price of their launches.

A batch that is asked for as one before differs from that in its memory alone. So the launches of a draw are noted once,
with their arguments, and repeated into a *slot*: memory for all that the draw makes, with views of it that are ready.

A slot is used again when nobody holds any of its tensors: no variable, no view, nothing that autograd has saved.
Its memory then goes back to the allocator and is asked for anew, so that it is reused as that of any tensor is:
on its stream, and not before the work of other streams that ``record_stream`` has named.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter, is_
from sys import getrefcount
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpubuf.data.recording import Recording, recorded, runs_now
from gpubuf.kernels._launching import Call, Ready, Torch, launches_noted
from gpubuf.kernels._registry import NAMESPACE, on_gpu

MAX_BYTES = 1 << 24
"""Slots of more bytes are not kept: to make their batch takes longer than to prepare it."""

SLOTS = 4
"""Of a size, at most: who keeps more batches has them made in the general way."""

_KEPT = 16
_NOTED = 2
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
_versions, _gradients = attrgetter("_version"), attrgetter("requires_grad")
_modes, _functions = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_addresses = Tensor.data_ptr
_use_count = Tensor._use_count  # type: ignore[attr-defined]
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
        """It, with a version counter of its own."""
        return self._model.data.set_(memory, *self._at)


class _Level:
    """A TensorDict of a batch: places of tensors by name.

    Attributes:
        entries: the places.
        below: the levels below it by name.
        options: batch size and device.
    """

    def __init__(self, data: TensorDict, place: Callable[[Any], Any]) -> None:
        self.options = (data.batch_size, data.device)
        self.entries: dict[str, Any] = {}
        self.below: dict[str, _Level] = {}
        for name, value in data.items():
            # In the order of the entries, which is that of a batch.
            self.entries[name] = None
            if type(value) is TensorDict:
                self.below[name] = _Level(value, place)
            else:
                self.entries[name] = place(value)


class _Prepared:
    """The launches of a draw, and the slots that they are repeated into.

    Args:
        calls: what it has launched.
        notes: the work on the host that goes with it.
        made: the memory that it has taken.
        batch: what it has made.

    Attributes:
        kind: the class of the batch, :class:`gpubuf.data.batches.Batch`.
        device: of the batch.
        n_bytes: of a slot.
        calls: the launches, with places for the tensors in ``made``.
        data: of the batch: a level of a TensorDict, or a list of places.
        info: of the batch, places by key.
        has_info: as of the batch.
        complete: whether all of the batch lies in ``made``.
    """

    def __init__(self, calls: list[Call], notes: _Noted, made: list[Tensor], batch: Any) -> None:
        self.kind = type(batch)
        self._before, self._after = notes.actions
        self._slots: list[_Slot] = []
        self.device, self.n_bytes, self.complete = made[0].device, 0, True
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

        def result(value: Any) -> Any:
            place = placed(value)
            self.complete &= isinstance(place, _Place)
            return place

        self.calls = [Call(variant, programs, tuple(map(placed, given))) for variant, programs, given in calls]
        self.info, self.has_info = {key: result(value) for key, value in batch.info.items()}, batch.has_info
        self.data: Any
        if type(batch.data) is TensorDict:
            self.data = _Level(batch.data, result)
        else:
            self.data = list(map(result, batch.data))

    def again(self) -> Any:
        """The batch of one more draw. None: all slots are in use."""
        for slot in self._slots:
            given = slot.given
            # Who holds the tensors, in Python and in C++, and who their memory.
            if (
                sum(map(getrefcount, given)) + sum(map(_use_count, given)) == slot.uses
                and _storage_uses(slot.cdata) == slot.memory_uses
            ):
                if sum(map(_addresses, given)) == slot.addresses:
                    break
                # Given other memory by ``.data =``: who holds that of the slot can't be counted any more.
                self._slots.remove(slot)
                return None
        else:
            if len(self._slots) == SLOTS:
                return None
            slot = _Slot(self)
            self._slots.append(slot)
        for action in self._before:
            action()
        slot.fill()
        for action in self._after:
            action()
        return slot.batch()


class _Slot:
    """Memory for a batch, and the launches into it.

    Attributes:
        given: the tensors of the batch.
        uses: how many hold them if nobody else does.
        memory_uses: the same of the memory.
        cdata: where the memory's object is.
        addresses: the sum of those of the tensors.
    """

    def __init__(self, prepared: _Prepared) -> None:
        self._prepared, self._n_bytes = prepared, prepared.n_bytes
        self._memory = torch.empty(prepared.n_bytes, dtype=torch.uint8, device=prepared.device).untyped_storage()
        self.cdata = self._memory._cdata
        self._cut()

    def _cut(self) -> None:
        """Make the tensors, which others may have changed."""
        prepared = self._prepared
        # Of its own: functions of torch that write to a tensor count its versions on.
        given = self._maker()
        self._calls = [Call(variant, programs, tuple(map(given, args))) for variant, programs, args in prepared.calls]
        made = self._maker()
        self._info = {key: made(place) for key, place in prepared.info.items()}
        tensors = [*self._info.values()]
        # The levels of a TensorDict, from the root on; and which of them goes where, the innermost first.
        self._levels: list[dict[str, Any]] = []
        self._links: list[tuple[int, int, str, tuple[Any, Any]]] = []
        if isinstance(prepared.data, _Level):
            self._root = prepared.data.options
            self._enter(prepared.data, made, tensors)
            self._links.reverse()
        else:
            tensors += map(made, prepared.data)
        self._tensors = tensors[len(self._info) :]
        self.given = [*dict.fromkeys(tensors)]
        del made, tensors
        self._address = 0
        self.uses = sum(map(getrefcount, self.given)) + sum(map(_use_count, self.given))
        self.memory_uses, self._changes = _storage_uses(self.cdata), sum(map(_versions, self.given))

    def _enter(self, level: _Level, made: Callable[[Any], Any], tensors: list[Tensor]) -> None:
        number, entries = len(self._levels), {name: made(place) for name, place in level.entries.items()}
        self._levels.append(entries)
        tensors += [value for name, value in entries.items() if name not in level.below]
        for name, below in level.below.items():
            self._links.append((len(self._levels), number, name, below.options))
            self._enter(below, made, tensors)

    def _maker(self) -> Callable[[Any], Any]:
        """Makes one tensor of each place; anything else stays."""
        memory = self._memory
        of_place = functools.cache(lambda place: place.tensor(memory))
        return lambda value: of_place(value) if isinstance(value, _Place) else value

    def fill(self) -> None:
        """Launch into the slot, which is free."""
        # A tensor that was changed in place may have another shape.
        if sum(map(_versions, self.given)) != self._changes or True in map(_gradients, self.given):
            self._cut()
        memory = self._memory
        memory.resize_(0)
        memory.resize_(self._n_bytes)
        if memory.data_ptr() != self._address:
            self._address = memory.data_ptr()
            self._ready = Ready(self._calls, self.given[0].get_device())
            self.addresses = sum(map(_addresses, self.given))
        self._ready.launch()

    def batch(self) -> Any:
        """What the slot holds."""
        levels = [*map(dict, self._levels)]
        for level, outer, name, options in self._links:
            levels[outer][name] = _new(levels[level], *options, nested=False)
        data: Any = _new(levels[0], *self._root, nested=False) if levels else [*self._tensors]
        return self._prepared.kind(data, {**self._info}, False, self._prepared.has_info)


class PreparedBatches:
    """The batches of a buffer, each of which is prepared when one like it has come before.

    What is prepared holds on to the rows, and to what the sampler knows of them: :meth:`forget` lets go.

    Args:
        batches: the buffer's :class:`~gpubuf.data.batches.Batches`.
    """

    def __init__(self, batches: Any) -> None:
        self._batches, sampler = batches, batches.sampler
        # A draw that leaves nothing behind on the host, but in the random stream.
        self._can_repeat = sampler.drawn_state == () and sampler.shards is None and batches.relabel is None
        names = ("_random", "reader", *sampler.parts, *sampler.settings)
        ring = ("storage.ring.rewritten", "storage.ring.past_lost")
        others = ("reader.placed", *ring, "transform.is_empty", "writer.track_generations")
        self._state = attrgetter(*others, *(f"sampler.{name}" for name in names))
        self._known: dict[tuple[Any, ...], Any] = {}
        self._at: tuple[Any, ...] = (None,)

    def forget(self) -> None:
        """Let go of all that is prepared."""
        self._known, self._at = {}, (None,)

    def draw(self, *request: Any) -> Any:
        """What :meth:`Batches.drawn` gives for ``request``. Called within an operation."""
        batches = self._batches
        if not self._can_repeat or not runs_now() or _modes() or _functions():
            return batches.drawn(*request)
        state = self._state(batches)
        if not all(map(is_, state, self._at)):
            self.forget()
            self._at = state
        known = self._known.get(request)
        if type(known) is _Prepared and batches.storage.ring.size:
            return known.again() or batches.drawn(*request)
        if len(self._known) >= _KEPT:
            self._known.clear()
        # The first launches of a kernel compile it, and what is drawn for the first time is made.
        count = self._known[request] = (known or 0) + 1
        return self._noted(request) if count == _NOTED else batches.drawn(*request)

    def _noted(self, request: tuple[Any, ...]) -> Any:
        """A batch whose launches are noted, to be repeated."""
        notes = _Noted()
        try:
            with recorded(notes), launches_noted() as calls, _Watch(notes, calls) as watch:
                batch = self._batches.drawn(*request)
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
