"""States of samplers as TorchRL keeps them: in its dicts, and in the files of its ``dumps``. For TorchRL 0.14.

Nothing is unpickled. Random streams are not part of TorchRL's states.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf.data.storage import memmap_files as files
from gpubuf.kernels import sum_tree

_FILE = "sampler_metadata.json"
_VERSION = 1
# What TorchRL's tree of minima holds where there is no row.
_NO_MINIMUM = torch.finfo(torch.float32).max


class Priorities(NamedTuple):
    """A prioritized sampler of TorchRL's. ``weights`` are the transformed priorities, ``[max_capacity]``."""

    alpha: float
    beta: float
    eps: float
    max_priority: float | None
    weights: Tensor

    def state(self, capacity: int, size: int, order: Tensor | None = None) -> dict[str, Any]:
        """What :meth:`PrioritizedSampler.load_state_dict` takes, beside the type and the random stream.

        Args:
            capacity: of the storage.
            size: number of rows stored.
            order: the position in :attr:`weights` of each of them; None: its own.

        Raises:
            ValueError: there are more rows than weights.
        """
        weights = self.weights[:size].float()
        if weights.numel() < size:
            raise ValueError(f"the sampler has room for {weights.numel()} rows, the storage holds {size}")
        leaves = torch.zeros(capacity, dtype=torch.float32)
        leaves[:size] = weights if order is None else weights[order]
        scalars = torch.zeros(5, dtype=torch.float64)
        scalars[sum_tree.ALPHA], scalars[sum_tree.BETA], scalars[sum_tree.EPS] = self.alpha, self.beta, self.eps
        scalars[sum_tree.MAX_PRIORITY] = -1.0 if self.max_priority is None else self.max_priority
        tree = {"capacity": capacity, "leaves": leaves, "hyper": scalars}
        return {"alpha": self.alpha, "beta": self.beta, "eps": self.eps, "tree": tree}


def priorities_of(state: Mapping[str, Any], within_buffer: bool) -> Priorities:
    """The priorities in a ``state_dict()`` of TorchRL's sampler.

    Args:
        state: the state. Its trees may be tensors, arrays, lists, or TorchRL's own.
        within_buffer: whether new rows get the largest priority in the buffer. States without a version then have a
            transformed one as the largest, so that it is found anew.

    Raises:
        KeyError: an entry is missing.
        ValueError: a number is negative or not finite, or the state has a later version.
    """
    version = state.get("_schema_version", 0)
    _check_version(version, "the state")
    alpha, beta, eps = (_number(state[f"_{name}"], name, "the state") for name in ("alpha", "beta", "eps"))
    weights = _leaves(state["_sum_tree"])
    _check_weights(weights, "the state")
    largest = state["_max_priority"]
    # With the position of its row.
    if isinstance(largest, (tuple, list)) or (isinstance(largest, Tensor) and largest.dim()):
        largest = largest[0]
    if version == 0 and within_buffer and largest is not None and alpha and bool(weights.any()):
        largest = max(float(weights.max()) ** (1 / alpha) - eps, 0.0)
    largest = None if largest is None else _number(largest, "max_priority", "the state")
    return Priorities(alpha, beta, eps, largest, weights)


def _leaves(tree: Any) -> Tensor:
    """The leaves of a tree: a tensor, an array, a list, or an object that has a size and can be indexed."""
    if isinstance(getattr(tree, "size", None), int) and not hasattr(tree, "shape"):
        tree = tree[torch.arange(tree.size)]
    return torch.as_tensor(tree).detach().cpu().double().reshape(-1)


def read_priorities(folder: Path, root: Path | None = None) -> Priorities | None:
    """The priorities in the folder that a prioritized sampler's ``dumps`` has written; None: it has written none.

    Raises:
        ValueError: the files are damaged, or of a later version, or links lead to them from ``root``.
    """
    path = folder / _FILE
    if not os.path.lexists(path):
        return None
    content = files.read_json(path, root)
    _check_version(content.get("_schema_version", 0), str(path))
    alpha, beta, eps, capacity = (
        _number(content.get(f"_{n}"), n, str(path)) for n in ("alpha", "beta", "eps", "max_capacity")
    )
    largest = content.get("_max_priority")
    if not isinstance(largest, list) or len(largest) != 2:
        raise ValueError(f"{path}: '_max_priority' must be a priority and an index, not {largest!r}")
    if not capacity.is_integer() or capacity >= 1 << 48:
        raise ValueError(f"{path}: 'max_capacity' must be a whole number, not {capacity}")
    weights = files.map_file(folder / "sumtree.memmap", torch.float64, (int(capacity),), writable=False, root=root)
    _check_weights(weights, str(folder / "sumtree.memmap"))
    highest = None if largest[0] is None else _number(largest[0], "max_priority", str(path))
    return Priorities(alpha, beta, eps, highest, weights)


