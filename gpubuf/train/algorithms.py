"""The algorithms of ``gpubuf train``: networks, loss, optimiser and schedule of an agent, and saved policies.

To add one: enter it into `ALGORITHMS`, and give its settings defaults in `gpubuf.train.config`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, nn
from torch.distributions import OneHotCategorical

from gpubuf import modules, objectives
from gpubuf.data import Normalize
from gpubuf.optim import AdamW
from gpubuf.serialization import load, save
from gpubuf.train.config import TrainConfig


class StickyNoise(nn.Module):
    """Standard normal noise for each environment, the same for k steps, k drawn from a truncated zeta distribution.

    k is in 1 .. ``longest`` with a probability proportional to k^-2. Held noise moves a body further than noise that is
    drawn at every step. ("Temporally extended epsilon-greedy exploration", Dabney et al. 2021, holds actions so;
    FlashSAC holds the noise of a policy.)

    A draw changes the same tensors in place without waiting for the device, and can become part of a CUDA graph.

    Args:
        num_envs: Environments, `E`.
        action_size: Numbers in an action, `A`.
        longest: Most steps.
        device: Of the tensors.
    """

    noise: Tensor
    left: Tensor

    def __init__(self, num_envs: int, action_size: int, longest: int, device: torch.device) -> None:
        super().__init__()
        weights = torch.arange(1, longest + 1, dtype=torch.float64, device="cpu").pow(-2)
        # The last one is left out: a number beyond all others stands for the longest.
        self._cumulative = (weights.cumsum(0) / weights.sum())[:-1].float().to(device)
        self.register_buffer("noise", torch.zeros(num_envs, action_size, device=device))
        self.register_buffer("left", torch.zeros(num_envs, dtype=torch.int64, device=device))

    def draw(self) -> Tensor:
        """The noise of the next step, `[E, A]` float32; the next draw overwrites it."""
        over = self.left == 0
        # Every environment draws at every step, also without need: shapes must not depend on values.
        fresh = torch.randn_like(self.noise)
        uniform = torch.rand(self.left.shape, device=self.left.device)
        steps = torch.searchsorted(self._cumulative, uniform, right=True) + 1
        self.noise.copy_(torch.where(over[:, None], fresh, self.noise))
        self.left.copy_(torch.where(over, steps, self.left)).sub_(1)
        return self.noise


class Gaussian:
    """A policy whose network gives mean and standard deviation, `[E, A]` each: actions are their tanh."""

    #: Whether an action is one of several, as a one-hot vector.
    discrete = False

    def best(self, output: Any) -> Tensor:
        """The action without noise, `[E, A]`, each number in [-1, 1]."""
        loc, _ = output
        return cast(Tensor, loc.tanh())

    def explored(self, output: Any, noise: Tensor | None) -> Tensor:
        """An action of the training; ``noise`` is standard normal, `[E, A]`, and drawn anew where it is None."""
        loc, scale = output
        return torch.addcmul(loc, scale, torch.randn_like(loc) if noise is None else noise).tanh_()

    def random(self, num_envs: int, size: int, device: torch.device) -> Tensor:
        """Actions of a run that has not learnt yet, `[E, A]`: all are equally likely."""
        return torch.rand(num_envs, size, device=device).mul_(2).sub_(1)

    def in_units(self, output: Any, low: Tensor, high: Tensor) -> Tensor:
        """`best` as the environment takes it, where -1 and 1 stand for ``low`` and ``high``."""
        return torch.lerp(low, high, ((self.best(output) + 1) / 2).unflatten(-1, low.shape))


GAUSSIAN = Gaussian()


class Deterministic(Gaussian):
    """A policy whose network gives the action itself, in [-1, 1]; TD3 explores with noise of 0.1 beside it."""

    def best(self, output: Any) -> Tensor:
        return cast(Tensor, output)

    def explored(self, output: Any, noise: Tensor | None) -> Tensor:
        noise = torch.randn_like(output) if noise is None else noise
        return torch.add(output, noise, alpha=_EXPLORATION).clamp_(-1, 1)


def _one_hot(index: Tensor, size: int) -> Tensor:
    """PyTorch's own looks at the numbers on a CPU, so that no step with it can be replayed."""
    return (index.unsqueeze(-1) == torch.arange(size, device=index.device)).float()


