"""What is compiled ahead of time: one specialisation of one kernel."""

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
        maxnreg: as the launcher gives it, for NVIDIA GPUs.
    """

    kernel: str
    signature: dict[str, Any]
    constexprs: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    maxnreg: int | None = None

    def __str__(self) -> str:
        constants = ", ".join(f"{name}={value}" for name, value in self.constexprs.items())
        return f"{self.kernel.partition(':')[2]}({constants}) on {self.num_warps} warps"
