"""SAC, FastSAC, FlashSAC and FastTD3 as algorithms of rsl_rl: what its runner calls PPO's methods for, they do here.

The runner's loop is ``act``, ``env.step``, ``process_env_step``, and after ``num_steps_per_env`` of these
``compute_returns`` and ``update``. PPO learns in ``update``. An algorithm here learns in each ``process_env_step``,
from rows that it draws of its ring, and reports its losses in ``update``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import torch
from rsl_rl.utils import resolve_callable, resolve_obs_groups
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from gpubuf import modules, objectives
from gpubuf.data import LazyTensorStorage, Normalize, RewardScale, TensorDictReplayBuffer
from gpubuf.data.storage.layout import Key, Leaf
from gpubuf.data.transforms import Compose
from gpubuf.integrations.rsl_rl.losses import CategoricalTD3Loss
from gpubuf.integrations.rsl_rl.policy import Policy
from gpubuf.learner import Learner
from gpubuf.optim import AdamW
from gpubuf.planning import Plan, plan
from gpubuf.train.algorithms import GAUSSIAN, Deterministic, Gaussian, StickyNoise

# Least standard deviation that observations are divided by, and largest magnitude of returns of scaled rewards.
_LEAST_DEVIATION, _LARGEST_RETURN = 0.01, 5.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The keys of ``cfg["algorithm"]`` that all algorithms have.

    Attributes:
        learning_rate: of actor, critics and temperature.
        weight_decay: of actor and critics.
        gamma: the discount.
        tau: share of the target critics that each update replaces by the critics.
        batch_size: rows of an update.
        updates_per_step: updates for each step of all environments; 0.5 for one at every second step.
        policy_frequency: updates of the critics for each one that also trains the policy.
        learning_starts: steps of all environments, with random actions, before the first update.
        buffer_steps: steps of each environment that the ring holds, T.
        n_steps: steps of a transition, 1 .. 64.
        num_critics: critics in the ensemble.
        action_scale: what actions of -1 and 1 of the policy are for the environments: a number, or one for each.
        obs_storage_dtype: "float16" or "bfloat16": observations in half the memory. They are float32 in batches.
        next_capacity: room for last observations of episodes that timed out; None: by the length of episodes.
        save_buffer: whether checkpoints hold the ring, so that training continues exactly.
        symmetry_cfg: as for PPO: ``data_augmentation_func``, with ``use_data_augmentation``.
        rnd_cfg: None: random network distillation is for PPO.
    """

    learning_rate: float = 3e-4
    weight_decay: float = 0.0
    gamma: float = 0.99
    tau: float = 0.005
    batch_size: int = 2048
    updates_per_step: float = 1.0
    policy_frequency: int = 1
    learning_starts: int = 10
    buffer_steps: int = 1024
    n_steps: int = 1
    num_critics: int = 2
    action_scale: float | Sequence[float] = 1.0
    obs_storage_dtype: str | None = None
    next_capacity: int | None = None
    save_buffer: bool = False
    symmetry_cfg: dict[str, Any] | None = None
    rnd_cfg: None = None


@dataclass(frozen=True, kw_only=True)
class SACSettings(Settings):
    """Those of SAC: also the first temperature, and the entropy that it aims at ("auto": minus the components)."""

    alpha_init: float = 1.0
    target_entropy: float | str = "auto"


@dataclass(frozen=True, kw_only=True)
class FastSACSettings(SACSettings):
    """Those of FastSAC, as in its program: also the atoms, and whether rewards are scaled so that returns are in -5..5.

    The scale is that of :class:`gpubuf.RewardScale`.
    """

    weight_decay: float = 0.001
    gamma: float = 0.97
    tau: float = 0.125
    batch_size: int = 8192
    updates_per_step: float = 8.0
    policy_frequency: int = 4
    alpha_init: float = 0.001
    target_entropy: float | str = 0.0
    num_atoms: int = 101
    v_min: float = -20.0
    v_max: float = 20.0
    reward_scaling: bool = False


@dataclass(frozen=True, kw_only=True)
class FlashSACSettings(SACSettings):
    """Those of FlashSAC, as in its program: also the most steps for which exploration holds its noise."""

    tau: float = 0.01
    policy_frequency: int = 2
    updates_per_step: float = 2.0
    n_steps: int = 3
    alpha_init: float = 0.01
    num_atoms: int = 101
    v_min: float = -5.0
    v_max: float = 5.0
    reward_scaling: bool = True
    noise_hold: int = 16


