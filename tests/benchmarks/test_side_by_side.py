"""Buffers and losses beside others: the contenders do the same, calls take turns, and the tables say what was found."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.measure import in_turn as timing
from benchmarks.measure.in_turn import Contender, in_turn, operations
from benchmarks.studies import side_by_side as study
from benchmarks.workloads import adapters, computed_batches, losses, plain_losses
from gpubuf.integrations import cleanrl


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


def test_computed_batches(monkeypatch: pytest.MonkeyPatch):
    """Every contender draws the sizes of the table, and what torch normalises is what the launch normalises."""
    monkeypatch.setattr(computed_batches, "ROWS", 1200)
    monkeypatch.setattr(computed_batches, "WIDE_ROWS", 1200)
    for make in (computed_batches.n_step, computed_batches.observations, computed_batches.normalised):
        for contender in make().values():
            assert list(contender.calls) == ["batch of 256", "batch of 4096"]
            assert contender.calls["batch of 256"]().shape == (256,)  # type: ignore[attr-defined]


def test_a_full_buffer_is_timed():
    steps = adapters.stable_steps(adapters.BOX, 2, 20)
    buffer = cleanrl.ReplayBuffer(600, adapters.BOX, adapters.ACTION, "cpu", 2)
    made = adapters.stable_contender(buffer, steps)
    assert buffer.full
    for call in made.calls.values():
        call()
    assert made.n_bytes is not None
    assert made.n_bytes >= 600 * 4 * (17 + 6 + 17 + 2)


def test_calls_take_turns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timing, "TURN", 0.0)
    seen = []
    call = lambda: torch.zeros(2).add(seen.append("one") or 1)  # noqa: E731
    found = in_turn({"one": Contender({"a": call}, 7, call), "two": Contender({"a": lambda: seen.append("two")})}, 2)
    assert seen[:8] == ["one", "one", "two", "two"] * 2
    assert found["one"]["calls"]["a"] > 0
    assert (found["one"]["bytes"], found["one"]["operations"]) == (7, 2)
    assert found["two"].keys() == {"calls"}


def test_what_lies_between_two_calls_is_not_timed(monkeypatch: pytest.MonkeyPatch):
    """A call that takes a second on this clock, after something that takes ten."""
    clock = [0.0]
    monkeypatch.setattr(timing, "TURN", 30.0)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def passing(seconds: float):
        return lambda: clock.__setitem__(0, clock[0] + seconds)

    made = Contender({"a": passing(1.0)}, between=passing(10.0))
    assert in_turn({"one": made}, 3)["one"]["calls"]["a"] == pytest.approx(1e6)


FOUND = {
    "theirs": {"bytes": 3 << 20, "calls": {"add": 10.0, "sample 256": 100.0}},
    "gpubuf": {"bytes": 700, "calls": {"add": 5.0}},
}


def test_the_command(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """It writes what could be measured, and names what could not."""
    monkeypatch.setattr(study, "found_by", lambda *_, **__: FOUND)
    out = tmp_path / "adapters.json"
    study.main(["adapters", "--tables", "sb3", "cleanrl", "--out", str(out)])
    assert json.loads(out.read_text())["adapters"] == {"sb3": FOUND, "cleanrl": FOUND}
    monkeypatch.undo()
    monkeypatch.setattr(study, "peer_python", lambda peer: "/bin/false")
    study.main(["adapters", "--tables", "lerobot", "--out", str(out)])
    assert json.loads(out.read_text())["adapters"] == {}
    assert "lerobot: can't be measured here" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        study.main(["losses", "--tables", "lerobot"])
