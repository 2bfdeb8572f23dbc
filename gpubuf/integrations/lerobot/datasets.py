"""Between transitions and LeRobot's data sets. LeRobot itself is imported by :func:`new_dataset` only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

ACTION, REWARD, DONE = "action", "next.reward", "next.done"
INFO = "complementary_info."


def transitions_of(dataset: Any, state_keys: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    """The transitions of a data set, as arguments of :meth:`ReplayBuffer.add`; each sample is read once.

    Args:
        dataset: ``dataset[i]`` is a dict with ``"action"``, ``"next.reward"``, ``"episode_index"``, ``state_keys``, and
            perhaps ``"next.done"``. Keys that begin with ``"complementary_info."`` come along.
        state_keys: what a state is made of.

    Raises:
        ValueError: there are no ``state_keys``.
    """
    if state_keys is None:
        raise ValueError("state_keys must be given: which keys of the data set make a state")
    n = len(dataset)
    following: Any = dataset[0] if n else None
    for i in range(n):
        sample: Any = following
        following = dataset[i + 1] if i + 1 < n else None
        goes_on = following is not None and bool(following["episode_index"] == sample["episode_index"])
        done = bool(sample[DONE].item()) if DONE in sample else not goes_on
        # The state behind the last one is in no data set.
        coming = following if goes_on and not done else sample
        info = {key.removeprefix(INFO): _one(value) for key, value in sample.items() if key.startswith(INFO)}
        yield {
            "state": {key: _one(sample[key]) for key in state_keys},
            "action": _one(sample[ACTION]),
            "reward": float(sample[REWARD].item()),
            "next_state": {key: _one(coming[key]) for key in state_keys},
            "done": done,
            "truncated": False,
            "complementary_info": info or None,
        }


def _one(value: Any) -> Any:
    return value.unsqueeze(0) if isinstance(value, Tensor) else value


def new_dataset(repo_id: str, fps: int, root: Any, features: Mapping[str, Any]) -> Any:
    """An empty data set of LeRobot's.

    Raises:
        ImportError: LeRobot is missing.
    """
    try:
        from lerobot.datasets.lerobot_dataset import LeRobotDataset
    except ImportError as error:
        raise ImportError("to_lerobot_dataset() needs LeRobot: pip install lerobot") from error
    return LeRobotDataset.create(
        repo_id=repo_id, fps=fps, root=root, robot_type=None, features=dict(features), use_videos=True
    )


def features_of(rows: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """LeRobot's description of frames with these values, of which the reward and the flag are left out."""
    found: dict[str, dict[str, Any]] = {
        "index": {"dtype": "int64", "shape": [1]},
        "episode_index": {"dtype": "int64", "shape": [1]},
        "frame_index": {"dtype": "int64", "shape": [1]},
        "timestamp": {"dtype": "float32", "shape": [1]},
        "task_index": {"dtype": "int64", "shape": [1]},
        REWARD: {"dtype": "float32", "shape": (1,)},
        DONE: {"dtype": "bool", "shape": (1,)},
    }
    for key, value in rows.items():
        shape = tuple(value.shape)
        is_image = len(shape) == 3 and shape[0] in (1, 3)
        found[key] = {"dtype": "image" if is_image else "float32", "shape": shape}
    return found


def frame_of(row: Mapping[str, Tensor], reward: Tensor, done: Tensor, task: str) -> dict[str, Any]:
    """A frame of one row, on the CPU."""
    return {**row, REWARD: reward.reshape(1).float(), DONE: done.reshape(1).to(torch.bool), "task": task}
