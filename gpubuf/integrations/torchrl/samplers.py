"""Samplers, which take samplers and states as TorchRL's users have them.

Samplers that are written for TorchRL override ``sample(storage, batch_size)`` and know nothing of ``choose``. Their
methods may lack arguments that buffers pass here, they hear of writes by ``extend``, ``add`` and ``mark_update``, and
forget rows by ``_empty``. All of this is looked at once, when such a class is made: other samplers pay nothing for it.

States are those of TorchRL 0.14: its dicts, and the files of its ``dumps``. Nothing is unpickled. Random streams are
not part of them.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from gpubuf.data.arguments import as_tensor
from gpubuf.data.samplers import base as core
from gpubuf.data.samplers import prioritized, prioritized_slices, slices, uniform
from gpubuf.data.storage import memmap_files as files
from gpubuf.data.storage.indexing import as_positions
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.kernels import sum_tree

_FILE = "sampler_metadata.json"
_VERSION = 1


# Samplers written for TorchRL

_NOTICES = ("extend", "add")


def _adapt(cls: type[Any]) -> None:
    """Give ``cls``, which was just derived from :class:`Sampler`, what the contract asks for and its methods lack."""
    own = vars(cls)
    foreign = "sample" in own and not {"choose", "draw"} & own.keys()
    if foreign:
        cls.choose = _choose
        cls.drawn_state, cls.settings = own.get("drawn_state"), own.get("settings")
    if ("choose" in own or foreign) and "draw" not in own:
        # One that is inherited may choose by itself.
        cls.draw = core.Sampler.draw
    if "update_priority" in own:
        _adapt_update_priority(cls, foreign)
    if "mark_update" in own and foreign:
        cls.mark_update = _with_storage(own["mark_update"])
    _adapt_state(cls, foreign)
    if isinstance(flag := own.get("ran_out"), property) and flag.fset is None:
        # Buffers set it to False when an epoch begins.
        cls.ran_out = flag.setter(lambda self, value: None)
    if "_empty" in own and "empty" not in own:
        _adapt_empty(cls)
    if "on_write" not in own:
        _adapt_on_write(cls, foreign)


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
            value = as_tensor(value).to(storage.device, non_blocking=True)
            info[key] = value if value.dim() else value.expand(positions.numel())
    return positions, info


def _adapt_update_priority(cls: type[Any], foreign: bool) -> None:
    own, before = vars(cls)["update_priority"], super(cls, cls).update_priority
    if _takes(own, "generation"):
        return
    update = _with_storage(own)
    # A tree ignores the position -1; what a class without one would do with it is not known.
    skips = before is not Sampler.update_priority and getattr(before, "skips", True)

    @functools.wraps(own)
    def update_priority(
        self: Any, index: Any, priority: Any, *, storage: Any = None, generation: Tensor | None = None
    ) -> Any:
        storage = _served(self, storage)
        if skips and generation is not None and storage is not None:
            positions = as_positions(index, storage.shape, storage.device)
            index = torch.where(storage.generations(positions) == generation.reshape(-1), positions, -1)
        return update(self, index, priority, storage=storage)

    update_priority.skips = skips  # type: ignore[attr-defined]
    cls.update_priority = update_priority
    if foreign and "has_priorities" not in vars(cls):
        cls.has_priorities = True


def _served(sampler: Any, storage: Any) -> Any:
    """What a method was given as ``storage``, or what the sampler serves; None: neither."""
    return sampler.storage if storage is None and sampler.storage is not core.NO_STORAGE else storage


def _with_storage(own: Callable[..., Any]) -> Callable[..., Any]:
    """A method that is given the storage if it takes it."""
    takes_storage = _takes(own, "storage")

    @functools.wraps(own)
    def method(self: Any, *arguments: Any, storage: Any = None) -> Any:
        if not takes_storage:
            return own(self, *arguments)
        return own(self, *arguments, storage=_served(self, storage))

    return method


def _adapt_state(cls: type[Any], foreign: bool) -> None:
    """Add what every sampler of this library has in its state: its type and its random stream."""
    save, load = vars(cls).get("state_dict"), vars(cls).get("load_state_dict")
    if load is not None and not _takes(load, "order"):

        def load_state_dict(self: Any, state: dict[str, Any], order: Tensor | None = None) -> None:
            Sampler.load_state_dict(self, state, order)
            load(self, state)

        foreign = True
        cls.load_state_dict = load_state_dict
    if save is not None and foreign:

        def state_dict(self: Any) -> dict[str, Any]:
            return {**Sampler.state_dict(self), **save(self)}

        cls.state_dict = state_dict


def _adapt_empty(cls: type[Any]) -> None:
    before = cls.empty

    def empty(self: Any) -> None:
        before(self)
        self._empty()

    cls.empty = empty


def _adapt_on_write(cls: type[Any], foreign: bool) -> None:
    """Tell the sampler of writes by the methods that it has for that."""
    before = cls.on_write
    # A class that knows on_write() treats new rows there.
    marks = foreign and "mark_update" in vars(cls) and before is Sampler.on_write
    if getattr(before, "notifies", False) or not (marks or any(name in vars(cls) for name in _NOTICES)):
        return

    def on_write(self: Any, positions: Tensor, priority: Tensor | None) -> None:
        before(self, positions, priority)
        storage = self.storage
        index = storage.unravel(positions)
        if marks:
            self.mark_update(index, storage=storage)
        if positions.numel() == 1 and storage.ndim == 1 and type(self).add is not Sampler.add:
            self.add((storage.cursor - 1) % storage.max_size)
        else:
            self.extend(index)
        # Another buffer with the storage may have priorities.
        if priority is not None and self.has_priorities and before is Sampler.on_write:
            self.update_priority(index, priority, storage=storage)

    on_write.notifies = True  # type: ignore[attr-defined]
    cls.on_write = on_write


class Sampler(core.Sampler):
    """Base class of samplers that are written for TorchRL, and of gpubuf's here.

    Such a sampler overrides ``sample(storage, n)`` and nothing else that the core's class has. Its
    ``update_priority(index, priority, *, storage)``, ``mark_update``, ``extend``, ``add``, ``_empty``, ``state_dict``
    and ``load_state_dict`` are called as there, and it need not call ``super().__init__()``.
    """

    # `choose` as it was before a class that overrides `sample` alone.
    _chosen: ClassVar[Callable[..., tuple[Tensor, dict[Any, Tensor]]]] = core.Sampler.choose

    def __init_subclass__(cls, **named: Any) -> None:
        """Fit in a class that is written for TorchRL."""
        super().__init_subclass__(**named)
        if cls.choose is not _choose:
            cls._chosen = cls.choose
        if cls.__module__ != __name__:
            _adapt(cls)

    def sample(self, storage: TensorStorage, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """Choose rows, as TorchRL's samplers do: without the buffer, and without gathering them. No host sync.

        Args:
            storage: the storage to choose from. A sampler that serves no buffer is bound to it.
            batch_size: number of rows.

        Returns:
            The index of the rows (int64 ``[n]``; ``[n, ndim]`` for storages of several dimensions), and a dict of
            info about each of them, by key.

        Raises:
            RuntimeError: the storage is empty.
        """
        positions, info = self._ready(storage)._chosen(batch_size)
        return self.storage.unravel(positions), info

    def _ready(self, storage: TensorStorage) -> Self:
        """Bound to a storage that has rows."""
        self._serve(storage)
        core.require_rows(self.storage, self.shards)
        return self

    @property
    def _rng(self) -> torch.Generator | None:
        """The generator, by TorchRL's name: samplers written for it read this."""
        return self._generator

    def extend(self, index: Tensor) -> None:
        """Called after a write with the index of its rows, as in TorchRL. For samplers of your own that override it."""

    def add(self, index: int) -> None:
        """Called instead of :meth:`extend` after a write of one row, if it is overridden."""


