"""What users do with a buffer beside the usual way: indices of every kind, rows set in place, copies before a draw.

What people write before they have read anything works, or says what to write instead.
"""

from __future__ import annotations

import argparse
import re

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict
from torch import nn

import gpubuf
from gpubuf import (
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    SACLoss,
    SoftUpdate,
    TD3Loss,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from gpubuf.commands import whole_number
from gpubuf.data import (
    MixedReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RoundRobinWriter,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from gpubuf.integrations.torchrl import ListStorage
from gpubuf.modules import make_sac_actor, make_sac_critic
from tests.contracts.buffers import COPIES, BufferContract


def steps(first: int, n: int, done: tuple[int, ...] = ()) -> TensorDict:
    number = torch.arange(first, first + n)
    flag = torch.isin(number, torch.tensor(done, dtype=torch.int64)).unsqueeze(1)
    return TensorDict({"number": number, "next": {"done": flag}}, [n])


def filled(n: int = 7, **options) -> TensorDictReplayBuffer:
    options.setdefault("storage", LazyTensorStorage(10))
    buffer = TensorDictReplayBuffer(batch_size=6, **options)
    buffer.extend(steps(0, n))
    return buffer


INDICES = {
    "NumPy int": np.int64(2),
    "NumPy 0-d": np.array(2),
    "0-d tensor": torch.tensor(3),
    "negative 0-d tensor": torch.tensor(-1),
    "matrix": torch.tensor([[1, 2], [3, 4]]),
    "nested list": [[1, 2], [3, 4]],
    "empty list": [],
    "flags": [True, False] * 3 + [True],
    "NumPy mask": np.arange(7) % 2 == 0,
    "mask": torch.arange(7) > 3,
    "range": range(1, 4),
    "NumPy array, reversed": np.array([6, 0])[::-1],
}


@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("name", INDICES)
def test_an_index_gives_the_rows_and_the_shape_that_it_gives_of_a_tensordict(name, computed):
    storage = LazyTensorStorage(10, dtypes={"number": torch.int32}) if computed else LazyTensorStorage(10)
    buffer, index = filled(storage=storage), INDICES[name]
    rows, due = buffer[index], buffer[:].clone()[index.copy() if isinstance(index, np.ndarray) else index]
    assert rows.batch_size == due.batch_size
    assert rows["number"].tolist() == due["number"].tolist() == rows["index"].tolist()
    assert rows["next", "done"].shape == due["next", "done"].shape
    buffer[index] = due.exclude("index").apply(lambda value: value + 100 if value.dtype is torch.int64 else ~value)
    assert buffer[index]["number"].tolist() == (due["number"] + 100).tolist()
    assert buffer[index]["next", "done"].all()
    assert int((buffer[:]["number"] >= 100).sum()) == due["number"].numel()


@pytest.mark.parametrize("index", [True, np.False_, None, slice, {1}, (slice(0, 2),), (None, 1), 1.5, ["number"]])
def test_what_is_no_index_is_named_in_a_type_error(index):
    buffer = filled()
    with pytest.raises(TypeError, match="rows are indexed by"):
        buffer[index]
    with pytest.raises(TypeError, match="rows are indexed by"):
        buffer[index] = steps(0, 1)[0]
    assert buffer[:]["number"].tolist() == list(range(7))


def test_a_mask_of_another_length_is_refused():
    buffer = filled()
    for length in (0, 5, 8, 11):
        with pytest.raises(IndexError, match="mask"):
            buffer[torch.zeros(length, dtype=torch.bool)]
    whole = torch.zeros(10, dtype=torch.bool)
    whole[2] = True
    assert buffer[whole]["number"].tolist() == [2]


@pytest.mark.parametrize("index", [[], (), np.array([], dtype=np.int64)])
def test_no_rows_take_no_priorities(index):
    buffer = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(10), batch_size=4)
    buffer.extend(steps(0, 7))
    leaves = buffer.sampler.tree.leaves.clone()
    buffer.update_priority(index, [])
    buffer.mark_update(index)
    assert torch.equal(buffer.sampler.tree.leaves, leaves)


@pytest.mark.parametrize("index", [8, [3, 9], torch.tensor([8])])
def test_a_row_that_was_never_written_is_not_marked_as_new(index):
    """It had a weight from then on, and was drawn: memory that nobody had written."""
    buffer = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(10), batch_size=500)
    buffer.extend(steps(0, 8))
    with pytest.raises(IndexError, match="8 rows are stored"):
        buffer.mark_update(index)
    assert (buffer.sampler.tree.leaves[8:10] == 0).all()
    assert int(buffer.sample()["index"].max()) < 8


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_made_before_the_first_draw_draws_the_same_batches(how):
    contract = BufferContract(sampler="prioritized")
    buffer, _ = contract.filled()
    other = COPIES[how](contract, buffer)
    for _ in range(3):
        assert (buffer.sample() == other.sample()).all()


