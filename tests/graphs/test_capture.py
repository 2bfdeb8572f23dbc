"""The rules of captured steps: what may change between calls, what is refused, and what is left behind by a refusal.

And captures that CUDA, other threads or the garbage collector could break.
"""

from __future__ import annotations

import contextlib
import gc
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, tensorclass
from torch import Tensor

from gpubuf import (
    CaptureError,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    capture,
)
from gpubuf.graphs import Results
from tests.support.graph_recorder import RecordedCuda, recorded
from tests.support.graph_worlds import World
from tests.support.transitions import transitions


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@tensorclass
class Point:
    x: Tensor


@pytest.mark.parametrize("graphs", [False, True])
class TestArguments:
    """The rules are the same with and without graphs, so that what works on a CPU works on a GPU."""

    @pytest.fixture(autouse=True)
    def setting(self, graphs, monkeypatch):
        if graphs:
            RecordedCuda().install(monkeypatch)

    def test_values_may_change(self, graphs):
        step = capture(lambda a, b, c, *, k: (a + b["x"] + c.x, [k[0]["y"] * 2]), warmup=1)
        for i in range(4):
            batch = TensorDict({"n": {"z": torch.ones(3)}, "x": torch.full((3,), float(i))}, [3])
            point = Point(torch.full((3,), 100.0 * i), batch_size=[3])
            out, (double,) = step(torch.ones(3), batch, point, k=({"y": torch.tensor(i)}, "constant", 1.5, None))
            assert out.tolist() == [1.0 + 101.0 * i] * 3
            assert double == 2 * i
        assert step.captured == graphs

    @pytest.mark.parametrize(
        ("changed", "text"),
        [
            (lambda a: a["x"].set_("t", torch.ones(2)) and a, ""),
            (lambda a: {**a, "x": TensorDict({"t": torch.ones(2), "u": torch.ones(2)}, [2])}, r"x\['u'\] was missing"),
            (lambda a: {**a, "x": TensorDict({"t": torch.ones(3)}, [3])}, r"x was a TensorDict of \(2,\)"),
            (lambda a: {**a, "x": TensorDict({"t": torch.ones(2).double()}, [2])}, r"x\['t'\] was .*float32.*float64"),
            (lambda a: {**a, "y": torch.ones(4)}, r"y was a tensor of shape \(\).*shape \(4,\)"),
            (lambda a: {**a, "y": 1.0}, r"y was a tensor.*is 1.0"),
            (lambda a: {**a, "n": 4}, "n was 3 .* now it is 4; what is no tensor"),
            (lambda a: {**a, "n": 3.0}, "n was 3"),
            (lambda a: {**a, "z": torch.ones(1)}, "z was missing"),
            (
                lambda a: {name: value for name, value in a.items() if name != "n"},
                "n was 3.*now it is missing; what is no tensor",
            ),
        ],
    )
    def test_nothing_else_may(self, graphs, changed, text):
        def arguments() -> dict[str, Any]:
            return {"x": TensorDict({"t": torch.ones(2)}, [2]), "y": torch.tensor(1.0), "n": 3}

        step = capture(lambda **named: named["x"]["t"] * named["y"], warmup=1)
        for _ in range(3):
            step(**arguments())
        if text:
            with pytest.raises(ValueError, match=text):
                step(**changed(arguments()))
        assert step(**arguments()).tolist() == [1.0, 1.0]

    def test_entries_that_a_step_adds_stay_its_own(self, graphs):
        step = capture(lambda batch: batch.set("new", batch["x"] + 1)["new"], warmup=1)
        batch = TensorDict({"x": torch.zeros(2)}, [2])
        for _ in range(3):
            assert step(batch).tolist() == [1.0, 1.0]
        assert list(batch.keys()) == ["x"]

    def test_tensors_that_it_was_given_must_not_be_changed(self, graphs):
        step = capture(lambda x, pair: x.add_(1).sum(), warmup=1)
        with pytest.raises(ValueError, match="changes argument 0 in place"):
            step(torch.zeros(3), None)

    def test_gradients_would_end_at_an_argument(self, graphs):
        with pytest.raises(ValueError, match="argument 0 requires gradients"):
            capture(lambda x: x * 2)(torch.ones(2, requires_grad=True))

    def test_results_come_without_gradient(self, graphs):
        weight = torch.ones(2, requires_grad=True)
        step = capture(lambda: Pair(weight * 2, {"loss": TensorDict({"l": weight.sum()})}), warmup=1)
        for _ in range(3):
            out = step()
            assert type(out) is Pair
            assert not out.x.requires_grad
            assert not out.y["loss"]["l"].requires_grad

    @pytest.mark.parametrize("result", [3, 1.5, "text", (torch.ones(1), True), {"n": object()}])
    def test_results_that_a_replay_could_not_bring_up_to_date(self, graphs, result):
        with pytest.raises(ValueError, match="would be the same at every replay"):
            capture(lambda: result)()

    def test_an_error_of_the_step_is_its_own(self, graphs):
        failing = [True]

        def step() -> None:
            if failing[0]:
                raise RuntimeError("no luck")

        run = capture(step, warmup=1, device="cpu")
        for _ in range(3):
            with pytest.raises(RuntimeError, match=r"^no luck$"):
                run()
        failing[0] = False
        for _ in range(2):
            assert run() is None
        failing[0] = True
        if not graphs:
            with pytest.raises(RuntimeError, match=r"^no luck$"):
                run()


