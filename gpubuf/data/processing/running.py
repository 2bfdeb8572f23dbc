"""What objects with running statistics share: they learn from writes, or by hand; are frozen, saved and merged."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor

from gpubuf.data.lock import unless_compiling
from gpubuf.data.processing.base import Process, as_keys
from gpubuf.data.processing.moments import Moments, merged, packed
from gpubuf.data.storage.layout import Data, Key, Leaf, address, as_key, as_written
from gpubuf.data.storage.staging import to_device

Update = Literal["write", "manual"]


class RunningStatistics(Process):
    """Statistics of chosen keys, a :class:`Moments` each.

    Attributes:
        training: whether the statistics move: see :meth:`train` and :meth:`eval`.
    """

    slot = "normalises"

    def __init__(self, keys: Any, update: Update, eps: float, until: int | None) -> None:
        if update not in get_args(Update):
            raise ValueError(f"update must be one of {get_args(Update)}, got {update!r}")
        if not 0.0 < eps < math.inf:
            raise ValueError(f"eps must be finite and above 0, got {eps}")
        if until is not None and until < 1:
            raise ValueError(f"until must be at least 1, got {until}")
        self.keys = as_keys(keys)
        self.training = True
        self._update: Update = update
        self._eps = float(eps)
        self._until = math.inf if until is None else float(until)
        self._moments: dict[Key, Moments] = {}
        self._shapes: dict[Key, tuple[int, ...]] = {}
        self._device = torch.device("cpu")
        self._served = self.serves()

    def _new_moments(self, elements: int, device: torch.device) -> Moments:
        raise NotImplementedError

    # Binding

    def check(self, leaves: Sequence[Leaf]) -> None:
        """Raise unless the rows have these keys, with as many elements as the statistics that are there."""
        for leaf, _ in self.served_leaves(leaves):
            known = self._moments.get(self._served[leaf.key])
            if known is not None and known.elements != leaf.n_elements:
                raise ValueError(
                    f"{type(self).__name__} has statistics of {known.elements} elements for {leaf.name}, whose rows "
                    f"have {leaf.n_elements}"
                )

    def bind(self, leaves: Sequence[Leaf], envs: int, device: torch.device) -> None:
        """Have statistics on the device. Those that are there go on."""
        for key, leaf in self.found(leaves).items():
            known = self._moments.get(key)
            self._moments[key] = self._new_moments(leaf.n_elements, device) if known is None else known.to(device)
            self._shapes[key] = leaf.shape
        self._device = device

    def options(self, key: Key) -> dict[str, Any]:
        """The addresses of mean and factor."""
        if key not in self._served:
            return {}
        moments = self._moments[self._served[key]]
        return {"mean": address(moments.mean), "factor": address(moments.factor)}

    def tensors(self) -> list[Tensor]:
        """Statistics, and what is read of them."""
        return [tensor for moments in self._moments.values() for tensor in moments.tensors()]

    # Training

    def train(self, mode: bool = True) -> Self:
        """Let the statistics move, or not. In place: a captured graph goes by it. No host sync."""
        with unless_compiling(self.lock):
            for moments in self._moments.values():
                moments.activate(mode)
            self.training = mode
        return self

    def eval(self) -> Self:
        """Freeze the statistics. They still apply."""
        return self.train(False)

    def on_write(self, data: Data, ndim: int, stored: Tensor | None = None) -> None:
        """Learn from a batch that was written, with ``update="write"``."""
        if self._update == "write":
            self._learn(data, ndim, stored)

    def _learn(self, data: Data, ndim: int, stored: Tensor | None = None) -> None:
        raise NotImplementedError

    def _rows(self, data: Data, keys: Sequence[Key], at: Callable[[Data, Key], Tensor]) -> list[Tensor]:
        """The tensors of a batch under ``keys``, on the device of the statistics."""
        return to_device([at(data, key).detach() for key in keys], self._device)

    # Reading

    def count(self, key: Any = None) -> Tensor:
        """How many numbers were counted for each element of a row: float64, of the row's shape. A copy."""
        return self._read(key, lambda moments: moments.state[0].clone())

    def mean(self, key: Any = None) -> Tensor:
        """The mean of each element, float64, of the row's shape: a copy. ``key`` may be left out if there is one."""
        return self._read(key, lambda moments: moments.state[1].clone())

    def var(self, key: Any = None) -> Tensor:
        """The variance of each element, of the population: float64, of the row's shape. A copy."""
        return self._read(key, lambda moments: moments.variance)

    def factor(self, key: Any = None) -> Tensor:
        """What the numbers of each element are multiplied with: float32, of the row's shape. A copy."""
        return self._read(key, lambda moments: moments.factor.clone())

    def _read(self, key: Any, part: Callable[[Moments], Tensor]) -> Tensor:
        own = self._key(key)
        with unless_compiling(self.lock):
            return part(self._known(own)).view(self._shapes.get(own, (-1,)))

    def _key(self, key: Any) -> Key:
        if key is None:
            if len(self.keys) > 1:
                raise ValueError(f"which of the keys {[as_written(each) for each in self.keys]}?")
            return self.keys[0]
        found = self._served.get(as_key(key))
        if found is None:
            raise KeyError(f"{key!r} is none of the keys {[as_written(each) for each in self.keys]}")
        return found

    def _known(self, key: Key) -> Moments:
        if key not in self._moments:
            raise RuntimeError(f"{type(self).__name__} knows nothing yet: write a batch first, or load a state")
        return self._moments[key]

    # State

    def merge(self, other: Self | dict[str, Any]) -> Self:
        """Take in all that ``other`` has counted, exactly, and return self.

        Args:
            other: another object for the same keys, or its :meth:`state_dict`, as from another process. It must have
                counted other rows: what both have counted counts twice. Not changed.

        Raises:
            ValueError: it has other keys or shapes. No host sync for an object.
        """
        if isinstance(other, RunningStatistics):
            if other.keys != self.keys:
                raise ValueError(f"expected statistics of the keys {list(self.keys)}, got {list(other.keys)}")
            states = {key: moments.state for key, moments in other._moments.items()}
        else:
            states = self._checked(other)
        with unless_compiling(self.lock):
            for key, state in states.items():
                own = self._moments.get(key)
                if own is None:
                    own = self._moments[key] = self._new_moments(state.shape[1], self._device)
                elif own.elements != state.shape[1]:
                    raise ValueError(f"{as_written(key)!r} has {own.elements} elements, the other {state.shape[1]}")
                own.put(merged(own.state, state.to(own.state.device)))
        return self

    def state_dict(self) -> dict[str, Any]:
        """Copies of the statistics: ``"moments"`` has a dict of count, mean, M2 and largest magnitude a key.

        The entries are in the order of :attr:`keys`, and empty before the first write.
        """
        with unless_compiling(self.lock):
            entries = [self._moments[key].state_dict() if key in self._moments else {} for key in self.keys]
            return {"training": self.training, "moments": {str(number): entry for number, entry in enumerate(entries)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`, in place where there are statistics.

        Raises:
            ValueError: it is of another number of keys, or of rows of another size. Nothing changes.
        """
        self.check_state(state)
        found = self._checked(state)
        with unless_compiling(self.lock):
            for key in self.keys:
                known = self._moments.get(key)
                if key in found:
                    if known is None:
                        known = self._moments[key] = self._new_moments(found[key].shape[1], self._device)
                    known.put(found[key].to(known.state.device))
                elif known is not None:
                    known.put(torch.zeros_like(known.state))
            self.train(state["training"])

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise a ValueError unless ``state`` can be loaded."""
        if not isinstance(state.get("training"), bool):
            raise ValueError("the statistics don't say whether they were frozen")
        for key, found in self._checked(state).items():
            known = self._moments.get(key)
            if known is not None and known.elements != found.shape[1]:
                raise ValueError(
                    f"{as_written(key)!r} has {known.elements} elements, the statistics are of {found.shape[1]}"
                )

    def _checked(self, state: dict[str, Any]) -> dict[Key, Tensor]:
        entries = state.get("moments") if isinstance(state, dict) else None
        if not isinstance(entries, dict) or len(entries) != len(self.keys):
            raise ValueError(
                f"expected statistics of {len(self.keys)} key(s), got {entries if entries is None else len(entries)}"
            )
        given: dict[Key, Any] = {key: entries.get(str(number)) for number, key in enumerate(self.keys)}
        return {key: packed(entry) for key, entry in given.items() if entry != {}}
