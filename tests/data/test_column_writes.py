"""Rows that are written as one array a key: all is as after a write of a TensorDict of them."""

from __future__ import annotations

import copy
import functools
import pickle

import numpy as np
import pytest
import torch

from gpubuf import (
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from gpubuf.data import Normalize, RewardScale, array_writes
from gpubuf.kernels.rows import WRITTEN
from tests.support.column_setup import STORAGES, assert_same_buffers, buffer, rows, tensordict
from tests.support.fake_cuda import fake_cuda, no_blocking_copies
from tests.support.interrupted_buffers import CAPACITY, check, steps
from tests.support.interrupts import interrupted
from tests.support.late_gpu import GPU, LateGpu

FORMS = {
    "dict of arrays": lambda made, columns: columns,
    "list of arrays": lambda made, columns: [columns[key] for key in made.column_keys],
    "list of tensors": lambda made, columns: [torch.from_numpy(columns[key]) for key in made.column_keys],
    "dict of tensors": lambda made, columns: {key: torch.from_numpy(value) for key, value in columns.items()},
    "tuple of both": lambda made, columns: tuple(
        torch.from_numpy(columns[key]) if place % 2 else columns[key] for place, key in enumerate(made.column_keys)
    ),
}


COMBINATIONS = [(storage, "slices" if storage == "steps" else "uniform", "dict of arrays") for storage in STORAGES]
COMBINATIONS += [("steps", "prioritized", form) for form in FORMS if form != "dict of arrays"]
COMBINATIONS += [("rows", "uniform", form) for form in FORMS if form != "dict of arrays"]
COMBINATIONS += [("shared", "uniform", "list of tensors"), ("shared", "slices", "list of tensors")]


@pytest.mark.parametrize(("storage", "sampler", "form"), COMBINATIONS)
def test_steps_are_written_as_by_add_and_extend(storage, sampler, form):
    """Rows, counters, priorities, index and draws, over the seam."""
    ours, theirs = buffer(storage, sampler), buffer(storage, sampler)
    flat = storage in ("rows", "small")
    for step in range(20):
        columns = rows((3,), 3 * step)
        # The first write settles keys.
        given = FORMS[form](ours, columns) if step else columns
        if flat:
            ours.extend_columns(given)
            theirs.extend(tensordict(columns, (3,)))
        else:
            ours.add_columns(given)
            theirs.add(tensordict(columns, (3,)))
        for value in columns.values():
            # The memory is the caller's again.
            value[...] = 0
    assert len(ours) == ours.storage.max_size
    assert_same_buffers(ours, theirs)


@pytest.mark.parametrize(("storage", "form"), [("rows", "dict of tensors"), ("steps", "dict of arrays")])
def test_through_the_launchers(storage, form, backend):
    ours, theirs = buffer(storage), buffer(storage)
    for step in range(3):
        columns = rows((3,), 3 * step)
        (ours.extend_columns if storage == "rows" else ours.add_columns)(FORMS[form](ours, columns))
        (theirs.extend if storage == "rows" else theirs.add)(tensordict(columns, (3,)))
    assert_same_buffers(ours, theirs)


@pytest.mark.parametrize("form", ["dict of arrays", "tuple of both"])
def test_single_rows_of_one_dimension(form):
    ours, theirs = buffer("rows", "prioritized"), buffer("rows", "prioritized")
    for step in range(CAPACITY + 5):
        columns = {key: value[0] for key, value in rows((1,), step).items()}
        data = tensordict({key: np.asarray(value) for key, value in columns.items()}, ())
        ours.add_columns(
            FORMS["dict of arrays" if step == 0 else form](ours, {k: np.asarray(v) for k, v in columns.items()})
        )
        theirs.add(data)
    assert_same_buffers(ours, theirs)


@pytest.mark.parametrize("dim_extend", [0, 1])
def test_several_steps_of_environments(dim_extend):
    """[E, T] by default, as for extend, and [T, E] with dim_extend=0."""
    ours, theirs = buffer("shared", dim_extend=dim_extend), buffer("shared", dim_extend=dim_extend)
    for step in range(5):
        columns = rows((4, 3), 12 * step)
        if dim_extend == 1:
            columns = {key: np.ascontiguousarray(value.swapaxes(0, 1)) for key, value in columns.items()}
        shape = columns["action"].shape
        ours.extend_columns(columns)
        theirs.extend(tensordict(columns, shape))
    assert_same_buffers(ours, theirs)


def test_writes_larger_than_the_capacity_and_than_the_staging():
    ours, theirs = buffer("rows", "prioritized"), buffer("rows", "prioritized")
    for n in (7, CAPACITY + 5, 5000, 2):
        columns = rows((n,), 0)
        ours.extend_columns(columns)
        theirs.extend(tensordict(columns, (n,)))
    assert_same_buffers(ours, theirs)


def test_what_needs_the_batch_as_a_whole():
    """Statistics, inverse transforms, and priorities that come with the rows."""

    class Doubles:
        def __call__(self, data):
            return data

        def inv(self, data):
            return data.set("obs", data["obs"] * 2)

    options = {"process": lambda: [Normalize("obs"), RewardScale(0.9)]}
    made = [buffer("steps", process=options["process"]()) for _ in range(2)]
    made += [buffer("steps", transform=Doubles()) for _ in range(2)]
    for ours, theirs in (made[:2], made[2:]):
        for step in range(3):
            columns = rows((3,), 3 * step)
            ours.add_columns(columns)
            theirs.add(tensordict(columns, (3,)))
        assert_same_buffers(ours, theirs)
    ours, theirs = buffer("rows", "prioritized"), buffer("rows", "prioritized")
    for step in range(3):
        columns = rows((3,), 3 * step) | {"td_error": np.full(3, 1.5 + step, np.float32)}
        ours.extend_columns(columns)
        theirs.extend(tensordict(columns, (3,)))
    assert_same_buffers(ours, theirs)


def test_nothing_is_written_where_columns_do_not_fit():
    made = buffer("steps")
    good = rows((3,), 0)
    with pytest.raises(ValueError, match="the first write settles"):
        made.add_columns(list(good.values()))
    with pytest.raises(ValueError, match="batch dimensions"):
        made.add_columns({"a": np.zeros(3), "b": np.zeros(2)})
    with pytest.raises(ValueError, match="no columns"):
        made.add_columns({})
    made.add_columns(good)
    wrong = {
        "missing": {key: value for key, value in good.items() if key != "obs"},
        "extra": good | {"more": np.zeros(3)},
        "float64": good | {"obs": good["obs"].astype(np.float64)},
        "shape": good | {"obs": good["obs"][:, :2]},
        "environments": {key: value[:2] for key, value in good.items()},
        "object": good | {"obs": good["obs"].astype(object)},
    }
    for name, columns in wrong.items():
        with pytest.raises(ValueError, match=r"missing|rows of shape|can't be read"):
            made.add_columns(columns)
        assert len(made) == 3, name
    with pytest.raises(ValueError, match="5 columns"):
        made.add_columns([good["obs"]])
    with pytest.raises(TypeError):
        made.add_columns(3)
    flat = buffer("rows")
    flat.extend_columns(good)
    with pytest.raises(ValueError, match="rows of shape"):
        flat.extend_columns(good | {"obs": good["obs"][:2]})
    flat.extend_columns({key: value[:0] for key, value in good.items()})
    assert len(flat) == 3


def test_lists_numbers_and_strange_arrays():
    """Numbers take the dtype of their key; views, read-only and reversed arrays are read as they look."""
    made = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    made.add_columns({"x": np.float32(1), "n": 3, "ok": True})
    made.add_columns({"x": 2.5, "n": 4, "ok": False})
    made.extend_columns({"x": [1, 2], "n": [5, 6], "ok": [True, False]})
    assert made[:]["x"].tolist() == [1, 2.5, 1, 2]
    assert made[:]["n"].tolist() == [3, 4, 5, 6]
    frozen = np.arange(20000, dtype=np.float32)
    frozen.flags.writeable = False
    for column in (frozen[::2][:4], frozen[:4][::-1], frozen, frozen[::2], frozen[::-1], frozen[:9000], frozen[::2]):
        n = len(column)
        made.extend_columns({"x": column, "n": np.zeros(n, np.int64), "ok": np.zeros(n, bool)})
        assert made[:]["x"][(made.write_count - 1) % 10] == column[-1]


def test_parts_that_are_replaced():
    """Memory that is known by address is not used after it has been given up."""
    ours, theirs = buffer("steps"), buffer("steps")

    def both(step: int) -> None:
        columns = rows((3,), 3 * step)
        ours.add_columns(columns)
        theirs.add(tensordict(columns, (3,)))

    both(0)
    both(1)
    for which in (ours, theirs):
        which.set_sampler(PrioritizedSampler(CAPACITY, 0.7, 0.5))
    both(2)
    for which in (ours, theirs):
        which.free()
    both(3)
    both(4)
    for which in (ours, theirs):
        which.set_storage(LazyTensorStorage(CAPACITY, ndim=2))
    both(5)
    state = ours.state_dict()
    for which in (ours, theirs):
        which.empty()
        which.load_state_dict(copy.deepcopy(state))
    both(6)
    ours, theirs = pickle.loads(pickle.dumps(ours)), copy.deepcopy(theirs)
    both(7)
    assert len(ours) == 9
    assert_same_buffers(ours, theirs)


@pytest.mark.parametrize("sampler", ["prioritized"])
def test_a_write_that_is_interrupted_anywhere(sampler):
    """Case 54: all of a write, or nothing of it."""

    def columns(start: int, n: int) -> dict:
        data = steps(start, n).exclude("td_error")
        return {key: data[key].numpy() for key in data.keys(True, True)}

    def new() -> TensorDictReplayBuffer:
        torch.manual_seed(0)
        samplers = {"uniform": RandomSampler, "prioritized": lambda: PrioritizedSampler(CAPACITY, 0.7, 0.5)}
        made = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=samplers[sampler](), batch_size=8)
        made.extend_columns(columns(0, 45))
        made.extend_columns(columns(45, 3))
        return made

    outcomes, place = set(), 0
    made = new()
    while interrupted(functools.partial(made.extend_columns, columns(48, 3)), place):
        check(made)
        outcomes.add(int(made.storage.ring[WRITTEN]))
        assert made.write_count == int(made.storage.ring[WRITTEN])
        made, place = new(), place + 2
    assert outcomes == {48, 51}


