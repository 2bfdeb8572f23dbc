"""Fields: how :mod:`gpubuf.kernels.rows` makes the keys of a batch of the columns of a storage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from gpubuf.data.storage.column import Column
from gpubuf.data.storage.layout import RowLayout
from gpubuf.data.storage.placement import Placement
from gpubuf.data.storage.schema import Form
from gpubuf.kernels.rows import DRAWN, FIELD, NEXT, Field, dtype_code


class NextObservations(Protocol):
    """The memory of next observations that are stored once; see :mod:`gpubuf.kernels.rows`.

    Attributes:
        links: where the next observation of each row is.
        owners: the rows that entries were taken for.
        entry_bytes: bytes of the next observations.
    """

    links: Tensor
    owners: Tensor

    @property
    def entry_bytes(self) -> int:
        """See above."""

    def renew(self, placement: Placement) -> None:
        """Copy the next observations into memory of a placement."""

    def addresses(self, column: int) -> tuple[int, int, int]:
        """The addresses of the entries and of the pending rows of a column, and the bytes from row to row."""


def fields_of(
    form: Form, columns: Sequence[Column], rows_per_step: int, sharing: NextObservations | None, batch: RowLayout
) -> list[Field]:
    """A field for each leaf of a batch.

    Args:
        form: of the storage.
        columns: of the storage, in the order of ``form.stored.leaves``.
        rows_per_step: number of environments.
        sharing: where next observations are that share a column; None: there are none.
        batch: the layout of the batch: that of ``form.batch``, or of ``form.written``.
    """
    found = []
    for position, (leaf, written, number) in enumerate(
        zip(batch.leaves, form.written.leaves, form.columns, strict=True)
    ):
        source = None if form.sources is None else form.sources[position]
        stored = form.stored.leaves[number]
        device_rows, _, split, host_rows, row_stride = columns[number].entry(stored.row_bytes, rows_per_step)
        follows = source is not None and source.follows
        # A codec lies between floating-point numbers and what is stored: integers are taken as they are.
        codec = source if leaf.dtype.is_floating_point else None
        aside = sharing.addresses(number) if follows and sharing is not None else (0, 0, 0)
        found.append(
            Field(
                device_rows=device_rows,
                # Of a prefix these are the first bytes of a row.
                row_bytes=leaf.n_elements * stored.dtype.itemsize,
                split=split,
                host_rows=host_rows,
                row_stride=row_stride,
                row=NEXT if follows else DRAWN,
                stored=dtype_code(stored.dtype),
                written=dtype_code(written.dtype),
                batch=dtype_code(leaf.dtype),
                elements=leaf.n_elements,
                scale=1.0 if codec is None else codec.scale,
                offset=0.0 if codec is None else codec.offset,
                entries=aside[0],
                pending=aside[1],
                side_stride=aside[2],
                writes=0 if source is not None and source.whole is not None else 1,
            )
        )
    return found


def field_table(fields: Sequence[Field], device: torch.device) -> Tensor:
    """The kernels' table of fields, int64 ``[F, FIELD]`` on ``device``."""
    table = torch.tensor([field.encoded() for field in fields], dtype=torch.int64).reshape(-1, FIELD)
    # Not waited for: CUDA has read memory that is not pinned when the call returns.
    return table.to(device, non_blocking=True)
