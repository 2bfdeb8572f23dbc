"""Batches of a GPU that are prepared once and repeated into slots: here by Triton's interpreter, on the host.

CASES 85: what somebody holds of a batch is never written over.
"""

import gc
import json
import math
import pickle
import random
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.utils.weak import WeakIdKeyDictionary

from gpubuf.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    SliceSampler,
    SumTree,
    TensorDictReplayBuffer,
    Window,
    prefetch,
    slots,
)
from gpubuf.data.storage.placement import readable
from gpubuf.kernels import config
from gpubuf.kernels._launching import Variant
from gpubuf.kernels.config import UpdateConfig
from tests.support.placements import Machine
from tests.support.slots_setup import CAPACITY, SAMPLERS, buffer_of, prepared, rows, same
from tests.support.trace_calls import until_launch

pytestmark = pytest.mark.usefixtures("interpreter")


@pytest.fixture(autouse=True)
def _no_garbage(monkeypatch):
    """Triton's interpreter leaves a cycle of references behind, which holds the memory of what was launched."""
    launch = slots.Ready.launch

    def launched(self, *given):
        gc.disable()
        launch(self, *given)
        gc.enable()
        gc.collect(0)

    monkeypatch.setattr(slots.Ready, "launch", launched)


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[] if "slices" in k else pytest.mark.slow) for k in SAMPLERS])
def test_repeated_batches_are_those_of_the_general_way(kind, monkeypatch):
    """Random programs: draws of several sizes and forms, writes over the ring's end, priorities, other settings."""
    ours, general = buffer_of(kind), buffer_of(kind)
    chance, written, used = random.Random(5), 120, 0

    def both(call):
        with monkeypatch.context() as context:
            context.setattr(slots, "_NOTED", -1)
            expected = call(general)
        return call(ours), expected

    for _ in range(30):
        what = chance.randrange(10)
        if what < 6:
            size = chance.choice([8, 16])
            named = chance.choice([{}, {}, {"include_info": False}, {"batches": 2}])
            found, expected = both(lambda buffer: buffer.sample(size, **named))  # noqa: B023
            assert same(found, expected)
            if ours.sampler.has_priorities and not named:
                found["td_error"] = expected["td_error"] = torch.rand(size)
                ours.update_tensordict_priority(found)
                general.update_tensordict_priority(expected)
        elif what == 6:
            found, expected = both(lambda buffer: buffer.sample_columns(8))
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[key], expected[key]) for key in found)
        elif what == 7:
            more = rows(chance.choice([1, 20, 60]), written)
            written += len(more)
            both(lambda buffer: buffer.extend(more))  # noqa: B023
        elif what == 8 and ours.sampler.has_priorities:
            beta = chance.random()
            ours.sampler.beta = general.sampler.beta = beta
        elif what == 9 and kind == "slices":
            length = chance.choice([2, 4])
            ours.sampler.slice_len = general.sampler.slice_len = length
        used += len(prepared(ours))
    assert used > 10
    assert not prepared(general)


def test_windows_are_repeated_too(monkeypatch):
    """Those of the host's kernels, with writes over the ring's end between them."""
    windows = {"observation": Window(-2, 1, mask="is_pad")}
    ours, general = (buffer_of(windows=windows, end_keys=[("next", "done")]) for _ in range(2))
    for i in range(6):
        with monkeypatch.context() as context:
            context.setattr(slots, "_NOTED", -1)
            expected = general.sample(8)
            general.extend(rows(60, 120 + 60 * i))
        found = ours.sample(8)
        assert found["observation"].shape == (8, 4, 3)
        assert same(found, expected)
        ours.extend(rows(60, 120 + 60 * i))
    assert prepared(ours)


def test_batches_ahead_are_repeated_too(monkeypatch):
    """Pinned rows with prefetch: one launch each, in the order of those that come without it, held or not."""
    Machine().install(monkeypatch, work_on_cpu=True)
    ahead, plain = (buffer_of(batch_size=8, device="pinned", prefetch=depth) for depth in (1, None))
    kept = []
    for i in range(12):
        found, expected = ahead.sample(), plain.sample()
        assert same(found, expected)
        if i % 4 == 0:
            kept.append((found, expected.clone()))
        if i == 5:
            with pytest.warns(UserWarning, match="batch_size=4"):
                assert same(ahead.sample(4), plain.sample(4))
    assert ahead.memory().batches == sum(each.kept_bytes for each in prepared(ahead)) > 0
    assert all(same(*pair) for pair in kept)


