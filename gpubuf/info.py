"""The machine as gpubuf finds it: devices, versions, tuned files, and the features that work."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

import gpubuf
from gpubuf.data.storage import host_memory
from gpubuf.data.storage.lazy import LazyTensorStorage
from gpubuf.data.storage.placement import readable
from gpubuf.kernels import _tuned
from gpubuf.kernels._jit import dispatcher_of, machine_code
from gpubuf.kernels._registry import compiled
from gpubuf.kernels.config import SPACES
from gpubuf.terminal import aligned

PACKAGES = ("torch", "triton", "tensordict", "numba", "numpy", "safetensors")


@dataclass(frozen=True)
class Device:
    """A GPU.

    Attributes:
        name: as its driver says; tuned files are named after it.
        capability: its architecture, such as ``"sm_90"`` or ``"gfx942"``.
        processors: number of its multiprocessors.
        free: bytes of its memory that can be had.
        total: bytes of its memory.
    """

    name: str
    capability: str
    processors: int
    free: int
    total: int


@dataclass(frozen=True)
class TunedFile:
    """A file of tuned configurations.

    Attributes:
        path: where it is.
        device: the device it is for; "" where it can't be read.
        date: when it was made, as it says.
        points: number of its points that can be used.
        state: whether it is used here, and what of it is not.
    """

    path: Path
    device: str
    date: str
    points: int
    state: str


@dataclass(frozen=True)
class Check:
    """Something that was tried.

    Attributes:
        name: what.
        works: None where it could not be tried.
        why: the fault, or why it could not be tried; "" if it works.
    """

    name: str
    works: bool | None
    why: str = ""


@dataclass(frozen=True)
class Info:
    """The findings; ``str()`` gives tables, :meth:`as_json` the same for programs.

    Attributes:
        versions: of Python and the packages; None if one is not installed.
        devices: the GPUs.
        no_gpu: why there is none; "" where there is.
        host: (free, total) bytes of host memory.
        tuned: tuned files.
        folders: where they are looked for; none without a home.
        checks: the features that were tried on the current GPU.
        needs: what Triton's first launch on a GPU needs of the host, looked for also where there is no GPU.
        caches: where compiled kernels are kept.
    """

    versions: dict[str, str | None]
    devices: tuple[Device, ...]
    no_gpu: str
    host: tuple[int, int]
    tuned: tuple[TunedFile, ...]
    folders: tuple[Path, ...]
    checks: tuple[Check, ...]
    needs: tuple[Check, ...]
    caches: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON has it: bytes as numbers, paths as text."""
        found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self), default=str))
        return found

    def tables(self) -> list[list[tuple[str, ...]]]:
        """Lines of cells, each table under its heading."""
        versions = [(name, version or "not installed") for name, version in self.versions.items()]
        devices = [
            (device.name, device.capability, f"{device.processors}", readable(device.free), readable(device.total))
            for device in self.devices
        ]
        host = [("host", platform.machine(), "", *map(readable, self.host))]
        none = [] if self.devices else [("no GPU", self.no_gpu, "", "", "")]
        tuned = [(file.path.name, file.device, file.date, f"{file.points}", file.state) for file in self.tuned]
        if not tuned:
            tuned = [("none", "", "", "", "")]
        folders = [(f"compiled for {name}", path) for name, path in self.caches.items()]
        folders += [
            ("tuned files", str(path)) for path in dict.fromkeys((*self.folders, *(f.path.parent for f in self.tuned)))
        ]
        works = {None: "not tried", True: "yes", False: "no"}
        checks, needs = (
            [(check.name, works[check.works], check.why) for check in some] for some in (self.checks, self.needs)
        )
        return [
            [("package", "version"), *versions],
            [("device", "architecture", "processors", "free", "memory"), *devices, *none, *host],
            [("tuned file", "device", "made", "points", "used"), *tuned],
            [("on this GPU", "works", "why not"), *checks],
            [("the first launch needs", "found", "what is missing"), *needs],
            # Paths have lines of their own: they are of any length.
            [("folders",), *((line,) for name, path in folders for line in (name, f"  {path}"))],
        ]

    def __str__(self) -> str:
        return "\n\n".join(map(aligned, self.tables()))


def info() -> Info:
    """Look at this machine. On a GPU it tries a CUDA graph and a gather from pinned memory, and synchronises."""
    no_gpu = why_no_gpu()
    devices = () if no_gpu else tuple(_device(number) for number in range(torch.cuda.device_count()))
    return Info(
        versions=_versions(),
        devices=devices,
        no_gpu=no_gpu,
        host=host_memory.host_memory(),
        tuned=tuned_files({device.name for device in devices}),
        folders=tuple(filter(None, [_tuned.user_folder()])),
        checks=(
            _check("CUDA graphs", _try_graph, no_gpu),
            _check("gathers from pinned memory", _try_pinned_gather, no_gpu),
        ),
        # The launcher is a piece of C that Triton compiles then, against Python's headers.
        needs=(_check("a C compiler", _find_compiler), _check("Python.h", _find_header)),
        caches={"CPU": _of(_cpu_kernels), "Triton": _of(_triton_cache)},
    )


