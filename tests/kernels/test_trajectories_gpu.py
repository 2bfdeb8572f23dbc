"""The trajectory index on a real GPU against its CPU twin: barriers, launches, graphs, sizes."""

from __future__ import annotations

import contextlib

import pytest
import torch

from gpubuf.kernels import philox, rows, trajectories
from gpubuf.kernels.trajectories import ReturnRule, Rule
from tests.support.waiting import no_waiting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RULES = [Rule(4, 4), Rule(8, 1, 7, 7), Rule(5, 2, by_transition=True)]


class Twin:
    """An index and its signals on one device."""

    def __init__(self, steps: int, envs: int, fan_out: int, rule: Rule, by_id: bool, device: str) -> None:
        self.steps, self.envs, self.fan_out, self.rule, self.by_id = steps, envs, fan_out, rule, by_id
        self.storage = torch.zeros(steps * envs, dtype=torch.int64 if by_id else torch.bool, device=device)
        entry = rows.table_entry(self.storage.data_ptr(), self.storage.element_size())
        self.signals = torch.tensor([entry], device=device)
        self.ends, self.sums = trajectories.new_index(steps, envs, fan_out, device)
        self.ring = rows.new_ring(device)
        self.rng = philox.new_state(7, device)
        self.eligible = torch.zeros(trajectories.eligible_words(steps * envs), dtype=torch.int64, device=device)

    def write(self, batch: torch.Tensor) -> None:
        """Rows ``[n, E]``."""
        flat = batch.to(self.storage.device).reshape(-1)
        rows.extend(self.signals, [flat], self.ring, flat.numel(), self.steps * self.envs)
        self.update(batch.shape[0])

    def update(self, n: int) -> None:
        shape = (self.steps, self.envs, self.fan_out)
        trajectories.update(self.ends, self.sums, self.ring, self.signals, self.by_id, n, *shape, *self.rule)

    def draw(self, n: int) -> tuple[torch.Tensor, ...]:
        shape = (self.steps, self.envs, self.fan_out)
        return trajectories.draw(self.ends, self.sums, self.ring, self.rng, None, n, *shape, *self.rule)

    def queries(self, n: int, written: int, row: torch.Tensor) -> list[torch.Tensor]:
        """Everything that can be asked of it."""
        row = row.to(self.ring.device)
        shape = (self.steps, self.envs)
        touched = trajectories.update_eligible(self.eligible, self.ends, self.ring, written, 3, True, *shape)
        return [
            self.ends,
            self.sums,
            *self.draw(n),
            *trajectories.slices(self.ends, self.ring, row, self.rule.slice_len, *shape),
            trajectories.bounds(self.ends, self.ring, row, *shape),
            touched,
            self.eligible,
            self.rng,
        ]


def assert_twins(twins: list[Twin], written: int, generator: torch.Generator) -> None:
    gpu, cpu = twins
    size = int(cpu.ring[1])
    row = torch.randint(0, size, (300,), generator=generator)
    for found, due in zip(gpu.queries(700, written, row), cpu.queries(700, written, row), strict=True):
        assert torch.equal(found.cpu(), due)


def signals(n: int, envs: int, by_id: bool, generator: torch.Generator, chance: float = 0.05) -> torch.Tensor:
    flags = torch.rand(n, envs, generator=generator) < chance
    return flags.long().cumsum(0) if by_id else flags


