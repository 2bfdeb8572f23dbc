"""Windows of keys around drawn rows: against a plain model over random histories, and with the rest of a buffer."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf.data import (
    Codec,
    Hindsight,
    LazyMemmapStorage,
    LazyTensorStorage,
    MixedReplayBuffer,
    Normalize,
    PrioritizedSampler,
    RandomSampler,
    RandomShift,
    ReplayBuffer,
    ReplayBufferDataset,
    SliceSampler,
    TensorDictReplayBuffer,
    Window,
)
from gpubuf.data.storage.plan import Recipe
from gpubuf.kernels.rows import NoRoomError
from tests.support.fake_cuda import fake_cuda, no_blocking_copies
from tests.support.window_model import History

SAMPLERS = {"uniform": lambda capacity: RandomSampler(), "prioritized": lambda n: PrioritizedSampler(n, 0.7, 0.5)}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(1000, 11_000), marks=pytest.mark.nightly)], ids=len)
def test_every_window_is_that_of_a_plain_model(sampler, seeds, tmp_path):
    """After each of many writes, ends and loads: all rows as they are read, and which of them are drawn."""
    for seed in seeds:
        history = History(seed, SAMPLERS[sampler])
        for _ in range(10):
            history.act(tmp_path if seed % 5 == 0 else None)


def rows(n: int, start: int = 0, ends: tuple[int, ...] = (), envs: int = 0) -> TensorDict:
    """Steps ``start ..`` of one environment, or ``[envs, n]``; those of ``ends`` end a trajectory."""
    number = torch.arange(start, start + n).expand(envs or 1, n) + 1000 * torch.arange(envs or 1).unsqueeze(1)
    done = torch.zeros(envs or 1, n, 1, dtype=torch.bool)
    done[:, [end - start for end in ends]] = True
    coming = {"reward": torch.ones(envs or 1, n, 1), "done": done}
    found = TensorDict({"number": number, "value": number.float(), "next": coming}, [envs or 1, n])
    return found if envs else found[0]


def buffer_of(windows: Any, storage: Any = 12, kind: Any = TensorDictReplayBuffer, **options: Any) -> Any:
    generator = torch.Generator().manual_seed(7)
    return kind(storage, **{"batch_size": 4, "windows": windows, "generator": generator, **options})


def every_row(buffer: Any) -> Any:
    """All stored rows as batches have them."""
    n, reader = len(buffer), buffer.parts.reader
    return reader.layout.assemble(reader.gather(torch.arange(n))[0], (n,), None)


# What is drawn with it


@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("n", [9, 12, 17, 40])
def test_stacks_of_frames_at_every_edge(n, step, envs):
    """CASES 79. Each stack and next stack is what the episode's own frames make, at its beginning and at the ring's.

    Frames of an episode begin at a multiple of 100; its length is 5. The last next frame of an episode is no other's.
    """
    time, window = torch.arange(n), Window(-3 * step, 0, step=step)
    frame = (time // 5 * 100 + time % 5).unsqueeze(0) + 10_000 * torch.arange(envs).unsqueeze(1)
    data = {"frame": frame, "next": {"frame": frame + 1, "done": (time % 5 == 4).expand(envs, n).unsqueeze(-1)}}
    storage = LazyTensorStorage(12 * envs, ndim=1 + (envs > 1), share_next=["frame"])
    buffer = buffer_of({"frame": window, ("next", "frame"): window}, storage)
    given = TensorDict(data, [envs, n])
    buffer.extend(given if envs > 1 else given[0])
    batch = torch.cat([buffer.sample() for _ in range(100)])
    stack, after = batch["frame"], batch["next", "frame"]
    first = stack[:, -1:] // 100 * 100
    lags = step * torch.arange(3, -1, -1)
    assert torch.equal(stack, torch.maximum(stack[:, -1:] - lags, first))
    assert torch.equal(after, torch.maximum(stack[:, -1:] + 1 - lags, first))
    oldest = max(n - 12, 0)
    drawn = {int(value) for value in stack[:, -1].remainder(10_000)}
    stored = {int(value) for value in frame[0, oldest:]}
    assert drawn == (stored if n <= 12 else {int(value) for value in frame[0, oldest + 3 * step :]})


@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize("n", [9, 13, 17, 40])
def test_stacks_of_what_was_loaded_into_more_room(n, envs, tmp_path):
    """CASES 79. The steps before the oldest one of a ring that was full are not there, wherever its rows go."""
    lags = torch.arange(6, -1, -2)

    def steps(first: int, last: int) -> TensorDict:
        time = torch.arange(first, last)
        frame = (time // 8 * 100 + time % 8).unsqueeze(0) + 10_000 * torch.arange(envs).unsqueeze(1)
        data = {"frame": frame, "next": {"done": (time % 8 == 7).expand(envs, last - first).unsqueeze(-1)}}
        given = TensorDict(data, [envs, last - first])
        return given if envs > 1 else given[0]

    def made(capacity: int) -> TensorDictReplayBuffer:
        return buffer_of({"frame": Window(-6, 0, step=2)}, LazyTensorStorage(capacity * envs, ndim=1 + (envs > 1)))

    def drawn(buffer: TensorDictReplayBuffer) -> set[int]:
        stack = torch.cat([buffer.sample() for _ in range(100)])["frame"]
        assert torch.equal(stack, torch.maximum(stack[:, -1:] - lags, stack[:, -1:] // 100 * 100))
        return {int(value) for value in stack[:, -1].remainder(10_000)}

    first = made(12)
    first.extend(steps(0, n))
    second, third = made(20), made(30)
    second.load_state_dict(first.state_dict(), end_trajectories=False)
    assert second.write_count == len(second)
    assert drawn(second) == drawn(first)
    second.extend(steps(n, n + 2))
    assert {int(value) for value in steps(n, n + 2)["frame"].reshape(-1).remainder(10_000)} <= drawn(second)
    second.save(tmp_path / "saved")
    third.load(tmp_path / "saved", end_trajectories=False)
    assert drawn(third) == drawn(second)
    third.empty()
    third.extend(steps(0, 8))
    assert drawn(third) == set(range(8))


@pytest.mark.parametrize("room", [20, 12])
@pytest.mark.parametrize("once", [False, True])
def test_a_state_of_before_says_that_its_past_is_lost(once, room):
    """States of earlier versions had a flag, and counted no rows that a smaller ring had lost."""
    storage: dict[str, Any] = {"share_next": ["number"], "next_capacity": 3} if once else {}
    windows = {"number": Window(-2, 0)}
    before, after = (buffer_of(windows, LazyTensorStorage(size, **storage)) for size in (20, room))
    data = rows(10, ends=(3,))
    data["next", "number"] = data["number"] + torch.where(data["next", "done"][:, 0], 0, 1)
    before.extend(data)
    state = before.state_dict()
    state["_storage"] |= {"past_lost": True, "written": 10, "skipped": 0}
    after.load_state_dict(state, end_trajectories=False)
    assert after.write_count == 10
    drawn = {number for _ in range(40) for number in after.sample()["number"][:, -1].tolist()}
    assert drawn == set(range(2, 10))
    assert torch.equal(after[:]["next", "number"], data["next", "number"])
    if once and room == 20:
        # The place of row 3's next number stays its own.
        more = rows(6, 10, ends=(11, 13))
        more["next", "number"] = more["number"] + torch.where(more["next", "done"][:, 0], 0, 1)
        after.extend(more)
        with pytest.raises(NoRoomError):
            after.extend(more[1:2])
        assert after[:]["next", "number"][3] == 3


def test_chunks_of_actions_with_their_rewards():
    """The discounted reward of a chunk, how much of it there was, and what LeRobot calls ``action_is_pad``."""
    buffer = buffer_of(
        {"value": Window(0, 3, mask="action_is_pad")}, n_steps=4, gamma=0.5, process=[], end_keys=[("next", "done")]
    )
    buffer.extend(rows(10, ends=(5,)))
    batch = every_row(buffer)
    for number in range(10):
        length = min(4, (6 if number < 6 else 10) - number)
        last = number + length - 1
        assert batch["value"][number].tolist() == [min(number + k, last) for k in range(4)]
        assert batch["action_is_pad"][number].tolist() == [k >= length for k in range(4)]
        assert batch["next", "reward"][number].item() == sum(0.5**k for k in range(length))
        assert batch["steps_to_next_obs"][number].item() == length
    assert buffer.sample().batch_size == (4,)


def test_windows_across_trajectories_say_where_one_begins():
    """What world models learn from: T + 1 steps, whatever ends in them."""
    window = Window(0, 4, outside="cross", mask="is_pad", is_first="is_first")
    buffer = buffer_of({"number": window, ("next", "done"): Window(0, 4, outside="cross")})
    buffer.extend(rows(10, ends=(2, 5)))
    batch = every_row(buffer)
    assert batch["number"][1].tolist() == [1, 2, 3, 4, 5]
    assert batch["is_first"][1].tolist() == [False, False, True, False, False]
    assert batch["is_first"][0].tolist() == [True, False, False, True, False]
    assert batch["next", "done"][1, :, 0].tolist() == [False, True, False, False, True]
    assert batch["number"][8].tolist() == [8, 9, 9, 9, 9]
    assert batch["is_pad"][8].tolist() == [False, False, True, True, True]
    # Row 3, the oldest by now, did begin a trajectory: nobody knows that any more.
    buffer.extend(rows(5, 10))
    assert every_row(buffer)["is_first"][3].tolist() == [False, False, False, True, False]


def test_one_window_for_all_keys_is_a_run_of_rows():
    """As a recurrent network learns from, with its burn-in: all keys of a step are those of one row, padded or not."""
    buffer = buffer_of(Window(-2, 3, mask="is_pad"), 16)
    buffer.extend(rows(16, ends=(5, 6)))
    batch = every_row(buffer)
    assert batch["value"].shape == (16, 6)
    assert torch.equal(batch["value"], batch["number"].float())
    assert torch.equal(batch["next", "done"][..., 0], torch.isin(batch["number"], torch.tensor([5, 6])))
    assert batch["number"][6].tolist() == [6] * 6
    assert batch["is_pad"][6].tolist() == [True, True, False, True, True, True]


def test_a_key_stands_for_those_below_it_unless_they_have_windows_of_their_own():
    data = rows(8)
    data["seen"] = TensorDict({"a": data["number"], "b": data["number"], "c": data["number"]}, [8])
    buffer = buffer_of({"seen": Window(-1, 0), ("seen", "b"): Window(0, 2)})
    buffer.extend(data)
    batch = every_row(buffer)
    assert batch["seen", "a"][4].tolist() == batch["seen", "c"][4].tolist() == [3, 4]
    assert batch["seen", "b"][4].tolist() == [4, 5, 6]
    assert batch["number"].shape == (8,)


def test_rows_that_are_no_tensordicts():
    numbers = torch.arange(8.0)
    buffer = buffer_of(Window(-1, 1, outside="cross"), kind=ReplayBuffer)
    buffer.extend(numbers)
    assert buffer.sample().shape == (4, 3)
    assert every_row(buffer)[3].tolist() == [2, 3, 4]
    buffer = buffer_of({"a": Window(0, 1, mask="pad")}, kind=ReplayBuffer, end_keys=["done"])
    buffer.extend({"a": (numbers, -numbers), "done": numbers == 3})
    batch = every_row(buffer)
    assert batch["a"][1][3].tolist() == [-3, -3]
    assert batch["pad"][3].tolist() == [False, True]


# Priorities


def test_a_priority_for_each_step_becomes_one_of_the_row():
    """By the sampler's reduction, and without what the mask of a window of that length calls padding."""
    for reduction, due in (("max", [9.0, 3.0]), ("mean", [6.0, 3.0])):
        sampler = PrioritizedSampler(12, 1.0, 1.0, reduction=reduction, eps=0.0)
        windows = {"number": Window(0, 2, mask="is_pad"), "value": Window(1, 2, mask="other")}
        buffer = buffer_of(windows, sampler=sampler, batch_size=32)
        buffer.extend(rows(6, ends=(3,)))
        batch = buffer.sample()
        for extra in ((), (1,)):
            batch["td_error"] = torch.tensor([3.0, 6.0, 9.0]).expand(32, 3).reshape(32, 3, *extra)
            buffer.update_tensordict_priority(batch)
            leaves = sampler.tree.leaves
            assert leaves[1] == due[0]
            assert leaves[3] == due[1]
        batch["td_error"] = torch.full((32,), 5.0)
        buffer.update_tensordict_priority(batch)
        assert leaves[:6].tolist() == [5.0] * 6


