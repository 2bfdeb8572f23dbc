"""CUDA tensors on a machine without CUDA, on which every host synchronisation raises.

Under ``FakeTensorMode`` a tensor has a shape and a device but no data, so that ``.item()`` and its like raise
:class:`DataDependentOutputException`. In a CPU build of torch one obstacle remains: a few methods, ``x[i]`` among
them, are bound in C++ to code that switches to the tensor's device before anything else, which such a build cannot do.
:class:`_PlainBindings` says the same with ordinary operations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["DataDependentOutputException", "fake_cuda", "no_blocking_copies"]


def _indexed(x: Tensor, index: Any) -> Tensor:
    dim = 0
    for part in index if isinstance(index, tuple) else (index,):
        if part is None:
            x, dim = x.unsqueeze(dim), dim + 1
        elif part is Ellipsis:
            dim = x.ndim - sum(p is not None for p in index[index.index(part) + 1 :])
        elif isinstance(part, slice):
            start, stop, step = part.indices(x.shape[dim])
            assert step == 1, "a step has no counterpart among the operations"
            x, dim = x.narrow(dim, start, max(stop - start, 0)), dim + 1
        elif isinstance(part, int):
            x = x.select(dim, part)
        else:
            assert not isinstance(index, tuple), "an index tensor among others has no counterpart here"
            x = torch.ops.aten.index.Tensor(x, [part])
    return x


def _assign(x: Tensor, index: Any, value: Any) -> None:
    target = _indexed(x, index)
    if isinstance(value, Tensor):
        target.copy_(value)
    else:
        target.fill_(value)


def _contiguous(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else torch.ops.aten.clone(x, memory_format=torch.contiguous_format)


_to_method = Tensor.to


def _to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    target = torch.device(args[0]) if args and isinstance(args[0], (str, torch.device)) else x.device
    if not (args and isinstance(args[0], (str, torch.device))):
        return _to_method(x, *args, **kwargs)
    dtype = args[1] if len(args) > 1 else kwargs.get("dtype", x.dtype)
    if target.type == x.device.type and dtype == x.dtype:
        return x
    non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    return torch.ops.aten._to_copy(x, device=target, dtype=dtype, non_blocking=non_blocking)


#: Methods of Tensor whose binding begins with a switch of devices, in terms of operations.
_PLAIN = {
    Tensor.__getitem__: _indexed,
    Tensor.__setitem__: _assign,
    Tensor.contiguous: _contiguous,
    Tensor.__invert__: torch.ops.aten.bitwise_not,
    Tensor.to: _to,
    Tensor.copy_: torch.ops.aten.copy_,
    # These set values, and there are none.
    torch.nn.init.kaiming_uniform_: lambda tensor, *_, **__: tensor,
    torch.nn.init.uniform_: lambda tensor, *_, **__: tensor,
}


class _PlainBindings(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _PLAIN.get(func, func)(*args, **(kwargs or {}))


class _NoBlockingCopies(TorchDispatchMode):
    """Refuses what ``torch.cuda.set_sync_debug_mode("error")`` refuses about copies between host and GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.name().partition(".")[0]
        if name in ("aten::_to_copy", "aten::copy_"):
            asked = kwargs.get("non_blocking", args[2] if name == "aten::copy_" and len(args) > 2 else False)
            devices = {tensor.device.type for tensor in (*args[:2], out) if isinstance(tensor, Tensor)}
            assert asked or len(devices) == 1, f"{name} between {devices} waits for the GPU"
        return out


def no_blocking_copies() -> TorchDispatchMode:
    """``with no_blocking_copies():`` inside of :func:`fake_cuda`: a copy that the host waits for raises."""
    return _NoBlockingCopies()


@contextlib.contextmanager
def fake_cuda() -> Iterator[None]:
    """Make every tensor a fake one, so that ``device="cuda"`` works anywhere and reading a value raises."""
    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            # Launchers ask for it, to find what was tuned for the device.
            name = "a GPU that nobody has tuned for"
            stack.enter_context(mock.patch.object(torch.cuda, "get_device_name", return_value=name))
        stack.enter_context(FakeTensorMode())
        stack.enter_context(_PlainBindings())
        yield
