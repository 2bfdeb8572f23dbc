"""Running statistics of rows, in float64 on their device, and batches scaled by them: Normalize, RewardScale."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Self, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from gpubuf.data.operation import operation
from gpubuf.data.processing.base import Process, as_keys, check_bounds, replaced, require_floating, tensor_at
from gpubuf.data.samplers.shards import gathered
from gpubuf.data.storage.containers import Data, batch_shape
from gpubuf.data.storage.end_bits import OWN
from gpubuf.data.storage.host_memory import to_device
from gpubuf.data.storage.layout import Key, Leaf, address, as_key, as_written
from gpubuf.kernels import moments as kernels
from gpubuf.kernels._registry import without_dispatch
from gpubuf.kernels.moments import ACTIVE, COUNT, M2, MEAN, PEAK, Rule

_update = without_dispatch(kernels.update, given=("source",))
returns = without_dispatch(kernels.returns, given=("rewards", "ends"))


def merged(a: Tensor, b: Tensor) -> Tensor:
    """The state of all numbers that two states are of.

    Chan, Golub, LeVeque, "Algorithms for Computing the Sample Variance: Analysis and Recommendations", The American
    Statistician 37 (1983): with ``d = mean_b - mean_a`` the mean moves by ``d * n_b / n`` and M2 is ``M2_a + M2_b + d *
    d * n_a * n_b / n``.
    """
    total = a[COUNT] + b[COUNT]
    share = b[COUNT] / total.clamp(min=1.0)
    step = b[MEAN] - a[MEAN]
    mean = torch.where(b[COUNT] > 0, a[MEAN] + step * share, a[MEAN])
    m2 = a[M2] + b[M2] + step * step * a[COUNT] * share
    return torch.stack((total, mean, m2, torch.maximum(a[PEAK], b[PEAK])))


def unmerged(whole: Tensor, part: Tensor) -> Tensor:
    """The state of the numbers that ``whole`` is of and ``part``, some of them, is not: :func:`merged` solved for b.

    The largest magnitude is that of ``whole``, of which nothing is lost where the two are merged again. Counts are
    exact. Of M2 as much is lost to rounding as ``whole`` is larger than the difference.
    """
    count = whole[COUNT] - part[COUNT]
    step = (whole[MEAN] - part[MEAN]) * (whole[COUNT] / count.clamp(min=1.0))
    m2 = whole[M2] - part[M2] - step * step * part[COUNT] * (count / whole[COUNT].clamp(min=1.0))
    found = torch.stack((count, part[MEAN] + step, m2.clamp(min=0.0), whole[PEAK]))
    return torch.where(part[COUNT] > 0, found, whole)


class Moments:
    """Count, mean and sum of squared deviations (M2) for each element, and what the kernels read of them.

    See :mod:`gpubuf.kernels.moments`, also for numbers that are not finite, and for counts beyond 2**53.

    Args:
        elements: of a row.
        device: of the rows.
        rule: how the statistics go on.

    Attributes:
        state: float64 ``[4, elements]``: count, mean, M2, largest magnitude.
        mean, factor: float32 ``[elements]``, at fixed addresses: ``factor = 1 / max(sqrt(M2 / count + eps), largest /
            peak_at)``. Before any number: 0 and 1.
        rule: float64 ``[5]``, on the device: see :class:`gpubuf.kernels.moments.Rule`.
        tickets: scratch of the kernel.
        shared: of the state what all ranks of a process group have, or None: see :meth:`RunningStatistics.all_reduce`.
    """

    shared: Tensor | None = None

    def __init__(self, elements: int, device: torch.device, rule: Rule) -> None:
        self.state, self.mean, self.factor, self.tickets = kernels.new_state(elements, device)
        self.rule = torch.tensor(rule, dtype=torch.float64, device="cpu").to(device)

    @property
    def elements(self) -> int:
        """Of a row."""
        return self.state.shape[1]

    @property
    def variance(self) -> Tensor:
        """Of the population (``M2 / count``), float64 ``[elements]``; 0 before any number."""
        return self.state[M2] / self.state[COUNT].clamp(min=1.0)

    def update(self, numbers: Tensor) -> None:
        """Take ``[n, elements]`` numbers in, of any dtype, on the device. One launch, no host sync."""
        _update(self.state, numbers, self.mean, self.factor, self.rule, self.tickets)

    def activate(self, active: bool) -> None:
        """Let the statistics move, or not: in place, so that captured graphs go by it. No host sync."""
        self.rule[ACTIVE].fill_(float(active))

    def put(self, state: Tensor) -> None:
        """Have ``state``, in place. No host sync."""
        self.state.copy_(state)
        # No rows: what is read of the state is computed anew.
        self.update(self.state[:0])

    def to(self, device: torch.device) -> Self:
        """These on ``device``: self if they are there."""
        if device == self.state.device:
            return self
        other = object.__new__(type(self))
        vars(other).update({name: v.to(device) if isinstance(v, Tensor) else v for name, v in vars(self).items()})
        return other

    def tensors(self) -> list[Tensor]:
        """The tensors."""
        return [self.state, self.mean, self.factor, self.rule, self.tickets]

    def state_dict(self) -> dict[str, Any]:
        """Copies of count, mean, M2 and largest magnitude, float64 ``[elements]``: :func:`merged` goes by them.

        And of :attr:`shared`, ``[4, elements]``, if there is that.
        """
        state = dict(zip(_NAMES, self.state.clone().unbind(), strict=True))
        return state if self.shared is None else {**state, "shared": self.shared.clone()}


_NAMES = ("count", "mean", "m2", "peak")


def packed(state: dict[str, Any]) -> Tensor:
    """The state of :meth:`Moments.state_dict`, as one tensor ``[4, elements]``.

    Raises:
        ValueError: it is none.
    """
    parts = [state.get(name) for name in _NAMES] if isinstance(state, dict) else []
    if not parts or not all(isinstance(p, Tensor) and p.dtype is torch.float64 and p.dim() == 1 for p in parts):
        raise ValueError(f"expected {', '.join(_NAMES)}, float64 [elements] each")
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len({len(tensor) for tensor in tensors}) > 1:
        raise ValueError(f"{', '.join(_NAMES)} have the lengths {[len(tensor) for tensor in tensors]}")
    found = torch.stack(tensors)
    if not bool(found.isfinite().all()) or bool((found[[COUNT, M2, PEAK]] < 0).any()):
        raise ValueError("statistics are finite, and counts, M2 and magnitudes not negative")
    return found


def merged_entries(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The :meth:`Moments.state_dict` of all numbers that several ranks have counted; what they share counts once.

    Raises:
        ValueError: they are of rows of different sizes, or don't share the same.
    """
    known = [entry for entry in entries if entry]
    if not known:
        return {}
    states, shared = [packed(entry) for entry in known], [entry.get("shared") for entry in known]
    first = shared[0]
    for state, other in zip(states, shared, strict=True):
        if state.shape != states[0].shape:
            raise ValueError(f"statistics of {state.shape[1]} and {states[0].shape[1]} elements can't be merged")
        same = other is first if other is None or first is None else torch.equal(other, first)
        if not same:
            raise ValueError("the ranks' statistics were not all-reduced together: they can't be merged")
    total = torch.zeros_like(states[0]) if first is None else first
    for state in states:
        total = merged(total, state if first is None else unmerged(state, first))
    found = dict(zip(_NAMES, total.unbind(), strict=True))
    return found if first is None else {**found, "shared": first}


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
        if until is not None and until < 1:
            raise ValueError(f"until must be at least 1, got {until}")
        self.keys = as_keys(keys)
        self.training = True
        self._update: Update = update
        self._rule = Rule(float(eps), peak_at, math.inf if until is None else float(until), gamma=gamma)
        self._moments: dict[Key, Moments] = {}
        self._shapes: dict[Key, tuple[int, ...]] = {}
        self._device = torch.device("cpu")
        self._served = self.serves()

    def _of(self, key: Key, elements: int) -> Moments:
        """The statistics of a key, which begin now if there are none."""
        found = self._moments.get(key)
        if found is None:
            rule = self._rule._replace(active=float(self.training))
            found = self._moments[key] = Moments(elements, self._device, rule)
        return found

    # Binding

    def check_leaf(self, leaf: Leaf, origin: Key) -> None:
        """Raise unless the batch has fractions there, as many per row as there are statistics of."""
        known = self._moments.get(origin)
        if known is not None and known.elements != leaf.n_elements:
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

    @operation
    def _read(self, key: Any, part: Callable[[Moments], Tensor]) -> Tensor:
        own = self._key(key)
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
        each goes on with its own. All ranks call it, equally often, after each has written a batch. One all-gather of
        32 bytes per element of a row and rank. Counts are exact, mean and variance to rounding (:func:`merged`).
        Running returns of :class:`RewardScale` are those of the rank's own environments.

        Raises:
            RuntimeError: nothing has been written.
        """
        known = [self._known(key) for key in self.keys]
        if process_group.size() == 1:
            return self
        own = [each.state if each.shared is None else unmerged(each.state, each.shared) for each in known]
        every = gathered(torch.cat([state.flatten() for state in own]), process_group)
        parts = every.split([state.numel() for state in own], 1)
        for moments, part in zip(known, parts, strict=True):
            state = torch.zeros_like(moments.state) if moments.shared is None else moments.shared
            for each in part:
                state = merged(state, each.view_as(state))
            moments.put(state)
            moments.shared = state
        return self

    def _check_elements(self, states: dict[Key, Tensor]) -> None:
        for key, state in states.items():
            known = self._moments.get(key)
            if known is not None and known.elements != state.shape[1]:
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
        found = self._checked(state)
        for key in self.keys:
            if key in found:
                own, shared = found[key]
                known = self._of(key, own.shape[1])
                known.put(own.to(known.state.device))
                known.shared = None if shared is None else shared.to(known.state.device, copy=True)
            elif key in self._moments:
                self._moments[key].put(torch.zeros_like(self._moments[key].state))
                self._moments[key].shared = None
        self.train(state["training"])

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise a ValueError unless ``state`` can be loaded."""
        if not isinstance(state.get("training"), bool):
            raise ValueError("the statistics don't say whether they were frozen")
        found = self._checked(state)
        self._check_elements({key: own for key, (own, _) in found.items()})
        for own, shared in found.values():
            if shared is not None:
                packed(
                    dict(zip(_NAMES, shared, strict=True)) if isinstance(shared, Tensor) and len(shared) == 4 else {}
                )
                if shared.shape != own.shape or bool((shared[COUNT] > own[COUNT]).any()):
                    raise ValueError("what the ranks share is not part of the statistics")

    def _checked(self, state: dict[str, Any]) -> dict[Key, tuple[Tensor, Any]]:
        """The states by key, and what all ranks have of each."""
        entries = state.get("moments") if isinstance(state, dict) else None
        if not isinstance(entries, dict) or len(entries) != len(self.keys):
            raise ValueError(
                f"expected statistics of {len(self.keys)} key(s), got {entries if entries is None else len(entries)}"
            )
        given: dict[Key, Any] = {key: entries.get(str(number)) for number, key in enumerate(self.keys)}
        return {key: (packed(entry), entry.get("shared")) for key, entry in given.items() if entry != {}}


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


