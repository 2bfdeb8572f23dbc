"""Records what the launchers launch, as specifications that can be compiled without a GPU."""

from __future__ import annotations

import importlib
import inspect
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from gpubuf.kernels import _registry
from gpubuf.kernels._launching import Variant
from tests.gates.aot.spec import AotSpec

_POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}

#: Where every tensor seems to be while launches are recorded: addresses fit no int32, and are multiples of 16.
_ADDRESS = 2**40


def _type_of(argument: Any) -> Any:
    """The type of a run-time argument, as Triton writes it."""
    if isinstance(argument, Tensor):
        return _POINTERS[argument.dtype]
    if isinstance(argument, tuple):
        return tuple(map(_type_of, argument))
    if isinstance(argument, bool):
        return "i1"
    return "i32" if -(2**31) <= argument < 2**31 else "i64"


class Recorder:
    """Runs operations on tensors without memory (``device="meta"``), and notes their launches.

    A launcher reads no values, so that it chooses kernels, configurations and types as it would for real tensors.

    Attributes:
        specs: what was launched, each once.
    """

    def __init__(self) -> None:
        self._specs: dict[str, AotSpec] = {}

    @property
    def specs(self) -> list[AotSpec]:
        return list(self._specs.values())

    def run(self, operation: Any, *args: Any) -> Any:
        """Call the launcher of an operation that :func:`gpubuf.kernels._registry.define` returned."""
        module, _, name = _registry._implementations[operation][1].partition(":")
        launcher = getattr(importlib.import_module(module), name)
        with (
            mock.patch.object(Variant, "launch", lambda *launched: self._note(*launched)),
            mock.patch.object(Tensor, "data_ptr", return_value=_ADDRESS),
        ):
            return launcher(*args)

    def _note(self, variant: Variant, programs: int, arguments: tuple[Any, ...]) -> None:
        function = variant.kernel.fn
        names = [name for name in inspect.signature(function).parameters if name not in variant.constexprs]
        spec = AotSpec(
            f"{function.__module__}:{function.__name__}",
            dict(zip(names, map(_type_of, arguments), strict=True)),
            variant.constexprs,
            variant.num_warps,
            variant.maxnreg,
        )
        self._specs.setdefault(repr(spec), spec)