def test_rows_on_a_gpu_cost_eager_draws_the_same_with_prefetch(monkeypatch):
    """Not a call of Python more: a batch is ahead in captured steps only."""
    monkeypatch.setattr(prefetch, "GRAPH_DEVICES", frozenset({"cpu"}))
    ahead, plain = (buffer_of(batch_size=8, prefetch=depth) for depth in (1, None))
    assert type(ahead.parts.batches) is prefetch.PrefetchedInGraphs
    for _ in range(4):
        assert same(ahead.sample(), plain.sample())
    assert prepared(ahead)
    assert until_launch(ahead.sample) == until_launch(plain.sample)


def hold_leaf(batch):
    return batch["next", "observation"]


def hold_view(batch):
    return batch["observation"][2:]


def hold_detached(batch):
    return batch["observation"].detach()


def hold_in_a_list_of_another_thread(batch):
    kept = []
    thread = threading.Thread(target=lambda: kept.append(batch["next", "observation"]))
    thread.start()
    thread.join()
    return kept[0]


def hold_by_dlpack(batch):
    return torch.from_dlpack(batch["observation"])


def hold_by_numpy(batch):
    return torch.from_numpy(batch["observation"].numpy())


def hold_memory(batch):
    return torch.empty(0).set_(batch["observation"].untyped_storage(), 0, (8,))


HOLDERS = [
    lambda batch: batch, hold_leaf, hold_view, hold_detached, hold_in_a_list_of_another_thread, hold_by_dlpack,
    hold_by_numpy, hold_memory,
]  # fmt: skip


@pytest.mark.parametrize("hold", HOLDERS)
def test_what_somebody_holds_of_a_batch_is_never_written_over(hold):
    buffer = buffer_of()
    for _ in range(3):
        buffer.sample(8)
    held = [hold(buffer.sample(8)) for _ in range(2)]
    values = [each.clone() for each in held]
    for _ in range(3):
        buffer.sample(8)
    for each, value in zip(held, values, strict=True):
        assert same(each, value) if isinstance(each, TensorDict) else torch.equal(each, value)


def test_the_object_of_a_batchs_memory_keeps_it():
    """Python has one object for a storage, however often it is asked for."""
    buffer = buffer_of()
    for _ in range(3):
        buffer.sample(8)
    memory = buffer.sample(8)["observation"].untyped_storage()
    before = bytes(memory)
    for _ in range(3):
        buffer.sample(8)
    assert bytes(memory) == before


@pytest.mark.parametrize("views", range(1, 12))
def test_however_many_views_are_held_after_a_change_none_is_written_over(views):
    buffer = buffer_of()
    for _ in range(4):
        buffer.sample(8)
    buffer.sample(8)["observation"].mul_(2)
    batch = buffer.sample(8)
    held, value = [batch["observation"].detach() for _ in range(views)], batch["observation"].clone()
    del batch
    for _ in range(3):
        buffer.sample(8)
    assert all(torch.equal(each, value) for each in held)


def test_batches_that_are_changed_in_place_give_their_memory_to_the_next():
    buffer = buffer_of()
    for _ in range(10):
        buffer.sample(8)["observation"].mul_(2)
    (one,) = prepared(buffer)
    assert len(one._slots) == 1


def test_what_autograd_has_saved_of_a_batch_is_never_written_over():
    buffer, weight = buffer_of(), torch.ones(3, requires_grad=True)
    for _ in range(4):
        buffer.sample(8)
    batch = buffer.sample(8)
    observation = batch["observation"].clone()
    loss = (batch["observation"] * weight).sum()
    del batch
    for _ in range(6):
        buffer.sample(8)
    loss.backward()
    assert torch.equal(weight.grad, observation.sum(0))


def test_who_keeps_all_batches_has_all_of_them():
    """More than there are slots: the others are made in the general way."""
    buffer, general = buffer_of(), buffer_of()
    kept = [buffer.sample(8) for _ in range(slots.SLOTS + 4)]
    general.parts.batches.reader.launches = False
    assert all(same(batch, general.sample(8)) for batch in kept)