ENDS: tuple[Key, ...] = (("next", "done"), ("next", "terminated"), ("next", "truncated"))


class RewardScale(RunningStatistics):
    """Divides rewards so that returns have a standard deviation of at most 1, and magnitudes of at most ``g_max``.

    It is a transform of batches (``transform=RewardScale(0.99)``), in plain PyTorch: it reads the divisor on the
    device, so that a captured graph follows it. What it divides by it learns from every write to the buffer.

    G is a running discounted return for each environment: ``G = gamma * G + reward``, and 0 again after a step that
    ends a trajectory. A reward becomes ``reward / max(sqrt(Var G + eps), max |G| / g_max)``, with the variance (of the
    population) and the largest magnitude over all steps ever written. The mean stays where it is. The stored rows stay
    as they are; a sum of rewards (n-step) is scaled as one, which is the sum of the scaled rewards.

    Before the first step rewards stay as they are. A reward that is not finite counts as 0 in G. Rewards of several
    elements have a G for each. While the statistics are frozen, G goes on. All of it is float64, on the device of the
    rows.

    The rows of a storage are steps of its environments (its dimensions beyond the first), one step of all of them after
    the other. A storage of one dimension has one environment, or ``envs`` of them, of which each write has whole steps.
    Writers in other processes have environments of their own, and a G for each. After a restore theirs begin at 0.

    Args:
        gamma: the discount of G: that of your loss.
        g_max: largest magnitude of a scaled return.
        keys: the key of the rewards, or a list of keys.
        end_keys: flags, any of which ends a trajectory. Default: those of done, terminated and truncated under "next"
            that are stored.
        update: ``"write"`` learns from every batch that is written, ``"manual"`` in :meth:`update` alone.
        eps: added to the variance.
        envs: number of environments in a storage of one dimension: row i is of environment ``i % envs``.
        until: an element learns nothing more once it has counted so many steps.

    Raises:
        ValueError: an argument is out of range.

    No method waits for the GPU but ``state_dict`` of a buffer.

    Source: FlashSAC (2026), after "Hyperspherical Normalization for Scalable Deep Reinforcement Learning" (Lee et al.
    2025), where ``g_max`` is 5.
    """

    def __init__(
        self,
        gamma: float,
        g_max: float = 5.0,
        *,
        keys: Any = ("next", "reward"),
        end_keys: Any = None,
        update: Update = "write",
        eps: float = 1e-8,
        envs: int | None = None,
        until: int | None = None,
    ) -> None:
        super().__init__(keys, update, eps, until, float(g_max), float(gamma))
        if not 0.0 <= gamma <= 1.0:
            raise ValueError(f"gamma must be between 0 and 1, got {gamma}")
        if not g_max > 0.0:
            raise ValueError(f"g_max must be above 0, got {g_max}")
        if envs is not None and envs < 1:
            raise ValueError(f"envs must be at least 1, got {envs}")
        self.gamma, self.g_max = float(gamma), float(g_max)
        self._given_ends = None if end_keys is None else as_keys(end_keys)
        self._ends: tuple[Key, ...] = ENDS
        self._envs = self.envs = envs
        #: For each key gamma * G of the newest step of every environment, float64 [envs, elements]; 0 after an end.
        self._returns: dict[Key, Tensor] = {}
        # The same of each writer in another process, by the number of its stream.
        self._of_writers: dict[int, dict[Key, Tensor]] = {}

    def serves(self) -> dict[Key, Key]:
        """The keys themselves: a reward has no twin under "next"."""
        return {key: key for key in self.keys}

    @operation
    def __call__(self, data: Any) -> Any:
        """A shallow copy of a batch with scaled rewards. No host sync.

        Raises:
            KeyError: a key is not there.
            RuntimeError: nothing was written to its buffer yet.
        """

        def scaled(rewards: Tensor, key: Key) -> Tensor:
            factor = self._known(key).factor.view(self._shapes.get(key, (-1,)))
            return (rewards * factor).to(rewards.dtype)

        return replaced(data, self._served, scaled, self.keys)

    # Binding

    def check(self, leaves: Sequence[Leaf]) -> None:
        """Raise unless the rows have these keys, and flags that say where trajectories end."""
        super().check(leaves)
        self._ends_among(leaves)

    def _ends_among(self, leaves: Sequence[Leaf]) -> tuple[Key, ...]:
        stored = {leaf.key for leaf in leaves}
        given = self._given_ends
        found = tuple(key for key in given or ENDS if key in stored)
        if not found or (given is not None and len(found) < len(given)):
            raise ValueError(
                f"RewardScale finds the ends of trajectories in {[as_written(key) for key in given or ENDS]}, but the "
                f"rows have the keys {', '.join(leaf.name for leaf in leaves)}: give it end_keys"
            )
        return found

    def bind(self, leaves: Sequence[Leaf], envs: int, device: torch.device) -> None:
        """Have statistics, and a return for each environment, on the device."""
        super().bind(leaves, envs, device)
        self._ends = self._ends_among(leaves)
        self._envs = envs if envs > 1 else self.envs or 1
        for key, moments in self._moments.items():
            shape, known = (self._envs, moments.elements), self._returns.get(key)
            if known is None or known.shape != shape:
                known = torch.zeros(shape, dtype=torch.float64, device="cpu")
            self._returns[key] = known.to(device)
        moved = {number: {key: one.to(device) for key, one in own.items()} for number, own in self._of_writers.items()}
        self._of_writers = moved

    def tensors(self) -> list[Tensor]:
        """Statistics, what is read of them, and returns."""
        streams = (self._returns, *self._of_writers.values())
        return [*super().tensors(), *(one for returns in streams for one in returns.values())]

    # Learning

    def check_write(self, data: Data, ndim: int) -> None:
        """Raise unless a batch has whole steps.

        Raises:
            ValueError: it ends within a step.
        """
        rows = math.prod(batch_shape(data, ndim))
        if self._envs is not None and rows % self._envs:
            raise ValueError(f"RewardScale was told of {self._envs} environments, but {rows} rows are written")

    @operation
    def update(self, data: Data) -> None:
        """Learn from a TensorDict of steps ``[T, E]``, or ``[n]`` with one batch dimension. No host sync.

        They follow the steps before. Don't give it those that the buffer learns from as well.

        Raises:
            ValueError: the steps are not whole.
        """
        ndim = len(data.batch_size)
        self.check_write(data, ndim)
        self.streams = OWN
        self._learn(data, ndim)

    def _learn(self, data: Data, ndim: int, stored: Tensor | None = None) -> None:
        # Returns add up along the stream: a row that was not stored is a step of it all the same.
        envs, rows = self._envs, math.prod(batch_shape(data, ndim))
        if not self._returns or envs is None:
            raise RuntimeError("RewardScale does not know its rows yet: write a batch to its buffer first")
        if not rows:
            return
        tensors = self._rows(data, (*self.keys, *self._ends))
        ends: Any = None
        for flags in tensors[len(self.keys) :]:
            ended = flags.reshape(rows // envs, envs, -1).ne(0)
            ended = ended.squeeze(-1) if ended.shape[-1] == 1 else ended.any(-1)
            ends = ended if ends is None else ends | ended
        for key, rewards in zip(self.keys, tensors, strict=False):
            moments = self._moments[key]
            numbers = rewards.reshape(rows // envs, envs, moments.elements)
            stops = [start for start, _ in self.streams[1:]] + [len(numbers)]
            found = [
                returns(self._before(stream)[key], numbers[start:stop], ends[start:stop], moments.rule)
                for (start, stream), stop in zip(self.streams, stops, strict=True)
            ]
            moments.update((found[0] if len(found) == 1 else torch.cat(found)).flatten(0, 1))

    def _before(self, stream: int) -> dict[Key, Tensor]:
        """``gamma * G`` of the newest step of a stream, by key."""
        if stream == OWN[0][1]:
            return self._returns
        if stream not in self._of_writers:
            self._of_writers[stream] = {key: torch.zeros_like(one) for key, one in self._returns.items()}
        return self._of_writers[stream]

    @operation
    def reset(self) -> None:
        """Begin a new trajectory in every environment. Statistics stay as they are. No host sync."""
        self._of_writers.clear()
        for returns in self._returns.values():
            returns.zero_()

    # State

    @operation
    def state_dict(self) -> dict[str, Any]:
        """Copies of statistics and returns."""
        returns = {str(number): self._returns[key].clone() for number, key in enumerate(self.keys) if self._returns}
        return {**super().state_dict(), "returns": returns}

    @operation
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`, in place. Returns of another number of environments begin anew.

        Raises:
            ValueError: it is of another number of keys, or of rows of another size. Nothing changes.
        """
        super().load_state_dict(state)
        self._of_writers.clear()
        for number, key in enumerate(self.keys):
            saved, known = state["returns"].get(str(number)), self._returns.get(key)
            if known is None and saved is not None:
                self._returns[key] = saved.to(self._device, copy=True)
            elif known is not None:
                known.copy_(saved if saved is not None and saved.shape == known.shape else torch.zeros_like(known))

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise a ValueError unless ``state`` can be loaded."""
        super().check_state(state)
        returns = state.get("returns")
        entries = returns.values() if isinstance(returns, dict) else [None]
        if not all(isinstance(e, Tensor) and e.dtype is torch.float64 and e.dim() == 2 for e in entries):
            raise ValueError("the running returns are not float64 [envs, elements]")

    def __repr__(self) -> str:
        return f"RewardScale(gamma={self.gamma}, g_max={self.g_max}, training={self.training})"
