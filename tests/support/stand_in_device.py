"""A stand-in for an accelerator without kernels here, such as MPS: tensors that say that they are there, on a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

DEVICE = torch.device("mps:0")


class OnDevice(Tensor):
    """A tensor on :data:`DEVICE`, which lacks float64, as MPS does. What is computed of it, is computed on the CPU.

    Its memory can't be addressed: ``data_ptr()`` is 0, and NumPy refuses it.
    """

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnDevice:
        """``inner``, seen as if it were there."""
        if inner.dtype is torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")
        found = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=DEVICE,
        )  # fmt: skip
        found.inner = inner
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """``func`` of what is inside, and its results there, unless they are asked for on the CPU."""
        kwargs = dict(kwargs or {})
        away = torch.device(kwargs.get("device") or DEVICE).type == "cpu"
        if not away and "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        args, kwargs = tree_map_only(OnDevice, lambda each: each.inner, (args, kwargs))
        found = func(*args, **kwargs)
        return found if away else tree_map_only(Tensor, OnDevice, found)


_to = Tensor.to


def _moved(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
    """``Tensor.to``, which knows the device."""
    device = options.get("device", args[0] if args else None)
    if isinstance(device, str | torch.device) and torch.device(device).type == DEVICE.type:
        return tensor if isinstance(tensor, OnDevice) else OnDevice(tensor.clone())
    return _to(tensor, *args, **options)


@contextlib.contextmanager
def stand_in_device() -> Iterator[torch.device]:
    """Within it :data:`DEVICE` exists for ``Tensor.to``."""
    with mock.patch.object(Tensor, "to", _moved):
        yield DEVICE