def test_a_mixed_buffer_has_windows_of_all_its_parts():
    parts = [buffer_of({"number": Window(-1, 1, mask="pad")}, sampler=PrioritizedSampler(12, 1.0, 1.0, eps=0.0))]
    parts.append(buffer_of({"number": Window(-1, 1, mask="pad")}, sampler=PrioritizedSampler(12, 1.0, 1.0, eps=0.0)))
    for start, part in zip((0, 100), parts, strict=True):
        part.extend(rows(8, start, ends=(start + 4,)))
    mixed = MixedReplayBuffer(parts, batch_size=32)
    batch = mixed.sample()
    assert batch["number"].shape == batch["pad"].shape == (32, 3)
    assert torch.equal(batch["number"][:, 1] >= 100, batch["buffer"] == 1)
    batch["td_error"] = torch.tensor([[7.0, 2.0, 7.0]]).expand(32, 3)
    batch["td_error"] = torch.where(batch["pad"], 50.0, batch["td_error"])
    mixed.update_tensordict_priority(batch)
    assert max(float(part.sampler.tree.max_priority) for part in parts) == 7


@pytest.mark.parametrize("envs", [0, 3])
def test_a_mixed_buffer_takes_back_the_rows_of_windows(envs):
    """Each row of a window goes back to the buffer of the drawn one, whose number a batch has once."""
    window = Window(-2, 1, outside="cross", rows="window")
    parts = []
    for start in (0, 100):
        storage = LazyTensorStorage(36, ndim=2) if envs else 12
        parts.append(buffer_of({"number": window}, storage=storage))
        parts[-1].extend(rows(9, start, ends=(start + 4,), envs=envs))
    mixed = MixedReplayBuffer(parts, batch_size=32)
    batch = mixed.sample()
    index, generation = batch["window", "index"], batch["window", "index_generation"]
    inside = generation >= 0
    new = TensorDict({"number": batch["number"] + 1000}, [32, 4])
    before = [part[:]["number"].clone() for part in parts]
    mixed.update_if_present(index, new, buffer=batch["buffer"], generation=generation)
    for k, part in enumerate(parts):
        drawn = batch["number"][inside & (batch["buffer"] == k)[:, None]]
        due = torch.where(torch.isin(before[k], drawn), before[k] + 1000, before[k])
        assert torch.equal(part[:]["number"], due)


