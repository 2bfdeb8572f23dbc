"""Shared fixtures. Triton's interpreter must be chosen before Triton is imported, hence the lines at the top."""

import os
import signal
from collections.abc import Generator, Iterator
from typing import Any

# The gpu-marked tests compile for the real device; everything else runs the kernels on CPU tensors.
if os.environ.get("GPUBUF_TEST_GPU") != "1":
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

from tests.support.interpreter import InterpreterUnavailableError, triton_on_cpu
from tests.support.quick_interpreter import quick_interpreter

torch.set_num_threads(1)


#: What takes longest, and so begins first where processes share the tests: else one of them may end long after others.
LONGEST = (
    "gates/test_aot.py",
    "gates/test_ttir.py",
    "benchmarks/test_gpu_stages.py",
    "graphs/test_compile.py",
    "benchmarks/test_kernel_counts.py",
    "benchmarks/test_benchmark_runs.py",
    "train/test_train_device.py",
    "train/test_train.py",
)


def pytest_configure() -> None:
    """Have Ctrl-C heard, also where a shell began this process in the background, which ignores it.

    Tests that interrupt what they test would find that nothing happens.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("GPUBUF_TEST_GPU") != "1" and torch.cuda.is_available():
        interpreted = pytest.mark.skip(reason="kernels are interpreted in this run: make gpu runs those for a GPU")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(interpreted)
    if hasattr(config, "workerinput"):
        files = {f"tests/{file}": place for place, file in enumerate(LONGEST)}
        items.sort(key=lambda item: files.get(item.nodeid.partition("::")[0], len(files)))


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> Iterator[None]:
    with quick_interpreter():
        yield


@pytest.fixture(params=["numba", pytest.param("triton", marks=pytest.mark.slow)])
def backend(request: pytest.FixtureRequest):
    """Run a test through the CPU twins and, where slow tests run, through the Triton launchers under the interpreter.

    Quick runs launch all kernels in tests/kernels, and those of a few buffers in their contract.
    """
    with triton_on_cpu(request.param == "triton"):
        yield request.param


@pytest.fixture
def interpreter():
    """Triton's interpreter, for a test that launches kernels itself."""
    with triton_on_cpu():
        yield


def _skip_without_interpreter() -> Generator[None, Any, Any]:
    """A test that asks for the interpreter where none can run the kernels is skipped, with the reason."""
    try:
        return (yield)
    except InterpreterUnavailableError as error:
        pytest.skip(str(error))


pytest_runtest_setup = pytest.hookimpl(wrapper=True)(_skip_without_interpreter)
pytest_runtest_call = pytest.hookimpl(wrapper=True)(_skip_without_interpreter)