def test_memory_is_filled_again_before_the_gpu_has_read_it(monkeypatch: pytest.MonkeyPatch):
    """Case 51: each write has pinned memory of its own, and waits for nothing."""
    gpu = LateGpu(monkeypatch)
    made, columns = buffer("rows"), rows((3,), 0)
    made.extend_columns(columns)
    gpu.synchronize()
    made.storage._device = GPU
    monkeypatch.setattr(array_writes, "past_dispatcher", lambda table: False)
    for step in range(1, 4):
        for key, value in rows((3,), 3 * step).items():
            columns[key][...] = value
        made.extend_columns(columns)
    assert len(gpu.queue) == 6
    gpu.synchronize()
    assert gpu.waits == 0
    made.storage._device = torch.device("cpu")
    due = torch.cat([tensordict(rows((3,), 3 * step), (3,)) for step in range(4)])
    assert (made[:].exclude("index") == due).all()


def test_no_sync_on_a_gpu():
    """Columns on the device are written by one launch that waits for nothing."""
    with fake_cuda():
        made = TensorDictReplayBuffer(
            storage=LazyTensorStorage(40, device="cuda", ndim=2), sampler=PrioritizedSampler(40, 0.7, 0.5), batch_size=4
        )
        columns = {
            "obs": torch.empty(4, 3, device="cuda"),
            ("next", "obs"): torch.empty(4, 3, device="cuda"),
            ("next", "done"): torch.empty(4, 1, dtype=torch.bool, device="cuda"),
        }
        made.add_columns(columns)
        with no_blocking_copies():
            made.add_columns(columns)
            made.add_columns(list(columns.values()))
        assert len(made) == 12
