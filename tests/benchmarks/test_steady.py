"""Probes of the host before and after every row: when it is measured again, and what is kept."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from benchmarks.measure import steady as probes
from benchmarks.measure.elsewhere import ROOT
from benchmarks.measure.steady import TRIES, probe_of, steady

FAST, SLOW = 3.0, 5.1


def told(*microseconds: float) -> Callable[[], float]:
    """A probe of a host that is as fast as this, one time after the other."""
    left = iter(microseconds)
    return lambda: next(left)


def rows() -> Callable[[], int]:
    """A row whose result is how often it was measured."""
    number = iter(range(1, 100))
    return lambda: next(number)


@pytest.mark.parametrize(
    ("hosts", "row", "before", "after", "tries"),
    [
        ((FAST, FAST), 1, FAST, FAST, 1),
        ((SLOW, SLOW * 1.1), 1, SLOW, SLOW * 1.1, 1),
        # The probe after a row is the one before the next try.
        ((FAST, SLOW, SLOW), 2, SLOW, SLOW, 2),
        ((SLOW, FAST, SLOW, FAST, FAST), 4, FAST, FAST, 4),
    ],
)
def test_a_row_is_measured_until_the_probes_agree(hosts, row, before, after, tries):
    found, said = steady(rows(), told(*hosts))
    assert found == row
    assert said == {"before": before, "after": pytest.approx(after), "agreed": True, "tries": tries}


def test_a_host_that_never_keeps_its_speed_is_said():
    """The try whose probes differed least counts, after no more than so many."""
    hosts = [FAST, SLOW] * TRIES
    hosts[2] = FAST * 1.3
    found, said = steady(rows(), told(*hosts[: TRIES + 1]))
    assert found == 2
    assert said == {"before": SLOW, "after": pytest.approx(FAST * 1.3), "agreed": False, "tries": TRIES}


def test_a_probe_is_the_least_time_of_a_piece_of_its_work(monkeypatch: pytest.MonkeyPatch):
    took = iter([7e-4, 3e-4, 9e-4, 4e-4, 5e-4])
    clock = [0.0]

    def work() -> None:
        clock[0] += next(took)

    monkeypatch.setattr(probes, "pieces", lambda device: work)
    monkeypatch.setattr(probes.time, "perf_counter", lambda: clock[0])
    assert probe_of.__wrapped__("cpu")() == pytest.approx(3.0)


def test_on_a_cpu_work_of_torch_is_timed():
    assert 0 < probe_of("cpu")() < 1e4


LAUNCHES = """
import torch
from tests.support.no_gpu import install
driver, zeros = install(), torch.zeros
torch.zeros = lambda *size, device: zeros(*size)
from benchmarks.measure.steady import pieces
work = pieces("cuda")
before = driver.launches()
work()
print(driver.launches() - before)
"""


def test_on_a_gpu_empty_launches_are_timed():
    """By the launcher of prepared calls, over a driver whose launches do nothing."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", LAUNCHES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(probes.PIECES)], done.stderr
