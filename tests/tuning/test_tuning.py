"""What `gpubuf tune` tries, how it chooses and what it writes, without a GPU: the timer is told the times."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

from gpubuf.cli import main
from gpubuf.kernels import _tuned, config
from gpubuf.kernels.config import SPACES, DrawConfig
from gpubuf.tuning import search
from gpubuf.tuning.search import MARGIN, Result, difference, save, tune
from gpubuf.tuning.workloads import OPERATIONS, Job, Workload, candidates, jobs, workloads
from tests.support.interpreter import triton_on_cpu

CPU, DEVICE = torch.device("cpu"), "Some GPU 80GB"
DRAW = Job("sum_tree_draw", {"capacity": 10**6, "fan_out": 32, "n": 256})
BEST, RULE = DrawConfig(8, 1), DrawConfig(4, 1)
ROW = ((("x",), torch.float32, (3,)), (("next", "done"), torch.bool, (1,)), (("p",), torch.uint8, (5,)))
SIZES = [([10**6], [256, 4096, 32768]), ([10**6, 6 * 10**8], [1, 256, 100_000]), ([1], [1])]


def in_force():
    """The configuration that is being tried."""
    (made,) = config._explicit.values()
    return made


def tuned(seconds=lambda made: 1.0 if made == BEST else 2.0, result=lambda made: torch.zeros(3), job=DRAW) -> Result:
    """Of two calls, whose times and results follow from the configuration in force."""
    works = [Workload(name, [], lambda: result(in_force())) for name in ("one", "two")]
    return tune(job, works, lambda calls: seconds(in_force()))


@pytest.mark.parametrize(("capacities", "batch_sizes"), SIZES)
def test_jobs(capacities, batch_sizes):
    """Every operation, every size once; and every candidate is one that a tuned file may hold, the rule's first."""
    found = jobs(capacities, batch_sizes, ROW)
    assert len(set(map(str, found))) == len(found)
    for operation in OPERATIONS:
        assert {job.sizes["n"] for job in found if job.operation == operation} == set(batch_sizes)
    for made in found:
        for fan_out in (2, 32, 1024):
            job = Job(made.operation, made.sizes | {"fan_out": fan_out})
            tried = candidates(job)
            assert len(set(tried)) == len(tried)
            with config.by_rule():
                assert tried[0] == config.CHOICES[job.operation](**job.point)
            for other in tried[1:]:
                assert not _tuned.invalid(SPACES[job.operation], job.point, dataclasses.asdict(other))


def test_candidates_change_one_field_and_both_ways_to_update_are_tried():
    assert candidates(DRAW) == [RULE, BEST, DrawConfig(2, 1), DrawConfig(4, 2)]
    for n, both in ((256, True), (4096, True), (10**6, False)):
        tried = candidates(Job("sum_tree_update", {"fan_out": 32, "n": n}))
        assert len({made.single_program for made in tried}) == 1 + both


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ([[3.0], [1.0], [2.0]], 1),
        ([[1 + 0.9 * MARGIN], [1.0]], 0),
        ([[1 + 1.1 * MARGIN], [1.0]], 1),
        # Twice as fast for a small batch makes up for half as much again for a large one.
        ([[1e-6, 1e-3], [0.5e-6, 1.5e-3]], 1),
    ],
)
def test_the_choice(times, chosen):
    assert Result(DRAW, {i: dict(enumerate(each)) for i, each in enumerate(times)}).chosen == chosen


def test_difference():
    a = torch.rand(100, dtype=torch.float64)
    assert not difference([a], [a * (1 + 1e-9)])
    assert not difference([torch.full((3,), math.nan)], [torch.full((3,), math.nan)])
    for dtype in (torch.int64, torch.float32, torch.bool):
        wrong = torch.zeros(300, dtype=dtype)
        wrong[7] = 1
        assert "1 of 300" in difference([torch.zeros(300, dtype=dtype)], [wrong])
    large = torch.full((3,), 10**6)
    assert "3 of 3" in difference([large], [large + 1])
    assert "shape [2]" in difference([torch.zeros(3)], [torch.zeros(2)])
    edge = torch.zeros(2000, dtype=torch.int64)
    edge[:2] = 1
    assert not difference([torch.zeros_like(edge)], [edge])


def test_the_fastest_is_chosen_and_nothing_stays_in_force():
    result = tuned()
    assert (result.by_rule, result.chosen) == (RULE, BEST)
    assert list(result.seconds) == candidates(DRAW)
    assert result.seconds[BEST] == {"one": 1.0, "two": 1.0}
    assert not result.rejected
    assert config.tree_draw(32, 256) == RULE


def test_what_fails_or_gives_other_results_is_left_out():
    def failing(made):
        if made == BEST:
            raise RuntimeError("out of resources\nmore")
        return 1.0

    assert tuned(failing).rejected == {BEST: "RuntimeError: out of resources"}
    wrong = tuned(result=lambda made: torch.full((3,), float(made == BEST)))
    assert wrong.rejected == {BEST: "3 of 3 elements of a result differ from the rule's"}
    assert wrong.chosen == RULE

    def lost(made):
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        tuned(lost)


