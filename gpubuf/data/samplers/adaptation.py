"""Samplers as TorchRL's users write them, fitted to the contract of :class:`gpubuf.data.samplers.base.Sampler`.

Such a class overrides ``sample(storage, batch_size)`` and knows nothing of ``choose``. Its methods may lack arguments
that buffers pass here, it hears of writes by ``extend``, ``add`` and ``mark_update``, and forgets rows by ``_empty``.
All of this is looked at once, when the class is made: samplers in the form of this library pay nothing for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.storage.indexing import as_positions

_NOTICES = ("extend", "add")


def adapt(cls: type[Any], base: type[Any]) -> None:
    """Give ``cls``, which was just derived from ``base``, what the contract asks for and its methods lack."""
    own = vars(cls)
    foreign = "sample" in own and not {"choose", "draw"} & own.keys()
    if "choose" in own:
        cls._chosen = own["choose"]
    elif foreign:
        cls.choose = _choose
    if ("choose" in own or foreign) and "draw" not in own:
        # One that is inherited may choose by itself.
        cls.draw = base.draw
    if "update_priority" in own:
        _adapt_update_priority(cls, base, foreign)
    if "mark_update" in own and foreign:
        cls.mark_update = _with_storage(own["mark_update"])
    _adapt_state(cls, base, foreign)
    if isinstance(flag := own.get("ran_out"), property) and flag.fset is None:
        # Buffers set it to False when an epoch begins.
        cls.ran_out = flag.setter(lambda self, value: None)
    if "_empty" in own and "empty" not in own:
        _adapt_empty(cls)
    if "on_write" not in own:
        _adapt_on_write(cls, base, foreign)


def _takes(method: Any, name: str) -> bool:
    """Whether a method takes an argument of this name."""
    parameters = inspect.signature(method).parameters.values() if callable(method) else ()
    return any(parameter.name == name or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _choose(self: Any, n: int) -> tuple[Tensor, dict[Any, Tensor]]:
    """``choose`` of a sampler that overrides ``sample(storage, batch_size)`` only."""
    storage = self.storage
    index, given = self.sample(storage, n)
    positions = as_positions(index, storage.shape, storage.device)
    positions = torch.where(positions < 0, positions + len(storage), positions)
    info = {}
    for key, value in given.items():
        if key == "index":
            # Buffers make their own.
            continue
        if isinstance(value, int | float):
            info[key] = torch.full(positions.shape, value, device=storage.device)
        else:
            value = torch.as_tensor(value).to(storage.device, non_blocking=True)
            info[key] = value if value.dim() else value.expand(positions.numel())
    return positions, info


def _adapt_update_priority(cls: type[Any], base: type[Any], foreign: bool) -> None:
    own, before = vars(cls)["update_priority"], super(cls, cls).update_priority
    if _takes(own, "generation"):
        return
    takes_storage = _takes(own, "storage")
    # A tree ignores the position -1; what a class without one would do with it is not known.
    skips = before is not base.update_priority and getattr(before, "skips", True)

    def update_priority(
        self: Any, index: Any, priority: Any, *, storage: Any = None, generation: Tensor | None = None
    ) -> Any:
        storage = self._storage if storage is None else storage
        if skips and generation is not None and storage is not None:
            positions = as_positions(index, storage.shape, storage.device)
            index = torch.where(storage.generations(positions) == generation.reshape(-1), positions, -1)
        return own(self, index, priority, storage=storage) if takes_storage else own(self, index, priority)

    update_priority.__doc__ = own.__doc__
    update_priority.skips = skips  # type: ignore[attr-defined]
    cls.update_priority = update_priority
    if foreign and "has_priorities" not in vars(cls):
        cls.has_priorities = True


def _with_storage(own: Callable[..., Any]) -> Callable[..., Any]:
    takes_storage = _takes(own, "storage")

    def mark_update(self: Any, index: Any, *, storage: Any = None) -> Any:
        if not takes_storage:
            return own(self, index)
        return own(self, index, storage=self._storage if storage is None else storage)

    mark_update.__doc__ = own.__doc__
    return mark_update


def _adapt_state(cls: type[Any], base: type[Any], foreign: bool) -> None:
    """Add what every sampler of this library has in its state: its type and its random stream."""
    save, load = vars(cls).get("state_dict"), vars(cls).get("load_state_dict")
    if load is not None and not _takes(load, "order"):

        def load_state_dict(self: Any, state: dict[str, Any], order: Tensor | None = None) -> None:
            base.load_state_dict(self, state, order)
            load(self, state)

        foreign = True
        cls.load_state_dict = load_state_dict
    if save is not None and foreign:

        def state_dict(self: Any) -> dict[str, Any]:
            return {**base.state_dict(self), **save(self)}

        cls.state_dict = state_dict


def _adapt_empty(cls: type[Any]) -> None:
    before = cls.empty

    def empty(self: Any) -> None:
        before(self)
        self._empty()

    cls.empty = empty


def _adapt_on_write(cls: type[Any], base: type[Any], foreign: bool) -> None:
    """Tell the sampler of writes by the methods that it has for that."""
    before = cls.on_write
    # A class that knows on_write() treats new rows there.
    marks = foreign and "mark_update" in vars(cls) and before is base.on_write
    if getattr(before, "notifies", False) or not (marks or any(name in vars(cls) for name in _NOTICES)):
        return

    def on_write(self: Any, positions: Tensor, priority: Tensor | None) -> None:
        before(self, positions, priority)
        storage = self.storage
        index = storage.unravel(positions)
        if marks:
            self.mark_update(index, storage=storage)
        if positions.numel() == 1 and storage.ndim == 1 and type(self).add is not base.add:
            self.add((storage.cursor - 1) % storage.max_size)
        else:
            self.extend(index)
        if priority is not None and before is base.on_write:
            self.update_priority(index, priority, storage=storage)

    on_write.notifies = True  # type: ignore[attr-defined]
    cls.on_write = on_write
