"""The training loop: collect, store, sample and learn, and the state from which a run resumes exactly."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import NestedKey
from torch import Tensor

from gpubuf import data, graphs
from gpubuf.data.storage.layout import Leaf, as_key
from gpubuf.learner import Learner
from gpubuf.train.algorithms import ALGORITHMS, Agent
from gpubuf.train.config import TORCH_PREFIX, TrainConfig, UsageError
from gpubuf.train.environments import CURVE, FINAL, TRAINING, Environments, Evaluation, NotFiniteError, Stacked, Steps
from gpubuf.train.progress import Status

# Episodes of an evaluation for the curve. They take time on the host, and nearly none on a device.
_CURVE_EPISODES, _CURVE_EPISODES_ON_DEVICE = 5, 64

# Of scaled rewards, where critics have no bound.
_LARGEST_RETURN = 5.0

# FastSAC's program divides observations by their standard deviation and this. Here it is the least one: the same for
# elements that hardly change, and 1 % more for others.
_LEAST_DEVIATION = 0.01


class DivergedError(NotFiniteError):
    """A loss is no longer a number."""


class Trainer:
    """One algorithm on one environment, from the first step to the last.

    Seeds PyTorch's global generator, from which networks, exploration and buffer draw.

    With environments on the device nothing in the loop waits for it: the host launches, counts steps and updates, and
    reads losses and returns only to record them. Two functions of fixed shapes do the work: a step of all environments,
    and an update, by a :class:`~gpubuf.Learner`. Each can become a CUDA graph. They are two functions because the
    number of updates per step may be any number, or a fraction.

    Args:
        config: The run's settings.
        device: Where networks and buffer live.
        record: Called with each record of the metrics.

    Raises:
        UsageError: The environment can't be trained on, or the device can't do what was asked for.
    """

    def __init__(self, config: TrainConfig, device: torch.device, record: Callable[[dict[str, Any]], None]) -> None:
        self.config = config
        self.step = 0
        self._record = record
        self._device = device
        can_capture = device.type in graphs.GRAPH_DEVICES
        self._captured = can_capture if config.cuda_graph is None else config.cuda_graph
        if self._captured and not can_capture:
            raise UsageError(f"--cuda-graph needs a CUDA device, the run is on {device.type}: say --no-cuda-graph")
        self._environments = self._make_environments(config.num_envs, TRAINING)
        self._curve: Evaluation | None = None
        wrong = _wrong_kind(config, self._environments)
        if wrong is not None:
            self._environments.close()
            raise UsageError(wrong)
        torch.manual_seed(config.seed)
        shape = self._environments.observation_shape
        # Of a stack the buffer has the newest frame, and makes stacks of its rows.
        self._newest = slice(-(shape[0] // config.seen), None)
        self.agent = Agent(config, shape, self._environments.action_size, device)
        self.agent.normalize = _make_normalize(config, shape[0], device)
        self.buffer = _make_buffer(config, device, self.agent.normalize)
        # To act on next, `[E, *O]`. Written in place, for graphs read it where it is.
        self._observation = self._environments.reset().to(device)
        captured = self._captured and self._environments.capturable
        self._step_by_policy = graphs.capture(self._explore) if captured else self._explore
        self._learner = Learner(self.agent.losses, self.agent.optimizer, buffer=self.buffer, capture=self._captured)
        self._updates = 0
        # Of the values that updates have returned since the last record, and how many had each.
        self._sums = torch.zeros(len(self.agent.loss_names), device=device)
        self._counts = [0] * len(self.agent.loss_names)
        self._returns: deque[float] = deque(maxlen=self._environments.shown_records)
        self._evaluated: float | None = None

    def advance(self) -> None:
        """Step every environment once, and run the updates that are due."""
        before, drawn = self.step, torch.get_rng_state()
        try:
            self._collect()
        except Exception:
            # Nothing of the step is stored: it is as if it had not begun.
            torch.set_rng_state(drawn)
            raise
        log_due = self._crossed(before, self.config.log_every)
        self._record_episodes(log_due)
        if self.step > self.config.learning_starts:
            self._learn(math.floor((self.step - self.config.learning_starts) * self.config.update_ratio))
        if log_due:
            self._log_losses()
        if self._crossed(before, self.config.eval_every):
            self._evaluate_for_curve()

    def checkpoint_due(self, before: int) -> bool:
        """Whether a checkpoint is due that was not at step ``before``."""
        return self._crossed(before, self.config.checkpoint_every)

    def _crossed(self, before: int, interval: int) -> bool:
        return interval > 0 and self.step // interval > before // interval

    def status(self) -> Status:
        """The progress of the run."""
        return Status(
            step=self.step,
            updates=self._updates,
            mean_return=sum(self._returns) / len(self._returns) if self._returns else None,
            evaluation=self._evaluated,
        )

    def _collect(self) -> None:
        if self.step < self.config.learning_starts:
            own = self._environments
            self._act(self.agent.actions.random(own.num_envs, own.action_size, own.device))
        else:
            if self.agent.epsilon is not None:
                # Before the step, not in it: a graph would keep the number of its capture.
                self.agent.epsilon.fill_(self._epsilon())
            self._step_by_policy()
        self.step += self.config.num_envs

    def _explore(self) -> None:
        self._act(self.agent.explore(self._observation))

    def _act(self, action: Tensor) -> None:
        """Step every environment once, and store the transitions."""
        steps = self._environments.step(action)
        # The buffer moves them to its own device.
        before, after = self._observation[:, self._newest], steps.next_observation[:, self._newest]
        self.buffer.extend_columns(_transitions(before, after, action, steps, _rows_apart(self.config)))
        self._observation.copy_(steps.observation)

    def _record_episodes(self, due: bool) -> None:
        for fields in self._environments.take_episodes(due):
            kind = fields.pop("kind")
            self._returns.append(fields["return"] if kind == "episode" else fields["mean_return"])
            self._record({"kind": kind, "step": self.step, **fields})

    def _learn(self, due: int) -> None:
        """Update until there have been ``due`` updates."""
        if self._updates >= due:
            return
        sampler: Any = self.buffer.sampler
        if sampler.has_priorities:
            # Before the update, not in it: a graph would keep the number of its capture.
            sampler.beta = self._beta()
        while self._updates < due:
            self._updates += 1
            self._update(policy=self._updates % (self.config.policy_every or 1) == 0)

    def _update(self, policy: bool) -> None:
        try:
            # Around the learner, which sees the loss itself.
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self.config.bfloat16):
                losses = self._learner(policy=policy)
        except ValueError as error:
            raise self._diverged(error) from error
        found = [(i, losses.get(name)) for i, name in enumerate(self.agent.loss_names) if name in losses.keys()]
        sums = self._sums.unbind()
        torch._foreach_add_([sums[i] for i, _ in found], [value for _, value in found])
        for i, _ in found:
            self._counts[i] += 1

    def _diverged(self, found: object) -> DivergedError:
        return DivergedError(f"training diverged by step {self.step:,}: {found}")

    def _beta(self) -> float:
        start = self.config.priority_beta
        assert start is not None
        return start + (1 - start) * min(1.0, self.step / self.config.total_steps)

    def _epsilon(self) -> float:
        last, share = self.config.epsilon, self.config.exploration
        assert last is not None
        assert share is not None
        return 1 - (1 - last) * min(1.0, self.step / (share * self.config.total_steps))

    def _log_losses(self) -> None:
        counts = self._counts
        if not any(counts):
            return
        means = (self._sums / self._sums.new_tensor(counts)).tolist()
        self._sums.zero_()
        self._counts = [0] * len(counts)
        losses = {name: mean for name, mean, count in zip(self.agent.loss_names, means, counts, strict=True) if count}
        if not all(math.isfinite(value) for value in losses.values()):
            raise self._diverged(losses)
        record = {"kind": "update", "step": self.step, "updates": self._updates, **losses}
        if self.config.prioritized:
            record["beta"] = self._beta()
        if self.config.epsilon is not None:
            record["epsilon"] = self._epsilon()
        self._record(record)

    def _evaluate_for_curve(self) -> None:
        if self._curve is None:
            episodes = _CURVE_EPISODES_ON_DEVICE if self._environments.capturable else _CURVE_EPISODES
            self._curve = self._evaluation(episodes, CURVE)
        record = _evaluation_record("evaluation", self.step, self._curve.run())
        self._evaluated = record["mean_return"]
        self._record(record)

    def final_evaluation(self, should_stop: Callable[[], bool]) -> dict[str, Any] | None:
        """The record of the evaluation that ends a run; None if it was stopped."""
        episodes = self.config.eval_episodes
        evaluation = self._evaluation(episodes, FINAL)
        try:
            returns = evaluation.run(stop=should_stop)
        finally:
            evaluation.close()
        return None if len(returns) < episodes else _evaluation_record("final_evaluation", self.step, returns)

    def _evaluation(self, episodes: int, stream: int) -> Evaluation:
        environments = self._make_environments(episodes, stream)
        return Evaluation(environments, self.agent.act, self._captured and environments.capturable)

    def _make_environments(self, count: int, stream: int) -> Environments:
        """Of the run, ``stream`` is the second word of their seed."""
        made = make_environments(self.config.env, count, (self.config.seed, stream), self._device)
        return made if self.config.seen == 1 else Stacked(made, self.config.seen)

    def save_model(self, path: Path) -> None:
        """Write the policy to ``path``, for `load_policy`."""
        self.agent.save_model(path, self._environments.action_bounds)

    def state_dict(self) -> dict[str, Any]:
        """The whole state of the run, as tensors and plain values. Synchronises.

        Raises:
            DivergedError: a loss since the last record is NaN or infinite: the networks are not worth keeping.
        """
        if not self._sums.isfinite().all():
            raise self._diverged(self._sums.tolist())
        try:
            buffer = self.buffer.state_dict()
        except ValueError as error:
            # A GPU has refused NaN priorities earlier, and reports it now.
            raise self._diverged(error) from error
        return {
            "step": self.step,
            "updates": self._updates,
            "sums": self._sums,
            "counts": self._counts,
            "returns": list(self._returns),
            "evaluated": self._evaluated,
            "agent": self.agent.state_dict(),
            "buffer": buffer,
            "environments": self._environments.state(),
            "generator": torch.get_rng_state(),
            "cuda_generator": torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[int]:
        """Continue from what `state_dict` returned.

        Returns:
            The numbers of the environments that begin a new episode, because theirs could not be played again.

        Raises:
            UsageError: The state belongs to a run with other settings.
        """
        try:
            self.step = state["step"]
            self._updates = state["updates"]
            self._sums.copy_(state["sums"])
            self._counts = list(state["counts"])
            self._returns.extend(state["returns"])
            self._evaluated = state["evaluated"]
            self.agent.load_state_dict(state["agent"])
            # The environments go on in the middle of their episodes, too.
            self.buffer.load_state_dict(state["buffer"], end_trajectories=False)
            observation, lost = self._environments.restore(state["environments"])
            self._observation.copy_(observation)
            for env in lost if max(self.config.n_steps, self.config.seen) > 1 else ():
                self.buffer.end_trajectories(env)
            # Last, since the lines above may draw from the generators. Cloned, since PyTorch reads the state as a
            # structure, and a tensor in a mapped file may not be aligned for one.
            torch.set_rng_state(state["generator"].clone())
            if self._device.type == "cuda" and state["cuda_generator"] is not None:
                torch.cuda.set_rng_state(state["cuda_generator"].clone(), self._device)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"the checkpoint does not fit this run: {error!r}") from error
        return lost

    def close(self) -> None:
        """Close the environments."""
        self._environments.close()
        if self._curve is not None:
            self._curve.close()


def make_environments(name: str, num_envs: int, seed: int | Sequence[int], device: torch.device) -> Environments:
    """Make ``num_envs`` copies of the environment ``name``.

    Args:
        name: ``torch/...`` for environments on ``device``, else a Gymnasium id: those run on the host.
        num_envs: How many.
        seed: One or more words.
        device: Of the training.

    Raises:
        UsageError: There is no such environment, or it can't be trained on.
    """
    # Each kind is imported only if it is used: environments on the device need no Gymnasium.
    if name.startswith(TORCH_PREFIX):
        from gpubuf.train.torch_environments import make_torch_environments

        return make_torch_environments(name, num_envs, seed, device)
    try:
        from gpubuf.train.gymnasium_environments import GymnasiumEnvironments
    except ModuleNotFoundError as error:
        raise UsageError(
            f'{name} needs a package that is not installed: {error}; pip install "gpubuf[train]"'
        ) from None

    return GymnasiumEnvironments(name, num_envs, seed)


def _rows_apart(config: TrainConfig) -> bool:
    """Whether environments have columns of their own, ``[E, T]``: rows that are read with the next ones need it."""
    return config.num_envs > 1 and (config.n_steps > 1 or config.share_next or config.seen > 1)


def _transitions(
    observation: Tensor, following: Tensor, action: Tensor, steps: Steps, apart: bool
) -> dict[NestedKey, Tensor]:
    """The columns of one transition of each environment, `[E, ...]`, or `[E, 1, ...]` where they stay apart."""
    columns: dict[NestedKey, Tensor] = {
        "observation": observation,
        "action": action,
        ("next", "observation"): following,
        ("next", "reward"): steps.reward,
        ("next", "done"): steps.terminated | steps.truncated,
        ("next", "terminated"): steps.terminated,
        ("next", "truncated"): steps.truncated,
    }
    return {key: column.unsqueeze(1) for key, column in columns.items()} if apart else columns


def _wrong_kind(config: TrainConfig, environments: Environments) -> str | None:
    """Why the algorithm can't learn from the environments, if it can't."""
    algorithm, discrete, images = ALGORITHMS[config.algo], environments.discrete, environments.images
    fit = [name for name, each in ALGORITHMS.items() if each.actions.discrete is discrete and each.images >= images]
    advice = f"say --algo {' or '.join(fit)}" if fit else "no algorithm here learns both from images and such actions"
    if algorithm.actions.discrete is not discrete:
        kinds = ("continuous", "discrete")
        learnt = f"{config.algo} learns {kinds[not discrete]} ones"
        return f"{config.env} has {kinds[discrete]} actions, and {learnt}: {advice}"
    if images > algorithm.images:
        return f"{config.env} has images as observations, and {config.algo} learns from features: {advice}"
    if config.normalize_observations and (images or config.seen > 1):
        return f"normalize_observations is for features, and not for images or stacks, as {config.env} has here"
    return None


def _evaluation_record(kind: str, step: int, returns: list[float]) -> dict[str, Any]:
    mean = sum(returns) / len(returns)
    return {"kind": kind, "step": step, "mean_return": mean, "returns": returns}


def _make_normalize(config: TrainConfig, observation_size: int, device: torch.device) -> data.Normalize | None:
    """The statistics of observations, on the device from the first step on: it may be by policy, and captured."""
    if not config.normalize_observations:
        return None
    normalize = data.Normalize("observation", eps=_LEAST_DEVIATION**2)
    normalize.bind([Leaf(as_key("observation"), torch.float32, (observation_size,))], config.num_envs, device)
    return normalize


def _make_buffer(
    config: TrainConfig, device: torch.device, normalize: data.Normalize | None
) -> data.TensorDictReplayBuffer:
    apart, frames = _rows_apart(config), config.seen
    shared = ["observation"] if config.share_next or frames > 1 else False
    # In a storage of one dimension environments take turns.
    envs, largest = None if apart else config.num_envs, config.v_max or _LARGEST_RETURN
    stack = data.Window(1 - frames, 0, join=0)
    options: dict[str, Any] = {
        "windows": {"observation": stack, ("next", "observation"): stack} if frames > 1 else None,
        "storage": data.LazyTensorStorage(config.capacity, device=device, ndim=2 if apart else 1, share_next=shared),
        "batch_size": config.batch_size,
        "n_steps": config.n_steps,
        "gamma": config.gamma,
        "process": [] if normalize is None else [normalize],
        "transform": data.RewardScale(config.gamma, largest, envs=envs) if config.scale_rewards else None,
    }
    if config.priority_alpha is None or config.priority_beta is None:
        return data.TensorDictReplayBuffer(**options)
    return data.TensorDictPrioritizedReplayBuffer(alpha=config.priority_alpha, beta=config.priority_beta, **options)