def test_what_is_written_is_what_is_chosen(tmp_path, monkeypatch):
    """Also by a choice made before: saving makes the process read the file anew. Points for other sizes stay."""
    folder = tmp_path / "new" / "folder"
    monkeypatch.setattr(config, "user_folder", lambda: folder)
    assert config.tree_draw(32, 256, DEVICE) == RULE
    path = save(folder, DEVICE, [tuned()], {"capacity": 5})
    assert path == folder / "some-gpu-80gb.json"
    assert config.tree_draw(32, 256, DEVICE) == BEST
    found = _tuned.read(path, SPACES, DEVICE)
    assert not found.problems
    assert found.made["shapes"] == {"capacity": 5}
    (point,) = found.points["sum_tree_draw"]
    assert point.measured["one"] == {"us": 1e6, "us_by_rule": 2e6}
    assert [other.name for other in folder.iterdir()] == [path.name], "no temporary file is left"
    save(folder, DEVICE, [tuned(job=Job("sum_tree_draw", DRAW.sizes | {"n": 4096}))], {})
    assert [point.sizes["n"] for point in _tuned.read(path, SPACES).points["sum_tree_draw"]] == [256, 4096]
    for before in ("", '{"format": 0, "device": "Some GPU 80GB", "points": {}}', "[]"):
        path.write_text(before)
        save(folder, DEVICE, [tuned()], {})
        assert config.tree_draw(32, 256, DEVICE) == BEST


@pytest.mark.parametrize("job", jobs([300], [8], ROW), ids=str)
def test_the_rule_agrees_with_the_cpu(job):
    """So do the candidates, whose results were those of the rule's above. Large buffers are represented by a part."""
    expected = [tree_leaves(work.compute()) for work in workloads(job, ROW, CPU, 2**12, 2)]
    with triton_on_cpu(), config.by_rule():
        found = [tree_leaves(work.compute()) for work in workloads(job, ROW, CPU, 2**12, 2)]
    assert len(expected) == len(found) >= 1
    for one, other in zip(expected, found, strict=True):
        assert not difference(one, other)


@pytest.mark.parametrize("job", jobs([5], [8], ROW), ids=str)
def test_buffers_smaller_than_a_batch(job):
    """Workloads can be made, and their results are the same every time."""
    for work in workloads(job, ROW, CPU, 2**20, 2):
        for call in work.calls:
            call()
        assert not difference(tree_leaves(work.compute()), tree_leaves(work.compute()))


class TestCommand:
    def test_it_needs_a_gpu(self, capsys):
        if torch.cuda.is_available():
            pytest.skip("there is one")
        assert main(["tune"]) == 2
        assert "tuning needs a GPU: torch" in capsys.readouterr().err

    @pytest.fixture
    def gpu(self, monkeypatch, tmp_path):
        """A machine with one GPU, whose kernels run on the CPU; each configuration is faster than the one before."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        for name, fake in {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_device_name": lambda device=None: DEVICE,
            "device": lambda device: contextlib.nullcontext(),
            "mem_get_info": lambda device=None: (2**34, 2**35),
            "memory_reserved": lambda device=None: 0,
            "memory_allocated": lambda device=None: 0,
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(
            "gpubuf.tuning.workloads.workloads", lambda job, row, *_: workloads(job, row, CPU, 2**12, 2)
        )
        times = iter(0.9**i for i in range(1000))
        monkeypatch.setattr(search.tune, "__defaults__", (lambda calls: (calls[0](), next(times))[1],))
        with triton_on_cpu():
            yield

    @pytest.mark.slow
    def test_a_whole_tuning(self, gpu, capsys, tmp_path):
        """Every operation, every candidate, and the file that comes of it."""
        assert main(["tune", "--capacity=300", "--batch-size=8", "--spec=x=3:float32"]) == 0
        path = tmp_path / "gpubuf" / "tuned" / "some-gpu-80gb.json"
        assert json.loads(path.read_text())["points"].keys() == set(OPERATIONS)
        found = _tuned.read(path, SPACES, DEVICE)
        assert not found.problems
        for operation, points in found.points.items():
            for point in points:
                assert config.tuned(operation, DEVICE, **point.sizes) == point.config
        said = capsys.readouterr().out
        assert f"Written: {path} \n" in said
        # The results of every candidate are those of the rule's.
        assert "  not " not in said

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            (["--spec", "x"], "expected KEY=SHAPE:DTYPE"),
            (["--spec", "x=1:int8", "--spec", "x=1:int8"], "twice"),
            (["--spec", "x=0:int8"], "rows of no bytes"),
            (["--device", "cpu"], "only GPUs are tuned"),
            (["--device", "cuda:1"], "there is no cuda:1: there are 1 GPUs"),
            (["--out", "FILE"], "name another folder with --out FOLDER"),
        ],
    )
    def test_mistakes(self, gpu, capsys, tmp_path, wrong, said):
        (tmp_path / "file").touch()
        assert main(["tune", *(str(tmp_path / "file") if word == "FILE" else word for word in wrong)]) == 2
        assert said in capsys.readouterr().err

    def test_a_lost_device(self, gpu, capsys, monkeypatch):
        def lost(calls):
            raise RuntimeError("CUDA error: an illegal memory access")

        monkeypatch.setattr(search.tune, "__defaults__", (lost,))
        assert main(["tune", "--capacity=300", "--batch-size=8", "--spec=x=3:float32"]) == 1
        assert "an illegal memory access" in capsys.readouterr().err
        assert not config._explicit
        assert config._use_files


@pytest.mark.slow
def test_what_is_timed_compiles_as_it_is_launched():
    """For sm_90, through the launchers and Triton's JIT, with the types and alignments of real arguments.

    So do the candidates with the largest and the smallest tiles.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command, root = [sys.executable, "-m", "tests.gates.jit_without_gpu"], Path(__file__).parents[2]
    run = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    launches = json.loads(run.stdout.splitlines()[-1])
    assert {name.partition(":")[0] for name in launches} == set(OPERATIONS)
    for name, number in launches.items():
        # A batch of thousands is updated stage by stage: claims, the lowest level, and all above it.
        assert number == (3 if name.endswith("update 4,096") else 1), name