# What is done to batches


def moved(frame: Tensor, dy: int, dx: int) -> Tensor:
    y, x = ((torch.arange(size) + by).clamp(0, size - 1) for size, by in zip(frame.shape[-2:], (dy, dx), strict=True))
    return frame[..., y[:, None], x[None, :]]


@pytest.mark.parametrize("join", [None, 0])
def test_all_frames_of_a_stack_are_shifted_alike(join):
    window = Window(-2, 0, join=join)
    buffer = buffer_of({"pixels": window}, process=[RandomShift("pixels", pad=2)], batch_size=64)
    data = rows(12, ends=(5,))
    data["pixels"] = torch.rand(12, 2, 5, 6)
    buffer.extend(data)
    batch = buffer.sample()
    seen = set()
    for number, stack in zip(batch["number"].tolist(), batch["pixels"].view(64, 3, 2, 5, 6), strict=True):
        oldest = 6 if number > 5 else 0
        plain = data["pixels"][[max(number - 2, oldest), max(number - 1, oldest), number]]
        shifts = [(y, x) for y in range(-2, 3) for x in range(-2, 3) if torch.equal(moved(plain, y, x), stack)]
        assert len(shifts) == 1
        seen.update(shifts)
    assert len(seen) > 10


def test_numbers_are_decoded_and_normalised_slot_by_slot():
    storage = LazyTensorStorage(12, dtypes={"value": Codec(torch.int16, scale=0.5)})
    normalize = Normalize("value")
    buffer = buffer_of({"value": Window(-3, 1, outside="zero")}, storage, process=[normalize])
    buffer.extend(rows(10, ends=(4,)))
    plain = torch.arange(10.0)
    due = normalize(TensorDict({"value": plain}, [10]))["value"]
    batch = every_row(buffer)
    torch.testing.assert_close(batch["value"][3], torch.stack([due[0], due[1], due[2], due[3], due[4]]))
    # Padding is zero in the batch, whatever zero would be as a number.
    torch.testing.assert_close(batch["value"][5], torch.stack([torch.tensor(0.0)] * 3 + [due[5], due[6]]))


