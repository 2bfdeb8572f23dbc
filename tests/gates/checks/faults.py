"""Faults planted in the library's kernels, each of which must be found; without them nothing is."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from triton.compiler.errors import CompilationError

from gpubuf.data.samplers.base import RandomState
from gpubuf.data.samplers.sum_tree import SumTree
from gpubuf.kernels import moments, philox, td
from gpubuf.kernels.rows import NEXT
from gpubuf.kernels.rows import _launch as rows_launch
from gpubuf.kernels.trajectories import Rule
from tests.contracts.rows import COPIED, Spec, Store
from tests.contracts.trajectories import Index
from tests.gates.ttir.blocks import blocks
from tests.gates.ttir.declared import declarations, unexplained
from tests.gates.ttir.launch import Executor
from tests.gates.ttir.machine import MemoryFaultError
from tests.gates.ttir.report import Report
from tests.support import perceptrons_setup
from tests.support.interpreter import triton_on_cpu
from tests.support.optim_setup import Form, Step
from tests.support.planting import planted

KERNELS = Path(__file__).parents[3] / "kernels"
BARRIER = "tl.debug_barrier()"


# What is run, with a fault or without. What comes out may be anything.


def philox_draws() -> None:
    philox.uniform(philox.new_state(1, "cpu"), 3000)


def rows_written() -> None:
    store = Store(COPIED, 40, written=7, copied=True)
    store.extend(store.batch(35, 1), 35)
    index = torch.randint(40, (30,), generator=torch.Generator().manual_seed(0))
    store.write(store.batch(30, 2), index)


def rows_read() -> None:
    store = Store(COPIED, 40, written=40, copied=True)
    store.gather(torch.arange(39))
    store.sample(philox.new_state(1, "cpu"), 39)


def tree_used() -> None:
    tree = SumTree(300, fan_out=4, alpha=0.6)
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(300, (300,), generator=generator)
    tree.mark(torch.arange(300))
    # So few rows that one program knows what has changed below each; some; and more than it takes at a time.
    for n in (5, 60, 300):
        tree.update(index[:n], torch.rand(n, generator=generator))
    tree.draw(20, RandomState(0))


def index_used() -> None:
    index = Index(200, 3, Rule(4, before=1, by_transition=True), fan_out=2)
    for n in (70, 199, 1, 30, 200):
        index.write(n)
    index.draw(philox.new_state(1, "cpu"), 9)


def index_of_three_levels() -> None:
    index = Index(64 * 65 + 3)
    index.write(64 * 64 - 1, chance=0.001)
    index.write(70)


def observations_shared() -> None:
    store = Store((Spec(3), Spec(3, NEXT, of=0)), 40, slots=12)
    store.extend(store.batch(12, 1), 12)
    # Entries that come free are taken again at once.
    store.relink(store.batch(12, 2), torch.arange(12))
    # Some that are taken lie between free ones.
    for seed in range(3, 6):
        store.relink(store.batch(5, seed), torch.tensor([2, 9, 4, 0, 6]))


def loss_computed() -> None:
    td.td_loss(torch.rand(2, 70), torch.rand(70), None, None, 1, 1)


def statistics_of_parts() -> None:
    state, mean, factor, tickets = moments.new_state(17, "cpu")
    rule = torch.tensor(moments.Rule(1e-8), dtype=torch.float64)
    moments.update(state, torch.randn(700, 17), mean, factor, rule, tickets)


def optimiser_step() -> None:
    # Rows that lie in a piece, and rows that don't.
    step = Step([Form((3, 300), unit=1), Form((40, 20), unit=0)], torch.float32)
    step.run(step.gradients())


def networks_updated() -> None:
    perceptrons_setup.run(perceptrons_setup.Problem(hidden=(20, 12)))


def networks_with_norms_updated() -> None:
    perceptrons_setup.run(perceptrons_setup.Problem(hidden=(20, 12), critics_eps=1e-5))


SCENARIOS = {
    "philox": (philox_draws,),
    "rows": (rows_written, rows_read, observations_shared),
    "sum_tree": (tree_used,),
    "trajectories": (index_used,),
    "td": (loss_computed,),
    "moments": (statistics_of_parts,),
    "optim": (optimiser_step,),
    "perceptrons": (networks_updated, networks_with_norms_updated),
}


#: One for all tests: what a fault does not touch is compiled once.
EXECUTOR = Executor()


@pytest.fixture
def found() -> Iterator[Callable[[], set[str]]]:
    """A function that gives the kinds of the faults that the test's launches have shown."""
    EXECUTOR.report = report = Report()
    with EXECUTOR.installed(), triton_on_cpu():
        yield lambda: {finding.kind for finding in unexplained(report.ordered(), declarations(KERNELS))}


