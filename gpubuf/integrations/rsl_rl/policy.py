"""The policy of an off-policy algorithm, as rsl_rl's runners and exporters use its models."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from gpubuf.train.algorithms import Gaussian, network_of


class Policy(nn.Module):
    """Normalises observations, runs the network of an actor, and scales its actions.

    Args:
        actor: a policy of :mod:`gpubuf.modules`, whose actions are in [-1, 1].
        actions: how outputs of its network become actions.
        groups: the groups of observations that it sees, and the width of each.
        action_scale: what an action of 1 stands for, ``[A]``.

    Attributes:
        obs_groups, input_size: the groups, and their width together.
        output_std: standard deviation of the exploration in the newest step, ``[E, A]`` or what broadcasts to it.
    """

    is_recurrent = False
    input_names = ("obs",)
    output_names = ("actions",)
    mean: Tensor
    factor: Tensor
    action_scale: Tensor

    def __init__(self, actor: Any, actions: Gaussian, groups: dict[str, int], action_scale: Tensor) -> None:
        super().__init__()
        self.network, self.actions = network_of(actor), actions
        self.obs_groups, self.input_size = list(groups), sum(groups.values())
        self.register_buffer("mean", action_scale.new_zeros(self.input_size))
        self.register_buffer("factor", action_scale.new_ones(self.input_size))
        self.register_buffer("action_scale", action_scale)
        # That of the first actions, which are uniform in [-1, 1].
        self.output_std = torch.full_like(action_scale, 3**-0.5)

    def output(self, obs: Any) -> Any:
        """What the network says of observations: a TensorDict of groups ``[E, D]``, or all of them ``[E, D]``."""
        whole = obs if isinstance(obs, Tensor) else torch.cat([obs[name] for name in self.obs_groups], -1)
        return self.network((whole - self.mean) * self.factor)

    def forward(self, obs: Any, masks: Any = None, hidden_state: Any = None, stochastic_output: bool = False) -> Tensor:
        """The best actions, ``[E, A]``; with ``stochastic_output`` those that a policy with a distribution draws."""
        output = self.output(obs)
        drawn = stochastic_output and isinstance(output, tuple)
        return self.action_scale * (self.actions.explored(output, None) if drawn else self.actions.best(output))

    def reset(self, dones: Tensor | None = None, hidden_state: Any = None) -> None:
        """Nothing: the policy has no memory."""

    def get_dummy_inputs(self) -> tuple[Tensor]:
        """Observations of the right shape, for an exporter."""
        return (self.mean.new_zeros(1, self.input_size),)

    def as_onnx(self, verbose: bool = False) -> Policy:
        """A copy for ``torch.onnx.export``, on the CPU."""
        return copy.deepcopy(self).cpu().eval().requires_grad_(False)

    def as_jit(self) -> nn.Module:
        """A copy for ``torch.jit.script``, on the CPU."""
        policy = self.as_onnx()
        with torch.no_grad():
            return Scripted(torch.jit.trace(policy, policy.get_dummy_inputs()))


class Scripted(nn.Module):
    """A traced policy with the method that programs call between episodes."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, x: Tensor) -> Tensor:
        """Actions ``[E, A]`` for observations ``[E, D]``."""
        actions: Tensor = self.policy(x)
        return actions

    @torch.jit.export
    def reset(self) -> None:
        """Nothing: the policy has no memory."""