# The rest of a buffer


def test_slices_have_windows_around_their_steps():
    buffer = buffer_of({"number": Window(-1, 0)}, sampler=SliceSampler(slice_len=3), batch_size=6)
    buffer.extend(rows(12, ends=(5,)))
    for _ in range(10):
        slices = buffer.sample()["number"].view(2, 3, 2)
        assert torch.equal(slices[:, 1:, 0], slices[:, :-1, 1])
        first = slices[:, 0, 1]
        assert torch.equal(slices[:, 0, 0], torch.where((first == 0) | (first == 6), first, first - 1))


def test_other_ways_to_a_batch():
    buffer = buffer_of({"number": Window(-1, 2, mask="is_pad")})
    buffer.extend(rows(12, ends=(5,)))
    columns = buffer.sample_columns()
    assert columns["number"].shape == columns["is_pad"].shape == (4, 4)
    assert buffer.sample(batches=3)["number"].shape == (3, 4, 4)
    assert next(iter(ReplayBufferDataset(buffer)))["number"].shape == (4, 4)
    for other in (copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))):
        assert torch.equal(every_row(other)["number"], every_row(buffer)["number"])
    assert buffer[3:5]["number"].tolist() == [3, 4]
    batch, ones = buffer.sample(), torch.ones(4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"4 rows .* are addressed"):
        buffer.update_if_present(batch["index"], batch.select("number"), generation=ones)
    # Keys that are single rows can be written back.
    buffer.update_if_present(batch["index"], batch.select("value").apply(lambda x: -x - 1), generation=ones)
    assert buffer[:]["value"].min() < 0
    buffer.free()
    buffer.extend(rows(5))
    assert buffer.sample()["number"].shape == (4, 4)


