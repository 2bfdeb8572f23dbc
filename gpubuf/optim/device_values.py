"""What an optimiser has on the device: its hyperparameters; and how it notices that a tensor was moved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from gpubuf.kernels import optim
from gpubuf.objectives.loss_module import LossModule


class Hyperparameters:
    """The hyperparameters of all groups on the device, and what was sent there.

    Attributes:
        values: float64 ``[G, 9]``, see :mod:`gpubuf.kernels.optim`.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], max_norm: float | None, device: torch.device) -> None:
        self._device = device
        rows = [[0.0] * optim.HYPER for _ in groups]
        self._sent = [self._on_host(group, max_norm) for group in groups]
        for row, sent in zip(rows, self._sent, strict=True):
            for column, value in enumerate(_columns(sent)):
                row[column] = 0.0 if value is None else value
        # Of groups without tensors: the same as in `_sent`, in a form that is quickly compared.
        self._numbers: list[tuple[Any, ...] | None] = [None] * len(rows)
        # Not waited for: CUDA has read memory that is not pinned when the call returns.
        self.values = torch.tensor(rows, dtype=torch.float64, device="cpu").to(device, non_blocking=True)

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
            lr, tau = group["lr"], group["tau"]
            if type(lr) is float and type(tau) is float:
                numbers = lr, tau, group["betas"], group["eps"], group["weight_decay"], max_norm
                if numbers == self._numbers[row]:
                    continue
                self._numbers[row] = numbers
            else:
                self._numbers[row] = None
            found, sent = self._on_host(group, max_norm), self._sent[row]
            if found != sent:
                for column, (new, old) in enumerate(zip(_columns(found), _columns(sent), strict=True)):
                    if new is not None and new != old:
                        self.values[row, column].fill_(new)
                self._sent[row] = found

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
        self._params, self._pairs = list(params), _flat(pairs)
        self._addresses = self._now(self._params), self._now(self._pairs)
        self._loss = source if isinstance(source, LossModule) else None
        self._version = None if self._loss is None else self._loss.links_version
        self.watch_state(state)

    def watch_state(self, state: dict[Tensor, Any]) -> None:
        """The state has the tensors that it had, in another dictionary."""
        self._state, self._states = state, len(state)

    def _now(self, tensors: Sequence[Tensor]) -> list[int]:
        return [] if self._fake else list(map(Tensor.data_ptr, tensors))

    def unchanged(self, state: dict[Tensor, Any]) -> bool:
        """Whether all tensors are where they were, and the optimiser has the same state."""
        if self._loss is not None and self._loss.links_version != self._version:
            # Loading a state looks the tensors up again, and finds the same ones.
            self._version = self._loss.links_version
            self._pairs = _flat(self._loss.target_pairs())
        return (
            self._now(self._params) == self._addresses[0]
            and self._now(self._pairs) == self._addresses[1]
            and state is self._state
            and len(state) == self._states
        )


def _flat(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [tensor for pair in pairs for tensor in pair]
