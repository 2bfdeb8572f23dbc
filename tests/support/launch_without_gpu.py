"""Launches kernels twice, by Triton's own path and by ``gpubuf.kernels._launching``, over a driver that does nothing.

Run as ``python -m tests.support.launch_without_gpu``, in a process without the interpreter. It prints one line of JSON:
what came of each check, by name.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import triton
import triton.language as tl
from tensordict import TensorDict
from triton import knobs
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime import driver

import gpubuf
from benchmarks.measure.no_gpu import install
from gpubuf.kernels import _launching
from gpubuf.kernels._launching import _options, launch
from gpubuf.kernels.categorical import _launch as categorical
from gpubuf.kernels.norms import _launch as norms
from gpubuf.kernels.philox import _launch as philox
from gpubuf.kernels.philox import new_state
from gpubuf.kernels.rows import _launch as rows
from gpubuf.kernels.sac import _launch as sac
from gpubuf.kernels.sum_tree import _launch as sum_tree
from gpubuf.kernels.tanh_normal import _launch as tanh_normal
from gpubuf.kernels.td import _launch as td
from gpubuf.kernels.trajectories import _launch as trajectories

FAMILIES = (categorical, norms, philox, rows, sac, sum_tree, tanh_normal, td, trajectories)


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


def every_operation(watch: Watch) -> dict[str, Any]:
    """Kernels of every family: launched by Triton's path and directly, with the same arguments."""
    differing, slow, kernels = [], [], set()

    def both(kernel: Any, programs: int, *args: Any, **options: Any) -> None:
        kernels.add(kernel.__name__)
        # Triton would compile once more for the same options in another order, or left out.
        options.setdefault("num_warps", 4)
        given = {**_options(options["num_warps"], options.get("maxnreg")), **options}
        expected, _ = watch.of(lambda: kernel[(programs,)](*args, **given))
        # The first of a configuration goes by Triton.
        launch(kernel, programs, *args, **options)
        direct, by_triton = watch.of(lambda: launch(kernel, programs, *args, **options))
        if direct != expected:
            differing.append(f"{kernel.__name__}: {expected} {direct}")
        if by_triton:
            slow.append(kernel.__name__)

    for family in FAMILIES:
        family.launch = both
    batch = TensorDict(
        {"observation": torch.randn(300, 3), "reward": torch.randn(300, 1), "next": {"done": torch.ones(300, 1) > 0}},
        [300],
    )
    storage = gpubuf.LazyTensorStorage(5000)
    buffer = gpubuf.TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage, batch_size=64)
    buffer.extend(batch)
    # Kernels write nothing, so that no index that they return means anything.
    buffer[torch.arange(300)] = batch
    sampled = buffer.sample()
    sampled["td_error"] = torch.rand(64)
    buffer.update_tensordict_priority(sampled)
    buffer.update_priority(torch.arange(2000), torch.rand(2000))
    uniform = gpubuf.ReplayBuffer(storage=gpubuf.LazyTensorStorage(5000), batch_size=64)
    uniform.extend(batch)
    uniform.sample()
    slices = gpubuf.SliceSampler(slice_len=4, end_key=("next", "done"))
    episodes = gpubuf.ReplayBuffer(storage=gpubuf.LazyTensorStorage(5000), sampler=slices, batch_size=64)
    episodes.extend(batch)
    episodes.sample()
    torch.ops.gpubuf.philox_uniform(new_state(1, "cpu"), 100)
    loc, scale, noise = (torch.rand(64, 2, requires_grad=i < 2) for i in range(3))
    action, log_prob = torch.ops.gpubuf.tanh_normal_sample(loc, scale, noise, None, None, -1.0, 1.0, 1)
    (action.sum() + log_prob.sum()).backward()
    # A bound of 0 as a float could not be looked up.
    logits, rows = torch.rand(2, 64, 51, requires_grad=True), torch.rand(64)
    one = torch.ones(())
    mass = torch.ops.gpubuf.categorical_target(logits.detach(), rows, one, rows, rows, one, None, None, 0.0, 10.0, 0)
    torch.ops.gpubuf.categorical_loss(logits, mass, None, None, 0.0, 10.0, 0, False, 1)[0].backward()
    torch.ops.gpubuf.categorical_expected_value(logits, -10.0, 0.0).sum().backward()
    x, weight = torch.rand(2, 9, 5, requires_grad=True), torch.rand(2, 1, 5)
    torch.ops.gpubuf.norm_activation(x, weight, None, 1e-5, 0, 2)[0].sum().backward()
    mean, var = torch.ops.gpubuf.norm_batch_moments(x.detach(), weight)
    torch.ops.gpubuf.batch_norm_activation(x, weight, weight, mean, var, 1e-5, 1, True).sum().backward()
    return {"differing": differing, "slow": slow, "kernels": sorted(kernels)}


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
    _launching.KEPT, kept = 4, _launching._launches[id(scale_kernel)].compiled
    for n in range(100, 110):
        by_triton(n=n)
    found["kept"] = len(kept)
    found["parameter"] = [by_triton(torch.nn.Parameter(x), y), by_triton(torch.nn.Parameter(x), y)]

    class Subclass(torch.Tensor):
        pass

    found["subclass"] = [by_triton(x.as_subclass(Subclass), y) for _ in range(2)]
    return found


def main() -> None:
    stub = install()
    watch = Watch()
    found = {"operations": every_operation(watch), "fallbacks": fallbacks(watch)}
    found["launches"] = [stub.launches(), len(watch.calls)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
