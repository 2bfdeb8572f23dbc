"""`gpubuf tune` without a GPU: all of it, but for events and graphs, which are simulated."""

from __future__ import annotations

import contextlib
import functools
import json
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import triton

from gpubuf.cli import main
from gpubuf.kernels import _tuned, config
from gpubuf.kernels._registry import triton_on_cpu
from gpubuf.kernels.config import SPACES
from gpubuf.tuning import operations, report, timing, workloads
from gpubuf.tuning.operations import OPERATIONS, Shapes, jobs
from gpubuf.tuning.report import table
from gpubuf.tuning.search import disagreement
from gpubuf.tuning.timing import DeviceError, GraphTimer, Timing, UnusableError, copy_bandwidth, launch_seconds
from gpubuf.tuning.workloads import Bench
from tests.support.tuning_setup import first_of_each

CPU = torch.device("cpu")
DEVICE = "A GPU of paper"
ROW = (
    (("x",), torch.float32, (3,)),
    (("next", "done"), torch.bool, (1,)),
    (("p",), torch.uint8, (5,)),
    (("nothing",), torch.float32, (0,)),
)
SHAPES = Shapes((300,), (8,), ROW)
SPECS = ("--spec=x=3:float32", "--spec=next.done=1:bool", "--spec=p=5:uint8", "--spec=nothing=0:float32")


class CountingTimer:
    """Calls everything once, and says that each configuration is faster than the one before."""

    def __init__(self):
        self.seconds = 1.0

    def time(self, calls):
        calls[0]()
        self.seconds *= 0.9
        return Timing(self.seconds, 1)


@pytest.mark.parametrize("job", first_of_each(SHAPES), ids=str)
def test_the_rule_agrees_with_the_cpu(job):
    """So do the candidates, whose results were those of the rule's above."""
    expected = [work.result() for work in Bench(SHAPES, CPU, 2, 2**12).workloads(job)]
    with triton_on_cpu(), config.by_rule():
        found = [work.result() for work in Bench(SHAPES, CPU, 2, 2**12).workloads(job)]
    assert len(expected) == len(found) >= 1
    for one, other in zip(expected, found, strict=True):
        assert not disagreement(one, other)


@pytest.mark.parametrize("job", jobs(Shapes((5,), (8,), ROW)), ids=str)
def test_buffers_smaller_than_a_batch(job):
    """Workloads can be made, and their results are the same every time."""
    for work in Bench(Shapes((5,), (8,), ROW), CPU, 2).workloads(job):
        for call in work.calls:
            call()
        once, again = work.result(), work.result()
        assert not disagreement(once, again)