def test_a_state_taken_before_the_first_draw_takes_no_number_from_torch():
    """A program that takes a state, and saves torch's generator too, goes on as one that takes none."""
    buffer, other = filled(), filled(1)
    before = torch.get_rng_state()
    other.load_state_dict(buffer.state_dict())
    assert torch.equal(torch.get_rng_state(), before)
    batch = buffer.sample()
    torch.set_rng_state(before)
    assert (other.sample() == batch).all()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_rows_of_a_list_whose_keys_differ_are_refused(first, nested):
    """Keys that only some rows of a lazy stack have were left out."""
    rows = [TensorDict({"a": torch.zeros(2)}, []), TensorDict({"a": torch.zeros(2), "b": torch.ones(1)}, [])]
    if nested:
        rows = [TensorDict({"in": row, "t": torch.tensor(0)}, []) for row in rows]
    batch = LazyStackedTensorDict.lazy_stack(rows)
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    if not first:
        buffer.extend(torch.stack([rows[0], rows[0]]))
    with pytest.raises(ValueError, match=r"some rows of the batch have keys that others lack: .*b"):
        buffer.extend(batch)
    assert len(buffer) == (0 if first else 2)


def test_what_cannot_be_stored_is_named():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    with pytest.raises(TypeError, match=r"'a'.*torch.sparse_coo"):
        buffer.extend(TensorDict({"a": torch.eye(5).to_sparse()}, [5]))
    with pytest.raises(TypeError, match=r"dict without tensors .*extend_columns"):
        ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2).extend({"a": "text"})


@pytest.mark.parametrize("number", [True, "4", 2.5, 4.0, float("nan"), float("inf"), -1, 0, [4]])
def test_sizes_that_are_no_numbers(number):
    """Whole numbers, in all places alike."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=2)
    buffer.extend(TensorDict({"x": torch.arange(8)}, [8]))
    for name, call in {
        "batch_size": buffer.sample,
        "batches": lambda number: buffer.sample(batches=number),
        "prefetch": lambda number: TensorDictReplayBuffer(batch_size=2, prefetch=number if number != 0 else -1),
    }.items():
        with pytest.raises((TypeError, ValueError), match=f"^{name} must be a whole number of at least"):
            call(number)
    with pytest.raises((TypeError, ValueError), match=r"^batch_size must be a whole number of at least 1"):
        TensorDictReplayBuffer(batch_size=number)
    for name, call in {
        "ndim": lambda number: LazyTensorStorage(8, ndim=number),
        "next_capacity": lambda number: LazyTensorStorage(8, share_next=True, next_capacity=number),
        "slice_len": lambda number: SliceSampler(slice_len=number),
        "num_slices": lambda number: SliceSampler(num_slices=number),
        "capacity": lambda number: gpubuf.plan({"x": "3:int8"}, number),
        "envs": lambda number: gpubuf.plan({"x": "3:int8"}, 8, envs=number),
        "max_capacity": lambda number: PrioritizedSampler(number + 0.5 if number == 4.0 else number, 0.6, 0.4),
        "batches": lambda number: MixedReplayBuffer([buffer], batch_size=2).sample(batches=number),
    }.items():
        with pytest.raises((TypeError, ValueError), match=f"^{name} must be a whole number of at least 1, got"):
            call(number)
    if isinstance(number, (bool, float)) and number != 4:
        with pytest.raises(ValueError, match=f"a whole number of rows, one or more, got max_size={number}"):
            LazyTensorStorage(number)


@pytest.mark.parametrize("generator", [3, True, "seed", torch.Generator])
def test_a_generator_that_is_none(generator):
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=2)
    buffer.extend(TensorDict({"x": torch.arange(8)}, [8]))
    with pytest.raises(TypeError, match=r"generator must be a torch\.Generator or None, got"):
        buffer.set_rng(generator)
    with pytest.raises(TypeError, match=r"generator must be a torch\.Generator or None, got"):
        TensorDictReplayBuffer(generator=generator)
    assert len(buffer.sample()) == 2


@pytest.mark.parametrize("kind", ["meta", "sparse"])
def test_tensors_without_memory(kind):
    """Written, as an index, and as priorities: a meta tensor has the CPU's number, and no address."""

    def other(tensor):
        return tensor.to("meta") if kind == "meta" else tensor.to_sparse()

    dense, buffer = (
        torch.ones(4, 2),
        TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(8), batch_size=2),
    )
    with pytest.raises(TypeError, match="only dense tensors"):
        buffer.extend(TensorDict({"x": other(dense)}, [4]))
    assert not buffer.initialized
    buffer.extend(TensorDict({"x": dense}, [4]))
    index, priority = torch.arange(4), torch.ones(4)
    leaves = buffer.sampler.tree.leaves.clone()
    for call in (
        lambda: buffer.extend(TensorDict({"x": other(dense)}, [4])),
        lambda: buffer.__setitem__(slice(0, 4), TensorDict({"x": other(dense)}, [4])),
        lambda: buffer.update_priority(other(index), priority),
        lambda: buffer.update_priority(index, other(priority)),
        lambda: buffer.update_priority(index, priority, generation=other(torch.ones(4, dtype=torch.int64))),
    ):
        with pytest.raises(TypeError, match="only dense tensors"):
            call()
    assert len(buffer) == 4
    assert (buffer[:]["x"] == 1).all()
    assert torch.equal(buffer.sampler.tree.leaves, leaves)