class SamplerWithoutReplacement(Sampler, uniform.SamplerWithoutReplacement):
    __doc__ = uniform.SamplerWithoutReplacement.__doc__

    @property
    def _sample_list(self) -> Tensor | None:
        """The rest of the epoch, as programs for TorchRL read it."""
        return self._left


class RandomSampler(Sampler, uniform.RandomSampler):
    __doc__ = uniform.RandomSampler.__doc__

    without_replacement = SamplerWithoutReplacement


class PrioritizedSampler(Sampler, prioritized.PrioritizedSampler):
    __doc__ = prioritized.PrioritizedSampler.__doc__

    @property
    def max_size(self) -> int:
        """``max_capacity``, by TorchRL's name."""
        return self.max_capacity

    def load_state_dict(self, state: dict[str, Any], order: Tensor | None = None) -> None:
        """Restore :meth:`state_dict`, after the storage has been restored; or TorchRL's, which has no random stream.

        TorchRL's trees may be tensors, arrays, lists, or its own objects.

        Raises:
            RuntimeError: TorchRL's state is given before there are rows.
            ValueError: TorchRL's state has fewer priorities than there are rows, or impossible ones.
        """
        if "_sum_tree" in state:
            storage, priorities = self.storage, priorities_of(state, self.max_priority_within_buffer)
            if not storage.initialized:
                raise RuntimeError("priorities belong to rows: restore the rows of the storage first")
            state = priorities.state(storage.max_size, len(storage), order)
        super().load_state_dict(state, order)