def test_slots_are_part_of_the_buffers_memory():
    buffer = buffer_of()
    buffer.sample(8)
    before = buffer.memory()
    assert before.batches == 0
    held = [buffer.sample(8) for _ in range(slots.SLOTS + 2)]
    report, (one,) = buffer.memory(), prepared(buffer)
    assert report.batches == report.total - before.total == one.n_bytes * slots.SLOTS
    assert one.n_bytes > sum(tensor.nbytes for tensor in held[0].values(True, True))
    assert str(report) == f"{before}\nbatches   {readable(report.batches)} on cpu"
    buffer.free()
    assert buffer.memory().total == 0
    buffer.extend(rows(40))
    assert buffer.memory().batches == 0


def test_a_batch_that_nobody_holds_gives_its_memory_to_the_next():
    buffer = buffer_of()
    for _ in range(6):
        batch = buffer.sample(8)
        del batch
    (one,) = prepared(buffer)
    assert len(one._slots) == 1
    for _ in range(6):
        batch = buffer.sample(8)  # the last one is held until this is made
    assert len(one._slots) == 2
    del batch


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.mul_(2),
        lambda tensor: tensor.unsqueeze_(0),
        lambda tensor: tensor.t_(),
        lambda tensor: tensor.requires_grad_(),
        lambda tensor: tensor.mul_(torch.ones(1, requires_grad=True)),
        lambda tensor: tensor.resize_(2, 2),
        lambda tensor: setattr(tensor, "data", torch.zeros(5)),
        lambda tensor: setattr(tensor, "data", tensor.data[:3]),
        lambda tensor: setattr(tensor, "data", tensor.data.t()),
        lambda tensor: setattr(tensor, "data", tensor.data.view(torch.int32)),
        lambda tensor: setattr(tensor, "note", 1),
        lambda tensor: tensor.requires_grad_().sum().backward() or tensor.requires_grad_(False),
    ],
)
def test_what_somebody_did_to_the_last_batch_is_not_seen_in_the_next(change):
    buffer, general = buffer_of(), buffer_of()
    general.parts.batches.reader.launches = False
    for _ in range(5):
        batch, expected = buffer.sample(8), general.sample(8)
        assert same(batch, expected)
        assert not any(tensor.requires_grad or vars(tensor) for tensor in batch.values(True, True))
        assert all(tensor.grad is None for tensor in batch.values(True, True))
        change(batch["observation"])
        del batch


def test_tensors_that_have_changed_places_do_not_stay_there():
    buffer, general = buffer_of(), buffer_of()
    general.parts.batches.reader.launches = False
    for _ in range(5):
        batch, expected = buffer.sample(8), general.sample(8)
        assert same(batch, expected)
        one, other = batch["observation"], batch["next", "observation"]
        one.data, other.data = other.data, one.data
        del batch, one, other


def test_who_knows_a_tensor_weakly_does_not_take_that_of_another_batch_for_it():
    buffer, known = buffer_of(), WeakIdKeyDictionary()
    for _ in range(6):
        tensor = buffer.sample(8)["observation"]
        assert tensor not in known
        known[tensor] = None
        del tensor


def test_swapped_data_does_not_hide_who_holds_another_tensor():
    """The count of who holds the memory falls with ``.data =``, and rises with a view: both at once cancel."""
    buffer = buffer_of()
    for _ in range(4):
        buffer.sample(8)
    batch = buffer.sample(8)
    held, value = batch["next", "observation"].detach(), batch["next", "observation"].clone()
    batch["observation"].data = torch.zeros(5)
    del batch
    for _ in range(6):
        buffer.sample(8)
    assert torch.equal(held, value)


def test_rows_that_are_freed_are_not_held_by_what_is_prepared():
    buffer = buffer_of("prioritized")
    for _ in range(5):
        buffer.sample(8)
    assert prepared(buffer)
    of_rows = [weakref.ref(buffer.storage.rows.table), weakref.ref(buffer.sampler.tree.leaves)]
    buffer.free()
    gc.collect()
    assert [each() for each in of_rows] == [None, None]
    buffer.extend(rows(40))
    assert buffer.sample(8)["observation"].max() < 41


@pytest.mark.parametrize("draws", [1, 5])
def test_rows_are_released_with_their_buffer_and_not_when_garbage_is_collected(draws):
    buffer = buffer_of("slices")
    for _ in range(draws):
        buffer.sample(8)
    rows_of = weakref.ref(buffer.storage.rows)
    gc.collect()
    gc.disable()
    try:
        del buffer
        assert rows_of() is None
    finally:
        gc.enable()