@pytest.mark.parametrize(
    ("sampler", "below"),
    [
        (lambda **flags: SliceSampler(slice_len=2, end_key="done", **flags), "next"),
        (lambda **flags: SliceSamplerWithoutReplacement(slice_len=2, end_key="done", **flags), "next"),
        (lambda **flags: PrioritizedSliceSampler(12, 0.6, 0.4, slice_len=2, end_key="done", **flags), "next"),
        (lambda: SliceSampler(slice_len=2, end_key="done", strict_length=False, pad_output=True), "collector"),
    ],
)
def test_data_in_the_place_of_the_flags_of_slices_is_refused_at_the_first_write(sampler, below):
    """Batches would have flags in its place."""

    def new(**flags) -> TensorDictReplayBuffer:
        return TensorDictReplayBuffer(storage=LazyTensorStorage(12), sampler=sampler(**flags), batch_size=4)

    rows = TensorDict({below: torch.arange(12), "done": torch.arange(12) % 4 == 3}, [12])
    buffer = new()
    with pytest.raises(ValueError, match=f"flag at .*{below}.*, but the rows have a tensor at '{below}': "):
        buffer.extend(rows)
    assert len(buffer) == 0
    for key in (None, "truncated") if below == "next" else ():
        buffer = new(truncated_key=key)
        buffer.extend(rows)
        batch = buffer.sample()
        assert torch.equal(batch["next"], rows["next"][batch["index"]])


