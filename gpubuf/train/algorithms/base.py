"""The agent: what all algorithms have in common, around the networks, the loss and the optimiser that each chooses."""

from __future__ import annotations

import abc
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from gpubuf.data import Normalize
from gpubuf.modules import TanhNormal, TanhNormalActor
from gpubuf.objectives import SACLoss
from gpubuf.optim import AdamW
from gpubuf.serialization import save
from gpubuf.train.algorithms.held_noise import HeldNoise
from gpubuf.train.config import TrainConfig, UsageError

#: The values that `Agent.update` returns, in this order.
LOSS_NAMES = ("loss_qvalue", "loss_actor", "loss_alpha", "alpha", "entropy")

_Losses = Callable[[TensorDict], tuple[Tensor, Tensor]]


class Agent(abc.ABC):
    """A policy, its critics, and how they learn from a batch.

    An algorithm says what its networks and its loss are, and what is special about its optimiser.

    Args:
        config: The run's settings.
        observation_size: Numbers in an observation, `O`.
        action_size: Numbers in an action, `A`; each is in [-1, 1].
        device: Of the networks.
        compiled: Whether to compile the losses and their gradients with `torch.compile`. None: try it, and warn and
            go on without if the compiler fails.
    """

    #: The algorithm's name, for people.
    title: ClassVar[str]
    #: Of the optimiser.
    betas: ClassVar[tuple[float, float]] = (0.9, 0.999)
    weight_decay: ClassVar[float] = 0.0
    #: Networks whose weights the optimiser keeps at unit rows.
    unit_rows: Sequence[nn.Module] = ()

    def __init__(
        self,
        config: TrainConfig,
        observation_size: int,
        action_size: int,
        device: torch.device,
        *,
        compiled: bool | None = False,
    ) -> None:
        self.device = device
        self._shape = {
            "algo": config.algo,
            "observation_size": observation_size,
            "action_size": action_size,
            "hidden": list(config.hidden),
        }
        self.actor = self.make_actor(observation_size, action_size, config.hidden, device)
        self.loss = self.make_loss(config, observation_size, action_size)
        self.loss.make_value_estimator(gamma=config.gamma)
        # The run stops at NaN, and is the one that says so.
        self.loss.nan_named = True
        self._optimizer = self._make_optimizer(config)
        #: Normalises observations as the buffer does those of its batches.
        self.normalize: Normalize | None = None
        self._noise: HeldNoise | None = None
        if config.noise_hold > 1:
            self._noise = HeldNoise(config.num_envs, action_size, config.noise_hold, device)
        self._may_fall_back = compiled is None
        # Of a whole update, and of one that trains the critics alone.
        self._losses: _Losses = self._eager_losses
        self._critic_losses: _Losses = self._eager_critic_losses
        if compiled is not False:
            self._losses = torch.compile(self._eager_losses, fullgraph=True)
            self._critic_losses = torch.compile(self._eager_critic_losses, fullgraph=True)

    # The algorithm

    @staticmethod
    @abc.abstractmethod
    def make_actor(
        observation_size: int, action_size: int, hidden: Sequence[int], device: torch.device | str
    ) -> TanhNormalActor:
        """The policy. `load_actor` calls it with what the file of a model says."""

    @abc.abstractmethod
    def make_loss(self, config: TrainConfig, observation_size: int, action_size: int) -> SACLoss:
        """The loss, with the critics, of ``self.actor``."""

    def _make_optimizer(self, config: TrainConfig) -> AdamW:
        """The optimiser of `parameters`, which moves the targets as well."""
        temperature = [p for p in self.parameters() if p is self.loss.log_alpha]
        networks = [p for p in self.parameters() if p is not self.loss.log_alpha]
        groups = [{"params": networks}, {"params": temperature, "weight_decay": 0.0}]
        targets: dict[str, Any] = {} if config.tau is None else {"targets": self.loss, "tau": config.tau}
        return AdamW(
            groups,
            config.learning_rate,
            self.betas,
            weight_decay=self.weight_decay,
            unit_rows=self.unit_rows,
            **targets,
        )

    # Common to all algorithms

    def parameters(self) -> list[Tensor]:
        """Those of policy, critics and temperature that learn."""
        return [parameter for parameter in self.loss.parameters() if parameter.requires_grad]

    def act(self, observation: Tensor, deterministic: bool = False) -> Tensor:
        """Actions `[E, A]` in [-1, 1], on the networks' device: drawn, or the tanh of the mean.

        Does not synchronise, unless the observations are on another device.

        Args:
            observation: `[E, O]` float32.
            deterministic: Whether to take the tanh of the mean.
        """
        with torch.no_grad():
            distribution = self._distribution(observation)
            return distribution.deterministic_sample if deterministic else distribution.sample()

    def explore(self, observation: Tensor) -> Tensor:
        """The actions of a step of training: drawn, with noise that may be held for some steps. See `act`."""
        if self._noise is None:
            return self.act(observation)
        with torch.no_grad():
            policy = self._distribution(observation)
            held = torch.addcmul(policy.loc, policy.scale, self._noise.draw())
            return TanhNormal(held, policy.scale).deterministic_sample

    def _distribution(self, observation: Tensor) -> TanhNormal:
        observation = observation.to(self.device)
        if self.normalize is not None:
            observation = self.normalize(observation)
        return self.actor.get_dist(TensorDict({"observation": observation}, observation.shape[:1]))

    @property
    def critic_loss_names(self) -> frozenset[str]:
        """Those of `LOSS_NAMES` that an update of the critics alone has."""
        names = {"loss_qvalue", "alpha"}
        return frozenset(names if self.loss.temperature_from == "current" else {*names, "loss_alpha"})

    def update(self, batch: TensorDict, policy: bool = True) -> Tensor:
        """Take one step of the optimiser on ``batch``, and write ``"td_error"`` into it.

        The operations are the same at every call with the same ``policy``: each of the two can be captured into a CUDA
        graph. Does not synchronise.

        Args:
            batch: `[B]` transitions.
            policy: Whether policy and temperature learn too. Otherwise a temperature learns only from next actions.

        Returns:
            The values of `LOSS_NAMES`, `[5]` float32 on the device; 0 for those that were not computed.
        """
        try:
            values = self._gradients(batch, policy)
        except RuntimeError as error:
            # Imported here, since it takes seconds, and nothing else needs it.
            from torch._dynamo.exc import TorchDynamoException

            # The compiler fails at the first call only, before a parameter has changed.
            if not isinstance(error, TorchDynamoException):
                raise
            if not self._may_fall_back:
                raise UsageError(f"torch.compile failed, --no-compile does without it: {error}") from error
            warnings.warn(f"torch.compile failed, going on without it: {error}", stacklevel=2)
            self._losses, self._critic_losses = self._eager_losses, self._eager_critic_losses
            values = self._gradients(batch, policy)
        self._optimizer.step()
        return values

    def _gradients(self, batch: TensorDict, policy: bool) -> Tensor:
        """Set the gradients of the parameters that learn, and None for others. Returns the values of `LOSS_NAMES`."""
        total, values = (self._losses if policy else self._critic_losses)(batch)
        self._optimizer.zero_grad(set_to_none=True)
        total.backward()
        return values

    def _eager_losses(self, batch: TensorDict) -> tuple[Tensor, Tensor]:
        """The sum to minimise, and the values of `LOSS_NAMES`."""
        losses = self.loss(batch)
        # The losses share no parameters, so their sum gives each parameter the gradient of its own loss.
        total = losses["loss_qvalue"] + losses["loss_actor"] + losses["loss_alpha"]
        return total, torch.stack([losses[name].detach().reshape(()) for name in LOSS_NAMES])

    def _eager_critic_losses(self, batch: TensorDict) -> tuple[Tensor, Tensor]:
        """The same for the critics alone."""
        losses = self.loss.critic_losses(batch)
        total = losses["loss_qvalue"]
        if "loss_alpha" in self.critic_loss_names:
            total = total + losses["loss_alpha"]
        absent = torch.zeros_like(losses["alpha"])
        names = self.critic_loss_names
        values = [losses[name].detach().reshape(()) if name in names else absent for name in LOSS_NAMES]
        return total, torch.stack(values)

    def state_dict(self) -> dict[str, Any]:
        """Networks, temperature, optimiser, and noise that is held."""
        state = {"loss": self.loss.state_dict(), "optimizer": self._optimizer.state_dict()}
        return state if self._noise is None else {**state, "noise": self._noise.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; its tensors may be on any device."""
        self.loss.load_state_dict(state["loss"])
        self._optimizer.load_state_dict(state["optimizer"])
        if self._noise is not None:
            self._noise.load_state_dict(state["noise"])

    def save_model(self, path: str | os.PathLike[str]) -> None:
        """Write the policy to ``path``, for `load_actor`, with the statistics of its observations."""
        model = {**self._shape, "actor": self.actor.state_dict()}
        if self.normalize is not None:
            model["normalize"] = {"mean": self.normalize.mean().float(), "factor": self.normalize.factor()}
        save(path, model)
