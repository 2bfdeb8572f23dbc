"""Which rows may stand for the rows around them, in plain Python, and buffers with windows."""

from __future__ import annotations

import dataclasses
from typing import Any

from gpubuf.data import LazyTensorStorage, Sampler, TensorDictReplayBuffer
from gpubuf.data.storage.plan import Recipe
from gpubuf.kernels import rows
from tests.support.slice_model import Row, SliceModel


def windowed(sampler: Sampler, model: SliceModel, windows: Any, **options: Any) -> TensorDictReplayBuffer:
    """An empty buffer with windows, of the shape of a model."""
    storage = LazyTensorStorage(model.steps * model.envs, ndim=1 if model.envs == 1 else 2)
    return TensorDictReplayBuffer(storage=storage, sampler=sampler, windows=windows, **options)


def set_windows(buffer: TensorDictReplayBuffer, windows: Any) -> None:
    """Make batches with other windows from now on."""
    recipe = dataclasses.replace(buffer.parts.recipe, windows=windows)
    buffer.parts.sampler.check_recipe(recipe)
    buffer.parts._set(recipe=recipe)


def has_lost(model: SliceModel) -> bool:
    """Whether rows before the oldest one were overwritten, of an environment."""
    return bool(rows.has_lost(model.written, len(model.rows[0]), model.steps))


def counted(model: SliceModel, past: int) -> list[list[Row]]:
    """Trajectories, without the rows of the oldest ``past`` steps, where rows before them were overwritten."""
    late = past if has_lost(model) else 0
    left_out = {row.number for of_env in model.rows for row in of_env[:late]}
    return [[row for row in t if row.number not in left_out] for t in model.trajectories()]


def drawable(model: SliceModel, recipe: Recipe) -> list[Row]:
    """The rows that a sampler by trajectories may draw."""
    before, after = recipe.whole or (0, 0)
    found = []
    for whole, part in zip(model.trajectories(), counted(model, recipe.past), strict=True):
        found += [row for row in part if row in whole[before : max(len(whole) - after, 0)]]
    return found


def not_the_oldest(model: SliceModel, past: int) -> list[Row]:
    """The rows that a uniform sampler may draw: all but the oldest steps of a ring that has lost rows."""
    left_out = min(past, len(model.rows[0]) - 1) if has_lost(model) else 0
    return [row for of_env in model.rows for row in of_env[left_out:]]
