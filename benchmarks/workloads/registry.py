"""Every workload, by name: its sizes, the libraries that can do it, its traffic, and how to fill, check and time it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.measure import roofline
from benchmarks.measure.roofline import Traffic
from benchmarks.peers.array_libraries import Flashbax, StableBaselines
from benchmarks.peers.libraries import Cpprb, Gpubuf, GpubufGraph, Library, TorchRL, UnavailableError
from benchmarks.peers.sources import TRANSITIONS, transitions_layout
from benchmarks.workloads import losses, sac
from benchmarks.workloads.placements import OVER_THE_BUS, PLACEMENTS
from benchmarks.workloads.replay import (
    PRIORITIZED_SAMPLE,
    SAMPLE_AND_UPDATE,
    UNIFORM_SAMPLE,
    WORKLOADS,
    Operation,
    Workload,
)
from benchmarks.workloads.slice_buffers import VARIANTS, SliceBuffer
from benchmarks.workloads.slices import SLICES, SliceWorkload
from benchmarks.workloads.sweeps import AXES, Axis, too_large

LIBRARIES: dict[str, type[Library]] = {
    library.name: library for library in (Gpubuf, GpubufGraph, TorchRL, Cpprb, Flashbax, StableBaselines)
}
#: The names of the libraries in pictures and tables, by their names in files of results; in the order of columns.
TITLES = {
    Gpubuf.name: Gpubuf.title,
    GpubufGraph.name: GpubufGraph.title,
    "gpubuf-random": "gpubuf without an index",
    **{name: placed.title for name, placed in PLACEMENTS.items()},
    TorchRL.name: TorchRL.title,
    "torchrl-uncached": "TorchRL, uncached",
    **{library.name: library.title for library in (Cpprb, Flashbax, StableBaselines)},
    "plain": "plain PyTorch",
}
#: Operations that are also measured as replays of a graph. The others take arguments, which would be copied first.
GRAPHED = (UNIFORM_SAMPLE, PRIORITIZED_SAMPLE, SAMPLE_AND_UPDATE)
PEERS = ("torchrl", "cpprb", "flashbax", "sb3")


def environment(library: str) -> str:
    """In which environment a library runs: ``torchrl-uncached`` in ``torchrl``, all of ours in ``gpubuf``."""
    name = library.partition("-")[0]
    return name if name in PEERS else "gpubuf"


@dataclass(frozen=True)
class Sizes:
    """How large a workload is: rows of the buffer, rows of a batch, bytes of a row."""

    capacity: int
    batch: int
    row_bytes: int


@dataclass(frozen=True)
class Entry:
    """One workload of the registry.

    Attributes:
        name: the group of its benchmarks, and the key in files of results.
        title: for people.
        libraries: who is asked to do it; who can't says so.
        sizes: how large it is.
        fill: makes what ``prepare`` gets, of (library, device). It raises UnavailableError where that can't be.
        prepare: checks against the oracle, and returns the call to time; of (the filled buffer, library, device).
        contents: equal for two workloads that can share a filled buffer; of the library.
        traffic: the least work of a call, of (library, device); None: not counted.
        axis: the name of the axis that it is a point of; empty: it stands in the tables.
        operation: for people; the curve that a point belongs to.
        value: where on the axis.
        quick: part of a quick run.
        huge: takes gigabytes and minutes.
        turn: when, among those that share a buffer.
        devices: where it makes sense.
        extra: further entries of the file of results, of (the filled buffer, library).
        workload: of replay: the buffer, and the operation on it.
    """

    name: str
    title: str
    libraries: tuple[str, ...]
    sizes: Sizes
    fill: Callable[[str, str], Any]
    prepare: Callable[[Any, str, str], Callable[[], object]]
    contents: Callable[[str], Hashable]
    traffic: Callable[[str, str], Traffic] | None = None
    axis: str = ""
    operation: str = ""
    value: int = 0
    quick: bool = True
    huge: bool = False
    turn: int = 0
    devices: tuple[str, ...] = ("cpu", "cuda")
    extra: Callable[[Any, str], dict[str, Any]] = field(default=lambda filled, library: {})
    workload: Workload | None = None

    @property
    def between(self) -> bool:
        """Whether networks are updated before each call."""
        return self.workload is not None and self.workload.operation.between


# Replay


def _fill(workload: Workload, library: str, device: str) -> Library:
    reason = too_large(library, workload)
    if reason:
        raise UnavailableError(reason)
    kinds = PLACEMENTS if library in PLACEMENTS else LIBRARIES
    return kinds[library](workload.source(), workload.operation.prioritized, device)


def _replay(workload: Workload, libraries: tuple[str, ...], **more: Any) -> Entry:
    name = more.pop("name", workload.name)
    return Entry(
        name,
        more.pop("title", f"{workload.operation.title}, {workload.batch}"),
        libraries,
        Sizes(workload.capacity, workload.batch, workload.layout.row_bytes),
        partial(_fill, workload),
        lambda filled, library, device: workload.prepare(filled),
        lambda library: (library, workload.source(), workload.operation.prioritized),
        more.pop("traffic", lambda library, device: workload.traffic(device)),
        operation=workload.operation.title,
        quick=more.pop("quick", workload.batch <= 256),
        turn=workload.operation.turn,
        workload=workload,
        devices=more.pop("devices", workload.operation.devices),
        **more,
    )


def _libraries(operation: Operation) -> tuple[str, ...]:
    graphed = ("gpubuf-graph",) if operation in GRAPHED else ()
    return ("gpubuf", *graphed, *PEERS)


def _points(axis: Axis) -> Iterator[Entry]:
    for operation in axis.operations:
        for value in axis.values:
            workload = axis.workload(operation, value)
            yield _replay(
                workload,
                _libraries(operation),
                name=axis.name_of(operation, value),
                title=f"{operation.title}, {axis.name} {value:,}",
                axis=axis.name,
                value=value,
                quick=value in axis.quick,
                huge=workload.capacity >= 50_000_000,
            )


# Rows that are not all on the GPU


def _placement(batch: int) -> Entry:
    # An observation and the next one of 2 KiB each: rows of 4 KiB, and a GiB of them.
    layout = transitions_layout(512, 1)
    workload = Workload(UNIFORM_SAMPLE, batch, (1 << 30) // layout.row_bytes // 64 * 64, layout)

    def traffic(library: str, device: str) -> Traffic:
        over = int(batch * layout.row_bytes * OVER_THE_BUS[library])
        on_gpu = workload.traffic(device)
        return Traffic(on_gpu.bytes - over, on_gpu.launches, over)

    return _replay(
        workload,
        tuple(PLACEMENTS),
        name=f"placement-{batch}",
        title=f"uniform sample, {batch}, rows of 4 KiB by where they lie",
        traffic=traffic,
        devices=("cuda",),
    )


# Soft actor-critic

#: How the contenders of the study of losses are called here.
_SAC = {"gpubuf": losses.OURS, "torchrl": losses.TORCHRL, "plain": losses.BY_HAND}


def _sac_loss(library: str, rows: int, device: str) -> Callable[[], object]:
    return losses.prepare("sac", _SAC[library], rows, device)


def _sac(name: str, title: str, prepare: Callable[..., Any], libraries: tuple[str, ...], rows: int) -> Entry:
    return Entry(
        f"{name}-{rows}",
        f"{title}, {rows}",
        libraries,
        Sizes(sac.STORED if "update" in name else rows, rows, TRANSITIONS.row_bytes),
        lambda library, device: None,
        lambda filled, library, device: prepare(library, rows, device),
        lambda library: (name, library),
        operation=title,
        quick=rows == 256,
    )


# Slices


def slice_contents(workload: SliceWorkload, variant: str) -> Hashable:
    """Equal for two workloads that can share a buffer: a sampler's options may differ, its kind may not."""
    return VARIANTS[variant].module, VARIANTS[variant].slices, workload.scene


