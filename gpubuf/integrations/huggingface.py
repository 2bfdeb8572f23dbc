"""Rows of buffers as data sets of Hugging Face, and back: ``buffer.export(HuggingFaceDatasetAdapter())``.

Names and arguments are those of TorchRL 0.15. ``datasets`` and ``pyarrow``, which comes with it, are imported at the
call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor
from torch.utils.data import Dataset

from gpubuf.data.datasets import batches_of
from gpubuf.data.loading.parquet import columns_of

__all__ = ["HuggingFaceDatasetAdapter"]


class HuggingFaceDatasetAdapter:
    """Between rows of a buffer and a ``datasets.Dataset``. A key is a column, with nested keys in it.

    Args:
        batch_size: rows that are read at a time.
    """

    def __init__(self, *, batch_size: int = 1024) -> None:
        self.batch_size = batch_size

    def to_external(self, dataset: Any) -> Any:
        """A ``datasets.Dataset`` of the rows, in memory: ``save_to_disk(folder)`` and ``push_to_hub(name)`` are its.

        Args:
            dataset: what :meth:`gpubuf.ReplayBuffer.export` gives, or a map-style data set of TensorDicts.

        Raises:
            ImportError: ``datasets`` is missing.
            ValueError: a value is of a kind that Arrow has no column for.
        """
        try:
            import datasets
            import pyarrow
        except ImportError as error:
            raise ImportError("HuggingFaceDatasetAdapter needs Hugging Face's library: pip install datasets") from error
        tables = [
            pyarrow.table({key: _array(pyarrow, key, value) for key, value in rows.items()})
            for rows in batches_of(dataset, self.batch_size)
        ]
        return datasets.Dataset(pyarrow.concat_tables(tables))

    def from_external(self, dataset: Any) -> Dataset[TensorDict]:
        """The rows of a ``datasets.Dataset`` as a map-style data set of TensorDicts, which reads them when asked.

        ``rows = adapter.from_external(dataset)``; ``buffer.extend(rows.__getitems__(range(len(rows))))``.
        """
        return _Rows(dataset)


class _Rows(Dataset[TensorDict]):
    def __init__(self, dataset: Any) -> None:
        self._table = dataset.with_format("arrow")

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> TensorDict:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> TensorDict:
        """A batch of rows, on the CPU.

        Raises:
            ValueError: rows of a column have different shapes.
        """
        table = self._table[list(indices)]
        return columns_of(table.column_names, [column.combine_chunks() for column in table.columns], len(table))


def _array(arrow: Any, key: str, value: Any) -> Any:
    """A column of rows ``[n, ...]``, as it is in Arrow: nested lists of fixed length."""
    if not isinstance(value, Tensor):
        if isinstance(value, (TensorDictBase, dict)) and not isinstance(value, NonTensorStack):
            parts = {name: _array(arrow, f"{key}.{name}", part) for name, part in value.items()}
            return arrow.StructArray.from_arrays(list(parts.values()), list(parts))
        return arrow.array(value.tolist())
    if value.numel() == 0 or value.dtype in (torch.bfloat16, torch.complex64, torch.complex128):
        raise ValueError(f"{key}: Arrow has no columns of {value.dtype} and shape {tuple(value.shape[1:])}")
    found = arrow.array(value.contiguous().view(-1).numpy())
    for size in reversed(value.shape[1:]):
        found = arrow.FixedSizeListArray.from_arrays(found, size)
    return found