def why_no_gpu() -> str:
    """Why there is no GPU to work on; "" where there is one."""
    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA"
    return f"torch {torch.__version__} finds no GPU"


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"gpubuf": gpubuf.__version__, "Python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    # The package's metadata says 2.11.0, and this says 2.11.0+cu130.
    found["torch"] = str(torch.__version__)
    built_for = torch.version.cuda or torch.version.hip
    found["torch is built for"] = "CPUs only" if built_for is None else built_for
    return found


def _device(number: int) -> Device:
    device = torch.device("cuda", number)
    properties = torch.cuda.get_device_properties(device)
    architecture = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
    free, total = host_memory.device_memory(device)
    return Device(
        torch.cuda.get_device_name(device),
        architecture.partition(":")[0] or f"sm_{properties.major}{properties.minor}",
        properties.multi_processor_count,
        free,
        total,
    )


def tuned_files(devices: set[str]) -> tuple[TunedFile, ...]:
    """All tuned files, and whether they are used on a machine with these devices."""
    folder = _tuned.user_folder()
    read = [_tuned.read(path, SPACES) for path in sorted(folder.glob("*.json"))] if folder is not None else []
    return tuple(
        TunedFile(file.path, file.device, str(file.made.get("date", "")), file.n_points, _state(file, devices))
        for file in read
    )


def _state(file: _tuned.TunedFile, devices: set[str]) -> str:
    if file.device and _tuned.slug(file.device) != file.path.stem:
        return "no: it is not named after its device"
    if not file.n_points:
        return f"no: {file.problems[0] if file.problems else 'it has no points'}"
    used = "yes" if file.device in devices else "no: for a device that is not here"
    return used + (f"; ignored: {'; '.join(file.problems)}" if file.problems else "")


def _check(name: str, attempt: Callable[[], None], no_gpu: str = "") -> Check:
    if no_gpu:
        return Check(name, None, no_gpu)
    try:
        attempt()
    # Whatever it is that does not work here: that is the answer.
    except Exception as error:
        return Check(name, False, f"{type(error).__name__}: {error}".partition("\n")[0])
    return Check(name, True)


def _try_graph() -> None:
    counter = torch.zeros(1, device="cuda")
    step = gpubuf.capture(lambda: counter.add_(1), warmup=1)
    for _ in range(3):
        step()
    if not step.captured or counter.item() != 3:
        raise RuntimeError(f"a step that adds 1 was captured and called 3 times, and made {counter.item()}")


def _try_pinned_gather() -> None:
    storage = LazyTensorStorage(64, device="pinned")
    storage.append(TensorDict({"row": torch.arange(64, device="cpu")}, [64]))
    index = torch.tensor([5, 63, 0, 5], device=storage.device)
    (found,), _ = storage.plans.batch.gather(index)
    if found.tolist() != index.tolist():
        raise RuntimeError(f"rows {index.tolist()} were gathered as {found.tolist()}")


def _find_compiler() -> None:
    # As Triton looks for it.
    named = os.environ.get("CC")
    if named is None and not any(map(shutil.which, ("gcc", "clang"))):
        raise FileNotFoundError("neither gcc nor clang is on the PATH, and CC is not set")
    if named is not None and shutil.which(named) is None:
        raise FileNotFoundError(f"CC is {named!r}, which is no program")


def _find_header() -> None:
    scheme = sysconfig.get_default_scheme()
    # Where Debian's own Python has its headers, whatever it says; Triton looks there.
    folder = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
    if not (Path(folder) / "Python.h").is_file():
        raise FileNotFoundError(f"{folder} has no Python.h: install the development files of this Python")


def _of(where: Callable[[], str]) -> str:
    try:
        return where()
    except Exception as error:
        return f"unknown ({type(error).__name__}: {error})".partition("\n")[0]


def _cpu_kernels() -> str:
    if (code := machine_code()) is not None:
        return str(code.__file__)
    if not compiled():
        return "none: Numba is not installed, so that plain PyTorch does the CPU's work, which is slower"
    from gpubuf.kernels.philox._numba_kernels import uniform

    return str(dispatcher_of(uniform.function, cached=True)._cache.cache_path)


def _triton_cache() -> str:
    import triton

    folder: str = triton.knobs.cache.dir
    return folder
