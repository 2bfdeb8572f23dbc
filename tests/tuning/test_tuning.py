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
from gpubuf.kernels.config import SPACES, DrawConfig
from gpubuf.tuning.operations import OPERATIONS, Job, Shapes, candidates, jobs, rule
from gpubuf.tuning.report import notes
from gpubuf.tuning.search import MARGIN, Trial, choose, disagreement
from gpubuf.tuning.timing import Timing
from tests.support.tuning_setup import COPY, DRAW, FakeBench, FakeTimer, draw_seconds, never, tuned

LARGE = Shapes((10**6, 6 * 10**8), (1, 256, 100_000))


class TestShapes:
    @pytest.mark.parametrize(
        "wrong",
        [
            {"capacities": ()},
            {"batch_sizes": ()},
            {"row": ()},
            {"capacities": (0,)},
            {"batch_sizes": (256, -1)},
            {"row": ((("x",), torch.uint8, (0,)),)},
            {"row": ((("x",), torch.uint8, (1,)), (("x",), torch.uint8, (2,)))},
        ],
        ids=str,
    )
    def test_what_makes_no_sense_is_refused(self, wrong):
        with pytest.raises(ValueError, match=r"must|twice|no bytes"):
            Shapes(**wrong)

    @pytest.mark.parametrize("shapes", [Shapes(), LARGE, Shapes((1,), (1,))], ids=["default", "large", "one"])
    def test_jobs(self, shapes):
        """Every operation, every size once."""
        found = jobs(shapes)
        assert {job.operation for job in found} == set(OPERATIONS)
        assert len(set(map(str, found))) == len(found)
        for job in found:
            assert job.point.keys() == set(SPACES[job.operation].sizes)
        for operation in OPERATIONS:
            assert {job.sizes["n"] for job in found if job.operation == operation} == set(shapes.batch_sizes)


class TestCandidates:
    """A pure function; whatever it names is something that a tuned file may hold."""

    @pytest.mark.parametrize("shapes", [Shapes(), LARGE, Shapes((1,), (1,))], ids=["default", "large", "one"])
    @pytest.mark.parametrize("fan_out", [2, 32, 1024])
    def test_all_can_be_run(self, shapes, fan_out):
        for made in jobs(shapes):
            job = Job(made.operation, made.sizes | {"fan_out": fan_out})
            tried = candidates(job)
            assert len(set(tried)) == len(tried)
            assert tried[0] == rule(job.operation, job.sizes)
            # The rule's own may be larger than what is worth trying, with a fan-out that nobody would choose.
            for other in tried[1:]:
                assert not _tuned.invalid(SPACES[job.operation], job.point, dataclasses.asdict(other))

    def test_they_change_one_field(self):
        assert candidates(DRAW) == [DrawConfig(4, 1), DrawConfig(8, 1), DrawConfig(2, 1), DrawConfig(4, 2)]

    def test_both_ways_to_update(self):
        """Where one program is faster than a launch a level depends on the device."""
        for n, both in ((256, True), (4096, True), (10**6, False)):
            tried = candidates(Job("sum_tree_update", {"fan_out": 32, "n": n}))
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
        assert result.rule == DrawConfig(4, 1)
        assert result.by_rule is result.trials[0]
        assert result.chosen.timings.keys() == {"one", "two"}
        assert not result.rejected
        # Both workloads of every candidate were timed with it in force.
        tried = candidates(DRAW)
        assert timer.seen == [made for made in tried for _ in range(2)]
        assert config.tree_draw(32, 256) == DrawConfig(4, 1), "nothing stays in force"

    @pytest.mark.parametrize("failing", [DrawConfig(8, 1), DrawConfig(4, 1)], ids=["another", "the rule's"])
    def test_what_does_not_run_is_left_out(self, failing):
        seconds = draw_seconds(failing)
        (result,) = tuned([DRAW], FakeTimer(lambda made: never(made) if made == failing else seconds(made)))
        assert result.rejected == ((failing, "does not compile"),)
        assert result.chosen is not None
        assert result.chosen.config != failing
        assert failing not in [trial.config for trial in result.trials]
        assert (result.by_rule is None) == (failing == result.rule)

    @pytest.mark.parametrize("spilling", [DrawConfig(8, 1), DrawConfig(4, 1)], ids=str)
    def test_what_spills_is_left_out(self, spilling):
        """But for the rule's, which is what there is otherwise."""

        class Spilling(FakeTimer):
            def time(self, calls):
                timing = super().time(calls)
                return dataclasses.replace(timing, spilled="kernel 12" if self.seen[-1] == spilling else "")

        (result,) = tuned([DRAW], Spilling(lambda made: 1.0 if made == spilling else 2.0))
        assert result.chosen is not None
        if spilling == DrawConfig(8, 1):
            assert result.rejected == ((spilling, "spills registers: kernel 12"),)
        else:
            assert result.chosen.config == spilling
            assert notes([result]) == [f"{DRAW}: spills registers: kernel 12"] * 2

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
            def workloads(self, job):
                raise torch.OutOfMemoryError("8 GiB")

        (draw,) = tuned([DRAW], FakeTimer(), Full())
        assert draw.chosen is None
        assert {reason for _, reason in draw.rejected} == {"the GPU's memory does not suffice"}

    def test_little_time(self):
        """The rule is timed whatever it takes, and what is left is shared among the points to come."""
        now = [0.0]

        def seconds(made):
            now[0] += 1.0
            return 1.0

        results = tuned([COPY, COPY, COPY], FakeTimer(seconds), budget=18.0, clock=lambda: now[0])
        # Two workloads a candidate: three candidates in the six seconds of the first.
        assert [len(result.trials) for result in results] == [3, 3, 3]
        assert [result.untried for result in results] == [2, 2, 2]
        results = tuned([COPY, COPY], FakeTimer(seconds), budget=0.5, clock=lambda: now[0])
        assert [len(result.trials) for result in results] == [1, 1]
        assert all(result.chosen is not None for result in results)

    def test_tuned_files_have_no_say(self, monkeypatch):
        """An older file must not favour one of the candidates."""
        asked = []
        monkeypatch.setattr(config, "folders", lambda: asked.append("folders") or [])

        def seconds(made):
            config.tree_update(16, 100, "Some GPU")
            return 1.0

        tuned([DRAW], FakeTimer(seconds))
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
        [sys.executable, "-m", "tests.gates.jit_without_gpu"],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    launches = json.loads(run.stdout.splitlines()[-1])
    assert {name.partition(":")[0] for name in launches} == set(OPERATIONS)
    for name, number in launches.items():
        # A batch of thousands is updated stage by stage: claims, the lowest level, and all above it.
        assert number == (3 if name.endswith("update 4,096") else 1), name
