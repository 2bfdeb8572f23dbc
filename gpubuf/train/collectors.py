"""Collecting: one process steps environments and writes what happens, the learner's own or several beside it.

`Collector` is what each of them does. `Collectors` are processes of their own, for ``--collectors N``: they write
through clients of the learner's buffer, and act by the weights that the learner publishes in shared memory.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import signal
from collections.abc import Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDict
from torch import Tensor

from gpubuf.data import ReplayBuffer, WriterClient, Writers
from gpubuf.data.ingress.queues import fence, wait
from gpubuf.train.algorithms import Explorer, Scaling
from gpubuf.train.config import TORCH_PREFIX, TrainConfig, UsageError
from gpubuf.train.environments import TRAINING, Environments, NotFiniteError, Steps

_CPU = torch.device("cpu")

# Steps of a collector that are taken in together where a row is read together with the next ones.
_RUN = 16

# Seconds that the learner waits for rows before it looks at signals, and for processes to end.
_LOOK_EVERY, _PATIENCE = 0.1, 5.0


class CollectorLostError(RuntimeError):
    """A collector has ended, and nobody told it to."""


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


def rows_apart(config: TrainConfig) -> bool:
    """Whether environments have columns of their own, ``[E, T]``.

    Rows that are read with the next ones need it, and statistics of returns where processes take turns.
    """
    return config.num_envs > 1 and (_reads_along(config) or (config.collectors > 0 and config.scale_rewards))


def _reads_along(config: TrainConfig) -> bool:
    return config.n_steps > 1 or config.share_next


class Collector:
    """Steps environments, and writes their transitions.

    Args:
        config: The run's settings.
        environments: They begin their first episodes.
        explorer: Acts in them.
        buffer: Takes the transitions: the buffer, or a client of one in another process.

    Attributes:
        environments: As given.
        observation: To act on next, `[E, O]` float32 on the policy's device. Written in place, for graphs read it where
            it is.
    """

    def __init__(
        self,
        config: TrainConfig,
        environments: Environments,
        explorer: Explorer,
        buffer: ReplayBuffer | WriterClient,
    ) -> None:
        self.environments, self._explorer, self._buffer = environments, explorer, buffer
        self._apart = rows_apart(config)
        self.observation = environments.reset().to(explorer.device)

    def step_at_random(self) -> None:
        """Step every environment once, with random actions."""
        own = self.environments
        self._store(self._explorer.actions.random(own.num_envs, own.action_size, own.device))

    def step(self) -> None:
        """Step every environment once, with the policy's actions."""
        self._store(self._explorer.explore(self.observation))

    def state(self) -> dict[str, Any]:
        """The open episodes, as tensors and plain values."""
        return self.environments.state()

    def restore(self, state: dict[str, Any]) -> list[int]:
        """Go on from `state`. Returns the numbers of the environments whose episodes begin anew instead."""
        observation, lost = self.environments.restore(state)
        self.observation.copy_(observation)
        return lost

    def _store(self, action: Tensor) -> None:
        steps = self.environments.step(action)
        # A buffer moves them to its own device.
        self._buffer.extend_columns(_transitions(self.observation, action, steps, self._apart))
        self.observation.copy_(steps.observation)


def _transitions(observation: Tensor, action: Tensor, steps: Steps, apart: bool) -> dict[NestedKey, Tensor]:
    """The columns of one transition of each environment, `[E, ...]`, or `[E, 1, ...]` where they stay apart."""
    columns: dict[NestedKey, Tensor] = {
        "observation": observation,
        "action": action,
        ("next", "observation"): steps.next_observation,
        ("next", "reward"): steps.reward,
        ("next", "done"): steps.terminated | steps.truncated,
        ("next", "terminated"): steps.terminated,
        ("next", "truncated"): steps.truncated,
    }
    return {key: column.unsqueeze(1) for key, column in columns.items()} if apart else columns