def counting() -> Callable[[], TensorDict]:
    """A captured step that counts its calls in results of several dtypes and shapes."""
    counter = torch.zeros(3)

    def step() -> TensorDict:
        counter.add_(1)
        whole = {"odd": counter.long() % 2 == 1, "n": {"sum": counter.double().sum(), "none": counter[:0]}}
        return TensorDict({"count": counter * 1, **whole}, [])

    return capture(step, warmup=1)


class Saves(torch.autograd.Function):
    """Keeps a result for the backward pass, as any operation of a network does."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, kept: Tensor) -> Tensor:
        ctx.save_for_backward(kept)
        return weight * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (kept,) = ctx.saved_tensors
        return grads[0] * kept, None


def kept_by_autograd(found: TensorDict) -> Callable[[], Tensor]:
    weight = torch.ones(3, requires_grad=True)
    out = Saves.apply(weight, found["count"])
    return lambda: torch.autograd.grad(out.sum(), weight)[0]


def kept_by_a_thread(found: TensorDict) -> Callable[[], Tensor]:
    kept: list[Tensor] = []
    thread = threading.Thread(target=lambda: kept.append(found["count"]))
    thread.start()
    thread.join()
    return lambda: kept[0]


def kept_by_memory(found: TensorDict) -> Callable[[], Tensor]:
    memory, start = found["count"].untyped_storage(), found["count"].storage_offset()
    return lambda: torch.empty(0).set_(memory, start, (3,))


def kept_as(view: Callable[[Tensor], Any]) -> Callable[[TensorDict], Callable[[], Any]]:
    def keep(found: TensorDict) -> Callable[[], Any]:
        kept = view(found["count"])
        return lambda: torch.as_tensor(kept)

    return keep


KEPT: dict[str, Callable[[TensorDict], Callable[[], Any]]] = {
    "the results": lambda found: lambda: found["count"],
    "a tensor": kept_as(lambda count: count),
    "a view": kept_as(lambda count: count.view(1, 3)[0]),
    "an array": kept_as(lambda count: count.numpy()),
    "an array of a view": kept_as(lambda count: count[0:].numpy()),
    "a capsule": kept_as(torch.from_dlpack),
    "its memory": kept_by_memory,
    "what autograd saves": kept_by_autograd,
    "a thread's": kept_by_a_thread,
}


@pytest.mark.parametrize("what", KEPT)
@pytest.mark.parametrize("of", [1, 2, 3])
def test_what_is_kept_of_results_is_not_written_over(what, of, machine):
    """CASES 85: each result, or every second or third one; the memory of the others is used again."""
    step, kept, places = counting(), [], set()
    step()
    for number in range(2, 20):
        found = step()
        places.add(found["count"].untyped_storage()._cdata)
        if number % of == 0:
            kept.append((number, KEPT[what](found)))
        del found
    for number, value in kept:
        assert value().tolist() == [float(number)] * 3
    assert len(places) <= len(kept) + 1 + (of > 1)


def test_results_are_those_of_the_step(machine):
    """Other dtypes, nested ones, empty ones; new containers and tensors each time, but the memory of those let go."""
    step, places = counting(), set()
    step()
    for number in range(2, 8):
        found = step()
        assert found["count"].tolist() == [float(number)] * 3
        assert found["odd"].tolist() == [number % 2 == 1] * 3
        assert found["n", "sum"] == 3.0 * number
        assert found["n", "none"].shape == (0,)
        places.add(found["count"].untyped_storage()._cdata)
        found["count"].add_(100)
        found["count"].resize_(0)
        found["mine"] = torch.ones(2)
        del found
    assert len(places) == 1
    assert list(step().keys()) == ["count", "odd", "n"]


@pytest.mark.parametrize("inside", [False, True])
def test_lazy_stacks_as_results_and_arguments(inside, machine):
    """Of parts whose shapes differ too, which nothing can stack."""
    counter = torch.zeros(2)

    def parts(number: float) -> Any:
        each = [TensorDict({"n": counter + number, "ragged": torch.full((2, i + 1), number)}, [2]) for i in range(2)]
        stack = LazyStackedTensorDict(*each, stack_dim=1)
        return {"in": stack} if inside else stack

    def step(given: Any) -> Any:
        counter.add_(1)
        return given, parts(0.0)

    run_step = capture(step, warmup=1)
    kept = [run_step(parts(10.0 * number)) for number in range(1, 5)]
    assert run_step.captured
    for number, found in enumerate(kept, 1):
        given, made = (each["in"] if inside else each for each in found)
        assert isinstance(made, LazyStackedTensorDict)
        assert given.batch_size == made.batch_size == (2, 2)
        assert made[0, 1]["n"] == number
        assert given[0, 1]["n"] == 10 * number + number - 1
        assert given[1, 1]["ragged"].tolist() == [10.0 * number] * 2


def test_results_are_given_out_by_one_copy():
    """Whatever their number: each operation of PyTorch is a launch, or memory, or time of the host."""
    value = TensorDict({str(i): torch.full((), float(i)) for i in range(8)}, []), [torch.arange(5)], None
    results = Results(value, torch.device("cpu"))
    results.copies()
    with recorded() as recorder:
        found = results.copies()
        assert float(found[0]["7"]) == 7.0
        assert found[1][0].tolist() == list(range(5))
    assert [call.operation.name() for call in recorder.calls if "copy" in call.operation.name()] == ["aten::copy_"]
    assert not [call for call in recorder.calls if "clone" in call.operation.name()]


def test_arguments_of_the_constructor():
    with pytest.raises(ValueError, match="warmup must be at least 1"):
        capture(lambda: None, warmup=0)
    with pytest.raises(RuntimeError, match="CUDA is not available"):
        capture(lambda: None, device="cuda")
    with pytest.raises(TypeError, match="takes no on_cpu: on a CPU every call runs the step"):
        capture(lambda: None, on_cpu=True)  # type: ignore[arg-type]
    step = capture(test_arguments_of_the_constructor)
    assert repr(step) == "Captured(test_arguments_of_the_constructor, 3 calls before the capture)"


def test_where_a_step_works_is_found_out(machine):
    """By its arguments, its results, or its buffers; or else by what it does."""
    world = World("uniform")
    machine.memory = world.buffer.storage.columns.parts
    x = torch.zeros(2)
    for step, arguments in (
        (lambda given: None, (x,)),
        (lambda: x, ()),
        (lambda: world.buffer.mark_update(0), ()),
    ):
        run = capture(step, warmup=1)
        for _ in range(2):
            run(*arguments)
        assert run.captured

    def add_one() -> None:
        x.add_(1)

    for warmup in (1, 2, 3):
        run = capture(add_one, warmup=warmup)
        for _ in range(max(warmup, 2) + 1):
            assert not run.captured
            run()
        assert run.captured
    assert x.tolist() == [10.0] * 2


def prioritized() -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=PrioritizedSampler(20, 0.6, 0.4), batch_size=4)


def with_sampler(sampler: Any, **kwargs: Any) -> Callable[[], Callable[[], object]]:
    def make() -> Callable[[], object]:
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, batch_size=4, **kwargs)
        buffer.extend(transitions(12))
        return lambda: buffer.sample(4)

    return make


def set_on_sampler(name: str, value: float) -> Callable[[], Callable[[], object]]:
    def make() -> Callable[[], object]:
        buffer = prioritized()
        buffer.extend(transitions(12))

        def step() -> Tensor:
            setattr(buffer.sampler, name, value)
            return buffer.sample()["index"]

        return step

    return make


def first_write() -> Callable[[], object]:
    buffers = iter([ReplayBuffer(storage=LazyTensorStorage(20)) for _ in range(3)])
    data = transitions(3)
    return lambda: next(buffers).extend(data)


def first_tree() -> Callable[[], object]:
    buffers = [ReplayBuffer(storage=LazyTensorStorage(20), batch_size=2) for _ in range(3)]
    for buffer in buffers:
        buffer.extend(transitions(3))
        buffer.set_sampler(PrioritizedSampler(20, 0.6, 0.4))
    unused = iter(buffers)
    return lambda: next(unused).sample()


def on_the_host(work: Callable[[Tensor], object]) -> Callable[[], Callable[[], object]]:
    def make() -> Callable[[], object]:
        x = torch.arange(4.0)

        def step() -> Tensor:
            work(x)
            return x + 1

        return step

    return make


REFUSED = {
    "an epoch of rows": (with_sampler(SamplerWithoutReplacement), "sample without replacement outside"),
    "an epoch of slices": (
        with_sampler(lambda: SliceSamplerWithoutReplacement(slice_len=2)),
        "sample slices without replacement outside",
    ),
    "ragged slices": (
        with_sampler(lambda: SliceSampler(slice_len=2, strict_length=False)),
        "set pad_output=True",
    ),
    "pinned batches": (with_sampler(None, pin_memory=True), "pin_memory=True"),
    "a beta of the host": (set_on_sampler("beta", 0.5), "set it to a tensor on the device"),
    "alpha": (set_on_sampler("alpha", 0.5), "transforms every priority"),
    "the first write": (first_write, "the first write allocates the storage"),
    "the first tree": (first_tree, "makes the tree"),
    "item": (on_the_host(lambda x: x[0].item()), "reads a value"),
    "Python's noise": (on_the_host(lambda x: random.random()), "draws from Python's random"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:pin_memory")
def test_what_cannot_be_captured(name, machine):
    """It says what, at the call that would capture; until then, and without a GPU, the step works."""
    make, reason = REFUSED[name]
    step = capture(make(), warmup=2)
    for _ in range(2):
        step()
    with pytest.raises(CaptureError, match=reason):
        step()
    assert not step.captured


def test_a_refused_step_has_done_nothing(machine):
    world = World("prioritized")
    machine.memory = world.buffer.storage.columns.parts

    def step(data: TensorDict) -> Tensor:
        world.buffer.extend(data)
        batch = world.buffer.sample()
        if float(batch["observation"].sum()) > 1e9:
            raise AssertionError
        return batch["index"]

    run = capture(step, warmup=1)
    run(world.data(0))
    before, length, written = [v for _, v in world.state()], len(world.buffer), world.buffer.write_count
    with pytest.raises(CaptureError, match="reads a value"):
        run(world.data(1))
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, world.state(), strict=True))
    assert (len(world.buffer), world.buffer.write_count) == (length, written)


@pytest.mark.parametrize("name", ["prioritized slices"])
def test_a_refused_step_leaves_the_rule_of_slices(name, machine):
    """The index was to be computed for slices of another length, and has not been."""
    drawn = []
    for graphs in (False, True):
        world = World(name)
        machine.memory = world.buffer.storage.columns.parts
        sampler = world.buffer.sampler

        def step(world: World = world, sampler: Any = sampler) -> None:
            sampler.slice_len = 2
            world.buffer.sample()["observation"].sum().item()
            sampler.slice_len = 8
            world.buffer.sample()

        sampler.slice_len = 4
        world.buffer.sample()
        if graphs:
            run = capture(step, warmup=1, device="cpu")
            run()
            state = [v for _, v in world.state()]
            with pytest.raises(CaptureError, match="reads a value"):
                run()
            assert all(torch.equal(a, b) for a, (_, b) in zip(state, world.state(), strict=True))
        else:
            step()
        sampler.slice_len = 2
        drawn.append(world.buffer.sample()["index"])
        sampler.slice_len = 8
        drawn.append(world.buffer.sample()["index"])
    assert torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[1], drawn[3])


@pytest.mark.parametrize(
    "change",
    [
        lambda buffer: buffer.free(),
        lambda buffer: buffer.set_rng(torch.Generator().manual_seed(1)),
        lambda buffer: buffer.set_storage(LazyTensorStorage(20)),
        lambda buffer: buffer.sampler.free(),
        # Nothing but the rows is another.
        lambda buffer: (buffer.storage.free(), buffer.extend(transitions(8))),
    ],
)
def test_a_graph_does_not_outlive_what_it_works_on(change, machine):
    buffer = prioritized()
    buffer.extend(transitions(8))
    machine.memory = buffer.storage.columns.parts
    step = capture(lambda: buffer.sample()["index"], warmup=1)
    for _ in range(3):
        step()
    change(buffer)
    with pytest.raises(CaptureError, match=r"call reset\(\)"):
        step()
    assert machine.log.count("replay") == 2
    step.reset()
    buffer.extend(transitions(8))
    machine.memory = buffer.storage.columns.parts
    for _ in range(2):
        assert step().shape == (4,)
    assert step.captured


def test_what_is_changed_in_place_is_seen_by_the_graph(machine):
    """Exponents, priorities and the random state may be set between calls."""
    buffer = prioritized()
    buffer.extend(transitions(8))
    machine.memory = buffer.storage.columns.parts
    step = capture(lambda: buffer.sample().select("index", "priority_weight"), warmup=1)
    for _ in range(2):
        step()
    buffer.update_priority(torch.arange(8), torch.tensor([1.0] + [0.0] * 7))
    assert set(step()["index"].tolist()) == {0}
    buffer.update_priority(torch.arange(8), torch.arange(1.0, 9.0))
    buffer.sampler.beta = 0.0
    assert step()["priority_weight"].tolist() == [1.0] * 4
    buffer.sampler.alpha = 0.0
    buffer.sampler.beta = 1.0
    assert step()["priority_weight"].tolist() == [1.0] * 4
    state = buffer.sampler.random_state("cpu").state_dict()
    drawn = step()["index"].tolist()
    buffer.sampler.random_state("cpu").load_state_dict(state)
    assert step()["index"].tolist() == drawn


# Captures that break


def test_an_error_of_cuda_is_explained(machine):
    """What only CUDA finds out (here: the optimiser's own check) is said to be about the capture."""

    def step(x: Tensor) -> Tensor:
        if machine.log.count("capture on side"):
            raise RuntimeError("Attempting CUDA graph capture of step() for an instance of Adam, capturable is False")
        return x

    run = capture(step, warmup=1)
    run(torch.ones(1))
    with pytest.raises(CaptureError, match=r"captured in a CUDA graph: Attempting.* capturable is False"):
        run(torch.ones(1))


def test_other_threads_may_use_cuda_during_a_capture(machine):
    """CUDA's "global" mode would end both the capture and the other thread's allocation with an error."""
    step = capture(lambda x: x + 1, warmup=1)
    for _ in range(3):
        step(torch.ones(1))
    assert machine.capture_error_modes == ["thread_local"]


@pytest.mark.parametrize("fails", [False, True])
def test_garbage_is_not_collected_during_a_capture(machine, fails):
    """Its finalisers call CUDA, which a capture does not survive."""
    collecting = []

    def step(x: Tensor) -> Tensor:
        collecting.append(gc.isenabled())
        if fails and len(collecting) == 2:
            raise RuntimeError("no luck")
        return x + 1

    run = capture(step, warmup=1)
    run(torch.ones(1))
    with pytest.raises(RuntimeError, match="no luck") if fails else contextlib.nullcontext():
        run(torch.ones(1))
    assert collecting == [True, False]
    assert gc.isenabled()


def test_a_capture_that_cuda_invalidates_leaves_everything_as_it_was(machine, monkeypatch):
    """PyTorch does not where ending the capture fails too: neither stream nor allocator nor generator."""
    graph, kept = torch.cuda.graph, []

    @contextlib.contextmanager
    def invalidated(*args: Any, stream: Any, **kwargs: Any) -> Iterator[None]:
        switched = torch.cuda.stream(stream)
        switched.__enter__()
        with graph(*args, stream=stream, **kwargs):
            yield
        if not kept:
            kept.append(switched)
            machine.invalidated = True
            raise RuntimeError("operation failed due to a previous error during capture")
        switched.__exit__(None, None, None)

    monkeypatch.setattr(torch.cuda, "graph", invalidated)
    step = capture(lambda x: x + 1, warmup=1)
    before = torch.cuda.current_stream()
    step(torch.ones(1))
    with pytest.raises(CaptureError, match="previous error during capture"):
        step(torch.ones(1))
    assert torch.cuda.current_stream() is before
    # A capture that succeeds ends the broken one for the generator.
    assert machine.log[-3:] == ["capture on side", "allocation leaves the pool", "capture on side"]
    assert step(torch.ones(1)).tolist() == [2.0]
    assert step.captured


def test_a_capture_that_is_refused_needs_no_repair(machine):
    step = capture(lambda x: x.sum().item(), warmup=1)
    with pytest.raises(ValueError, match="would be the same"):
        step(torch.ones(1))
    step = capture(lambda x: x * x.sum().item(), warmup=1)
    step(torch.ones(1))
    with pytest.raises(CaptureError, match="reads a value"):
        step(torch.ones(1))
    assert machine.log.count("capture on side") == 1
    assert not machine.invalidated


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("prioritized", lambda sampler: setattr(sampler, "stratified", True)),
        ("prioritized", lambda sampler: sampler.tree.restrict(torch.full((1,), -1))),
        ("slices", lambda sampler: setattr(sampler, "slice_len", 2)),
    ],
)
def test_a_draw_by_other_settings_is_not_that_of_the_capture(name, change, machine):
    """The replay is refused, and nothing has run; settings of the same values change nothing."""
    world = World(name)
    sampler = world.buffer.sampler
    step = capture(world.buffer.sample, warmup=1, device="cpu")
    for _ in range(3):
        step()
    for setting in (each for each in sampler.settings if "." not in each):
        value = getattr(sampler, setting)
        setattr(sampler, setting, value[:1] + value[1:] if type(value) is tuple else value)
    step()
    change(sampler)
    state = [value for _, value in world.state()]
    with pytest.raises(CaptureError, match=r"settings.*call reset\(\)"):
        step()
    assert all(torch.equal(a, b) for a, (_, b) in zip(state, world.state(), strict=True))
    step.reset()
    for _ in range(3):
        step()
    assert step.captured
