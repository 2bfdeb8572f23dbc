"""Files of NumPy: a table, or what OGBench writes."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from gpubuf.data.loading.recording import Column, ColumnStatistics, Steps, flag_of, key_of, stamps

_READ = 1 << 22


class NpzFile:
    """A table in an ``.npz`` file, an array ``[records, ...]`` a column. Arrays are read in pieces.

    Of OGBench's files, which have ``terminals`` and neither rewards, timeouts nor next observations, a terminal is an
    observation alone: what the record before it led to, by truncation. With ``valids`` (OGBench's compact data sets)
    those that are not valid are such observations.

    Raises:
        ValueError: no array says where trajectories end.
    """

    def __init__(self, path: Path) -> None:
        self.identity: Any = stamps([path])
        self.statistics: dict[str, ColumnStatistics] = {}
        self._archive = zipfile.ZipFile(path)
        self._members = {
            info.filename.removesuffix(".npy"): self._begin(info.filename) for info in self._archive.infolist()
        }
        flags = {flag_of(name): name for name in self._members if flag_of(name)}
        names = {key_of(name) for name in self._members}
        if set(flags) == {"terminated"} and not names & {("next", "reward"), ("next", "observation")}:
            self.steps = Steps.of({"valid": ~self._whole(flags["terminated"]).astype(bool)})
        elif "valid" in flags:
            self.steps = Steps.of({"valid": self._whole(flags["valid"])})
        else:
            self.steps = Steps.of({flag: self._whole(name) for flag, name in flags.items()})
        n = len(self.steps.end)
        self.columns = {
            name: Column.of(key_of(name), shape[1:], dtype)
            for name, (_, _, shape, dtype) in self._members.items()
            if shape[:1] == (n,) and dtype.kind in "biuf" and not flag_of(name)
        }

    def _begin(self, member: str) -> tuple[IO[bytes], int, tuple[int, ...], np.dtype[Any]]:
        """The stream of an array, where its numbers begin, and its shape and dtype."""
        stream = self._archive.open(member)
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, transposed, dtype = read(stream)
        if transposed and len(shape) > 1:
            raise ValueError(
                f"{member} is in Fortran order, of which rows can't be read in turn: save a copy in C order"
            )
        return stream, stream.tell(), shape, dtype

    def _whole(self, name: str) -> npt.NDArray[Any]:
        _, _, shape, dtype = self._members[name]
        found = np.empty(shape, dtype)
        self._fill(name, 0, found)
        return found

    def _fill(self, name: str, start: int, out: npt.NDArray[Any]) -> None:
        stream, begin, shape, dtype = self._members[name]
        row_bytes = int(np.prod(shape[1:])) * dtype.itemsize
        stream.seek(begin + start * row_bytes)
        step = max(_READ // max(row_bytes, 1), 1)
        for first in range(0, len(out), step):
            part = out[first : first + step]
            part[...] = np.frombuffer(stream.read(len(part) * row_bytes), dtype).reshape(part.shape)

    def tasks(self, name: str, start: int, stop: int, out: npt.NDArray[Any], /) -> Sequence[Callable[[], None]]:
        return [lambda: self._fill(name, start, out)]
