"""Free memory, host memory that a GPU can read, and the way of batches to the GPU: what is asked of the machine.

Everything here is called through the module (``memory.free()``), so that tests can say what the machine has.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpubuf.data.recording import capturing, do_postponed, outside_captures
from gpubuf.kernels.rows import arena_offsets

RESERVE = 10
"""One part in this many of all memory is left to networks, activations, batches and other processes."""

STAGED_BYTES = 1 << 25
"""Batches up to this size are packed. PyTorch keeps pinned memory, and a large copy outweighs the wait for it."""

KEPT_BYTES = 1 << 18
"""For batches up to this size memory is kept: :class:`KeptMemory`."""

# Batches that may be on their way at a time from memory that is kept, and forms of batches that a thread keeps it for.
_SLOTS, _FORMS = 4, 8

# cudaHostRegisterPortable: pinned for every device of the process; cudaHostRegisterMapped: devices can address it.
_PORTABLE, _MAPPED = 1, 2
_CAN_USE_HOST_POINTER = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM


@dataclass(frozen=True)
class Free:
    """Bytes that a buffer may take. The share reserved for others is already subtracted.

    Attributes:
        host: bytes of host memory.
        device: bytes of GPU memory; None where there is no CUDA device.
    """

    host: int
    device: int | None = None


def cuda_present() -> bool:
    """Whether there is a CUDA (or ROCm) device."""
    return torch.cuda.is_available()


def free(device: torch.device | None = None) -> Free:
    """The memory that a buffer may take now, on the host and on ``device`` (default: the current GPU, if there is one).

    What PyTorch's allocator has cached but not given out counts as free: it returns it before it fails.
    """
    do_postponed()
    host_free, host_total = host_memory()
    on_host = max(host_free - host_total // RESERVE, 0)
    if not cuda_present():
        return Free(on_host)
    device_free, device_total = device_memory(device)
    return Free(on_host, max(device_free - device_total // RESERVE, 0))


def device_memory(device: torch.device | None = None) -> tuple[int, int]:
    """(free, total) bytes of a GPU's memory."""
    available, total = torch.cuda.mem_get_info(device)
    return available + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """(free, total) bytes of host memory: the machine's, or what the process's control group leaves of it.

    ``root`` is where ``proc`` and ``sys`` are. Without Linux's files, all physical memory counts as free.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total, total
    figures = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines if len(line.split()) > 1}
    available, total = figures["MemAvailable"], figures["MemTotal"]
    for group_free, group_total in _control_groups(root):
        available, total = min(available, group_free), min(total, group_total)
    return max(available, 0), total


def _control_groups(root: Path) -> list[tuple[int, int]]:
    """(free, limit) of every control group that limits the memory of this process, versions 1 and 2."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for membership in memberships:
        number, controllers, path = membership.split(":", 2)
        if number == "0" and not controllers:
            mount, limit, used, cached = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount, limit, used = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cached = "total_inactive_file"
        else:
            continue
        # Inside a container the path may be that outside of it; the mount point is then the group itself.
        parts = Path(path.lstrip("/")).parts
        for depth in range(len(parts) + 1):
            folder = mount.joinpath(*parts[:depth])
            figures = _limit(folder / limit, folder / used, folder / "memory.stat", cached)
            if figures is not None:
                found.append(figures)
    return found


def _limit(limit: Path, used: Path, stat: Path, cached: str) -> tuple[int, int] | None:
    try:
        text = limit.read_text().strip()
        if text == "max":
            return None
        taken = int(used.read_text())
        # Files that the group has read count as used, but are given up for whoever needs memory.
        taken -= int(dict(map(str.split, stat.read_text().splitlines())).get(cached, 0))
    except OSError:
        return None
    return int(text) - taken, int(text)


