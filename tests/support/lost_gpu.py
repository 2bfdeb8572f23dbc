"""A pytest plugin, ``-p tests.support.lost_gpu``: ends a worker in the test that has cost it its GPU.

After an illegal memory access, say, everything that a process asks of CUDA fails. Its tests fail within milliseconds
then, so that it would be given nearly all that are left. pytest-xdist replaces a worker that ends, and says of the test
that it has crashed. What the test itself has to say goes to the log before.
"""

from __future__ import annotations

import os
import sys
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