def test_an_empty_buffer_is_refused_however_often_it_was_drawn_from():
    buffer = buffer_of()
    for _ in range(5):
        buffer.sample(8)
    buffer.empty()
    with pytest.raises(RuntimeError, match="empty storage"):
        buffer.sample(8)


def test_a_storage_that_was_emptied_by_itself_is_refused_as_ever():
    """Nothing told the buffer: what is prepared is there still."""
    buffer = buffer_of()
    for _ in range(4):
        buffer.sample(8)
    assert prepared(buffer)
    buffer.storage.empty()
    with pytest.raises(RuntimeError, match="empty storage"):
        buffer.sample(8)


def test_what_cannot_be_prepared_does_not_take_the_place_of_what_is(monkeypatch):
    """As many kinds of batches as are kept, one of which is made in the general way each time."""
    monkeypatch.setattr(slots, "_KEPT", 2)
    monkeypatch.setattr(slots, "MAX_BYTES", 1 << 12)
    buffer = buffer_of()
    for _ in range(4):
        buffer.sample(8)
        buffer.sample(200)
    (one,) = prepared(buffer)
    assert one.n_bytes <= 1 << 12


def test_rows_that_were_rewritten_have_other_generations():
    buffer = buffer_of("prioritized")
    for _ in range(5):
        buffer.sample(8)
    buffer[:] = rows(120)
    assert (buffer.sample(64)["index_generation"] > 0).all()


def test_a_transform_that_comes_later_sees_the_batches():
    buffer = buffer_of()
    for _ in range(5):
        buffer.sample(8)
    buffer.append_transform(lambda data: data.set("doubled", 2 * data["observation"]))
    for _ in range(5):
        batch = buffer.sample(8)
        assert torch.equal(batch["doubled"], 2 * batch["observation"])
        assert "index" in batch.keys()


def test_a_sampler_of_the_users_own_is_asked_each_time():
    class Newest(RandomSampler):
        asked = 0

        def choose(self, n):
            self.asked += 1
            newest = len(self.storage) - 1
            return torch.arange(newest, newest - n, -1), {}

        def draw(self, n):
            positions, info = self.choose(n)
            tensors, generation = self.reader.gather(positions)
            return type(super().draw(1))(tensors, positions, generation, info)

    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=Newest())
    buffer.extend(rows(40))
    for _ in range(6):
        buffer.sample(8)
    assert buffer.sampler.asked == 6


def test_rows_that_a_tree_does_not_let_draw_are_not_drawn():
    buffer = buffer_of("prioritized")
    for _ in range(4):
        buffer.sample(8)
    buffer.sampler.tree.restrict(torch.tensor([1 << 5, 0, 0, 0]))
    assert (buffer.sample(8)["index"] == 5).all()


@pytest.mark.parametrize("method", ["choose", "choose_batches", "draw", "draw_batches"])
def test_what_a_users_sampler_reads_is_not_known(method):
    """Even where it says that a draw replaces none of its attributes."""

    def own_method(self, *args):
        return getattr(RandomSampler, method)(self, *args)

    own = type("Own", (RandomSampler,), {method: own_method, "drawn_state": ()})
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=own())
    buffer.extend(rows(40))
    for _ in range(6):
        buffer.sample(8)
        buffer.sample(8, batches=2)
    assert not prepared(buffer)


