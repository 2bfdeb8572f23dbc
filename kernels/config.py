"""Chooses launch configurations: an explicit one, else a tuned file's, else a rule's.

The choices are pure functions of their arguments and of the tuned files; no device is probed. The user's folder comes
first, then the files that ship with gpubuf (see :mod:`gpubuf.kernels._tuned`). A file's point
counts if its sizes are near enough in log space, and equal where they must be: :mod:`gpubuf.kernels._spaces` says
which. The nearest one is taken.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

from gpubuf.kernels._spaces import (
    SPACES,
    BlockConfig,
    DrawConfig,
    FanOut,
    IndexConfig,
    RowsConfig,
    SliceConfig,
    TileConfig,
    UpdateConfig,
)
from gpubuf.kernels._tuned import TunedFile, folders, nearest, read, said, slug

CPU_FAN_OUT = 16
GPU_FAN_OUTS = (16, 32, 64)

LOSS_BLOCK = 1024
"""Rows of one program of a loss, at most, by rule: it reduces a usual batch in one launch."""

TANH_NORMAL_BLOCK = 512
"""Elements of one program of the tanh-normal kernels, by rule."""

MATRIX_TILE = 1024
"""Numbers that a program of a categorical loss, or of a norm, holds at a time, by rule."""

MOMENTS_WIDTH = 16
"""Elements of a row that a program of running statistics has, at most: 64 bytes of float32. They share a ticket."""

_explicit: dict[str, Any] = {}
_use_files = True

_Choice = TypeVar("_Choice", bound=Callable[..., Any])
_remembering: list[Any] = []


def _remembered(choice: _Choice) -> _Choice:
    """The choice, made once for the same arguments: launches ask every time, and a rule takes microseconds."""
    cached = functools.lru_cache(maxsize=1024)(choice)
    _remembering.append(cached)
    return cast(_Choice, cached)


def _forget_choices() -> None:
    for cached in _remembering:
        cached.cache_clear()


@contextlib.contextmanager
def using(**configurations: Any) -> Iterator[None]:
    """Make every launch take these configurations, by the names of :data:`SPACES`: for timing and for tests.

    It holds for all threads of the process. It has no effect on fan-outs, which are arguments of the operations.
    """
    with _restored():
        _explicit.update(configurations)
        _forget_choices()
        yield


@contextlib.contextmanager
def by_rule() -> Iterator[None]:
    """Choose by rule alone and ignore files and :func:`using`: for tuning. It holds for the whole process."""
    global _use_files
    with _restored():
        _explicit.clear()
        _use_files = False
        _forget_choices()
        yield


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    global _use_files
    before = dict(_explicit), _use_files
    try:
        yield
    finally:
        _explicit.clear()
        _explicit.update(before[0])
        _use_files = before[1]
        _forget_choices()


@functools.cache
def _load(path: Path, device_name: str) -> TunedFile:
    return said(read(path, SPACES, device_name))


def forget() -> None:
    """Read the tuned files again when they are needed next: after one was written."""
    _load.cache_clear()
    _forget_choices()


def tuned(operation: str, device_name: str | None, directory: Path | None = None, **sizes: int) -> Any:
    """The configuration of an operation that :func:`using` or a tuned file gives, or None.

    Args:
        operation: a name of :data:`SPACES`.
        device_name: as ``torch.cuda.get_device_name`` gives it; None for the CPU and the interpreter.
        directory: where the tuned files are; None: see :func:`gpubuf.kernels._tuned.folders`.
        sizes: those that the configuration depends on.
    """
    if operation in _explicit:
        return _explicit[operation]
    if device_name is None or not _use_files:
        return None
    for folder in folders() if directory is None else [directory]:
        points = _load(folder / f"{slug(device_name)}.json", device_name).points.get(operation, ())
        point = nearest(points, sizes, SPACES[operation].exact)
        if point is not None:
            return point.config
    return None


# The choices


@_remembered
def rows_copy(n_bytes: int, device_name: str | None = None, directory: Path | None = None) -> RowsConfig:
    """Launch configuration of a copy of ``n_bytes`` bytes.

    The rule: two elements a thread up to 1 MiB, four beyond, eight from 4 MiB on. A small copy takes as long as a few
    dependent memory accesses, and small tiles use more multiprocessors. A large one keeps all of them busy, and larger
    tiles spread the instructions that find the key.
    """
    found: RowsConfig | None = tuned("rows_copy", device_name, directory, n_bytes=n_bytes)
    if found is not None:
        return found
    return RowsConfig(256 if n_bytes <= 2**20 else 512 if n_bytes < 2**22 else 1024, 4)


def _fan_out(count: int, device_type: str, explicit: int | None, found: FanOut | None) -> int:
    """Fan-out of a tree over ``count`` leaves; the choice that all trees share."""
    if explicit is not None:
        if explicit < 2 or explicit & (explicit - 1):
            raise ValueError(f"the fan-out must be a power of two of at least 2, but is {explicit}")
        return explicit
    if device_type == "cpu":
        return CPU_FAN_OUT
    if found is not None:
        return found.fan_out

    def depth(fan_out: int) -> int:
        levels, nodes = 1, -(-count // fan_out)
        while nodes > 1:
            levels, nodes = levels + 1, -(-nodes // fan_out)
        return levels

    return next(fan_out for fan_out in GPU_FAN_OUTS if depth(fan_out) == depth(GPU_FAN_OUTS[-1]))


@_remembered
def tree_fan_out(
    capacity: int,
    device_type: str,
    device_name: str | None = None,
    explicit: int | None = None,
    directory: Path | None = None,
) -> int:
    """Fan-out of a sum tree: children per node, a power of two.

    The rule: 16 on a CPU, one cache line of leaves. On a GPU a level costs a round trip to memory and a wide node costs
    bytes, so it takes the narrowest of :data:`GPU_FAN_OUTS` that makes a tree as shallow as the widest does.

    Raises:
        ValueError: ``explicit`` is not a power of two of at least 2.
    """
    return _fan_out(capacity, device_type, explicit, tuned("sum_tree", device_name, directory, capacity=capacity))


@_remembered
def tree_update(fan_out: int, n: int, device_name: str | None = None, directory: Path | None = None) -> UpdateConfig:
    """Launch configuration of an update or a mark of ``n`` rows.

    The rule: up to 1024 entries take one launch of one program, which beats one launch for each level. Eight warps keep
    the schedulers of its multiprocessor busy, and a batch of 256 is one turn on each level; more warps would only
    repeat what is the same for every node. More entries take many small programs.
    """
    found: UpdateConfig | None = tuned("sum_tree_update", device_name, directory, fan_out=fan_out, n=n)
    if found is not None:
        return found
    if n > 1024:
        return UpdateConfig(False, 256, max(1, min(32, 1024 // fan_out)), 4)
    if n <= 64:
        return UpdateConfig(True, 64, max(1, min(64, 2048 // fan_out)), 4)
    children = 8192 if fan_out <= 32 else 4096  # registers for the parts of a wide node do not suffice for more
    return UpdateConfig(True, 256 if n <= 256 else 1024, max(1, min(256, children // fan_out)), 8)


@_remembered
def tree_draw(fan_out: int, n: int, device_name: str | None = None, directory: Path | None = None) -> DrawConfig:
    """Launch configuration of ``n`` draws.

    The rule: many small programs while they fit the processor side by side, then programs of up to 512 children. These
    take 4 warps: with fewer, wide nodes spill registers.
    """
    found: DrawConfig | None = tuned("sum_tree_draw", device_name, directory, fan_out=fan_out, n=n)
    if found is not None:
        return found
    block_draws = max(1, min(4 if n <= 512 else 16, 512 // fan_out))
    return DrawConfig(block_draws=block_draws, num_warps=4 if block_draws * fan_out >= 512 else 1)


def index_words(steps: int, envs: int) -> int:
    """Leaves of the sums of a trajectory index: one for 64 steps of an environment."""
    return -(-steps // 64) * envs


@_remembered
def index_fan_out(
    steps: int,
    envs: int,
    device_type: str,
    device_name: str | None = None,
    explicit: int | None = None,
    directory: Path | None = None,
) -> int:
    """Fan-out of the sums of a trajectory index, over its words; see :func:`tree_fan_out`.

    Raises:
        ValueError: ``explicit`` is not a power of two of at least 2.
    """
    words = index_words(steps, envs)
    return _fan_out(words, device_type, explicit, tuned("trajectories", device_name, directory, words=words))


def _floor_power(number: int) -> int:
    return 1 << (number.bit_length() - 1)


def ceil_power(number: int) -> int:
    """The smallest power of two that is at least ``number`` and at least 1."""
    return 1 << max(number - 1, 0).bit_length()


def index_span(n: int, by_id: bool) -> int:
    """Steps that a lane reads the flags of in an update of ``n``: those of its byte, or the one that was written."""
    return 1 if n == 1 and not by_id else 8


@_remembered
def index_update(
    fan_out: int,
    n: int,
    run_words: int,
    envs: int,
    by_id: bool = False,
    device_name: str | None = None,
    directory: Path | None = None,
) -> IndexConfig:
    """Launch configuration of an update of ``n`` steps, which lie in ``run_words`` words of each environment.

    The rule: one program does all stages of some environments, up to 512 words, as long as these environments are
    enough for memory accesses side by side. A thread has a byte of bits at a time, or a few children; for the few
    words of a small write of few environments, about as many as these need.
    """
    found: IndexConfig | None = tuned(
        "trajectories_update", device_name, directory, fan_out=fan_out, n=n, envs=envs, by_id=int(by_id)
    )
    if found is not None:
        return found
    block_envs = min(ceil_power(envs), _floor_power(max(512 // run_words, 1)), 32)
    few = (run_words + 1) * ceil_power(envs) <= (96 if n == 1 else 16)
    if run_words > 512 or block_envs < min(ceil_power(envs), 32):
        block_envs = 0
    block_nodes = max(1, min(4, 128 // fan_out) if few else (1024 if n == 1 else 256) // fan_out)
    num_warps = 1 if few and n == 1 else 4
    return IndexConfig(block_envs, 32 * num_warps, 32 if few else 32 * num_warps, block_nodes, num_warps)


@_remembered
def index_draw(
    fan_out: int, n: int, slice_len: int, device_name: str | None = None, directory: Path | None = None
) -> SliceConfig:
    """Launch configuration of ``n`` drawn slices.

    The rule: a slice a program while they all fit the processor side by side, since a warp that draws several takes
    their turns one after the other. Then as :func:`tree_draw`. Up to 64 steps are written at a time.
    """
    found: SliceConfig | None = tuned(
        "trajectories_draw", device_name, directory, fan_out=fan_out, n=n, slice_len=slice_len
    )
    if found is not None:
        return found
    block_slices = 1 if n <= 4096 else max(1, min(16, 512 // fan_out))
    return SliceConfig(
        block_slices=block_slices,
        block_steps=min(64, ceil_power(max(slice_len, 8))),
        num_warps=max(1, min(4, block_slices * fan_out // 256)),
    )


@_remembered
def index_slices(n: int, slice_len: int) -> SliceConfig:
    """Launch configuration of ``n`` slices from given rows: a warp for up to 32, and up to 512 elements of output."""
    block_steps = min(64, ceil_power(max(slice_len, 8)))
    return SliceConfig(block_slices=min(32, 512 // block_steps), block_steps=block_steps, num_warps=1)


@_remembered
def tanh_normal_sample(
    n: int, width: int, device_name: str | None = None, directory: Path | None = None
) -> BlockConfig:
    """Launch configuration of ``n`` samples of ``width`` numbers. The rule: no more elements than there are."""
    found: BlockConfig | None = tuned("tanh_normal_sample", device_name, directory, n=n, width=width)
    if found is not None:
        return found
    row = ceil_power(width)
    block = row * min(max(TANH_NORMAL_BLOCK // row, 1), ceil_power(n))
    return BlockConfig(block, min(max(block // 256, 1), 8))


@_remembered
def tanh_normal_backward(n: int, device_name: str | None = None, directory: Path | None = None) -> BlockConfig:
    """Launch configuration of the gradients of ``n`` elements."""
    found: BlockConfig | None = tuned("tanh_normal_backward", device_name, directory, n=n)
    return BlockConfig(TANH_NORMAL_BLOCK, 4) if found is None else found


@_remembered
def loss_rows(n: int, device_name: str | None = None, directory: Path | None = None) -> BlockConfig:
    """Launch configuration of a kernel of a loss over ``n`` rows. The rule: one program while it can."""
    found: BlockConfig | None = tuned("loss_rows", device_name, directory, n=n)
    if found is not None:
        return found
    block = min(max(ceil_power(n), 32), LOSS_BLOCK)
    return BlockConfig(block, min(max(block // 64, 1), 16))


@_remembered
def atom_rows(n: int, atoms: int, device_name: str | None = None, directory: Path | None = None) -> BlockConfig:
    """Launch configuration of ``n`` rows of atoms. The rule: up to 1024 numbers and 32 rows, no more than there are."""
    found: BlockConfig | None = tuned("atom_rows", device_name, directory, n=n, atoms=atoms)
    if found is not None:
        return found
    width = ceil_power(atoms)
    block = max(min(MATRIX_TILE // width, 32, ceil_power(n)), 1)
    return BlockConfig(block, min(max(block * width // 256, 1), 8))


@_remembered
def moments_tile(n: int, elements: int) -> TileConfig:
    """Launch configuration of running statistics of ``n`` rows: up to 2048 numbers at a time, eight for a thread."""
    columns = min(MOMENTS_WIDTH, ceil_power(elements))
    rows = min(2048 // columns, ceil_power(n))
    return TileConfig(rows, columns, min(max(rows * columns // 256, 1), 8))


@_remembered
def norm_rows(n: int, width: int, device_name: str | None = None, directory: Path | None = None) -> BlockConfig:
    """Launch configuration of layer norm or RMS norm of ``n`` rows of a net. The rule: up to 1024 numbers at a time."""
    found: BlockConfig | None = tuned("norm_rows", device_name, directory, n=n, width=width)
    if found is not None:
        return found
    row = ceil_power(width)
    block = min(max(MATRIX_TILE // row, 1), ceil_power(n))
    return BlockConfig(block, min(max(block * row // 256, 1), 8))


@_remembered
def norm_columns(n: int, width: int, device_name: str | None = None, directory: Path | None = None) -> TileConfig:
    """Launch configuration of batch norm of ``n`` rows of a net.

    The rule: columns of a whole line of the cache in float32, and up to 1024 numbers at a time.
    """
    found: TileConfig | None = tuned("norm_columns", device_name, directory, n=n, width=width)
    if found is not None:
        return found
    columns = min(32, ceil_power(width))
    rows = min(MATRIX_TILE // columns, ceil_power(max(n, 1)))
    return TileConfig(rows, columns, min(max(rows * columns // 256, 1), 4))