@pytest.mark.parametrize("by_id", [False, True], ids=["flags", "ids"])
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(
    ("steps", "envs", "fan_out"), [(5000, 1, 16), (5000, 1, 64), (300, 24, 32), (300, 33, 2), (130, 4096, 32)]
)
def test_against_the_twin(steps, envs, fan_out, rule, by_id):
    """CASES 15, 19: all kinds of launches, exactly as on the CPU."""
    twins = [Twin(steps, envs, fan_out, rule, by_id, device) for device in ("cuda", "cpu")]
    generator = torch.Generator().manual_seed(steps + envs)
    for n in (8, 1, 1, steps // 2, 1, 64, steps - 1, 1, 1, 3, steps, steps // 3, 1):
        batch = signals(n, envs, by_id, generator)
        for twin in twins:
            twin.write(batch)
        assert_twins(twins, n, generator)


def test_a_large_ring():
    """Every level, by launches of their own: a fill of 20 million steps, writes across words of words, a resum."""
    steps, rule = 20_000_003, RULES[0]
    twins = [Twin(steps, 1, 32, rule, False, device) for device in ("cuda", "cpu")]
    generator = torch.Generator().manual_seed(0)
    for n in (steps - 7, 100_000, 1, 1_000_000, 5000):
        batch = signals(n, 1, False, generator, chance=0.002)
        for twin in twins:
            twin.write(batch)
        assert_twins(twins, n, generator)
    for twin in twins:
        twin.rule = RULES[2]
        trajectories.resum(twin.ends, twin.sums, twin.ring, steps, 1, 32, *twin.rule)
    assert_twins(twins, 5000, generator)


def test_a_captured_graph():
    """CASES 33: replays see the ring move on, and draw anew."""
    rule = Rule(4, 4)
    gpu, cpu = (Twin(1000, 3, 32, rule, False, device) for device in ("cuda", "cpu"))
    generator = torch.Generator().manual_seed(1)
    for twin in (gpu, cpu):
        twin.write(torch.zeros(1000, 3, dtype=torch.bool))
    source = torch.zeros(1, 3, dtype=torch.bool, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    # what compiles, and a write that the twin makes as well
    with torch.cuda.stream(side):
        gpu.write(source)
        gpu.draw(16)
    torch.cuda.current_stream().wait_stream(side)
    cpu.write(torch.zeros(1, 3, dtype=torch.bool))
    cpu.draw(16)
    table = gpu.signals
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows.extend(table, [source.reshape(-1)], gpu.ring, 3, 3000)
        gpu.update(1)
        drawn = gpu.draw(16)
    for _ in range(200):
        batch = torch.rand(1, 3, generator=generator) < 0.1
        source.copy_(batch)
        graph.replay()
        cpu.write(batch)
        for found, due in zip((gpu.ends, gpu.sums, *drawn), (cpu.ends, cpu.sums, *cpu.draw(16)), strict=True):
            assert torch.equal(found.cpu(), due)


def test_no_sync():
    twin = Twin(500, 7, 32, Rule(4), False, "cuda")
    batch = torch.zeros(500, 7, dtype=torch.bool, device="cuda")
    table, row = twin.signals, torch.arange(10, device="cuda")
    with no_waiting():
        for n in (500, 1, 64):
            rows.extend(table, [batch[:n].reshape(-1)], twin.ring, n * 7, 3500)
            twin.update(n)
            twin.queries(32, n, row)
            trajectories.resum(twin.ends, twin.sums, twin.ring, 500, 7, 32, *twin.rule)


@pytest.mark.parametrize(("steps", "envs"), [(5000, 1), (300, 64)])
def test_returns_are_those_of_the_cpu(steps, envs):
    """Also of a graph, whose replays go on with what was written since. No host sync."""
    flags = torch.rand(4 * steps, envs, generator=torch.Generator().manual_seed(1)) < 0.01
    twins = [Twin(steps, envs, 16, Rule(1), False, device) for device in ("cpu", "cuda")]
    rewards = torch.randn(steps * envs, 2, generator=torch.Generator().manual_seed(2))
    found = []
    for twin in twins:
        device = twin.ring.device
        own, returns = rewards.to(device), torch.full((steps * envs, 2), 7.0, device=device)
        entry = torch.tensor([rows.table_entry(own.data_ptr(), 8)], device=device)
        rule = torch.tensor(ReturnRule(0.99), dtype=torch.float64, device=device)

        def update(n, twin=twin, returns=returns, entry=entry, rule=rule):
            code = rows.dtype_code(torch.float32)
            trajectories.update_returns(returns, twin.ends, twin.ring, entry, rule, code, n, steps, envs)

        at = 0
        for n in (steps // 2, 1, steps, 1, 200, steps // 3):
            twin.write(flags[at : at + n])
            with no_waiting() if device.type == "cuda" else contextlib.nullcontext():
                update(n)
            at += n
        twin.write(flags[at : at + 1])
        update(1)
        if device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                update(1)
        for n in range(20):
            twin.write(flags[at + 1 + n : at + 2 + n])
            graph.replay() if device.type == "cuda" else update(1)
        found.append((returns.cpu(), own))
    torch.testing.assert_close(found[1][0], found[0][0], equal_nan=True)
