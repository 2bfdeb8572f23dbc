"""Info about rows that have batch dimensions of their own: whole trajectories of shape ``[T]``, for example."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from tensordict import TensorDictBase, is_tensorclass
from torch import Tensor

from gpubuf.data.storage.indexing import expanded

INDEX = "index"


def put(data: TensorDictBase, info: Mapping[Any, Tensor], ndim: int) -> None:
    """Write the info of a draw into its batch.

    A number for each row stands for all elements of the row, so that the batch stays a valid TensorDict: in a batch of
    shape ``[n, T]`` entries of shape ``[n]`` become ``[n, T]``, without memory of their own. If a transform has given
    the batch another shape, the info takes that shape too.

    A tensorclass has the fields that it has: it takes of the info what there is a field for.

    Args:
        data: the batch.
        info: its info. The leading dimensions of its index are those of the draw.
        ndim: dimensions of the storage: with several, the last dimension of an index holds coordinates.

    Raises:
        RuntimeError: a transform has left another number of rows than were drawn.
    """
    lead, shape = info[INDEX].dim() - (ndim > 1), data.batch_size
    same = info[INDEX].shape[:lead] == shape[:lead]
    names = {entry.name for entry in fields(data)} if is_tensorclass(data) else None
    for key, value in info.items():
        if names is not None and key not in names:
            continue
        if not same:
            if value.shape[:lead].numel() == shape.numel():
                value = value.reshape(*shape, *value.shape[lead:])
        elif len(shape) > lead and (key == INDEX or value.shape[: len(shape)] != shape):
            value = expanded(value, lead, shape)
        data.set(key, value)


def collapsed(value: Tensor, lead: int, own: int) -> Tensor:
    """The inverse of :func:`~gpubuf.data.storage.indexing.expanded`: the numbers of the rows.

    The ``own`` dimensions after ``lead`` say the same.
    """
    for _ in range(own):
        value = value.select(lead, 0)
    return value