def _prepare_slices(workload: SliceWorkload, filled: SliceBuffer, variant: str, device: str) -> Callable[[], object]:
    filled.use(variant)
    return workload.operation(filled)


def _index_bytes(filled: SliceBuffer, variant: str) -> dict[str, Any]:
    return {"index_bytes_per_row": filled.index_bytes()} if variant == "gpubuf" else {}


def _slice_traffic(workload: SliceWorkload) -> Traffic:
    """The rows, and two launches for a batch and for a write each: one for the rows, one for the index of them."""
    scene, total = workload.scene, Traffic(0, 0)
    if "sample" in workload.name:
        total += roofline.gather(scene.batch_size, scene.row_bytes) + Traffic(0, 1)
    if "write" in workload.name or "filling" in workload.name:
        total += roofline.write(scene.at_a_time * scene.envs, scene.row_bytes) + Traffic(0, 1)
    return total


def _slices(workload: SliceWorkload) -> Entry:
    scene = workload.scene
    return Entry(
        workload.name,
        workload.title,
        workload.variants,
        Sizes(scene.capacity * scene.envs, scene.batch_size, scene.row_bytes),
        lambda variant, device: SliceBuffer(variant, scene, device),
        partial(_prepare_slices, workload),
        partial(slice_contents, workload),
        None if scene.prioritized else lambda library, device: _slice_traffic(workload),
        operation="slices",
        quick=scene.capacity * scene.envs <= 200_000,
        huge=workload.huge,
        turn=int("write" in workload.name),
        extra=_index_bytes,
    )


