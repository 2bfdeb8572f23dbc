"""Tests of kernels run on both backends, in quick runs too, where the interpreter has few cases of each."""

from collections import defaultdict

import pytest

from tests.support.interpreter import triton_on_cpu


@pytest.fixture(params=["numba", "triton"])
def backend(request: pytest.FixtureRequest):
    """Run a test through the CPU twins and again through the Triton launchers under the interpreter."""
    with triton_on_cpu(request.param == "triton"):
        yield request.param


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Through the interpreter quick runs have those cases of a test that the gates run, or its first and its last one.

    A test that names its backends says itself which of them are slow.
    """
    of_test = defaultdict(list)
    for item in items:
        found = getattr(item, "callspec", None)
        named = any("backend" in mark.args[0] for mark in item.iter_markers("parametrize"))
        if "/kernels/" in item.nodeid and found and found.params.get("backend") == "triton" and not named:
            of_test[item.nodeid.partition("[")[0]].append(item)
    for cases in of_test.values():
        quick = [case for case in cases if case.get_closest_marker("gate")]
        quick = quick if 0 < len(quick) < len(cases) else [cases[0], cases[-1]]
        for case in cases:
            if case not in quick:
                case.add_marker(pytest.mark.slow)
                case.add_marker(pytest.mark.interpreted)
