"""Parquet: a table in a file, or in several one after the other."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import NonTensorStack, TensorDict

from gpubuf.data.loading.recording import Table, needed, overlaps, stamps


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


def columns_of(names: Sequence[str], arrays: Sequence[Any], n: int) -> TensorDict:
    """Columns of Arrow with ``n`` rows each: see :func:`values_of`."""
    return TensorDict({name: values_of(name, array, n) for name, array in zip(names, arrays, strict=True)}, [n])


def values_of(name: str, array: Any, n: int) -> Any:
    """A column of Arrow as a tensor ``[n, ...]``, a TensorDict or texts.

    Raises:
        ValueError: rows have different shapes.
    """
    import pyarrow
    from pyarrow import compute

    kinds, shape = pyarrow.types, [n]
    if kinds.is_struct(array.type):
        return columns_of([field.name for field in array.type], array.flatten(), n)
    while kinds.is_list(array.type) or kinds.is_large_list(array.type) or kinds.is_fixed_size_list(array.type):
        lengths = compute.list_value_length(array).unique().to_pylist()
        if len(lengths) != 1 or lengths[0] is None:
            raise ValueError(f"{name}: rows have different lengths, and a buffer stores rows of one shape")
        array = array.flatten()
        shape += lengths
    if kinds.is_string(array.type) or kinds.is_large_string(array.type):
        return NonTensorStack(*array.to_pylist())
    return torch.tensor(array.to_numpy(zero_copy_only=False), device="cpu").reshape(shape)
