"""Parquet: a table in a file, or in several one after the other."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpubuf.data.loading.recording import Table, needed, overlaps, stamps
from gpubuf.integrations.huggingface import values_of


def parquet_table(paths: Sequence[Path]) -> Table:
    """What reads files in their order: columns of numbers, and of lists of one length as arrays.

    Raises:
        ImportError: pyarrow is missing.
        ValueError: no column says where trajectories end, or rows of a column have different lengths.
    """
    files = [needed("pyarrow.parquet").ParquetFile(path) for path in paths]
    groups = [(file, group) for file in files for group in range(file.num_row_groups)]
    starts = np.cumsum([0, *(file.metadata.row_group(group).num_rows for file, group in groups)])
    # A file of pyarrow is for one thread at a time.
    lock = threading.Lock()
    # Of each column the group that was read last: pieces are shorter than groups, or longer.
    last: dict[str, tuple[int, npt.NDArray[Any]]] = {}

    def fill(name: str, start: int, out: npt.NDArray[Any]) -> None:
        for number, records, places in overlaps(starts, start, start + len(out)):
            if last.get(name, (-1, None))[0] != number:
                file, group = groups[number]
                with lock:
                    column = file.read_row_group(group, columns=[name], use_threads=False).column(name)
                last[name] = number, values_of(name, column.combine_chunks(), len(column)).numpy()
            out[places] = last[name][1][records]

    arrays = {}
    first = next(files[0].iter_batches(batch_size=1))
    for name, column in zip(first.schema.names, first.columns, strict=True):
        if "struct" not in str(column.type) and isinstance(value := values_of(name, column, 1), torch.Tensor):
            arrays[name] = (int(starts[-1]), *value.shape[1:]), value.numpy().dtype
    return Table(stamps(paths), arrays, fill)
