"""Chooses launch configurations: an explicit one, else a tuned file's, else a rule's.

The choices are pure functions of their arguments and of the user's tuned files (see :mod:`gpubuf.kernels._tuned`); no
device is probed. A file's point counts if its sizes are near enough in log space, and equal where they must be:
:data:`SPACES` says which. The nearest one is taken.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from gpubuf.kernels._tuned import Space, TunedFile, nearest, read, said, slug, user_folder

# What can be chosen


@dataclass(frozen=True)
class RowsConfig:
    """How a copy of rows is cut up.

    Attributes:
        tile: elements of 1 to 16 bytes that a program copies at a time, and rows of which it writes the index.
        num_warps: warps of a program.
    """

    tile: int
    num_warps: int


@dataclass(frozen=True)
class FanOut:
    """The shape of a tree.

    Attributes:
        fan_out: children of a node.
    """

    fan_out: int


@dataclass(frozen=True)
class UpdateConfig:
    """How an update or a mark of the sum tree is launched.

    Attributes:
        single_program: one program runs all stages, in one launch.
        block_entries: entries of the batch that a program takes at a time.
        block_nodes: nodes that a program recomputes at a time.
        num_warps: warps of a program.
    """

    single_program: bool
    block_entries: int
    block_nodes: int
    num_warps: int


@dataclass(frozen=True)
class DrawConfig:
    """How a draw from the sum tree is launched.

    Attributes:
        block_draws: draws of one program.
        num_warps: warps of a program.
    """

    block_draws: int
    num_warps: int


@dataclass(frozen=True)
class IndexConfig:
    """How an update of the trajectory index is launched.

    Attributes:
        block_envs: environments of which one program computes all bits and weights; 0: every stage is a launch.
        block_bytes: bytes of end flags, of eight steps each, that a program computes at a time.
        block_weights: weights that a program computes at a time.
        block_nodes: sums that a program recomputes at a time.
        num_warps: warps of a program.
    """

    block_envs: int
    block_bytes: int
    block_weights: int
    block_nodes: int
    num_warps: int


@dataclass(frozen=True)
class SliceConfig:
    """How slices are launched.

    Attributes:
        block_slices: slices of one program.
        block_steps: steps of them that it writes at a time.
        num_warps: warps of a program.
    """

    block_slices: int
    block_steps: int
    num_warps: int


@dataclass(frozen=True)
class BlockConfig:
    """How a kernel over a list of elements, or of rows, is launched.

    Attributes:
        block: elements, or rows, of one program.
        num_warps: warps of a program.
    """

    block: int
    num_warps: int


@dataclass(frozen=True)
class TileConfig:
    """How a kernel over a matrix is launched.

    Attributes:
        block_rows: rows that a program holds at a time.
        block_columns: columns of one program.
        num_warps: warps of a program.
    """

    block_rows: int
    block_columns: int
    num_warps: int


# What can be tuned


def _rows_refusal(config: RowsConfig) -> str:
    return "" if config.tile >= 16 else f"a tile has at least 16 elements, not {config.tile}"


def _index_refusal(config: IndexConfig) -> str:
    fits = config.block_envs >= 0 and config.block_envs & (config.block_envs - 1) == 0
    return "" if fits else f"block_envs must be 0 or a power of two, not {config.block_envs}"


def _fan_out_refusal(config: FanOut) -> str:
    return "" if 2 <= config.fan_out <= 1024 else f"the fan-out must be in 2 .. 1024, not {config.fan_out}"


def _index_tile(sizes: Mapping[str, int], config: IndexConfig) -> int:
    # A thread reads the flags of a byte side by side; of a single step one, but a point for it counts for a few too.
    return max(8 * config.block_bytes, config.block_weights, config.block_envs, sizes["fan_out"] * config.block_nodes)


def _slices_tile(sizes: Mapping[str, int], config: SliceConfig) -> int:
    return config.block_slices * max(config.block_steps, sizes["fan_out"])


def _block_tile(sizes: Mapping[str, int], config: BlockConfig) -> int:
    return config.block


def _rows_tile(name: str) -> Callable[[Mapping[str, int], BlockConfig], int]:
    """The elements of whole rows, as wide as the size called ``name``, rounded up to a power of two."""
    return lambda sizes, config: config.block << max(sizes[name] - 1, 0).bit_length()


SPACES: dict[str, Space] = {
    "rows_copy": Space(
        ("rows",), ("n_bytes",), RowsConfig, tile=lambda sizes, config: config.tile, refusal=_rows_refusal
    ),
    "sum_tree": Space(
        ("sum_tree",), ("capacity",), FanOut, tile=lambda sizes, config: config.fan_out, refusal=_fan_out_refusal
    ),
    "sum_tree_update": Space(
        ("sum_tree",),
        ("fan_out", "n"),
        UpdateConfig,
        tile=lambda sizes, config: max(config.block_entries, config.block_nodes * sizes["fan_out"]),
        exact=("fan_out",),
    ),
    "sum_tree_draw": Space(
        ("sum_tree",),
        ("fan_out", "n"),
        DrawConfig,
        tile=lambda sizes, config: config.block_draws * sizes["fan_out"],
        exact=("fan_out",),
    ),
    "trajectories": Space(
        ("trajectories",), ("words",), FanOut, tile=lambda sizes, config: config.fan_out, refusal=_fan_out_refusal
    ),
    "trajectories_update": Space(
        ("trajectories",),
        ("fan_out", "n", "envs", "by_id"),
        IndexConfig,
        tile=_index_tile,
        exact=("fan_out", "by_id"),
        free=("block_envs",),
        refusal=_index_refusal,
    ),
    "trajectories_draw": Space(
        ("trajectories",), ("fan_out", "n", "slice_len"), SliceConfig, tile=_slices_tile, exact=("fan_out",)
    ),
    "tanh_normal_sample": Space(("tanh_normal",), ("n", "width"), BlockConfig, tile=_block_tile),
    "tanh_normal_backward": Space(("tanh_normal",), ("n",), BlockConfig, tile=_block_tile),
    "loss_rows": Space(("td", "sac", "discrete_sac"), ("n",), BlockConfig, tile=_block_tile),
    "atom_rows": Space(("categorical",), ("n", "atoms"), BlockConfig, tile=_rows_tile("atoms")),
    "norm_rows": Space(("norms",), ("n", "width"), BlockConfig, tile=_rows_tile("width")),
    "norm_columns": Space(
        ("norms",), ("n", "width"), TileConfig, tile=lambda sizes, config: config.block_rows * config.block_columns
    ),
}
"""Every operation that can be tuned, by its name in tuned files."""

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

CHOICES: dict[str, Callable[..., Any]] = {}
"""What chooses the configuration of an operation, given its sizes by their names. Fan-outs are chosen otherwise."""

_explicit: dict[str, Any] = {}
_use_files = True

_Choice = TypeVar("_Choice", bound=Callable[..., Any])
_remembering: list[Any] = []


def remembered(choice: _Choice) -> _Choice:
    """The choice, or what follows from choices, made once for the same arguments until it may change.

    Launches ask every time, and a rule takes microseconds.
    """
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


class _Launches(threading.local):
    in_graph = False


_launches = _Launches()


@contextlib.contextmanager
def launches_in_graph() -> Iterator[None]:
    """What this thread launches goes into a CUDA graph, or warms up for one: a launch will not cost the host anything.

    A capture can't load kernels: what it launches is launched before it, under this too.
    """
    before, _launches.in_graph = _launches.in_graph, True
    try:
        yield
    finally:
        _launches.in_graph = before


def in_graph() -> bool:
    """Whether the caller is within :func:`launches_in_graph`."""
    return _launches.in_graph


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


def tuned(operation: str, device_name: str | None, **sizes: int) -> Any:
    """The configuration of an operation that :func:`using` or a tuned file gives, or None.

    Args:
        operation: a name of :data:`SPACES`.
        device_name: as ``torch.cuda.get_device_name`` gives it; None for the CPU and the interpreter.
        sizes: those that the configuration depends on.
    """
    if operation in _explicit:
        return _explicit[operation]
    if device_name is None or not _use_files:
        return None
    folder = user_folder()
    if folder is None:
        return None
    points = _load(folder / f"{slug(device_name)}.json", device_name).points.get(operation, ())
    point = nearest(points, sizes, SPACES[operation].exact)
    return None if point is None else point.config


def _choice(operation: str) -> Callable[[_Choice], _Choice]:
    """The rule of an operation, asked where neither :func:`using` nor a tuned file has a configuration."""

    def decorate(rule: _Choice) -> _Choice:
        signature = inspect.signature(rule)

        @functools.wraps(rule)
        def chosen(*args: Any, **named: Any) -> Any:
            given = signature.bind(*args, **named)
            given.apply_defaults()
            values = given.arguments
            sizes = {name: int(values[name]) for name in SPACES[operation].sizes}
            found = tuned(operation, values["device_name"], **sizes)
            return rule(*args, **named) if found is None else found

        CHOICES[operation] = made = remembered(cast(_Choice, chosen))
        return made

    return decorate


# The choices


@_choice("rows_copy")
def rows_copy(n_bytes: int, device_name: str | None = None) -> RowsConfig:
    """Launch configuration of a copy of ``n_bytes`` bytes.

    The rule: two elements per thread up to 1 MiB, four beyond, eight from 4 MiB on. A small copy takes as long as a few
    dependent memory accesses, and small tiles use more multiprocessors. A large one keeps all of them busy, and larger
    tiles spread the instructions that find the key.
    """
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


@remembered
def tree_fan_out(capacity: int, device_type: str, device_name: str | None = None, explicit: int | None = None) -> int:
    """Fan-out of a sum tree: children per node, a power of two.

    The rule: 16 on a CPU, one cache line of leaves. On a GPU a level costs a round trip to memory and a wide node costs
    bytes, so it takes the narrowest of :data:`GPU_FAN_OUTS` that makes a tree as shallow as the widest does.

    Raises:
        ValueError: ``explicit`` is not a power of two of at least 2.
    """
    return _fan_out(capacity, device_type, explicit, tuned("sum_tree", device_name, capacity=capacity))


@_choice("sum_tree_update")
def tree_update(fan_out: int, n: int, device_name: str | None = None, in_graph: bool = False) -> UpdateConfig:
    """Launch configuration of an update or a mark of ``n`` rows.

    The rule: one program reads all children through one multiprocessor, so that its time grows with the entries, where
    a launch for each level hardly takes longer for thousands. But an eager launch costs the host more than a small one
    costs the GPU. So one program takes up to 1024 entries, and up to 256 in a graph. Eight warps keep the schedulers of
    its multiprocessor busy; more would only repeat what is the same for every node. Other batches take many programs of
    one warp, which have no barriers; very large ones take larger programs, of which more fit a multiprocessor.
    """
    if n > (256 if in_graph else 1024):
        if n > 2**14:
            return UpdateConfig(False, 256, max(1, min(32, 1024 // fan_out)), 4)
        return UpdateConfig(False, 32, max(1, min(8, 256 // fan_out)), 1)
    if n <= 64:
        return UpdateConfig(True, 64, max(1, min(64, 2048 // fan_out)), 4)
    children = 8192 if fan_out <= 32 else 4096  # registers for the parts of a wide node do not suffice for more
    entries = ceil_power(n) if n <= 256 else 1024
    return UpdateConfig(True, entries, max(1, min(entries, 256, children // fan_out)), 8)


@_choice("sum_tree_draw")
def tree_draw(fan_out: int, n: int, device_name: str | None = None) -> DrawConfig:
    """Launch configuration of ``n`` draws.

    The rule: many small programs while they fit the processor side by side, then programs of up to 512 children. These
    take 4 warps: with fewer, wide nodes spill registers.
    """
    block_draws = max(1, min(4 if n <= 512 else 16, 512 // fan_out))
    return DrawConfig(block_draws=block_draws, num_warps=4 if block_draws * fan_out >= 512 else 1)


def index_words(steps: int, envs: int) -> int:
    """Leaves of the sums of a trajectory index: one for 64 steps of an environment."""
    return -(-steps // 64) * envs


@remembered
def index_fan_out(
    steps: int, envs: int, device_type: str, device_name: str | None = None, explicit: int | None = None
) -> int:
    """Fan-out of the sums of a trajectory index, over its words; see :func:`tree_fan_out`.

    Raises:
        ValueError: ``explicit`` is not a power of two of at least 2.
    """
    words = index_words(steps, envs)
    return _fan_out(words, device_type, explicit, tuned("trajectories", device_name, words=words))


def _floor_power(number: int) -> int:
    return 1 << (number.bit_length() - 1)


def ceil_power(number: int) -> int:
    """The smallest power of two that is at least ``number`` and at least 1."""
    return 1 << max(number - 1, 0).bit_length()


def index_span(n: int, by_id: bool) -> int:
    """Steps that a lane reads the flags of in an update of ``n``: those of its byte, or the one that was written."""
    return 1 if n == 1 and not by_id else 8


@_choice("trajectories_update")
def index_update(
    fan_out: int, n: int, run_words: int, envs: int, by_id: bool = False, device_name: str | None = None
) -> IndexConfig:
    """Launch configuration of an update of ``n`` steps, which lie in ``run_words`` words of each environment.

    The rule: one program does all stages of some environments, up to 512 words, as long as these environments are
    enough for memory accesses side by side. A thread has a byte of bits at a time, or a few children; for the few
    words of a small write of few environments, about as many as these need.
    """
    block_envs = min(ceil_power(envs), _floor_power(max(512 // run_words, 1)), 32)
    few = (run_words + 1) * ceil_power(envs) <= (96 if n == 1 else 16)
    if run_words > 512 or block_envs < min(ceil_power(envs), 32):
        block_envs = 0
    block_nodes = max(1, min(4, 128 // fan_out) if few else (1024 if n == 1 else 256) // fan_out)
    num_warps = 1 if few and n == 1 else 4
    return IndexConfig(block_envs, 32 * num_warps, 32 if few else 32 * num_warps, block_nodes, num_warps)


@_choice("trajectories_draw")
def index_draw(fan_out: int, n: int, slice_len: int, device_name: str | None = None) -> SliceConfig:
    """Launch configuration of ``n`` drawn slices.

    The rule: a slice a program while they all fit the processor side by side, since a warp that draws several takes
    their turns one after the other. Then as :func:`tree_draw`. Up to 64 steps are written at a time.
    """
    block_slices = 1 if n <= 4096 else max(1, min(16, 512 // fan_out))
    return SliceConfig(
        block_slices=block_slices,
        block_steps=min(64, ceil_power(max(slice_len, 8))),
        num_warps=max(1, min(4, block_slices * fan_out // 256)),
    )


@remembered
def index_slices(n: int, slice_len: int) -> SliceConfig:
    """Launch configuration of ``n`` slices from given rows: a warp for up to 32, and up to 256 elements of output."""
    block_steps = min(64, ceil_power(max(slice_len, 8)))
    return SliceConfig(block_slices=min(32, 256 // block_steps), block_steps=block_steps, num_warps=1)


@_choice("tanh_normal_sample")
def tanh_normal_sample(n: int, width: int, device_name: str | None = None) -> BlockConfig:
    """Launch configuration of ``n`` samples of ``width`` numbers. The rule: no more elements than there are."""
    row = ceil_power(width)
    block = row * min(max(TANH_NORMAL_BLOCK // row, 1), ceil_power(n))
    return BlockConfig(block, min(max(block // 256, 1), 8))


@_choice("tanh_normal_backward")
def tanh_normal_backward(n: int, device_name: str | None = None) -> BlockConfig:
    """Launch configuration of the gradients of ``n`` elements."""
    return BlockConfig(TANH_NORMAL_BLOCK, 4)


@_choice("loss_rows")
def loss_rows(n: int, device_name: str | None = None) -> BlockConfig:
    """Launch configuration of a kernel of a loss over ``n`` rows. The rule: one program while it can."""
    block = min(max(ceil_power(n), 32), LOSS_BLOCK)
    return BlockConfig(block, min(max(block // 64, 1), 16))


@_choice("atom_rows")
def atom_rows(n: int, atoms: int, device_name: str | None = None) -> BlockConfig:
    """Launch configuration of ``n`` rows of atoms. The rule: up to 1024 numbers and 32 rows, no more than there are."""
    width = ceil_power(atoms)
    block = max(min(MATRIX_TILE // width, 32, ceil_power(n)), 1)
    return BlockConfig(block, min(max(block * width // 256, 1), 8))


@remembered
def moments_tile(n: int, elements: int) -> TileConfig:
    """Launch configuration of running statistics of ``n`` rows: up to 2048 numbers at a time, eight for a thread."""
    columns = min(MOMENTS_WIDTH, ceil_power(elements))
    rows = min(2048 // columns, ceil_power(n))
    return TileConfig(rows, columns, min(max(rows * columns // 256, 1), 8))


@_choice("norm_rows")
def norm_rows(n: int, width: int, device_name: str | None = None) -> BlockConfig:
    """Launch configuration of layer norm or RMS norm of ``n`` rows of a net. The rule: up to 1024 numbers at a time."""
    row = ceil_power(width)
    block = min(max(MATRIX_TILE // row, 1), ceil_power(n))
    return BlockConfig(block, min(max(block * row // 256, 1), 8))


@_choice("norm_columns")
def norm_columns(n: int, width: int, device_name: str | None = None) -> TileConfig:
    """Launch configuration of batch norm of ``n`` rows of a net.

    The rule: columns of a whole line of the cache in float32, and up to 1024 numbers at a time.
    """
    columns = min(32, ceil_power(width))
    rows = min(MATRIX_TILE // columns, ceil_power(max(n, 1)))
    return TileConfig(rows, columns, min(max(rows * columns // 256, 1), 4))
