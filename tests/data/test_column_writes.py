"""Rows that are written as one array a key: all is as after a write of a TensorDict of them."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from gpubuf import (
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
)
from gpubuf.data import writing
from gpubuf.data.storage.storage import TensorStorage
from tests.contracts.checkpoints import state_bytes
from tests.support.interrupted_buffers import CAPACITY
from tests.support.late_gpu import GPU, LateGpu
from tests.support.transitions import same

STORAGES = {
    "rows": {},
    "steps": {"ndim": 2},
}


def rows(shape: tuple[int, ...], start: int) -> dict:
    """NumPy columns of a stream: each next observation is the observation of the step behind, but after an end."""
    steps = start + np.arange(int(np.prod(shape))).reshape(shape)
    obs = np.stack([steps, steps * 2, steps % 5], -1).astype(np.float32)
    following = np.stack([steps + shape[-1], (steps + shape[-1]) * 2, (steps + shape[-1]) % 5], -1).astype(np.float32)
    return {
        "obs": obs,
        "action": (steps % 4).astype(np.int64),
        ("next", "obs"): following,
        ("next", "reward"): (steps * 0.5).astype(np.float32)[..., None],
        ("next", "done"): (steps % 7 == 6)[..., None],
    }


def tensordict(columns: dict, shape: tuple[int, ...]) -> TensorDict:
    data = TensorDict({}, shape)
    for key, value in columns.items():
        data[key] = torch.from_numpy(value)
    return data


def buffer(storage: str) -> TensorDictReplayBuffer:
    torch.manual_seed(0)
    made = LazyTensorStorage(CAPACITY, **STORAGES[storage])
    return TensorDictReplayBuffer(storage=made, batch_size=4)


def assert_same_buffers(one: ReplayBuffer, other: ReplayBuffer) -> None:
    # What was never written is whatever was in the memory.
    for which in (one, other):
        for column in which.storage.columns:
            column.whole[which.storage.steps_stored :] = 0
        which.set_rng(torch.Generator().manual_seed(0))
    assert state_bytes(one) == state_bytes(other)
    assert same(one.sample(), other.sample())


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
        "extra": good | {("next", "more"): np.zeros(3)},
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


def test_memory_is_filled_again_before_the_gpu_has_read_it(monkeypatch: pytest.MonkeyPatch):
    """Case 51: each write has pinned memory of its own, and waits for nothing."""
    gpu = LateGpu(monkeypatch)
    made, columns = buffer("rows"), rows((3,), 0)
    made.extend_columns(columns)
    gpu.synchronize()
    made.storage.rows.device = GPU
    monkeypatch.setattr(writing, "runs_at_once", lambda table: False)
    for step in range(1, 4):
        for key, value in rows((3,), 3 * step).items():
            columns[key][...] = value
        made.extend_columns(columns)
    assert len(gpu.queue) == 6
    gpu.synchronize()
    assert gpu.waits == 0
    made.storage.rows.device = torch.device("cpu")
    due = torch.cat([tensordict(rows((3,), 3 * step), (3,)) for step in range(4)])
    assert (made[:].exclude("index") == due).all()


def _negated(value: torch.Tensor) -> torch.Tensor:
    """The same numbers, in memory that holds them with the other sign."""
    if not value.is_floating_point():
        return value
    return torch.complex(torch.zeros_like(value), -value).conj().imag


def test_tensors_of_a_step_that_are_no_plain_memory():
    """Views, negations, zeros without memory and tensors with gradients: their numbers are written."""
    options = {"ndim": 2, "share_next": True, "dtypes": {("next", "done"): torch.float32}}
    ours, theirs = (
        ReplayBuffer(
            storage=LazyTensorStorage(24, **options), n_steps=3, end_keys=[("next", "done")], batch_size=4, dim_extend=0
        )
        for _ in range(2)
    )
    strange = [
        lambda value: value.flip(0).flip(0),
        lambda value: torch.stack([value, value], 1)[:, 0],
        _negated,
        lambda value: torch._efficientzerotensor(value.shape, dtype=value.dtype),
        lambda value: torch._efficientzerotensor((2, *value.shape), dtype=value.dtype)[1],
        lambda value: value.requires_grad_() if value.is_floating_point() else value,
        lambda value: value.as_strided(value.shape, (0,) * value.ndim),
    ]
    for step in range(30):
        columns = {key: torch.from_numpy(value) for key, value in rows((3,), 3 * step).items()}
        if step:
            columns = {key: strange[step % len(strange)](value) for key, value in columns.items()}
        ours.add_columns(list(columns.values()) if step else columns)
        theirs.add(TensorDict({key: value.detach().clone() for key, value in columns.items()}, [3]))
    assert_same_buffers(ours, theirs)


def test_tensors_of_a_step_that_are_refused():
    """Nothing is written, and the next step is."""
    made, theirs = (
        ReplayBuffer(storage=LazyTensorStorage(24, ndim=2, dtypes={"action": torch.int8}), batch_size=4)
        for _ in range(2)
    )

    def tensors(step: int) -> list:
        return [torch.from_numpy(value) for value in rows((3,), 3 * step).values()]

    for which in (made, theirs):
        which.add_columns(rows((3,), 0))
        which.add_columns(tensors(1))
    wrong = tensors(2)
    with pytest.raises(ValueError, match="key 'action': a number to store as"):
        made.add_columns([wrong[0], wrong[1] + 1000, *wrong[2:]])
    for bad in (wrong[0][:2], wrong[0].double(), wrong[0].to("meta")):
        with pytest.raises((ValueError, RuntimeError, NotImplementedError)):
            made.add_columns([bad, *wrong[1:]])
    with pytest.raises(ValueError, match="5 columns"):
        made.add_columns(wrong[:4])
    with pytest.raises(ValueError, match="5 columns"):
        made.add_columns([])
    for which in (made, theirs):
        which.add_columns(tensors(3))
    assert_same_buffers(made, theirs)


def test_tensordicts_of_one_size_again_and_again():
    """Their launch is prepared: rows and index stay as at the first write. What is refused is in the contract, too."""
    made, n = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=4), 5
    strange = [
        lambda value: value,
        lambda value: torch.stack([value, value], 1)[:, 0],
        lambda value: torch._neg_view(value.neg()),
        lambda value: torch._efficientzerotensor(value.shape, dtype=value.dtype),
        lambda value: torch._efficientzerotensor((2, *value.shape), dtype=value.dtype)[1],
    ]
    written, indices = [], []
    for number in range(4 * len(strange)):
        batch = tensordict(rows((n,), n * number), (n,))
        batch["obs"] = strange[number % len(strange)](batch["obs"])
        indices.append(made.extend(batch))
        written.append(batch.clone())
        stored = torch.cat(written)[-CAPACITY:]
        places = torch.arange(n * (number + 1))[-CAPACITY:] % CAPACITY
        assert same(made[places], stored)
    assert torch.equal(torch.cat(indices), torch.arange(n * len(indices)) % CAPACITY)

    before = state_bytes(made)
    first = tensordict(rows((n,), 0), (n,))
    renamed, scalar = first.clone().rename_key_("action", "Action"), first.clone()
    scalar.batch_size = []
    for bad in (renamed, scalar, first.clone().set("obs", first["obs"].to("meta"))):
        with pytest.raises((ValueError, TypeError)):
            made.extend(bad)
        assert state_bytes(made) == before
    assert same(made[made.extend(written[0])], written[0])
    # More rows than the capacity.
    for _ in range(3):
        index = made.extend(tensordict(rows((CAPACITY + 1,), 0), (CAPACITY + 1,)))
        assert index[0] == -1
        assert index[1:].sort().values.equal(torch.arange(CAPACITY))


# Dicts, and single rows: their launch is prepared, too


def nested(columns: dict) -> dict:
    found: dict = {}
    for key, value in columns.items():
        *above, name = (key,) if isinstance(key, str) else key
        (found.setdefault(above[0], {}) if above else found)[name] = value
    return found


def _scalars(columns: dict) -> dict:
    """Rows whose rewards are numbers, as programs get them from environments."""
    return columns | {("next", "reward"): columns["next", "reward"][..., 0]}


FORMS = {
    "tensors": lambda row: {key: torch.as_tensor(value) for key, value in row.items()},
    "arrays": lambda row: {key: np.asarray(value) for key, value in row.items()},
    "mixed": lambda row: row | {"obs": torch.from_numpy(row["obs"])},
    "numbers": lambda row: row | {("next", "reward"): float(row["next", "reward"]), "action": int(row["action"])},
    "numbers of NumPy": lambda row: row | {("next", "reward"): np.float64(row["next", "reward"])},
    "no numbers": lambda row: row | {("next", "reward"): float("inf")},
}
BUFFERS = {
    "uniform": (lambda: RandomSampler(), {}),
    "prioritized": (lambda: PrioritizedSampler(CAPACITY, 0.7, 0.5), {}),
    "slices": (lambda: SliceSampler(slice_len=2, end_key=("next", "done")), {}),
    "shared": (lambda: RandomSampler(), {"share_next": True}),
}


def _pair(kind: str, monkeypatch: pytest.MonkeyPatch) -> tuple[TensorDictReplayBuffer, TensorDictReplayBuffer]:
    """Two buffers, the second of which writes everything in the general way."""
    sampler, options = BUFFERS[kind]
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        storage = LazyTensorStorage(CAPACITY, **options)
        made.append(TensorDictReplayBuffer(storage=storage, sampler=sampler(), batch_size=4))
    monkeypatch.setattr(made[1].parts.writes, "prepared", lambda *_, **__: None)
    return made[0], made[1]


@pytest.mark.parametrize("kind", BUFFERS)
@pytest.mark.parametrize("form", FORMS)
def test_rows_in_dicts_are_as_in_the_general_way(form: str, kind: str, monkeypatch: pytest.MonkeyPatch):
    ours, theirs = _pair(kind, monkeypatch)
    for step in range(CAPACITY + 5):
        row = FORMS[form]({key: value[0] for key, value in _scalars(rows((1,), step)).items()})
        if step == CAPACITY and kind == "prioritized":
            for each in (ours, theirs):
                each.update_priority(torch.arange(5), torch.arange(5.0) + 3)
        assert ours.add(nested(row)) == theirs.add(nested(row)) == step % CAPACITY
    assert_same_buffers(ours, theirs)
    with monkeypatch.context() as patched:
        patched.setattr(TensorStorage, "as_batch", None)
        # Numbers beyond a range are looked at by PyTorch.
        with pytest.raises(TypeError) if form == "no numbers" else contextlib.nullcontext():
            ours.add(nested(row))


def test_dicts_of_several_rows_are_as_in_the_general_way(monkeypatch: pytest.MonkeyPatch):
    ours, theirs = _pair("uniform", monkeypatch)
    for step in range(0, 3 * CAPACITY, 5):
        for form in ("tensors", "arrays", "mixed"):
            batch = nested(FORMS[form](rows((5,), step)))
            assert torch.equal(ours.extend(batch), theirs.extend(batch))
    assert_same_buffers(ours, theirs)
    with monkeypatch.context() as patched:
        patched.setattr(TensorStorage, "_append", None)
        ours.extend(batch)


def test_what_is_no_row_has_the_error_of_the_general_way(monkeypatch: pytest.MonkeyPatch):
    ours, theirs = _pair("uniform", monkeypatch)
    good = {key: value[0] for key, value in _scalars(rows((1,), 0)).items()}
    for _ in range(3):
        for each in (ours, theirs):
            each.add(nested(good))
    wrong = {
        "missing": {key: value for key, value in good.items() if key != "obs"},
        "float64": good | {"obs": good["obs"].astype(np.float64)},
        "shape": good | {"obs": good["obs"][:2]},
        "integer": good | {("next", "reward"): 1},
        "bool": good | {"action": True},
        "large": good | {"action": 1 << 70},
        "a batch": rows((2,), 0),
        "text": good | {"action": "left"},
        "object": good | {"action": np.array(None)},
        "no entry": good | {"action": None},
        "list": good | {("next", "reward"): [1.0]},
        "a dict": good | {"action": {"a": 1}},
    }
    for name, row in wrong.items():
        said = []
        for each in (ours, theirs):
            with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
                each.add(nested(row))
            said.append((caught.type, str(caught.value)))
        assert said[0] == said[1], name
        assert len(ours) == 3, name
    assert_same_buffers(ours, theirs)


def test_a_row_may_be_a_view_of_the_rows():
    """It is read before it is overwritten."""
    made = TensorDictReplayBuffer(storage=LazyTensorStorage(3), batch_size=2)
    for step in range(3):
        made.add(tensordict(rows((1,), step), (1,))[0])
    # The newest row, then that which it replaced.
    for place in (2, 0):
        row = made[:][place].exclude("index")
        due = row.clone()
        cursor = made.add(row)
        assert same(made[cursor].exclude("index"), due)


def test_an_extend_of_a_program_gets_single_rows_too():
    """Whoever overrides extend() sees each row that add() writes, the first and the later ones."""
    for base in (ReplayBuffer, TensorDictReplayBuffer):

        class Counting(base):  # type: ignore[misc, valid-type]
            seen = 0

            def extend(self, data, **options):
                self.seen += 1
                return super().extend(data, **options)

        made = type("Below", (Counting,), {})(storage=LazyTensorStorage(8), batch_size=2)
        for step in range(4):
            made.add(tensordict(rows((1,), step), (1,))[0])
        assert made.seen == 4
        assert len(made) == 4
