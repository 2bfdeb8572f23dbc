"""Actions, and what they give as plain values."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor
from torch.utils._pytree import tree_leaves

Facts = dict[str, Any]


def plain(value: Any) -> Any:
    """Tensors and shapes as lists; the rest as JSON gives it back."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(entry) for entry in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def fact(action: Callable[[], Any]) -> Any:
    """What an action gives, or the kind of its error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return plain(action())
        except Exception as error:
            return f"error: {' or '.join(_kinds(type(error)))}"


def _kinds(error: type) -> list[str]:
    """Python's own errors that an error is one of: itself, or those that it derives from."""
    if error.__module__ == "builtins":
        return [error.__name__]
    return [kind for base in error.__bases__ for kind in _kinds(base)]


def same(ours: Any, theirs: Any) -> bool:
    """Whether two facts agree. An error of ours may be of several kinds, one of them theirs."""
    if ours == theirs:
        return True
    errors = [fact.removeprefix("error: ").split(" or ") for fact in (ours, theirs) if str(fact).startswith("error: ")]
    return len(errors) == 2 and set(errors[1]) <= set(errors[0])


def leaves(sampler: Any, n: int) -> list[float]:
    """The priorities of the first ``n`` rows, as the sampler weights them."""
    if hasattr(sampler, "tree"):
        return plain(sampler.tree.leaves[:n])  # type: ignore[no-any-return]
    return [float(sampler._sum_tree[i]) for i in range(n)]


def asked(actions: dict[str, Callable[[], Any]]) -> Facts:
    """The facts of several actions, one after the other."""
    return {name: fact(action) for name, action in actions.items()}


def data_of(kind: str, *shape: int) -> Any:
    """A batch of the kind; with no shape one row. No two rows are equal."""
    n = torch.Size(shape).numel()
    number = torch.arange(n)
    if kind == "tensor":
        return number.view(*shape, 1)
    if kind == "tensordict":
        following = {"reward": number.float().view(*shape, 1)}
        return TensorDict({"a": number.view(*shape, 1), "next": following}, shape)
    return {
        "a": number.view(*shape, 1),
        "b": {"c": [number.view(*shape, 1) + torch.zeros(3), (number.view(*shape, 1) * torch.ones(2),)]},
        30: number.view(*shape, 1) - torch.ones(2),
    }


def numbers(rows: Any) -> list[int]:
    """Which rows of :func:`data_of` these are."""
    if isinstance(rows, list):
        return [numbers(row)[0] for row in rows]
    if is_tensor_collection(rows):
        rows = rows["a"]
    leaf = next(leaf for leaf in tree_leaves(rows) if isinstance(leaf, Tensor))
    return [int(value) for value in leaf.reshape(-1)]


def form(rows: Any) -> Any:
    """Kind and shapes of rows."""
    if isinstance(rows, TensorDictBase):
        # Generations come with more batches than TorchRL's.
        keys = sorted(key for key in rows.keys() if key != "index_generation")
        return {"TensorDict": list(rows.batch_size), **{key: form(rows.get(key)) for key in keys}}
    if is_tensor_collection(rows):
        return {type(rows).__name__: list(rows.batch_size)}
    if isinstance(rows, Tensor):
        return [str(rows.dtype).removeprefix("torch."), *rows.shape]
    if isinstance(rows, dict):
        return {str(key): form(value) for key, value in rows.items()}
    if isinstance(rows, (tuple, list)):
        return [type(rows).__name__, *map(form, rows)]
    return type(rows).__name__


def as_recorded(found: Any) -> Any:
    """As JSON gives it back."""
    return json.loads(json.dumps(found, sort_keys=True))
