"""Files of NumPy."""

from __future__ import annotations

import math
import weakref
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpubuf.data.loading.recording import Table, stamps

#: Bytes that are unpacked at a time.
_READ = 1 << 22


def npz_table(path: Path) -> Table:
    """What reads an ``.npz`` file with an array ``[records, ...]`` a column, in pieces.

    Raises:
        ValueError: no array says where trajectories end, or one is in Fortran order.
    """
    archive = zipfile.ZipFile(path)
    streams = {name.removesuffix(".npy"): archive.open(name) for name in archive.namelist()}
    begins: dict[str, int] = {}
    arrays: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}

    def fill(name: str, start: int, out: npt.NDArray[Any]) -> None:
        shape, dtype = arrays[name]
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        streams[name].seek(begins[name] + start * row_bytes)
        step = max(_READ // max(row_bytes, 1), 1)
        for first in range(0, len(out), step):
            part = out[first : first + step]
            part[...] = np.frombuffer(streams[name].read(len(part) * row_bytes), dtype).reshape(part.shape)

    # With the table, or the error that there is none.
    for close in (*(stream.close for stream in streams.values()), archive.close):
        weakref.finalize(fill, close)
    for name, stream in streams.items():
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, transposed, dtype = read(stream)
        if transposed and len(shape) > 1:
            raise ValueError(f"{name} is in Fortran order, of which rows can't be read in turn: save it in C order")
        begins[name], arrays[name] = stream.tell(), (shape, dtype)
    return Table(stamps([path]), arrays, fill)
