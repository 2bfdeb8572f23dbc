"""Windows around anchors, in storages of several kinds."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from tensordict import TensorDict

#: The rows written to 12 places, the ends among them, and the number of environments.
STORAGES: dict[str, tuple[int, tuple[int, ...], int]] = {
    "part full": (9, (2, 6), 1),
    "no ends": (9, (), 1),
    "full": (12, (4, 5, 11), 1),
    "wrapped": (17, (4, 9, 14), 1),
    "two environments": (8, (1, 4), 2),
    "two environments, wrapped": (16, (3, 8, 13), 2),
}
UNITS: dict[str, dict[str, Any]] = {
    "length": {"length": 3},
    "one": {"length": 1},
    "all around": {"length": 2, "burn_in": 2, "bootstrap": 1},
    "dilated": {"length": 3, "burn_in": 1, "dilation": 2},
    "no key": {"length": 4, "burn_in": 1, "done_key": None},
}
BOUNDARIES = ("pad", "stop", "include_reset")


def filled(data: Any, n: int, ends: tuple[int, ...], envs: int) -> Any:
    """A buffer of ``n`` rows."""
    buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(12, ndim=1 if envs == 1 else 2))
    done = torch.zeros(n, 1, dtype=torch.bool)
    done[list(ends)] = True
    rows = TensorDict({"number": torch.arange(n), "next": {"done": done}}, [n])
    # A step of all environments at a time.
    for step in rows.split(envs):
        buffer.extend(step if envs == 1 else step.reshape(envs, 1))
    return buffer


def story(data: Any, every: int = 7) -> dict[str, Any]:
    """The windows of all rows of all storages, by ``data``, a module: in every so many of the cases."""
    told: dict[str, Any] = {}
    cases = list(itertools.product(STORAGES.items(), UNITS.items(), BOUNDARIES))
    for (storage, what), (name, options), boundary in cases[::every]:
        buffer = filled(data, *what)
        stored = min(what[0], 12)
        anchors = torch.arange(stored)
        if what[2] > 1:
            anchors = torch.stack((anchors // 2, anchors % 2), -1)
        unit = data.Sequence(episode_boundary=boundary, **options)
        info = {"priority_weight": torch.arange(stored) + 0.5}
        index, info = unit.expand(anchors, info, buffer.storage)
        if isinstance(index, tuple):
            index = index[0] * 2 + index[1]
            info["anchor_index"] = info["anchor_index"][:, 0] * 2 + info["anchor_index"][:, 1]
        total = sum(options.get(key, 0) for key in ("burn_in", "length", "bootstrap"))
        mask = info["validity_mask"].view(-1, total)
        told[f"{storage}, {name}, {boundary}"] = {
            "index": index.tolist(),
            "valid": ["".join("01"[bit] for bit in row) for row in mask.long().tolist()],
            "learning": info["learning_mask"][:total].tolist(),
            "same": bool((info["learning_mask"].view(-1, total) == info["learning_mask"][:total]).all()),
            "anchor": info["anchor_index"][::total].tolist(),
            "sequence": info["sequence_id"][::total].tolist(),
            "step": info["step_in_sequence"][: 2 * total].tolist(),
            "weight": info["priority_weight"][::total].tolist(),
            "dtypes": {key: [str(value.dtype), list(value.shape)] for key, value in sorted(info.items())},
        }
    return told