_ENTRIES: tuple[Entry, ...] = (
    *(_replay(workload, _libraries(workload.operation)) for workload in WORKLOADS.values()),
    *(_sac("SAC-loss-and-backward", "SAC loss and backward", _sac_loss, tuple(_SAC), rows) for rows in (256, 1024)),
    _sac("SAC-update", "SAC update", sac.prepare_update, ("gpubuf", "gpubuf-graph", "torchrl"), 256),
    *(_slices(workload) for workload in SLICES.values()),
    *(_placement(batch) for batch in (256, 4096)),
    *(point for axis in AXES for point in _points(axis)),
)
#: By name.
REGISTRY = {entry.name: entry for entry in _ENTRIES}


def in_order(entries: list[Entry], libraries: Callable[[str], bool] = lambda library: True) -> list[tuple[str, str]]:
    """Names of workloads and libraries in the order to run them: those that share a buffer in a row, reads first."""
    pairs = [(entry, library) for entry in entries for library in entry.libraries if libraries(library)]
    places: dict[Hashable, int] = {}
    for entry, library in pairs:
        places.setdefault(entry.contents(library), len(places))
    pairs.sort(key=lambda pair: (places[pair[0].contents(pair[1])], pair[0].turn))
    return [(entry.name, library) for entry, library in pairs]


class LastFilled:
    """The buffer that was filled last, for the next benchmark that begins with the same; one at a time in memory."""

    def __init__(self) -> None:
        self.contents: Hashable = None
        self.filled: Any = None
        self.refused: UnavailableError | None = None

    def get(self, entry: Entry, library: str, device: str) -> Any:
        """The buffer that the workload needs. The one before it is gone by then.

        Raises:
            UnavailableError: the library can't do it here; said again at every workload of these contents.
        """
        wanted = entry.contents(library)
        if self.contents != wanted:
            self.filled = self.refused = None
            self.contents = wanted
            try:
                self.filled = entry.fill(library, device)
            except UnavailableError as error:
                self.refused = error
            except BaseException:
                # Not half a buffer for the next: it fails by itself, and says why.
                self.contents = None
                raise
        if self.refused is not None:
            raise self.refused
        return self.filled