def write_priorities(sampler: Any, folder: Path) -> None:
    """Write the priorities of a sampler as TorchRL's ``dumps`` does, into an existing folder. Synchronises."""
    storage, state = sampler.storage, sampler.tree.state_dict()
    capacity, leaves = max(sampler.max_capacity, storage.max_size), state["leaves"].cpu()
    for name, empty in (("sumtree", 0.0), ("mintree", _NO_MINIMUM)):
        path = folder / f"{name}.memmap"
        path.unlink(missing_ok=True)
        tree = files.create_file(path, torch.float64, (capacity,))
        tree.fill_(empty)
        tree[: leaves.numel()] = torch.where(leaves > 0, leaves, empty)
    largest = float(state["hyper"][sum_tree.MAX_PRIORITY])
    files.write_json(
        folder / _FILE,
        {
            "_alpha": sampler.alpha,
            "_beta": float(sampler.beta),
            "_eps": sampler.eps,
            # Not null before the first priority: in TorchRL writing a row counts as giving it priority 1.
            "_max_priority": [1.0 if largest < 0 else largest, float(leaves.argmax())],
            "_max_capacity": float(capacity),
            "_schema_version": _VERSION,
        },
    )


def epoch_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """What :meth:`SamplerWithoutReplacement.load_state_dict` takes, of a ``state_dict()`` of TorchRL's.

    Raises:
        KeyError: an entry is missing.
        ValueError: the rows left are not numbers below that of all rows.
    """
    size, left = int(state["len_storage"]), state["_sample_list"]
    remaining = None if left is None else torch.as_tensor(left).detach().cpu().to(torch.int64).reshape(-1).clone()
    if remaining is not None and bool(((remaining < 0) | (remaining >= size)).any()):
        raise ValueError(f"the rows left of an epoch must be below {size}, got {remaining.tolist()[:8]}")
    return {"remaining": remaining, "size": size, "ran_out": bool(state["_ran_out"])}


def write_epoch(folder: Path, left: Tensor | None, size: int, drop_last: bool, ran_out: bool) -> None:
    """Write what an epoch has left as TorchRL's ``dumps`` does.

    Args:
        folder: where to.
        left: the rows or trajectories left, int64; None: the epoch has not begun.
        size: how many there are in all.
        drop_last, ran_out: the sampler's.
    """
    epoch: dict[str, Any] = {"len_storage": 0, "_sample_list": torch.zeros(0, dtype=torch.int64), "_ran_out": False}
    if left is not None:
        epoch = {"len_storage": size, "_sample_list": left.cpu().contiguous(), "_ran_out": ran_out}
    TensorDict({**epoch, "drop_last": drop_last}).memmap(folder)


def read_epoch(folder: Path) -> dict[str, Any]:
    """A ``state_dict()`` of TorchRL's, from the folder that its ``dumps`` or :func:`write_epoch` has written.

    Raises:
        ValueError: the files are damaged, or there are none.
    """
    found = {
        name: files.read_tensor(folder, name, folder)
        for name in ("len_storage", "_sample_list", "drop_last", "_ran_out")
    }
    if missing := [name for name, value in found.items() if value is None and name != "_sample_list"]:
        raise ValueError(f"{folder} has no {missing}: it was not written by a sampler without replacement")
    return found


def _check_version(version: Any, where: str) -> None:
    if version not in (0, _VERSION):
        raise ValueError(f"{where} has version {version!r}, this reads up to {_VERSION}")


def _check_weights(weights: Tensor, where: str) -> None:
    if not bool(((weights >= 0) & weights.float().isfinite()).all()):
        raise ValueError(f"{where} holds weights that are negative or not finite")


def _number(value: Any, name: str, where: str) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (0 <= value < math.inf):
        raise ValueError(f"{where}: {name!r} must be a number of at least 0, not {value!r}")
    return float(value)
