"""SAC, FastSAC, FlashSAC and FastTD3 as algorithms of rsl_rl: what its runner calls PPO's methods for, they do here.

The runner's loop is ``act``, ``env.step``, ``process_env_step``, and after ``num_steps_per_env`` of these
``compute_returns`` and ``update``. PPO learns in ``update``. An algorithm here learns in each ``process_env_step``,
from rows that it draws of its ring, and reports its losses in ``update``.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import torch
from rsl_rl.utils import resolve_callable, resolve_obs_groups
from tensordict import TensorDictBase
from torch import Tensor

from gpubuf import modules
from gpubuf.data import LazyTensorStorage, Normalize, ReplayBuffer, RewardScale
from gpubuf.data.storage.layout import Key, Leaf
from gpubuf.data.transforms import Compose
from gpubuf.integrations.rsl_rl.losses import CategoricalTD3Loss
from gpubuf.integrations.rsl_rl.policy import Policy
from gpubuf.learner import Learner
from gpubuf.planning import Plan, plan
from gpubuf.train.algorithms import ALGORITHMS, Algorithm, StickyNoise, make_optimizer

# Least standard deviation that observations are divided by, and largest magnitude of returns of scaled rewards.
_LEAST_DEVIATION, _LARGEST_RETURN = 0.01, 5.0

# An algorithm learns on one GPU, by a CUDA graph there.
_ALONE = {"multi_gpu": None, "torch_compile_mode": None}


class Ring(ReplayBuffer):
    """A buffer for a learner whose rows are drawn uniformly, and multiplied by :class:`Symmetry`."""

    def update_tensordict_priority(self, batch: Any) -> None:
        """Nothing: rows have no priorities."""


class OffPolicy:
    """Base class of the algorithms. docs/integrations/rsl_rl.md says what the keys of a configuration mean.

    Args:
        obs: observations, a TensorDict ``[E]`` of groups ``[E, D]``.
        env: the environments.
        cfg: the runner's configuration.
        device: of networks and ring.

    Raises:
        ValueError: a key is unknown, or a value is not possible here; the message names the known ones.

    Attributes:
        policy: the policy.
        buffer: the ring, ``[T, E]`` rows.
        loss, optimizer, learner: what an update is made of.
        learning_rate: that of the optimiser, for the log.
        steps, updates: of all environments since the ring was empty; in the life of the networks.
    """

    algorithm: ClassVar[Algorithm]
    #: The keys of ``cfg["algorithm"]`` besides its ``class_name``, and what they are by default.
    settings: ClassVar[dict[str, Any]] = {
        **{"learning_rate": 3e-4, "weight_decay": 0.0, "gamma": 0.99, "tau": 0.005, "critics": 2},
        **{"batch_size": 2048, "updates_per_step": 1.0, "policy_every": 1, "learning_starts": 10, "n_steps": 1},
        **{"buffer_steps": 1024, "obs_storage_dtype": None, "next_capacity": None, "save_buffer": False},
        **{"action_scale": 1.0, "scale_rewards": False, "symmetry_cfg": None, "rnd_cfg": None},
    }
    #: The keys of ``cfg["actor"]`` and ``cfg["critic"]``, and what they are by default.
    models: ClassVar[dict[str, dict[str, Any]]]

    def __init__(self, obs: Any, env: Any, cfg: dict[str, Any], device: torch.device | str) -> None:
        self.device, self.num_envs, self.num_actions = torch.device(device), env.num_envs, env.num_actions
        self.own = own = _taken("algorithm", cfg["algorithm"], {"class_name": None, **self.settings}, {"rnd_cfg": None})
        fixed = {"class_name": "MLPModel", "distribution_cfg": None}
        actor, critic = (
            _taken(part, cfg.get(part, {}), {**fixed, **model}, {**fixed, "activation": model["activation"]})
            for part, model in self.models.items()
        )
        _taken("", {name: cfg.get(name) for name in _ALONE}, _ALONE, _ALONE)
        # Up to rsl_rl 5.4 runner and log read it.
        cfg["algorithm"].setdefault("rnd_cfg", None)
        groups = cfg["obs_groups"] = resolve_obs_groups(obs, cfg["obs_groups"], list(self.models))
        seen, known = [{name: obs[name].shape[1] for name in groups[part]} for part in self.models]
        self._widths = {**seen, **known}
        self._keys: dict[str, Key] = {name: ("observation", name) for name in self._widths}
        algorithm = replace(self.algorithm, weight_decay=own.weight_decay)
        network: Any = algorithm.actor(sum(seen.values()), self.num_actions, actor.hidden_dims, device=self.device)
        # What `gpubuf train` calls its settings.
        config: Any = SimpleNamespace(**vars(own), hidden=critic.hidden_dims)
        critics = algorithm.critics(config, sum(known.values()), self.num_actions, self.device)
        (network[0] if hasattr(network, "get_dist") else network).in_keys = [self._keys[name] for name in seen]
        known_keys: list[Any] = [self._keys[name] for name in known]
        critics.in_keys = [*known_keys, "action"]
        scale = torch.tensor(own.action_scale, device="cpu").float().expand(self.num_actions).to(self.device, copy=True)
        self.policy = Policy(network, algorithm.actions, seen, scale)
        options = algorithm.options(config, self.num_actions)
        self.loss = algorithm.loss(network, critics, num_qvalue_nets=own.critics, **options)
        self.loss.make_value_estimator(gamma=own.gamma)
        self.optimizer = make_optimizer(self.loss, config, algorithm, (network, critics))
        self.normalize = self._make_normalize(groups, actor=actor, critic=critic)
        self.reward_scale = RewardScale(own.gamma, _LARGEST_RETURN) if own.scale_rewards else None
        self._storage = self._storage_options(env.max_episode_length)
        self.buffer = self._make_buffer(env)
        self.learner = Learner(self.loss, self.optimizer, buffer=self.buffer)
        self.learning_rate = own.learning_rate
        self._noise = StickyNoise(self.num_envs, self.num_actions, getattr(own, "noise_hold", 1), self.device)
        self._std = self._drawn_std()
        self.steps, self.updates, self._owed = 0, 0, 0.0
        self._sums: dict[str, tuple[Any, int]] = {}

    @classmethod
    def construct_algorithm(cls, obs: Any, env: Any, cfg: dict[str, Any], device: str) -> Self:
        """What rsl_rl calls to make an algorithm. It puts the groups that were found into ``cfg["obs_groups"]``."""
        return cls(obs, env, cfg, device)

    # The loop of the runner

    @torch.no_grad()
    def act(self, obs: Any) -> Tensor:
        """Actions ``[E, A]`` of the exploration. No host sync."""
        self._obs = obs
        if self.updates == 0 and self.steps < self.own.learning_starts:
            self._action = self.algorithm.actions.random(self.num_envs, self.num_actions, self.device)
        else:
            self._action, self.policy.output_std = self._explored(self.policy.output(obs))
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
            for name, key in self._keys.items():
                columns["next", *key] = torch.where(after, last[name], obs[name])
            columns |= {"action": self._action, ("next", "reward"): rewards}
            columns |= {("next", "terminated"): ended & ~truncated, ("next", "truncated"): truncated}
            self.buffer.add_columns(columns)
            self._follow_statistics()
            self._std = torch.where(ended.unsqueeze(-1), self._drawn_std(), self._std)
        self.steps += 1
        if self.steps > self.own.learning_starts:
            self._owed += self.own.updates_per_step
        while self._owed >= 1:
            self._owed -= 1
            self.updates += 1
            for name, value in self.learner(policy=self.updates % self.own.policy_every == 0).items():
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = total + value, count + 1

    def compute_returns(self, obs: Any) -> None:
        """Nothing: targets are made of what is drawn."""

    def update(self) -> dict[str, float]:
        """The mean losses since the last call. Synchronises."""
        found = {name: float(total) / count for name, (total, count) in self._sums.items()}
        self._sums = {}
        return found

    def _explored(self, output: Any) -> tuple[Tensor, Tensor]:
        """(actions in [-1, 1] for an output of the policy's network, their standard deviation)."""
        if isinstance(output, tuple):
            return self.algorithm.actions.explored(output, self._noise.draw()), output[1]
        return torch.addcmul(output, torch.randn_like(output), self._std).clamp_(-1, 1), self._std

    def _drawn_std(self) -> Tensor:
        """Standard deviations of the noise of a policy that has none of its own, ``[E, 1]``."""
        low, high = (getattr(self.own, f"noise_std_{end}", 0.0) for end in ("min", "max"))
        return torch.rand(self.num_envs, 1, device=self.device).mul_(high - low).add_(low)

    # The model

    def get_policy(self) -> Policy:
        """The policy."""
        return self.policy

    def train_mode(self) -> None:
        """Let policy and critics learn."""
        self.policy.train()
        self.loss.train()

    def eval_mode(self) -> None:
        """Let the policy be used."""
        self.policy.eval()

    # State

    def save(self) -> dict[str, Any]:
        """Policy, critics, optimiser and statistics; with ``save_buffer`` also the ring and the random streams."""
        state = {
            "actor_state_dict": self.policy.state_dict(),
            "critic_state_dict": {key: value for key, value in self.loss.state_dict().items() if not _of_actor(key)},
            "optimizer_state_dict": self.optimizer.state_dict(),
            "statistics_state_dict": [each.state_dict() for each in self._statistics],
            "updates": self.updates,
        }
        if self.own.save_buffer:
            exploration = self._noise.state_dict(), self._std, self.steps, self._owed
            random = torch.get_rng_state(), torch.cuda.get_rng_state_all()
            state["buffer_state_dict"] = {"ring": self.buffer.state_dict(), "at": exploration, "random": random}
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
        every = dict.fromkeys(("actor", "critic", "optimizer", "buffer", "iteration"), True)
        parts = every if load_cfg is None else load_cfg
        if parts.get("actor"):
            self.policy.load_state_dict(loaded_dict["actor_state_dict"], strict=strict)
        if parts.get("critic"):
            own = {key: value for key, value in self.loss.state_dict().items() if _of_actor(key)}
            self.loss.load_state_dict({**own, **loaded_dict["critic_state_dict"]}, strict=strict)
        if parts.get("optimizer"):
            self.optimizer.load_state_dict(loaded_dict["optimizer_state_dict"])
            self.updates = loaded_dict["updates"]
        if parts.get("actor") or parts.get("critic"):
            # Networks go on with the observations and rewards that they know.
            for each, state in zip(self._statistics, loaded_dict["statistics_state_dict"], strict=True):
                each.load_state_dict(state)
        if parts.get("buffer") and "buffer_state_dict" in loaded_dict:
            saved = loaded_dict["buffer_state_dict"]
            self.buffer.load_state_dict(saved["ring"])
            noise, self._std, self.steps, self._owed = saved["at"]
            self._noise.load_state_dict(noise)
            torch.set_rng_state(saved["random"][0].cpu())
            torch.cuda.set_rng_state_all([each.cpu() for each in saved["random"][1]])
        return bool(parts.get("iteration", False))

    # The parts

    def plan(self) -> Plan:
        """The memory of the ring, before it is there: see :func:`gpubuf.plan`."""
        spec: dict[Any, Any] = {key: ((self._widths[name],), torch.float32) for name, key in self._keys.items()}
        spec |= {("next", *key): kind for key, kind in spec.items()}
        spec |= {"action": ((self.num_actions,), torch.float32), ("next", "reward"): ((), torch.float32)}
        spec |= {("next", name): ((), torch.bool) for name in ("terminated", "truncated")}
        rows = self.own.buffer_steps * self.num_envs
        return plan(spec, rows, envs=self.num_envs, n_steps=self.own.n_steps, **self._storage)

    @property
    def _statistics(self) -> list[Any]:
        return [each for each in (self.normalize, self.reward_scale) if each is not None]

    def _storage_options(self, episode: Any) -> dict[str, Any]:
        own, keys, rows = self.own, list(self._keys.values()), self.own.buffer_steps * self.num_envs
        capacity = own.next_capacity
        if capacity is None:
            # Of an episode that timed out the last observation has no other place.
            per_env = own.buffer_steps // max(int(torch.as_tensor(episode, device="cpu").min()), 1) + 2
            capacity = max(self.num_envs * per_env, rows // 128)
        dtypes = {} if own.obs_storage_dtype is None else dict.fromkeys(keys, getattr(torch, own.obs_storage_dtype))
        return {"dtypes": dtypes, "share_next": keys, "next_capacity": min(capacity, rows)}

    def _make_normalize(self, groups: dict[str, list[str]], **models: Any) -> Normalize | None:
        """Running statistics of the groups of those models that ask for it."""
        chosen = [groups[part] for part, model in models.items() if model.obs_normalization]
        if len(chosen) == 1 and set(groups["actor"]) & set(groups["critic"]):
            raise ValueError("actor and critic share observations: obs_normalization must be the same for both")
        keys = [self._keys[name] for name in dict.fromkeys(chain(*chosen))]
        if not keys:
            return None
        normalize = Normalize(keys, eps=_LEAST_DEVIATION**2)
        leaves = [Leaf(key, torch.float32, (self._widths[key[-1]],)) for key in keys]
        normalize.bind(leaves, self.num_envs, self.device)
        return normalize

    def _follow_statistics(self) -> None:
        """Have the policy see observations as batches have them."""
        keys = [self._keys[name] for name in self.policy.obs_groups]
        if self.normalize is not None and keys[0] in self.normalize.keys:
            self.policy.mean.copy_(torch.cat([self.normalize.mean(key) for key in keys]))
            self.policy.factor.copy_(torch.cat([self.normalize.factor(key) for key in keys]))

    def _make_buffer(self, env: Any) -> Ring:
        own = self.own
        parts: list[list[Any]] = [[] if each is None else [each] for each in (self.normalize, self.reward_scale)]
        process, transforms = parts
        if own.symmetry_cfg is not None:
            # Its function knows observations as the environments give them.
            symmetry = Symmetry(env, own.symmetry_cfg, self.policy.action_scale)
            process, transforms = [], [symmetry, *process, *transforms]
        return Ring(
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

    def __call__(self, batch: TensorDictBase) -> Any:
        """The batch ``[B]`` and its images, ``[k * B]``."""
        obs, action = self._function(env=self._env, obs=batch["observation"], actions=batch["action"] * self._scale)
        following, _ = self._function(env=self._env, obs=batch["next", "observation"], actions=None)
        out: Any = torch.cat([batch] * (len(obs) // len(batch)))
        return out.set("observation", obs).set("action", action / self._scale).set(("next", "observation"), following)


def _of_program(activation: str, obs_normalization: bool, **hidden_dims: tuple[int, ...]) -> dict[str, Any]:
    """The models of a program."""
    common = {"activation": activation, "obs_normalization": obs_normalization}
    return {part: {"hidden_dims": widths, **common} for part, widths in hidden_dims.items()}


class SAC(OffPolicy):
    """Soft actor-critic (Haarnoja et al. 2018, arXiv 1812.05905), with a learnt temperature."""

    algorithm = ALGORITHMS["sac"]
    models: ClassVar = _of_program("relu", False, actor=(256, 256), critic=(256, 256))


class FastSAC(OffPolicy):
    """FastSAC (Seo et al., arXiv 2512.01996; holosoma fc600e7, ``agents/fast_sac``)."""

    algorithm = ALGORITHMS["fastsac"]
    settings: ClassVar = {
        **OffPolicy.settings,
        **{"weight_decay": 0.001, "gamma": 0.97, "tau": 0.125, "batch_size": 8192, "updates_per_step": 8.0},
        **{"policy_every": 4, "atoms": 101, "v_min": -20.0, "v_max": 20.0},
    }
    models: ClassVar = _of_program("swish", True, actor=(512, 256, 128), critic=(768, 384, 192))


def _flashsac_critics(own: Any, obs: int, action: int, device: torch.device) -> Any:
    nets = {"num_atoms": own.atoms, "num_nets": own.critics}
    return modules.make_flashsac_critic(obs, action, **_blocks(own.hidden), **nets, device=device)


class FlashSAC(OffPolicy):
    """FlashSAC (its program at 87edc90, ``agents/flashSAC``). Each of ``hidden_dims`` is a residual block."""

    algorithm = replace(
        ALGORITHMS["flashsac"],
        actor=lambda obs, action, hidden, device: modules.make_flashsac_actor(
            obs, action, **_blocks(hidden), device=device
        ),
        critics=_flashsac_critics,
    )
    settings: ClassVar = {
        **OffPolicy.settings,
        **{"tau": 0.01, "updates_per_step": 2.0, "policy_every": 2, "n_steps": 3, "scale_rewards": True},
        **{"atoms": 101, "v_min": -5.0, "v_max": 5.0, "noise_hold": 16},
    }
    models: ClassVar = _of_program("relu", False, actor=(128, 128), critic=(256, 256))


def _fasttd3_critics(own: Any, obs: int, action: int, device: torch.device) -> Any:
    nets = {"num_atoms": own.atoms, "num_nets": own.critics}
    return modules.make_sac_critic(obs, action, own.hidden, **nets, device=device)


def _fasttd3_options(own: Any, action: int) -> dict[str, Any]:
    names = ("v_min", "v_max", "policy_noise", "noise_clip")
    return {**{name: getattr(own, name) for name in names}, "num_atoms": own.atoms, "bounds": (-1.0, 1.0)}


class FastTD3(OffPolicy):
    """FastTD3 (Seo et al., arXiv 2505.22642; its program at 229ed59).

    Each environment explores with noise of its own standard deviation, which is drawn anew when an episode ends.
    """

    algorithm = replace(
        ALGORITHMS["td3"],
        critics=_fasttd3_critics,
        loss=CategoricalTD3Loss,
        options=_fasttd3_options,
    )
    settings: ClassVar = {
        **OffPolicy.settings,
        **{"weight_decay": 0.1, "gamma": 0.97, "tau": 0.1, "batch_size": 32768, "updates_per_step": 2.0},
        **{"policy_every": 2, "atoms": 101, "v_min": -10.0, "v_max": 10.0},
        **{"policy_noise": 0.001, "noise_clip": 0.5, "noise_std_min": 0.001, "noise_std_max": 0.4},
    }
    models: ClassVar = _of_program("relu", True, actor=(512, 256, 128), critic=(1024, 512, 256))


def _blocks(hidden_dims: Any) -> dict[str, Any]:
    """Residual blocks of FlashSAC."""
    width, *others = hidden_dims
    if set(others) - {width}:
        raise ValueError(f"the residual blocks of FlashSAC have one width, got hidden_dims={hidden_dims}")
    return {"width": width, "num_blocks": len(hidden_dims)}


def _of_actor(key: str) -> bool:
    return key.startswith("actor_network_params")


def _taken(part: str, given: dict[str, Any], defaults: dict[str, Any], fixed: dict[str, Any]) -> SimpleNamespace:
    """The keys of a part of the configuration.

    Raises:
        ValueError: one is unknown, or other than it must be.
    """
    if unknown := sorted(set(given) - set(defaults)):
        raise ValueError(f"unknown keys {unknown} of cfg[{part!r}]: there are {sorted(defaults)}")
    for name, value in fixed.items():
        if given.get(name, value) != value:
            raise ValueError(f"{name} must be {value!r} here, got {given[name]!r} in cfg[{part!r}]")
    return SimpleNamespace(**{**defaults, **given})