def test_large_buffers_are_represented_by_a_part():
    bench = Bench(Shapes((10**12,), (8,), ROW), CPU, 2, memory=2**12)
    job = next(job for job in jobs(bench.shapes) if job.operation == "rows_copy")
    bench.workloads(job)
    assert bench._storages["read", 2**12 // bench.shapes.row_bytes].max_size == 2**12 // bench.shapes.row_bytes


# Events and graphs


class FakeCuda:
    """The parts of torch.cuda that the timer uses. A call in a graph takes a microsecond."""

    def __init__(self):
        self.clock, self.broken, self.graph, self.stream = 0.0, False, None, MagicMock()
        self.Stream = self.current_stream = MagicMock()

    def synchronize(self, device=None):
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    def Event(self, enable_timing):  # noqa: N802
        event = SimpleNamespace(synchronize=self.synchronize)
        event.record = lambda: setattr(event, "at", self.clock)
        event.elapsed_time = lambda other: 1e3 * (other.at - event.at)
        return event

    def CUDAGraph(self):  # noqa: N802
        graph = SimpleNamespace(calls=[])
        graph.replay = lambda: setattr(self, "clock", self.clock + 1e-6 * len(graph.calls))
        return graph

    @contextlib.contextmanager
    def capture(self, graph):
        self.graph = graph
        yield
        self.graph = None


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    for name in ("Stream", "Event", "CUDAGraph", "stream", "synchronize", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(torch.cuda, "graph", fake.capture)
    return fake


class TestGraphTimer:
    def test_time_of_a_call(self, cuda):
        numbers: list[tuple[int, bool]] = []

        def call(number):
            if cuda.graph is not None:
                cuda.graph.calls.append(number)
            numbers.append((number, cuda.graph is not None))

        calls = [functools.partial(call, number) for number in range(4)]
        timed = GraphTimer(CPU, seconds=1e-3, repeats=3, unroll=10).time(calls)
        assert timed.seconds == pytest.approx(1e-6)
        assert timed.launches is None, "nothing is known of interpreted kernels"
        eager, captured = numbers[:4], numbers[4:]
        assert eager == [(i, False) for i in range(4)], "all are compiled before the capture"
        assert captured == [(i, True) for _ in range(3) for i in range(4)], "whole rounds, at least ten calls"
        cuda.stream.assert_called_once()
        # One replay to warm up, one to find out how many, then three times about a millisecond.
        assert cuda.clock == pytest.approx(12e-6 * 2 + 3 * 12e-6 * round(1e-3 / 12e-6))

    @pytest.mark.parametrize("captured", [False, True])
    def test_what_fails_is_unusable(self, cuda, captured):
        def call():
            if (cuda.graph is not None) == captured:
                raise RuntimeError("out of resource: shared memory\nand more")

        with pytest.raises(UnusableError, match=r"^RuntimeError: out of resource: shared memory$"):
            GraphTimer(CPU).time([call])

    def test_a_lost_device_ends_everything(self, cuda):
        def call():
            cuda.broken = True

        with pytest.raises(DeviceError, match="does not answer any more: CUDA error: an illegal"):
            GraphTimer(CPU).time([call])

    @pytest.mark.parametrize(("spills", "said"), [(0, ""), (12, "draw_kernel 12, empty_kernel 12")])
    def test_spills_and_launches(self, cuda, monkeypatch, spills, said):
        """Of two compiled kernels in each of four calls."""
        kernels = [SimpleNamespace(name=name, n_spills=spills) for name in ("draw_kernel", "empty_kernel")]
        monkeypatch.setattr(triton.JITFunction, "run", lambda kernel: kernel)
        timed = GraphTimer(CPU).time([lambda: [triton.JITFunction.run(kernel) for kernel in kernels]] * 4)
        assert (timed.launches, timed.spilled) == (2, said)

    def test_limits_of_the_device(self, cuda):
        with triton_on_cpu():
            assert launch_seconds(CountingTimer(), CPU) == pytest.approx(0.9)
        assert copy_bandwidth(CountingTimer(), CPU, 450) == pytest.approx(1000)


class TestCommand:
    def test_it_needs_a_gpu(self, capsys):
        if torch.cuda.is_available():
            pytest.skip("there is one")
        assert main(["tune"]) == 2
        assert "tuning needs a GPU: torch" in capsys.readouterr().err

    @pytest.fixture
    def gpu(self, monkeypatch, tmp_path, cuda):
        """A machine with one GPU, whose kernels run on the CPU."""
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
        benches, bench = [], functools.partial(Bench, device=CPU, rotations=2, memory=2**12)
        monkeypatch.setattr(
            workloads, "Bench", lambda *args, **kw: benches.append(Bench(*args, **kw)) or bench(args[0])
        )
        monkeypatch.setattr(timing, "GraphTimer", lambda *args: CountingTimer())
        monkeypatch.setattr(report, "copy_bandwidth", lambda timer, device: copy_bandwidth(timer, CPU, 1024))
        monkeypatch.setattr(report, "launch_seconds", lambda timer, device: launch_seconds(timer, CPU))
        with triton_on_cpu():
            yield benches

    OPTIONS = ("--capacity=300", "--batch-size=8", *SPECS)

    @pytest.mark.slow
    def test_a_whole_tuning(self, gpu, capsys, tmp_path, monkeypatch):
        """Every operation, every candidate, the file that comes of it, and the table."""
        results = []
        monkeypatch.setattr(report, "table", lambda found: results.extend(found) or table(found))
        assert main(["tune", *self.OPTIONS, "--seconds=0"]) == 0
        (bench,) = gpu
        assert (bench.shapes, str(bench.device), bench.memory) == (SHAPES, "cuda:0", 2**31)
        assert [result.job for result in results] == jobs(SHAPES)
        for result in results:
            # The results of every candidate are those of the rule's.
            assert not result.rejected
            assert result.chosen is not None
            assert result.chosen == result.trials[-1]
            # The file is in use from now on.
            assert config.tuned(result.job.operation, DEVICE, **result.job.point) == result.chosen.config
        path = tmp_path / "gpubuf" / "tuned" / "a-gpu-of-paper.json"
        content = json.loads(path.read_text())
        assert content["points"].keys() == set(OPERATIONS)
        assert not _tuned.read(path, SPACES, DEVICE).problems
        said = capsys.readouterr()
        assert said.err.count("\n") == len(results)
        assert f"{len(results)}/{len(results)} " in said.err
        assert all(operation in said.out for operation in OPERATIONS)
        assert "launches" in said.out
        assert f"Written: {path}. gpubuf goes by it from now on." in said.out

    def test_another_folder(self, gpu, capsys, tmp_path, monkeypatch):
        """There is time for the rule's configurations alone, of a few operations."""
        monkeypatch.setattr(operations, "jobs", lambda shapes: jobs(shapes)[:2])
        assert main(["tune", *self.OPTIONS, "--out", str(tmp_path / "here"), "--seconds=1e-9"]) == 0
        assert (tmp_path / "here" / "a-gpu-of-paper.json").exists()
        said = capsys.readouterr()
        assert said.err.count("(1 of ") == said.err.count("\n")
        assert "not tried for want of time" in said.out
        assert "reads tuned files from" in said.out

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            (["--capacity", "0"], "at least 1"),
            (["--spec", "x"], "expected KEY=SHAPE:DTYPE"),
            (["--spec", "x=1:int8", "--spec", "x=1:int8"], "twice"),
            (["--device", "cpu"], "only GPUs are tuned"),
            (["--device", "cuda:1"], "there is no cuda:1: there are 1 GPUs"),
        ],
    )
    def test_mistakes(self, gpu, capsys, wrong, said):
        assert main(["tune", *wrong]) == 2
        assert said in capsys.readouterr().err
        assert not gpu

    def test_a_folder_that_can_not_be_written(self, gpu, capsys, tmp_path):
        (tmp_path / "file").touch()
        assert main(["tune", *self.OPTIONS, "--out", str(tmp_path / "file")]) == 2
        assert "name another folder with --out FOLDER" in capsys.readouterr().err

    def test_a_lost_device(self, gpu, capsys, monkeypatch, tmp_path):
        """The points before are in the file, and nothing stays in force."""
        path, time = tmp_path / "gpubuf" / "tuned" / "a-gpu-of-paper.json", CountingTimer.time

        def lost(self, calls):
            if path.exists() and json.loads(path.read_text())["points"]:
                raise DeviceError("the GPU does not answer any more: why")
            return time(self, calls)

        monkeypatch.setattr(CountingTimer, "time", lost)
        assert main(["tune", *self.OPTIONS, "--seconds=1e-9"]) == 1
        assert "does not answer any more" in capsys.readouterr().err
        assert json.loads(path.read_text())["points"].keys() == {"rows_copy"}
        assert not config._explicit
        assert config._use_files