def test_an_interrupt_after_the_launches_does_not_leave_the_index_by_another_rule(monkeypatch):
    """Slices of two lengths in turn: each draw sums the index anew."""
    ours, general = (
        TensorDictReplayBuffer(
            storage=LazyTensorStorage(CAPACITY), sampler=SliceSampler(num_slices=2, weighting="transition")
        )
        for _ in range(2)
    )
    general.parts.batches._draw = general.parts.batches.drawn
    for buffer in (ours, general):
        buffer.set_rng(torch.Generator().manual_seed(3))
        buffer.extend(rows(120))
    for size in (8, 24, 8, 24, 8):
        assert same(ours.sample(size), general.sample(size))
    fill = slots._Slot.fill

    def interrupted(self):
        fill(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(slots._Slot, "fill", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ours.sample(24)
    general.sample(24)
    # Drawn in the general way, which trusts the index.
    assert same(ours.sample(8, include_info=False), general.sample(8, include_info=False))


def test_an_interrupted_draw_leaves_nothing_half_prepared(monkeypatch):
    buffer, general = buffer_of("slices"), buffer_of("slices")
    general.parts.batches.reader.launches = False
    noted = slots.PreparedBatches._noted

    def interrupted(self, *args):
        with monkeypatch.context() as context:
            context.setattr(slots, "_Prepared", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
            return noted(self, *args)

    monkeypatch.setattr(slots.PreparedBatches, "_noted", interrupted)
    for _ in range(6):
        try:
            batch = buffer.sample(8)
        except KeyboardInterrupt:
            general.sample(8)
            continue
        assert same(batch, general.sample(8))


def test_calls_of_python_per_batch_and_update_on_a_gpu():
    """Counted over Triton's own launcher and a driver whose launches do nothing."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.host_time", "--count"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ".", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # One of them leaves a compiler's graph, in place of functions of PyTorch, which are not counted.
    assert all(calls <= 13 for name, calls in found.items() if name.endswith(("sample", "update"))), found
    assert found["uniform extend 256"] <= 32, found


def test_writes_that_came_before_write_what_the_general_way_writes():
    """Tensors, arrays, dicts, lists and single steps, over the ring's end; views of the rows are copied first."""
    ours, general = buffer_of("prioritized"), buffer_of("prioritized")
    general.storage.plans.written.prepares = False
    for number in range(14):
        data = rows((3, 8)[number % 2], 50 * number)
        columns = dict(data.items(True, True))
        for buffer in (ours, general):
            if number % 7 == 3:
                buffer.extend_columns({key: value.numpy() for key, value in columns.items()})
            elif number % 7 == 4:
                buffer.extend_columns([columns[key] for key in buffer.parts.writes.keys])
            elif number % 7 == 5:
                buffer.add_columns({key: value[0] for key, value in columns.items()})
            elif number % 7 == 6:
                seen = buffer.storage[: len(data)]["observation"]
                buffer.extend(TensorDict({"observation": seen, "next": data["next"]}, [len(data)]))
            else:
                cursor = buffer.storage.cursor
                assert torch.equal(buffer.extend(data), (cursor + torch.arange(len(data))) % CAPACITY)
    assert same(ours[:], general[:])
    assert torch.equal(ours.sampler.tree.leaves, general.sampler.tree.leaves)
    assert any(type(each).__name__ == "LaunchedRows" for each in ours.parts.writes._route._of_size.values())


@pytest.mark.parametrize("change", [lambda array: array[::-1], lambda array: array.astype(">f4")])
@pytest.mark.parametrize("one_step", [False, True])
def test_arrays_that_pytorch_can_not_have_as_they_are(change, one_step):
    """Reversed ones, and those of the other byte order, however often they come."""
    buffer, due = buffer_of(), []
    for number in range(4):
        columns = {key: value.numpy() for key, value in rows(1, number).items(True, True)}
        if one_step:
            columns = {key: value[0] for key, value in columns.items()}
        columns["observation"] = change(columns["observation"] + np.arange(3, dtype="f4"))
        due.append(torch.from_numpy(columns["observation"].astype("f4").copy().reshape(3)))
        (buffer.add_columns if one_step else buffer.extend_columns)(columns)
    assert torch.equal(buffer[120:]["observation"], torch.stack(due))


def test_writes_of_more_keys_than_a_launch_takes():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8))
    for number in range(4):
        buffer.extend(TensorDict({f"key {i}": torch.full((1,), number) for i in range(130)}, [1]))
    assert buffer[:]["key 129"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.set("observation", data["observation"].double()),
        lambda data: data.set("observation", data["observation"][:, :2]),
        lambda data: data.exclude(("next", "done")),
    ],
)
def test_a_write_of_another_form_is_refused_as_ever(change):
    buffer = buffer_of()
    for _ in range(4):
        buffer.extend(rows(8))
    with pytest.raises(ValueError, match=r"observation|done"):
        buffer.extend(change(rows(8)))
    assert len(buffer) == 152


PRIORITIES = [
    lambda n: torch.rand(n),
    lambda n: torch.rand(n, dtype=torch.float64) * 1e-60,
    lambda n: torch.rand(n, 2)[:, 0],
    lambda n: torch.rand(2, n).requires_grad_()[1],
    lambda n: torch.randint(0, 9, (n,)),
    lambda n: torch.tensor([math.nan, -1.0, math.inf, 3.0]).repeat(n)[:n],
    lambda n: 0.5,
    lambda n: torch.rand(n).tolist(),
    lambda n: torch._neg_view(-torch.rand(n)),
    lambda n: torch.rand(n + 1)[1:],
    lambda n: torch.nn.Parameter(torch.rand(n)),
]
INDICES = [
    lambda index: index,
    lambda index: index.flip(0)[:1].expand_as(index),
    lambda index: torch.where(index % 2 == 0, index, -1),
    lambda index: index.int(),
    lambda index: index.repeat_interleave(2, 0)[::2],
    lambda index: torch._neg_view(-index),
]