def test_two_buffers_read_one_storage_in_windows_of_their_own():
    storage = LazyTensorStorage(12)
    one = buffer_of({"number": Window(-1, 0)}, storage)
    one.extend(rows(8))
    two, plain = buffer_of({"number": Window(0, 2)}, storage), buffer_of(None, storage)
    assert [each.sample()["number"].shape[1:] for each in (one, two, plain)] == [(2,), (3,), ()]
    assert one.set_storage(LazyTensorStorage(3)) is storage
    one.extend(rows(3))
    assert one.sample()["number"].shape == (4, 2)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_rows_in_files_ask_for_the_pages_of_windows(prefetch, tmp_path, monkeypatch):
    monkeypatch.setattr("gpubuf.data.storage.memmap.LARGE_ROW", 8)
    storage = LazyMemmapStorage(12, scratch_dir=tmp_path)
    buffer = buffer_of({"number": Window(-2, 1)}, storage, prefetch=prefetch)
    asked = list[Tensor]()
    monkeypatch.setattr(storage, "request", asked.append)
    buffer.extend(rows(12, ends=(5,)))
    for _ in range(5):
        batch = buffer.sample()
        last = batch["index"]
        low = torch.where(last > 5, 6, 0)
        due = torch.stack([torch.maximum(last - k, low) for k in (2, 1, 0)], 1)
        assert torch.equal(batch["number"][:, :3], due)
        if prefetch and len(asked) > 1:
            assert {int(row) for row in batch["number"].reshape(-1)} <= {int(row) for row in asked[-2]}
    assert len(asked) == 5 * prefetch


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_nothing_synchronises(sampler):
    """On fake tensors, whose values nobody can read."""
    window = Window(-3, 0, join=0)
    with fake_cuda(), no_blocking_copies():
        storage = LazyTensorStorage(100, device="cuda", share_next=["pixels"])
        windows = {"pixels": window, ("next", "pixels"): window, "number": Window(0, 3, mask="is_pad")}
        buffer = buffer_of(windows, storage, sampler=SAMPLERS[sampler](100), n_steps=3)
        pixels = torch.empty(31, 3, 8, 8, dtype=torch.uint8, device="cuda")
        reward, done = torch.empty(30, 1, device="cuda"), torch.empty(30, 1, dtype=torch.bool, device="cuda")
        given = {"pixels": pixels[:-1], "number": torch.empty(30, dtype=torch.int64, device="cuda")}
        data = TensorDict({**given, "next": {"pixels": pixels[1:], "reward": reward, "done": done}}, [30])
        buffer.extend(data)
        batch = buffer.sample()
        assert batch["pixels"].shape == batch["next", "pixels"].shape == (4, 12, 8, 8)
        batch["td_error"] = torch.empty(4, 4, device="cuda")
        buffer.update_tensordict_priority(batch)


# What can't be


