"""The training loop: collect, store, draw, learn; and everything it takes to go on later as if never stopped."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from gpubuf.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from gpubuf.train.agent import LOSS_NAMES, SACAgent
from gpubuf.train.config import TrainConfig, UsageError
from gpubuf.train.environments import Environments, evaluate
from gpubuf.train.progress import Status

_RECENT_EPISODES = 10
_CURVE_EPISODES = 5

# Environments for training, curve and final evaluation: the second word of their seeds.
_TRAINING, _CURVE, _FINAL = range(3)


class DivergedError(RuntimeError):
    """A loss is no longer a number."""


class Trainer:
    """SAC on one environment, from the first step to the last.

    Seeds PyTorch's global generator, from which networks, exploration and buffer draw.

    Args:
        config: The run's settings.
        device: Where networks and buffer live.
        record: Called with each record of the metrics.

    Raises:
        UsageError: The environment can't be trained on.
    """

    def __init__(self, config: TrainConfig, device: torch.device, record: Callable[[dict[str, Any]], None]) -> None:
        self.config = config
        self.step = 0
        self._record = record
        self._device = device
        self._environments = Environments(config.env, config.num_envs, (config.seed, _TRAINING))
        self._curve_environments: Environments | None = None
        torch.manual_seed(config.seed)
        self.agent = SACAgent(config, self._environments.observation_size, self._environments.action_size, device)
        self.buffer = _make_buffer(config, device)
        self._observation = self._environments.reset()
        self._updates = 0
        self._sums = torch.zeros(len(LOSS_NAMES), device=device)
        self._summed = 0
        self._returns: deque[float] = deque(maxlen=_RECENT_EPISODES)
        self._losses: dict[str, float] = {}

    def advance(self) -> None:
        """Step every environment once, and learn as much as that gives reason to."""
        before = self.step
        self._collect()
        if self.step > self.config.learning_starts:
            due = math.floor((self.step - self.config.learning_starts) * self.config.update_ratio)
            while self._updates < due:
                self._learn()
        if self._crossed(before, self.config.log_every):
            self._log_losses()
        if self._crossed(before, self.config.eval_every):
            self._evaluate_for_curve()

    def checkpoint_due(self, before: int) -> bool:
        """Whether a checkpoint is due that was not at step ``before``."""
        return self._crossed(before, self.config.checkpoint_every)

    def _crossed(self, before: int, interval: int) -> bool:
        return interval > 0 and self.step // interval > before // interval

    def status(self) -> Status:
        """Where the run stands."""
        return Status(
            step=self.step,
            mean_return=sum(self._returns) / len(self._returns) if self._returns else None,
            critic_loss=self._losses.get("loss_qvalue"),
            actor_loss=self._losses.get("loss_actor"),
        )

    def _collect(self) -> None:
        observation = self._observation
        if self.step < self.config.learning_starts:
            shape = (self.config.num_envs, self._environments.action_size)
            action: NDArray[np.float32] = torch.rand(shape).mul_(2).sub_(1).numpy()
        else:
            action = self.agent.act(observation)
        steps = self._environments.step(action)
        self._observation = steps.observation
        self.step += self.config.num_envs
        self.buffer.extend(
            TensorDict(
                {
                    "observation": torch.from_numpy(observation),
                    "action": torch.from_numpy(action),
                    "next": {
                        "observation": torch.from_numpy(steps.next_observation),
                        "reward": torch.from_numpy(steps.reward),
                        "done": torch.from_numpy(steps.terminated | steps.truncated),
                        "terminated": torch.from_numpy(steps.terminated),
                        "truncated": torch.from_numpy(steps.truncated),
                    },
                },
                [self.config.num_envs],
            ).to(self._device)
        )
        for value, length in steps.finished:
            self._returns.append(value)
            self._record({"kind": "episode", "step": self.step, "return": value, "length": length})

    def _learn(self) -> None:
        sampler = self.buffer.sampler
        if isinstance(sampler, PrioritizedSampler):
            sampler.beta = self._beta()
        batch = self.buffer.sample()
        self._sums += self.agent.update(batch)
        self._summed += 1
        self._updates += 1
        try:
            # Without effect on a buffer that draws uniformly.
            self.buffer.update_tensordict_priority(batch)
        except ValueError as error:
            raise DivergedError(f"training diverged by step {self.step:,}: {error}") from error

    def _beta(self) -> float:
        start = self.config.priority_beta
        return start + (1 - start) * min(1.0, self.step / self.config.total_steps)

    def _log_losses(self) -> None:
        if self._summed == 0:
            return
        means = (self._sums / self._summed).tolist()
        self._sums.zero_()
        self._summed = 0
        self._losses = dict(zip(LOSS_NAMES, means, strict=True))
        if not all(math.isfinite(value) for value in means):
            raise DivergedError(f"training diverged by step {self.step:,}: {self._losses}")
        record = {"kind": "update", "step": self.step, "updates": self._updates, **self._losses}
        if self.config.prioritized:
            record["beta"] = self._beta()
        self._record(record)

    def _evaluate_for_curve(self) -> None:
        if self._curve_environments is None:
            self._curve_environments = Environments(self.config.env, _CURVE_EPISODES, (self.config.seed, _CURVE))
        returns = evaluate(self._curve_environments, self._act_best)
        self._record(_evaluation("evaluation", self.step, returns))

    def final_evaluation(self, should_stop: Callable[[], bool]) -> dict[str, Any] | None:
        """The record of the evaluation that ends a run; None if it was stopped."""
        episodes = self.config.eval_episodes
        environments = Environments(self.config.env, episodes, (self.config.seed, _FINAL))
        try:
            returns = evaluate(environments, self._act_best, stop=should_stop)
        finally:
            environments.close()
        return None if len(returns) < episodes else _evaluation("final_evaluation", self.step, returns)

    def _act_best(self, observation: NDArray[np.float32]) -> NDArray[np.float32]:
        return self.agent.act(observation, deterministic=True)

    def state_dict(self) -> dict[str, Any]:
        """All that the rest of the run depends on, as tensors and plain values."""
        return {
            "step": self.step,
            "updates": self._updates,
            "sums": self._sums,
            "summed": self._summed,
            "returns": list(self._returns),
            "losses": dict(self._losses),
            "agent": self.agent.state_dict(),
            "buffer": self.buffer.state_dict(),
            "environments": self._environments.state(),
            "generator": torch.get_rng_state(),
            "cuda_generator": torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[int]:
        """Continue from what `state_dict` returned.

        Returns:
            The numbers of the environments whose open episode could not be played again, and which begin a new one.

        Raises:
            UsageError: The state is not one of a run like this.
        """
        try:
            self.step = state["step"]
            self._updates = state["updates"]
            self._sums.copy_(state["sums"])
            self._summed = state["summed"]
            self._returns.extend(state["returns"])
            self._losses = state["losses"]
            self.agent.load_state_dict(state["agent"])
            self.buffer.load_state_dict(state["buffer"])
            self._observation, lost = self._environments.restore(state["environments"])
            # Last, for what comes before may have drawn from them.
            torch.set_rng_state(state["generator"])
            if self._device.type == "cuda" and state["cuda_generator"] is not None:
                torch.cuda.set_rng_state(state["cuda_generator"], self._device)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"the checkpoint does not fit this run: {error!r}") from error
        return lost

    def close(self) -> None:
        """Close the environments."""
        self._environments.close()
        if self._curve_environments is not None:
            self._curve_environments.close()


def _evaluation(kind: str, step: int, returns: list[float]) -> dict[str, Any]:
    mean = sum(returns) / len(returns)
    return {"kind": kind, "step": step, "mean_return": mean, "returns": returns}


def _make_buffer(config: TrainConfig, device: torch.device) -> TensorDictReplayBuffer:
    storage = LazyTensorStorage(config.capacity, device=device)
    if config.prioritized:
        return TensorDictPrioritizedReplayBuffer(
            alpha=config.priority_alpha, beta=config.priority_beta, storage=storage, batch_size=config.batch_size
        )
    return TensorDictReplayBuffer(storage=storage, batch_size=config.batch_size)
