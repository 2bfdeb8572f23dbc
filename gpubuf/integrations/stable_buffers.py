"""Buffers with the interface of Stable-Baselines3's, which CleanRL's scripts use too. Neither need be installed.

:mod:`gpubuf.integrations.sb3` and :mod:`gpubuf.integrations.cleanrl` make their classes of :class:`StableBuffer`.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from gpubuf.data.arguments import warn
from gpubuf.data.buffer import ReplayBuffer
from gpubuf.data.hindsight import Hindsight
from gpubuf.data.operation import Operation, graph_break
from gpubuf.data.samplers.base import Sampler
from gpubuf.data.samplers.uniform import RandomSampler
from gpubuf.data.stacks import FrameStack, Padding
from gpubuf.data.storage.layout import Key, as_written
from gpubuf.data.storage.plan import STEPS_KEY
from gpubuf.data.storage.schema import Codec
from gpubuf.data.transforms import Compose, stacks_of
from gpubuf.integrations.edits import set_keys
from gpubuf.integrations.environment_steps import autoreset_of, rows_at, stored_values
from gpubuf.integrations.pickled import PickledBuffer

#: Steps that wait on the host, and the bytes that these may take: one launch then writes all of them.
WAITING_STEPS, WAITING_BYTES = 64, 1 << 16
#: The first steps, of which it is looked at whether episodes end without a word.
LOOKS = 10_000
#: How far observations of these may be from where the step before led to, if they are read anew.
_CLOSE = 1e-3

_OBSERVATION, _NEXT_OBSERVATION, _ACTION = ("observation",), ("next", "observation"), ("action",)
_REWARD, _TERMINATED, _DONE = ("next", "reward"), ("next", "terminated"), ("next", "done")
#: What copies make anew.
_MADE = {"_columns", "_observed", "_first", "_direct", "_actions", "_rewards", "_terminated", "_ended", "_powers"}
#: What the infos of Gymnasium's vector environments have at the end of an episode that they reset in the same step.
_FINAL = "_final_obs", "_final_info", "_final_observation"
#: What infos have at ends if a wrapper records them.
_ENDS = "_episode", "TimeLimit.truncated"


# As parts of an operation that has begun.
_add_columns, _extend_columns = map(inspect.unwrap, (ReplayBuffer.add_columns, ReplayBuffer.extend_columns))
_run_apart = graph_break(Operation.run)


class StoredArray(np.ndarray):
    """A copy of one column of a buffer, ``[T, E, ...]``: zeros where nothing is stored. Setting items writes to it.

    Arrays that are computed from it are plain ones; views of it can't be written.
    """

    _write: Any = None
    _values: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray, write: Callable[[Any, np.ndarray], None]) -> StoredArray:
        found = values.view(cls)
        found.flags.writeable = False
        found._write, found._values = write, values
        return found

    def __setitem__(self, index: Any, value: Any) -> None:
        if self._write is None:
            if not self.flags.writeable:
                raise ValueError("a view of a copy can't be written: set items as in buffer.rewards[step, environment]")
            return super().__setitem__(index, value)
        places = np.zeros(self.shape, bool)
        places[index] = True
        values = self._values.copy()
        values[index] = value
        self._write(np.nonzero(places.reshape(*self.shape[:2], -1).any(-1)), values)
        self._values[index] = value


class ReplayBufferSamples(NamedTuple):
    """A batch, with the names of Stable-Baselines3. Observations are tensors, or dicts of tensors."""

    observations: Any
    actions: Tensor
    next_observations: Any
    dones: Tensor
    rewards: Tensor
    discounts: Tensor | None = None


def _like(memory: np.ndarray, value: Any) -> np.ndarray:
    """``value``, or where its shape or dtype differ, ``memory`` with its numbers."""
    if type(value) is np.ndarray and value.dtype == memory.dtype and value.shape == memory.shape:
        return value
    memory[...] = value
    return memory


def chosen_device(device: torch.device | str) -> torch.device:
    """``"auto"`` is the GPU; without one every device is the CPU."""
    found = torch.device("cuda" if device == "auto" else device)
    return torch.device("cpu") if found.type == "cuda" and not torch.cuda.is_available() else found


class StableBuffer:
    """Transitions of several environments, which come one step at a time. Rows are on the device of the batches.

    The arguments, attributes and batches are those of Stable-Baselines3's ``ReplayBuffer``, ``DictReplayBuffer`` and
    ``NStepReplayBuffer``; keyword-only arguments are ours. It differs in this:

    * With ``optimize_memory_usage`` all rows can be drawn, next observations are exact, timeouts are handled, and
      observations may be dicts. There must be room for those next observations that no row begins with:
      ``next_capacity``.
    * Random numbers are torch's: ``torch.manual_seed`` makes batches repeatable, ``np.random.seed`` does not.
    * ``add`` may keep some steps on the host. They are written before anybody can read them here; call :meth:`flush`
      before you read :attr:`buffer`.

    Args:
        buffer_size: number of transitions, of all environments together.
        observation_space: of one environment: Box, Dict of such, Discrete, MultiDiscrete or MultiBinary.
        action_space: of one environment.
        device: of the batches. ``"auto"`` is the GPU, or the CPU without one.
        n_envs: number of environments, E.
        optimize_memory_usage: store observations once: half the memory.
        handle_timeout_termination: read ``"TimeLimit.truncated"`` in the infos: such ends are not terminations.
        n_steps: steps of a transition, 1 .. 64. ``discounts`` of a batch are ``gamma ** steps`` then.
        gamma: the discount of n-step returns.
        placement: where rows are: as ``device`` of :class:`LazyTensorStorage`. Default: where batches are, and on a
            GPU ``"auto"``, which takes pinned host memory for what does not fit.
        next_capacity: see :class:`LazyTensorStorage`.
        dtypes: how keys are stored, such as ``{"observation": torch.float16}``. See :class:`LazyTensorStorage`.
        sampler: which rows a batch is made of. Default: :class:`RandomSampler`.
        relabel: gives rows of a batch other goals, see :class:`gpubuf.Hindsight`.
        frame_stack: observations are stacks of so many frames, which are stored once: an eighth of the memory for four.
            Images are stacked along their channels, what else there is along the last dimension, or (CleanRL) the first
            one; episodes begin with zeros (Stable-Baselines3's ``VecFrameStack``), or with their first frame again
            (CleanRL, Gymnasium). For other stacks, or some keys of a dict: a :class:`gpubuf.data.FrameStack` of
            ``"observation"``, or ``("observation", "pos")``. What is no stack is refused.
        autoreset: when vector environments reset: Gymnasium's environments themselves, whose metadata say it, their
            ``AutoresetMode``, or ``"next_step"``, ``"same_step"`` or ``"disabled"``. None: Stable-Baselines3's reset in
            the same step, and Gymnasium's are taken to reset in the next one, their default, until a row contradicts.

    Attributes:
        buffer: the :class:`gpubuf.ReplayBuffer` in it.

    Raises:
        NotImplementedError: rows of a space can't be stored.
        ValueError: observations are no ``frame_stack``; a size, ``n_steps`` or ``gamma`` is out of range, or
            ``autoreset`` is none of these.
    """

    _samples: Any = ReplayBufferSamples
    _dict_samples: Any = ReplayBufferSamples
    #: How frames are stacked: what precedes an episode, and along which dimension, if they are no images.
    _padding: Padding = "reset"
    _stacked_along = 0

    def __init__(
        self,
        buffer_size: int,
        observation_space: Any,
        action_space: Any,
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        n_steps: int = 1,
        gamma: float = 0.99,
        placement: torch.device | str | None = None,
        next_capacity: int | None = None,
        dtypes: Mapping[Any, torch.dtype | Codec] | None = None,
        sampler: Sampler | None = None,
        relabel: Hindsight | None = None,
        frame_stack: int | FrameStack | None = None,
        autoreset: Any = None,
    ) -> None:
        self._autoreset = None if autoreset is None else autoreset_of(autoreset)
        self.observation_space = observation_space
        self.action_space = action_space
        shapes = {name: row_shape(space) for name, space in self._parts().items()}
        self.obs_shape: Any = shapes[()] if () in shapes else {name: shape for (name,), shape in shapes.items()}
        self.action_dim = math.prod(row_shape(action_space, "actions"))
        self.n_envs = n_envs
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage = optimize_memory_usage
        self.handle_timeout_termination = handle_timeout_termination
        self.n_steps = n_steps
        self.gamma = gamma
        stacks = [frame_stack] if isinstance(frame_stack, FrameStack) else self._stacks_of(frame_stack or 0)
        # Whether batches depend on where episodes end.
        self._needs_ends = n_steps > 1 or relabel is not None or bool(stacks)
        once = list(shapes) if optimize_memory_usage else [key[1:] for stack in stacks for key in stack.keys]
        self._device = chosen_device(device)
        if placement is None:
            placement = "auto" if self._device.type == "cuda" and self._device.index is None else self._device
        self.buffer = PickledBuffer(
            {
                "max_size": self.buffer_size * n_envs,
                "device": placement,
                "ndim": 2,
                "share_next": [(*_OBSERVATION, *name) for name in once],
                "next_capacity": next_capacity,
                # Rows that store observations once are converted anyway: a flag then takes a byte.
                "dtypes": {**({_TERMINATED: torch.bool} if optimize_memory_usage else {}), **(dtypes or {})},
            },
            RandomSampler() if sampler is None else sampler,
            relabel=relabel,
            dim_extend=0,
            n_steps=n_steps,
            gamma=gamma,
            reward_keys=[_REWARD] if n_steps > 1 else None,
            end_keys=[_DONE] if n_steps > 1 or stacks else None,
            transform=Compose(*stacks) if stacks else None,
        )
        self._last_ends: tuple[np.ndarray, list[Any]] | None = None
        # Whether infos may lack ends, and whether every step so far gave a reward.
        self._unsure, self._rewarded = True, True
        # The number of rows when the steps that wait were about to be written.
        self._written_before: int | None = None
        self._waiting = 0
        self._prepare()

    def _parts(self) -> dict[tuple[str, ...], Any]:
        """The space of each tensor of an observation, by what comes after "observation" in its key."""
        space = self.observation_space
        return {(name,): part for name, part in space.spaces.items()} if is_dict(space) else {(): space}

    def _stacks_of(self, frames: int) -> list[FrameStack]:
        """The stacks of so many frames that the observations are; 0: none.

        Raises:
            ValueError: they are no stacks.
        """
        found = list[FrameStack]()
        for name, space in self._parts().items() if frames else ():
            shape = row_shape(space)
            along = self._stacked_along if len(shape) != 3 else -(shape.index(min(shape)) > 0)
            if shape[along] % frames:
                raise ValueError(
                    f"observations of {space} are no stacks of frame_stack={frames} along dimension {along}"
                )
            found.append(FrameStack((*_OBSERVATION, *name), frames, dim=along, padding=self._padding))
        return found

    @property
    def _stacked(self) -> dict[Key, FrameStack]:
        """The stacks, by the keys that are stacked."""
        return {key: stack for stack in stacks_of(self.buffer.transform) for key in stack.windows}

    def _prepare(self) -> None:
        """Make the memory for the steps that wait."""
        parts = self._parts()
        observed = {name: (np.dtype(space.dtype), row_shape(space)) for name, space in parts.items()}
        action = np.dtype(self.action_space.dtype)
        kinds: dict[Key, tuple[np.dtype, tuple[int, ...]]] = {
            **{(*_OBSERVATION, *name): kind for name, kind in observed.items()},
            _ACTION: (np.dtype(np.float32) if action == np.float64 else action, (self.action_dim,)),
            **{(*_NEXT_OBSERVATION, *name): kind for name, kind in observed.items()},
            _REWARD: (np.dtype(np.float32), (1,)),
            _TERMINATED: (np.dtype(np.float32), (1,)),
            _DONE: (np.dtype(bool), (1,)),
        }
        step_bytes = sum(dtype.itemsize * math.prod(shape) for dtype, shape in kinds.values()) * self.n_envs
        self._most = max(1, min(WAITING_STEPS, WAITING_BYTES // max(step_bytes, 1), self.buffer_size))
        # A stack is refused by the step that it comes with.
        self._most = 1 if self._stacked else self._most
        lead = (self._most, self.n_envs)
        self._columns = {key: np.zeros((*lead, *shape), dtype) for key, (dtype, shape) in kinds.items()}
        # The columns of the first step that waits. Large steps don't: their arrays are read where they are.
        self._first = {as_written(key): column[0] for key, column in self._columns.items()}
        self._direct = dict(self._first) if self._most == 1 else {}
        # The names of a dict of observations; None: there is no dict.
        self._names = list(self.observation_space.spaces) if is_dict(self.observation_space) else None
        # Name in a dict, a shape where the environment gives none, and key and memory of observation and next one.
        self._observed = [
            (
                name[0] if name else None,
                (self.n_envs, 1) if _is(space, "Discrete") else None,
                as_written(own),
                self._columns[own],
                as_written(coming),
                self._columns[coming],
            )
            for name, space in parts.items()
            for own, coming in [((*_OBSERVATION, *name), (*_NEXT_OBSERVATION, *name))]
        ]
        self._action_shape = (self.n_envs, self.action_dim)
        self._actions = self._columns[_ACTION]
        self._rewards, self._terminated, self._ended = (
            self._columns[key][..., 0] for key in (_REWARD, _TERMINATED, _DONE)
        )
        # Of how many more steps it is looked at whether they go on, and what the last one led to.
        self._looks = LOOKS if self._needs_ends and not self._stacked else 0
        self._before: tuple[Any, np.ndarray] | None = None
        self._powers = torch.from_numpy(self.gamma ** np.arange(self.n_steps + 1, dtype=np.float32))

    # Writing

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: np.ndarray,
        reward: np.ndarray,
        done: np.ndarray,
        infos: Any,
        truncations: np.ndarray | None = None,
    ) -> None:
        """Add one step of all environments.

        Args:
            obs: observations ``[E, ...]``, or a dict of them.
            next_obs: the observations after them, those before the reset where an episode ends.
            action: ``[E, ...]``.
            reward: ``[E]``.
            done: bool ``[E]``.
            infos: a dict for each environment, not looked at without ``handle_timeout_termination``; or the one dict of
                Gymnasium's vector environments. A step that only resets one of these (see ``autoreset``) is no
                transition: the one before it is stored once more in its place.
            truncations: bool ``[E]``, ends that are no terminations; ``done`` is the terminations then.

        Raises:
            UserWarning: as a warning, once: batches depend on the ends of episodes, and one of the first 10 000 steps
                lacks an end; environments don't reset in the next step, and ``autoreset`` does not say so; or steps
                that only reset can't be told, for ``infos`` don't say where episodes are truncated.
            ValueError: an array has another shape, or ``infos`` is one dict and ``truncations`` are missing, but
                timeouts or the ends of episodes matter. Numbers are converted to the dtype of their space. No host
                sync.
        """
        ended: Any = done
        if truncations is not None or type(infos) is dict:
            (obs, next_obs, action, reward, done), ended, resets = self._of_vector_environments(
                [obs, next_obs, action, reward, done], infos, truncations
            )
            if resets.any() and self._stacked:
                if resets.all():
                    return
                raise ValueError(
                    "frame_stack needs environments that reset in the step that ends an episode, or one environment: "
                    "AutoresetMode.SAME_STEP, and next observations from infos['final_obs'] at ends"
                )
            infos = () if type(infos) is dict else infos
        at = self._waiting
        if at == self._most:
            self.flush()
            at = 0
        direct = self._direct
        for name, shape, key, column, next_key, next_column in self._observed:
            own, coming = (obs, next_obs) if name is None else (obs[name], next_obs[name])
            if shape is not None:
                own, coming = own.reshape(shape), coming.reshape(shape)
            if direct:
                direct[key], direct[next_key] = _like(column[0], own), _like(next_column[0], coming)
            else:
                column[at], next_column[at] = own, coming
        self._actions[at] = action if action.shape == self._action_shape else action.reshape(self._action_shape)
        self._rewards[at] = reward
        self._terminated[at] = done
        self._ended[at] = ended
        if self.handle_timeout_termination:
            for environment, info in enumerate(infos):
                if info.get("TimeLimit.truncated", False):
                    self._terminated[at, environment] = 0.0
                    self._ended[at, environment] = True
        if self._looks:
            self._look(obs, next_obs, self._ended[at])
        if direct:
            self.buffer.add_columns(direct)
        else:
            self._waiting = at + 1

    def _look(self, obs: Any, next_obs: Any, ended: np.ndarray) -> None:
        """Say once if an episode begins where the one before has not ended."""
        self._looks -= 1
        before, self._before = self._before, (copy.deepcopy(next_obs), ended.copy())
        if before is not None and not (_same(obs, before[0], _CLOSE) | before[1]).all():
            self._looks = 0
            warn(
                "a step does not begin with the observation that the one before it led to, and done did not end that "
                "episode: windows of several steps, and goals, lead into another one. Pass done, or truncations, at "
                "each end, and call end_trajectories() where an episode is left"
            )

    def _of_vector_environments(
        self, step: list[Any], infos: Any, truncations: np.ndarray | None
    ) -> tuple[list[Any], np.ndarray, np.ndarray]:
        """A step of Gymnasium's vector environments without rows that only reset, where episodes end, and where there
        were such rows.
        """
        if truncations is None and (self._needs_ends or self.handle_timeout_termination):
            raise ValueError(
                "infos is one dict, as of Gymnasium's vector environments, which does not tell where a time limit ends "
                "an episode: call add(obs, next_obs, action, reward, terminations, infos, truncations)"
            )
        # Environments of other programs, which tell each environment's info, reset in the same step.
        may_wait = self._autoreset == "next_step" or (self._autoreset is None and isinstance(infos, dict))
        infos = infos if isinstance(infos, dict) else {}
        at_once = np.zeros(self.n_envs, bool)
        for name in _FINAL:
            at_once |= infos.get(name, False)
        ended = at_once | np.asarray(step[-1], bool)
        for name in _ENDS:
            ended |= np.asarray(infos.get(name, False), bool)
        if truncations is not None:
            ended |= np.asarray(truncations, bool)
        elif may_wait and self._unsure:
            self._ask_for_truncations(step, any(name in infos for name in (*_FINAL, *_ENDS)))
        resets = np.zeros(self.n_envs, bool)
        if self._last_ends is not None:
            resets, before = self._last_ends
            if self._autoreset is None and not self._only_reset(resets, before, step, ended):
                may_wait, resets = False, np.zeros(self.n_envs, bool)
            step = [_chosen(resets, old, new) for old, new in zip(before, step, strict=True)]
        following = ended & ~at_once & ~resets & may_wait
        self._last_ends = (following, [_chosen(following, value, value) for value in step]) if following.any() else None
        return step, ended | resets, resets

    def _only_reset(self, resets: np.ndarray, before: list[Any], step: list[Any], ended: np.ndarray) -> bool:
        """Whether a step may only reset the environments in ``resets``. If not, these reset otherwise: say so once."""
        alike = ~ended & (np.asarray(step[3]) == 0) & _same(step[0], before[1])
        if alike[resets].all():
            return True
        self._autoreset = "disabled"
        warn(
            "after an end, a step does not look like one that only resets, as Gymnasium's vector environments make by "
            "default: from here on all steps are stored as transitions. Say when yours reset: autoreset=envs, or "
            "'next_step', 'same_step' or 'disabled'"
        )
        return False

    def _ask_for_truncations(self, step: list[Any], told: bool) -> None:
        """Say once that ends by a time limit are not told, at the first sign of one: an end, or a lack of reward."""
        unrewarded = bool((np.asarray(step[3]) == 0).any())
        if not told and (np.any(step[-1]) or (unrewarded and self._rewarded and self.size() > 0)):
            told = True
            warn(
                "infos don't tell where a time limit ends an episode, and Gymnasium's step after it only resets, which "
                "is no transition, but is stored as one: pass truncations, add(obs, next_obs, actions, rewards, "
                "terminations, infos, truncations), or say autoreset=envs if yours reset otherwise"
            )
        self._unsure, self._rewarded = not told, self._rewarded and not unrewarded

    def extend(self, *arguments: Any) -> None:
        """Add several steps: the arguments of :meth:`add`, each with one more dimension in front."""
        for step in zip(*arguments, strict=True):
            self.add(*step)

    @graph_break
    def flush(self) -> None:
        """Write the steps that wait on the host. No host sync."""
        if self._waiting:
            self.buffer.operation.run(self._write)

    def _write(self) -> None:
        """Write the steps that wait, within an operation of the buffer."""
        steps, written = self._waiting, self.buffer.storage.rows_written
        if self._written_before is None:
            self._written_before = written
        # Otherwise an interrupt came: the steps are written, or they are not.
        if written == self._written_before:
            if steps == 1:
                _add_columns(self.buffer, self._first)
            else:
                _extend_columns(self.buffer, {key: column[:steps] for key, column in self._columns.items()})
        self._waiting, self._written_before = 0, None

    def end_trajectories(self, env: int | None = None) -> None:
        """End the episodes in progress, of all environments or of one, which the program leaves without ``done``.

        See :meth:`gpubuf.ReplayBuffer.end_trajectories`.
        """
        self.flush()
        self.buffer.end_trajectories(env)
        self._before = None

    def reset(self) -> None:
        """Forget all transitions."""
        self._waiting, self._written_before, self._last_ends, self._before = 0, None, None, None
        self.buffer.empty()

    # Reading

    def sample(self, batch_size: int, env: Any = None) -> Any:
        """Transitions drawn uniformly, with replacement.

        Args:
            batch_size: number of transitions, B.
            env: a ``VecNormalize`` that normalises observations and rewards.

        Returns:
            ``observations`` ``[B, ...]`` (or a dict of them), ``actions`` ``[B, action_dim]``, ``next_observations``,
            ``dones`` and ``rewards`` float32 ``[B, 1]``, ``discounts`` float32 ``[B, 1]`` or None. ``dones`` are 1 for
            terminations alone. The caller owns all of them. No host sync without ``env``.

        Raises:
            RuntimeError: nothing has been added.
        """
        # What keeps it out of a compiled graph takes a tenth of a sample's time.
        run = _run_apart if torch.compiler.is_compiling() else Operation.run
        return self._batch(run(self.buffer.operation, self._drawn, batch_size), env)

    def _drawn(self, batch_size: int) -> dict[Any, Tensor]:
        """Write the steps that wait and draw, as one operation of the buffer: less of it then has to come back into
        the processor's caches."""
        if self._waiting:
            self._write()
        return self.buffer.parts.batches.columns(batch_size)

    def _get_samples(self, batch_inds: np.ndarray, env: Any = None) -> Any:
        """Transitions of given steps, each of an environment that NumPy draws, as in Stable-Baselines3."""
        environments = np.random.randint(0, high=self.n_envs, size=(len(batch_inds),))
        return self.samples_at(batch_inds, environments, env)

    def samples_at(self, steps: np.ndarray, environments: np.ndarray, env: Any = None) -> Any:
        """A batch as :meth:`sample` makes it, of given steps and environments: int64 ``[B]`` each."""
        self.flush()
        index = torch.from_numpy(np.asarray(steps, np.int64) * self.n_envs + np.asarray(environments, np.int64))
        data, generation = rows_at(self.buffer, index)
        data = self.buffer.transform(data)
        return self._batch({**dict(data.items(True, True)), "index": index, "index_generation": generation}, env)

    def _batch(self, columns: dict[Any, Tensor], env: Any) -> Any:
        observations: Any
        coming: Any
        if self._names is None:
            made, observations, coming = self._samples, columns["observation"], columns[_NEXT_OBSERVATION]
        else:
            made = self._dict_samples
            observations, coming = (
                {name: columns[*key, name] for name in self._names} for key in (_OBSERVATION, _NEXT_OBSERVATION)
            )
        rewards, discounts = columns[_REWARD], None
        steps = columns[as_written(STEPS_KEY)] if self.n_steps > 1 else None
        if steps is not None:
            if self._powers.device != steps.device:
                self._powers = self._powers.to(steps.device)
            discounts = self._powers[steps]
        if env is not None:
            observations, coming = normalized(observations, env), normalized(coming, env)
            rewards = self._normalized_rewards(rewards, columns["index"], steps, env)
        samples = made(observations, columns["action"], coming, columns[_TERMINATED], rewards, discounts)
        return self._made(samples, columns)

    def _made(self, samples: Any, columns: dict[Any, Tensor]) -> Any:
        return samples

    def _normalized_rewards(self, rewards: Tensor, index: Tensor, steps: Tensor | None, env: Any) -> Tensor:
        if steps is None:
            return through(env.normalize_reward, rewards)
        # Each reward of the sum is scaled and cut for itself.
        after = torch.arange(self.n_steps, device=index.device)
        rows = (index.unsqueeze(1) + after * self.n_envs) % self.buffer.storage.max_size
        single = stored_values(self.buffer, _REWARD, rows.reshape(-1)).view(rows.shape)
        counted = through(env.normalize_reward, single) * self._powers[:-1] * (after < steps)
        return counted.sum(1, keepdim=True)

    # What is known of the rows

    def size(self) -> int:
        """The number of steps stored."""
        return min(len(self.buffer) // self.n_envs + self._waiting, self.buffer_size)

    @property
    def pos(self) -> int:
        """The step that the next one is written to. Setting it, or ``full``, writes all that stays anew."""
        return (self.buffer.write_count // self.n_envs + self._waiting) % self.buffer_size

    @pos.setter
    def pos(self, pos: int) -> None:
        if not 0 <= pos < self.buffer_size:
            raise ValueError(f"pos must be in 0 .. {self.buffer_size - 1}, got {pos}")
        self._continue_at(pos, self.full)

    @property
    def full(self) -> bool:
        """Whether the oldest steps are being overwritten. Set to True: steps that were never written are zeros."""
        return self.size() == self.buffer_size

    @full.setter
    def full(self, full: bool) -> None:
        self._continue_at(self.pos, full)

    def _continue_at(self, pos: int, full: bool) -> None:
        """Keep all steps, or, unless ``full``, those before ``pos``, and write there next."""
        if (pos, full) == (self.pos, self.full):
            return
        if self._stacked:
            raise NotImplementedError("pos and full can't be set with frame_stack: rows stay in their order")
        columns = {
            key: self._stored(key).reshape(self.buffer_size, *self._columns[key].shape[1:]) for key in self._columns
        }
        self.reset()
        for steps in (self.buffer_size, pos) if full else (pos,):
            if steps:
                self.buffer.extend_columns({key: column[:steps] for key, column in columns.items()})

    # Columns as arrays

    def _stored(self, key: Key) -> np.ndarray:
        """The values of a key, ``[T, E, ...]``. Synchronises on a GPU."""
        self.flush()
        column, n = self._columns[key], len(self.buffer)
        found = np.zeros((self.buffer_size, *column.shape[1:]), column.dtype)
        if n:
            stack, index = self._stacked.get(key), torch.arange(n, device=self.buffer.storage.device)
            run = self.buffer.operation.run
            read = partial(stored_values, self.buffer) if stack is None else partial(run, stack.read)
            found.reshape(-1, *column.shape[2:])[:n] = read(key, index).cpu().numpy()
        return found[..., 0] if key in (_REWARD, _TERMINATED, _DONE) else found

    def _array(self, key: Key) -> StoredArray:
        return StoredArray.of(self._stored(key), partial(self._set, key))

    def _observations(self, key: Key) -> Any:
        if not is_dict(self.observation_space):
            return self._array(key)
        return {name: self._array((*key, name)) for name in self.observation_space.spaces}

    def _set(self, key: Key, places: tuple[np.ndarray, ...], values: np.ndarray) -> None:
        steps, stored = places[0], self.size()
        if steps.size and steps.max() >= stored:
            raise IndexError(f"step {steps.max()} can't be set: {stored} steps are stored")
        given = torch.from_numpy(values[places].reshape(len(steps), *self._columns[key].shape[2:]))
        set_keys(self.buffer, {key: given}, tuple(map(torch.from_numpy, places)), whole=False)

    def _set_ends(self, changed: str, places: tuple[np.ndarray, ...], values: np.ndarray) -> None:
        done, given = self._stored(_DONE), values.astype(bool)
        timeout = done & (self._stored(_TERMINATED) == 0)
        if changed == "timeouts":
            done, timeout = done | given, given
        else:
            # Where theirs handles no timeouts it sets the flag for an episode that is cut off.
            cut = self.optimize_memory_usage and self.handle_timeout_termination
            done, timeout = given, given & (timeout | cut)
        self._set(_DONE, places, done)
        self._set(_TERMINATED, places, (done & ~timeout).astype(np.float32))

    @property
    def observations(self) -> Any:
        """Observations, a :class:`StoredArray` ``[T, E, ...]``, or a dict of them."""
        return self._observations(_OBSERVATION)

    @property
    def next_observations(self) -> Any:
        """The observations after them."""
        return self._observations(_NEXT_OBSERVATION)

    @property
    def actions(self) -> Any:
        """Actions, a :class:`StoredArray` ``[T, E, action_dim]``."""
        return self._array(_ACTION)

    @property
    def rewards(self) -> Any:
        """Rewards of single steps, a :class:`StoredArray` float32 ``[T, E]``."""
        return self._array(_REWARD)

    @property
    def dones(self) -> Any:
        """Where episodes end, a :class:`StoredArray` float32 ``[T, E]``.

        Setting one makes it a termination; with ``optimize_memory_usage`` and timeouts that are handled it counts as a
        timeout, for Stable-Baselines3 sets it when training begins again.
        """
        return StoredArray.of(self._stored(_DONE).astype(np.float32), partial(self._set_ends, "dones"))

    @property
    def timeouts(self) -> Any:
        """Ends that are no terminations, a :class:`StoredArray` float32 ``[T, E]``. Setting one ends the episode."""
        found = self._stored(_DONE) & (self._stored(_TERMINATED) == 0)
        return StoredArray.of(found.astype(np.float32), partial(self._set_ends, "timeouts"))

    @property
    def device(self) -> torch.device:
        """The device of the batches. Setting another one moves the rows there, if this machine has it."""
        return self._device

    @device.setter
    def device(self, device: torch.device | str) -> None:
        new, old = chosen_device(device), chosen_device(self._device)
        numbers = {new.index, old.index}
        if new.type != old.type or (None not in numbers and len(numbers) > 1):
            self.flush()
            self.buffer.to(new)
        self._device = new if device == "auto" else torch.device(device)

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        self.flush()
        return {name: value for name, value in vars(self).items() if name not in _MADE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._prepare()
        # What pickle reads begins new trajectories: nothing of the step before is waited for.
        self._last_ends = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy that goes on where this one is."""
        other = type(self).__new__(type(self))
        other.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        other._last_ends, other._before = copy.deepcopy((self._last_ends, self._before))
        return other

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.size()}/{self.buffer_size} steps of {self.n_envs}, buffer={self.buffer!r})"


# Steps of vector environments


def _same(one: Any, two: Any, tolerance: float = 0.0) -> Any:
    """Of which environments two observations ``[E, ...]`` are equal, absolutely and relatively to a tolerance."""
    if isinstance(one, Mapping):
        return np.logical_and.reduce([_same(value, two[name], tolerance) for name, value in one.items()])
    equal = np.isclose(one, two, tolerance, tolerance, equal_nan=True)
    return equal.reshape(len(equal), -1).all(1)


def _chosen(which: np.ndarray, one: Any, two: Any) -> Any:
    """``one`` for the environments in ``which``, ``two`` for the others: a copy."""
    if isinstance(two, Mapping):
        return {name: _chosen(which, one[name], value) for name, value in two.items()}
    two = np.asarray(two)
    return np.where(which.reshape(-1, *[1] * (two.ndim - 1)), one, two)


# Spaces, of Gymnasium or of its predecessor, which has the same classes. Neither need be installed.


def _is(space: Any, name: str) -> bool:
    """Whether a space is of the class of that name. Neither library need be installed."""
    return any(kind.__name__ == name for kind in type(space).__mro__)


def is_dict(space: Any) -> bool:
    """Whether observations are dicts."""
    return _is(space, "Dict")


def row_shape(space: Any, what: str = "observations") -> tuple[int, ...]:
    """The shape of one row of a space.

    Raises:
        NotImplementedError: for tuples, and dicts in dicts.
    """
    if _is(space, "Box") or _is(space, "MultiBinary"):
        return tuple(space.shape)
    if _is(space, "Discrete"):
        return (1,)
    if _is(space, "MultiDiscrete"):
        return (len(space.nvec),)
    raise NotImplementedError(
        f"{what} of {space} can't be stored: expected Box, a discrete space, or for observations a Dict of such (no "
        "dicts of dicts)"
    )


# Batches through the ``VecNormalize`` of Stable-Baselines3, which works on the host.


def normalized(observations: Any, env: Any) -> Any:
    """Observations as ``env`` normalises them: a tensor, or a dict of them."""
    if isinstance(observations, dict):
        found = env.normalize_obs({name: value.cpu().numpy() for name, value in observations.items()})
        return {name: torch.from_numpy(found[name]).to(value.device) for name, value in observations.items()}
    return through(env.normalize_obs, observations)


def through(function: Any, numbers: Tensor) -> Tensor:
    """``function`` of NumPy applied to a tensor: float32, on its device. Synchronises on a GPU."""
    return torch.from_numpy(function(numbers.cpu().numpy()).astype(np.float32, copy=False)).to(numbers.device)
