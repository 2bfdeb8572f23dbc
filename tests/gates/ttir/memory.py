"""All of this process's memory as NumPy arrays, and the torch storages that may be touched."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.multiprocessing.reductions import StorageWeakRef

_BASE = 4096
_WITHOUT_MEMORY = (FakeTensor, FunctionalTensor)


class _Everything:
    def __init__(self, dtype: np.dtype) -> None:
        count = (2**47 - 2 * _BASE) // dtype.itemsize
        self.__array_interface__ = {"data": (_BASE, False), "shape": (count,), "typestr": dtype.str, "version": 3}


_ARRAYS = {size: np.asarray(_Everything(np.dtype(f"<u{size}"))) for size in (1, 2, 4, 8)}

_SHIFTS = {1: 0, 2: 1, 4: 2, 8: 3}


def gather(addresses: np.ndarray, size: int) -> np.ndarray:
    """Bits at aligned addresses, which must have been checked."""
    found: np.ndarray = _ARRAYS[size][(addresses - _BASE) >> _SHIFTS[size]]
    return found


def scatter(addresses: np.ndarray, size: int, bits: np.ndarray) -> None:
    """Put bits at aligned addresses, which must have been checked."""
    _ARRAYS[size][(addresses - _BASE) >> _SHIFTS[size]] = bits


class Storages:
    """Live storages of CPU tensors. Found among Python's objects when an address is in none of those known."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        self._has_memory: dict[type, bool] = {}
        self._bounds: tuple[np.ndarray, np.ndarray] | None = None

    def settle(self) -> None:
        """Know what there is, and leave it out of later searches, which are then much shorter."""
        self._scan()
        gc.collect()
        gc.freeze()

    def add(self, storage: Any) -> tuple[int, int]:
        """Know a storage. Returns its bounds."""
        start, size = storage.data_ptr(), storage.nbytes()
        if start and size:
            self._known[start] = (StorageWeakRef(storage), size)
            self._bounds = None
        return start, start + size

    def begin_launch(self) -> None:
        """Storages may have died since the last launch; within one nobody frees them."""
        for start in [start for start, (storage, _) in self._known.items() if storage.expired()]:
            del self._known[start]
            self._bounds = None

    def outside(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Which accesses of ``size`` bytes lie in no live storage."""
        bad = self._outside_known(addresses, size)
        if bad.any():
            self._scan()
            bad = self._outside_known(addresses, size)
        return bad

    def within(self, start: int, end: int) -> bool:
        """Whether one known storage has all of these bytes; False may be wrong."""
        low, high = self._sorted()
        before = int(np.searchsorted(low, start, side="right")) - 1
        return before >= 0 and end <= int(high[before])

    def _sorted(self) -> tuple[np.ndarray, np.ndarray]:
        if self._bounds is None:
            starts = sorted(self._known)
            ends = [start + self._known[start][1] for start in starts]
            self._bounds = np.array(starts, np.int64), np.array(ends, np.int64)
        return self._bounds

    def _outside_known(self, addresses: np.ndarray, size: int) -> np.ndarray:
        low, high = self._sorted()
        bad = np.ones(addresses.shape, bool)
        before = np.searchsorted(low, addresses, side="right") - 1
        # Storages may overlap (views of foreign memory): any of those that begin before.
        for back in range(4 if low.size else 0):
            k = np.maximum(before - back, 0)
            bad &= ~((before >= back) & (addresses >= low[k]) & (addresses + size <= high[k]))
        return bad

    def _scan(self) -> None:
        for thing in gc.get_objects():
            kind = type(thing)
            if kind not in self._has_memory:
                self._has_memory[kind] = issubclass(kind, torch.Tensor) and kind not in _WITHOUT_MEMORY
            if self._has_memory[kind]:
                try:
                    if thing.device.type == "cpu" and thing.layout == torch.strided:
                        self.add(thing.untyped_storage())
                except Exception:  # some tensors have no memory, and say so in many ways
                    continue
