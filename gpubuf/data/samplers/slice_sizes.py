"""How many slices a batch has, how long they are, and how far they may reach out of their trajectory."""

from __future__ import annotations

from collections.abc import Sequence


def pair_of(span: bool | int | Sequence[bool | int]) -> tuple[bool | int, bool | int]:
    """A span as a pair: how far a slice may begin before its trajectory, and go on behind it.

    Raises:
        ValueError: it has another number of entries.
    """
    if isinstance(span, int):
        return span, span
    if len(span) != 2:
        raise ValueError(f"span must be a number or a pair of numbers, got {span!r}")
    before, after = span
    return before, after


def partition(batch_size: int, num_slices: int | None, slice_len: int | None) -> tuple[int, int]:
    """(slices in a batch, steps of a slice), one of which is given.

    Raises:
        RuntimeError: the batch can't be cut like that.
    """
    divisor = num_slices or slice_len
    assert divisor is not None
    if batch_size % divisor:
        name = "num_slices" if num_slices else "slice_len"
        raise RuntimeError(f"the batch size must be divisible by {name}: got {batch_size} and {divisor}")
    other = batch_size // divisor
    return (divisor, other) if num_slices else (other, divisor)
