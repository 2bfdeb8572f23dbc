"""Triton's own launcher on a machine without a GPU, above a CUDA driver whose launches do nothing.

:func:`install` builds a ``libcuda.so.1`` of a few no-ops (``cuda.c``, with the C compiler that Triton needs anyway)
and tells Triton that there is an sm_90. What runs is real up to ``cuLaunchKernelEx``: the JIT's binding and
specialisation of arguments, the compiler, and the C code that takes arguments apart. Tensors are in host memory.

It is for a process of its own, started without ``TRITON_INTERPRET``: it changes what torch and Triton believe.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from torch.cuda._utils import _get_device_index
from triton.runtime import driver

from gpubuf.data import operation
from gpubuf.kernels import _registry

_kept: list[tempfile.TemporaryDirectory[str]] = []


class _Stream:
    """As ``torch.cuda.Stream``, of which a build for the CPU has no base."""

    def __new__(cls, device: object = None, priority: int = 0, **kwargs: int) -> _Stream:
        torch.backends.cuda.is_built()
        stream = super().__new__(cls)
        stream.key = tuple(kwargs.values())
        return stream

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream) and self.key == other.key

    __hash__ = None


def _current_stream(device: object = None) -> _Stream:
    torch.cuda._lazy_init()
    index = _get_device_index(torch.device("cuda", 0), optional=True)
    return _Stream(stream_id=0, device_index=index, device_type=1)


def _build() -> Path:
    # Until the process ends: Triton may link against it at any time.
    _kept.append(tempfile.TemporaryDirectory(prefix="gpubuf-no-gpu-"))
    library = Path(_kept[-1].name) / "libcuda.so.1"
    source = Path(__file__).with_name("cuda.c")
    command = ["cc", "-O2", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    library.with_suffix("").symlink_to(library.name)  # Triton before 3.6 links against this name.
    return library


def install(capability: tuple[int, int] = (9, 0)) -> ctypes.CDLL:
    """Make Triton compile and launch for a GPU that is not there, and operations on CPU tensors take the CUDA path.

    Returns:
        The driver; ``launches()`` is the number of launches so far.

    Raises:
        RuntimeError: Triton is in interpreter mode, or there is a GPU.
    """
    if triton.knobs.runtime.interpret or torch.cuda.is_available():
        raise RuntimeError("this is for a process without TRITON_INTERPRET, on a machine without a GPU")
    library = _build()
    # Under this name a later dlopen("libcuda.so.1") finds it, wherever it lies.
    stub = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    stub.launches.restype = ctypes.c_long
    triton.knobs.nvidia.libcuda_path = str(library.parent)
    # What torch's Python functions call, so that these are as they are on a GPU.
    torch.cuda._initialized = True
    for name, answer in {"_cuda_getDevice": 0, "_cuda_isCurrentStreamCapturing": False}.items():
        setattr(torch._C, name, lambda answer=answer: answer)
    torch._C._cuda_getCurrentRawStream = operation._raw_stream = lambda device: 0
    torch.cuda.get_device_capability = lambda device=None: capability
    torch.cuda.current_stream = _current_stream
    torch.cuda.is_current_stream_capturing = lambda: False
    operation.Operation.gpu = lambda self: self.device

    from triton.backends.nvidia.driver import CudaDriver

    driver.set_active(CudaDriver())
    # Not triton_on_cpu(): that is for the interpreter, which computes something.
    _registry._triton_on_cpu = True
    return stub
