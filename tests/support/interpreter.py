"""Runs the CUDA path on a machine without a GPU, by Triton's interpreter: it is slow."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from gpubuf.kernels import _registry


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
    """Let comparisons of numbers be masks, and multiply matrices of bfloat16, as a GPU does.

    The interpreter takes such a comparison for a number of its operands' dtype when it broadcasts it, and that of
    Triton 3.9 refuses masks that are not boolean. It multiplies the bits of bfloat16 as if they were integers.
    """
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    broadcast = InterpreterBuilder.create_splat

    def create_splat(self: Any, kind: Any, value: Any) -> Any:
        return broadcast(self, kind, TensorHandle(value.data, tl.int1) if value.data.dtype == bool else value)

    dot = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *more: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (self.create_fp_ext(each, tl.float32) for each in (a, b))
        return dot(self, a, b, *more)

    InterpreterBuilder.create_splat, InterpreterBuilder.create_dot = create_splat, create_dot


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
