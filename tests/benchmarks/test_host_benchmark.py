"""The measurement of host time on CUDA, without a GPU: it runs, and its parts add up."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.measure.results import Run
from benchmarks.studies.host import PARTS, host_section

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """The cells of both tables as the report has them, of one round, by the name of the line."""
    results = tmp_path_factory.mktemp("host") / "host.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    del environment["TRITON_INTERPRET"]
    command = [sys.executable, "-m", "benchmarks.studies.host", "--rounds", "1", "--out", str(results)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    text = host_section({"host": Run("x", json.loads(results.read_text()))})
    assert text.splitlines()[:10] == done.stdout.splitlines()[:10]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {cells[0]: cells[1:] for cells in lines if not cells[0].startswith("---")}


def test_calls_of_the_table_launch_what_they_should(printed):
    launches = {name: int(cells[0]) for name, cells in printed.items() if cells[0].isdigit()}
    expected = {"uniform sample": 1, "prioritized sample": 2, "priority update": 1, "sample and update": 3, "extend": 1}
    assert {name: launches[name] for name in expected} == expected
    assert all(count >= 1 for count in launches.values())


def test_parts_of_a_sample_add_up(printed):
    assert all(part in printed for part in PARTS)
    whole = float(printed["uniform sample"][1])
    assert sum(float(printed[part][0]) for part in PARTS) == pytest.approx(whole, abs=0.1 * len(PARTS))