@pytest.mark.parametrize("ndim", [1, 2])
def test_add_of_a_batch(ndim):
    """It takes one row, or one step of all environments."""
    batch = TensorDict({"number": torch.arange(24).view(3, 8)[: 3 if ndim == 2 else 1]}, [3 if ndim == 2 else 1, 8])
    batch = batch if ndim == 2 else batch[0]
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(48, ndim=ndim), batch_size=4)
    with pytest.warns(UserWarning, match=r"add\(\) writes one row, here a batch of shape .*8\]: .* extend\(\)"):
        buffer.add(batch)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(48, ndim=ndim), batch_size=4)
    buffer.extend(batch)
    n = len(buffer)
    with pytest.raises(ValueError, match=r"add\(\) writes one row, and got a batch of shape .*8\]: use extend\(\)"):
        buffer.add(batch)
    with pytest.raises(ValueError, match="the storage holds rows of shape"):
        buffer.add(batch[..., 0].apply(lambda value: value.unsqueeze(-1)))
    assert len(buffer) == n
    buffer.add(batch[..., 0])


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("dim_extend", [None, 0])
@pytest.mark.parametrize("written", [False, True])
def test_a_batch_without_the_dimension_of_time_or_of_environments(kind, dim_extend, written):
    """Issue 45, B16: the shape that came, the one that is due, and what to do."""
    buffer = kind(LazyTensorStorage(32, ndim=2), dim_extend=dim_extend)
    if written:
        buffer.extend(TensorDict({"number": torch.zeros(4, 4)}, [4, 4]))
    due = r"ndim=2 takes \[E, T\], the batch has shape \(4,\); add\(\) writes one step of all environments"
    other = r"the same rows, of 2 dimension\(s\), got wide: \[4, 3\]; number: \[4\]"
    for given in (TensorDict({"number": torch.zeros(4)}, [4]), {"number": torch.zeros(4)}):
        with pytest.raises(ValueError, match=due):
            buffer.extend(given)
    with pytest.raises(ValueError, match=due if kind is ReplayBuffer else other):
        buffer.extend({"wide": torch.zeros(4, 3), "number": torch.zeros(4)})
    with pytest.raises(ValueError, match=r"has shape \(4,\)|it has \(4,\)"):
        buffer.extend_columns({"number": torch.zeros(4)})
    with pytest.raises(ValueError, match=r"one step of all environments, .*, got the shape \[\]"):
        buffer.add(TensorDict({"number": torch.zeros(())}))
    assert len(buffer) == 16 * written
    buffer.add(TensorDict({"number": torch.zeros(4)}, [4]))
    with pytest.raises(ValueError, match=r"rows of shape \(1, 1\) are addressed, the batch has shape \(4, 1\)"):
        buffer[:1, :1] = TensorDict({"number": torch.zeros(4, 1)}, [4, 1])
    assert len(buffer) == 16 * written + 4


@pytest.mark.parametrize("shape", [(16, 8), (16, 8, 2)])
def test_a_batch_of_more_dimensions_than_the_first_is_told_what_it_may_be(shape):
    """Issue 45, B16: as the first one it would be rows of trajectories."""
    buffer = TensorDictReplayBuffer(LazyTensorStorage(200))
    buffer.extend(TensorDict({"observation": torch.zeros(16, 3)}, [16]))
    for given in (TensorDict({"observation": torch.zeros(*shape, 3)}, shape), {"observation": torch.zeros(*shape, 3)}):
        message = f"reshape the batch, of shape {list(shape)}, to 1 dimension(s), or give the storage ndim={len(shape)}"
        with pytest.raises(ValueError, match=re.escape(message)):
            buffer.extend(given)
    assert len(buffer) == 16


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("garbage", [1e9, float("nan")])
def test_rows_that_are_no_steps_take_no_priority(mixed, garbage):
    """Those that fill short trajectories up, which ``("collector", "mask")`` says."""
    sampler = PrioritizedSampler(10, 1.0, 1.0, eps=0.0)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=32)
    real = torch.arange(7) % 3 < 2
    buffer.extend(steps(0, 7).set(("collector", "mask"), real))
    whole = MixedReplayBuffer([buffer], batch_size=32) if mixed else buffer
    batch = whole.sample()
    batch["td_error"] = torch.where(batch["collector", "mask"], batch["number"] + 2.0, garbage)
    whole.update_tensordict_priority(batch)
    drawn = torch.isin(torch.arange(7), batch["number"])
    due = torch.where(drawn & real, torch.arange(7) + 2.0, 1.0)
    assert torch.equal(sampler.tree.leaves[:7], due)
    assert bool((drawn & ~real).any())


ALPHAS = {"alpha": 0.6, "beta": 0.4}
KINDS = [
    (ReplayBuffer, {}),
    (TensorDictReplayBuffer, {}),
    (PrioritizedReplayBuffer, ALPHAS),
    (TensorDictPrioritizedReplayBuffer, ALPHAS),
]


