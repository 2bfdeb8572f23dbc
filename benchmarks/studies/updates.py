"""How many kernels an update launches, by gpubuf and as plain PyTorch writes it.

``python -m benchmarks.studies.updates`` needs no GPU: it makes the updates with ``tests.gates.updates`` in the place of
one, which launches nothing and counts.

``python -m benchmarks.studies.updates cuda`` times them there, in graphs: first those that no compiler takes a minute
for, then PyTorch's compiled. With ``--profiled`` it makes some of gpubuf's once, for ncu. A stage of ``make gpu`` does
both, :mod:`benchmarks.stages`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import gpubuf
from benchmarks.measure import clocks
from benchmarks.measure.elsewhere import found_by
from benchmarks.measure.machine import describe
from benchmarks.measure.results import write_results
from benchmarks.measure.steady import probe_of, steady
from benchmarks.peers.libraries import ALPHA, BETA, EPS
from benchmarks.workloads import losses
from benchmarks.workloads.losses import BY_HAND, OURS, summed
from benchmarks.workloads.plain_losses import PlainLoss, PlainSAC, make_batch
from benchmarks.workloads.sac import RATE, TAU

STORED = 20_000

ALGORITHMS = ("sac", "td3", "crossq", "fastsac", "flashsac")
SEPARATE = "plain PyTorch, separate losses"
"""As CleanRL and LeanRL have soft actor-critic: three losses, three optimisers, one after the other."""
SIZES = (256, 8192)
"""Rows of a batch, where updates are timed."""


def plain_buffer(n: int, prioritized: bool, device: str) -> tuple[Callable[[], Any], Callable[..., None]]:
    """(draw of n rows; update of their priorities) by PyTorch's operations."""
    rows = make_batch(STORED).to(device)
    priority = torch.ones(STORED, device=device)

    def draw() -> Any:
        if not prioritized:
            index = torch.randint(STORED, (n,), device=device)
            return rows[index], index
        sums = priority.cumsum(0)
        index = torch.searchsorted(sums, torch.rand(n, device=device) * sums[-1]).clamp_(max=STORED - 1)
        weight = (STORED * priority[index] / sums[-1]).pow(-BETA)
        return rows[index].set("_weight", weight / weight.max()), index

    def update(index: torch.Tensor, error: torch.Tensor) -> None:
        if prioritized:
            priority[index] = (error + EPS).pow(ALPHA)

    return draw, update


def plain_update(name: str, n: int, prioritized: bool, device: str) -> Callable[[], object]:
    """One backward pass of all losses, one step of PyTorch's fused AdamW. Losses aren't weighted."""
    loss, _ = losses.made(name, BY_HAND, n, device)
    draw, written = plain_buffer(n, prioritized, device)
    step = adam(list(loss.parameters()), device)
    sources, targets = averaged(loss)

    def update() -> None:
        batch, index = draw()
        found = loss(batch)
        step(summed(found) if "loss_alpha" in found else found["loss_actor"] + found["loss_qvalue"])
        if targets:
            torch._foreach_lerp_(targets, sources, TAU)
        if "td_error" in found:
            written(index, found["td_error"])

    return update


def separate_update(n: int, prioritized: bool, device: str) -> Callable[[], object]:
    """Soft actor-critic by three losses and optimisers in turn; the temperature learns from another draw."""
    loss: PlainSAC = losses.made("sac", BY_HAND, n, device)[0]
    draw, written = plain_buffer(n, prioritized, device)
    critics, actor, temperature = (
        adam(list(each), device) for each in (loss.critics.parameters(), loss.actor.parameters(), [loss.log_alpha])
    )
    sources, targets = averaged(loss)

    def update() -> None:
        batch, index = draw()
        alpha = loss.log_alpha.detach().exp()
        value, error = loss.critics_losses(batch, alpha)
        critics(value)
        action, log_prob = loss.draw(batch["observation"])
        pair = torch.cat([batch["observation"], action], -1)
        of_pair = loss.without_gradient(lambda: loss.value(pair)).squeeze(-1)
        actor((alpha * log_prob - of_pair).mean())
        with torch.no_grad():
            _, log_prob = loss.draw(batch["observation"])
        temperature(loss.temperature_loss(log_prob, loss.log_alpha.exp()))
        torch._foreach_lerp_(targets, sources, TAU)
        written(index, error)

    return update