class SharedWeights:
    """Weights in shared memory, which one process writes and others read, without a lock.

    A version is odd while weights are being written. A reader keeps those that it has until it finds whole ones.

    Args:
        weights: As many as there will be, of any device and dtype; they are shared as float32.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._numbers = torch.zeros(sum(weight.numel() for weight in weights), device="cpu").share_memory_()
        # The version, and whether nobody is to read on.
        self._state = torch.zeros(2, dtype=torch.int64, device="cpu").share_memory_()
        self._read = 0

    def publish(self, weights: Sequence[Tensor]) -> None:
        """Replace the weights. Waits for the device that they are on."""
        numbers = torch.cat([weight.detach().flatten().float() for weight in weights])
        self._state[0] += 1
        fence()
        self._numbers.copy_(numbers)
        fence()
        self._state[0] += 1

    def read(self, weights: Sequence[Tensor]) -> bool:
        """Copy newer weights into ``weights``, if there are whole ones. Returns whether any were ever read."""
        version = int(self._state[0])
        if version % 2 == 0 and version != self._read:
            fence()
            numbers = self._numbers.clone()
            fence()
            if int(self._state[0]) == version:
                self._read = version
                parts = numbers.split([weight.numel() for weight in weights])
                for weight, part in zip(weights, parts, strict=True):
                    weight.copy_(part.view(weight.shape))
        return self._read > 0

    def stop(self) -> None:
        """Tell readers to end."""
        self._state[1] = 1

    @property
    def stopped(self) -> bool:
        """Whether readers are to end."""
        return bool(self._state[1])


class Collectors:
    """Processes beside the learner, each with ``num_envs`` environments of its own and a copy of the policy.

    They act at random until weights were published. The buffer's ``ratio`` holds them back while updates are due, and
    the learner makes no more updates than are due: neither side runs away from the other. Each makes its share of the
    steps, and ends.

    Args:
        config: The run's settings.
        explorer: The learner's policy.
        buffer: Made with the `writers` of this module.
        sizes: Numbers in an observation and in an action.
    """

    def __init__(self, config: TrainConfig, explorer: Explorer, buffer: ReplayBuffer, sizes: tuple[int, int]) -> None:
        self._config, self._explorer, self._buffer, self._sizes = config, explorer, buffer, sizes
        self._weights = SharedWeights(explorer.weights())
        self._processes: list[tuple[Any, Connection]] = []

    @staticmethod
    def writers(config: TrainConfig) -> Writers | None:
        """How they write to the buffer; None: there are none.

        Each may be one run ahead of the updates, and a little more: with less, an update that is not due yet could
        have all of them wait for it.
        """
        if not config.collectors:
            return None
        run = _RUN if _reads_along(config) else 1
        ratio = config.update_ratio * config.batch_size
        margin = ratio * max(run, 2) * config.collectors * config.num_envs + 2 * config.batch_size
        least = max(config.learning_starts, 1)
        return Writers(config.collectors, run=run, timeout=None, ratio=ratio, margin=margin, min_rows=least)

    def start(self, step: int, updates: int) -> None:
        """Start the processes, of a run that has made so many steps and updates, and goes on to the last one."""
        config, writers = self._config, self._buffer.writers
        assert writers is not None
        if updates:
            self.publish()
        # Rows count from now on. A resumed run stays as far ahead as it was.
        writers.drawn = math.floor(config.batch_size * (updates - config.update_ratio * step))
        share = -(-(config.total_steps - step) // (config.collectors * config.num_envs))
        spawn = multiprocessing.get_context("spawn")
        # Ctrl-C in a terminal is for the learner, which ends them. (The start of the tracker would unblock it.)
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for number in range(config.collectors):
                episodes, theirs = spawn.Pipe(duplex=False)
                # Not the seeds of a run before that was interrupted.
                seed = (config.seed, TRAINING, step, number)
                arguments = (config, seed, share, self._buffer.client(self._example()), self._weights, theirs)
                name = f"collector {number}"
                process = spawn.Process(target=_collect, args=arguments, name=name, daemon=True)
                process.start()
                theirs.close()
                self._processes.append((process, episodes))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _example(self) -> TensorDict:
        """Transitions as they will write them."""
        observation, action = (torch.zeros(self._config.num_envs, size, device="cpu") for size in self._sizes)
        reward, flag = (
            torch.zeros(len(observation), 1, device="cpu"),
            torch.zeros(len(observation), 1, dtype=torch.bool, device="cpu"),
        )
        steps = Steps(observation, observation, reward, flag, flag)
        apart = rows_apart(self._config)
        columns: Any = _transitions(observation, action, steps, apart)
        return TensorDict(columns, [len(observation), 1] if apart else [len(observation)])

    def wait(self) -> None:
        """Wait until rows arrive and were taken in, or for a moment."""
        writers = self._buffer.writers
        assert writers is not None
        with contextlib.suppress(TimeoutError):
            wait(lambda: writers.take() > 0, _LOOK_EVERY)

    def publish(self) -> None:
        """Have them act by the weights of now. Waits for the device that these are on."""
        self._weights.publish(self._explorer.weights())

    def take_episodes(self, due: bool) -> list[dict[str, Any]]:
        """Records of the metrics on the episodes that have ended since the last call, ``due`` or not.

        Raises:
            NotFiniteError: an action, an observation or a reward is NaN or infinite.
            CollectorLostError: a process has ended.
        """
        found: list[dict[str, Any]] = []
        for process, episodes in tuple(self._processes):
            try:
                while episodes.poll():
                    found.append(episodes.recv())
            except (EOFError, OSError):
                process.join(_PATIENCE)
                self._processes.remove((process, episodes))
                if code := process.exitcode:
                    how = f"was ended by signal {-code}" if code < 0 else f"failed with code {code}, as it says above"
                    sentence = f"{process.name}, process {process.pid}, {how}: the run ends, too"
                    raise CollectorLostError(sentence) from None
            if found and found[-1]["kind"] == "error":
                raise NotFiniteError(found[-1]["text"])
        return found

    def close(self) -> None:
        """End the processes. The buffer has all that they have written."""
        self._weights.stop()
        if self._buffer.writers is not None:
            self._buffer.writers.close()
        for _, episodes in self._processes:
            episodes.close()
        for process, _ in self._processes:
            process.join(_PATIENCE)
            if process.exitcode is None:
                process.kill()
                process.join()
        self._processes = []


def _collect(
    config: TrainConfig,
    seed: Sequence[int],
    steps: int,
    client: WriterClient,
    shared: SharedWeights,
    episodes: Connection,
) -> None:
    """What a collector does: ``steps`` steps of its environments, or as many as the learner lets it."""
    torch.set_num_threads(1)
    torch.manual_seed(int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]))
    environments = make_environments(config.env, config.num_envs, seed, _CPU)
    sizes = environments.observation_size, environments.action_size
    explorer = Explorer(config, *sizes, _CPU)
    if config.normalize_observations:
        explorer.normalize = Scaling(torch.zeros(sizes[0], device="cpu"), torch.ones(sizes[0], device="cpu"))
    weights = explorer.weights()
    try:
        collector = Collector(config, environments, explorer, client)
        for _ in range(steps):
            if shared.stopped:
                break
            if shared.read(weights):
                collector.step()
            else:
                collector.step_at_random()
            for record in environments.take_episodes(due=True):
                episodes.send(record)
        client.close()
    except NotFiniteError as error:
        episodes.send({"kind": "error", "text": str(error)})
    except (RuntimeError, OSError):
        # The learner takes no more rows, or is gone.
        learner = multiprocessing.parent_process()
        if not shared.stopped and learner is not None and learner.is_alive():
            raise
    finally:
        environments.close()