def arrays(n):
    return {
        "observation": np.arange(3 * n, dtype=np.float32).reshape(n, 3),
        "next": {"done": np.zeros((n, 1), dtype=bool), "reward": np.full((n, 1), 0.5, np.float32)},
    }


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_number_is_a_capacity(kind, options):
    """The first argument, as elsewhere, or by its name."""
    for buffer in (kind(5, **options), kind(storage=5, **options)):
        assert type(buffer.storage) is LazyTensorStorage
        buffer.extend(TensorDict({"x": torch.arange(7)}, [7]))
        assert sorted(buffer.storage[:]["x"].tolist()) == [2, 3, 4, 5, 6]


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("way", ["dict", "tensors", "rows", "add"])
def test_numpy_rows_and_dicts(kind, options, way):
    buffer, given = kind(10, batch_size=4, **options), arrays(6)
    rows = [
        {"observation": given["observation"][i], "next": {k: v[i] for k, v in given["next"].items()}} for i in range(6)
    ]
    if way == "add":
        assert [buffer.add(row) for row in rows] == list(range(6))
    elif way == "rows":
        buffer.extend(rows)
    else:
        tensors = {"observation": torch.from_numpy(given["observation"]), "next": given["next"]}
        buffer.extend(given if way == "dict" else tensors)
    stored = buffer.storage[:]
    assert isinstance(stored, TensorDict) is issubclass(kind, TensorDictReplayBuffer)
    assert torch.equal(stored["observation"], torch.from_numpy(given["observation"]))
    assert stored["next"]["done"].dtype is torch.bool
    assert stored["next"]["reward"].tolist() == [[0.5]] * 6
    # The caller's own are as they were, and nothing of the buffer's.
    given["observation"][:] = -1
    assert (buffer.storage[:]["observation"] >= 0).all()
    assert buffer.sample()["observation"].shape == (4, 3)


def read_only() -> np.ndarray:
    """Of which PyTorch warns."""
    fixed = np.arange(3.0)
    fixed.flags.writeable = False
    return fixed


@pytest.mark.parametrize(
    ("kind", "given", "stored", "dtype"),
    [
        (ReplayBuffer, np.arange(3.0), [0.0, 1.0, 2.0], torch.float64),
        (TensorDictReplayBuffer, {"x": read_only()}, [0.0, 1.0, 2.0], torch.float64),
        (TensorDictReplayBuffer, {"x": np.arange(3.0)[::-1]}, [2.0, 1.0, 0.0], torch.float64),
        (TensorDictReplayBuffer, {"x": [1, 2, 3]}, [1, 2, 3], torch.int64),
        (TensorDictReplayBuffer, {"x": [0.5, 1.0, np.float64(2)]}, [0.5, 1.0, 2.0], torch.float32),
        (ReplayBuffer, {"x": np.arange(3)}, [0, 1, 2], torch.int64),
    ],
)
def test_arrays_and_lists_of_numbers(kind, given, stored, dtype):
    buffer = kind(4)
    buffer.extend(given)
    rows = buffer.storage[:]
    rows = rows["x"] if isinstance(given, dict) else rows
    assert (rows.tolist(), rows.dtype) == (stored, dtype)


@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [
        ([1.0, np.float64(2.0), np.float32(3.0)], torch.float32),
        ([2, 3], torch.int64),
        ([False, True], torch.bool),
        ([np.float32(3), 4.0], torch.float32),
    ],
)
def test_numbers_of_python_and_of_numpy_in_a_row(numbers, dtype):
    """Gymnasium's environments give either as rewards, and some of them both."""
    buffer = TensorDictReplayBuffer(4)
    for number in numbers:
        buffer.add({"observation": np.zeros(2), "number": number})
    assert buffer.storage[:]["number"].tolist() == numbers
    assert buffer.storage[:]["number"].dtype is dtype


def test_arrays_of_other_shapes():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(6, ndim=2))
    buffer.extend({"x": np.arange(6).reshape(2, 3)})
    assert buffer.storage[:]["x"].tolist() == [[0, 3], [1, 4], [2, 5]]
    buffer = ReplayBuffer(4)
    buffer.extend((np.zeros((3, 2)), np.arange(3)))
    assert buffer.storage[:][1].tolist() == [0, 1, 2]
    objects = ReplayBuffer()
    objects.extend({"x": np.arange(3)})
    assert objects.storage[:]["x"].tolist() == [0, 1, 2]


def test_a_list_storage_keeps_what_it_is_given():
    buffer = ReplayBuffer(storage=ListStorage(4))
    row = {"x": np.zeros(2)}
    buffer.extend([row])
    assert buffer.storage[0] is row


