"""Elements of float arrays given by address, for Numba kernels that serve float32 and float64 alike.

:func:`read` and :func:`write` ask for the dtype at each element, which keeps LLVM from vectorising the loop around
them. Where time counts, a kernel goes through its rows tile by tile: it loads a tile into float64 buffers, which stay
in the first cache, and each loop over a buffer is vectorised.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

from collections.abc import Callable, Sequence
from typing import Any

import torch
from numba import carray
from torch import Tensor

from gpubuf.kernels._differentiable import dense
from gpubuf.kernels._jit import jit
from gpubuf.kernels._pointers import as_f32, as_f64
from gpubuf.kernels._threads import call_in_parts


@jit(forceinline=True)
def read(address, wide, i):  # type: ignore[no-untyped-def]
    """Element ``i`` of the float64 (``wide``) or float32 array at ``address``, as float64."""
    if wide:
        return carray(as_f64(address), i + 1)[i]
    return float(carray(as_f32(address), i + 1)[i])


@jit(forceinline=True)
def write(address, wide, i, value):  # type: ignore[no-untyped-def]
    """Set element ``i`` of the float64 (``wide``) or float32 array at ``address``."""
    if wide:
        carray(as_f64(address), i + 1)[i] = value
    else:
        carray(as_f32(address), i + 1)[i] = value


@jit(forceinline=True)
def load(source, wide, first, count, target):  # type: ignore[no-untyped-def]
    """Copy elements of the float64 (``wide``) or float32 array at ``source``."""
    if wide:
        doubles = carray(as_f64(source), first + count)
        for j in range(count):
            target[j] = doubles[first + j]
    else:
        floats = carray(as_f32(source), first + count)
        for j in range(count):
            target[j] = floats[first + j]


@jit(forceinline=True)
def store(source, target, wide, first, count):  # type: ignore[no-untyped-def]
    """The reverse of :func:`load`."""
    if wide:
        doubles = carray(as_f64(target), first + count)
        for j in range(count):
            doubles[first + j] = source[j]
    else:
        floats = carray(as_f32(target), first + count)
        for j in range(count):
            floats[first + j] = source[j]


@jit(forceinline=True, fastmath={"reassoc"})
def total_of(buffer, count):  # type: ignore[no-untyped-def]
    """The sum of the first elements. It is vectorised: its order depends on the processor, and on nothing else."""
    total = 0.0
    for j in range(count):
        total += buffer[j]
    return total


def flags(tensor: Tensor | None) -> Tensor | None:
    """A mask of any dtype, or what ends rows, as kernels read it."""
    return None if tensor is None else tensor.bool()


def _readable(argument: Any, real: torch.dtype) -> Any:
    if not isinstance(argument, Tensor):
        return 0 if argument is None else argument
    return dense(argument, None if argument.dtype is torch.bool else real)


def _addresses(arguments: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(each.data_ptr() if isinstance(each, Tensor) else each for each in arguments)


def call(kernel: Callable[..., None], real: torch.dtype, *arguments: Any) -> None:
    """Call ``kernel`` with addresses in the place of tensors, 0 for None.

    Results are dense and of their dtype. Other numbers are read as ``real``, and flags as they are.
    """
    # Copies must outlive the call, hence the name.
    readable = [_readable(argument, real) for argument in arguments]
    kernel(*_addresses(readable))


def call_parts(
    kernel: Callable[..., None],
    real: torch.dtype,
    arguments: Sequence[Any],
    n: int,
    results: Sequence[Tensor],
    work: int,
) -> None:
    """The same for a kernel that takes the first row and the number of rows of a part before its results."""
    readable = [_readable(argument, real) for argument in arguments]
    call_in_parts(kernel, _addresses(readable), n, _addresses(results), work)