def staging(n_bytes: int) -> torch.Tensor:
    """Pinned memory for a copy to a GPU, uint8 ``[n_bytes]``, from PyTorch's cache.

    It goes back to the cache with the last reference to it, but is not given out again before all copies from it that
    were asked for with ``non_blocking=True`` are done.
    """
    return torch.empty(n_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def pinned(n_bytes: int, device: torch.device) -> np.ndarray:
    """Host memory, uint8 ``[n_bytes]``, page-locked so that a GPU can read and write it.

    Registered rather than taken from PyTorch's pinned allocator, which rounds up to a power of two: up to twice the
    memory. It is released with the last reference to it, once ``device`` has done all that was launched there.

    Raises:
        RuntimeError: the driver refuses to lock so much memory, or ``device`` can't read the host's addresses.
    """
    return locked(np.empty(n_bytes, np.uint8), device)


def locked(owner: np.ndarray, device: torch.device) -> np.ndarray:
    """A view of host memory, uint8 ``[n_bytes]``, that stays page-locked as long as the view is referred to.

    Raises:
        RuntimeError: as :func:`pinned`.
    """
    memory = owner[:]
    if owner.nbytes:
        register(owner.ctypes.data, owner.nbytes, device)
        # Of a view, so that the memory itself outlives a release that has to be put off. Not at exit: the driver may be
        # gone by then, and takes everything with it.
        weakref.finalize(memory, _release, unregister, owner, device).atexit = False
    return memory


def _release(unregister: Callable[[int, torch.device], None], owner: np.ndarray, device: torch.device) -> None:
    outside_captures(lambda: unregister(owner.ctypes.data, device))


def register(address: int, n_bytes: int, device: torch.device) -> None:
    """Page-lock host memory for all GPUs, under the host's own addresses.

    Raises:
        RuntimeError: the driver refuses, or ``device`` can't read the host's addresses.
    """
    torch.cuda.init()
    do_postponed()
    if not reads_host_addresses(device):
        raise RuntimeError(
            f"{torch.cuda.get_device_name(device)} can't read pinned host memory under the host's own addresses "
            "(cudaDevAttrCanUseHostPointerForRegisteredMem is 0): rows can lie on 'cuda' or 'cpu' here, not 'pinned' "
            "or 'split'"
        )
    failed = int(torch.cuda.cudart().cudaHostRegister(address, n_bytes, _PORTABLE | _MAPPED))
    if failed:
        _clear_error(device)
        raise RuntimeError(f"the CUDA driver refused to pin {n_bytes} bytes of host memory (error {failed})")


def _clear_error(device: torch.device) -> None:
    """Clear the error of a failed call. Otherwise CUDA reports it again at the next launch in this thread."""
    with contextlib.suppress(RuntimeError):
        torch.ones((), device=device)


def reads_host_addresses(device: torch.device) -> bool:
    """Whether a GPU addresses pinned memory as the host does. True if the driver can't be asked, as on AMD."""
    if torch.version.hip is not None:
        return True
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    number = torch.cuda.current_device() if device.index is None else device.index
    handle, found = ctypes.c_int(), ctypes.c_int(1)
    if driver.cuDeviceGet(ctypes.byref(handle), number) == 0:
        driver.cuDeviceGetAttribute(ctypes.byref(found), _CAN_USE_HOST_POINTER, handle)
    return bool(found.value)


def unregister(address: int, device: torch.device) -> None:
    """Undo :func:`register`, once nothing that was launched on ``device`` reads the memory any more."""
    synchronize(device)
    if int(torch.cuda.cudart().cudaHostUnregister(address)):
        _clear_error(device)


def synchronize(device: torch.device | None = None) -> None:
    """Wait until the GPU has finished everything that was launched."""
    torch.cuda.synchronize(device)


# Batches from the host to the GPU: packed into memory of its own, and copied in one piece.
#
# A copy from pinned memory is made by the GPU when its stream comes to it. The caller, who may write the next batch
# into the same memory as soon as the call returns, must not be what it reads. Its tensors are therefore packed first,
# by the host, into pinned memory that PyTorch gives to nobody else until the copy is done.


def to_device(sources: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """The sources on ``device``, until the next call. You may change those on the host as soon as this returns.

    Waits for the GPU only where pinned memory is copied as it is: batches above :data:`STAGED_BYTES`, and batches of
    which a part is on another device. While a CUDA graph is captured the copy from pinned memory becomes
    part of the graph: replays read what is there then.
    """
    for tensor in sources:
        if tensor.device != device:
            break
    else:
        return sources
    if device.type != "cuda" or not cuda_present():
        return [t.to(device) for t in sources]
    captured = capturing()
    on_host = all(t.device.type == "cpu" for t in sources)
    if not captured and on_host and sum(t.nbytes for t in sources) <= STAGED_BYTES:
        return _packed(sources, device)
    # From memory that is not pinned CUDA has read by the time at which the call returns.
    return [t.to(device, non_blocking=captured or not (t.device.type == "cpu" and t.is_pinned())) for t in sources]


def _packed(sources: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    if sum(t.nbytes for t in sources) <= KEPT_BYTES:
        arrived = _kept_for(sources, device).copied(sources)
        if arrived is not None:
            return arrived
    offsets, n_bytes = arena_offsets([t.nbytes for t in sources], 1)
    arena = staging(n_bytes)
    with torch.no_grad():
        torch._foreach_copy_(views_of(arena, sources, offsets), sources)
    # PyTorch notes the copy, and does not give the arena's memory out again before it is done.
    return views_of(arena.to(device, non_blocking=True), sources, offsets)


class KeptMemory:
    """Memory for batches of one form, pinned and on a GPU, which is kept for the next ones of this form.

    To make it, and the views into it, takes the host several times as long as the copies of a small batch do.

    Args:
        sources: one such batch.
        device: the GPU. What is copied there is to be read on the stream that is current at the copy.
    """

    def __init__(self, sources: list[torch.Tensor], device: torch.device) -> None:
        offsets, n_bytes = arena_offsets([t.nbytes for t in sources], 1)
        self._arena = torch.empty(n_bytes, dtype=torch.uint8, device=device)
        self._arrived = views_of(self._arena, sources, offsets)
        # What is copied from, the next one first: memory, views into it, and the event after its last copy.
        self._slots: deque[tuple[torch.Tensor, list[torch.Tensor], Any]] = deque()
        for _ in range(_SLOTS):
            memory = staging(n_bytes)
            self._slots.append((memory, views_of(memory, sources, offsets), torch.cuda.Event()))

    def copied(self, sources: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """A batch on the GPU, until the next call; None: the GPU is so late that all pinned memory is to be read."""
        memory, views, read = self._slots[0]
        if not read.query():
            return None
        self._slots.rotate(-1)
        with torch.no_grad():
            torch._foreach_copy_(views, sources)
        try:
            self._arena.copy_(memory, non_blocking=True)
        finally:
            read.record()
        return self._arrived


class _Kept(threading.local):
    """Of each thread, by form and stream, the latest last."""

    def __init__(self) -> None:
        self.by_form: OrderedDict[Any, KeptMemory] = OrderedDict()


_kept = _Kept()


def _kept_for(sources: list[torch.Tensor], device: torch.device) -> KeptMemory:
    form = (torch.cuda.current_stream(device), *[(t.dtype, t.shape) for t in sources])
    found = _kept.by_form.get(form)
    if found is None:
        # What is made in inference mode can't be written to outside of it.
        with torch.inference_mode(False):
            found = _kept.by_form[form] = KeptMemory(sources, device)
        if len(_kept.by_form) > _FORMS:
            _kept.by_form.popitem(last=False)
    else:
        _kept.by_form.move_to_end(form)
    return found


def views_of(arena: torch.Tensor, sources: list[torch.Tensor], offsets: list[int]) -> list[torch.Tensor]:
    """Contiguous views of an arena, uint8 ``[n_bytes]``, shaped as the sources."""
    return [
        arena[offset : offset + t.nbytes].view(t.dtype).view(t.shape)
        for t, offset in zip(sources, offsets, strict=True)
    ]


class SideCopies:
    """Copies of page-locked memory to a GPU on a stream of their own, beside whatever the GPU does meanwhile.

    Args:
        memory: where copies are read from, uint8 ``[n_bytes]``. It is page-locked as long as this lives.
        device: the GPU.

    Attributes:
        device: as given.

    Raises:
        RuntimeError: as :func:`pinned`.
    """

    def __init__(self, memory: np.ndarray, device: torch.device) -> None:
        self.device = device
        self._locked = locked(memory, device)
        self._stream = torch.cuda.Stream(device)
        self._last = torch.cuda.Event()

    def joined(self, columns: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        """For each column its pieces, ``[n, ...]`` in the memory, one after another on the GPU. No host sync.

        What is launched after this on the current stream finds them there. The memory may change once :attr:`done`.
        """
        current = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._stream):
            arrived = [
                torch.empty((sum(map(len, p)), *p[0].shape[1:]), dtype=p[0].dtype, device=self.device) for p in columns
            ]
            for whole, pieces in zip(arrived, columns, strict=True):
                for place, piece in zip(whole.split([len(piece) for piece in pieces]), pieces, strict=True):
                    place.copy_(piece, non_blocking=True)
                # It is given out again when both streams are done with it.
                whole.record_stream(current)
            self._last.record()
        current.wait_event(self._last)
        return arrived

    @property
    def done(self) -> bool:
        """Whether the GPU has read everything that was to be copied so far."""
        return bool(self._last.query())
