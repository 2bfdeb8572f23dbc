"""The policy of an off-policy algorithm, as rsl_rl's runners and exporters use its models."""

from __future__ import annotations

import copy
from collections.abc import Sequence
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
        action_scale: what an action of 1 stands for: a number, or one for each component.
        num_actions: components of an action.
        device: of all tensors.

    Attributes:
        obs_groups, obs_dim: the groups, and their width together.
        output_std: standard deviation of the exploration in the newest step, ``[E, A]`` or what broadcasts to it.
    """

    is_recurrent = False
    mean: Tensor
    factor: Tensor
    action_scale: Tensor

    def __init__(
        self,
        actor: Any,
        actions: Gaussian,
        groups: dict[str, int],
        action_scale: float | Sequence[float],
        num_actions: int,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.network, self.actions = network_of(actor), actions
        self.obs_groups, self.obs_dim = list(groups), sum(groups.values())
        scale = torch.tensor(action_scale, dtype=torch.float32, device="cpu").expand(num_actions)
        self.register_buffer("mean", torch.zeros(self.obs_dim, device=device))
        self.register_buffer("factor", torch.ones(self.obs_dim, device=device))
        self.register_buffer("action_scale", scale.clone().to(device))
        # That of the first actions, which are uniform in [-1, 1].
        self.output_std = torch.full((num_actions,), 3**-0.5, device=device)

    def output(self, obs: Any) -> Any:
        """What the network says of observations, a TensorDict of groups ``[E, D]``."""
        return self.network((torch.cat([obs[name] for name in self.obs_groups], -1) - self.mean) * self.factor)

    def forward(self, obs: Any, masks: Any = None, hidden_state: Any = None, stochastic_output: bool = False) -> Tensor:
        """The best actions, ``[E, A]``; with ``stochastic_output`` those that a policy with a distribution draws."""
        output = self.output(obs)
        drawn = stochastic_output and isinstance(output, tuple)
        return self.action_scale * (self.actions.explored(output, None) if drawn else self.actions.best(output))

    def reset(self, dones: Tensor | None = None, hidden_state: Any = None) -> None:
        """Nothing: the policy has no memory."""

    def get_hidden_state(self) -> None:
        """None: the policy has no memory."""

    def as_onnx(self, verbose: bool = False) -> Exported:
        """A copy for ``torch.onnx.export``, on the CPU."""
        return Exported(self)

    def as_jit(self) -> nn.Module:
        """A copy for ``torch.jit.script``, on the CPU."""
        policy = Exported(self)
        with torch.no_grad():
            return Scripted(torch.jit.trace(policy, policy.get_dummy_inputs()))  # type: ignore[no-untyped-call]


class Exported(nn.Module):
    """A policy as a function of the concatenated groups of observations, with what rsl_rl's exporters ask for.

    Args:
        policy: is copied.
    """

    is_recurrent = False
    input_names = ("obs",)
    output_names = ("actions",)

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.input_size = policy.obs_dim
        self.policy = copy.deepcopy(policy).cpu().eval().requires_grad_(False)

    def get_dummy_inputs(self) -> tuple[Tensor]:
        """Observations of the right shape."""
        return (torch.zeros(1, self.input_size, device="cpu"),)

    def forward(self, x: Tensor) -> Tensor:
        """Actions ``[E, A]`` for observations ``[E, D]``."""
        policy = self.policy
        return policy.action_scale * policy.actions.best(policy.network((x - policy.mean) * policy.factor))


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
