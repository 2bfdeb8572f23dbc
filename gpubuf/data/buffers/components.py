"""The parts of a buffer as users give them: an instance, a function that returns one, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.runtime.foreign import told
from gpubuf.data.storages.tensor_storage import LazyTensorStorage, TensorStorage

DEFAULT_CAPACITY = 1_000
_HERE = "the buffer works in the process that makes it, so leave this out and send rows to that process"
_INSTEAD = {
    "checkpointer": "leave it out, for save() and dumps() need none; save_torchrl() writes TorchRL's folders",
    "consume_after_n_samples": "draw with a SamplerWithoutReplacement, and empty() the buffer after the epoch",
    "service_backend": _HERE,
    "service_backend_options": _HERE,
    "transport": _HERE,
    "transport_options": _HERE,
}


def component(given: Any, kind: type, default: Callable[[], Any]) -> Any:
    """A storage, sampler or writer given as an instance, a factory or None."""
    if given is None:
        return default()
    if not isinstance(given, kind) and callable(given):
        given = given()
    if not isinstance(given, kind):
        raise TypeError(f"expected a {kind.__name__} or a function that returns one, got {told(given)}")
    return given


def default_storage() -> LazyTensorStorage:
    """The storage of a buffer that was given none."""
    return LazyTensorStorage(DEFAULT_CAPACITY)


def no_rows(storage: TensorStorage) -> Tensor:
    """The index of an empty write."""
    shape = (0,) if storage.ndim == 1 else (0, storage.ndim)
    return torch.empty(shape, dtype=torch.int64, device=storage.device if storage.initialized else None)


def refuse_out_of_scope(**arguments: Any) -> None:
    """Raise for an argument of TorchRL's that was set and has no counterpart here.

    Raises:
        NotImplementedError: there is one.
    """
    for name, value in arguments.items():
        if value and name == "shared":
            raise NotImplementedError(
                "shared=True is not supported: a buffer belongs to one process. Send batches to that process, and "
                "write and sample there"
            )
        if value:
            raise NotImplementedError(f"{name}={value!r} is not supported by gpubuf: {_INSTEAD[name]}")


def given_transform(transform: Any, factory: Callable[[], Any] | None) -> Any:
    """A transform given as it is, or by a function that returns it.

    Raises:
        TypeError: both are given.
    """
    if factory is None:
        return transform
    if transform is not None:
        raise TypeError("transform and transform_factory exclude each other")
    return factory()


def check_sizes(prefetch: int | None, batch_size: int | None) -> None:
    """Raise for numbers that no buffer can work with.

    Raises:
        ValueError: the batch size is below 1, ``prefetch`` is negative or lacks a batch size.
    """
    if prefetch and batch_size is None:
        raise ValueError("prefetch needs the batch_size given to the constructor")
    if prefetch is not None and prefetch < 0:
        raise ValueError(f"prefetch must not be negative, got {prefetch}")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
