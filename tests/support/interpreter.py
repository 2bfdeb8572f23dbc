"""Runs the CUDA path on a machine without a GPU, by Triton's interpreter: it is slow."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from gpubuf.kernels import _registry
from tests.support.floats import bfloat16_to_float32, float32_to_bfloat16, product


class InterpreterUnavailableError(RuntimeError):
    """The installed Triton has no interpreter that can run these kernels."""


def check_interpreter() -> None:
    """Raise if Triton's interpreter can't run the kernels.

    Raises:
        InterpreterUnavailableError: Triton is older than 3.7.
    """
    import triton

    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7):
        raise InterpreterUnavailableError(
            f"the interpreter of Triton {triton.__version__} can't loop to a tensor's value with NumPy 2.4 and newer, "
            "nor make pointers of integers: Triton 3.7 and newer can"
        )


@functools.cache
def _repair_interpreter() -> None:
    """Let comparisons of numbers be masks, and bfloat16 and products be what they are on a GPU.

    The interpreter takes such a comparison for a number of its operands' dtype when it broadcasts it, and that of
    Triton 3.9 refuses masks that are not boolean. It truncates what becomes bfloat16, and takes the bits of bfloat16
    for integers where it computes with them. Of a product it ignores the precision: TF32 would be exact.
    """
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _get_np_dtype

    broadcast, compute = InterpreterBuilder.create_splat, InterpreterBuilder.binary_op

    def create_splat(self: Any, kind: Any, value: Any) -> Any:
        return broadcast(self, kind, TensorHandle(value.data, tl.int1) if value.data.dtype == bool else value)

    def number(handle: Any) -> Any:
        return bfloat16_to_float32(handle.data) if handle.dtype.scalar == tl.bfloat16 else handle.data

    def handle_of(data: Any, kind: Any) -> Any:
        kept = float32_to_bfloat16(data) if kind == tl.bfloat16 else data.astype(_get_np_dtype(kind), copy=False)
        return TensorHandle(kept, kind)

    def cast_impl(self: Any, source: Any, kind: Any) -> Any:
        return handle_of(number(source), kind.scalar)

    def binary_op(self: Any, a: Any, b: Any, function: Any) -> Any:
        if a.dtype.scalar != tl.bfloat16:
            return compute(self, a, b, function)
        found = function(number(a), number(b))
        return TensorHandle(found, tl.int1) if found.dtype == bool else handle_of(found, tl.bfloat16)

    def create_dot(self: Any, a: Any, b: Any, add: Any, precision: Any, _: int) -> Any:
        return TensorHandle(product(number(a), number(b), add.data, precision.name.lower()), add.dtype.scalar)

    for replacement in (create_splat, cast_impl, binary_op, create_dot):
        setattr(InterpreterBuilder, replacement.__name__, replacement)


def triton_on_cpu_enabled() -> bool:
    """Whether CPU tensors are sent to the Triton launchers at present."""
    return _registry._triton_on_cpu


@contextlib.contextmanager
def triton_on_cpu(enabled: bool = True) -> Iterator[None]:
    """Send every operation on CPU tensors through its Triton launcher instead of its CPU twin.

    It needs Triton's interpreter, so set the environment variable ``TRITON_INTERPRET=1`` before Triton is imported.

    Raises:
        RuntimeError: Triton is not in interpreter mode.
        InterpreterUnavailableError: its interpreter can't run the kernels.
    """
    if enabled:
        import triton

        if not triton.knobs.runtime.interpret:
            raise RuntimeError("triton_on_cpu needs TRITON_INTERPRET=1, set before Triton is imported")
        check_interpreter()
        _repair_interpreter()
    previous, _registry._triton_on_cpu = _registry._triton_on_cpu, enabled
    try:
        yield
    finally:
        _registry._triton_on_cpu = previous