@dataclass(frozen=True, kw_only=True)
class FastTD3Settings(Settings):
    """Those of FastTD3, as in its program: also the noise of next actions, and the range of that of exploration."""

    weight_decay: float = 0.1
    gamma: float = 0.97
    tau: float = 0.1
    batch_size: int = 32768
    updates_per_step: float = 2.0
    policy_frequency: int = 2
    num_atoms: int = 101
    v_min: float = -10.0
    v_max: float = 10.0
    reward_scaling: bool = False
    policy_noise: float = 0.001
    noise_clip: float = 0.5
    noise_std_min: float = 0.001
    noise_std_max: float = 0.4


@dataclass(frozen=True, kw_only=True)
class Model:
    """The keys of ``cfg["actor"]`` and ``cfg["critic"]``.

    Attributes:
        hidden_dims: width of each hidden layer; with FlashSAC of each residual block, all the same.
        activation: the activation, of those that the algorithm has.
        obs_normalization: give each element of its observations mean 0 and variance 1, by running statistics.
        class_name: "MLPModel", of rsl_rl's models.
        distribution_cfg: None: the algorithm has the distribution of its policy.
    """

    hidden_dims: Sequence[int]
    activation: str
    obs_normalization: bool = False
    class_name: str = "MLPModel"
    distribution_cfg: None = None


