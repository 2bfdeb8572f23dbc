"""``python -m tests.gates.updates [ALGORITHM ...]``: the kernels of updates of :mod:`benchmarks.studies.updates`.

JSON on the last line. It counts launches over :mod:`tests.support.no_gpu`, and PyTorch's operations as they reach the
dispatcher. Triton must not be in its interpreter's mode.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.studies import updates
from benchmarks.workloads import losses
from gpubuf import learner
from gpubuf.kernels import _launching, _registry
from gpubuf.modules import linear
from gpubuf.objectives.base import LossModule
from gpubuf.objectives.fused import FUSED
from tests.support.no_gpu import install

TWO = ("baddbmm", "native_layer_norm_backward", "smooth_l1_loss", "mse_loss")
"""Operations of two kernels: a bias is copied before a product of several nets; a mean or a sum follows."""

NONE = (
    *("detach", "alias", "view", "_unsafe_view", "t", "transpose", "expand", "select", "slice", "split", "unbind"),
    *("split_with_sizes", "squeeze", "unsqueeze", "permute", "as_strided", "reshape", "_reshape_alias", "set_"),
    *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "lift_fresh", "_local_scalar_dense"),
    *("is_same_size", "record_stream", "_has_compatible_shallow_copy_type", "resize_", "chunk", "diagonal"),
)
"""Operations without a kernel."""

FAMILIES = ("td", "sac", "tanh_normal", "categorical", "norms", "optim")


class Kernels(TorchDispatchMode):
    """Counts PyTorch's kernels; operations of one of our families are their plain definition."""

    def __init__(self, family: str = "") -> None:
        super().__init__()
        self.family, self.found = family, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "gpubuf" and self.family:
            cpu = _registry._implementations[func][0]
            if cpu.startswith(f"gpubuf.kernels.{self.family}."):
                with self:
                    return _registry._imported(cpu)(*args, **(kwargs or {}))
        if namespace == "aten" and name not in NONE:
            self.found[name] += 1 + (name in TWO)
        return func(*args, **(kwargs or {}))


def count(update: Callable[[], object], launched: Counter[str], stub: Any, family: str = "") -> Counter[str]:
    """The kernels of one update, ours and PyTorch's, by name; those of prepared launches as ``"of the buffer"``."""
    for _ in range(3):
        update()
    launched.clear()
    before = stub.launches()
    with Kernels(family) as kernels:
        update()
    prepared = stub.launches() - before - launched.total()
    return launched + kernels.found + Counter({"of the buffer": prepared})


def main(algorithms: list[str]) -> dict[str, Any]:
    """What :func:`benchmarks.studies.updates.counted_in_subprocess` returns."""
    torch.set_num_threads(1)
    stub = install()
    launched = Counter[str]()
    launch = _launching.Variant.launch

    def counting(self: Any, *args: Any) -> Any:
        launched[self.kernel.fn.__name__] += 1
        return launch(self, *args)

    # What CPU tensors alone make a difference to, and what kernels that compute nothing can't pass.
    changes: list[tuple[Any, str, Any]] = [
        (_launching.Variant, "launch", counting),
        (losses, "agree", lambda *_: None),
        (LossModule, "_look_for_nan", lambda *_: None),
        (linear, "fast_here", lambda *_: False),
        (linear, "runs_net_by_net", lambda *_, **__: False),
        (linear, "worth_onednn", lambda *_: False),
        (learner, "_modes", lambda: 0),
    ]
    for owner, name, value in changes:
        setattr(owner, name, value)
    found: list[dict[str, Any]] = []
    families: list[dict[str, Any]] = []
    for algorithm, prioritized in itertools.product(algorithms or updates.ALGORITHMS, (False, True)):
        if prioritized and algorithm not in ("sac", "td3", "crossq"):
            continue
        for form, make in updates.forms(algorithm, 256, prioritized, "cpu").items():
            ways: dict[str, dict[Any, Any]] = {form: {}}
            if form == updates.OURS:
                ways = {f"{form}, autograd": {}, **({form: FUSED} if algorithm in ("sac", "fastsac") else {})}
            for way, known in ways.items():
                learner.KNOWN = known
                kernels = count(make(), launched, stub)
                what = {"algorithm": algorithm, "prioritized": prioritized, "form": way}
                found.append({**what, "total": kernels.total(), "kernels": kernels})
                if form == updates.OURS and not known and not prioritized:
                    more = {each: count(make(), launched, stub, each).total() - kernels.total() for each in FAMILIES}
                    families.append({"algorithm": algorithm, "total": kernels.total(), "more": more})
    return {"updates": found, "families": families}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