def averaged(loss: PlainLoss) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(parameters, their averages)."""
    if isinstance(loss, losses.plain.PlainCrossQ):
        return [], []
    return [each.detach() for each in loss.critics.parameters()], list(loss.targets.parameters())


def adam(parameters: list[Any], device: str) -> Callable[[torch.Tensor], None]:
    """A backward pass, and a step of PyTorch's fused Adam."""
    optimizer = torch.optim.Adam(parameters, RATE, fused=True, capturable=device == "cuda")

    def step(loss: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def learner(name: str, n: int, prioritized: bool, device: str, prefetch: int | None = None) -> Any:
    """gpubuf's update."""
    from gpubuf.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer

    loss, _ = losses.made(name, OURS, n, device)
    averages: dict[str, Any] = {} if name == "crossq" else {"targets": loss, "tau": TAU}
    optimizer = gpubuf.optim.AdamW(loss.parameters(), RATE, weight_decay=0.0, **averages)
    storage = LazyTensorStorage(STORED, device=device)
    priorities = {"alpha": ALPHA, "beta": BETA, "eps": EPS} if prioritized else {}
    kind: Any = TensorDictPrioritizedReplayBuffer if prioritized else TensorDictReplayBuffer
    buffer = kind(storage=storage, batch_size=n, prefetch=prefetch, **priorities)
    buffer.extend(make_batch(STORED).to(device))
    return gpubuf.Learner(loss, optimizer, buffer=buffer)


def forms(name: str, n: int, prioritized: bool, device: str) -> dict[str, Callable[[], Callable[[], object]]]:
    """What makes each update of an algorithm, by its name."""
    found = {BY_HAND: lambda: plain_update(name, n, prioritized, device)}
    if name == "sac":
        found[SEPARATE] = lambda: separate_update(n, prioritized, device)
    return {**found, OURS: lambda: learner(name, n, prioritized, device)}


def timed_forms(name: str, n: int, device: str) -> dict[str, Callable[[], Callable[[], object]]]:
    """:func:`forms` of uniform batches; and ours with priorities, drawn in an update or during the one before."""
    found = forms(name, n, False, device)
    if name == "sac":
        for way, prefetch in (("priorities", None), ("priorities, prefetch", 1)):
            found[f"{OURS}, {way}"] = functools.partial(learner, name, n, True, device, prefetch)
    return found


def ways(form: str, device: str, compiled: bool) -> dict[str, Callable[[Any], Callable[[], object]]]:
    """What makes an update run on a device, by the name of the result: ours captures itself."""
    if not compiled:
        in_graph = functools.partial(gpubuf.capture, device=device)
        return {form: (lambda update: update) if form.startswith(OURS) else in_graph}
    if form.startswith(OURS) or device != "cuda":
        return {}
    return {
        f"{form}, reduce-overhead": functools.partial(torch.compile, mode="reduce-overhead"),
        f"{form}, compiled, in a graph": lambda update: gpubuf.capture(torch.compile(update), device=device),
    }


def timed(
    device: str, sizes: Sequence[int], algorithms: Sequence[str] = ALGORITHMS, deadline: float | None = None
) -> Iterator[dict[str, Any]]:
    """Microseconds of every update, in float32 and with TF32's products, and the ``probe`` of the host.

    Those that take no compiler come first. None is begun after the ``deadline``, in seconds of ``time.time()``.
    """
    clock = clocks.of(None, device)
    for compiled, name, n in itertools.product((False, True), algorithms, sizes):
        for (form, make), precision in itertools.product(timed_forms(name, n, device).items(), ("highest", "high")):
            for way, run in ways(form, device, compiled).items():
                if deadline is not None and time.time() > deadline:
                    print(f"left out, the time is over: {way}, {name}, {n}, {precision}")
                    continue
                torch.set_float32_matmul_precision(precision)
                call = run(make())
                for _ in range(8):
                    call()
                took, probe = steady(lambda call=call: clocks.runs(call, clock, 5, 10), probe_of(device))
                what = {"algorithm": name, "form": way, "rows": n, "precision": precision, "probe": probe}
                yield {**what, "microseconds": statistics.median(took) * 1e6}
    torch.set_float32_matmul_precision("highest")


def profiled(device: str, sizes: Sequence[int]) -> None:
    """Make updates of whole networks twice, the second time between the marks that a profiler begins and ends at."""
    for name, n in itertools.product(("sac", "fastsac"), sizes):
        update = learner(name, n, False, device)
        update()
        with torch.cuda.profiler.profile():
            update()


def counted_in_subprocess(*algorithms: str) -> dict[str, Any]:
    """``updates``: the kernels of each; ``families``: how many more there were without one family of ours."""
    found: dict[str, Any] = found_by(sys.executable, "tests.gates.updates", *algorithms, env={"TRITON_INTERPRET": ""})
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.updates", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("device", choices=("cuda", "cpu"), nargs="?", help="time the updates there; cpu: a rehearsal")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="rows of a batch, where they are timed")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=ALGORITHMS)
    parser.add_argument("--profiled", action="store_true", help="time nothing; make some updates for a profiler")
    parser.add_argument("--deadline", type=float, help="time.time() after which no row is begun")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.profiled:
        profiled(options.device, options.sizes)
        return
    machine = describe(options.device or "cpu")
    if options.device:
        results: list[Any] = []
        for each in timed(options.device, options.sizes, options.algorithms, options.deadline):
            results.append(each)
            # After each, for a compiler may be cut.
            write_results("update_times", results, machine, options.out)
    else:
        write_results("updates", counted_in_subprocess(*options.algorithms), machine, options.out)


if __name__ == "__main__":
    main()
