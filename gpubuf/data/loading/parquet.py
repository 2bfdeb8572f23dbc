"""Parquet: a table in a file, or in the files of a folder, in the order of their names."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpubuf.data.loading.recording import Column, ColumnStatistics, Steps, flag_of, key_of, overlaps, stamps
from gpubuf.integrations.huggingface import values_of


def _opened(paths: Sequence[Path]) -> list[Any]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError('reading Parquet needs pyarrow: pip install "gpubuf[datasets]"') from error
    return [parquet.ParquetFile(path) for path in paths]


class ParquetTable:
    """A table, with lists of one length as arrays.

    Args:
        paths: the files, in order.

    Raises:
        ImportError: pyarrow is missing.
        ValueError: no column says where trajectories end, or rows of a column have different lengths.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        files = _opened(paths)
        from pyarrow import types

        self.identity: Any = stamps(paths)
        self.statistics: dict[str, ColumnStatistics] = {}
        self._groups = [(file, group) for file in files for group in range(file.num_row_groups)]
        self._starts = np.cumsum([0, *(file.metadata.row_group(group).num_rows for file, group in self._groups)])
        # A file of pyarrow is for one thread at a time.
        self._lock = threading.Lock()
        #: Of each column the group that was read last: pieces are shorter than groups, or longer.
        self._last: dict[str, tuple[int, npt.NDArray[Any]]] = {}
        self.columns = {}
        first = next(files[0].iter_batches(batch_size=1))
        for name, column, kind in zip(first.schema.names, first.columns, first.schema.types, strict=True):
            while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
                kind = kind.value_type
            if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
                value = values_of(name, column, 1).numpy()
                self.columns[name] = Column.of(key_of(name), value.shape[1:], value.dtype)
        flags = [name for name in self.columns if flag_of(name)]
        self.steps = Steps.of({flag_of(name): self.whole(name) for name in flags})
        for name in flags:
            del self.columns[name]

    @staticmethod
    def read(paths: Sequence[Path], names: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
        """Columns of numbers of the files, ``[records]`` each."""
        tables = [file.read(columns=list(names)) for file in _opened(paths)]
        return {name: np.concatenate([table.column(name).to_numpy() for table in tables]) for name in names}

    def whole(self, name: str) -> npt.NDArray[Any]:
        """A column, ``[records, ...]``."""
        return np.concatenate([self._group(name, number) for number in range(len(self._groups))])

    def _group(self, name: str, number: int) -> npt.NDArray[Any]:
        if self._last.get(name, (-1, None))[0] != number:
            file, group = self._groups[number]
            with self._lock:
                table = file.read_row_group(group, columns=[name], use_threads=False)
            self._last[name] = number, values_of(name, table.column(name).combine_chunks(), len(table)).numpy()
        return self._last[name][1]

    def _fill(self, name: str, start: int, out: npt.NDArray[Any]) -> None:
        for number, records, places in overlaps(self._starts, start, start + len(out)):
            out[places] = self._group(name, number)[records]

    def tasks(self, name: str, start: int, stop: int, out: npt.NDArray[Any], /) -> Sequence[Callable[[], None]]:
        return [lambda: self._fill(name, start, out)]
