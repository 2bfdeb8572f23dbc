"""Launches the rows kernels: one launch for any number of keys, or for up to 128 of them in a write.

Writes of observations that are stored once take three more. Nothing here waits for the GPU. The addresses in a table
may be those of pinned host memory: the same kernels read and write it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpubuf.kernels._launching import Launch, Variant, all_registers, cdiv, encode_arguments, launch, variant_of
from gpubuf.kernels._registry import check_devices, device_name, length_of
from gpubuf.kernels.config import ceil_power, remembered, rows_copy
from gpubuf.kernels.philox import check_state
from gpubuf.kernels.rows import ALIGNMENT, ENTRY, UNIFORM, WRITTEN, Reading, float_bits
from gpubuf.kernels.rows._check import (
    Source,
    check_count,
    check_extend,
    check_reading,
    check_relink,
    check_storage,
    check_write,
    strided_source,
)
from gpubuf.kernels.rows._triton import rows_compute_kernel, rows_gather_kernel, rows_sample_kernel
from gpubuf.kernels.rows._triton_write import (
    rows_aside_kernel,
    rows_assign_kernel,
    rows_compare_kernel,
    rows_extend_kernel,
    rows_winners_kernel,
    rows_write_kernel,
)

MAX_SOURCES = 128
"""Keys that one launch can write. Their addresses are kernel arguments, and every GPU takes 4 KiB of those."""

MAX_ROW_BYTES = 2**30
"""Bytes of one row, all keys together: elements within a row are counted in 32 bits."""

MAX_COPYING = 8192
"""Most copying programs of a launch: four times as many as an H200 holds at a time, so that they end evenly."""

SPREAD, MAX_DOUBLINGS = 132, 3
"""Programs of a computed batch of long rows that are left when tiles are doubled, one for each multiprocessor of an
H200; and how often they are doubled at most: to eight elements for each thread."""

WIDE_KEY = 256
"""Average bytes of a key's row from which elements of 16 bytes are the better guess."""

HOST_BYTES = 1 << 18
"""Bytes that the programs of a launch read at a time from the host's memory. A bus of 55 GB/s and 1.5 us needs 80 KB on
their way; a program that looks for its next tile has none. More programs would only take room from other kernels."""

COMPARED_COLUMNS = 32
"""Elements of a row that are compared at a time: few rows per program, so that small writes have several programs."""

MAX_COMPARED = 8192
"""Entries of a write that are compared with all later ones, to find the last for each row. More are sorted, by PyTorch:
that takes a dozen launches, and less time than so many comparisons."""

ASSIGNED = 1024
"""Candidates that the one program which gives entries takes at a time: each time costs a trip to memory and back."""


def copy_tile(n_bytes: int, device: torch.device) -> tuple[int, int]:
    """(elements, warps) of a program that copies rows."""
    config = rows_copy(n_bytes, device_name(device))
    return config.tile, config.num_warps


def batch_tile(n_bytes: int, device: torch.device, one_each: bool = False) -> tuple[int, int]:
    """As :func:`copy_tile`, of a computed batch: two elements per thread at most, or one.

    Of a batch with windows, next observations aside or random processing, and of a write of fields, it is one: or else
    registers spill on some GPUs.
    """
    tile, num_warps = copy_tile(n_bytes, device)
    return min(tile, 64 * num_warps), num_warps * (2 if one_each else 1)


@functools.lru_cache(maxsize=256)
def padded_keys(n_keys: int) -> int:
    """Size of the search over keys: a power of two, at least a warp, so that few variants are compiled."""
    return max(32, ceil_power(n_keys))


def doublings(n_keys: int, n: int, n_bytes: int, tile: int) -> int:
    """How often tiles of long rows are doubled, so that a program that has looked its rows up copies more of them.

    As often as leaves :data:`SPREAD` programs busy, and not for keys that are narrow on average.
    """
    spread = n_bytes // (16 * tile * SPREAD) if n_bytes >= WIDE_KEY * n * n_keys else 1
    return min(max(spread.bit_length() - 1, 0), MAX_DOUBLINGS)


