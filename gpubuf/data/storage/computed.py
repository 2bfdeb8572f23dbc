"""Rows that are computed while they are copied, by :mod:`gpubuf.kernels.rows`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from gpubuf.data.storage.layout import Leaf, rows_in
from gpubuf.data.storage.row_memory import RowMemory
from gpubuf.data.storage.schema import host_can_read
from gpubuf.kernels import rows
from gpubuf.kernels._registry import in_memory, lazy, past_dispatcher, without_dispatch
from gpubuf.kernels.rows import arena_offsets

_extend = without_dispatch(rows.extend, trusted=True, given=("sources",))
_gather = without_dispatch(rows.gather, trusted=True, given=("index",))
_sample = without_dispatch(rows.sample, trusted=True)
_write = without_dispatch(rows.write, given=("sources", "index"))
_update = without_dispatch(rows.write, given=("sources", "index", "generation"))
# The CPU's forms of two operations that no schema can describe: they write into tensors of the caller's.
_gather_into = lazy("gpubuf.kernels.rows._cpu:gather_into")
_sample_into = lazy("gpubuf.kernels.rows._cpu:sample_into")

#: Integers of the size of an element, by which bits are compared.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ComputedRows(RowMemory):
    """How a storage with options writes and reads: see :class:`LazyTensorStorage`.

    Batches are made of the drawn rows alone. Windows of several steps are another reader's.
    """

    def _extend_computed(self, sources: list[Tensor], n: int) -> Tensor:
        fields, (links, owners) = self._written_fields, self._links
        try:
            index: Tensor = _extend(fields, sources, self.ring, n, self.max_size, self._envs, links, owners)
        except ValueError as error:
            raise self._by_name(error) from None
        return index

    def _write_computed(self, sources: list[Tensor], index: Tensor) -> None:
        try:
            _write(self._written_fields, sources, self.ring, index, self.max_size)
        except ValueError as error:
            raise self._by_name(error) from None

    def _update_computed(self, sources: list[Tensor], keys: Sequence[int], index: Tensor, generation: Tensor) -> None:
        assert self._written_fields is not None
        # Read when the operation runs: a captured graph finds the rows where they are by then.
        fields = torch.stack([self._written_fields[key] for key in keys])
        try:
            _update(fields, sources, self.ring, index, self.max_size, generation)
        except ValueError as error:
            raise self._by_name(error, keys) from None

    def _by_name(self, error: ValueError, keys: Sequence[int] | None = None) -> ValueError:
        """An error of the kernels, which know fields by their numbers."""
        leaves = self.written_layout.leaves
        chosen = leaves if keys is None else [leaves[key] for key in keys]
        return ValueError(re.sub(r"^field (\d+)", lambda found: f"key {chosen[int(found[1])].name}", str(error)))

    def _gather_computed(self, index: Tensor, *, written: bool = False) -> tuple[list[Tensor], Tensor]:
        """Rows as in batches, or as they were written, and their generations."""
        layout, fields = (self.written_layout, self._written_fields) if written else (self.batch_layout, self._fields)
        assert fields is not None
        # Single rows, without processing.
        n, reading = index.numel(), (None, self._links[0], None, self._envs)
        if past_dispatcher(fields):
            tensors = layout.allocate(n)
            return tensors, _gather_into(fields, self.ring, in_memory(index), self.max_size, tensors, *reading)
        arena, generation = _gather(fields, self.ring, index, self.max_size, layout.arena(n).n_bytes, *reading)
        return layout.cut(arena, n), generation

    def _gather_key_computed(self, leaf: Leaf, key: int, index: Tensor) -> Tensor:
        """One key of rows, as in batches."""
        assert self._fields is not None
        fields, n, reading = self._fields[key : key + 1], index.numel(), (None, self._links[0], None, self._envs)
        if past_dispatcher(fields):
            found = torch.empty((n, *leaf.shape), dtype=leaf.dtype)
            _gather_into(fields, self.ring, in_memory(index), self.max_size, [found], *reading)
            return found
        n_bytes = arena_offsets([leaf.row_bytes], n)[1]
        return rows_in(_gather(fields, self.ring, index, self.max_size, n_bytes, *reading)[0], leaf, n)

    def _sample_computed(self, rng: Tensor, n: int) -> tuple[list[Tensor], Tensor, Tensor]:
        layout, fields, reading = self.batch_layout, self._fields, (None, self._links[0], None, self._envs)
        assert fields is not None
        if past_dispatcher(fields):
            tensors = layout.allocate(n)
            return tensors, *_sample_into(fields, self.ring, rng, n, self.max_size, tensors, *reading)
        n_bytes = layout.arena(n).n_bytes
        arena, index, generation = _sample(fields, self.ring, rng, n, self.max_size, n_bytes, *reading)
        return layout.cut(arena, n), index, generation

    @property
    def _envs(self) -> int:
        return math.prod(self._shape[1:])

    @property
    def _links(self) -> tuple[Tensor | None, Tensor | None]:
        sharing = self.sharing
        return (None, None) if sharing is None else (sharing.links, sharing.owners)

    def _sources(self, given: list[Tensor], batch_dims: int) -> list[Tensor]:
        """What is written, in the order of ``written_layout``: prefixes are checked, and left out.

        Raises:
            ValueError: a prefix holds something else than the key that it is one of. Asked only where both are on the
                CPU, in code that is neither captured nor compiled.
        """
        prefixes = self.form.prefixes
        if not prefixes:
            return given
        out = list(given)
        for position, whole in prefixes:
            self._check_prefix(position, whole, given[position], given[whole], batch_dims)
            out[position] = given[position].new_empty(0)
        return out

    def _check_prefix(self, position: int, whole: int, part: Tensor, other: Tensor, batch_dims: int) -> None:
        if not (host_can_read(part) and host_can_read(other)):
            return
        leaves = self.written_layout.leaves
        beginning = other.narrow(batch_dims, 0, leaves[position].shape[0])
        if not torch.equal(_bits(part), _bits(beginning)):
            raise ValueError(
                f"{leaves[position].name} is stored as the first elements of {leaves[whole].name}, but the batch has "
                "others there: nothing is written"
            )


def _bits(values: Tensor) -> Tensor:
    """Values as integers: NaN differs from itself."""
    return values.resolve_conj().resolve_neg().view(_BITS.get(values.itemsize, values.dtype))
