"""The study of the losses' costs: its contenders agree, and its tables are written from what it found."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.measure.results import newest_runs
from benchmarks.studies import losses as study
from benchmarks.workloads import loss_parts, program_losses
from benchmarks.workloads.losses import BY_HAND, PROGRAM, WORKLOADS, contenders, without_chance
from tests.support.report_runs import a_run


def without_torchrl(calls):
    return {name: call for name, call in calls.items() if name != "TorchRL"}


QUICK = ("sac", "flashsac")
#: Losses that are compared with their programs' code, too.
PROGRAMS = ("fastsac", "flashsac")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in WORKLOADS])
def test_contenders_agree(name):
    """Making them asserts it. Ours dispatches fewer operations than the one by hand, and half of a program's."""
    calls = contenders(name, 32, compiled=False)
    assert list(without_torchrl(calls)) == [*([PROGRAM] if name in PROGRAMS else []), BY_HAND, "gpubuf"]
    operations = {who: study.counted(call) for who, call in calls.items()}
    assert 0 < operations["gpubuf"] < operations[BY_HAND]
    if name in PROGRAMS:
        assert operations["gpubuf"] <= operations[PROGRAM] / 2


@pytest.mark.parametrize("group", [name for name, group in study.GROUPS.items() if name not in WORKLOADS])
def test_parts_agree(group):
    column = "sac" if group == "optimiser" else "16"
    calls = study.GROUPS[group].make(column, False)
    assert list(calls)[-1] == "gpubuf"
    for call in calls.values():
        call()


def test_categorical_losses_take_half_the_operations():
    for program in ("fastsac", "flashsac"):
        calls = loss_parts.categorical_alone(16, program)
        assert study.counted(calls["gpubuf"]) <= study.counted(calls["plain PyTorch"]) / 2


def test_a_difference_to_the_program_is_found(monkeypatch):
    monkeypatch.setattr(program_losses.ProgramFastSAC, "values", lambda self, logits: logits.mean(-1))
    with pytest.raises(AssertionError, match="loss_actor of PyTorch, as the program writes it"):
        contenders("fastsac", 32, compiled=False)


def test_a_difference_is_found(monkeypatch):
    monkeypatch.setattr(loss_parts.plain, "expected", lambda logits, support: logits.mean(-1))
    with pytest.raises(AssertionError):
        loss_parts.categorical_alone(16, "fastsac")


def test_without_chance_is_over_afterwards():
    with without_chance():
        assert torch.equal(torch.randn(3, 2), torch.randn(3, 2))
        assert torch.equal(torch.randn_like(torch.ones(4, 3, 2))[1], torch.randn((3, 2)))
    assert not torch.equal(torch.randn(3, 2), torch.randn(3, 2))


def test_measured(monkeypatch):
    monkeypatch.setattr(study, "TURN", 0.0)
    found = study.measured({"one": lambda: torch.zeros(2).add(1), "one, compiled": lambda: None}, 0.0)
    assert found["one"]["ratio"] == 1
    assert found["one"]["operations"] == 2
    assert "operations" not in found["one, compiled"]


def entry(us, ratio, **more):
    return {"us": us, "ratio": ratio, **more}


FOUND = {
    "sac": {
        "256": {
            "plain PyTorch": entry(6000.0, 1.0, operations=300),
            "gpubuf": entry(5900.0, 0.98, operations=150),
            "gpubuf, compiled": entry(5000.0, 0.83),
        },
        "8192": {"plain PyTorch": entry(2e5, 1.0, operations=300), "gpubuf": entry(1.9e5, 0.95, operations=150)},
    },
    "optimiser": {column: {"torch, fused": entry(150.0, 1.0), "gpubuf": entry(70.0, 0.47)} for column in study.HEADS},
}


def test_section(tmp_path):
    """A table a group; what was not measured stays empty."""
    assert "open" in study.losses_section({})
    data = a_run(losses=FOUND, compiled="there is no compiler").data
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    (folder / "losses.json").write_text(json.dumps(data))
    text = study.losses_section(newest_runs(folder))
    assert "| SACLoss | batch of 256, µs | batch of 8192, µs | operations |" in text
    assert "| gpubuf | 5900 (0.98x) | 190000 (0.95x) | 150 |" in text
    assert "| gpubuf, compiled | 5000 (0.83x) |  |  |" in text
    assert "| gpubuf | 70.0 (0.47x) | 70.0 (0.47x) |" in text
    assert "Nothing was compiled: there is no compiler." in text