def copying_programs(n_keys: int, n: int, n_bytes: int, tile: int, on_host: float = 0.0) -> int:
    """A guess at the tiles of ``n`` rows of ``n_keys`` keys, ``n_bytes`` bytes together. Any number is correct.

    The true number depends on the alignment of every key, which only the device knows. The guess takes elements of 4
    bytes, or of 16 if keys are wide on average, and is close for the usual rows. Rows of 68, 24, 68, 4, 1 and 1 bytes
    have 40 elements of 4.15 bytes: 256, 4096 and 32 768 of them are 40, 640 and 2560 tiles, and get 47, 669 and 2661
    programs. Images are wide and aligned. If there are more tiles than programs, programs copy several. Programs too
    many find no tile, and end after one look at the table.

    Beyond :data:`MAX_COPYING` a program has several tiles. Every multiprocessor is busy then, and its warps hide each
    other's latency. If a share of the rows is ``on_host``, the programs read :data:`HOST_BYTES` at a time from there.
    """
    element = 16 if n_bytes >= WIDE_KEY * n * n_keys else 4
    most = cdiv(HOST_BYTES, int(element * tile * on_host)) if on_host else MAX_COPYING
    return min(n_keys + n_bytes // (element * tile), most, MAX_COPYING)


def check_row_bytes(n_bytes: int, n: int) -> None:
    if n_bytes > MAX_ROW_BYTES * n:
        raise ValueError(f"a row may take {MAX_ROW_BYTES} bytes at most, but takes {n_bytes // n}")


# Reading


def gather(
    table: Tensor, ring: Tensor, index: Tensor, capacity: int, arena_bytes: int, *reading: Any, trusted: bool = False
) -> tuple[Tensor, Tensor]:
    """See :data:`gpubuf.kernels.rows.gather`. A trusted launch comes from a storage, which owns table and ring."""
    n = length_of("index", index)
    arena, _, generation = _read(table, ring, None, index, n, capacity, arena_bytes, reading, trusted)
    return arena, generation


def sample(
    table: Tensor, ring: Tensor, rng: Tensor, n: int, capacity: int, arena_bytes: int, *reading: Any,
    trusted: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See :data:`gpubuf.kernels.rows.sample`. A trusted launch comes from a storage, which owns table and ring."""
    check_count(n)
    check_state(rng)
    return _read(table, ring, rng, None, n, capacity, arena_bytes, reading, trusted)


def _read(
    table: Tensor, ring: Tensor, rng: Tensor | None, given: Tensor | None, n: int, capacity: int, arena_bytes: int,
    reading: tuple[Any, ...], trusted: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Arena, index and generations of a batch of ``given`` rows, or of ``n`` rows that the kernel draws by ``rng``."""
    if not trusted:
        check_storage(table, ring, capacity)
    how, plain = Reading(*reading), table.shape[1] == ENTRY
    if not trusted:
        check_reading(how, capacity)
    other = rng if given is None else given
    if not trusted or (other is not None and other.get_device() != table.get_device()):
        check_devices(table, ring, other, *(() if plain else how[:3]))
    device, computed = table.device, None
    if not plain:
        windows = how.windows or how.past > 0
        # A transition of one step ends there, whatever the flags say.
        ends = how.ends if how.n_steps > 1 or windows else None
        memory = (ends, how.links, how.noise)
        computed = (*[tensor is not None for tensor in memory], *how[3:7], how.past, windows)
    law = None if rng is None else how.law
    known = prepared_read(device, table.shape[0], n, capacity, arena_bytes, law, computed, how.on_host)
    arena = torch.empty(arena_bytes, dtype=torch.uint8, device=device)
    generation = torch.empty(n, dtype=torch.int64, device=device)
    index = torch.empty_like(generation) if given is None else given
    if n == 0:
        return arena, index, generation
    tensors: tuple[Tensor, ...]
    numbers = ring if how.numbers is None else how.numbers
    if not plain:
        some = [ring if tensor is None else tensor for tensor in (*memory, rng)]
        tensors = (*some, index, arena, generation, numbers)
    elif rng is not None:
        tensors = (rng, arena, index, generation, numbers)
    else:
        tensors = (index, arena, generation)
    known((table, ring, *tensors))
    return arena, index, generation


@remembered
def prepared_read(
    device: torch.device, n_keys: int, n: int, capacity: int, arena_bytes: int, law: int | None,
    computed: tuple[Any, ...] | None, on_host: float,
) -> Launch:  # fmt: skip
    """How a batch of ``n`` rows is launched, which depends on sizes alone.

    Args:
        device: where.
        n_keys: keys of a row.
        n, capacity, arena_bytes: as of the operations.
        law: by which the kernel draws the rows; None: they are given.
        computed: of a computed batch whether there are ends, links and noise, the numbers of its ``Reading``, and
            whether there are windows.
        on_host: as of ``Reading``.

    Raises:
        ValueError: a row has more than ``MAX_ROW_BYTES`` bytes.
    """
    flags: dict[str, int] = {} if law is None else {"LAW": law}
    registers, doubled = None, 0
    if computed is None:
        kernel = rows_gather_kernel if law is None else rows_sample_kernel
        tile, num_warps = copy_tile(arena_bytes, device)
        registers = all_registers(num_warps) if law else None
        numbers: tuple[int, ...] = (n_keys, n, capacity)
    else:
        has_ends, has_links, has_noise, envs, n_steps, gamma, draws, past, windows = computed
        kernel = rows_compute_kernel
        tile, num_warps = batch_tile(arena_bytes, device, has_links or has_noise or windows)
        # Unless it is told that they are there, a compiler of today spills some for more programs side by side.
        registers = all_registers(num_warps)
        doubled = doublings(n_keys, n, arena_bytes, tile) if n else 0
        numbers = (n_keys, n, capacity // envs, envs, n_steps, float_bits(gamma), draws, past, doubled)
        flags = {"HAS_ENDS": has_ends, "HAS_LINKS": has_links, "HAS_NOISE": has_noise, "SAMPLE": law is not None}
        flags |= {"HAS_WINDOWS": windows, "LAW": law or UNIFORM}
    if n:
        check_row_bytes(arena_bytes, n)
    row_programs = cdiv(n, tile)
    programs = row_programs + copying_programs(n_keys, n, arena_bytes, tile << doubled, on_host)
    constants = {**flags, "KEYS": padded_keys(n_keys), "TILE": tile, "ALIGNMENT": ALIGNMENT}
    return Launch(variant_of(kernel, num_warps, registers, constants), programs, (*numbers, row_programs))


# Writing


class Part(NamedTuple):
    """The keys of a write that one launch takes. ``sources`` may be copies, which nothing else keeps alive."""

    table: Tensor
    sources: Sequence[Source]
    addresses: tuple[int, ...]
    strides: tuple[int, ...]
    n_bytes: int
    tile: int
    num_warps: int

    def programs(self, n: int, row_programs: int = 0) -> int:
        """Programs of a launch that writes ``n`` rows: at least one, for the counters move even without keys."""
        return max(row_programs + copying_programs(len(self.sources), n, self.n_bytes, self.tile), 1)

    def variant(self, kernel: Any, **constexprs: Any) -> Variant:
        """That of a kernel that copies or encodes tiles of these keys."""
        constexprs |= {"KEYS": padded_keys(len(self.sources)), "TILE": self.tile, "ALIGNMENT": ALIGNMENT}
        return variant_of(kernel, self.num_warps, all_registers(self.num_warps), constexprs)

    def launch(self, kernel: Any, programs: int, *others: Any, **constexprs: Any) -> None:
        """Launch such a kernel. ``others`` come after the arguments of the keys."""
        keys = (self.table, self.addresses, self.strides, len(self.sources))
        self.variant(kernel, **constexprs).launch(programs, (*keys, *others))


def parts_of(table: Tensor, sources: Sequence[Tensor], n: int) -> list[Part]:
    """Cut a write of ``n`` rows into launches, at least one."""
    plain = table.shape[1] == ENTRY
    check_devices(table, *sources)
    # The source of a field may be empty: it is not written, or has nothing in it.
    rows = [Source(s, 0, 0) if not plain and s.numel() == 0 else strided_source(s, n) for s in sources]
    check_row_bytes(n * sum(source.row_bytes for source in rows), n)
    parts = []
    for start in range(0, max(len(rows), 1), MAX_SOURCES):
        some = rows[start : start + MAX_SOURCES]
        addresses = encode_arguments([source.rows.data_ptr() for source in some] or [0])
        strides = encode_arguments([source.stride for source in some] or [0])
        n_bytes = n * sum(source.row_bytes for source in some)
        tile = copy_tile(n_bytes, table.device) if plain else batch_tile(n_bytes, table.device, one_each=True)
        entries = table[start : start + MAX_SOURCES] if len(some) < len(rows) else table
        parts.append(Part(entries, some, addresses, strides, n_bytes, *tile))
    return parts


def extend(
    table: Tensor, sources: Sequence[Tensor], ring: Tensor, n: int, capacity: int, envs: int = 1,
    links: Tensor | None = None, owners: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See :data:`gpubuf.kernels.rows.extend`."""
    check_extend(table, sources, ring, n, capacity, envs, links, owners)
    check_devices(table, ring, links, owners)
    index = torch.empty(n, dtype=torch.int64, device=table.device)
    if n == 0:
        return index
    parts, skipped, plain = parts_of(table, sources, n), max(n - capacity, 0), table.shape[1] == ENTRY
    for part in parts:
        # The index is written by the first launch. The counters move in the last one.
        row_programs = cdiv(n, part.tile) if part is parts[0] else 0
        advance = n if part is parts[-1] and links is None else 0
        sizes = (n, skipped, capacity, advance, row_programs)
        part.launch(rows_extend_kernel, part.programs(n, row_programs), ring, index, *sizes, PLAIN=plain)
    if links is not None and owners is not None:
        _share(parts, ring, links, owners, index, None, n, skipped, capacity, envs)
    return index


class PreparedExtend:
    """:func:`extend` with ``n >= 1`` rows of contiguous sources at known addresses, in one launch.

    Attributes:
        addresses: of the sources. They may be changed before a call to those of other memory of this size; whoever does
            so keeps it alive.

    Raises:
        ValueError: it takes several launches, or :func:`extend` refuses the arguments.
    """

    def __init__(self, table: Tensor, sources: Sequence[Tensor], ring: Tensor, n: int, capacity: int) -> None:
        check_extend(table, sources, ring, n, capacity)
        check_devices(table, ring)
        parts = parts_of(table, sources, n)
        if len(parts) > 1:
            raise ValueError(f"{len(sources)} keys take {len(parts)} launches")
        (part,), row_programs = parts, cdiv(n, parts[0].tile)
        self.addresses = [source.rows.data_ptr() for source in part.sources]
        self._table, self._ring, self._n = table, ring, n
        self._strides, self._sizes = part.strides, (n, max(n - capacity, 0), capacity, n, row_programs)
        self._variant = part.variant(rows_extend_kernel, PLAIN=table.shape[1] == ENTRY)
        self._programs = part.programs(n, row_programs)

    def __call__(self) -> Tensor:
        """Write what is in the memory when the launch runs. Returns the index, a new tensor."""
        index = torch.empty(self._n, dtype=torch.int64, device=self._table.device)
        addresses, n_keys = encode_arguments(self.addresses), len(self.addresses)
        tensors = (self._table, addresses, self._strides, n_keys, self._ring, index)
        self._variant.launch(self._programs, tensors + self._sizes)
        return index


def winners(index: Tensor, capacity: int, ring: Tensor, generation: Tensor | None = None) -> Tensor:
    """bool ``[n]``: the entries of ``index`` that a write takes, by one launch of up to :data:`MAX_COMPARED`.

    No later one names the same row. Given ``generation``, only those compete whose row has that generation still.
    """
    n = index.numel()
    if n <= MAX_COMPARED:
        winner = torch.empty_like(index, dtype=torch.bool)
        tensors = (ring, index, ring if generation is None else generation, winner)
        blocks = {"HAS_GENERATION": generation is not None, "BLOCK_ROWS": 8, "BLOCK_OTHERS": 512}
        launch(rows_winners_kernel, cdiv(n, 8), *tensors, n, capacity, **blocks, num_warps=4)
        return winner
    position = torch.where(index < 0, index + capacity, index)
    fresh = None
    if generation is not None:
        fresh = (ring[WRITTEN] - position + (capacity - 1)).div(capacity, rounding_mode="floor") == generation
        position = torch.where(fresh, position, capacity)
    ordered, order = position.sort(stable=True)
    last = torch.ones_like(ordered, dtype=torch.bool)
    torch.ne(ordered[1:], ordered[:-1], out=last[:-1])
    winner = torch.empty_like(last).scatter_(0, order, last)
    return winner if fresh is None else winner.logical_and_(fresh)


def write(
    table: Tensor, sources: Sequence[Tensor], ring: Tensor, index: Tensor, capacity: int,
    generation: Tensor | None = None,
) -> None:  # fmt: skip
    """See :data:`gpubuf.kernels.rows.write`."""
    n = check_write(table, sources, ring, index, capacity, generation)
    check_devices(table, ring, index, generation)
    if n == 0:
        return
    parts = parts_of(table, sources, n)
    winner, plain = winners(index, capacity, ring, generation), table.shape[1] == ENTRY
    for part in parts:
        # Faults are counted by the first launch alone.
        row_programs = cdiv(n, part.tile) if part is parts[0] else 0
        sizes = (n, capacity, row_programs)
        part.launch(rows_write_kernel, part.programs(n, row_programs), ring, index, winner, *sizes, PLAIN=plain)


def relink(
    table: Tensor, sources: Sequence[Tensor], ring: Tensor, index: Tensor, capacity: int, envs: int, links: Tensor,
    owners: Tensor,
) -> None:  # fmt: skip
    """See :data:`gpubuf.kernels.rows.relink`."""
    n = check_relink(table, sources, ring, index, capacity, envs, links, owners)
    check_devices(table, ring, links, owners, index)
    if n == 0:
        return
    winner = winners(index, capacity, ring)
    _share(parts_of(table, sources, n), ring, links, owners, index, winner, n, 0, capacity, envs)


def _share(
    parts: list[Part], ring: Tensor, links: Tensor, owners: Tensor, index: Tensor, winner: Tensor | None, *sizes: int
) -> None:
    """Compare, assign and put aside: of rows that extend the ring, or of ``winner`` among those of ``index``.

    ``sizes`` are n, how many rows are skipped, the capacity and envs.
    """
    n, skipped, _capacity, envs = sizes
    again = winner is not None
    candidates = n if again else n - skipped + envs
    differs = torch.empty(candidates, dtype=torch.int32, device=index.device)
    free = torch.empty_like(differs)
    given = ring if winner is None else winner
    for part in parts:
        columns = min(COMPARED_COLUMNS, part.tile)
        block, n_keys, begun = part.tile // columns, len(part.sources), 0 if part is parts[0] else 1
        keys = (part.table, part.addresses, part.strides, n_keys)
        blocks = {"KEYS": padded_keys(n_keys), "BLOCK_ROWS": block, "BLOCK_COLUMNS": columns}
        how = {"RELINK": again, **blocks, "num_warps": part.num_warps, "maxnreg": all_registers(part.num_warps)}
        programs = cdiv(candidates, block)
        launch(rows_compare_kernel, programs, *keys, ring, index, given, differs, *sizes, begun, **how)
    tensors = (ring, links, owners, index, given, differs, free)
    slots = owners.numel() - 1
    launch(rows_assign_kernel, 1, *tensors, *sizes, slots, RELINK=again, BLOCK=ASSIGNED, num_warps=8)
    for part in parts:
        advance = n if part is parts[-1] else 0
        part.launch(rows_aside_kernel, part.programs(n), ring, links, index, given, *sizes, advance, RELINK=again)
