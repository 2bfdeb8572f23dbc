"""Updates of target parameters: by exponential averaging, and by copies at intervals."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from gpubuf.data.recording import current
from gpubuf.objectives.base import pairs_of


class TargetNetUpdater:
    """Base class of the updates. Making one sets the targets to the present parameters.

    Args:
        loss_module: the loss whose ``target_*_params`` follow their ``*_params``. That is a
            :class:`~gpubuf.objectives.LossModule`, or a module of another library that keeps its parameters under such
            names, as TorchRL's losses do.

    Raises:
        ValueError: ``loss_module`` is no loss.
        RuntimeError: it has no target parameters.
    """

    def __init__(self, loss_module: nn.Module) -> None:
        associated = getattr(loss_module, "_has_update_associated", None)
        if not isinstance(loss_module, nn.Module) or not isinstance(associated, dict):
            raise ValueError(f"The loss_module must be a LossModule instance, got {type(loss_module).__name__}.")
        self.loss_module = loss_module
        self.initialized = False
        self._version: Any = None
        self.init_()
        for name in associated:
            associated[name] = True
        # The check for an updater is over. Compiled code would notice if it went later.
        loss_module._forward_pre_hooks.pop(getattr(loss_module, "_first_call", -1), None)

    def init_(self) -> None:
        """Set the targets to the present parameters. The constructor does it once; a second call warns."""
        if self.initialized:
            warnings.warn("The updater is already initialized.", category=UserWarning, stacklevel=2)
        self._gather()
        self._copy_all()
        self.initialized = True

    def _gather(self) -> None:
        """Look the tensors up if they have changed."""
        version = getattr(self.loss_module, "links_version", None)
        if version is not None and self._version == version:
            return
        pairs = pairs_of(self.loss_module)
        if version is None:
            # The loss of another library does not tell when it replaces a tensor.
            version = [id(tensor) for pair in pairs for tensor in pair]
            if self._version == version:
                return
        self._version = version
        # Counters (of batch normalisation, say) can't be averaged.
        self._averaged = _columns(pair for pair in pairs if pair[0].is_floating_point())
        self._counters = _columns(pair for pair in pairs if not pair[0].is_floating_point())

    @torch.no_grad()
    def _copy_all(self) -> None:
        torch._foreach_copy_(*self._averaged)
        self._copy_counters()

    def _copy_counters(self) -> None:
        if self._counters[0]:
            torch._foreach_copy_(*self._counters)

    def step(self) -> None:
        """Update the targets. Call it after each step of the optimiser. No host sync."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """The state of the updater itself. The targets are in the state of the loss."""
        return {"initialized": self.initialized}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.initialized = state_dict["initialized"]


def _columns(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """(targets, sources), for ``torch._foreach_*``."""
    found = list(pairs)
    return [target for target, _ in found], [source for _, source in found]


class SoftUpdate(TargetNetUpdater):
    """``target = eps * target + (1 - eps) * parameter`` at every step (Lillicrap et al., 2016).

    All tensors in one ``torch._foreach_lerp_``.

    Args:
        loss_module: as in :class:`TargetNetUpdater`.
        eps: share of the target that is kept; exclusive with ``tau``.
        tau: ``1 - eps``.

    Raises:
        RuntimeError: neither ``eps`` nor ``tau`` is given.
        ValueError: both are, or they are not in [0, 1].
    """

    def __init__(self, loss_module: nn.Module, *, eps: float | None = None, tau: float | None = None) -> None:
        if eps is None and tau is None:
            raise RuntimeError("Neither eps nor tau was provided.")
        if eps is not None and tau is not None:
            raise ValueError("One and only one argument (tau or eps) can be specified.")
        name, value = ("eps", eps) if eps is not None else ("tau", tau)
        assert value is not None
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must be in [0, 1], got {value}")
        # Kept as given: 1 - (1 - tau) is not tau.
        self._weight = 1 - value if name == "eps" else value
        if self._weight > 0.5:
            warnings.warn(
                f"{name}={value} replaces more than half of the target at every step; eps is the share that is kept, "
                "tau the share that is replaced.",
                category=UserWarning,
                stacklevel=2,
            )
        super().__init__(loss_module)

    @property
    def eps(self) -> float:
        """The share of the target that is kept at a step."""
        return 1 - self._weight

    @torch.no_grad()
    def step(self) -> None:
        """Update the targets. Call it after each step of the optimiser. No host sync."""
        self._gather()
        torch._foreach_lerp_(*self._averaged, self._weight)
        self._copy_counters()


class HardUpdate(TargetNetUpdater):
    """The targets become the parameters at every ``value_network_update_interval``-th step (Mnih et al., 2015).

    TorchRL makes one step more between two copies than its argument says.

    The host counts the steps. In a step captured by :func:`gpubuf.capture` the device counts them, and every step reads
    and writes all targets. The two counters always agree.

    Args:
        loss_module: as in :class:`TargetNetUpdater`.
        value_network_update_interval: number of steps between two copies.

    Raises:
        ValueError: the interval is less than 1.
    """

    def __init__(self, loss_module: nn.Module, *, value_network_update_interval: float = 1000) -> None:
        if value_network_update_interval < 1:
            raise ValueError(f"value_network_update_interval must be at least 1, got {value_network_update_interval}")
        super().__init__(loss_module)
        self.value_network_update_interval = value_network_update_interval
        self.counter = 0

    def _gather(self) -> None:
        before = self._version
        super()._gather()
        if self._version != before:
            device = (*self._averaged[0], *self._counters[0])[0].device
            self._device_counter = torch.zeros((), dtype=torch.int64, device=device)
            self._on_device = 0  # what the device's counter is

    def step(self) -> None:
        """Count the step, and copy if that is due. No host sync."""
        recording = current.recording
        if recording is not None:
            self._gather()
            recording.holds(self, "_device_counter")
            recording.before(self, self._tell_device)
            recording.after(self._count_replay)
            self._step_on_device()
        elif self._count():
            self._gather()
            self._copy_all()

    def _count(self) -> bool:
        """Count a step. Returns whether a copy is due."""
        self.counter += 1
        due = self.counter >= self.value_network_update_interval
        if due:
            self.counter = 0
        return due

    def _tell_device(self) -> None:
        if self._on_device != self.counter:
            self._device_counter.fill_(self.counter)
            self._on_device = self.counter

    def _count_replay(self) -> None:
        self._count()
        self._on_device = self.counter

    @torch.no_grad()
    def _step_on_device(self) -> None:
        counter = self._device_counter.add_(1)
        due = counter >= self.value_network_update_interval
        for targets, sources in (self._averaged, self._counters):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(torch.where(due, source, target))
        counter.masked_fill_(due, 0)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "counter": self.counter}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.counter = state_dict["counter"]
