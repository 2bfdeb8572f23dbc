"""Running statistics of rows, in float64 on their device, and batches normalised by them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Self, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from gpubuf.data.operation import operation
from gpubuf.data.processing.base import Process, as_keys, check_bounds, replaced, require_floating, tensor_at
from gpubuf.data.processing.moments import NAMES, Moments, merged, packed, unmerged
from gpubuf.data.samplers.shards import gathered
from gpubuf.data.storage.containers import Data
from gpubuf.data.storage.host_memory import to_device
from gpubuf.data.storage.layout import Key, Leaf, address, as_key, as_written
from gpubuf.kernels.moments import COUNT, MEAN, Rule

Update = Literal["write", "manual"]


class RunningStatistics(Process):
    """Statistics of chosen keys, a :class:`Moments` each.

    Args:
        keys, update, eps, until: see the subclasses.
        peak_at: the largest magnitude becomes at most so much.
        gamma: discount of returns.

    Attributes:
        training: whether the statistics move: see :meth:`train` and :meth:`eval`.
    """

    def __init__(
        self, keys: Any, update: Update, eps: float, until: int | None, peak_at: float = math.inf, gamma: float = 1.0
    ) -> None:
        if update not in get_args(Update):
            raise ValueError(f"update must be one of {get_args(Update)}, got {update!r}")
        if not 0.0 < eps < math.inf:
            raise ValueError(f"eps must be finite and above 0, got {eps}")
        most = math.inf if until is None else float(until)
        if most < 1:
            raise ValueError(f"until must be at least 1, got {until}")
        self.keys = as_keys(keys)
        self.training = True
        self._update: Update = update
        self._rule = Rule(float(eps), peak_at, most, gamma=gamma)
        self._moments: dict[Key, Moments] = {}
        self._shapes: dict[Key, tuple[int, ...]] = {}
        self._device = torch.device("cpu")
        self._served = self.serves()

    def _of(self, key: Key, elements: int) -> Moments:
        """The statistics of a key, which begin now if there are none."""
        if key not in self._moments:
            rule = self._rule._replace(active=float(self.training))
            self._moments[key] = Moments(elements, self._device, rule)
        return self._moments[key]

    # Binding

    def check_leaf(self, leaf: Leaf, origin: Key) -> None:
        """Raise unless the batch has fractions there, as many per row as there are statistics of."""
        known = self._moments.get(origin)
        if known and known.elements != leaf.n_elements:
            raise ValueError(
                f"{type(self).__name__} has statistics of {known.elements} elements for {leaf.name}, whose rows "
                f"have {leaf.n_elements}"
            )
        require_floating(type(self).__name__, leaf)

    def bind(self, leaves: Sequence[Leaf], envs: int, device: torch.device) -> None:
        """Have statistics on the device. Those that are there go on."""
        self._device = device
        for key, leaf in self.found(leaves).items():
            self._moments[key] = self._of(key, leaf.n_elements).to(device)
            self._shapes[key] = leaf.shape

    def tensors(self) -> list[Tensor]:
        """Statistics, and what is read of them."""
        return [tensor for moments in self._moments.values() for tensor in moments.tensors()]

    # Training

    @operation
    def train(self, mode: bool = True) -> Self:
        """Let the statistics move, or not. In place: a captured graph goes by it. No host sync."""
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
        for key, numbers in zip(self.keys, self._rows(data, self.keys), strict=True):
            moments = self._known(key)
            moments.update(_kept(numbers.reshape(-1, moments.elements), stored))

    def _rows(self, data: Data, keys: Sequence[Key]) -> list[Tensor]:
        """The tensors of a batch under ``keys``, on the device of the statistics."""
        found = [data] if isinstance(data, Tensor) and len(keys) == 1 else [tensor_at(data, key) for key in keys]
        return to_device([tensor.detach() for tensor in found], self._device)

    # Reading

    def count(self, key: Any = None) -> Tensor:
        """How many numbers were counted for each element of a row: float64, of the row's shape. A copy."""
        return self._read(key, lambda moments: moments.state[COUNT].clone())

    def mean(self, key: Any = None) -> Tensor:
        """The mean of each element, float64, of the row's shape: a copy. ``key`` may be left out if there is one."""
        return self._read(key, lambda moments: moments.state[MEAN].clone())

    def var(self, key: Any = None) -> Tensor:
        """The variance of each element, of the population: float64, of the row's shape. A copy."""
        return self._read(key, lambda moments: moments.variance)

    def factor(self, key: Any = None) -> Tensor:
        """What the numbers of each element are multiplied with: float32, of the row's shape. A copy."""
        return self._read(key, lambda moments: moments.factor.clone())

    @operation
    def _read(self, key: Any, part: Callable[[Moments], Tensor]) -> Tensor:
        own = self._key(key)
        return part(self._known(own)).view(self._shapes.get(own, (-1,)))

    def _key(self, key: Any) -> Key:
        if key is None:
            if len(self.keys) > 1:
                raise ValueError(f"which of the keys {[as_written(each) for each in self.keys]}?")
            return self.keys[0]
        if as_key(key) not in self._served:
            raise KeyError(f"{key!r} is none of the keys {[as_written(each) for each in self.keys]}")
        return self._served[as_key(key)]

    def _known(self, key: Key) -> Moments:
        if key not in self._moments:
            raise RuntimeError(
                f"{type(self).__name__} knows nothing yet: give it to a buffer, and write a batch, or load a state"
            )
        return self._moments[key]

    # State

    @operation
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
            states = {key: state for key, (state, _) in self._checked(other).items()}
        self._check_elements(states)
        for key, state in states.items():
            own = self._of(key, state.shape[1])
            own.put(merged(own.state, state.to(own.state.device)))
        return self

    @operation
    def all_reduce(self, process_group: dist.ProcessGroup) -> Self:
        """Take in all that the other ranks have counted since the last call, and return self. No host sync with NCCL.

        Afterwards all ranks have the same bits: the statistics of all rows that any of them has written. In between
        each goes on with its own. All ranks call it, equally often; one that has written nothing takes part all the
        same. One all-gather of 32 bytes per element of a row and rank; the first call has another one of 8 bytes per
        key, and synchronises. Counts are exact, mean and variance to rounding (:func:`merged`). Running returns of
        :class:`RewardScale` are those of the rank's own environments.

        Raises:
            RuntimeError: no rank has written anything.
            ValueError: the ranks have rows of different sizes.
        """
        alone = process_group.size() == 1
        if not alone and any(key not in self._moments or self._moments[key].shared is None for key in self.keys):
            self._agree(process_group)
        known = [self._known(key) for key in self.keys]
        if alone:
            return self
        device = self._meeting_place(process_group)
        own = [unmerged(each.state, each.common) for each in known]
        every = gathered(torch.cat([state.flatten() for state in own]).to(device), process_group)
        parts = every.split([state.numel() for state in own], 1)
        for moments, part in zip(known, parts, strict=True):
            state = moments.common
            for each in part.to(state.device):
                state = merged(state, each.view_as(state))
            moments.put(state)
            moments.shared = state
        return self

    def _meeting_place(self, process_group: dist.ProcessGroup) -> torch.device:
        """Where a group takes tensors from a rank. One that has written nothing knows no GPU of its own."""
        by_nccl = dist.get_backend(process_group) == "nccl" and self._device.type == "cpu"
        return torch.device("cuda", torch.cuda.current_device()) if by_nccl else self._device

    def _agree(self, process_group: dist.ProcessGroup) -> None:
        """Have statistics of all keys that another rank has some of.

        Raises:
            ValueError: they are of different sizes.
        """
        own = [self._moments[key].elements if key in self._moments else 0 for key in self.keys]
        sizes = torch.tensor(own, device="cpu").to(self._meeting_place(process_group))
        for key, *found in zip(self.keys, *gathered(sizes, process_group).tolist(), strict=True):
            elements = set(found) - {0}
            if len(elements) > 1:
                raise ValueError(f"the ranks have rows of {sorted(elements)} elements under {as_written(key)!r}")
            for size in elements:
                self._of(key, size)

    def _check_elements(self, states: dict[Key, Tensor]) -> None:
        for key, state in states.items():
            known = self._moments.get(key)
            if known and known.elements != state.shape[1]:
                raise ValueError(
                    f"{as_written(key)!r} has {known.elements} elements, the statistics are of {state.shape[1]}"
                )

    @operation
    def state_dict(self) -> dict[str, Any]:
        """Copies of the statistics: ``"moments"`` has a dict of count, mean, M2 and largest magnitude a key.

        The entries are in the order of :attr:`keys`, and empty before the first write.
        """
        entries = [self._moments[key].state_dict() if key in self._moments else {} for key in self.keys]
        return {"training": self.training, "moments": {str(number): entry for number, entry in enumerate(entries)}}

    @operation
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`, in place where there are statistics.

        Raises:
            ValueError: it is of another number of keys, or of rows of another size. Nothing changes.
        """
        self.check_state(state)
        for key, (own, shared) in self._checked(state).items():
            known = self._of(key, own.shape[1])
            known.put(own.to(known.state.device))
            known.shared = None if shared is None else shared.to(known.state.device, copy=True)
        self.train(state["training"])

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise a ValueError unless ``state`` can be loaded."""
        if not isinstance(state.get("training"), bool):
            raise ValueError("the statistics don't say whether they were frozen")
        found = self._checked(state)
        self._check_elements({key: own for key, (own, _) in found.items()})
        for own, shared in found.values():
            if shared is not None:
                packed(dict(zip(NAMES, shared, strict=True)) if isinstance(shared, Tensor) and len(shared) == 4 else {})
                if shared.shape != own.shape or bool((shared[COUNT] > own[COUNT]).any()):
                    raise ValueError("what the ranks share is not part of the statistics")

    def _checked(self, state: dict[str, Any]) -> dict[Key, tuple[Tensor, Any]]:
        """The states by key, and what all ranks have of each."""
        entries = state.get("moments") if isinstance(state, dict) else None
        if not isinstance(entries, dict) or len(entries) != len(self.keys):
            raise ValueError(
                f"expected statistics of {len(self.keys)} key(s), got {entries if entries is None else len(entries)}"
            )
        found: dict[Key, tuple[Tensor, Any]] = {}
        for number, key in enumerate(self.keys):
            entry: Any = entries.get(str(number))
            if entry != {}:
                found[key] = packed(entry), entry.get("shared")
            elif key in self._moments:
                # It was saved before the first write.
                found[key] = torch.zeros_like(self._moments[key].state), None
        return found


class Normalize(RunningStatistics):
    """Gives every element of chosen keys mean 0 and variance 1, in the launch that copies the rows (``process=``).

    A number becomes ``(number - mean) / sqrt(variance + eps)``, with the running mean and variance of its element of a
    row, over all rows ever written (of the population; also of rows that have been overwritten since). The stored rows
    stay as they are, and a batch has the statistics of the moment at which it was drawn: for a prefetched one that is
    before you ask for it. Statistics are float64 on the device of the rows.

    A root key stands for its twin under "next" too: with the same statistics, which learn from the root key alone.
    Statistics are of rows as they are written. As ``transform=`` it does the same in plain PyTorch, in its turn among
    the transforms.

    * Before the first row nothing changes. After one row, and for elements that never change, the variance is 0: what
      equals the mean becomes 0, and any other number is multiplied by ``1 / sqrt(eps)``. ``clip`` bounds it.
    * Numbers that are not finite are not counted, for their element. In the batch they are what the formula gives.
    * Counts are float64: exact to 2**53 rows, after which the statistics stay as they are.
    * A write that was interrupted, by Ctrl-C for example, may be missing in the statistics.

    Call it on data that does not come from the buffer, such as the observations that you act on.

    Args:
        keys: a key, or a list of keys, of floating-point numbers in the batch.
        update: ``"write"`` learns from every batch that is written, ``"manual"`` in :meth:`update` alone.
        eps: added to the variance.
        clip: normalised numbers are cut to ``-clip .. clip``, or to ``(low, high)``; None: not.
        until: an element learns nothing more once it has counted so many rows.

    Raises:
        ValueError: an argument is out of range.

    No method waits for the GPU but ``state_dict`` of a buffer. A write takes one launch more for each key.

    Source of the update: Chan, Golub, LeVeque, "Algorithms for Computing the Sample Variance: Analysis and
    Recommendations", The American Statistician 37 (1983).
    """

    def __init__(
        self,
        keys: Any,
        *,
        update: Update = "write",
        eps: float = 1e-8,
        clip: float | tuple[float, float] | None = None,
        until: int | None = None,
    ) -> None:
        super().__init__(keys, update, eps, until)
        clip = math.inf if clip is None else clip
        self.low, self.high = check_bounds(*(clip if isinstance(clip, tuple) else (-clip, clip)))

    def options_of(self, leaf: Leaf, origin: Key) -> dict[str, Any]:
        """The addresses of mean and factor, and the bounds."""
        mean, factor = (address(each) for each in (self._moments[origin].mean, self._moments[origin].factor))
        return {"mean": mean, "factor": factor, "low": self.low, "high": self.high}

    @operation
    def update(self, data: Data) -> None:
        """Learn from a batch of any shape: a TensorDict, or a tensor if there is one key. No host sync.

        Frozen statistics stay as they are. Don't give it rows that the buffer learns from as well.
        """
        self._learn(data, 0)

    def __call__(self, data: Data) -> Data:
        """Normalise and clip data that is not from the buffer, as a batch is. No host sync.

        Args:
            data: a tensor ``[..., *row]``, if there is one key; or a TensorDict of any batch size, in which those of
                the keys, and of their twins under "next", that are there are replaced. The data itself is not changed.

        Returns:
            A tensor, or a shallow copy of the TensorDict. Dtype and device are those of the data, which must be where
            the statistics are.
        """
        if isinstance(data, Tensor):
            return self._normalised(data, self._key(None))
        return replaced(data, self._served, self._normalised)

    @operation
    def _normalised(self, numbers: Tensor, key: Key) -> Tensor:
        moments = self._known(key)
        shape = self._shapes.get(key, (moments.elements,))
        computed = numbers if numbers.dtype is torch.float64 else numbers.float()
        computed = (computed - moments.mean.view(shape)) * moments.factor.view(shape)
        return computed.clamp(self.low, self.high).to(numbers.dtype)

    def __repr__(self) -> str:
        return f"Normalize({list(self.keys)}, update={self._update!r}, training={self.training})"


def _kept(numbers: Tensor, stored: Tensor | None) -> Tensor:
    """``[n, elements]`` numbers without those of rows that were not stored. No host sync."""
    if stored is None:
        return numbers
    if stored.is_cpu:
        return numbers[stored]
    # How many they are is not known here; numbers that are not finite are left out.
    exact = numbers.double()
    return torch.where(stored.unsqueeze(1), exact, torch.full_like(exact, math.nan))
