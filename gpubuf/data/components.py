"""The parts of a buffer as users give them: an instance, a function that returns one, or nothing."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.arguments import check_count, describe_type
from gpubuf.data.hindsight import Hindsight
from gpubuf.data.samplers.base import Sampler
from gpubuf.data.samplers.consuming import ConsumingSampler, checked_count
from gpubuf.data.sequences import SampleUnit, check_parts
from gpubuf.data.storage.recipe import Recipe
from gpubuf.data.storage.tensor_storage import TensorStorage
from gpubuf.data.writers import Writer

DEFAULT_CAPACITY = 1_000
_HERE = "the buffer works in the process that makes it, so leave this out and send rows to that process"
_INSTEAD = {
    "service_backend": _HERE,
    "service_backend_options": _HERE,
    "transport": _HERE,
    "transport_options": _HERE,
    "collate_fns": "give one collate_fn, for batches of all buffers",
    "routing_key": "write to each buffer by its own extend()",
    "routing_dim": "write to each buffer by its own extend()",
}


def component(given: Any, kind: type, default: Callable[[], Any]) -> Any:
    """A storage, sampler or writer given as an instance, a factory or None."""
    if given is None:
        return default()
    if not isinstance(given, kind) and callable(given):
        given = given()
    if not isinstance(given, kind):
        raise TypeError(f"expected a {kind.__name__} or a function that returns one, got {describe_type(given)}")
    return given


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
    if prefetch is not None:
        check_batch_size(prefetch, "prefetch", 0)
    if batch_size is not None:
        check_batch_size(batch_size)


def check_batch_size(batch_size: Any, name: str = "batch_size", least: int = 1) -> None:
    """Raise ValueError, or TypeError for what is no number, unless a batch can have so many transitions."""
    check_count(batch_size, name, least)
    if operator.index(batch_size) >= 2**31:
        raise ValueError(f"{name} must be below 2**31, got {batch_size}")


def consuming(
    sampler: Sampler, consume_after_n_samples: Any, prefetch: int | None, kind: type[ConsumingSampler] | None
) -> Sampler:
    """The sampler of a buffer whose rows leave after they were drawn so many times; otherwise the one given.

    Args:
        sampler, consume_after_n_samples, prefetch: as the buffer was given them.
        kind: the class of the sampler that may take the place of this one; None: none may.

    Raises:
        TypeError: the number is no int.
        ValueError: it is below 1, another sampler was given than a :class:`RandomSampler`, or one that consumes rows
            after another number, or batches are to be prepared ahead.
    """
    if consume_after_n_samples is not None:
        count = checked_count("consume_after_n_samples", consume_after_n_samples)
        if kind is not None:
            sampler = kind(count)
        elif not isinstance(sampler, ConsumingSampler):
            raise ValueError(
                "consume_after_n_samples only supports the default RandomSampler: it can't be used with a "
                f"{type(sampler).__name__}"
            )
        elif sampler.max_sample_count != count:
            raise ValueError(
                f"consume_after_n_samples is {count}, the sampler's max_sample_count {sampler.max_sample_count}"
            )
    if sampler.consumes and prefetch:
        raise ValueError(
            "Prefetching is not supported with a ConsumingSampler: it draws rows before they are asked for"
        )
    return sampler


def fit_together(
    storage: TensorStorage,
    sampler: Sampler,
    writer: Writer,
    recipe: Recipe,
    relabel: Hindsight | None,
    unit: SampleUnit | None,
) -> None:
    """Make the parts of a buffer known to each other.

    Raises:
        TypeError: the writer can't write where a sampler says.
        ValueError: one can't be used with another.
    """
    writer.attach(sampler, recipe, relabel)
    if sampler.consumes and not callable(getattr(writer, "write_at", None)):
        raise TypeError(f"a {type(sampler).__name__} requires a writer with a callable write_at(), not {writer!r}")
    if sampler.consumes and not writer.in_order:
        raise ValueError(f"a {type(sampler).__name__} needs a writer that fills places in turn, not {writer!r}")
    if unit is not None:
        check_parts(sampler, recipe, relabels=relabel is not None)
        unit.bind(storage)