class OffPolicy:
    """Base class of the algorithms.

    Args:
        obs: observations, a TensorDict ``[E]`` of groups ``[E, D]``.
        env: the environments.
        obs_groups: the groups that actor and critics see.
        actor, critic: their models.
        settings: of the algorithm.
        device: of networks and ring.

    Attributes:
        policy: the policy.
        buffer: the ring, ``[T, E]`` rows.
        loss, optimizer, learner: what an update is made of.
        learning_rate: that of the optimiser, for the log.
    """

    Settings: ClassVar[type[Settings]] = Settings
    #: What the models have where the configuration says nothing.
    actor_defaults: ClassVar[dict[str, Any]] = {"hidden_dims": (256, 256), "activation": "relu"}
    critic_defaults: ClassVar[dict[str, Any]] = actor_defaults
    #: The activations that the networks can have.
    activations: ClassVar[dict[str, type[nn.Module]]] = {"relu": nn.ReLU, "elu": nn.ELU, "swish": nn.SiLU}
    actions: ClassVar[Gaussian] = GAUSSIAN
    betas: ClassVar[tuple[float, float]] = (0.9, 0.999)
    unit_rows: ClassVar[bool] = False

    def __init__(
        self,
        obs: Any,
        env: Any,
        obs_groups: dict[str, list[str]],
        actor: Model,
        critic: Model,
        settings: Any,
        device: Any,
    ) -> None:
        self.settings, self.device = settings, torch.device(device)
        self.num_envs, self.num_actions = env.num_envs, env.num_actions
        widths = {name: _width(obs, name) for name in (*obs_groups["actor"], *obs_groups["critic"])}
        self._keys: dict[str, Key] = {name: ("observation", name) for name in widths}
        seen = [{name: widths[name] for name in obs_groups[part]} for part in ("actor", "critic")]
        (by_actor, width), (by_critics, critic_width) = (
            ([self._keys[name] for name in part], sum(part.values())) for part in seen
        )
        network = self.make_actor(actor, width, in_keys=by_actor, device=self.device)
        nets: dict[str, Any] = {"num_nets": settings.num_critics, "device": self.device}
        critics = self.make_critics(critic, critic_width, in_keys=[*by_critics, ("action",)], **nets)
        self.policy = Policy(network, self.actions, seen[0], settings.action_scale, self.num_actions, self.device)
        self.loss = self.make_loss(network, critics, num_qvalue_nets=settings.num_critics)
        self.loss.make_value_estimator(gamma=settings.gamma)
        self.optimizer = self._make_optimizer((network, critics) if self.unit_rows else ())
        self.normalize = self._make_normalize(widths, _normalised(obs_groups, actor, critic))
        scaled = getattr(settings, "reward_scaling", False)
        self.reward_scale = RewardScale(settings.gamma, _LARGEST_RETURN) if scaled else None
        self._storage = self._storage_options(env.max_episode_length)
        self._leaves = self._make_leaves(widths)
        self.buffer = self._make_buffer(env)
        self.learner = Learner(self.loss, self.optimizer, buffer=self.buffer)
        self.learning_rate = settings.learning_rate
        self.steps, self.updates, self._owed = 0, 0, 0.0
        self._sums: dict[str, tuple[Tensor, int]] = {}
        self._obs: Any = None
        self._action = torch.zeros(self.num_envs, self.num_actions, device=self.device)

    @classmethod
    def construct_algorithm(cls, obs: Any, env: Any, cfg: dict[str, Any], device: str) -> Self:
        """Make the algorithm of a configuration.

        Raises:
            ValueError: a key is unknown, or a value is not possible here; the message names the known ones.
        """
        given = cfg["algorithm"]
        settings = _checked(cls.Settings, "algorithm", {key: given[key] for key in given if key != "class_name"})
        actor = _checked(Model, "actor", {**cls.actor_defaults, **cfg.get("actor", {})})
        critic = _checked(Model, "critic", {**cls.critic_defaults, **cfg.get("critic", {})})
        for part, model in (("actor", actor), ("critic", critic)):
            if model.class_name != "MLPModel" or model.distribution_cfg is not None:
                raise ValueError(
                    f"{cls.__name__} has its own {part}: an MLPModel without distribution_cfg, got {model}"
                )
            if model.activation.lower() not in cls.activations:
                raise ValueError(f"the {part} of {cls.__name__} has {list(cls.activations)}, got {model.activation!r}")
        for name, value in (("multi_gpu", cfg.get("multi_gpu")), ("torch_compile_mode", cfg.get("torch_compile_mode"))):
            if value is not None:
                raise ValueError(
                    f"{cls.__name__} learns on one GPU, and by a CUDA graph there: no {name}, got {value!r}"
                )
        cfg["obs_groups"] = resolve_obs_groups(obs, cfg["obs_groups"], ["actor", "critic"])
        return cls(obs, env, cfg["obs_groups"], actor, critic, settings, device)

    # What sets an algorithm apart

    def make_actor(self, model: Model, width: int, **options: Any) -> Any:
        """The actor, of a model, the width of what it sees, ``in_keys`` and ``device``."""
        raise NotImplementedError

    def make_critics(self, model: Model, width: int, **options: Any) -> Any:
        """The critics, as :meth:`make_actor`, of which there are ``num_nets``."""
        raise NotImplementedError

    def make_loss(self, actor: Any, critics: Any, **options: Any) -> Any:
        """The loss of both."""
        raise NotImplementedError

    def explore(self, output: Any) -> tuple[Tensor, Tensor]:
        """(actions in [-1, 1] of an output of the policy's network, their standard deviation)."""
        return GAUSSIAN.explored(output, None), output[1]

    def after_step(self, ended: Tensor) -> None:
        """Called after each step, with what environments ended an episode, bool ``[E]``."""

    # The loop of the runner

    @torch.no_grad()
    def act(self, obs: Any) -> Tensor:
        """Actions ``[E, A]`` of the exploration. No host sync."""
        self._obs = obs
        if self.updates == 0 and self.steps < self.settings.learning_starts:
            self._action = self.actions.random(self.num_envs, self.num_actions, self.device)
        else:
            self._action, self.policy.output_std = self.explore(self.policy.output(obs))
        return self.policy.action_scale * self._action

    @torch.inference_mode(False)
    def process_env_step(self, obs: Any, rewards: Tensor, dones: Tensor, extras: dict[str, Any]) -> None:
        """Store a step of all environments, and run the updates that are due. No host sync.

        Args:
            obs: the observations after it, of new episodes where one ended.
            rewards, dones: ``[E]``.
            extras: ``"time_outs"``, ``[E]``: which episodes ended by their time limit alone. Their value is
                bootstrapped from ``"time_outs_obs"``, their last observations, a TensorDict as ``obs``, or without it,
                as by PPO, from the observations before the step.
        """
        with torch.no_grad():
            ended = dones.bool()
            truncated = ended & extras["time_outs"].bool() if "time_outs" in extras else torch.zeros_like(ended)
            last, after = extras.get("time_outs_obs", self._obs), truncated.unsqueeze(-1)
            columns: dict[Any, Tensor] = {key: self._obs[name] for name, key in self._keys.items()}
            columns |= {
                ("next", *key): torch.where(after, last[name], obs[name]).to(columns[key].dtype)
                for name, key in self._keys.items()
            }
            columns |= {"action": self._action, ("next", "reward"): rewards}
            columns |= {("next", "terminated"): ended & ~truncated, ("next", "truncated"): truncated}
            self.buffer.add_columns(columns)
            self.steps += 1
            self._follow_statistics()
            self.after_step(ended)
        if self.steps > self.settings.learning_starts:
            self._owed += self.settings.updates_per_step
        while self._owed >= 1:
            self._owed -= 1
            self.updates += 1
            for name, value in self.learner(policy=self.updates % self.settings.policy_frequency == 0).items():
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = total + value, count + 1

    def compute_returns(self, obs: Any) -> None:
        """Nothing: targets are made of what is drawn."""

    def update(self) -> dict[str, float]:
        """The mean losses since the last call. Synchronises."""
        found = {name: float(total) / count for name, (total, count) in self._sums.items()}
        self._sums = {}
        return found

    # The model

    def get_policy(self) -> Policy:
        """The policy."""
        return self.policy

    def train_mode(self) -> None:
        """Let policy and critics learn."""
        self.policy.train()
        self.loss.train()

    def eval_mode(self) -> None:
        """Let policy and critics be used."""
        self.policy.eval()
        self.loss.eval()

    def broadcast_parameters(self) -> None:
        """Nothing: there is one process."""

    # State

    def save(self) -> dict[str, Any]:
        """Policy, critics, optimiser and statistics; with ``save_buffer`` also the ring and the random streams."""
        state = {
            "actor_state_dict": self.policy.state_dict(),
            "critic_state_dict": {key: value for key, value in self.loss.state_dict().items() if not _of_actor(key)},
            "optimizer_state_dict": self.optimizer.state_dict(),
            "statistics_state_dict": [None if each is None else each.state_dict() for each in self._statistics],
            "updates": self.updates,
        }
        if self.settings.save_buffer:
            cuda = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
            random = torch.get_rng_state(), cuda
            counts = self.steps, self._owed
            state["buffer_state_dict"] = {"buffer": self.buffer.state_dict(), "counts": counts, "random": random}
        return state

    def load(self, loaded_dict: dict[str, Any], load_cfg: dict[str, Any] | None, strict: bool) -> bool:
        """Restore what :meth:`save` returned.

        Args:
            loaded_dict: it.
            load_cfg: which parts: ``"actor"``, ``"critic"``, ``"optimizer"``, ``"buffer"``, ``"iteration"``. None: all.
            strict: whether networks must have exactly these tensors.

        Returns:
            Whether the runner goes on from the saved iteration.
        """
        parts = dict.fromkeys(("actor", "critic", "optimizer", "buffer", "iteration"), True)
        parts = parts if load_cfg is None else load_cfg
        if parts.get("actor"):
            self.policy.load_state_dict(loaded_dict["actor_state_dict"], strict=strict)
        if parts.get("critic"):
            own = {key: value for key, value in self.loss.state_dict().items() if _of_actor(key)}
            self.loss.load_state_dict({**own, **loaded_dict["critic_state_dict"]}, strict=strict)
        if parts.get("optimizer"):
            self.optimizer.load_state_dict(loaded_dict["optimizer_state_dict"])
            self.updates = loaded_dict["updates"]
            for each, state in zip(self._statistics, loaded_dict["statistics_state_dict"], strict=True):
                if each is not None:
                    each.load_state_dict(state)
        if parts.get("buffer") and "buffer_state_dict" in loaded_dict:
            saved = loaded_dict["buffer_state_dict"]
            self.buffer.load_state_dict(saved["buffer"])
            self.steps, self._owed = saved["counts"]
            random, cuda = saved["random"]
            torch.set_rng_state(random.cpu())
            if cuda is not None:
                torch.cuda.set_rng_state(cuda.cpu(), self.device)
        return bool(parts.get("iteration", False))

    # The parts

    def plan(self) -> Plan:
        """The memory of the ring, before it is there: see :func:`gpubuf.plan`."""
        spec = {leaf.key: (leaf.shape, leaf.dtype) for leaf in self._leaves}
        rows = self.settings.buffer_steps * self.num_envs
        return plan(spec, rows, envs=self.num_envs, n_steps=self.settings.n_steps, **self._storage)

    @property
    def _statistics(self) -> tuple[Normalize | None, RewardScale | None]:
        return self.normalize, self.reward_scale

    def _make_optimizer(self, unit_rows: Sequence[nn.Module]) -> AdamW:
        alpha = getattr(self.loss, "log_alpha", None)
        learning = [each for each in self.loss.parameters() if each.requires_grad]
        groups = [{"params": [each for each in learning if each is not alpha]}]
        if alpha is not None:
            groups.append({"params": [alpha], "weight_decay": 0.0})
        own = self.settings
        decay: dict[str, Any] = {"weight_decay": own.weight_decay, "unit_rows": unit_rows}
        return AdamW(groups, own.learning_rate, self.betas, targets=self.loss, tau=own.tau, **decay)

    def _make_leaves(self, widths: dict[str, int]) -> list[Leaf]:
        """The keys of a row, as they are written."""
        observations = [Leaf(key, torch.float32, (widths[name],)) for name, key in self._keys.items()]
        following = [Leaf(("next", *leaf.key), leaf.dtype, leaf.shape) for leaf in observations]
        flags = [Leaf(("next", name), torch.bool, ()) for name in ("terminated", "truncated")]
        action = Leaf(("action",), torch.float32, (self.num_actions,))
        return [*observations, *following, action, Leaf(("next", "reward"), torch.float32, ()), *flags]

    def _storage_options(self, episode: Any) -> dict[str, Any]:
        own, keys = self.settings, list(self._keys.values())
        capacity = own.next_capacity
        if capacity is None:
            # Of an episode that timed out the last observation has no other place.
            per_env = own.buffer_steps // max(int(torch.as_tensor(episode).min()), 1) + 2
            capacity = max(self.num_envs * per_env, self.num_envs * own.buffer_steps // 128)
        dtypes = {} if own.obs_storage_dtype is None else dict.fromkeys(keys, getattr(torch, own.obs_storage_dtype))
        return {"dtypes": dtypes, "share_next": keys, "next_capacity": min(capacity, self.num_envs * own.buffer_steps)}

    def _make_normalize(self, widths: dict[str, int], names: list[str]) -> Normalize | None:
        if not names:
            return None
        normalize = Normalize([self._keys[name] for name in names], eps=_LEAST_DEVIATION**2)
        leaves = [Leaf(self._keys[name], torch.float32, (widths[name],)) for name in names]
        normalize.bind(leaves, self.num_envs, self.device)
        return normalize

    def _follow_statistics(self) -> None:
        """Have the policy see observations as batches have them."""
        known = () if self.normalize is None else self.normalize.keys
        start = 0
        for name in self.policy.obs_groups:
            key = self._keys[name]
            if self.normalize is not None and key in known:
                mean, factor = self.normalize.mean(key), self.normalize.factor(key)
                self.policy.mean[start : start + len(mean)] = mean
                self.policy.factor[start : start + len(mean)] = factor
            start += self._obs[name].shape[-1]

    def _make_buffer(self, env: Any) -> TensorDictReplayBuffer:
        own, symmetry = self.settings, self.settings.symmetry_cfg
        transforms: list[Any] = [] if self.reward_scale is None else [self.reward_scale]
        process = [] if self.normalize is None else [self.normalize]
        if symmetry is not None:
            # The function knows observations as the environments give them.
            transforms, process = [Symmetry(env, symmetry, self.policy.action_scale), *process, *transforms], []
        return TensorDictReplayBuffer(
            storage=LazyTensorStorage(own.buffer_steps * self.num_envs, device=self.device, ndim=2, **self._storage),
            batch_size=own.batch_size,
            dim_extend=0,
            n_steps=own.n_steps,
            gamma=own.gamma,
            process=process,
            transform=Compose(*transforms) if transforms else None,
        )


class Symmetry:
    """Appends the mirror images of a batch to it, as rsl_rl's ``Symmetry`` does for PPO. A transform.

    Args:
        env: the environments, for the function.
        cfg: rsl_rl's ``symmetry_cfg``.
        action_scale: what an action of 1 stands for.

    Raises:
        ValueError: the configuration asks for something else.
    """

    def __init__(self, env: Any, cfg: dict[str, Any], action_scale: Tensor) -> None:
        known = {"data_augmentation_func", "use_data_augmentation", "use_mirror_loss", "mirror_loss_coeff"}
        if set(cfg) - known or not cfg.get("use_data_augmentation") or cfg.get("use_mirror_loss"):
            raise ValueError(
                f"symmetry_cfg has {sorted(known)}, with use_data_augmentation and without use_mirror_loss, got {cfg}"
            )
        self._env, self._scale = env, action_scale
        self._function = resolve_callable(cfg["data_augmentation_func"])

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """The batch ``[B]`` and its images, ``[k * B]``."""
        obs, action = self._function(env=self._env, obs=batch["observation"], actions=batch["action"] * self._scale)
        following, _ = self._function(env=self._env, obs=batch["next", "observation"], actions=None)
        out = torch.cat([batch] * (len(obs) // len(batch)))
        out.set("observation", obs).set("action", action / self._scale).set(("next", "observation"), following)
        return out


class SAC(OffPolicy):
    """Soft actor-critic (Haarnoja et al. 2018, arXiv 1812.05905), with a learnt temperature."""

    Settings = SACSettings

    def make_actor(self, model: Model, width: int, **options: Any) -> Any:
        activation = self.activations[model.activation.lower()]
        return modules.make_sac_actor(width, self.num_actions, model.hidden_dims, activation=activation, **options)

    def make_critics(self, model: Model, width: int, **options: Any) -> Any:
        activation = self.activations[model.activation.lower()]
        return modules.make_sac_critic(width, self.num_actions, model.hidden_dims, activation=activation, **options)

    def make_loss(self, actor: Any, critics: Any, **options: Any) -> Any:
        return objectives.SACLoss(actor, critics, loss_function="l2", **self._temperature, **options)

    @property
    def _temperature(self) -> dict[str, Any]:
        return {"target_entropy": self.settings.target_entropy, "alpha_init": self.settings.alpha_init}

    @property
    def _support(self) -> dict[str, Any]:
        own = self.settings
        return {"v_min": own.v_min, "v_max": own.v_max, "num_atoms": own.num_atoms}


class FastSAC(SAC):
    """FastSAC (Seo et al., arXiv 2512.01996; holosoma fc600e7, ``agents/fast_sac``)."""

    Settings = FastSACSettings
    actor_defaults: ClassVar = {"hidden_dims": (512, 256, 128), "activation": "swish", "obs_normalization": True}
    critic_defaults: ClassVar = {**actor_defaults, "hidden_dims": (768, 384, 192)}
    activations: ClassVar = {"swish": nn.SiLU}
    betas = (0.9, 0.95)

    def make_actor(self, model: Model, width: int, **options: Any) -> Any:
        return modules.make_fastsac_actor(width, self.num_actions, model.hidden_dims, **options)

    def make_critics(self, model: Model, width: int, **options: Any) -> Any:
        atoms = self.settings.num_atoms
        return modules.make_fastsac_critic(width, self.num_actions, model.hidden_dims, num_atoms=atoms, **options)

    def make_loss(self, actor: Any, critics: Any, **options: Any) -> Any:
        options |= {**self._temperature, **self._support}
        return objectives.DistributionalSACLoss.fastsac(actor, critics, **options)


class FlashSAC(SAC):
    """FlashSAC (its program at 87edc90, ``agents/flashSAC``). Each of ``hidden_dims`` is a residual block."""

    Settings = FlashSACSettings
    actor_defaults: ClassVar = {"hidden_dims": (128, 128), "activation": "relu"}
    critic_defaults: ClassVar = {"hidden_dims": (256, 256), "activation": "relu"}
    activations: ClassVar = {"relu": nn.ReLU}
    unit_rows = True

    def make_actor(self, model: Model, width: int, **options: Any) -> Any:
        own = self.settings
        self._noise = StickyNoise(self.num_envs, self.num_actions, own.noise_hold, self.device)
        return modules.make_flashsac_actor(width, self.num_actions, **_blocks(model), **options)

    def make_critics(self, model: Model, width: int, **options: Any) -> Any:
        options |= {**_blocks(model), "num_atoms": self.settings.num_atoms}
        return modules.make_flashsac_critic(width, self.num_actions, **options)

    def make_loss(self, actor: Any, critics: Any, **options: Any) -> Any:
        options |= {**self._support, "alpha_init": self.settings.alpha_init}
        if self.settings.target_entropy != "auto":
            options["target_entropy"] = self.settings.target_entropy
        return objectives.DistributionalSACLoss.flashsac(actor, critics, **options)

    def explore(self, output: Any) -> tuple[Tensor, Tensor]:
        return GAUSSIAN.explored(output, self._noise.draw()), output[1]


class FastTD3(SAC):
    """FastTD3 (Seo et al., arXiv 2505.22642; its program at 229ed59).

    Each environment explores with noise of its own standard deviation, which is drawn anew when an episode ends.
    """

    Settings = FastTD3Settings  # type: ignore[assignment]
    actor_defaults: ClassVar = {"hidden_dims": (512, 256, 128), "activation": "relu", "obs_normalization": True}
    critic_defaults: ClassVar = {**actor_defaults, "hidden_dims": (1024, 512, 256)}
    actions = Deterministic()

    def make_actor(self, model: Model, width: int, **options: Any) -> Any:
        self._std = self._drawn_std()
        layers: dict[str, Any] = {"device": options.pop("device")}
        body = modules.MLP(
            width, self.num_actions, model.hidden_dims, self.activations[model.activation.lower()], **layers
        )
        return TensorDictModule(nn.Sequential(body, nn.Tanh()), options["in_keys"], ["action"])

    def make_critics(self, model: Model, width: int, **options: Any) -> Any:
        return super().make_critics(model, width, num_atoms=self.settings.num_atoms, **options)

    def make_loss(self, actor: Any, critics: Any, **options: Any) -> Any:
        own = self.settings
        noise: dict[str, Any] = {"policy_noise": own.policy_noise, "noise_clip": own.noise_clip}
        return CategoricalTD3Loss(actor, critics, bounds=(-1.0, 1.0), **self._support, **noise, **options)

    def explore(self, output: Any) -> tuple[Tensor, Tensor]:
        return torch.addcmul(output, torch.randn_like(output), self._std).clamp_(-1, 1), self._std

    def after_step(self, ended: Tensor) -> None:
        self._std.copy_(torch.where(ended.unsqueeze(-1), self._drawn_std(), self._std))

    def _drawn_std(self) -> Tensor:
        own = self.settings
        return torch.empty(self.num_envs, 1, device=self.device).uniform_(own.noise_std_min, own.noise_std_max)


def _blocks(model: Model) -> dict[str, Any]:
    """Residual blocks of FlashSAC."""
    width, *others = model.hidden_dims
    if set(others) - {width}:
        raise ValueError(f"the residual blocks of FlashSAC have one width, got hidden_dims={model.hidden_dims}")
    return {"width": width, "num_blocks": len(model.hidden_dims)}


def _width(obs: Any, name: str) -> int:
    if obs[name].ndim != 2:
        raise ValueError(f"observations must be [E, D], group {name!r} has the shape {list(obs[name].shape)}")
    return int(obs[name].shape[1])


def _normalised(obs_groups: dict[str, list[str]], actor: Model, critic: Model) -> list[str]:
    """The groups that are normalised."""
    by_actor, by_critic = obs_groups["actor"], obs_groups["critic"]
    both = set(by_actor) & set(by_critic)
    if both and actor.obs_normalization != critic.obs_normalization:
        raise ValueError(f"actor and critic see {sorted(both)}: obs_normalization must be the same for both")
    names = [*(by_actor if actor.obs_normalization else []), *(by_critic if critic.obs_normalization else [])]
    return list(dict.fromkeys(names))


def _of_actor(key: str) -> bool:
    return key.startswith("actor_network_params")


def _checked(kind: Any, part: str, given: dict[str, Any]) -> Any:
    """The keys of a part of the configuration.

    Raises:
        ValueError: one is unknown.
    """
    known = [field.name for field in fields(kind)]
    if unknown := sorted(set(given) - set(known)):
        raise ValueError(f"unknown keys {unknown} of cfg[{part!r}]: there are {known}")
    made = kind(**given)
    if getattr(made, "rnd_cfg", None) is not None:
        raise ValueError("rnd_cfg must be None: random network distillation is for PPO")
    return made