class Discrete(Gaussian):
    """A policy whose network gives the logits of `A` actions, which are one-hot vectors."""

    discrete = True

    def best(self, output: Any) -> Tensor:
        return _one_hot(output.argmax(-1), output.shape[-1])

    def explored(self, output: Any, noise: Tensor | None) -> Tensor:
        return cast(Tensor, OneHotCategorical(logits=output, validate_args=False).sample())

    def random(self, num_envs: int, size: int, device: torch.device) -> Tensor:
        return _one_hot(torch.randint(size, (num_envs,), device=device), size)

    def in_units(self, output: Any, low: Tensor, high: Tensor) -> Tensor:
        """The number of the best action, counted from ``low``."""
        return low + cast(Tensor, output.argmax(-1))


class EpsilonGreedy(Discrete):
    """A policy whose network gives the values of `A` actions: the best one, or with probability epsilon any."""

    def explored(self, output: Any, noise: Tensor | None) -> Tensor:
        """``noise`` is epsilon, `[]`."""
        assert noise is not None
        anything = self.random(len(output), output.shape[1], output.device)
        return torch.where(torch.rand(len(output), 1, device=output.device) < noise, anything, self.best(output))


# Standard deviation of the noise on TD3's actions, as in its paper.
_EXPLORATION = 0.1

#: The values that an update records, in this order, where there is a temperature.
_SAC_LOSSES = ("loss_qvalue", "loss_actor", "loss_alpha", "alpha", "entropy")


@dataclass(frozen=True)
class Algorithm:
    """What sets an algorithm apart.

    Attributes:
        title: Its name, for people.
        actor: Makes the policy, of (`O`, `A`, hidden widths, device). `load_policy` has these from the file of a model.
        critics: Makes the critics, of (the run's settings, `O`, `A`, device); None if the policy gives the values.
        loss: Makes the loss, of (policy, critics, ``num_qvalue_nets``, options).
        options: Those of the loss, of (the run's settings, `A`).
        betas: Of the optimiser.
        weight_decay: Of the optimiser, for everything but the temperature.
        unit_rows: Whether the optimiser keeps the weights of all networks at unit rows.
        actions: How outputs of the policy's network become actions.
        losses: The values that an update records.
        images: Whether `O` may be the shape of images, `[C, H, W]`, in the place of a number.
    """

    title: str
    actor: Callable[..., nn.Module]
    critics: Callable[[TrainConfig, int, int, torch.device], Any]
    loss: Callable[..., objectives.LossModule]
    options: Callable[[TrainConfig, int], dict[str, Any]]
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    unit_rows: bool = False
    actions: Gaussian = GAUSSIAN
    losses: tuple[str, ...] = _SAC_LOSSES
    images: bool = False


def _sac_critics(config: TrainConfig, observation: int, action: int, device: torch.device) -> TensorDictModule:
    return modules.make_sac_critic(observation, action, config.hidden, num_nets=config.critics, device=device)


def _td_options(config: TrainConfig, action: int) -> dict[str, Any]:
    return {"loss_function": "l2", "target_entropy": -float(action)}


# Critics whose minimum makes a target of REDQ.
_SUBSET = 2


def _redq_options(config: TrainConfig, action: int) -> dict[str, Any]:
    subset = {"sub_sample_len": min(_SUBSET, config.critics), "min_alpha": None, "max_alpha": None}
    return {**_td_options(config, action), **subset}


#: CrossQ has a batch norm before every layer.
_BATCH_NORM: dict[str, Any] = {"norm": "batch", "norm_place": "before"}


