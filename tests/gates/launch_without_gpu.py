"""Launches kernels twice, by Triton's own path and by ``gpubuf.kernels._launching``, over a driver that does nothing.

Run as ``python -m tests.gates.launch_without_gpu kernels`` or ``fallbacks``, in a process without the interpreter. It
prints one line of JSON: what came of each check, by name.
"""

from __future__ import annotations

import functools
import json
import sys
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime import driver

from gpubuf.kernels import _launching
from gpubuf.kernels._launching import Variant, launch, variant_of
from tests.gates.aot.operations import FAMILIES
from tests.gates.aot.recorder import Recorder
from tests.support.no_gpu import install


@triton.jit
def scale_kernel(x_ptr, y_ptr, n, factor, block: tl.constexpr, limit: tl.constexpr):
    lanes = tl.program_id(0) * block + tl.arange(0, block)
    x = tl.load(x_ptr + lanes, lanes < n)
    tl.store(y_ptr + lanes, tl.minimum(x * factor, limit), lanes < n)


class Watch:
    """What Triton's launcher is called with, and how often Triton's own path is taken."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.by_triton = 0
        run, utils, watch = triton.JITFunction.run, driver.active.utils, self

        def noted(launched: Any) -> Any:
            def call(*args: Any) -> None:
                watch.calls.append(plain(args))
                launched(*args)

            return call

        if hasattr(utils, "launch"):
            utils.launch = noted(utils.launch)
        else:
            # Triton 3.6 makes a launcher of each kernel.
            made = CudaLauncher.__init__

            def made_and_noted(launcher: Any, *args: Any) -> None:
                made(launcher, *args)
                launcher.launch = noted(launcher.launch)

            CudaLauncher.__init__ = made_and_noted

        def counted(*args: Any, **kwargs: Any) -> Any:
            watch.by_triton += 1
            return run(*args, **kwargs)

        # As if it were Triton's, so that launches are still taken over.
        triton.JITFunction.run = _launching._run = counted

    def of(self, call: Any) -> tuple[list[Any], int]:
        """Launches that a call makes, and how many of them take Triton's own path."""
        before, by_triton = len(self.calls), self.by_triton
        call()
        return self.calls[before:], self.by_triton - by_triton


def plain(value: Any) -> Any:
    """Tensors as addresses; annotations of arguments, which are objects without equality, and empty hooks left out."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return value if isinstance(value, (int, float, bytes, str)) else None


class Twice(Recorder):
    """Launches every kernel by Triton's path and directly, with the arguments of its first ahead-of-time call."""

    direct = staticmethod(Variant.launch)

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch
        self.kernels: set[str] = set()
        self.differing: list[str] = []
        self.slow: list[str] = []

    def _note(self, variant: Variant, programs: int, arguments: tuple[Any, ...]) -> None:
        name = variant.kernel.__name__
        if name in self.kernels:
            return
        self.kernels.add(name)
        # Every tensor at an address of its own.
        with mock.patch.object(torch.Tensor, "data_ptr", lambda tensor: 2**46 + id(tensor)):
            expected, _ = self.watch.of(lambda: variant.launch_by_triton(programs, arguments))
            # The first of a configuration goes by Triton.
            self.direct(variant, programs, arguments)
            direct, by_triton = self.watch.of(lambda: self.direct(variant, programs, arguments))
        if direct != expected:
            self.differing.append(f"{name}: {expected} {direct}")
        if by_triton:
            self.slow.append(name)


def every_kernel(watch: Watch) -> dict[str, Any]:
    twice = Twice(watch)
    with torch.device("meta"):
        for family in FAMILIES.values():
            family(twice)
    return {"differing": twice.differing, "slow": twice.slow, "kernels": sorted(twice.kernels)}


