"""Trajectories that are found in buffers, and which of them fulfil a condition."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict


def rows(n: int, start: int = 0, *, ids: bool = False) -> TensorDict:
    """``n`` rows of trajectories of 3, 4, 3, 4 ... steps."""
    number = torch.arange(start, start + n)
    ended = (number % 7 == 2) | (number % 7 == 6)
    data = {"a": number, "next": {"reward": number.float().unsqueeze(-1), "done": ended.unsqueeze(-1)}}
    if ids:
        data = {"a": number, "collector": {"traj_ids": number // 5}, "next": {"reward": number.float().unsqueeze(-1)}}
    return TensorDict(data, [n])


def outcome(call: Callable[[], Any]) -> Any:
    """The rows of the trajectories found; of an error its type."""
    try:
        return [trajectory.a.tolist() for trajectory in call()]
    except Exception as error:
        return type(error).__name__


def conditions(traj: Any) -> dict[str, Any]:
    """Predicates, by name."""
    return {
        "all": None,
        "sum": traj.reward.sum() > 20,
        "length": traj.length == 4,
        "total": traj.total_reward <= 12,
        "both": (traj.reward.mean() >= 4) & (traj.length < 4),
        "either": (traj.a.first() == 0) | (traj.a.last() != 6),
        "not": ~(traj.a.max() > 10),
        "any": (traj.a == 5).any(),
        "every": (traj[("next", "reward")] > 5).all(),
        "smallest": traj.a.min() < 3,
        "function": lambda trajectory: trajectory.length == 3 and trajectory["a"][0] > 6,
        "unreduced": traj.a > 3,
        "unknown": traj.nothing.sum() > 3,
    }


def story(data: Any) -> dict[str, Any]:
    """What ``data``, a module, finds."""
    told: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for ids in (False, True):
            for n in (0, 5, 12, 17, 24, 30):
                buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(12))
                for start in range(0, n, 6):
                    buffer.extend(rows(min(6, n - start), start, ids=ids))
                told[f"{n} rows, {ids}"] = {
                    name: outcome(lambda b=buffer, p=each: b.query(p)) for name, each in conditions(data.traj).items()
                }
        for n in (5, 6, 9):
            buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(12, ndim=2))
            for start in range(0, n, 3):
                both = [rows(min(3, n - start), first + start) for first in (0, 100)]
                buffer.extend(torch.stack(both))
            told[f"two environments, {n}"] = outcome(buffer.query)
        told["a key"] = outcome(lambda: data.filter_trajectories(rows(12), trajectory_key="a"))
        told["no such key"] = outcome(lambda: data.filter_trajectories(rows(12), trajectory_key="b"))
        told["a condition"] = outcome(lambda: data.filter_trajectories(rows(12), data.traj.length == 4))
        told["flat rows"] = outcome(lambda: list(data.iter_trajectories(rows(12))))
        told["not flat"] = outcome(lambda: list(data.iter_trajectories(rows(12).view(3, 4))))
        told["no TensorDict"] = outcome(lambda: list(data.iter_trajectories([1])))
        told["no ends"] = outcome(lambda: list(data.iter_trajectories(rows(12).select("a"))))
        changed = data.ReplayBuffer(storage=data.LazyTensorStorage(12))
        changed.extend(rows(12))
        changed.append_transform(lambda batch: batch.set("a", batch["a"] * 2))
        told["transformed"] = outcome(lambda: changed.query((data.traj.a == 6).any()))
        first = changed.query()[0]
        told["a trajectory"] = [
            first.length,
            first.reward.flatten().tolist(),
            float(first.total_reward),
            first[1:].length,
            first["next", "reward"].flatten().tolist(),
            first.get("nothing", 7),
            sorted(first.keys()),
        ]
        both = (data.traj.reward.sum() > 1) & ~(data.traj.length == 2)
        told["keys"] = sorted(both.required_keys())
    return told
