"""The loss of twin delayed deep deterministic policy gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from gpubuf.modules.fast_call import output
from gpubuf.objectives.base import LossModule
from gpubuf.objectives.batch import next_state, reduced
from gpubuf.objectives.networks import without_gradients
from gpubuf.objectives.options import CriticNetworks, LossOptions, leaf_of


def action_bounds(spec: Any, key: NestedKey) -> tuple[Any, Any]:
    """(low, high) of one action, without the dimensions of the containers that hold it.

    Args:
        spec: a Gymnasium ``Box``, a bounded spec of TorchRL, or a composite one that holds the action at ``key``.
        key: of the action.

    Raises:
        ValueError: the spec has no bounds.
    """
    spec, container = leaf_of(spec, key)
    space = getattr(spec, "space", spec)
    low, high = getattr(space, "low", None), getattr(space, "high", None)
    if low is None or high is None:
        raise ValueError(f"action_spec must have bounds, as a Box of Gymnasium has, got {type(spec).__name__}")
    first = (0,) * container
    return low[first], high[first]


def check_order(low: Any, high: Any) -> None:
    """Raise ValueError unless ``low <= high`` everywhere. Bounds on a GPU are copied to the host."""
    lower, upper = (np.asarray(b.cpu() if isinstance(b, torch.Tensor) else b, dtype=np.float64) for b in (low, high))
    # A comparison that NaN fails.
    if not (lower <= upper).all():
        raise ValueError(f"the lower bounds of the actions must not be above the upper ones, got {low} and {high}")


@dataclass(frozen=True)
class TD3Options(LossOptions):
    """The keyword arguments of :class:`TD3Loss`.

    Raises:
        ValueError: an argument is out of range, or not one of ``action_spec`` and ``bounds`` is given.
    """

    CONSUMED = LossOptions.CONSUMED | {"action_spec", "bounds", "policy_noise", "noise_clip"}

    action_spec: Any = None
    bounds: tuple[Any, Any] | None = None
    policy_noise: float = 0.2
    noise_clip: float = 0.5
    delay_actor: bool = True
    scalar_output_mode: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.action_spec is None) == (self.bounds is None):
            raise ValueError(
                f"give one of bounds and action_spec, got bounds={self.bounds} and action_spec={self.action_spec}: one "
                "is needed, but not both"
            )
        for name in ("policy_noise", "noise_clip"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")


class TD3Loss(LossModule):
    """TD3: clipped double Q-learning with a deterministic policy (Fujimoto et al., arXiv 1802.09477).

    With S the batch shape (agents included), N critics and ``terminated``, not ``done``, to stop bootstrapping:

    * ``loss_qvalue``: sum over critics of ``loss_function`` between Q(s, a) and
      ``y = r + gamma^steps (1 - terminated) min_k Qtarget_k(s', a')``, with the smoothed action
      ``a' = clip(mu_target(s') + clip(policy_noise * eps, -noise_clip, noise_clip), low, high)``, eps standard normal;
    * ``loss_actor``: ``-Q_1(s, mu(s))``, of the first critic, with gradients to the actor only.

    Update the actor and the targets once every few steps of the critics ("delayed"): that is up to your loop.

    Call it with a TensorDict: it returns a TensorDict of ``loss_actor`` and ``loss_qvalue``, ``[]``, and of values
    without gradient: ``pred_value`` (Q(s, a), ``[N, *S]``), ``state_action_value_actor`` (Q(s, mu(s)), ``[N, *S]``),
    ``next_state_value`` (the minimum, S) and ``target_value`` (y, S). It writes ``"td_error"``, ``max_k (Q_k - y)^2``
    of shape S, into its input, the priority of each row: the square, as TorchRL's TD3 and unlike the other losses. Or
    call it with keyword arguments named after ``in_keys`` (nested keys joined by ``_``): it returns a tuple in the
    order of ``out_keys``. Nothing synchronises with the host: the noise is drawn on the device of the actions.

    Importance weights, masks, and the shapes of rewards and flags are those of :class:`~gpubuf.objectives.SACLoss`. A
    terminated row's next observation may be NaN, unless a network refuses it; see ``skip_done_states``.

    The keys of :meth:`set_keys` are action, state_action_value, reward, done, terminated, priority and priority_weight.

    Args:
        actor_network: the policy, a module that writes the action at ``tensor_keys.action``.
        qvalue_network: one network, which is copied ``num_qvalue_nets`` times and drawn anew; a list of networks; or a
            natively batched ensemble such as :func:`~gpubuf.modules.make_sac_critic` builds.
        action_spec: where the action's bounds are from: a Gymnasium ``Box``, a bounded spec of TorchRL, or a composite
            one that holds the action at its key. Either this or ``bounds``.
        bounds: (low, high), numbers, or tensors that broadcast against an action.
        num_qvalue_nets: number of critics, N.
        policy_noise: standard deviation of the noise on the next actions.
        noise_clip: largest magnitude of that noise.
        loss_function: "smooth_l1", "l2", "l1" or "huber" (the same as "smooth_l1").
        delay_actor: take the next actions from target parameters of the actor.
        delay_qvalue: evaluate the next values with target parameters of the critics.
        gamma: refused; see :meth:`make_value_estimator`.
        priority_key: refused; see :meth:`set_keys`.
        separate_losses: parameters that critics and actor share get gradients from the actor's loss only.
        reduction: "mean" (default), "sum", or "none" for losses of shape S, weighted, 0 where masked.
        skip_done_states: as in :class:`~gpubuf.objectives.SACLoss`.
        deactivate_vmap: run several critics one after the other.
        use_prioritized_weights: False, True (a batch without weights is an error), or "auto".

    Attributes:
        min_action: lower bound of the actions, a buffer.
        max_action: upper bound of the actions, a buffer.
        policy_noise: as given, ``[]``, read on the device. Assign a number to change it, also within a captured graph.
        noise_clip: likewise.
        actor_network_params: parameters of the actor, the very ones of ``actor_network``.
        qvalue_network_params: parameters of the critics; stacked ``[N, ...]`` unless the ensemble is natively batched.
        target_actor_network_params: their targets, as buffers; updated by :class:`~gpubuf.objectives.SoftUpdate`.
        target_qvalue_network_params: likewise.

    Raises:
        TypeError: ``gamma`` is given.
        RuntimeError: ``priority_key`` is given.
        ValueError: an argument is out of range, not one of ``action_spec`` and ``bounds`` is given, or the critics are
            not ``num_qvalue_nets``.
    """

    @dataclass
    class _AcceptedKeys(LossModule._AcceptedKeys):
        action: NestedKey = "action"
        state_action_value: NestedKey = "state_action_value"

    _rows = "actions of batch shape"
    loss_names: tuple[str, ...] = (
        "loss_actor",
        "loss_qvalue",
        "pred_value",
        "state_action_value_actor",
        "next_state_value",
        "target_value",
    )

    min_action: Tensor
    max_action: Tensor
    policy_noise: Tensor
    noise_clip: Tensor
    _schedulable_buffers = frozenset({"policy_noise", "noise_clip"})

    Options = TD3Options
    delayed_targets = True

    def __init__(self, actor_network: Any, qvalue_network: CriticNetworks, **options: Any) -> None:
        super().__init__()
        chosen = self._take(actor_network, qvalue_network, options)
        like = next(iter(self.parameters()), torch.empty((), device=torch.get_default_device()))
        low, high = chosen.bounds or action_bounds(chosen.action_spec, self.tensor_keys.action)
        check_order(low, high)
        self.register_buffer("max_action", torch.as_tensor(high, dtype=like.dtype, device=like.device))
        self.register_buffer("min_action", torch.as_tensor(low, dtype=like.dtype, device=like.device))
        # TorchRL's state has no such entries.
        for name in ("policy_noise", "noise_clip"):
            value = torch.tensor(getattr(chosen, name), dtype=like.dtype, device=like.device)
            self.register_buffer(name, value, persistent=False)
        self.make_value_estimator()

    def _losses(self, tensordict: TensorDictBase) -> TensorDictBase:
        seen = self._seen(tensordict)
        loss_actor, actor_values = self._actor_loss(seen)
        loss_qvalue, rows = self._value_loss(tensordict, seen)
        found = {"loss_actor": loss_actor, "loss_qvalue": loss_qvalue, "state_action_value_actor": actor_values, **rows}
        # No batch size would fit values of all critics and rows alike.
        return TensorDict({name: found[name] for name in self.loss_names}, batch_size=[])

    def critic_losses(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The losses of an update that leaves the actor as it is: ``loss_qvalue``. Writes the priority entry."""
        return self._evaluated(
            lambda batch: TensorDict({"loss_qvalue": self._value_loss(batch, self._seen(batch))[0]}, []), tensordict
        )

    # The parts of `forward`, as TorchRL names them.

    def value_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """(``loss_qvalue``, ``{"td_error", "next_state_value", "pred_value", "target_value"}``).

        ``"td_error"`` is ``(Q_k - y)^2`` here, ``[N, *S]``. Its largest of each row, the priority, is written into
        ``tensordict``.
        """
        loss, rows = self._value_loss(tensordict, self._seen(tensordict))
        return loss, {"td_error": (rows["pred_value"] - rows["target_value"]).square(), **rows}

    def actor_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """(``loss_actor``, ``{"state_action_value_actor": Q_k(s, mu(s)), [N, *S]}``, without gradient)."""
        loss, values = self._actor_loss(self._seen(tensordict))
        return loss, {"state_action_value_actor": values}

    def _value_loss(self, tensordict: TensorDictBase, seen: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """(reduced loss of all critics, values without gradient)."""
        with without_gradients():
            next_value, target = self._target(seen)
        q = self._checked(self._critics.online(seen, self.tensor_keys.state_action_value), target.shape)
        loss, td_error = self.td_loss(q, target, seen)
        self._set_priority(tensordict, seen, td_error.square())
        pred_value = q.detach().reshape(len(q), *target.shape)
        return loss, {"next_state_value": next_value, "pred_value": pred_value, "target_value": target}

    def _actor_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor]:
        """(reduced loss of the actor, values ``[N, *S]`` of its actions without gradient)."""
        state = tensordict.copy()
        action = self._actor.online.run(state, output, state, self.tensor_keys.action)
        state.set(self.tensor_keys.action, action)
        shape = action.shape[:-1]
        q = self._critics.detached_first(state, self.tensor_keys.state_action_value)
        q = self._checked(q, shape).reshape(len(q), *shape)
        weight, mask = self.row_weights(tensordict, shape)
        return reduced(-q[0], weight, mask, self.reduction), q.detach()

    def _target(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor]:
        """(values of the next states, targets of the critics), both S."""
        next_q, shape = self._next_values(tensordict)
        return next_q.amin(0).reshape(shape), self.td_target(next_q, tensordict, shape)

    def _next_values(self, tensordict: TensorDictBase) -> tuple[Tensor, torch.Size]:
        """(what the target critics say of the smoothed next actions, S)."""
        state = next_state(tensordict)
        action = self._actor.target.run(state, output, state, self.tensor_keys.action)
        noise = torch.randn_like(action).mul_(self.policy_noise).clamp_(-self.noise_clip, self.noise_clip)
        state.set(self.tensor_keys.action, (action + noise).clamp(self.min_action, self.max_action))
        shape = action.shape[:-1]
        return self._checked(self._critics.target(state, self.tensor_keys.state_action_value), shape), shape
