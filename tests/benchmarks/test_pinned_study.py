"""The study of pinned rows, on a CPU that does the GPU's work: that it times what it says."""

from __future__ import annotations

import pytest

from benchmarks.measure.clocks import WALL
from benchmarks.studies import pinned
from gpubuf.kernels.rows import _launch
from tests.support.graph_recorder import RecordedCuda
from tests.support.placements import Machine


@pytest.mark.parametrize("case", [each for each in pinned.cases(2000) if each.batch == 256])
def test_a_captured_step_is_timed(case, monkeypatch):
    Machine().install(monkeypatch, work_on_cpu=True)
    machine = RecordedCuda().install(monkeypatch)
    monkeypatch.setattr(pinned, "CALLS", 1)
    monkeypatch.setattr(pinned, "REPEATS", 1)
    monkeypatch.setattr(pinned, "READ_AT_A_TIME", pinned.READ_AT_A_TIME[:2])
    before = _launch.HOST_BYTES
    found = pinned.times(case._replace(device=case.device.replace("cuda", "cpu")), WALL, work=1)
    expected = pinned.READ_AT_A_TIME if case.device == "pinned" else (before,)
    assert list(found) == list(expected)
    assert before == _launch.HOST_BYTES
    assert machine.log.count("replay") == 3 * len(expected)
