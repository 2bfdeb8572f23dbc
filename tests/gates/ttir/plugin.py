"""``python -m pytest -p tests.gates.ttir.plugin -n 0``: Triton's launches on CPU tensors are executed from TTIR.

With ``--ptx lockstep warps`` they are executed from PTX, each test in both orders of warps.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Triton's own functions must be compiled ones, which is decided when it is imported. The tests' conftest.py asks for
# the interpreter after that.
os.environ.pop("TRITON_INTERPRET", None)
# Tests launch kernels of their own too, without saying whether a * b + c may be one operation. Triton 3.9 asks for it.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import pytest
import torch
import triton
import triton.language  # its functions, too, before the line above is undone

from tests.gates.ptx.launch import ORDERS, TARGETS
from tests.gates.ptx.launch import Executor as PtxExecutor
from tests.gates.ttir.blocks import BLOCKS, blocks
from tests.gates.ttir.launch import Executor
from tests.gates.ttir.machine import POISON
from tests.gates.ttir.runs import is_of_the_gates

EXECUTOR = pytest.StashKey[Executor]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ttir")
    group.addoption("--ttir-seed", type=int, default=0, help="of the order of programs and lanes")
    group.addoption("--ptx", choices=ORDERS, nargs="+", default=[], help="execute PTX, warps in these orders")
    group.addoption("--ptx-target", choices=TARGETS, default=TARGETS[0], help="execute the PTX for this GPU")
    group.addoption("--ttir-report", type=Path, default=None, help="JSON of what was executed and found")
    group.addoption("--gate", action="store_true", help="only the tests of the gates")
    group.addoption("--ttir-blocks", choices=BLOCKS, nargs="+", default=["default"], help="sizes of programs")


def _compiled_functions(jit: Callable[..., Any]) -> Callable[..., Any]:
    """``triton.jit`` that makes compiled functions also where the tests ask for interpreted ones."""

    def compiled(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        if function is None:
            return lambda decorated: compiled(decorated, **options)
        runtime = triton.knobs.runtime
        before, runtime.interpret = runtime.interpret, False
        try:
            return jit(function, **options)
        finally:
            runtime.interpret = before

    return compiled


def _poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``torch.empty`` or the like that fills what it makes with :data:`POISON`."""

    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = make(*args, **kwargs)
        plain = type(out) is torch.Tensor and out.is_cpu and out.is_contiguous() and out.numel()
        watched = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
        if plain and not watched and not torch.are_deterministic_algorithms_enabled() and out.data_ptr():
            start = out.storage_offset() * out.element_size()
            flat = torch.tensor([], dtype=torch.uint8).set_(out.untyped_storage(), start, (out.nbytes,), (1,))
            flat.fill_(POISON)
        return out

    return made


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    seed = config.getoption("--ttir-seed")
    # The tests compare bits with references that round every product.
    target = config.getoption("--ptx-target")
    executor = PtxExecutor(seed, fusion=False, target=target) if config.getoption("--ptx") else Executor(seed)
    config.stash[EXECUTOR] = executor
    with contextlib.ExitStack() as stack:
        stack.enter_context(executor.installed())
        config.add_cleanup(stack.pop_all().close)
    triton.jit = _compiled_functions(triton.jit)
    # Kernels run here also where Triton has no interpreter for them.
    from tests.support import interpreter

    interpreter.check_interpreter = lambda: None
    torch.empty, torch.empty_like = _poisoned(torch.empty), _poisoned(torch.empty_like)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--gate"):
        config.hook.pytest_deselected(items=[item for item in items if not is_of_the_gates(item)])
        items[:] = filter(is_of_the_gates, items)


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[EXECUTOR].storages.settle()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # Environments make a difference to the index of trajectories alone.
    of_envs = metafunc.module.__name__.endswith("test_trajectories")
    chosen = [name for name in metafunc.config.getoption("--ttir-blocks") if name != "envs" or of_envs]
    if chosen != ["default"]:
        metafunc.parametrize("ttir_blocks", chosen, indirect=True, scope="session")
    if metafunc.config.getoption("--ptx"):
        metafunc.parametrize("ptx_order", metafunc.config.getoption("--ptx"), indirect=True, scope="session")


@pytest.fixture(scope="session", autouse=True)
def ttir_blocks(request: pytest.FixtureRequest) -> Iterator[None]:
    with blocks(getattr(request, "param", "default")):
        yield


@pytest.fixture(scope="session", autouse=True)
def ptx_order(request: pytest.FixtureRequest) -> None:
    if hasattr(request, "param"):
        executor = request.config.stash[EXECUTOR]
        assert isinstance(executor, PtxExecutor)
        executor.order = request.param


@pytest.fixture(scope="session")
def executor(request: pytest.FixtureRequest) -> Executor:
    return request.config.stash[EXECUTOR]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    report = config.stash[EXECUTOR].report
    terminalreporter.section("PTX" if config.getoption("--ptx") else "TTIR")
    terminalreporter.write_line(report.text())
    path = config.getoption("--ttir-report")
    if path is not None:
        report.write(path)