def _crossq_actor(observation: int, action: int, hidden: Sequence[int], *, device: torch.device | str) -> nn.Module:
    network = modules.MLP(observation, 2 * action, hidden, **_BATCH_NORM, device=device)
    return modules.tanh_normal_actor(nn.Sequential(network, modules.GaussianParameters()), action, device=device)


def _crossq_critics(config: TrainConfig, observation: int, action: int, device: torch.device) -> TensorDictModule:
    network = modules.EnsembleMLP(config.critics, observation + action, 1, config.hidden, **_BATCH_NORM, device=device)
    return TensorDictModule(network, ["observation", "action"], ["state_action_value"])


def _fastsac_critics(config: TrainConfig, observation: int, action: int, device: torch.device) -> TensorDictModule:
    nets: Any = {"num_atoms": config.atoms, "num_nets": config.critics}
    return modules.make_fastsac_critic(observation, action, config.hidden, **nets, device=device)


def _support(config: TrainConfig) -> dict[str, Any]:
    return {"v_min": config.v_min, "v_max": config.v_max, "num_atoms": config.atoms}


# Features within a residual block of FlashSAC, as a multiple of its width.
_EXPANSION = 2

# FlashSAC's first temperature: rewards are scaled so that returns are around 1.
_TEMPERATURE = 0.01


