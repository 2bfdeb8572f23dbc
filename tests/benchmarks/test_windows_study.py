"""Windows beside other libraries: batches are checked against rows, and the command writes what it could measure."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.measure import elsewhere
from benchmarks.peers.libraries import UnavailableError
from benchmarks.studies import windows as study
from benchmarks.workloads import windows
from benchmarks.workloads.windows import OURS, WORKLOADS, Episodes, Filled, check, held

SHAPES = {"stacks": (1, 6, 5), "chunks": (3,), "sequences": (4, 3, 3)}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch):
    """Small frames in episodes that are a little longer than a window."""
    monkeypatch.setattr(windows, "STEPS", (20, 90))
    for name, shape in SHAPES.items():
        dtype = torch.float32 if name == "chunks" else torch.uint8
        entry = replace(WORKLOADS[name], data=lambda rows, shape=shape, dtype=dtype: Episodes(rows, shape, dtype))
        monkeypatch.setitem(WORKLOADS, name, entry)


def test_rows_are_those_of_episodes(small):
    """Said again, step by step."""
    data = WORKLOADS["stacks"].data(300)
    ends = [n for n in range(300) if data.last[n] == n]
    assert data.count == len(ends) > 3
    assert ends[-1] == 299
    assert len(data.frames) == 300 + len(ends)
    frame = 0
    for number in range(300):
        if number == 0 or number - 1 in ends:
            frame, seen = frame + (number > 0), []
            seen = [data.frames[frame]] * 4
        one = torch.tensor([number])
        assert torch.equal(data.frame(one)[0], data.frames[frame])
        assert torch.equal(data.stack(one)[0], torch.cat(seen))
        frame += 1
        seen = [*seen[1:], data.frames[frame]]
        assert torch.equal(data.stack(one, 1)[0], torch.cat(seen))
    near = torch.tensor([ends[0] - 1])
    assert data.chunks(near)["pad"].tolist() == [[False, False] + [True] * 14]
    assert torch.equal(data.chunks(near)["action"][0, 5], data.frame(torch.tensor([ends[0]]))[0])


@pytest.mark.parametrize("name", WORKLOADS)
def test_our_batches_are_right_and_a_wrong_one_is_found(small, name):
    entry = WORKLOADS[name]
    data = entry.data(400)
    for fill in (entry.ours, *entry.others.get("", {}).values()):
        filled = fill(data)
        for _ in range(5):
            check(entry, data, filled, 32)
        for wrong in entry.expected(data, torch.arange(5)[:, None] if name == "sequences" else torch.arange(5)):

            def read(batch: Any, filled: Filled = filled, wrong: str = wrong) -> dict[str, torch.Tensor]:
                found = filled.read(batch)
                found[wrong] = found[wrong].roll(1, 0)
                return found

            with pytest.raises(RuntimeError, match=f"{wrong} of a batch of 32"):
                check(entry, data, replace(filled, read=read), 32)


def test_memory_is_counted_once():
    """Views and what is referred to twice count as what they are of; modules and functions refer to nothing."""
    array, tensor = np.zeros(100), torch.zeros(10)
    shared = [array, array[3:], {"a": tensor, "b": tensor[:2]}, torch, lambda: array]
    assert held(shared) == 800 + 40
    assert held([shared, torch.from_numpy(array)]) == 800 + 40
    assert held(np.broadcast_to(np.zeros(7), (5, 7))) == 56


def test_windows_hold_a_quarter_of_stacks(small):
    data = Episodes(1_000, (1, 30, 30))
    ours, stacks = (held(windows.gpubuf_stacks(data, each).buffer) for each in (True, False))
    assert 3 < stacks / ours < 4
    assert ours > data.frames.nbytes


def test_calls_are_measured_in_turn(small):
    found = study.measured("stacks gpubuf", 400, 1)
    assert list(found) == [OURS, "gpubuf, stacks", "LazyFrames"]
    for each in found.values():
        assert each["bytes"] > 30 * 1e6
        assert each["calls"].keys() == each["probes"].keys() == {"32", "256"}
        assert min(each["calls"].values()) > 0


def test_what_is_counted_is_what_is_measured(small, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(study, "COUNTED", 200)
    names = []
    for name, call in study.calls():
        names.append(name)
        call()
    batches = [f"{entry.title}, {n}" for entry in WORKLOADS.values() for n in entry.batches]
    assert names[: len(batches)] == batches
    updates = names[len(batches) :]
    assert [name.split(", ")[2] for name in updates] == ["float32", "bfloat16", "float32"]
    assert all("states of 512 and 32x32 written back" in name for name in updates)


def test_a_part_without_its_library_is_left_out(small, monkeypatch: pytest.MonkeyPatch, capsys):
    def missing(data: Episodes) -> Filled:
        raise UnavailableError("cpprb is not installed here")

    monkeypatch.setitem(WORKLOADS, "stacks", replace(WORKLOADS["stacks"], others={"cpprb": {"cpprb": missing}}))
    assert study.measured("stacks cpprb", 100, 1) == {}
    assert "stacks cpprb: cpprb is not installed here" in capsys.readouterr().err


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """It writes what could be measured, and names what could not."""
    told = {"found": {OURS: {"bytes": 1.0}}, "versions": {"torchrl": "1"}}

    def found_by(python: str, module: str, *words: str, **_: object) -> dict:
        if "stacks cpprb" in words:
            raise subprocess.CalledProcessError(1, python)
        return {**told, "found": {}} if "chunks lerobot" in words else told

    monkeypatch.setattr(elsewhere, "found_by", found_by)
    out = tmp_path / "windows.json"
    study.main(["--rows", "7", "--out", str(out)])
    written = json.loads(out.read_text())
    parts = [part for part in study.PARTS if part not in ("stacks cpprb", "chunks lerobot")]
    assert written["windows"] == {"rows": 7, "parts": dict.fromkeys(parts, told["found"])}
    assert "stacks cpprb: can't be measured here" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        study.main(["--parts", "nonsense"])
