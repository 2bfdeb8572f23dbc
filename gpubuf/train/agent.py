"""The SAC agent: networks, loss, optimiser and target update, built from the parts that the library exports."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor

from gpubuf.modules import TanhNormal, make_sac_actor, make_sac_critic
from gpubuf.objectives import SACLoss, SoftUpdate
from gpubuf.serialization import load, save
from gpubuf.train.config import TrainConfig, UsageError

MODEL_FILE = "model.safetensors"

#: The values that `SACAgent.update` returns, in this order.
LOSS_NAMES = ("loss_qvalue", "loss_actor", "loss_alpha", "alpha", "entropy")


class SACAgent:
    """Soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905) with a learnt temperature.

    Args:
        config: The run's settings.
        observation_size: Numbers in an observation, `O`.
        action_size: Numbers in an action, `A`; each is in [-1, 1].
        device: Of the networks.
        compiled: Whether to compile the losses and their gradients with `torch.compile`. None: try it, and warn and
            go on without if the compiler fails.
    """

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
            "observation_size": observation_size,
            "action_size": action_size,
            "hidden": list(config.hidden),
        }
        self.actor = make_sac_actor(observation_size, action_size, config.hidden, device=device)
        critic = make_sac_critic(observation_size, action_size, config.hidden, num_nets=config.critics, device=device)
        self.loss = SACLoss(
            self.actor,
            critic,
            num_qvalue_nets=config.critics,
            loss_function="l2",
            target_entropy=-float(action_size),
        )
        self.loss.make_value_estimator(gamma=config.gamma)
        self._updater = SoftUpdate(self.loss, tau=config.tau)
        parameters = [parameter for parameter in self.loss.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.Adam(parameters, lr=config.learning_rate, fused=True, capturable=self._capturable)
        self._may_fall_back = compiled is None
        self._losses = self._eager_losses if compiled is False else torch.compile(self._eager_losses, fullgraph=True)

    @property
    def _capturable(self) -> bool:
        """Whether the optimiser works without the host, as a graph demands. PyTorch has that on CUDA only."""
        return self.device.type == "cuda"

    def act(self, observation: Tensor, deterministic: bool = False) -> Tensor:
        """Actions `[E, A]` in [-1, 1], on the networks' device: drawn, or the tanh of the mean.

        Does not synchronise, unless the observations are on another device.

        Args:
            observation: `[E, O]` float32.
            deterministic: Whether to take the tanh of the mean.
        """
        with torch.no_grad():
            inputs = TensorDict({"observation": observation.to(self.device)}, observation.shape[:1])
            distribution = self.actor.get_dist(inputs)
            assert isinstance(distribution, TanhNormal)
            return distribution.deterministic_sample if deterministic else distribution.sample()

    def update(self, batch: TensorDict) -> Tensor:
        """Take one step of the optimiser on ``batch``, and write ``"td_error"`` into it.

        Returns:
            The values of `LOSS_NAMES`, `[5]` float32 on the device. Does not synchronise, and can be captured into a
            CUDA graph.
        """
        try:
            values = self._gradients(batch)
        except RuntimeError as error:
            # Imported here, since it takes seconds, and nothing else needs it.
            from torch._dynamo.exc import TorchDynamoException

            # The compiler fails at the first call only, before a parameter has changed.
            if not isinstance(error, TorchDynamoException):
                raise
            if not self._may_fall_back:
                raise UsageError(f"torch.compile failed, --no-compile does without it: {error}") from error
            warnings.warn(f"torch.compile failed, going on without it: {error}", stacklevel=2)
            self._losses = self._eager_losses
            values = self._gradients(batch)
        self._optimizer.step()
        self._updater.step()
        return values

    def _gradients(self, batch: TensorDict) -> Tensor:
        """Set the gradient of every parameter. Returns the values of `LOSS_NAMES`."""
        total, values = self._losses(batch)
        self._optimizer.zero_grad(set_to_none=True)
        total.backward()
        return values

    def _eager_losses(self, batch: TensorDict) -> tuple[Tensor, Tensor]:
        """The sum to minimise, and the values of `LOSS_NAMES`."""
        losses = self.loss(batch)
        # The losses share no parameters, so their sum gives each parameter the gradient of its own loss.
        total = losses["loss_qvalue"] + losses["loss_actor"] + losses["loss_alpha"]
        return total, torch.stack([losses[name].detach().reshape(()) for name in LOSS_NAMES])

    def state_dict(self) -> dict[str, Any]:
        """Networks, temperature and optimiser."""
        return {"loss": self.loss.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; its tensors may be on any device."""
        self.loss.load_state_dict(state["loss"])
        self._optimizer.load_state_dict(state["optimizer"])
        # This setting depends on the device, not on the run.
        for group in self._optimizer.param_groups:
            group["capturable"] = self._capturable

    def save_model(self, path: str | os.PathLike[str]) -> None:
        """Write the policy to ``path``, for `load_actor`."""
        save(path, {**self._shape, "actor": self.actor.state_dict()})


def load_actor(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> ProbabilisticTensorDictSequential:
    """The trained policy in ``path``: it reads ``"observation"`` `[*, O]` and writes ``"action"`` `[*, A]` in [-1, 1].

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file does not hold a policy, or is damaged.
    """
    model = load(path)
    try:
        hidden: Sequence[int] = model["hidden"]
        actor = make_sac_actor(model["observation_size"], model["action_size"], hidden, device=device)
        actor.load_state_dict(model["actor"])
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"{os.fspath(path)} does not hold a policy: {error!r}") from None
    return actor
