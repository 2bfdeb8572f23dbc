"""Ahead-of-time compilation of every kernel, for targets that this machine does not have.

Each family lists its kernels in ``tests/aot_specs/<family>.py`` as ``SPECS``, a list of :class:`AotSpec`;
``tests/test_aot.py`` compiles them all in subprocesses (a process that runs the interpreter cannot compile) and
fails on register spills, and fails if a ``*_kernel`` in ``kernels/`` has no spec.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class AotSpec:
    """One specialisation of one kernel.

    Attributes:
        kernel: ``"module:function"`` of a ``@triton.jit`` function.
        signature: type of every run-time argument, e.g. ``{"x_ptr": "*fp32", "n": "i32", "srcs": ("*u8", "*u8")}``.
        constexprs: value of every ``tl.constexpr`` argument.
        num_warps: as the launcher chooses it for this specialisation.
    """

    kernel: str
    signature: dict[str, Any]
    constexprs: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4