class SliceSampler(Sampler, slices.SliceSampler):
    __doc__ = slices.SliceSampler.__doc__

    def sample(self, storage: TensorStorage, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """Indices of slices, a tensor for each dimension of the storage, and the info. Gathers the rows for that."""
        drawn = self._ready(storage).draw(batch_size)
        coordinates = self.storage.unravel(drawn.positions)
        return (coordinates,) if self.storage.ndim == 1 else coordinates.unbind(-1), drawn.info


class SliceSamplerWithoutReplacement(SliceSampler, slices.SliceSamplerWithoutReplacement):
    __doc__ = slices.SliceSamplerWithoutReplacement.__doc__


SliceSampler.without_replacement = SliceSamplerWithoutReplacement


class PrioritizedSliceSampler(SliceSampler, PrioritizedSampler, prioritized_slices.PrioritizedSliceSampler):
    __doc__ = prioritized_slices.PrioritizedSliceSampler.__doc__


# States of TorchRL


class Priorities(NamedTuple):
    """A prioritized sampler of TorchRL's. ``weights`` are the transformed priorities, ``[max_capacity]``."""

    alpha: float
    beta: float
    eps: float
    max_priority: float | None
    weights: Tensor

    def state(self, capacity: int, size: int, order: Tensor | None = None) -> dict[str, Any]:
        """What :meth:`PrioritizedSampler.load_state_dict` takes, beside the type and the random stream.

        Args:
            capacity: of the storage.
            size: number of rows stored.
            order: the position in :attr:`weights` of each of them; None: its own.

        Raises:
            ValueError: there are more rows than weights.
        """
        weights = self.weights[:size].float()
        if weights.numel() < size:
            raise ValueError(f"the sampler has room for {weights.numel()} rows, the storage holds {size}")
        leaves = torch.zeros(capacity, dtype=torch.float32, device="cpu")
        leaves[:size] = weights if order is None else weights[order]
        scalars = torch.zeros(5, dtype=torch.float64, device="cpu")
        scalars[sum_tree.ALPHA], scalars[sum_tree.BETA], scalars[sum_tree.EPS] = self.alpha, self.beta, self.eps
        scalars[sum_tree.MAX_PRIORITY] = -1.0 if self.max_priority is None else self.max_priority
        tree = {"capacity": capacity, "leaves": leaves, "hyper": scalars}
        return {"alpha": self.alpha, "beta": self.beta, "eps": self.eps, "tree": tree}


def priorities_of(state: Mapping[str, Any], within_buffer: bool, where: str = "the state") -> Priorities:
    """The priorities in a ``state_dict()`` of TorchRL's sampler.

    Args:
        state: the state. Its trees may be tensors, arrays, lists, or TorchRL's own.
        within_buffer: whether new rows get the largest priority in the buffer. States without a version then have a
            transformed one as the largest, so that it is found anew.
        where: it is from, for messages.

    Raises:
        KeyError: an entry is missing.
        ValueError: a number is negative or not finite, or the state has a later version.
    """
    version = state.get("_schema_version", 0)
    if version not in (0, _VERSION):
        raise ValueError(f"{where} has version {version!r}, this reads up to {_VERSION}")
    alpha, beta, eps = (_number(state[f"_{name}"], name, where) for name in ("alpha", "beta", "eps"))
    weights = _leaves(state["_sum_tree"])
    if not bool(((weights >= 0) & weights.float().isfinite()).all()):
        raise ValueError(f"{where} holds weights that are negative or not finite")
    largest = state["_max_priority"]
    # With the position of its row.
    if isinstance(largest, (tuple, list)) or (isinstance(largest, Tensor) and largest.dim()):
        largest = largest[0]
    if version == 0 and within_buffer and largest is not None and alpha and bool(weights.any()):
        largest = max(float(weights.max()) ** (1 / alpha) - eps, 0.0)
    largest = None if largest is None else _number(largest, "max_priority", where)
    return Priorities(alpha, beta, eps, largest, weights)


def _leaves(tree: Any) -> Tensor:
    """The leaves of a tree: a tensor, an array, a list, or an object that has a size and can be indexed."""
    if isinstance(getattr(tree, "size", None), int) and not hasattr(tree, "shape"):
        tree = tree[torch.arange(tree.size, device="cpu")]
    return as_tensor(tree).detach().cpu().double().reshape(-1)


def read_priorities(folder: Path, root: Path | None = None) -> Priorities | None:
    """The priorities in the folder that a prioritized sampler's ``dumps`` has written; None: it has written none.

    Raises:
        ValueError: the files are damaged, or of a later version, or links lead to them from ``root``.
    """
    path = folder / _FILE
    if not os.path.lexists(path):
        return None
    content = {"_schema_version": 0, **dict.fromkeys(("_alpha", "_beta", "_eps")), **files.read_json(path, root)}
    largest, capacity = content.get("_max_priority"), _number(content.get("_max_capacity"), "max_capacity", str(path))
    if not isinstance(largest, list) or len(largest) != 2:
        raise ValueError(f"{path}: '_max_priority' must be a priority and an index, not {largest!r}")
    if not capacity.is_integer() or capacity >= 1 << 48:
        raise ValueError(f"{path}: 'max_capacity' must be a whole number, not {capacity}")
    tree = files.map_file(folder / "sumtree.memmap", torch.float64, (int(capacity),), writable=False, root=root)
    return priorities_of({**content, "_sum_tree": tree}, within_buffer=False, where=str(path))


def _number(value: Any, name: str, where: str) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (0 <= value < math.inf):
        raise ValueError(f"{where}: {name!r} must be a number of at least 0, not {value!r}")
    return float(value)
