"""The tensors of a batch, whatever holds them: copied to a device, or to pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase, is_tensorclass
from torch import Tensor

from gpubuf.data.arguments import warn

_warned = False


def map_tensors(data: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """``data`` with ``function`` applied to every tensor in it. Other values stay as they are.

    Args:
        data: a tensor, a TensorDict or tensorclass, or tuples, lists and mappings of them, nested.
        function: from a tensor to one of the same shape.

    Returns:
        Containers of the same types, new ones. The device that a TensorDict claims makes no difference.
    """
    if isinstance(data, Tensor):
        return function(data)
    if isinstance(data, TensorDictBase) or is_tensorclass(data):
        return data.apply(function)
    if isinstance(data, Mapping):
        return type(data)({key: map_tensors(value, function) for key, value in data.items()})  # type: ignore[call-arg]
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_tensors(value, function) for value in data))
    if isinstance(data, (tuple, list)):
        return type(data)(map_tensors(value, function) for value in data)
    return data


def tensors_of(data: Any) -> Iterator[Tensor]:
    """Every tensor in ``data``, which is as for :func:`map_tensors`."""
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, TensorDictBase) or is_tensorclass(data):
        yield from (value for value in data.values(True, True) if isinstance(value, Tensor))
    elif isinstance(data, (Mapping, tuple, list)):
        for value in data.values() if isinstance(data, Mapping) else data:
            yield from tensors_of(value)


def copied(data: Any, device: torch.device | None) -> Any:
    """A copy of ``data``, on ``device`` if that is not None."""
    if device is None:
        return map_tensors(data, Tensor.clone)
    return map_tensors(data, lambda tensor: tensor.to(device, copy=True))


def moved(data: Any, device: torch.device) -> Any:
    """``data``, which is as for :func:`map_tensors`, on ``device``: a TensorDict in it says so, too."""
    if isinstance(data, TensorDictBase) or is_tensorclass(data):
        return data.to(device)
    return map_tensors(data, lambda tensor: tensor.to(device))


def pin(data: Any) -> Any:
    """``data`` with every CPU tensor copied to pinned memory. Tensors on a GPU stay as they are.

    A tensor that occurs several times is copied once, and occurs several times in the result.

    Args:
        data: as for :func:`map_tensors`. Neither it nor its tensors change.

    Returns:
        The same structure, in which ``is_pinned()`` holds for every CPU tensor; or ``data`` itself if there is no
        accelerator, with one warning a process. No host sync.
    """
    global _warned
    if not torch.cuda.is_available():
        if not _warned:
            _warned = True
            warn("pin_memory=True has no effect without an accelerator")
        return data
    done: dict[int, Tensor] = {}

    def pinned(tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":
            return tensor
        copy = done.get(id(tensor))
        if copy is None:
            copy = done[id(tensor)] = tensor.pin_memory()
        return copy

    return map_tensors(data, pinned)