def _flashsac_actor(observation: int, action: int, hidden: Sequence[int], *, device: torch.device | str) -> nn.Module:
    """``hidden`` has the width of each residual block of a critic. Those of the policy are half as wide."""
    width, blocks = max(hidden[0] // 2, 1), len(hidden)
    return modules.make_flashsac_actor(
        observation, action, width, num_blocks=blocks, expansion=_EXPANSION, device=device
    )


def _flashsac_critics(config: TrainConfig, observation: int, action: int, device: torch.device) -> TensorDictModule:
    blocks: Any = {"num_blocks": len(config.hidden), "expansion": _EXPANSION}
    nets: Any = {"num_atoms": config.atoms, "num_nets": config.critics}
    return modules.make_flashsac_critic(observation, action, config.hidden[0], **blocks, **nets, device=device)


def _td3_actor(observation: int, action: int, hidden: Sequence[int], *, device: torch.device | str) -> nn.Module:
    network = nn.Sequential(modules.MLP(observation, action, hidden, device=device), nn.Tanh())
    return TensorDictModule(network, ["observation"], ["action"])


def _discrete_actor(observation: int, action: int, hidden: Sequence[int], *, device: torch.device | str) -> nn.Module:
    return ProbabilisticTensorDictSequential(
        TensorDictModule(modules.MLP(observation, action, hidden, device=device), ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=OneHotCategorical),
    )


def _discrete_critics(config: TrainConfig, observation: int, action: int, device: torch.device) -> TensorDictModule:
    network = modules.EnsembleMLP(config.critics, observation, action, config.hidden, device=device)
    return TensorDictModule(network, ["observation"], ["action_value"])


# Least height and width of images that DQN's convolutions take; smaller ones get MinAtar's.
_LEAST_IMAGE = 36


def _dqn(observation: Any, action: int, hidden: Sequence[int], *, device: torch.device | str) -> nn.Module:
    small = not isinstance(observation, int) and min(observation[1:]) < _LEAST_IMAGE
    return modules.make_dqn(observation, action, hidden, layers="minatar" if small else "nature", device=device)


# Of the largest entropy. Near 1, as in the paper, a policy hardly chooses.
_ENTROPY = 0.3

#: By the name that ``--algo`` takes.
ALGORITHMS: dict[str, Algorithm] = {
    # Haarnoja et al. 2018, arXiv:1812.05905, with a learnt temperature.
    "sac": Algorithm("SAC", modules.make_sac_actor, _sac_critics, objectives.SACLoss, _td_options),
    # Seo et al., arXiv:2512.01996; holosoma fc600e7, ``agents/fast_sac``; in a size for a CPU.
    "fastsac": Algorithm(
        "FastSAC",
        modules.make_fastsac_actor,
        _fastsac_critics,
        objectives.DistributionalSACLoss.fastsac,
        lambda config, action: {**_support(config), "target_entropy": 0.0},
        betas=(0.9, 0.95),
        weight_decay=0.001,
    ),
    # Its program at 87edc90, ``agents/flashSAC``; in a size for a CPU.
    "flashsac": Algorithm(
        "FlashSAC",
        _flashsac_actor,
        _flashsac_critics,
        objectives.DistributionalSACLoss.flashsac,
        lambda config, action: {**_support(config), "alpha_init": _TEMPERATURE},
        unit_rows=True,
    ),
    # Randomized ensembled double Q-learning: Chen et al. 2021, arXiv:2101.05982.
    "redq": Algorithm("REDQ", modules.make_sac_actor, _sac_critics, objectives.REDQLoss, _redq_options),
    # Bhatt et al. 2024, arXiv:1902.05605.
    "crossq": Algorithm(
        "CrossQ", _crossq_actor, _crossq_critics, objectives.CrossQLoss, _td_options, betas=(0.5, 0.999)
    ),
    # Fujimoto et al. 2018, arXiv:1802.09477.
    "td3": Algorithm(
        "TD3",
        _td3_actor,
        _sac_critics,
        objectives.TD3Loss,
        lambda config, action: {"loss_function": "l2", "bounds": (-1.0, 1.0)},
        actions=Deterministic(),
        losses=("loss_qvalue", "loss_actor"),
    ),
    # Christodoulou 2019, arXiv:1910.07207.
    "discrete-sac": Algorithm(
        "Discrete SAC",
        _discrete_actor,
        _discrete_critics,
        objectives.DiscreteSACLoss,
        lambda config, action: {
            **{"loss_function": "l2", "action_space": "one-hot", "num_actions": action},
            "target_entropy_weight": _ENTROPY,
        },
        actions=Discrete(),
    ),
    # Mnih et al., Nature 518, 2015, with double Q-learning, van Hasselt et al., arXiv 1509.06461.
    "dqn": Algorithm(
        "DQN",
        _dqn,
        lambda *_: None,
        lambda network, _, num_qvalue_nets, **options: objectives.DQNLoss(network, **options),
        lambda config, action: {"loss_function": "smooth_l1", "action_space": "one-hot", "double_dqn": True},
        actions=EpsilonGreedy(),
        losses=("loss",),
        images=True,
    ),
}


class CompiledLosses(nn.Module):
    """A loss that is compiled; see :class:`~gpubuf.Learner` for how it is called."""

    def __init__(self, loss: objectives.LossModule) -> None:
        super().__init__()
        self.delayed_targets = loss.delayed_targets
        whole: Callable[[TensorDict], Any] = lambda batch: loss(batch)  # noqa: E731
        of_critics: Callable[[TensorDict], Any] = lambda batch: cast(Any, loss).critic_losses(batch)  # noqa: E731
        self._whole, self.critic_losses = (torch.compile(each, fullgraph=True) for each in (whole, of_critics))

    def forward(self, batch: TensorDict) -> Any:
        """All losses."""
        return self._whole(batch)


def make_optimizer(loss: Any, config: TrainConfig, algorithm: Algorithm, networks: Sequence[nn.Module]) -> AdamW:
    """The optimiser of what learns in a loss, which moves its targets as well."""
    alpha = getattr(loss, "log_alpha", None)
    learning = [p for p in loss.parameters() if p.requires_grad]
    temperature = [p for p in learning if p is alpha]
    groups = [{"params": [p for p in learning if p is not alpha]}, {"params": temperature, "weight_decay": 0.0}]
    targets: dict[str, Any] = {} if config.tau is None else {"targets": loss, "tau": config.tau}
    unit_rows = networks if algorithm.unit_rows else ()
    options: dict[str, Any] = {"weight_decay": algorithm.weight_decay, "unit_rows": unit_rows, **targets}
    return AdamW(groups, config.learning_rate, algorithm.betas, **options)


class Agent:
    """A policy that acts, with its critics, and the loss and optimiser by which they learn.

    Args:
        config: The run's settings.
        observation_shape: Of an observation, `O`: its numbers, or `[C, H, W]`, an image.
        action_size: Numbers in an action, `A`; each is in [-1, 1].
        device: Of the networks.

    Attributes:
        actor: The policy.
        actions: How outputs of its network become actions.
        epsilon: Share of the actions of a step of training that are random, `[]`, to be set in place; None where the
            policy itself draws.
        normalize: Normalises observations as the buffer does those of its batches; None: they are taken as they are.
    """

    def __init__(
        self, config: TrainConfig, observation_shape: tuple[int, ...], action_size: int, device: torch.device
    ) -> None:
        self.device = device
        self._images = len(observation_shape) == 3
        observation_size: Any = list(observation_shape) if self._images else observation_shape[0]
        self._shape = {
            "algo": config.algo,
            "observation_size": observation_size,
            "action_size": action_size,
            "hidden": list(config.hidden),
        }
        algorithm = ALGORITHMS[config.algo]
        self.actions = algorithm.actions
        self.actor = algorithm.actor(observation_size, action_size, config.hidden, device=device)
        self._network = network_of(self.actor)
        self.normalize: Normalize | None = None
        self.epsilon = None if config.epsilon is None else torch.ones((), device=device)
        self._noise: StickyNoise | None = None
        if config.noise_hold is not None and config.noise_hold > 1:
            self._noise = StickyNoise(config.num_envs, action_size, config.noise_hold, device)
        self.title, self.loss_names = algorithm.title, algorithm.losses
        critics = algorithm.critics(config, observation_size, action_size, device)
        options = algorithm.options(config, action_size)
        self.loss = algorithm.loss(self.actor, critics, num_qvalue_nets=config.critics, **options)
        self.loss.make_value_estimator(gamma=config.gamma)
        # The run stops at NaN, and is the one that says so.
        self.loss.nan_named = True
        networks = [each for each in (self.actor, critics) if each is not None]
        self.optimizer = make_optimizer(self.loss, config, algorithm, networks)
        #: What the learner calls.
        self.losses = CompiledLosses(self.loss) if config.compile else self.loss

    def act(self, observation: Tensor) -> Tensor:
        """The best actions `[E, A]`, each number in [-1, 1], on the network's device.

        Does not synchronise, unless the observations, `[E, *O]`, are on another device.
        """
        with torch.no_grad():
            return self.actions.best(self._output(observation))

    def explore(self, observation: Tensor) -> Tensor:
        """The actions of a step of training: drawn, with noise that may be held for some steps. See `act`."""
        noise = self.epsilon if self._noise is None else self._noise.draw()
        with torch.no_grad():
            return self.actions.explored(self._output(observation), noise)

    def _output(self, observation: Tensor) -> Any:
        """What the policy's network gives."""
        observation = observation.to(self.device)
        if self.normalize is not None:
            observation = self.normalize(observation)
        return self._network(observation)

    def parameters(self) -> list[Tensor]:
        """Those of policy, critics and temperature that learn."""
        return [parameter for parameter in self.loss.parameters() if parameter.requires_grad]

    def state_dict(self) -> dict[str, Any]:
        """Networks, temperature, optimiser, and noise that is held."""
        state = {"loss": self.loss.state_dict(), "optimizer": self.optimizer.state_dict()}
        return state if self._noise is None else {**state, "noise": self._noise.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; its tensors may be on any device."""
        self.loss.load_state_dict(state["loss"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self._noise is not None:
            self._noise.load_state_dict(state["noise"])

    def save_model(self, path: str | os.PathLike[str], bounds: tuple[Tensor, Tensor]) -> None:
        """Write the policy to ``path``, for `load_policy`, with the statistics of its observations.

        ``bounds`` are what actions of -1 and 1 stand for, in the shape of an action.
        """
        low, high = bounds
        model = {**self._shape, "action_low": low, "action_high": high, "actor": self.actor.state_dict()}
        if self.normalize is not None:
            model["normalize"] = {"mean": self.normalize.mean().float(), "factor": self.normalize.factor()}
        elif self._images:
            # The policy takes float32, and the network divides bytes alone.
            model["normalize"] = {**_AS_THEY_ARE, "factor": torch.tensor(1 / 255, device="cpu")}
        save(path, model)


MODEL_FILE = "model.safetensors"


def network_of(actor: Any) -> nn.Module:
    """The network of a policy, a function of observations."""
    first = actor[0] if isinstance(actor, ProbabilisticTensorDictSequential) else actor
    return cast(nn.Module, first.module)


class Policy(nn.Module):
    """A trained policy as a function: the best action for an observation, in the units of the environment.

    It holds plain tensors and modules, so that `torch.export` and `torch.jit.trace` take it.

    Args:
        network: Of the actor: a function of observations.
        actions: Of its algorithm.
        low, high: What actions of -1 and 1 stand for, in the shape of one action; the first and the last of several.
        mean, factor: The network sees ``(observation - mean) * factor``, float32 `[O]` or `[]`.
    """

    low: Tensor
    high: Tensor
    mean: Tensor
    factor: Tensor

    def __init__(self, network: nn.Module, actions: Gaussian, **buffers: Tensor) -> None:
        super().__init__()
        self.network, self._actions = network, actions
        for name in ("low", "high", "mean", "factor"):
            self.register_buffer(name, buffers[name])

    def forward(self, observation: Tensor | ArrayLike) -> Tensor | NDArray[Any]:
        """The actions for observations `[*, *O]`, in the shape of the action space after the same leading dimensions.

        Pixels are in 0 .. 255.

        A float32 tensor on the policy's device gives a tensor, without a synchronisation. Anything else is read by
        NumPy, and gives an array. Actions are float32; one of several is its number, int64.
        """
        if not isinstance(observation, Tensor):
            given = torch.as_tensor(np.asarray(observation, dtype=np.float32), device=self.low.device)
            with torch.no_grad():
                return cast(NDArray[Any], self(given).cpu().numpy())
        output = self.network((observation - self.mean) * self.factor)
        return self._actions.in_units(output, self.low, self.high)


# The statistics of observations that are not normalised.
_AS_THEY_ARE = {"mean": torch.zeros((), device="cpu"), "factor": torch.ones((), device="cpu")}


def load_policy(run: str | os.PathLike[str], device: torch.device | str = "cpu") -> Policy:
    """The trained policy of a run, deterministic, with actions in the units of its environment.

    Args:
        run: The folder of the run, or the model in it.
        device: Where the policy computes.

    Raises:
        FileNotFoundError: There is no such run, or it was stopped before its first checkpoint.
        ValueError: The file does not hold a policy, or is damaged.
    """
    path = Path(run)
    path = path / MODEL_FILE if path.is_dir() else path
    model = load(path)
    try:
        algorithm = ALGORITHMS[model["algo"]]
        actor = algorithm.actor(model["observation_size"], model["action_size"], model["hidden"], device=device)
        actor.load_state_dict(model["actor"])
        buffers = {"low": model["action_low"], "high": model["action_high"], **model.get("normalize", _AS_THEY_ARE)}
        # Copies, for the tensors of a file share its memory.
        copies = {name: buffer.to(device, copy=True) for name, buffer in buffers.items()}
        return Policy(network_of(actor), algorithm.actions, **copies).eval()
    except (AttributeError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"{path} does not hold a policy: {error!r}") from None
