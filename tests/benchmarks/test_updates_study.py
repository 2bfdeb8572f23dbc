"""Kernels of whole updates: as few as promised, and no more than were counted."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.measure.prediction import TARGETS, of_perceptrons
from benchmarks.measure.results import newest_runs
from benchmarks.studies import updates
from benchmarks.workloads.losses import BY_HAND, OURS


def by_name(found: list[dict[str, Any]]) -> dict[Any, int]:
    return {(each["algorithm"], each["prioritized"], each["form"]): each["total"] for each in found}


def committed() -> dict[Any, int]:
    return by_name(newest_runs()["updates"].data["updates"]["updates"])


def test_an_update_of_soft_actor_critic_is_few_kernels():
    """Five of networks and the optimiser, the noise and the buffer's; plain PyTorch has many times as many."""
    counted = committed()
    assert counted["sac", False, OURS] <= 7
    assert counted["sac", True, OURS] <= 9
    assert counted["fastsac", False, OURS] <= 11
    for form in (BY_HAND, f"{OURS}, autograd"):
        assert counted["fastsac", False, form] > 9 * counted["fastsac", False, OURS]
    for form in (BY_HAND, updates.SEPARATE, f"{OURS}, autograd"):
        assert counted["sac", True, form] > 8 * counted["sac", True, OURS]


@pytest.mark.slow
def test_the_committed_counts_are_those_of_updates():
    found = by_name(updates.counted_in_subprocess("sac")["updates"])
    assert found == {name: total for name, total in committed().items() if name[0] == "sac"}


@pytest.mark.parametrize("form", [BY_HAND, updates.SEPARATE])
@pytest.mark.parametrize("prioritized", [False, True])
def test_updates_in_plain_pytorch_learn(form: str, prioritized: bool):
    """What is counted is an update: critics, policy and averages move, and all stays finite."""
    made: list[Any] = []
    real = updates.losses.made
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(updates.losses, "made", lambda *a: (made.append(real(*a)), made[-1])[1])
        update = updates.forms("sac", 16, prioritized, "cpu")[form]()
    loss = made[-1][0]
    before = [each.clone() for each in loss.parameters()]
    update()
    for was, now in zip(before, loss.parameters(), strict=True):
        assert now.isfinite().all()
        assert not torch.equal(was, now)


def test_updates_are_timed(monkeypatch: pytest.MonkeyPatch):
    """On a CPU each is called as it is: a rehearsal."""
    monkeypatch.setattr(updates, "STORED", 64)
    monkeypatch.setattr(updates, "probe_of", lambda device: lambda: 3.0)
    monkeypatch.setattr(updates.clocks, "runs", lambda call, *_: (call(), [2e-6])[1])
    found = [*updates.timed("cpu", (8,), ("sac",))]
    ours = (OURS, f"{OURS}, priorities", f"{OURS}, priorities, prefetch")
    assert {(each["form"], each["precision"]) for each in found} == {
        (form, how) for form in (BY_HAND, updates.SEPARATE, *ours) for how in ("highest", "high")
    }
    assert all(each["microseconds"] == pytest.approx(2) for each in found)


def test_updates_that_are_compiled_are_timed_last_and_none_after_the_deadline(monkeypatch: pytest.MonkeyPatch):
    """A compiler takes a minute for some, and the time of a stage may be over before."""
    monkeypatch.setattr(updates, "probe_of", lambda device: lambda: 3.0)
    monkeypatch.setattr(updates.clocks, "runs", lambda call, *_: (call(), [2e-6])[1])
    monkeypatch.setattr(updates, "timed_forms", lambda *_: dict.fromkeys((BY_HAND, OURS), lambda: lambda: None))
    monkeypatch.setattr(updates.gpubuf, "capture", lambda update, device: update)
    monkeypatch.setattr(torch, "compile", lambda update, mode="": update)
    found = [*updates.timed("cuda", (8,), ("sac", "td3"))]
    forms = [each["form"] for each in found]
    assert {*forms[:8]} == {BY_HAND, OURS}
    assert {*forms[8:]} == {f"{BY_HAND}, reduce-overhead", f"{BY_HAND}, compiled, in a graph"}
    assert len(forms) == 16
    assert {each["algorithm"] for each in found[:8]} == {"sac", "td3"}
    assert [*updates.timed("cuda", (8,), ("sac",), deadline=time.time() - 1)] == []


def test_results_are_kept_when_an_update_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def cut(*_: Any) -> Iterator[dict[str, Any]]:
        yield {"form": OURS}
        raise KeyboardInterrupt

    monkeypatch.setattr(updates, "timed", cut)
    with pytest.raises(KeyboardInterrupt):
        updates.main(["cpu", "--out", str(tmp_path / "found.json")])
    assert json.loads((tmp_path / "found.json").read_text())["update_times"] == [{"form": OURS}]


def test_the_model_of_networks_knows_what_takes_time():
    """More rows, float32's products and smaller GPUs take longer; programs and operations are those of the kernels."""
    few, some, many = ((rows, 128, 32, 4) for rows in (16, 32, 64))
    took = lambda *a: sum(each[-1] for each in of_perceptrons(*a).values())  # noqa: E731
    gpu = TARGETS["H200"]
    assert took(256, gpu, "tf32", few) < took(1024, gpu, "tf32", few) < took(8192, gpu, "tf32", many)
    assert took(8192, gpu, "tf32", some) <= took(8192, gpu, "tf32x3", some) < took(8192, gpu, "ieee", some)
    assert took(8192, gpu, "tf32", many) < took(8192, TARGETS["RTX 4090"], "tf32", many)
    programs = {name: each[0] for name, each in of_perceptrons(256, gpu, "tf32", few).items()}
    assert programs["sac_act"] == 2 * 16
    assert programs["sac_values"] == 6 * 16
    assert programs["sac_value_gradients"] == 4 * 16 + 1
    assert programs["sac_action_gradients"] == 16
