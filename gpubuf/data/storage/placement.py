"""The placement of a buffer: on the GPU, in pinned host memory that the GPU reads, in both, or on the CPU."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass

import torch

from gpubuf.data.storage import host_memory
from gpubuf.data.storage.host_memory import Free

logger = logging.getLogger("gpubuf")

AUTO, PINNED, SPLIT, DISK = "auto", "pinned", "split", "disk"

_WITH_KERNELS = ("cpu", "cuda")
"""Types of devices that have kernels here."""

SPLIT_STEPS = 64
"""The steps on the GPU are a multiple of this: the trajectory index reads the flags of so many steps as one word."""

CHECKED_BYTES = 1 << 28
"""Rows on the host of so many bytes and more are compared with what there is before it is taken."""

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
_FACTORS = {"": 1} | {
    f"{prefix}{kind}": base ** (power + 1)
    for power, prefix in enumerate("KMGTP")
    for kind, base in (("", 1000), ("B", 1000), ("iB", 1024))
}


def readable(n_bytes: int) -> str:
    """A number of bytes for people: ``"1.5 GiB"``."""
    unit = min(max(n_bytes.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{n_bytes} bytes" if unit == 0 else f"{n_bytes / 1024**unit:.4g} {_UNITS[unit]}"


def parse_bytes(budget: int | str) -> int:
    """A number of bytes: ``24_000_000_000``, ``"24GB"`` (10^9) or ``"24GiB"`` (2^30).

    Raises:
        ValueError: it is of another form, or not positive.
    """
    n_bytes = budget if isinstance(budget, int) else 0
    if isinstance(budget, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGTP]?(?:i?B)?)", budget.strip())
        if match is not None:
            n_bytes = math.floor(float(match[1]) * _FACTORS.get(match[2].removeprefix("B") or "", 0))
    if n_bytes < 1:
        raise ValueError(f"expected a number of bytes such as 24GiB or 500MB, got {budget!r}")
    return n_bytes


@dataclass(frozen=True)
class IndexBytes:
    """Bytes that a sampler takes beside the rows.

    Attributes:
        tree: of the sum tree over the priorities.
        index: of the trajectory index, of eligible starts, of the order of an epoch.
    """

    tree: int = 0
    index: int = 0

    @property
    def total(self) -> int:
        """Both."""
        return self.tree + self.index

    def __add__(self, other: IndexBytes) -> IndexBytes:
        return IndexBytes(self.tree + other.tree, self.index + other.index)


@dataclass(frozen=True)
class Placement:
    """The place of a storage.

    Attributes:
        kind: ``"cpu"``, ``"cuda"``, ``"pinned"``, ``"split"``, or the type of another device.
        device: where the work is done, ring, tree and index are, and batches come out.
        why: why it lies there.
        near_steps: of ``"split"``: how many steps, the first ones, are on the device.
    """

    kind: str
    device: torch.device
    why: str = "asked for"
    near_steps: int = 0

    @property
    def rows_device(self) -> torch.device:
        """The device of the rows, or of the first ones with ``"split"``."""
        return torch.device("cpu") if self.kind == PINNED else self.device

    @property
    def rows_on_host(self) -> bool:
        """Whether rows are in pinned host memory, all or some: another device than this one works on them."""
        return self.kind in (PINNED, SPLIT)

    def on_host(self, steps: int) -> float:
        """The share of so many steps that is in pinned host memory."""
        return 1 - self.near_steps / steps if self.rows_on_host else 0.0

    def same_place(self, other: Placement) -> bool:
        """Whether everything lies where another placement has it."""
        return (self.kind, self.device, self.near_steps) == (other.kind, other.device, other.near_steps)

    def __str__(self) -> str:
        where = {
            PINNED: f"rows in pinned host memory, all else on {self.device}",
            SPLIT: f"{self.near_steps} steps on {self.device}, the others in pinned host memory",
        }
        return f"{where.get(self.kind, self.device)} ({self.why})"


@dataclass(frozen=True)
class MemoryReport:
    """Bytes in each memory.

    Attributes:
        placement: where the rows are: ``"cpu"``, ``"cuda"``, ``"pinned"``, ``"split"``, or ``"disk"`` for mapped files;
            None before the first write.
        device: where all else is; None before the first write.
        rows: of the rows.
        tree: of the sum tree.
        index: of the trajectory index, of eligible starts, of the order of an epoch.
        counters: of the ring's counters, the table of addresses and the random state.
        rows_on_host: of those rows of ``"split"`` that are in pinned host memory; they are part of ``rows``.
        batches: of the slots on a GPU that batches are made in, with those that somebody holds.
    """

    placement: str | None
    device: str | None
    rows: int
    tree: int
    index: int
    counters: int
    rows_on_host: int = 0
    batches: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.rows + self.tree + self.index + self.counters + self.batches

    def __str__(self) -> str:
        if self.placement is None:
            return "nothing is allocated before the first write"
        rows = {PINNED: "in pinned host memory", DISK: "in mapped files"}.get(self.placement, f"on {self.device}")
        if self.placement == SPLIT:
            near = self.rows - self.rows_on_host
            rows = f"({readable(near)} on {self.device}, {readable(self.rows_on_host)} in pinned host memory)"
        lines = [f"rows      {readable(self.rows)} {rows}"]
        lines += [
            f"{name:<9} {readable(getattr(self, name))} on {self.device}"
            for name in ("tree", "index", "counters", *(["batches"] if self.batches else []))
        ]
        return "\n".join(lines)


class NothingFitsError(MemoryError, RuntimeError):
    """There is no room for a buffer anywhere; the text says how much there is, and what to do."""


def choose(rows: int, index: int, capacity: int, free: Free) -> tuple[str, str]:
    """Where ``device="auto"`` puts a buffer, and why. A pure function.

    On the GPU if rows and index fit there; else the rows go to pinned host memory, and the index to the GPU; else, as
    the host has not enough either, as many rows as possible go to the GPU, too. Only a machine without CUDA uses its
    ordinary memory.

    Args:
        rows: bytes of the rows.
        index: bytes of tree, trajectory index and the like.
        capacity: number of rows.
        free: what may be taken.

    Returns:
        ``"cuda"``, ``"pinned"``, ``"split"`` or ``"cpu"``, and the reason.

    Raises:
        NothingFitsError: none of them has room.
    """
    need = f"{readable(rows)} of rows and {readable(index)} of index"
    host = f"{readable(free.host)} free on the host"
    if free.device is None:
        if rows + index <= free.host:
            return "cpu", f"there is no CUDA device; {need}, {host}"
        found, most = host, free.host - index
    else:
        device = f"{readable(free.device)} free on the GPU"
        if rows + index <= free.device:
            return "cuda", f"{need}, {device}"
        if index <= free.device and rows <= free.host:
            return PINNED, f"{need} exceed {device}; {host}"
        if index <= free.device and rows + index <= free.device + free.host:
            return SPLIT, f"{need} exceed {device}, and {host}"
        found, most = f"{device} and {host}", free.device + free.host - index if index <= free.device else 0
    fitting = max(most, 0) * capacity // max(rows, 1)
    raise NothingFitsError(
        f"a buffer of {capacity} rows fits nowhere: {need} are needed, there are {found} (a tenth of all memory is "
        f"left to others). Ways out: a smaller capacity (about {min(fitting, capacity)} rows fit); smaller rows, such "
        "as uint8 images, fewer keys, and observations stored once, by share_next=True (gpubuf.plan says what each "
        "takes); or rows on disk, in a LazyMemmapStorage"
    )


def check_host_room(n_bytes: int, what: str) -> None:
    """Raise before memory is touched that the host does not have: Linux gives out more, and kills who uses it.

    Raises:
        NothingFitsError: ``what`` takes more than is free.
    """
    if n_bytes > (free := host_memory.host_memory()[0]):
        raise NothingFitsError(f"{what} takes {readable(n_bytes)}, there are {readable(free)} free on the host")


def working_device(requested: torch.device | str) -> torch.device:
    """The device that does the work for a placement asked for by name; not ``"auto"``."""
    kind = str(requested if isinstance(requested, str) else torch.device(requested)).partition(":")[0]
    if kind in (PINNED, SPLIT):
        return torch.device("cuda")
    return torch.device(requested if kind in _WITH_KERNELS else "cpu")


def batch_device(requested: torch.device | str) -> torch.device | None:
    """The device that batches are copied to, one without kernels here, such as MPS and XPU; None: they stay."""
    kind = str(requested if isinstance(requested, str) else torch.device(requested)).partition(":")[0]
    return None if kind in _WITH_KERNELS or kind in (AUTO, PINNED, SPLIT) else torch.device(requested)


def wants_split(requested: torch.device | str) -> bool:
    """Whether a placement asked for by name is ``"split"``, with or without a size."""
    return isinstance(requested, str) and requested.partition(":")[0] == SPLIT


def depends_on_room(requested: torch.device | str) -> bool:
    """Whether a placement goes by what fits."""
    return requested == AUTO or wants_split(requested)


def near_steps(requested: str, rows: int, steps: int, room: int) -> int:
    """How many steps ``"split"`` puts on the GPU. A pure function.

    Args:
        requested: ``"split"`` for as many as there is room for, ``"split:20GiB"`` for so many bytes of rows, or
            ``"split:30%"`` for a share of them.
        rows: bytes of all rows.
        steps: number of steps.
        room: bytes free on the GPU for rows.

    Returns:
        All steps, or a multiple of :data:`SPLIT_STEPS`.

    Raises:
        ValueError: the size is of another form.
        RuntimeError: there is less room than was asked for.
    """
    size = requested.partition(":")[2]
    if size.endswith("%"):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)%", size)
        if match is None or float(match[1]) > 100:
            raise ValueError(f"expected a share of at most 100%, such as split:30%, got {requested!r}")
        wanted = int(rows * float(match[1]) / 100)
    elif size:
        wanted = min(parse_bytes(size), rows)
    else:
        wanted = max(min(rows, room), 0)
    if wanted > max(room, 0):
        raise RuntimeError(
            f"{requested!r} puts {readable(wanted)} of rows on the GPU, there is room for {readable(room)}"
        )
    if wanted == rows:
        return steps
    return wanted * steps // rows // SPLIT_STEPS * SPLIT_STEPS


def named(requested: torch.device | str) -> torch.device:
    """The device that does the work for a placement asked for by name, checked to exist.

    Raises:
        RuntimeError: there is no such device.
    """
    device = working_device(requested)
    if device.type != "cuda":
        return device
    try:
        # Tensors report an index; a device without one would compare unequal to theirs.
        return torch.empty(0, device=device).device
    except (AssertionError, RuntimeError) as error:
        raise RuntimeError(
            f"device={str(requested)!r} was asked for, but this machine has no {device}: {error}. 'auto' takes what "
            "there is"
        ) from error


def place(
    requested: torch.device | str,
    rows: int,
    index: IndexBytes,
    shape: tuple[int, ...],
    data_device: torch.device,
    held: int = 0,
    aside: int = 0,
) -> Placement:
    """Choose the place of a buffer that is about to be allocated. Logs an automatic choice.

    Args:
        requested: ``"auto"``, ``"pinned"``, ``"split"`` (see :func:`near_steps`), or a device.
        rows, index: as for :func:`choose`.
        shape: of the storage.
        data_device: where the first batch is: of several GPUs ``"auto"`` takes that one, else the current one.
        held: bytes of rows on the GPU that the buffer gives up on the way.
        aside: bytes that belong to the rows, but are on the GPU as a whole if these are split.

    Raises:
        NothingFitsError: ``"auto"``, and there is no room anywhere; or the rows are to be on the host, which has less.
        RuntimeError: the device that was asked for does not exist.
        ValueError: the size of a split is of no known form.
    """
    if wants_split(requested):
        device = named(requested)
        room = host_memory.free(device).device or 0
        return _split(str(requested), rows, shape[0], room + held - index.total - aside, device, "asked for")
    capacity = math.prod(shape)
    if requested != AUTO:
        device, goal = named(requested), batch_device(requested)
        if rows + aside >= CHECKED_BYTES and (requested == PINNED or device.type == "cpu"):
            check_host_room(rows + aside, f"a buffer of {capacity} rows for device={str(requested)!r}")
        why = f"asked for; batches are copied to {goal}" if goal else "asked for"
        return Placement(PINNED if requested == PINNED else device.type, device, why)
    if host_memory.cuda_present():
        device = named(data_device if data_device.type == "cuda" else "cuda")
        free = host_memory.free(device)
    else:
        device, free = torch.device("cpu"), host_memory.free()
    kind, why = choose(rows + aside, index.total, capacity, free)
    why = f"chosen automatically: {why}"
    if kind == SPLIT:
        placement = _split(SPLIT, rows, shape[0], (free.device or 0) - index.total - aside, device, why)
    else:
        placement = Placement(kind, device, why)
    # Rows that did not fit on the GPU cost speed: that is shown also where nobody has set up logging.
    level = logging.WARNING if placement.rows_on_host else logging.INFO
    logger.log(level, "replay buffer of %d rows: %s", capacity, placement)
    return placement


def _split(requested: str, rows: int, steps: int, room: int, device: torch.device, why: str) -> Placement:
    near = near_steps(requested, rows, steps, room)
    if near == steps:
        return Placement(device.type, device, why)
    return Placement(SPLIT, device, why, near) if near else Placement(PINNED, device, why)


def device_name(device: torch.device | str) -> str | None:
    """Name of a GPU (of the current one, without an index), by which tuned configurations are found; None elsewhere."""
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" and host_memory.cuda_present() else None
