"""Hindsight relabelling: what a trajectory reached later becomes the goal that it was after."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.processing.base import Process
from gpubuf.data.samplers.base import Drawn, RandomState
from gpubuf.data.samplers.trajectory_index import TrajectoryBounds
from gpubuf.data.storage.containers import Data
from gpubuf.data.storage.layout import Key, RowLayout, as_key, as_written
from gpubuf.data.storage.plan import Recipe, position_of
from gpubuf.data.storage.schema import NEXT_KEY, Schema
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.kernels.rows._cpu import geometric_ranks

STRATEGIES = ("future", "final", "episode", "geometric")
RELABELLED = "relabelled"

SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Dtypes of the same bits."""
_TERMINATED: Key = ("next", "terminated")
_TRUNCATED: Key = ("next", "truncated")
_DONE: Key = ("next", "done")
_NEEDS = "hindsight needs the key"


class Hindsight(TrajectoryBounds):
    """Gives a share of the rows of a batch another goal: what was achieved at a later step of their trajectory.

    Give it to a buffer, ``ReplayBuffer(..., relabel=Hindsight(...))``; any sampler will do. A trajectory ends with its
    end flag; one in progress ends with the newest row, and none goes over the write cursor. Rows stay as they are
    stored. The info of a batch says under ``"relabelled"``, bool, which rows have another goal. Batches have the goal
    at ``goal_key``, and under "next" if it is stored there too.

    The goals are found in O(log capacity) each and gathered in one launch; nothing synchronises with the host. Random
    numbers are those of the sampler. Each row is relabelled by itself, also in a slice.

    Reference: Andrychowicz et al., "Hindsight Experience Replay", NeurIPS 2017.

    Args:
        reward: ``reward(achieved, goal, batch)``, the rewards of a whole batch on its device: of what each row has
            under ``achieved_key``, and its goal. Called after the goals are set, before transforms of the buffer. Rows
            that keep their goal keep their reward.
        goal_key: the goal.
        achieved_key: what a step has achieved, of the goal's shape and dtype.
        strategy: ``"future"``: any step from the row's own on, with equal probability; ``"final"``: the last step;
            ``"episode"``: any step of the trajectory; ``"geometric"``: a step from the row's own on, each ``decay``
            times as often as the one before it, as far as the trajectory goes.
        decay: of the geometric strategy, in (0, 1): the discount in contrastive RL (Eysenbach et al., "Contrastive
            Learning as Goal-Conditioned Reinforcement Learning", NeurIPS 2022).
        ratio: the probability that a row is relabelled; a number, or a 0-dim tensor on the buffer's device that may be
            changed in place, also between replays of a captured step.
        reward_key: the rewards.
        terminated: ``terminated(achieved, goal, batch)``, whether a step ends its trajectory, as ``reward`` is called.
            Relabelled rows get it as ``("next", "terminated")``, and that or ``("next", "truncated")`` as
            ``("next", "done")``, of those that are stored. None: flags stay as they are.
        end_keys: flags that end a trajectory, any of which suffices. None: those of ``"done"``, ``"terminated"`` and
            ``"truncated"`` that are stored under "next", or else at the root.
        traj_key: identifiers of trajectories, which tell the ends instead of flags.

    Raises:
        ValueError: the strategy is none of these, ``ratio`` is a number outside [0, 1], or ``decay`` is not in (0, 1).
    """

    def __init__(
        self,
        reward: Callable[[Tensor, Tensor, Data], Tensor],
        *,
        goal_key: Any = "desired_goal",
        achieved_key: Any = ("next", "achieved_goal"),
        strategy: str = "future",
        decay: float = 0.99,
        ratio: float | Tensor = 0.8,
        reward_key: Any = ("next", "reward"),
        terminated: Callable[[Tensor, Tensor, Data], Tensor] | None = None,
        end_keys: Sequence[Any] | None = None,
        traj_key: Any = None,
    ) -> None:
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {STRATEGIES}, got {strategy!r}")
        if not isinstance(ratio, Tensor) and not 0 <= ratio <= 1:
            raise ValueError(f"ratio must be in [0, 1], got {ratio}")
        if not 0 < decay < 1:
            raise ValueError(f"decay must be in (0, 1), got {decay}")
        self.reward, self.terminated = reward, terminated
        self.goal_key, self.achieved_key, self.reward_key = as_key(goal_key), as_key(achieved_key), as_key(reward_key)
        self.strategy, self.decay, self.ratio = strategy, decay, ratio
        super().__init__(Recipe(end_keys=end_keys, traj_key=traj_key))

    # What it needs

    def check_rows(self, schema: Schema) -> None:
        """Raise if rows of ``schema`` can't be relabelled.

        Raises:
            KeyError: a key is not stored.
            ValueError: goals and what is achieved differ in shape or dtype.
        """
        layout = schema.batch
        goals = [layout.leaves[position] for position in self._goals(layout)]
        achieved = layout.leaves[position_of(layout, self.achieved_key, _NEEDS)]
        position_of(layout, self.reward_key, _NEEDS)
        for leaf in goals:
            if (leaf.shape, leaf.dtype) != (achieved.shape, achieved.dtype):
                raise ValueError(
                    f"{achieved.name} becomes the goal {leaf.name}, but is {achieved.dtype} of shape {achieved.shape}, "
                    f"and the goal {leaf.dtype} of shape {leaf.shape}"
                )
        super().check_rows(schema)

    def check_recipe(self, recipe: Recipe, processing: Iterable[Process]) -> None:
        """Raise if batches made by ``recipe``, with this processing, can't be relabelled.

        Raises:
            ValueError: they have several steps, windows or returns to go, or a key that this reads or changes is
                processed.
        """
        if recipe.n_steps > 1:
            raise ValueError(
                f"with n_steps={recipe.n_steps} a reward is a sum over several steps, which hindsight can't make anew"
            )
        if recipe.windows:
            raise ValueError("hindsight gives single rows other goals: it can't be used with windows")
        if recipe.returns is not None:
            raise ValueError("hindsight gives rows other rewards, of which returns to go would know nothing")
        keys = self.goal_key, (NEXT_KEY, *self.goal_key), self.achieved_key, self.reward_key
        for step in processing:
            served = step.serves()
            for key in keys:
                if key in served:
                    raise ValueError(
                        f"{as_written(key)!r} is relabelled in hindsight, and can't be processed by {step!r}"
                    )

    def _goals(self, layout: RowLayout) -> list[int]:
        """The positions of the goals in a layout."""
        goal, coming = position_of(layout, self.goal_key, _NEEDS), layout.position((NEXT_KEY, *self.goal_key))
        return [goal] if coming is None else [goal, coming]

    # Relabelling

    def apply(self, drawn: Drawn, storage: TensorStorage, random: RandomState) -> Drawn:
        """Rows that were drawn from ``storage``, some with other goals. No host sync."""
        layout, rows = storage.schema.batch, drawn.positions
        n = rows.numel()
        uniform = random.uniform(2 * n)
        relabelled, target = self._targets(storage, rows, uniform[:n] < self.ratio, uniform[n:])
        goal = storage.plans.batch.gather_key(position_of(layout, self.achieved_key, _NEEDS), target)
        lead = drawn.batch_size or (n,)
        goal = goal.view(*lead, *goal.shape[1:])
        mask = relabelled.view(*lead, *[1] * (goal.dim() - len(lead)))
        tensors = list(drawn.tensors)
        for number in self._goals(layout):
            tensors[number] = torch.where(mask, goal, tensors[number])
        return drawn._replace(tensors=tensors, info={**drawn.info, RELABELLED: relabelled.view(lead)})

    def _targets(
        self, storage: TensorStorage, rows: Tensor, relabelled: Tensor, uniform: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Which rows are relabelled, and the row whose achievement is the goal of each."""
        steps, envs = storage.shape[0], storage.rows.envs
        first, last, length = self.bounds(storage, rows)
        # A GPU gives rows that are not stored no trajectory.
        relabelled = relabelled & (length > 0)
        target = last
        if self.strategy != "final":
            start, choices = first, length
            if self.strategy != "episode":
                # Of one environment the rows are the steps.
                ahead = last - rows if envs == 1 else last // envs - rows // envs
                start, choices = rows, ahead.remainder(steps) + 1
            if self.strategy == "geometric":
                chosen = geometric_ranks(uniform, choices, math.log(self.decay))
            else:
                # A uniform is below 1, but its product may be rounded up.
                chosen = torch.minimum((uniform * choices).to(torch.int64), choices - 1)
            # Steps of an environment are so many rows apart.
            target = (start + chosen * envs).remainder(steps * envs)
        return relabelled, torch.where(relabelled, target, rows)

    def finish(self, data: Data, info: dict[Any, Tensor]) -> None:
        """Compute rewards and flags of a batch's relabelled rows, in place."""
        mask = info[RELABELLED]
        achieved, goal = data.get(as_written(self.achieved_key)), data.get(as_written(self.goal_key))
        _replace(data, info, self.reward_key, mask, self.reward(achieved, goal, data))
        if self.terminated is None:
            return
        ended = self.terminated(achieved, goal, data)
        keys = set(data.keys(True, True))
        if _TERMINATED in keys:
            _replace(data, info, _TERMINATED, mask, ended)
        if _DONE in keys:
            done = data.get(_DONE)
            ended = ended.reshape(done.shape).bool()
            _replace(data, info, _DONE, mask, ended | data.get(_TRUNCATED).bool() if _TRUNCATED in keys else ended)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(goal_key={as_written(self.goal_key)!r}, "
            f"achieved_key={as_written(self.achieved_key)!r}, strategy={self.strategy!r}, ratio={self.ratio})"
        )


def _replace(data: Data, info: dict[Any, Tensor], key: Key, mask: Tensor, new: Tensor) -> None:
    """Give the rows of ``mask`` new values of a key.

    Raises:
        ValueError: there are not as many values as the key has.
    """
    name = as_written(key)
    old = info.get(name, data.get(name))
    if new.numel() != old.numel():
        raise ValueError(
            f"{name!r} of the batch has the shape {tuple(old.shape)}, the function gave {tuple(new.shape)}"
        )
    new = new.detach().reshape(old.shape).to(old.dtype)
    # PyTorch before 2.9 chooses among no unsigned numbers.
    bits = SIGNED.get(old.dtype, old.dtype)
    chosen = mask.view(*mask.shape, *[1] * (old.dim() - mask.dim()))
    replaced = torch.where(chosen, new.view(bits), old.view(bits)).view(old.dtype)
    data.set(name, replaced)
    if name in info:
        info[name] = replaced
