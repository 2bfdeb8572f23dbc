"""AdamW in one launch per 64 parameters, with gradient clipping, unit rows and target averaging."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import profiler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from gpubuf.data.recording import CaptureError, at_replays, capturing, current
from gpubuf.kernels import optim
from gpubuf.kernels._registry import is_lazy, without_dispatch
from gpubuf.kernels.optim import DTYPES, MAX_ENTRIES, address, entry, moment_dtype, tiles_of
from gpubuf.objectives.base import LossModule


def _sent(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of what the host has."""
    # Not waited for: CUDA has read memory that is not pinned when the call returns.
    return torch.tensor(values, dtype=dtype, device="cpu").to(device, non_blocking=True)


class Hyperparameters:
    """The hyperparameters of all groups on the device, and what was sent there.

    Attributes:
        values: float64 ``[G, 9]``, see :mod:`gpubuf.kernels.optim`.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], max_norm: float | None, device: torch.device) -> None:
        self._device = device
        self._sent = [self._on_host(group, max_norm) for group in groups]
        rows = [[0.0 if value is None else value for value in _columns(sent)] for sent in self._sent]
        self.values = _sent(rows, torch.float64, device)

    def _on_host(self, group: dict[str, Any], max_norm: float | None) -> tuple[float | None, ...]:
        """The values that the host knows, in the order of the columns; None for those in tensors on the device."""
        lr, tau, (beta1, beta2) = group["lr"], group["tau"], group["betas"]
        if isinstance(lr, Tensor):
            lr = None if lr.device == self._device else float(lr)
        if isinstance(tau, Tensor):
            tau = None if tau.device == self._device else float(tau)
        return lr, beta1, beta2, group["eps"], group["weight_decay"], tau, max_norm

    def send(self, groups: Sequence[dict[str, Any]], max_norm: float | None) -> None:
        """Send what has changed on the host."""
        for row, group in enumerate(groups):
            found, sent = self._on_host(group, max_norm), self._sent[row]
            if found != sent:
                for column, (new, old) in enumerate(zip(_columns(found), _columns(sent), strict=True)):
                    if new is not None and new != old:
                        self.values[row, column].fill_(new)
                self._sent[row] = found

    def on_device(self, groups: Sequence[dict[str, Any]]) -> list[Tensor | None]:
        """The tensors that :meth:`copy_tensors` reads, None in the places of others."""
        found: list[Tensor | None] = []
        for group in groups:
            lr, tau = group["lr"], group["tau"]
            found.append(lr if isinstance(lr, Tensor) and lr.device == self._device else None)
            found.append(tau if isinstance(tau, Tensor) and tau.device == self._device else None)
        return found

    def copy_tensors(self, groups: Sequence[dict[str, Any]]) -> None:
        """Copy those that are tensors on the device; a graph has these copies."""
        for row, sent in enumerate(self._sent):
            if sent[0] is None:
                self.values[row, optim.LR].copy_(groups[row]["lr"].reshape(()))
            if sent[5] is None:
                self.values[row, optim.TAU].copy_(groups[row]["tau"].reshape(()))


def _columns(values: tuple[float | None, ...]) -> list[float | None]:
    """A row of hyperparameters."""
    lr, beta1, beta2, eps, weight_decay, tau, max_norm = values
    logarithms = [-math.inf if not beta else math.log2(beta) for beta in (beta1, beta2)]
    return [lr, beta1, beta2, eps, weight_decay, tau, *logarithms, math.inf if max_norm is None else max_norm]


class Watch:
    """Notices that tensors whose addresses are in a table were moved or replaced.

    Args:
        params: of the optimiser.
        pairs: (target, source) of all targets.
        source: where the pairs come from; a loss may look its tensors up again.
        state: of the optimiser.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        pairs: Sequence[tuple[Tensor, Tensor]],
        source: LossModule | Sequence[tuple[Tensor, Tensor]] | None,
        state: dict[Tensor, Any],
    ) -> None:
        # Fake tensors have no addresses, and never move.
        self._fake = any(isinstance(tensor, FakeTensor) for tensor in params)
        self._params = params
        self._loss = source if isinstance(source, LossModule) else None
        self._look_up(pairs)
        self._places = self._now()
        self.watch_state(state)

    def watch_state(self, state: dict[Tensor, Any]) -> None:
        """The state has the tensors that it had, in another dictionary."""
        self._state, self._states = state, len(state)

    def _look_up(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._tensors = [*self._params, *(tensor for pair in pairs for tensor in pair)]
        # Others have one layout.
        self._matrices = [tensor for tensor in self._tensors if tensor.ndim > 1]
        self._version = None if self._loss is None else self._loss.links_version

    def _now(self) -> list[Any]:
        if self._fake:
            return []
        return [*map(Tensor.data_ptr, self._tensors), *map(Tensor.stride, self._matrices)]

    def unchanged(self, state: dict[Tensor, Any]) -> bool:
        """Whether all tensors are where they were, and the optimiser has the same state."""
        if self._loss is not None and self._loss.links_version != self._version:
            # Loading a state looks the tensors up again, and finds the same ones.
            self._look_up(self._loss.target_pairs())
        return self._now() == self._places and state is self._state and len(state) == self._states


@dataclass
class Place:
    """One entry of a bucket.

    Attributes:
        param: the parameter, or a tensor that is only the source of a target.
        group: its parameter group; None if it is only a source.
        target: follows it, or None.
        rows: (the dimension along which a row lies, its length) of a weight whose rows have one, or None.
        moments: first and second moment; None if it is only a source.
    """

    param: Tensor
    group: int | None
    target: Tensor | None = None
    rows: tuple[int, float] | None = None
    moments: tuple[Tensor, Tensor] | None = None


class Bucket:
    """Up to 64 entries of one dtype: one launch, or PyTorch's fused AdamW.

    Attributes:
        places: the entries; those that are only sources come last.
        params: what the operation writes, as ``steps``, float32 ``[E]``.
        table, tiles: see :data:`gpubuf.kernels.optim.adamw`.
        state: the arguments of that operation that stay, from ``steps`` to ``unit_rows``.
        known: the place of each parameter, by its id.
        fusible: whether another kernel can make its step.
    """

    def __init__(self, places: list[Place], device: torch.device) -> None:
        self.places = places
        self._optimised = [(place.param, place.group) for place in places if place.group is not None]
        self._others = [None] * (len(places) - len(self._optimised))
        self.params = [place.param.detach() for place in places]
        self._averages = [place.target is not None for place in places]
        self._stays = [False] * len(places)
        # Elements of each parameter, and -1 if it is not contiguous.
        self._contiguous = [param.numel() if param.is_contiguous() else -1 for param, _ in self._optimised]
        self._device_index = self._optimised[0][0].get_device() if self._optimised else -1
        self._dtype = places[0].param.dtype
        entries = [
            entry(p, place.moments, place.target, place.group or 0, *(place.rows or (None, 1.0)))
            for p, place in zip(self.params, places, strict=True)
        ]
        self.table, self.tiles = (_sent(each, torch.int64, device) for each in (entries, tiles_of(entries)))
        self.steps = torch.zeros(len(places), dtype=torch.float32, device=device)
        self.state = (
            self.steps,
            torch.zeros(1, dtype=torch.int64, device=device),
            self.params,
            [moment for place in places for moment in place.moments or ()],
            [place.target.detach() for place in places if place.target is not None],
            not any(address & 15 for each in entries for address in each[:4]),
            any(place.rows is not None for place in places),
        )
        self.known = {id(place.param): i for i, place in enumerate(places)}
        *_, aligned, unit_rows = self.state
        self.fusible = aligned and not unit_rows and self._dtype is torch.float32

    def gradients(self, chosen: frozenset[int] | None) -> list[Tensor | None]:
        """One for each entry, with its parameter's strides; None where there is none, or the group is not chosen."""
        found = [param.grad if chosen is None or group in chosen else None for param, group in self._optimised]
        dtype, device = self._dtype, self._device_index
        for i, grad in enumerate(found):
            # What a kernel reads by address has to be what the parameter is; the commonest case is asked for first.
            if grad is not None and not (
                grad.dtype is dtype
                and grad.is_contiguous()
                and grad.numel() == self._contiguous[i]
                and grad.get_device() == device
                and not grad.is_neg()
            ):
                found[i] = _as_parameter(grad, self._optimised[i][0])
        return [*found, *self._others] if self._others else found

    def moving(self, chosen: frozenset[int] | None, targets: bool) -> list[bool]:
        """For each entry, whether its target moves: those of other groups stay where they are."""
        if not targets:
            return self._stays
        if chosen is None:
            return self._averages
        return [place.target is not None and (place.group is None or place.group in chosen) for place in self.places]


def _as_parameter(grad: Tensor, param: Tensor) -> Tensor:
    """The gradient with the parameter's strides: itself, or a copy."""
    if grad.layout is not torch.strided:
        raise RuntimeError("gpubuf.optim.AdamW does not support sparse gradients")
    if grad.shape != param.shape or grad.dtype is not param.dtype or grad.device != param.device:
        raise ValueError(
            f"a gradient must be like its parameter: expected {param.dtype} {list(param.shape)} on {param.device}, got "
            f"{grad.dtype} {list(grad.shape)} on {grad.device}"
        )
    if same_layout(grad, param) and not is_lazy(grad):
        return grad
    return torch.empty_strided(param.shape, param.stride(), dtype=grad.dtype, device=grad.device).copy_(grad)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie side by side, in any order of the dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether two dense tensors have the same elements at the same distance from their addresses."""
    if a.shape != b.shape or a.dtype is not b.dtype or a.device != b.device:
        return False
    return all(x == y or size == 1 for x, y, size in zip(a.stride(), b.stride(), a.shape, strict=True))


def check_parameter(param: Tensor, device: torch.device) -> None:
    """Raise TypeError or ValueError unless the step can work on ``param``."""
    if param.dtype not in DTYPES:
        raise TypeError(f"parameters must be float32, float64 or bfloat16, got {param.dtype}")
    if param.device != device:
        raise ValueError(f"all parameters must be on one device, got {device} and {param.device}")
    if not is_dense(param):
        raise ValueError(f"parameters must be dense, got strides {param.stride()} for shape {list(param.shape)}")


def make_buckets(places: Sequence[Place], device: torch.device) -> list[Bucket]:
    """As few buckets as possible. Entries that are only sources come last in each of them."""
    ordered = sorted(places, key=lambda place: place.group is None)
    buckets = []
    for dtype in dict.fromkeys(place.param.dtype for place in ordered):
        alike = [place for place in ordered if place.param.dtype is dtype]
        buckets += [Bucket(alike[i : i + MAX_ENTRIES], device) for i in range(0, len(alike), MAX_ENTRIES)]
    return buckets


def arrange(places: list[Place], pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> list[Bucket]:
    """The buckets of some parameters and of pairs (target, source), in the order of their launches.

    A target belongs to the entry of its source if that is a parameter. Other sources have entries of their own: in
    later buckets if they share memory with a parameter, as the programs of a launch run in any order.
    """
    by_identity = {id(place.param): place for place in places}
    by_address = {address(place.param): place for place in places if address(place.param)}
    memory = {place.param.untyped_storage()._cdata for place in places}
    apart: list[Place] = []
    later: list[Place] = []
    for target, source in pairs:
        place = by_identity.get(id(source)) or by_address.get(address(source))
        if place is not None and place.target is None and same_layout(place.param, source):
            place.target = target
        else:
            shared = source.untyped_storage()._cdata in memory
            (later if shared else apart).append(Place(source, None, target))
    return [*make_buckets([*places, *apart], device), *make_buckets(later, device)]


_kernel = without_dispatch(optim.adamw, trusted=True)

Fused = Callable[..., None]
"""Makes a step, of (table, hyperparameters, whether targets move, steps, ticket, params, moments, targets): see
:data:`gpubuf.kernels.optim.adamw`. Entries that it leaves alone have no gradient."""

#: Keys of torch.optim.AdamW that say how, and not what, it computes. They are kept for state dictionaries.
_FOREIGN: dict[str, Any] = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay, weight rows of fixed length and averaged targets, in one pass over memory.

    One launch on a GPU, and PyTorch's fused AdamW on a CPU, for up to 64 parameters of one dtype. For each parameter p
    with gradient g, in its t-th step::

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g^2
        p = p * (1 - lr * weight_decay) - lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
        p = p * norm / |p| for every row of p     if the weight is in unit_rows
        target += tau * (p - target)              if p has a target

    (Loshchilov & Hutter, arXiv 1711.05101; with ``weight_decay=0`` it is Adam, Kingma & Ba, arXiv 1412.6980. The last
    line is that of :class:`~gpubuf.objectives.SoftUpdate`, which is not needed then.)

    It takes the place of ``torch.optim.AdamW``: parameter groups, learning rate schedulers, hooks and state
    dictionaries work, and each loads the state of the other. The numbers are the same up to rounding, and the same bits
    in every run. A gradient that is None skips its parameter; its target moves all the same. A gradient that is not
    finite spreads, as in torch. On a CPU moments of units that learn no more end among the denormal numbers,
    which make a step several times as long, unless ``torch.set_flush_denormal(True)`` was called.

    :meth:`step` never waits for the GPU, and can be captured in a graph. The kernels read steps and hyperparameters on
    the device. :func:`gpubuf.capture` sends those that were changed before each replay; with a graph of your own call
    :meth:`refresh`. Graphs contain a :meth:`step` with fixed ``groups`` and ``targets``: capture one for each choice.
    Call it outside of compiled code.

    Args:
        params: parameters, or groups of them; float32, float64 or bfloat16, on one device. The moments and the
            arithmetic of bfloat16 parameters are float32.
        lr: learning rate, a number or a tensor of one element, which may be on the device.
        betas: decay of the two moments.
        eps: added to the root.
        weight_decay: the share of lr that a parameter loses at each step.
        unit_rows: weights whose rows are scaled to a fixed length after each step: modules, searched for those with
            ``unit_rows = True`` (see :mod:`gpubuf.modules`), or tuples ``(weight, dim)`` and ``(weight, dim, norm)``,
            where a row lies along ``dim`` and ``norm`` (1) is its length. A row of zeros stays. The first step
            brings rows of any length to theirs.
        targets: a loss whose ``target_*_params`` follow its ``*_params``, or pairs (target, source). Sources may be any
            tensors, not only parameters of this optimiser. Targets begin as they are. Integers (counters) are copied.
        tau: share of a target that is replaced at each step, in [0, 1].
        max_grad_norm: clip the gradients to this norm, that of all parameters together; None: don't. Gradients are
            scaled as they are read and stay what they were. A second operation computes the norm.

    Attributes:
        grad_norm: the norm of the gradients of the last step, before clipping, ``[]`` on the device; None without
            ``max_grad_norm``.

    Raises:
        TypeError: a parameter has another dtype.
        ValueError: a hyperparameter is out of range; ``targets`` and ``tau`` do not come together; parameters are on
            several devices; a weight of ``unit_rows`` is no parameter of this optimiser; a target and its source have
            different shapes, dtypes or strides.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        unit_rows: nn.Module | Iterable[nn.Module | tuple[Any, ...]] = (),
        targets: LossModule | Iterable[tuple[Tensor, Tensor]] | None = None,
        tau: float | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        if (targets is None) != (tau is None):
            raise ValueError("targets and tau go together: give both, or neither")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be positive, got {max_grad_norm}")
        self.max_grad_norm = max_grad_norm
        self.grad_norm: Tensor | None = None
        self._source = targets if targets is None or isinstance(targets, LossModule) else list(targets)
        if isinstance(targets, LossModule):
            # It is the updater that the loss would warn of missing.
            targets._has_update_associated = dict.fromkeys(targets._has_update_associated, True)
        self._buckets: list[Bucket] | None = None
        values = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "tau": 0.0 if tau is None else tau,
        }
        super().__init__(params, {**values, **_FOREIGN})
        self._units = _unit_weights(unit_rows)
        known = {id(param) for param in self._parameters()}
        if any(id(weight) not in known for weight, _ in self._units):
            raise ValueError(
                "a weight of unit_rows is no parameter of this optimiser: of stacked or copied networks, give "
                "(parameter, dim) instead of the module"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As ``torch.optim.Optimizer``; a captured graph must be captured anew."""
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
            device = self.param_groups[0]["params"][0].device
            for param in self.param_groups[-1]["params"]:
                check_parameter(param, device)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        self._buckets = None

    # The step

    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        groups: Collection[int] | None = None,
        targets: bool = True,
        fused: Fused | None = None,
    ) -> float | None:
        """One step of all parameters that have a gradient, and of all targets. No host sync.

        Args:
            closure: computes the loss anew and returns it.
            groups: numbers of the parameter groups to update; None: all. Parameters of other groups, their moments,
                steps and targets stay as they are, whatever their gradients: for policies that are updated more rarely
                than critics. Targets whose source belongs to no group move.
            targets: whether targets move.
            fused: makes the step in place of the optimiser's launch, from gradients that nobody has stored; see
                :meth:`places_of`. Then ``closure`` and ``groups`` are None.

        Returns:
            The closure's loss.

        Raises:
            ValueError: there is no such group, or a gradient does not fit its parameter.
            RuntimeError: a gradient is sparse.
        """
        if (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
            or profiler._is_profiler_enabled
        ):
            return _observed(self, closure, groups=groups, targets=targets, fused=fused)
        return self._step(closure, groups=groups, targets=targets, fused=fused)

    # torch would wrap the step for hooks and profilers, which takes longer than all else here.
    step.hooked = True  # type: ignore[attr-defined]

    def _step(
        self,
        closure: Callable[[], float] | None,
        *,
        groups: Collection[int] | None,
        targets: bool,
        fused: Fused | None,
    ) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        chosen = None if groups is None else self._chosen(groups)
        before = torch.is_grad_enabled()
        # What `torch.no_grad` does, in a tenth of the time.
        torch._C._set_grad_enabled(False)
        try:
            self._update(chosen, targets, fused)
        finally:
            torch._C._set_grad_enabled(before)
        return loss

    def places_of(self, params: Iterable[Tensor]) -> list[int] | None:
        """The entries of ``params`` in the table of a step that another kernel can make: :data:`gpubuf.kernels.optim`.

        None where it can't: a step is more than one launch, clips, normalises rows or copies, moves targets of other
        entries, or somebody watches or overrides it.
        """
        buckets = self._ready()
        watching = self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks
        watched = any((*watching, _global_optimizer_pre_hooks, _global_optimizer_post_hooks))
        own = type(self).step is AdamW.step and not watched
        if not own or len(buckets) > 1 or self.max_grad_norm is not None or self._copied[0]:
            return None
        (bucket,) = buckets
        places = [bucket.known[id(param)] for param in params]
        moves = any(moving and i not in places for i, moving in enumerate(bucket.moving(None, True)))
        return None if moves or not bucket.fusible else places

    def _update(self, chosen: frozenset[int] | None, targets: bool, fused: Fused | None) -> None:
        buckets = self._ready()
        recording = current.recording
        if recording is not None:
            recording.holds(self, "_buckets")
            read = self._hyper.on_device(self.param_groups)
            recording.before(self, functools.partial(self._before_replay, self.max_grad_norm is not None, read))
        elif not capturing():
            self._hyper.send(self.param_groups, self.max_grad_norm)
        self._hyper.copy_tensors(self.param_groups)
        if fused is not None:
            (bucket,) = buckets
            fused(bucket.table, self._hyper.values, targets, *bucket.state[:-2])
            torch._C._increment_version(bucket.params)
            return
        gradients = [bucket.gradients(chosen) for bucket in buckets]
        norm = None if self.max_grad_norm is None else self._norm(gradients)
        for bucket, grads in zip(buckets, gradients, strict=True):
            moving = bucket.moving(chosen, targets)
            _kernel(bucket.table, bucket.tiles, self._hyper.values, grads, moving, norm, *bucket.state)
            # Autograd does not see a write by address.
            torch._C._increment_version(bucket.params)
        if targets and self._copied[0]:
            torch._foreach_copy_(*self._copied)

    def _before_replay(self, clips: bool, read: list[Tensor | None]) -> None:
        if self._buckets is None or not self._watch.unchanged(self.state):
            raise CaptureError(
                "a parameter, a target or the state of an optimiser was moved or replaced since its step was "
                "captured: call reset() on the captured step, and it is captured anew"
            )
        if self.max_grad_norm is not None and not clips:
            raise CaptureError(
                "an optimiser clips its gradients, and did not when its step was captured: call reset() on the "
                "captured step, and it is captured anew"
            )
        if not all(map(is_, self._hyper.on_device(self.param_groups), read)):
            raise CaptureError(
                "a learning rate or tau on the device was replaced since its step was captured: change the tensor in "
                "place, or call reset() on the captured step, and it is captured anew"
            )
        self._hyper.send(self.param_groups, self.max_grad_norm)

    def _chosen(self, groups: Collection[int]) -> frozenset[int]:
        chosen = frozenset(groups)
        if not chosen <= frozenset(range(len(self.param_groups))):
            raise ValueError(f"there are {len(self.param_groups)} parameter groups, got the numbers {sorted(chosen)}")
        return chosen

    def _norm(self, gradients: list[list[Tensor | None]]) -> Tensor:
        given = [grad for grads in gradients for grad in grads if grad is not None]
        self.grad_norm = nn.utils.get_total_norm(given) if given else torch.zeros((), device=self._hyper.values.device)
        return self.grad_norm

    def refresh(self) -> None:
        """Send hyperparameters that were changed on the host to the device. No host sync.

        :meth:`step` and the replays of :func:`gpubuf.capture` do it. Before you replay a graph of your own, call it.
        """
        self._ready()
        self._hyper.send(self.param_groups, self.max_grad_norm)

    # The tensors

    def _parameters(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _ready(self) -> list[Bucket]:
        """The buckets, made anew if a tensor was moved or replaced."""
        if self._buckets is not None and self._watch.unchanged(self.state):
            return self._buckets
        at_replays().refuse(
            "the optimiser makes its tables at the first step, and when a parameter was added, moved or replaced: run "
            "a step outside of the graph"
        )
        return self._build()

    def _build(self) -> list[Bucket]:
        params = self._parameters()
        device = params[0].device
        pairs = [] if self._source is None else _pairs_of(self._source)
        copied = [pair for pair in pairs if not pair[0].is_floating_point()]
        averaged = [pair for pair in pairs if pair[0].is_floating_point()]
        for param in params:
            check_parameter(param, device)
        for target, source in averaged:
            check_parameter(source, device)
            if not same_layout(target, source):
                raise ValueError(
                    f"a target must be like its source: expected {source.dtype} {list(source.shape)} with strides "
                    f"{source.stride()} on {source.device}, got {target.dtype} {list(target.shape)} with strides "
                    f"{target.stride()} on {target.device}"
                )
        units = {id(weight): rows for weight, rows in self._units}
        places = []
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                moments = self._moments(param)
                places.append(Place(param, number, None, units.get(id(param)), moments))
        buckets = arrange(places, averaged, device)
        for bucket in buckets:
            for place, step in zip(bucket.places, bucket.steps.unbind(), strict=True):
                if place.group is not None:
                    state = self.state[place.param]
                    if "step" in state:
                        step.copy_(state["step"], non_blocking=True)
                    state["step"] = step
        self._copied = [target for target, _ in copied], [source for _, source in copied]
        self._hyper = Hyperparameters(self.param_groups, self.max_grad_norm, device)
        self._watch = Watch(params, pairs, self._source, self.state)
        self._buckets = buckets
        return buckets

    def _moments(self, param: Tensor) -> tuple[Tensor, Tensor]:
        """The two moments of a parameter, float32 for bfloat16: those of its state, or new ones with its strides."""
        state, new = self.state[param], functools.partial(torch.empty_strided, param.shape, param.stride())
        dtype = moment_dtype(param.dtype)
        for name in ("exp_avg", "exp_avg_sq"):
            present, moment = state.get(name), new(dtype=dtype, device=param.device)
            if present is None or not same_layout(present, moment):
                state[name] = moment.zero_() if present is None else moment.copy_(present)
        return state["exp_avg"], state["exp_avg_sq"]

    # Its state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict()`` of this class or of ``torch.optim.AdamW`` (or ``Adam``) returned.

        Moments and steps are copied into the tensors of this optimiser, so that captured graphs go on with them.

        Raises:
            ValueError: the groups have other sizes, or use ``amsgrad`` or ``maximize``.
        """
        for group in state_dict["param_groups"]:
            if group.get("amsgrad") or group.get("maximize"):
                raise ValueError("gpubuf.optim.AdamW has neither amsgrad nor maximize, which this state uses")
        self._ready()
        own = {param: self.state[param] for param in self._parameters()}
        super().load_state_dict(state_dict)
        # What torch has loaded is in the dtype of the parameters, but moments are never bfloat16.
        ids = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, param in zip(ids, self._parameters(), strict=True):
            loaded = self.state.get(param, {})
            exact = state_dict["state"].get(number, {})
            for name, tensor in own[param].items():
                value = exact.get(name) if param.dtype is torch.bfloat16 and name in exact else loaded.get(name)
                tensor.zero_() if value is None else tensor.copy_(torch.as_tensor(value, device=tensor.device))
        self.state.clear()
        self.state.update(own)
        self._watch.watch_state(self.state)
        for group in self.param_groups:
            for name, value in {**self.defaults, **_FOREIGN}.items():
                group.setdefault(name, value)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("max_grad_norm", "grad_norm", "_source", "_units")
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Loading a state comes here too, and keeps the tables.
        self.__dict__.setdefault("_buckets", None)


_observed = torch.optim.Optimizer.profile_hook_step(AdamW._step)


def _pairs_of(source: LossModule | list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    return source.target_pairs() if isinstance(source, LossModule) else source


def _check_group(group: dict[str, Any]) -> None:
    """Raise ValueError unless the hyperparameters are in range. Does not look into tensors."""
    beta1, beta2 = group["betas"]
    ranges = {
        "lr": (group["lr"], 0.0, math.inf),
        "beta1": (beta1, 0.0, 1.0),
        "beta2": (beta2, 0.0, 1.0),
        "eps": (group["eps"], 0.0, math.inf),
        "weight_decay": (group["weight_decay"], 0.0, math.inf),
        "tau": (group["tau"], 0.0, math.nextafter(1.0, 2.0)),
    }
    for name, (value, low, high) in ranges.items():
        if isinstance(value, Tensor):
            if value.numel() != 1 or name not in ("lr", "tau"):
                raise ValueError(f"{name} must be a number, or a tensor of one element for lr and tau")
        elif not low <= value < high:
            raise ValueError(f"{name} must be at least {low} and below {high}, got {value}")


def _unit_weights(given: nn.Module | Iterable[nn.Module | tuple[Any, ...]]) -> list[tuple[Tensor, tuple[int, float]]]:
    """The weights whose rows have a fixed length."""
    found: list[tuple[Tensor, tuple[int, float]]] = []
    for item in [given] if isinstance(given, nn.Module) else given:
        if isinstance(item, nn.Module):
            marked = [part for part in item.modules() if getattr(part, "unit_rows", False)]
            found += [(part.weight, (part.in_dim, part.row_norm)) for part in marked]  # type: ignore[misc]
        else:
            weight, dim, *norm = item
            if not -weight.ndim <= dim < weight.ndim:
                raise ValueError(f"a weight of {weight.ndim} dimensions has no dimension {dim}")
            found.append((weight, (dim, norm[0] if norm else 1.0)))
    return found
