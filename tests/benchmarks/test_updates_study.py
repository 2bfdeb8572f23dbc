"""Kernels of whole updates: as few as promised, and no more than were counted."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.measure.prediction import FASTSAC, TARGETS, Networks, Target, of_perceptrons
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


SAC, GPU = Networks(), TARGETS["H200"]


def took(n: int, on: Target, precision: str, networks: Networks = SAC, **how: Any) -> float:
    return sum(each.microseconds for each in of_perceptrons(n, on, precision, networks, **how).values())


def test_the_model_of_networks_knows_what_takes_time():
    """More rows, float32's products, smaller GPUs and layer norms take longer; parts of the rows of a batch less."""
    few, many = ({"tiles_of": lambda *_, rows=rows: (rows, 128, 32)} for rows in (16, 64))
    assert took(256, GPU, "tf32", **few) < took(1024, GPU, "tf32", **few) < took(8192, GPU, "tf32", **many)
    assert took(8192, GPU, "tf32", **many) < took(8192, GPU, "tf32", **few)
    assert took(256, GPU, "tf32", **few) < took(256, GPU, "tf32", **many)
    assert took(8192, GPU, "bf16") <= took(8192, GPU, "tf32") <= took(8192, GPU, "tf32x3") < took(8192, GPU, "ieee")
    assert took(8192, GPU, "tf32") < took(8192, TARGETS["RTX 4090"], "tf32")
    assert took(8192, TARGETS["RTX 4090"], "bf16") < took(8192, TARGETS["RTX 4090"], "tf32")
    assert took(256, GPU, "tf32", SAC._replace(policy=False)) < took(256, GPU, "tf32")
    assert took(256, GPU, "tf32") < took(256, GPU, "tf32", SAC._replace(norm=True))
    tile: dict[str, Any] = {"weight_tile": lambda *_: (64, 128, 32)}
    assert took(8192, GPU, "tf32", **tile, parts=3) < took(8192, GPU, "tf32", **tile)


def test_the_model_counts_programs_operations_and_bytes():
    found = of_perceptrons(256, GPU, "tf32", SAC, lambda *_: (16, 128, 32), lambda *_: (32, 64, 32))
    programs = {name: each.programs for name, each in found.items()}
    assert programs == {
        "sac_act": 2 * 16,
        "sac_values": 6 * 16,
        "sac_value_gradients": 4 * 16 + 1,
        "sac_action_gradients": 16,
        # Of each critic 4 + 4 + 32 + 8 tiles, where states and actions are apart, of the actor 4 + 32 + 8.
        "weight_gradients": 2 * 48 + 44,
    }
    values = found["sac_values"]
    assert values.operations == 96 * 2 * 16 * 32 * (2 * 128 + 16 * 128 + 8 * 16)
    of_layers = (23 * (2 * 16 + 256) + 16 * 256, 256 * (2 * 16 + 256) + 16 * 256, 256 * (16 + 1) + 16)
    assert values.bytes == 96 * 4 * sum(of_layers)


def test_what_does_not_fit_the_cache_goes_to_memory():
    """Of few rows all does; of many a GPU with less bandwidth to its memory takes longer."""
    slow = dataclasses.replace(GPU, memory=GPU.memory / 10)
    assert took(256, slow, "tf32") == took(256, GPU, "tf32")
    assert took(8192, slow, "tf32") > 1.5 * took(8192, GPU, "tf32")
    assert took(8192, dataclasses.replace(slow, cache=1e9), "tf32") == took(8192, GPU, "tf32")


def test_fastsac_has_launches_of_its_atoms_and_critics_alone_fewer():
    critics, both = (of_perceptrons(8192, GPU, "bf16", FASTSAC._replace(policy=learns)) for learns in (False, True))
    assert both.keys() - critics.keys() == {"sac_action_gradients"}
    atoms = {f"categorical_{name}" for name in ("target", "loss", "loss_sum")}
    assert critics.keys() - of_perceptrons(8192, GPU, "bf16", SAC) == atoms
    assert all(each.microseconds <= both[name].microseconds for name, each in critics.items())
