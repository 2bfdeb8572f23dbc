"""Batches of several buffers in captured graphs and in compiled code, and without a host sync."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf import MixedReplayBuffer, capture
from gpubuf.data.mixed_draws import Offsets
from tests.support.fake_cuda import fake_cuda, no_blocking_copies
from tests.support.graph_recorder import RecordedCuda
from tests.support.mixed_setup import part
from tests.support.transitions import same, transitions


@pytest.mark.parametrize("kind", ["uniform", "prioritized", "slices"])
def test_a_schedule_of_shares_in_a_graph(kind, monkeypatch):
    """Cases 33 and 45: shares that change between replays, and that the graph itself changes."""
    machine = RecordedCuda().install(monkeypatch)
    results = []
    for captures in (False, True):
        shares = torch.tensor([0.75, 0.25])
        mixed = MixedReplayBuffer([part(20, 0, kind=kind), part(20, 1000, kind=kind)], shares, batch_size=16)
        mixed.set_rng(torch.Generator().manual_seed(2))

        def step(data: TensorDict, mixed: MixedReplayBuffer = mixed, shares: Tensor = shares) -> TensorDict:
            mixed.extend(data)
            batch = mixed.sample()
            batch["td_error"] = batch["observation"][:, 0]
            mixed.update_tensordict_priority(batch)
            shares.add_(torch.tensor([-0.0625, 0.0625]))
            return batch

        machine.memory = [rows for buffer in mixed.buffers for rows in buffer.storage.row_tensors]
        run: Callable[[TensorDict], TensorDict] = capture(step, warmup=2) if captures else step
        found = []
        for turn in range(8):
            found.append(run(transitions(4, 100 * turn)).clone())
            if turn == 5:
                shares.copy_(torch.tensor([0.5, 0.5]))
        results.append(found)
    for turn, (eager, replayed) in enumerate(zip(*results, strict=True)):
        assert same(eager, replayed)
        if kind != "slices":
            due = 12 - turn if turn < 6 else 8 - (turn - 6)
            assert torch.bincount(eager["buffer"]).tolist() == [due, 16 - due]


def test_numbers_are_part_of_a_graph(monkeypatch):
    RecordedCuda().install(monkeypatch)
    mixed = MixedReplayBuffer([part(2, 0), part(20, 1000)], batch_size=8)
    step = capture(lambda: mixed.sample()["index"], warmup=1)
    step()
    with pytest.raises(Exception, match="stores fewer rows than its share"):
        step()


def test_small_shares_in_a_graph(monkeypatch):
    """Case 61: the graph rounds anew at each replay, as eager code does; what it can't leave out it refuses."""
    RecordedCuda().install(monkeypatch)
    mixed = MixedReplayBuffer([part(20, 0), part(20, 1000)], [0.75, 0.25], batch_size=2)
    mixed.set_rng(torch.Generator().manual_seed(2))
    step = capture(lambda: mixed.sample()["buffer"], warmup=2)
    found = torch.stack([step().clone() for _ in range(200)]).sum(1)
    assert set(found.tolist()) == {0, 1}
    assert found.sum() == pytest.approx(100, abs=30)
    mixed = MixedReplayBuffer([part(20, 0, kind="without replacement"), part(20, 1000)], [0.75, 0.25], batch_size=2)
    step = capture(lambda: mixed.sample()["index"], warmup=1)
    step()
    with pytest.raises(Exception, match="a batch size that makes each of them whole"):
        step()


@pytest.mark.parametrize("shares", ["whole", "numbers", "on the device"])
def test_compiled(shares):
    torch._dynamo.reset()
    results = []
    for compiles in (False, True):
        given = [0.75, 0.25] if shares == "whole" else [0.3, 0.7]
        mixed = MixedReplayBuffer(
            [part(20, 0, kind="prioritized"), part(20, 1000, kind="prioritized")],
            torch.tensor(given) if shares == "on the device" else given,
            batch_size=16,
        )
        mixed.set_rng(torch.Generator().manual_seed(3))
        for buffer in mixed.buffers:
            buffer.sampler.random_state("cpu").manual_seed(3)

        def step(data: TensorDict, mixed: MixedReplayBuffer = mixed) -> TensorDict:
            mixed.extend(data)
            batch = mixed.sample()
            batch["td_error"] = batch["observation"][:, 0]
            mixed.update_tensordict_priority(batch)
            return batch

        run = torch.compile(step, fullgraph=True, backend="aot_eager") if compiles else step
        with torch._dynamo.config.patch(error_on_recompile=True):
            results.append([run(transitions(4, 100 * turn)).clone() for turn in range(8)])
    # Compiled code that rounds draws whole batches of each buffer, and so other rows.
    matching = [list(map(same, *results))] if shares != "numbers" else []
    assert all(map(all, matching))
    found = [[int((batch["buffer"] == 0).sum()) for batch in batches] for batches in results]
    assert found[0] == found[1]
    assert set(found[0]) == ({12} if shares == "whole" else {4, 5})


@pytest.mark.parametrize("kind", ["uniform", "prioritized", "slices"])
def test_no_sync(kind, monkeypatch):
    # Fake tensors on the host have no numbers either, though reading those waits for nothing.
    monkeypatch.setattr(Offsets, "on_host", lambda offsets: 0.5 * offsets.seeded().uniform(1).numel())
    with fake_cuda(), no_blocking_copies():
        buffers = [part(0, 0, kind=kind, device="cuda") for _ in range(2)]
        data = TensorDict(
            {
                "observation": torch.zeros(12, 3, device="cuda"),
                "next": {"done": torch.zeros(12, 1, dtype=torch.bool, device="cuda")},
            },
            [12],
        )
        for shares in ([0.5, 0.5], [0.3, 0.7], torch.ones(2, device="cuda")):
            mixed = MixedReplayBuffer(buffers, shares)
            for number in range(2):
                mixed.extend(data, buffer=number)
            batch, info = mixed.sample(8, return_info=True)
            if kind == "prioritized":
                mixed.update_priority(
                    info["index"],
                    batch["observation"][:, 0],
                    buffer=info["buffer"],
                    generation=info["index_generation"],
                )