@pytest.mark.parametrize(
    ("actor", "critic", "name"),
    [
        (nn.Linear(3, 2), make_sac_critic(3, 1), "actor_network"),
        (make_sac_actor(3, 1), nn.Linear(4, 1), "qvalue_network"),
        (make_sac_actor(3, 1), [make_sac_critic(3, 1), nn.Linear(4, 1)], "qvalue_network"),
        (lambda observation: observation, make_sac_critic(3, 1), "actor_network"),
        (make_sac_actor(3, 1), None, "qvalue_network"),
    ],
)
def test_a_plain_module_is_told_how_to_become_one_with_keys(actor, critic, name):
    with pytest.raises(TypeError, match=rf"{name} must say .* does not: wrap it in .*TensorDictModule\("):
        SACLoss(actor, critic)


@pytest.mark.parametrize("kind", [SACLoss, TD3Loss])
def test_actions_of_another_width(kind):
    options = {"bounds": (-1, 1)} if kind is TD3Loss else {}
    loss = kind(make_sac_actor(3, 1), make_sac_critic(3, 1), **options)
    SoftUpdate(loss, tau=0.005)
    flags = {name: torch.zeros(5, 1, dtype=torch.bool) for name in ("done", "terminated")}
    following = {"observation": torch.zeros(5, 3), "reward": torch.zeros(5, 1), **flags}
    batch = TensorDict({"observation": torch.zeros(5, 3), "action": torch.zeros(5, 2), "next": following}, [5])
    with pytest.raises(ValueError, match="the batch has actions of 2 numbers at 'action', and the policy gives 1"):
        loss(batch)
    batch["action"] = torch.zeros(5)
    with pytest.raises(ValueError, match=r"the shape is \[5\], and \[\.\.\., 1\] is needed"):
        loss(batch)
    # Another error stays what it is.
    batch["action"] = torch.zeros(5, 1)
    batch["observation"] = torch.zeros(5, 4)
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|size"):
        loss(batch)


@pytest.mark.parametrize("kind", [SACLoss, TD3Loss])
def test_a_batch_without_the_step_after(kind):
    loss = kind(make_sac_actor(3, 1), make_sac_critic(3, 1), **({"bounds": (-1, 1)} if kind is TD3Loss else {}))
    SoftUpdate(loss, tau=0.005)
    with pytest.raises(KeyError, match=r"the batch has no 'next', .* its keys are .'action', 'observation'"):
        loss(TensorDict({"observation": torch.zeros(5, 3), "action": torch.zeros(5, 1)}, [5]))


def test_a_row_without_batch_dimension_is_sent_to_add():
    with pytest.raises(ValueError, match=r"the batch has shape \(\); add\(\) writes a single row"):
        TensorDictReplayBuffer(4).extend(TensorDict({"x": torch.zeros(3)}, []))


@pytest.mark.parametrize(("text", "number"), [("1000000", 10**6), ("1_000", 1000), ("1e6", 10**6), ("1.5M", 1_500_000)])
def test_numbers_on_the_command_line(text, number):
    assert whole_number(text) == number
    for wrong in ("1.5", "M", "1e-1", "many"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"such as 10000, 1e4 or 10k, got '{wrong}'"):
            whole_number(wrong)


def test_parts_say_what_was_chosen():
    keys = repr(SliceSamplerWithoutReplacement(num_slices=2, traj_key="episode", drop_last=True))
    assert keys.startswith("SliceSamplerWithoutReplacement(num_slices=2, traj_key='episode', drop_last=True, ")
    assert repr(RoundRobinWriter(track_generations=True)) == "RoundRobinWriter(track_generations=True)"
    assert repr(SliceSampler(slice_len=4)) == "SliceSampler(slice_len=4, strict_length=True, weighting='trajectory')"
    assert repr(SliceSampler(num_slices=8)).startswith("SliceSampler(num_slices=8, ")
    assert repr(RoundRobinWriter()) == "RoundRobinWriter()"
    both = repr(PrioritizedSliceSampler(10, 0.6, 0.4, slice_len=4))
    assert both.startswith("PrioritizedSliceSampler(slice_len=4, ")
    assert both.endswith(", alpha=0.6, beta=0.4)")
    buffer = PrioritizedReplayBuffer(5, alpha=0.6, beta=0.4)
    assert repr(buffer.sampler) == "PrioritizedSampler(alpha=0.6, beta=0.4, eps=1e-08)"
