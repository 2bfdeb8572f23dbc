"""Calls in turn: the contenders do the same, calls alternate, and the command writes what could be measured."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.measure import elsewhere
from benchmarks.measure.in_turn import Contender, in_turn, operations
from benchmarks.studies import in_turn as study
from benchmarks.workloads import losses, plain_losses, replay, sac, slices
from benchmarks.workloads.registry import REGISTRY


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("sac", "flashsac") else pytest.mark.slow) for n in losses.WORKLOADS]
)
def test_losses_agree(name: str):
    """Making them asserts it. Ours dispatches fewer operations than the one by hand."""
    calls = losses.calls(name, 32, compiled=False)
    assert [who for who in calls if who != "TorchRL"] == [losses.BY_HAND, "gpubuf"]
    dispatched = {who: operations(call) for who, call in calls.items()}
    assert 0 < dispatched["gpubuf"] < dispatched[losses.BY_HAND]


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plain_losses.PlainDistributional, "expected", lambda self, logits: logits.mean(-1))
    with pytest.raises(AssertionError, match="loss_actor of gpubuf"):
        losses.calls("fastsac", 32, compiled=False)


def test_without_chance_is_over_afterwards():
    with losses.without_chance():
        assert torch.equal(torch.randn(3, 2), torch.randn(3, 2))
        assert torch.equal(torch.randn_like(torch.ones(4, 3, 2))[1], torch.randn((3, 2)))
    assert not torch.equal(torch.randn(3, 2), torch.randn(3, 2))


def test_calls_alternate():
    seen = []
    call = lambda: torch.zeros(2).add(seen.append("one") or 1)  # noqa: E731
    contenders = {"one": Contender({"a": call}, call), "two": Contender({"a": lambda: seen.append("two")})}
    hosts = iter([3.0, 5.1, 5.1])
    found = in_turn(contenders, 2, lambda: next(hosts))
    # Measured again, since the host had changed.
    assert seen == ["one", "two"] * 8 + ["one"]
    assert found["one"]["calls"]["a"] > 0
    assert found["one"]["operations"] == 2
    assert found["two"].keys() == {"calls", "probes"}
    assert found["two"]["probes"]["a"] == {"before": 5.1, "after": 5.1, "agreed": True, "tries": 2}


def test_workloads_are_checked_and_timed(monkeypatch: pytest.MonkeyPatch):
    """Beside ourselves in place of a peer; what the peer is not asked for is left out."""
    for name in study.WORKLOADS:
        entry, asked = REGISTRY[name], ("gpubuf",) if name == "extend-256" else ("gpubuf", "again")
        small = {"capacity": 12_000, "stored": 10_000} if name.startswith("slices") else {"capacity": 2_560}
        monkeypatch.setattr(sac, "STORED", 2_000)
        batch = min(entry.batch, 1024)
        monkeypatch.setitem(REGISTRY, name, replace(entry, **small, libraries=asked, batch=batch))
    monkeypatch.setitem(slices.LIBRARIES, "again", slices.LIBRARIES["gpubuf"])
    monkeypatch.setitem(replay.LIBRARIES, "again", replay.LIBRARIES["gpubuf"])
    found = study.calls("again", 1)
    assert list(found) == [name for name in study.WORKLOADS if name != "extend-256"]
    assert all(each.pop("probe")["tries"] for each in found.values())
    assert all(each.keys() == {"gpubuf", "again"} and min(each.values()) > 0 for each in found.values())


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """It writes what could be measured, and names what could not."""
    told = {"found": {"uniform-sample-256": {"gpubuf": 1.0, "torchrl": 2.0}}, "versions": {"torchrl": "1"}}

    def found_by(python: str, module: str, *words: str, **_: object) -> dict:
        if "cpprb" in words:
            raise subprocess.CalledProcessError(1, python)
        return told

    monkeypatch.setattr(elsewhere, "found_by", found_by)
    out = tmp_path / "in_turn.json"
    study.main(["calls", "--parts", "torchrl", "cpprb", "--out", str(out)])
    written = json.loads(out.read_text())
    assert written["in_turn"] == {"torchrl": told["found"]}
    assert written["machine_info"]["environments"]["torchrl"] == {"torchrl": "1"}
    assert "cpprb: can't be measured here" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        study.main(["losses", "--parts", "lerobot"])
