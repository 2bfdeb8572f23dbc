"""What `gpubuf tune` tunes for, what it tries, and how it chooses: all without a GPU."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpubuf.kernels import _tuned, config
from gpubuf.kernels.config import SPACES, DrawConfig, FanOut
from gpubuf.tuning.operations import Shapes, candidates, jobs, rule
from gpubuf.tuning.report import notes
from gpubuf.tuning.search import MARGIN, Trial, choose, disagreement
from gpubuf.tuning.timing import Timing
from tests.support.tuning_setup import BLOCK, DRAW, FAN_OUT, FakeBench, FakeTimer, draw_seconds, never, tuned

ROOT = Path(__file__).parents[2]

LARGE = Shapes((10**6, 6 * 10**8), (1, 256, 100_000), envs=4096, slice_len=100)


class TestShapes:
    @pytest.mark.parametrize(
        "wrong",
        [
            {"capacities": ()},
            {"batch_sizes": ()},
            {"row": ()},
            {"capacities": (0,)},
            {"batch_sizes": (256, -1)},
            {"envs": 0},
            {"slice_len": 0},
            {"row": ((("x",), torch.uint8, (0,)),)},
            {"row": ((("x",), torch.uint8, (1,)), (("x",), torch.uint8, (2,)))},
        ],
        ids=str,
    )
    def test_what_makes_no_sense_is_refused(self, wrong):
        with pytest.raises(ValueError, match=r"must|twice|no bytes"):
            Shapes(**wrong)

    @pytest.mark.parametrize("shapes", [Shapes(), LARGE, Shapes((1,), (1,))], ids=["default", "large", "one"])
    @pytest.mark.parametrize("thorough", [False, True])
    def test_jobs(self, shapes, thorough):
        """Every operation, every size once, the fan-out of a tree before what depends on it."""
        found = jobs(shapes, thorough)
        assert {job.operation for job in found} == SPACES.keys()
        assert len(set(map(str, found))) == len(found)
        for number, job in enumerate(found):
            assert set(SPACES[job.operation].sizes) <= {*job.sizes, *(["fan_out"] if job.tree else [])}
            if job.tree:
                trees = [(before.operation, before.sizes.get("capacity")) for before in found[:number]]
                assert (job.tree, job.sizes["capacity"]) in trees
        for operation in ("sum_tree_draw", "rows_copy", "loss_rows"):
            assert {job.sizes["n"] for job in found if job.operation == operation} == set(shapes.batch_sizes)

    def test_what_a_step_writes_is_marked(self):
        """Where it is many rows: for a few there is little to choose, unless time does not matter."""
        for envs, thorough, due in ((1, False, False), (1, True, True), (4096 * 16, False, True)):
            found = jobs(Shapes(envs=envs), thorough)
            assert due == any(job.operation == "sum_tree_update" and job.sizes["n"] == envs for job in found)


class TestCandidates:
    """A pure function; whatever it names is something that a tuned file may hold."""

    @pytest.mark.parametrize("shapes", [Shapes(), LARGE, Shapes((1,), (1,))], ids=["default", "large", "one"])
    @pytest.mark.parametrize("fan_out", [2, 32, 1024])
    @pytest.mark.parametrize("thorough", [False, True])
    def test_all_can_be_run(self, shapes, fan_out, thorough):
        for job in jobs(shapes, thorough):
            sizes, space = job.sizes | {"fan_out": fan_out}, SPACES[job.operation]
            tried = candidates(job.operation, sizes, thorough)
            assert len(set(tried)) == len(tried)
            assert tried[0] == rule(job.operation, sizes)
            # The rule's own may be larger than what is worth trying, with a fan-out that nobody would choose.
            for made in tried[1:]:
                point = {name: sizes[name] for name in space.sizes}
                assert not _tuned.invalid(space, point, dataclasses.asdict(made))

    def test_quick_ones_change_one_field(self):
        found = candidates("sum_tree_draw", {"fan_out": 32, "n": 256})
        assert found == [DrawConfig(4, 1), DrawConfig(8, 1), DrawConfig(2, 1), DrawConfig(4, 2)]

    def test_both_ways_to_update(self):
        """Where one program is faster than a launch a level depends on the device."""
        for n, both in ((256, True), (4096, True), (10**6, False)):
            tried = candidates("sum_tree_update", {"fan_out": 32, "n": n})
            assert len({made.single_program for made in tried}) == 1 + both


class TestChoice:
    def trial(self, *seconds: float) -> Trial:
        return Trial(seconds, {str(number): Timing(value) for number, value in enumerate(seconds)})

    def test_the_fastest(self):
        trials = [self.trial(s) for s in (3.0, 1.0, 2.0)]
        assert choose(trials) is trials[1]
        assert choose([]) is None

    def test_an_earlier_one_unless_clearly_worse(self):
        trials = [self.trial(s) for s in (1.0 + 0.9 * MARGIN, 1.0)]
        assert choose(trials) is trials[0]
        trials = [self.trial(s) for s in (1.0 + 1.1 * MARGIN, 1.0)]
        assert choose(trials) is trials[1]

    def test_all_calls_count_the_same(self):
        """Twice as fast for a small batch makes up for half as much again for a large one."""
        assert choose([self.trial(1e-6, 1e-3), (best := self.trial(0.5e-6, 1.5e-3))]) is best


class TestDisagreement:
    def test_rounding_is_none(self):
        a = torch.rand(100, dtype=torch.float64)
        assert not disagreement([a], [a * (1 + 1e-9)])
        assert not disagreement([torch.full((3,), math.nan)], [torch.full((3,), math.nan)])

    @pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
    def test_one_wrong_element_of_a_few(self, dtype):
        a = torch.zeros(300, dtype=dtype)
        b = a.clone()
        b[7] = 1
        assert "1 of 300" in disagreement([a], [b])

    def test_one_in_a_thousand_may_lie_on_an_edge(self):
        a, b = torch.zeros(2000, dtype=torch.int64), torch.zeros(2000, dtype=torch.int64)
        b[:2] = 1
        assert not disagreement([a], [b])
        b[:3] = 1
        assert disagreement([a], [b])


class TestSearch:
    def test_the_fastest_is_chosen(self):
        best = DrawConfig(8, 1)
        (result,) = tuned([DRAW], timer := FakeTimer(draw_seconds(best)))
        assert result.chosen is not None
        assert result.chosen.config == best
        assert result.sizes == {"fan_out": 32, "n": 256}
        assert result.rule == DrawConfig(4, 1)
        assert result.by_rule is result.trials[0]
        assert result.chosen.timings.keys() == {"one", "two"}
        assert not result.rejected
        # Both workloads of every candidate were timed with it in force.
        tried = candidates("sum_tree_draw", result.sizes)
        assert timer.seen == [made for made in tried for _ in range(2)]
        assert config.tree_draw(32, 256) == DrawConfig(4, 1), "nothing stays in force"

    def test_the_chosen_fan_out_is_what_the_rest_is_tuned_for(self):
        bench = FakeBench()
        timer = FakeTimer(lambda made: abs(made.fan_out - 65) + 1 if isinstance(made, FanOut) else 1.0)
        fan_out, draw = tuned([FAN_OUT, DRAW], timer, bench)
        assert fan_out.chosen is not None
        assert fan_out.chosen.config == FanOut(64)
        assert draw.sizes == {"fan_out": 64, "n": 256}
        assert bench.fan_outs == [32, 64, 16, 128, 8, 64], "a tree for every fan-out, then one for all launches"

    @pytest.mark.parametrize("failing", [DrawConfig(8, 1), DrawConfig(4, 1)], ids=["another", "the rule's"])
    def test_what_does_not_run_is_left_out(self, failing):
        seconds = draw_seconds(failing)
        (result,) = tuned([DRAW], FakeTimer(lambda made: never(made) if made == failing else seconds(made)))
        assert result.rejected == ((failing, "does not compile"),)
        assert result.chosen is not None
        assert result.chosen.config != failing
        assert failing not in [trial.config for trial in result.trials]
        assert (result.by_rule is None) == (failing == result.rule)

    @pytest.mark.parametrize("spilling", [DrawConfig(8, 1), DrawConfig(4, 1), FanOut(64)], ids=str)
    def test_what_spills_is_left_out(self, spilling):
        """But for the rule's, which is what there is otherwise, and fan-outs, whose launches are still to be tuned."""

        class Spilling(FakeTimer):
            def time(self, calls):
                timing = super().time(calls)
                return dataclasses.replace(timing, spilled="kernel 12" if self.seen[-1] == spilling else "")

        job = FAN_OUT if isinstance(spilling, FanOut) else DRAW
        (result,) = tuned([job], Spilling(lambda made: 1.0 if made == spilling else 2.0))
        assert result.chosen is not None
        if spilling == DrawConfig(8, 1):
            assert result.rejected == ((spilling, "spills registers: kernel 12"),)
        else:
            assert result.chosen.config == spilling
            assert notes([result]) == [f"{job}: spills registers: kernel 12"] * 2

    @pytest.mark.parametrize(
        ("error", "reason"),
        [
            (None, "one: 3 of 3 elements of a result differ from the rule's"),
            (RuntimeError("out of resources\nmore"), "one: RuntimeError: out of resources"),
        ],
    )
    def test_what_gives_other_results_or_errors_is_left_out(self, error, reason):
        wrong = DrawConfig(8, 1)

        def result(made):
            if error and made == wrong:
                raise error
            return torch.full((3,), float(made == wrong))

        (found,) = tuned([DRAW], FakeTimer(draw_seconds(wrong)), FakeBench(result))
        assert found.rejected == ((wrong, reason),)

    def test_too_little_memory(self):
        class Full(FakeBench):
            def workloads(self, job, fan_out=0):
                raise torch.OutOfMemoryError("8 GiB")

        fan_out, draw = tuned([FAN_OUT, DRAW], FakeTimer(), Full())
        assert fan_out.chosen is draw.chosen is None
        assert {reason for _, reason in fan_out.rejected} == {"the GPU's memory does not suffice"}
        assert draw.sizes["fan_out"] == 32, "the rule's"

    def test_little_time(self):
        """The rule is timed whatever it takes, and what is left is shared among the points to come."""
        now = [0.0]

        def seconds(made):
            now[0] += 1.0
            return 1.0

        results = tuned([BLOCK, BLOCK, BLOCK], FakeTimer(seconds), budget=18.0, clock=lambda: now[0])
        # Two workloads a candidate: three candidates in the six seconds of the first.
        assert [len(result.trials) for result in results] == [3, 3, 3]
        assert [result.untried for result in results] == [2, 2, 2]
        results = tuned([BLOCK, BLOCK], FakeTimer(seconds), budget=0.5, clock=lambda: now[0])
        assert [len(result.trials) for result in results] == [1, 1]
        assert all(result.chosen is not None for result in results)

    def test_tuned_files_have_no_say(self, monkeypatch):
        """Fan-outs are compared by rule: an older file must not favour one of them."""
        asked = []
        monkeypatch.setattr(config, "folders", lambda: asked.append("folders") or [])

        def seconds(made):
            config.tree_update(made.fan_out, 100, "Some GPU")
            return 1.0

        tuned([FAN_OUT], FakeTimer(seconds))
        assert not asked
        config.tree_update(16, 100, "Some GPU")
        assert asked