def fallbacks(watch: Watch) -> dict[str, Any]:
    """How many launches go by Triton's path: for a new configuration, and for the same once more.

    For most also how many different functions these two launch.
    """
    x, y = torch.rand(2, 64)
    wide = torch.rand(65)

    def by_triton(*args: Any, n: Any = 64, factor: Any = 2.0, **options: Any) -> int:
        options = {"block": 64, "limit": 8.0, **options}
        if not args:
            args = (x, y)
        return watch.of(lambda: launch(scale_kernel, 1, *args, n, factor, **options))[1]

    found: dict[str, Any] = {"first": [by_triton(), by_triton(), by_triton(y, x)], "functions": {}}
    for name, options in {
        "misaligned": {"args": (wide[1:], y)},
        "dtype": {"args": (x.double(), y)},
        "one": {"n": 1},
        "not divisible": {"n": 63},
        "integer factor": {"factor": 2},
        "bool factor": {"factor": True},
        "warps": {"num_warps": 1},
        "constexpr": {"limit": 9.0},
    }.items():
        args = options.pop("args", ())
        before = len(watch.calls)
        found[name] = [by_triton(*args, **options), by_triton(*args, **options)]
        functions = {call[4] for call in watch.calls[before:]}
        found[name].append(len(functions))
        found["functions"][name] = functions.pop()
    found["functions"]["first"] = watch.of(by_triton)[0][0][4]
    for name, options in {"zero": {"limit": 0.0}, "nan": {"limit": float("nan")}}.items():
        found[name] = [by_triton(**options), by_triton(**options)]
    launch(scale_kernel, 1, x, y, 64, 2.0, limit=8.0, block=64)
    found["order of constexprs"] = watch.of(lambda: launch(scale_kernel, 1, x, y, 64, 2.0, limit=8.0, block=64))[1]
    heard: list[str] = []

    def hook(*args: Any, **kwargs: Any) -> None:
        heard.append("launch")

    for chain in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        chain.add(hook)
        found.setdefault("hooks", []).append(by_triton())
        chain.remove(hook)
    scale_kernel.pre_run_hooks.append(hook)
    found["hooks"].append(by_triton())
    scale_kernel.pre_run_hooks.clear()
    found["heard"] = len(heard)
    own, triton.JITFunction.run = triton.JITFunction.run, lambda *args, **kwargs: heard.append("run")
    by_triton()
    triton.JITFunction.run = own
    found["replaced run"] = heard[-1]
    found["after all"] = by_triton()
    found["given"] = given(watch)
    _launching.KEPT, kept = 4, variant_of(scale_kernel, 4, None, {"block": 64, "limit": 8.0}).compiled
    for n in range(100, 110):
        by_triton(n=n)
    found["kept"] = len(kept)
    found["parameter"] = [by_triton(torch.nn.Parameter(x), y), by_triton(torch.nn.Parameter(x), y)]

    class Subclass(torch.Tensor):
        pass

    found["subclass"] = [by_triton(x.as_subclass(Subclass), y) for _ in range(2)]
    return found


def given(watch: Watch) -> dict[str, Any]:
    """Of launches that are given a tensor: how many are not those of the general way, or go by Triton's path."""
    calls: list[_launching.Call] = []
    kept, memory = torch.rand(64), torch.rand(256)
    with _launching.launches_noted(calls):
        launch(scale_kernel, 1, kept, kept, 32, 2.0, block=64, limit=8.0)
        launch(scale_kernel, 2, memory, kept, 32, 2.0, block=64, limit=8.0)
    ready, found = _launching.Ready(calls, -1, [memory]), {"differing": 0, "by Triton": 0}
    for start in (0, 16, 17, 0, 33, 16, 17):
        tensor = memory[start : start + 64]
        expected = []
        for variant, programs, (x, *others) in calls:
            x = tensor if x is memory else x
            expected += watch.of(functools.partial(variant.launch, programs, (x, *others)))[0]
        direct, by_triton = watch.of(functools.partial(ready.launch, tensor))
        found["differing"] += direct != expected
        found["by Triton"] += by_triton
    addresses = _launching.ADDRESSES
    for _ in range(2 * addresses):
        ready.launch(torch.rand(64))
    found["kept"] = len(ready._at) <= addresses
    return found


def main() -> None:
    stub = install()
    watch = Watch()
    found = {"kernels": every_kernel, "fallbacks": fallbacks}[sys.argv[1]](watch)
    print(json.dumps({**found, "launches": [stub.launches(), len(watch.calls)]}))


if __name__ == "__main__":
    main()