@pytest.mark.parametrize(
    ("windows", "options", "error", "text"),
    [
        ({"missing": Window(0, 1)}, {}, KeyError, "a window of 'missing', which is not stored"),
        ({("next", "value"): Window(-1, 0)}, {}, ValueError, r"share_next=\['value'\]"),
        ({("next", "value"): Window(-1, 0, outside="zero")}, {}, ValueError, r"share_next=\['value'\]"),
        ({("next", "reward"): Window(0, 1)}, {"n_steps": 2}, ValueError, "n_steps=2 sums .*there is no window of it"),
        (Window(0, 1), {"n_steps": 2}, ValueError, "n_steps=2 sums"),
        ({("next", "done"): Window(0, 1, mask="pad")}, {"n_steps": 2}, ValueError, "tell of windows of root keys"),
        ({"value": Window(0, 1, mask="number")}, {}, ValueError, "a key 'number', which the rows have already"),
        ({"value": Window(0, 1, mask="index")}, {}, ValueError, "a key 'index', which draws have already"),
        # What leads to another key, or is below one, would take its place.
        ({"value": Window(0, 1, mask="next")}, {}, ValueError, "a key 'next', which the rows have already"),
        ({"value": Window(0, 1, rows="number")}, {}, ValueError, "'index'.*, which the rows have already"),
        ({"value": Window(0, 1, mask=("index", "pad"))}, {}, ValueError, "which draws have already"),
        ({"value": Window(0, 1, mask="pad", rows="pad")}, {}, ValueError, "'pad'.*, which they have already"),
        (
            {"value": Window(0, 1, mask="pad"), "number": Window(0, 2, mask="pad")},
            {},
            ValueError,
            "'pad' can't tell of two windows that differ",
        ),
        ({"value": Window(0, 1, join=0)}, {}, ValueError, "rows of 'value' are of .*got join=0"),
        ({"image": Window(0, 1, join=-1)}, {}, ValueError, "along their first dimension of more than one element"),
        ({"agents": Window(0, 1)}, {}, ValueError, "has batch dimensions of its own"),
    ],
)
def test_rows_that_have_no_such_windows(windows, options, error, text):
    """The first write says so, before anything is allocated."""
    buffer, data = buffer_of(windows, **options), rows(4)
    data["next", "value"], data["image"] = data["value"] + 1, torch.zeros(4, 2, 3)
    data["agents"] = TensorDict({"seen": torch.zeros(4, 2)}, [4, 2])
    with pytest.raises(error, match=text):
        buffer.extend(data)
    assert not buffer.initialized


def test_what_the_ends_are_needed_for():
    data = rows(4).exclude(("next", "done"))
    for window in (Window(0, 1), Window(0, 1, outside="cross", is_first="first")):
        with pytest.raises(KeyError, match="batches of windows need the ends of trajectories"):
            buffer_of({"value": window}).extend(data)
    buffer = buffer_of({"value": Window(0, 1, outside="cross")})
    buffer.extend(data)
    assert buffer.sample()["value"].shape == (4, 2)


def test_other_parts_that_windows_do_not_go_with():
    relabel = Hindsight(lambda achieved, goal, batch: achieved)
    with pytest.raises(ValueError, match="windows"):
        buffer_of({"number": Window(0, 1)}, relabel=relabel)
    data = torch.stack([rows(4), rows(4)], 1)
    with pytest.raises(ValueError, match="batch dimensions of their own"):
        buffer_of({"number": Window(0, 1)}).extend(data)
    buffer = buffer_of({"seen": Window(0, 1)}, storage=LazyTensorStorage(4))
    with pytest.raises(ValueError, match="are not tensors, and can't be those of other rows"):
        buffer.extend(rows(2).set_non_tensor("seen", "text"))


def test_what_windows_need_of_the_rows_around_a_drawn_one():
    """Keys under "next" count from the last row of a transition."""
    windows = {
        "a": Window(-4, 2, step=2, outside="skip"),
        ("next", "b"): Window(-1, 1, outside="skip"),
        "c": Window(-5, -3, step=2),
    }
    recipe = Recipe(3, windows=windows)
    assert (recipe.past, recipe.whole) == (5, (4, 3))
    assert recipe.offsets == (-5, -4, -3, -2, 0, 1, 2, 3)
    assert Recipe(3).offsets == (0, 2)
    assert (Recipe(3).past, Recipe(3).whole) == (0, None)
    assert Recipe(windows={"c": Window(1, 2)}).past == 0
    # A row that a sampler gives all the same.
    assert Window(-1, 0, outside="skip").options == Window(-1, 0).options