def run(*scenarios: Callable[[], None], until: Callable[[], bool] = lambda: False) -> None:
    """Run with one program where the library does, and with many, until a fault is found."""
    for which in ("default", "stages", "envs"):
        for scenario in scenarios:
            if until():
                return
            # Kernels with a fault may end early, and leave what the host then trips over.
            with blocks(which), contextlib.suppress(MemoryFaultError, IndexError, RuntimeError):
                scenario()


#: Here a lane reads what it has written itself. The barrier is for compilers that give the two accesses other layouts,
#: and so other threads; the executor knows lanes only.
FOR_LAYOUTS = ("optim._triton:optim_adamw_kernel",)


def barriers() -> Iterator[tuple[str, int]]:
    """(module:function, number within it) of every barrier of a kernel."""
    for path in sorted(KERNELS.glob("*/_triton*.py")):
        for node in ast.parse(path.read_text()).body:
            for number in range(ast.unparse(node).count(BARRIER) if isinstance(node, ast.FunctionDef) else 0):
                yield f"{path.parent.name}.{path.stem}:{node.name}", number  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", SCENARIOS)
def test_nothing_is_found_without_a_fault(found, family):
    run(*SCENARIOS[family])
    assert found() == set()


@pytest.mark.parametrize(("function", "number"), [found for found in barriers() if found[0] not in FOR_LAYOUTS])
def test_a_barrier_that_is_removed(found, function, number):
    def is_found() -> bool:
        return bool(found() & {"race", "barrier", "barrier-scalar"})

    with planted(function, BARRIER, "pass", number):
        run(*SCENARIOS[function.partition(".")[0]], until=is_found)
    assert is_found()


@dataclass(frozen=True)
class Fault:
    function: str
    before: str
    after: str
    kind: str
    scenario: Callable[[], None]


FAULTS = {
    "ticket without order": Fault(
        "philox._triton:take_ticket", 'sem="release"', 'sem="relaxed"', "race", philox_draws
    ),
    "no mask": Fault("trajectories._triton:store_slices", ", mask=i < n)", ")", "out-of-bounds", index_used),
    "offset of a level": Fault(
        "sum_tree._triton_update:_recompute", "tl.multiple_of(below, 1 << columns)", "below + 8",
        "out-of-bounds", tree_used,
    ),
    "words of any address": Fault(
        "rows._triton_tiles:unit_shift", "tl.minimum(", "16 + 0 * tl.minimum(", "misaligned", rows_read
    ),
    "losers write too": Fault(
        "rows._triton_write:rows_write_kernel", "mask & valid & winner", "mask & valid", "duplicate", rows_written
    ),
    "scratch left out": Fault(
        "sum_tree._triton_update:sum_tree_claim_kernel", "mask=claims)", "mask=claims & (i > 0))",
        "uninitialised", tree_used,
    ),
    "name that is not carried": Fault(
        "trajectories._triton_update:trajectories_bits_above_kernel",
        "below = steps * 0\n    for lower in range(0, level - 1):\n        below += words_of(steps, lower) * envs",
        "start = steps * 0\n    below = start\n    for lower in range(0, level - 1):\n        below = start\n"
        "        start += words_of(steps, lower) * envs",
        "alias", index_of_three_levels,
    ),
    "everyone's partial sum": Fault(
        "td._triton:store_reduced", "partial_ptr + program", "partial_ptr", "race", loss_computed
    ),
    "type that changes in a loop": Fault(
        "sum_tree._triton:level_start", "start += count << SHIFT", "start += (count << SHIFT).to(tl.float32)",
        "compile", tree_used,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_fault(found, name):
    fault = FAULTS[name]
    with planted(fault.function, fault.before, fault.after):
        run_until_refused = contextlib.suppress(Exception) if fault.kind == "compile" else contextlib.nullcontext()
        with run_until_refused:
            run(fault.scenario, until=lambda: fault.kind in found())
    assert fault.kind in found()


def test_an_integer_that_is_one_in_a_tuple(found, monkeypatch):
    """The address of an empty tensor is 0, which ``2 * address + 1`` makes a constant of.

    Where the kernel gives the tuple a name, Triton compiles it all the same: then the launch reads where nothing is.
    """
    encode = rows_launch.encode_arguments
    monkeypatch.setattr(rows_launch, "encode_arguments", lambda values: tuple(v - 2 for v in encode(values)))
    with pytest.raises((CompilationError, MemoryFaultError)):
        rows_written()
    assert found() in ({"compile"}, {"out-of-bounds"})
