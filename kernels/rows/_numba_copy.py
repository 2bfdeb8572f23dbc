"""What all kernels for rows on the CPU share: addresses, copies, comparisons, prefetches and generations."""

# Numba needs the real signatures: no `from __future__ import annotations`.

from numba import carray

from gpubuf.kernels._jit import jit
from gpubuf.kernels._primitives import as_u8, copy_bytes, fence, load_i64, prefetch_l2, stream_line
from gpubuf.kernels.rows import (
    DEVICE_ROWS,
    ENTRIES,
    HOST_ROWS,
    PENDING,
    ROW_BYTES,
    ROW_STRIDE,
    SIDE_STRIDE,
    SPLIT,
    has_lost,
)

#: Rows between a prefetch and its copy: time for a miss at the rate of one small row in 6 ns.
AHEAD = 32

# Runs of so many bytes are streamed to columns of so many: what is written there is read long after it left the caches.
_STREAMED_RUN, _STREAMED_COLUMN = 1 << 11, 1 << 24

# A place of a next observation is the row that it is in, if not negative. Else it is one of these, minus twice the
# number of the entry or the environment. LOST is none of them.
ASIDE, AT_END, LOST = -1, -2, -(1 << 40)


@jit(forceinline=True)
def row_address(entry, position):  # type: ignore[no-untyped-def]
    """Address of the row at a position: a device row or a host row."""
    return (entry[DEVICE_ROWS] if position < entry[SPLIT] else entry[HOST_ROWS]) + position * entry[ROW_STRIDE]


lost_rows = jit(forceinline=True)(has_lost)


@jit(forceinline=True)
def forward(row, by, capacity):  # type: ignore[no-untyped-def]
    """The row ``by`` rows after, ``by`` up to the capacity; below 0 if it is before row 0."""
    return row + by if row + by < capacity else row + by - capacity


@jit(forceinline=True)
def divided(number, envs):  # type: ignore[no-untyped-def]
    """(quotient, remainder) of a row or a word by the number of environments; no division where there is one."""
    if envs == 1:
        return number, 0
    quotient = number // envs
    return quotient, number - quotient * envs


@jit(forceinline=True)
def differ(a, b, row_bytes):  # type: ignore[no-untyped-def]
    """Whether the rows at two addresses have different bytes."""
    if row_bytes == 8:
        return load_i64(a) != load_i64(b)
    if a == b:
        # views of one batch of frames
        return False
    found = 0
    for i in range(row_bytes >> 3):
        found |= load_i64(a + 8 * i) ^ load_i64(b + 8 * i)
    view_a, view_b = carray(as_u8(a), row_bytes), carray(as_u8(b), row_bytes)
    for i in range(row_bytes & ~7, row_bytes):
        found |= view_a[i] ^ view_b[i]
    return found != 0


@jit(forceinline=True)
def copy_row(target, source, row_bytes):  # type: ignore[no-untyped-def]
    """memcpy without the call for rows of up to 128 bytes: two copies of a constant size, which may overlap."""
    if row_bytes == 4:
        copy_bytes(target, source, 4)
    elif row_bytes == 1:
        copy_bytes(target, source, 1)
    elif row_bytes == 8:
        copy_bytes(target, source, 8)
    elif row_bytes > 128:
        copy_bytes(target, source, row_bytes)
    elif row_bytes >= 64:
        copy_bytes(target, source, 64)
        copy_bytes(target + row_bytes - 64, source + row_bytes - 64, 64)
    elif row_bytes >= 32:
        copy_bytes(target, source, 32)
        copy_bytes(target + row_bytes - 32, source + row_bytes - 32, 32)
    elif row_bytes >= 16:
        copy_bytes(target, source, 16)
        copy_bytes(target + row_bytes - 16, source + row_bytes - 16, 16)
    elif row_bytes >= 8:
        copy_bytes(target, source, 8)
        copy_bytes(target + row_bytes - 8, source + row_bytes - 8, 8)
    elif row_bytes >= 4:
        copy_bytes(target, source, 4)
        copy_bytes(target + row_bytes - 4, source + row_bytes - 4, 4)
    else:
        for i in range(row_bytes):
            copy_bytes(target + i, source + i, 1)


@jit(forceinline=True)
def place_address(entry, place):  # type: ignore[no-untyped-def]
    """Address of a row, or of a next observation that is in none."""
    if place >= 0:
        return row_address(entry, place)
    number = (ASIDE - place) >> 1
    return (entry[ENTRIES] if place & 1 else entry[PENDING]) + number * entry[SIDE_STRIDE]


@jit(forceinline=True)
def prefetch_row(address, row_bytes):  # type: ignore[no-untyped-def]
    """Ask for the first 256 bytes of a row; the hardware follows a longer one by itself."""
    prefetch_l2(address)
    if row_bytes > 1:
        for i in range(64, min(row_bytes, 256), 64):
            prefetch_l2(address + i)
        # a row that starts in the middle of a line ends in one more
        prefetch_l2(address + min(row_bytes, 256) - 1)


@jit(forceinline=True)
def all_within(numbers, n, low, high):  # type: ignore[no-untyped-def]
    """Whether all numbers are in ``low .. high - 1``."""
    outside = 0
    for i in range(n):
        outside += (numbers[i] < low) | (numbers[i] >= high)
    return outside == 0


@jit(forceinline=True)
def write_generations(written, capacity, position, n):  # type: ignore[no-untyped-def]
    """Positions become generations."""
    # (written - position + capacity - 1) // capacity, with one division for the batch instead of one a row
    laps, cursor = written // capacity, written % capacity
    for i in range(n):
        position[i] = laps + (position[i] < cursor)


@jit(forceinline=True)
def copy_rows(target, target_stride, source, stride, row_bytes, n):  # type: ignore[no-untyped-def]
    """Copy ``n`` rows to consecutive places."""
    if stride == row_bytes and target_stride == row_bytes:
        copy_bytes(target, source, n * row_bytes)
    # As when gathering: a constant width makes a loop without a decision a row.
    elif row_bytes == 4:
        for i in range(n):
            copy_bytes(target + i * target_stride, source + i * stride, 4)
    elif row_bytes == 1:
        for i in range(n):
            copy_bytes(target + i * target_stride, source + i * stride, 1)
    else:
        for i in range(n):
            copy_row(target + i * target_stride, source + i * stride, row_bytes)


@jit(forceinline=True)
def _stream(target, source, n_bytes):  # type: ignore[no-untyped-def]
    """Copy at least 64 bytes past the caches."""
    head = -target & 63
    copy_bytes(target, source, head)
    end = head + (n_bytes - head & ~63)
    for i in range(head, end, 64):
        stream_line(target + i, source + i)
    copy_bytes(target + end, source + end, n_bytes - end)
    fence()


@jit(forceinline=True)
def write_run(entry, position, source, stride, n, capacity):  # type: ignore[no-untyped-def]
    """Copy ``n`` rows to consecutive positions, some of which may lie in one memory and some in another."""
    row_bytes, step = entry[ROW_BYTES], entry[ROW_STRIDE]
    first = min(max(entry[SPLIT] - position, 0), n)
    target = entry[DEVICE_ROWS] + position * step
    large = first * step >= _STREAMED_RUN and capacity * step >= _STREAMED_COLUMN
    if large and stride == row_bytes and step == row_bytes:
        _stream(target, source, first * step)
    else:
        copy_rows(target, step, source, stride, row_bytes, first)
    target = entry[HOST_ROWS] + (position + first) * step
    copy_rows(target, step, source + first * stride, stride, row_bytes, n - first)
