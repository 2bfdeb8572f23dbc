"""Writes at the cursor on the CPU, for who writes the same number of rows again and again."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from gpubuf.kernels.rows._check import check_count
from gpubuf.kernels.rows._cpu_copy import describe_sources
from gpubuf.kernels.transitions import FIELD, ROW_BYTES, WRITES, WRITTEN_AS_STORED
from gpubuf.kernels.transitions._check import check_fields, check_sharing, check_sources
from gpubuf.kernels.transitions._cpu_stage import DONE, EVERY, stage
from gpubuf.kernels.transitions._cpu_write import extend_rows


class PreparedExtend:
    """:data:`gpubuf.kernels.transitions.extend` with ``n >= 1`` rows of contiguous sources, which are checked here.

    Attributes:
        described: address, ``CONTIGUOUS`` and bytes of each source, one after the other. An address may be changed
            before a call to that of other memory of this size; whoever does so keeps it alive.
    """

    def __init__(
        self,
        fields: Tensor,
        sources: list[Tensor],
        ring: Tensor,
        links: Tensor | None,
        owners: Tensor | None,
        n: int,
        capacity: int,
        envs: int,
        keeps_index: bool,
    ) -> None:
        n_fields = check_fields(fields, ring, capacity)
        check_count(n)
        check_sources(sources, n_fields)
        slots = check_sharing(links, owners, n, capacity, envs)
        self.described, alive = describe_sources(sources, n)
        self._staged = array("q", bytes(16 * n_fields))
        skipped = max(n - capacity, 0)
        scratch_bytes = (n - skipped) * _converted_bytes(fields)
        self._scratch = torch.empty(scratch_bytes, dtype=torch.uint8)
        table, described, staged = fields.data_ptr(), self.described.buffer_info()[0], self._staged.buffer_info()[0]
        self._stage = table, n_fields, described, EVERY, n, skipped, self._scratch.data_ptr(), staged
        shared = (0, 0) if links is None or owners is None else (links.data_ptr(), owners.data_ptr())
        is_staged = int(scratch_bytes > 0)
        head = table, n_fields, described, staged, is_staged, ring.data_ptr()
        self._extend = (*head, *shared, slots, n, capacity, envs)
        self._converts = bool(is_staged)
        self._index = torch.empty(n, dtype=torch.int64)
        self._keeps_index = keeps_index
        # The kernels know addresses alone.
        self._alive = (fields, sources, ring, links, owners, alive)

    def __call__(self) -> Tensor | None:
        """Write what is in the memory now. Returns the index: without ``keeps_index`` the same tensor at each call.

        None: the rows were refused, and nothing is written. The operation itself says why.
        """
        if self._converts and stage(*self._stage) != DONE:
            return None
        index = torch.empty_like(self._index) if self._keeps_index else self._index
        return index if extend_rows(*self._extend, index.data_ptr()) == DONE else None


def _converted_bytes(fields: Tensor) -> int:
    """Bytes of those fields of a row that are stored in another form than they are written in."""
    found: list[list[int]] = fields.view(-1, FIELD).tolist()
    return sum(field[ROW_BYTES] for field in found if field[WRITES] and not field[WRITTEN_AS_STORED])
