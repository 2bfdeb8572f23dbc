"""A pytest plugin, ``-p tests.support.lost_gpu``: ends a worker in the test that has cost it its GPU.

After an illegal memory access, say, everything that a process asks of CUDA fails. Its tests fail within milliseconds
then, so that it would be given nearly all that are left. pytest-xdist replaces a worker that ends, and says of the test
that it has crashed. What the test itself has to say goes to the log before.

A kernel that never ends takes its share of the GPU from all processes until its test is ended. Tests that fail
meanwhile may have failed for want of time: the JUnit file names the one that hung with each of them, as ``beside``.
"""

from __future__ import annotations

import os
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Generator

import pytest
import torch


def lost() -> bool:
    """Whether this process can't use its GPU any more. Waits for the GPU."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and hasattr(item.config, "workerinput") and lost():
        capture = item.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            print(f"\n{item.nodeid} has cost this worker its GPU:\n{report.longreprtext}", file=sys.stderr, flush=True)
        os._exit(1)
    return report


def pytest_configure(config: pytest.Config) -> None:
    limit = float(config.getini("faulthandler_timeout") or 0)
    if limit and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Hangs(limit))


class Hangs:
    """What failed beside a test that hung, known to the process that gives the tests to the workers.

    Args:
        limit: seconds after which a test is ended.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._began: dict[str, float] = {}
        self._hung: list[tuple[str, float, float]] = []
        self._failed: list[tuple[str, float, float]] = []

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._began[nodeid] = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            began, ended = self._began[report.nodeid], time.monotonic()
            # pytest-xdist knows no phase of a test whose worker has ended.
            hung = report.when not in ("setup", "call", "teardown") and ended - began > self._limit / 2
            (self._hung if hung else self._failed).append((report.nodeid, began, ended))

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """After the JUnit file was written."""
        beside = {
            _case(failed): hung
            for failed, began, ended in self._failed
            for hung, first, last in self._hung
            if began < last and first < ended
        }
        if beside and (path := config.getoption("xmlpath")):
            report = ElementTree.parse(path)
            for case in report.iter("testcase"):
                hung = beside.get((case.get("classname"), case.get("name")))
                if hung is not None:
                    case.set("beside", hung)
            report.write(path)


def _case(nodeid: str) -> tuple[str | None, str | None]:
    """The names of a test in a JUnit file: of its module, and its own."""
    file, _, name = nodeid.partition("::")
    return file.removesuffix(".py").replace("/", "."), name