@pytest.mark.parametrize("shape", [(CAPACITY,), (32, 8)])
def test_updates_that_came_before_are_those_of_the_general_way(shape):
    """Of several sizes, dtypes and strides; duplicates, rows that are gone, and priorities that are refused."""
    ours, general = (
        TensorDictReplayBuffer(
            storage=LazyTensorStorage(CAPACITY, ndim=len(shape)), sampler=PrioritizedSampler(CAPACITY, 0.6, 0.4)
        )
        for _ in range(2)
    )
    for buffer in (ours, general):
        buffer.extend(rows(128).reshape(*shape[1:], -1))
    general.sampler.tree._repeated = None
    chance, repeated = random.Random(7), 0
    for number in range(60):
        n = chance.choice([8, 16, 33])
        index = torch.randint(0, 128, (n,))
        index = index if len(shape) == 1 else torch.stack([index // 8, index % 8], -1)
        index, priority = chance.choice(INDICES)(index), chance.choice(PRIORITIES)(n)
        # Those of another round of the ring are gone.
        generation = chance.choice([None, ours.storage.ring.generations(torch.arange(n)) - number % 2])
        if number % 20 == 19:
            for buffer in (ours, general):
                buffer.extend(rows(64, 1000 * number).reshape(*shape[1:], -1))
        alpha = chance.random()
        for buffer in (ours, general):
            if number % 12 == 11:
                buffer.sampler.tree.set_alpha(alpha)
            buffer.update_priority(index, priority, generation=generation)
        mine, other = ours.sampler.tree, general.sampler.tree
        for name in ("leaves", "nodes", "scalars"):
            assert torch.equal(getattr(mine, name), getattr(other, name)), (number, name)
        repeated += any(mine._repeated.values())
    assert repeated > 50
    assert mine.refused > 0


def test_an_update_whose_index_was_its_generation_is_not_that_of_others():
    """Of one tensor nobody can say which of two arguments it was."""
    tree, other = (SumTree(CAPACITY) for _ in range(2))
    other._repeated = None
    same_index = torch.ones(4, dtype=torch.int64)
    for index, generation in ((same_index, same_index), (torch.arange(4), torch.ones(4, dtype=torch.int64))) * 2:
        for each in (tree, other):
            each.update(index, torch.arange(4.0), generation=generation)
        assert torch.equal(tree.leaves, other.leaves)


def test_an_update_by_the_trees_own_weights_is_not_that_of_others():
    """Their place is that of the leaves, which the launch writes to."""
    tree, other = (SumTree(CAPACITY) for _ in range(2))
    other._repeated = None
    index, given = torch.arange(8), torch.full((8,), 3.0)
    for own in (True, False, True, False):
        for each in (tree, other):
            each.update(index, each.leaves[:8] if own else given)
        assert torch.equal(tree.leaves, other.leaves)
        given = torch.rand(8)
        index = index.flip(0)


def test_updates_are_launched_as_they_are_configured_now(monkeypatch):
    """An update is tuned so."""
    tree, launched, launch = SumTree(CAPACITY), [], Variant.launch
    monkeypatch.setattr(Variant, "launch", lambda self, *call: (launched.append(self.num_warps), launch(self, *call)))
    for num_warps in (4, 4, 2):
        launched.clear()
        with config.using(sum_tree_update=UpdateConfig(True, 64, 8, num_warps)):
            for _ in range(3):
                tree.update(torch.arange(8), torch.rand(8))
        assert set(launched) == {num_warps}


def test_what_repeats_updates_holds_no_batch_and_is_not_copied():
    buffer = buffer_of("prioritized")
    for _ in range(4):
        batch = buffer.sample(8)
        batch["td_error"] = torch.rand(8)
        buffer.update_tensordict_priority(batch)
        held = weakref.ref(batch["td_error"])
        del batch
        assert held() is None
    tree = buffer.sampler.tree
    assert any(tree._repeated.values())
    copy = pickle.loads(pickle.dumps(tree))
    copy.update(torch.arange(8), torch.rand(8))
    assert not torch.equal(copy.leaves, tree.leaves)