@pytest.mark.slow
def test_what_is_timed_compiles_as_it_is_launched():
    """For sm_90, through the launchers and Triton's JIT, with the types and alignments of real arguments.

    So do the candidates with the largest and the smallest tiles.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.jit_without_gpu"],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    launches = json.loads(run.stdout.splitlines()[-1])
    assert {name.partition(":")[0] for name in launches} == SPACES.keys()
    for name, number in launches.items():
        # A batch of thousands is updated stage by stage: claims, the two lowest levels, and all above them.
        call = name.partition(": ")[2]
        stages = {"update 4,096": 4, "loss 4,096": 2, "actor loss 4,096": 2}.get(call, 1)
        # Sums over programs are added up by another launch.
        # So are those of batch norm where rows are many.
        parts = ("moments 4,096", "batch norm backward 4,096")
        if call.startswith(("categorical loss 256", "categorical loss 4,096", "layer norm backward", *parts)):
            stages = 2
        # Of 64 environments every program does some; the sums are left to one more.
        assert number == (2 if "write" in name else stages), name


@pytest.mark.parametrize(
    ("operation", "better"),
    [
        # A slice a warp, or several for four warps.
        pytest.param("trajectories_draw", 0.55, marks=pytest.mark.slow),
        pytest.param("rows_copy", 0.9, marks=pytest.mark.nightly),
    ],
)
def test_the_tuner_mends_the_rules_that_were_wrong(operation: str, better: float):
    """Where the cost model is its clock: slices that waited for each other in a warp, and copies in too small tiles."""
    command = [sys.executable, "-m", "tests.support.ptx.tuned", operation]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    times = {tuple(config.values()): math.prod(each) ** (1 / len(each)) for config, each in found["tried"]}
    (before, *_), chosen = times.values(), times[tuple(found["chosen"].values())]
    assert chosen < better * before
    assert chosen <= 1.02 * min(times.values())
    rules = {"trajectories_draw": config.index_draw(64, 32, 8), "rows_copy": config.rows_copy(32_768 * 166)}
    assert times[tuple(dataclasses.asdict(rules[operation]).values())] <= 1.05 * chosen
