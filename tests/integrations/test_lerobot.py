"""LeRobot's buffer: ours gives the rows that LeRobot's gave, and the right next state where it did not."""

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from gpubuf import Codec, LazyTensorStorage, SliceSampler, TensorDictReplayBuffer
from gpubuf import ReplayBuffer as Rows
from gpubuf.integrations.lerobot import LeRobotDatasetAdapter, OnlineOfflineMixer, ReplayBuffer
from tests.support import lerobot_buffer
from tests.support.lerobot_buffer.transitions import ADDED, CAPACITY, Frames, ended, frames, transition
from tests.support.records import plain, read

RECORDED = read(lerobot_buffer)


def filled(added: int, **options: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(CAPACITY, "cpu", **({"use_drq": False} | options))
    for number in range(added):
        buffer.add(**transition(number))
    return buffer


def batch_at(buffer: ReplayBuffer, rows: range, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    assert buffer.buffer is not None
    sampler = buffer.buffer.sampler
    monkeypatch.setattr(sampler, "draw", lambda n: type(sampler).__mro__[1].draw(sampler, n))
    monkeypatch.setattr(sampler, "choose", lambda n: (torch.tensor(rows), {}))
    return buffer.sample(len(rows))


@pytest.mark.parametrize("optimize_memory", [False, True], ids=["twice", "once"])
@pytest.mark.parametrize("added", ADDED)
def test_batches_are_those_of_lerobot(added, optimize_memory, monkeypatch):
    """Keys, dtypes, shapes and bits. Stored once, the rows are those that LeRobot has when it stores them twice.

    Case 39. With optimize_memory LeRobot gives the first state of the next episode, and the oldest at the seam.
    """
    buffer = filled(added, optimize_memory=optimize_memory)
    assert plain(batch_at(buffer, range(len(buffer)), monkeypatch)) == RECORDED[f"{added} added"]


@pytest.mark.parametrize("optimize_memory", [False, True], ids=["twice", "once"])
@pytest.mark.parametrize("told", ["done", "truncated"])
def test_no_window_leads_over_an_end(told, optimize_memory):
    """Case 57. Slices of the buffer behind it end where a transition is done or truncated."""
    buffer = ReplayBuffer(50, "cpu", optimize_memory=optimize_memory)
    for number in range(70):
        # Episodes of seven steps; the last state of one is not the first of the next.
        last = number % 7 == 6
        here = torch.tensor([[float(number // 7), number % 7]])
        states = {"state": {"at": here}, "next_state": {"at": here + torch.tensor([0.0, 1.0])}}
        flags = {"done": last and told == "done", "truncated": last and told == "truncated"}
        buffer.add(**states, action=here, reward=0.0, **flags)
    assert buffer.buffer is not None
    buffer.buffer.set_sampler(SliceSampler(slice_len=3, end_keys=["done", "truncated"]))
    batch = buffer.sample(48)
    episode = batch["state"]["at"].view(16, 3, 2)[..., 0]
    assert (episode == episode[:, :1]).all()
    assert torch.equal(batch["next_state"]["at"], batch["state"]["at"] + torch.tensor([0.0, 1.0]))


def test_a_function_of_images_sees_what_lerobots_sees(monkeypatch):
    def number_images(images: torch.Tensor) -> torch.Tensor:
        return images + 1000 * torch.arange(float(len(images))).reshape(-1, 1, 1, 1)

    buffer = filled(3, use_drq=True, image_augmentation_function=number_images)
    assert plain(batch_at(buffer, range(3), monkeypatch)) == RECORDED["augmented"]


def test_images_are_shifted_by_up_to_four_pixels():
    """Each image by its own shift; all 81 come. What is beyond the border is the border."""
    image = torch.arange(48.0).reshape(1, 1, 6, 8)
    padded = torch.nn.functional.pad(image, (4, 4, 4, 4), mode="replicate")[0]
    shifted = {padded[:, y : y + 6, x : x + 8].numpy().tobytes(): (y, x) for y in range(9) for x in range(9)}
    buffer = ReplayBuffer(64, "cpu")
    for _ in range(64):
        images = {"observation.image.wrist": image, "observation.state": torch.zeros(1, 2)}
        buffer.add(images, torch.zeros(1, 1), 0.0, images, False, False)
    drawn = []
    for _ in range(20):
        batch = buffer.sample(64)
        pairs = zip(
            batch["state"]["observation.image.wrist"], batch["next_state"]["observation.image.wrist"], strict=True
        )
        drawn += [tuple(shifted[each.numpy().tobytes()] for each in pair) for pair in pairs]
    assert {own for own, _ in drawn} == {coming for _, coming in drawn} == {(y, x) for y in range(9) for x in range(9)}
    assert any(own != coming for own, coming in drawn)


def test_images_of_one_byte_a_pixel():
    buffer = ReplayBuffer(64, "cpu", use_drq=False, dtypes={"observation.image": Codec(torch.uint8, scale=1 / 255)})
    image = torch.arange(256.0).reshape(1, 1, 16, 16) / 255
    buffer.add({"observation.image": image}, torch.zeros(1, 1), 0, {"observation.image": image}, False, False)
    batch = buffer.sample(1)
    torch.testing.assert_close(batch["state"]["observation.image"], image)
    assert buffer.buffer is not None
    assert buffer.buffer.storage.nbytes < 64 * 2 * (256 + 16)


def test_a_batch_is_no_larger_than_the_buffer():
    buffer = filled(4)
    assert len(buffer.sample(100)["reward"]) == 4
    assert (len(buffer), buffer.size, buffer.position, buffer.capacity, buffer.initialized) == (4, 4, 4, CAPACITY, True)
    assert (filled(9).size, filled(9).position) == (CAPACITY, 3)


def test_an_empty_buffer():
    buffer = ReplayBuffer(CAPACITY, "cpu")
    assert (len(buffer), buffer.position, buffer.initialized) == (0, 0, False)
    # The words of LeRobot's errors, which its tests look for.
    with pytest.raises(RuntimeError, match="Cannot sample from an empty buffer"):
        buffer.sample(2)
    with pytest.raises(RuntimeError, match="Cannot sample from an empty buffer"):
        next(buffer.get_iterator(2))
    with pytest.raises(ValueError, match=r"The replay buffer is empty\. Cannot convert to a dataset\."):
        buffer.to_lerobot_dataset("someone/something")
    with pytest.raises(ValueError, match=r"Capacity must be greater than 0\. The capacity is 0"):
        ReplayBuffer(0)
    assert (buffer.states, buffer.next_states, buffer.complementary_info) == ({}, {}, {})
    with pytest.raises(AttributeError, match="first transition"):
        _ = buffer.actions


@pytest.mark.parametrize("optimize_memory", [False, True], ids=["twice", "once"])
@pytest.mark.parametrize("added", ADDED)
def test_tensors_of_all_rows(added, optimize_memory):
    """``states`` and so on, ``[capacity, ...]`` with LeRobot's dtypes; zeros where nothing is stored."""
    buffer = filled(added, optimize_memory=optimize_memory)
    for row in range(CAPACITY):
        number = max(range(row, added, CAPACITY), default=None)
        given = transition(0 if number is None else number)
        for found, expected in (
            (buffer.states, given["state"]),
            (buffer.next_states, given["next_state"]),
            (buffer.complementary_info, given["complementary_info"]),
            ({0: buffer.actions, 1: buffer.rewards}, {0: given["action"], 1: given["reward"]}),
            ({0: buffer.dones, 1: buffer.truncateds}, {0: given["done"], 1: given["truncated"]}),
        ):
            for key, value in expected.items():
                shape = (CAPACITY, *(value.shape[1:] if isinstance(value, torch.Tensor) else ()))
                assert found[key].shape == shape
                wanted = torch.as_tensor(value).reshape(shape[1:])
                assert torch.equal(found[key][row].double(), wanted.double() * (number is not None))
    assert buffer.dones.dtype is buffer.truncateds.dtype is torch.bool
    assert buffer.rewards.dtype is buffer.actions.dtype is torch.float32


@pytest.mark.parametrize("optimize_memory", [False, True], ids=["twice", "once"])
def test_there_may_be_no_next_state_at_an_end(optimize_memory):
    """The state stands for it, as in data sets; in the middle of an episode it is refused."""
    buffer = filled(0, optimize_memory=optimize_memory)
    with pytest.raises(ValueError, match="the episode goes on"):
        buffer.add(**(transition(0) | {"next_state": None}))
    assert not buffer.initialized
    for number in range(6):
        buffer.add(**(transition(number) | ({"next_state": None} if any(ended(number)) else {})))
    assert buffer.states["observation.state"][:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert buffer.next_states["observation.state"][:, 0].tolist() == [1, 2, 2, 4, 5, 5]


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"complementary_info": None}, ValueError, "discrete_penalty"),
        ({"complementary_info": {"discrete_penalty": "none"}}, ValueError, "tensor or a number"),
        ({"state": {"observation.state": torch.zeros(1, 2)}}, KeyError, "observation.image"),
        ({"action": torch.zeros(1, 2)}, ValueError, "action"),
    ],
    ids=["no information", "text", "no image", "another shape"],
)
def test_another_transition_is_refused(change, error, text):
    buffer = filled(2)
    with pytest.raises(error, match=text):
        buffer.add(**(transition(2) | change))
    assert len(buffer) == 2


def test_numbers_may_be_tensors_and_states_without_a_batch(monkeypatch):
    """As LeRobot takes them. A copy goes on by itself."""
    buffer = filled(2)
    given = transition(2)
    for key in ("reward", "done", "truncated"):
        given[key] = torch.tensor([given[key]])
    buffer.add(**given)
    given = transition(3)
    for key in ("state", "next_state"):
        given[key]["observation.state"] = given[key]["observation.state"].squeeze(0)
    other = copy.deepcopy(buffer)
    for each in (buffer, other):
        each.add(**given)
        assert plain(batch_at(each, range(4), monkeypatch)) == RECORDED["4 added"]


def test_without_information():
    buffer = ReplayBuffer(CAPACITY, "cpu", use_drq=False)
    buffer.add(**(transition(0) | {"complementary_info": None}))
    assert buffer.sample(1)["complementary_info"] is None


@pytest.mark.parametrize("async_prefetch", [True, False])
def test_iterators_draw_without_end(async_prefetch):
    buffer = filled(4)
    iterator = buffer.get_iterator(3, async_prefetch, queue_size=2)
    for number in range(4, 9):
        assert len(next(iterator)["reward"]) == 3
        buffer.add(**transition(number))
    iterator.close()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="queue_size"):
        next(buffer.get_iterator(3, async_prefetch, queue_size=0))


def test_a_program_may_end_with_an_iterator_open():
    """Without a word of Python's about the thread."""
    program = """
import torch
from gpubuf.integrations.lerobot import ReplayBuffer
buffer, state = ReplayBuffer(10, "cpu", use_drq=False), {"at": torch.zeros(1, 2)}
buffer.add(state, torch.zeros(1, 1), 0.0, state, False, False)
iterator = buffer.get_iterator(1)
next(iterator)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0
    assert "Exception ignored" not in ended.stderr


def test_an_error_of_the_thread_reaches_the_caller():
    """LeRobot waits for ever."""

    def refuse(images: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("no images today")

    with pytest.raises(ArithmeticError, match="no images today"):
        next(filled(4, use_drq=True, image_augmentation_function=refuse).get_iterator(2))


@pytest.mark.parametrize("optimize_memory", [False, True], ids=["twice", "once"])
@pytest.mark.parametrize("with_done", [False, True], ids=["", "with ends"])
def test_data_sets_are_read_as_lerobot_reads_them(with_done, optimize_memory, monkeypatch):
    keys = ["observation.state", "observation.image"]
    given = frames(with_done=with_done)
    buffer = ReplayBuffer.from_lerobot_dataset(given, "cpu", keys, use_drq=False, optimize_memory=optimize_memory)
    name = "read with ends" if with_done else "read"
    assert plain(batch_at(buffer, range(5), monkeypatch)) == RECORDED[name]


def test_data_sets_are_read_once_a_frame():
    read: list[int] = []

    class Counted(Frames):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            read.append(index)
            return super().__getitem__(index)

    ReplayBuffer.from_lerobot_dataset(Counted(frames(with_done=False).frames), "cpu", ["observation.state"])
    assert read == list(range(5))


@pytest.mark.parametrize(
    ("options", "text"), [({}, "state_keys"), ({"state_keys": ["observation.state"], "capacity": 4}, "5 frames")]
)
def test_data_sets_that_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        ReplayBuffer.from_lerobot_dataset(frames(with_done=True), "cpu", **options)


@pytest.fixture
def lerobot(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """LeRobot's module of data sets, with one that notes what is done to it; or none."""

    def install(there: bool) -> None:
        module = ModuleType("lerobot.datasets.lerobot_dataset")
        module.LeRobotDataset = Frames  # type: ignore[attr-defined]
        for name in ("lerobot", "lerobot.datasets"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name) if there else None)
        monkeypatch.setitem(sys.modules, module.__name__, module if there else None)

    return install


def test_data_sets_are_written_as_lerobot_writes_them(lerobot):
    lerobot(True)
    assert plain(filled(9).to_lerobot_dataset("someone/something", fps=5).calls) == RECORDED["written"]


def test_lerobot_is_asked_for_by_name(lerobot):
    lerobot(False)
    with pytest.raises(ImportError, match="pip install lerobot"):
        filled(1).to_lerobot_dataset("someone/something")


def test_state_keys_can_be_read():
    """LeRobot's programs read them back."""
    assert ReplayBuffer(CAPACITY, "cpu", ["observation.state"], use_drq=False).state_keys == ["observation.state"]
    assert ReplayBuffer(CAPACITY, "cpu", use_drq=False).state_keys == []


# Batches of two buffers


@pytest.mark.parametrize(
    ("ratio", "online"), [(0.5, 5), (0.37, 3), (0.0, 1), (1.0, 10)], ids=["half", "rounded down", "at least one", "all"]
)
def test_batches_mix_both_buffers(ratio, online):
    """As many rows of each as LeRobot's mixer gives, the online ones first."""
    buffers = filled(6), ReplayBuffer(50, "cpu", use_drq=False)
    for number in range(100, 150):
        buffers[1].add(**transition(number))
    batch = OnlineOfflineMixer(*buffers, online_ratio=ratio).sample(10)
    # A buffer gives no more rows than it stores.
    online = min(online, 6)
    whole = online if ratio == 1 else 10 - max(1, int(10 * ratio)) + online
    assert (batch["reward"] < 100).tolist() == [True] * online + [False] * (whole - online)
    for name, first in (("state", 0), ("next_state", 0.5)):
        assert batch[name]["observation.image"].shape == (whole, 1, 2, 2)
        assert (batch[name]["observation.state"][:, 0] >= batch["reward"] + first).all()
    assert torch.equal(batch["complementary_info"]["discrete_penalty"], -batch["reward"] / 2)
    assert {key: value.shape[0] for key, value in batch.items() if isinstance(value, torch.Tensor)} == dict.fromkeys(
        ("action", "reward", "done", "truncated"), whole
    )


def test_a_mixer_of_one_buffer():
    buffer = filled(4)
    mixer = OnlineOfflineMixer(buffer, online_ratio=0.5)
    assert len(mixer.sample(3)["reward"]) == 3
    with pytest.raises(ValueError, match=r"online_ratio must be in \[0, 1\], got 2"):
        OnlineOfflineMixer(buffer, buffer, 2)
    with pytest.raises(RuntimeError, match="Cannot sample from an empty buffer"):
        OnlineOfflineMixer(buffer, filled(0), 0.5).sample(4)


def test_information_of_one_buffer_alone_is_left_out():
    """LeRobot's has fewer entries than the batch has rows."""
    offline = filled(0)
    for number in range(4):
        offline.add(**(transition(number) | {"complementary_info": {"discrete_penalty": 1.0}}))
    info = OnlineOfflineMixer(filled(4), offline, 0.5).sample(4)["complementary_info"]
    assert {key: len(value) for key, value in info.items()} == {"discrete_penalty": 4}
    without = filled(0)
    without.add(**(transition(0) | {"complementary_info": None}))
    for pair in ((filled(4), without), (without, filled(4))):
        assert OnlineOfflineMixer(*pair, online_ratio=0.5).sample(2)["complementary_info"] is None


@pytest.mark.parametrize("async_prefetch", [True, False])
def test_mixed_batches_without_end(async_prefetch):
    iterator = OnlineOfflineMixer(filled(6), filled(6), 0.5).get_iterator(4, async_prefetch, queue_size=2)
    assert [len(next(iterator)["reward"]) for _ in range(5)] == [4] * 5
    iterator.close()  # type: ignore[attr-defined]


def test_lerobots_trainer_takes_a_mixer():
    """Its own, with our buffers: where LeRobot is installed, of a version that has it."""
    trainer = pytest.importorskip("lerobot.rl.trainer", reason="LeRobot from 0.6 on is not installed")

    class Algorithm:
        def make_optimizers_and_scheduler(self) -> None:
            pass

        def configure_data_iterator(self, data_mixer: Any, batch_size: int) -> Any:
            return data_mixer.get_iterator(batch_size=batch_size)

        def update(self, iterator: Any) -> Any:
            return next(iterator)

    mixer = OnlineOfflineMixer(filled(6), filled(6), 0.5)
    assert len(trainer.RLTrainer(Algorithm(), mixer, 4).training_step()["reward"]) == 4


# Data sets of rows of any buffer

FEATURES = {
    "observation.state": {"dtype": "float32", "shape": (2,), "names": None},
    "observation.images.top": {"dtype": "image", "shape": (3, 8, 8), "names": ["c", "h", "w"]},
    "action": {"dtype": "float32", "shape": (1,), "names": None},
    "next.done": {"dtype": "bool", "shape": (1,), "names": None},
}


def rows(n: int) -> TensorDict:
    """Episodes of three, numbered by their second key; actions are float64."""
    t = torch.arange(n)
    image = torch.arange(n).reshape(n, 1, 1, 1).expand(n, 3, 8, 8).to(torch.uint8)
    observation = {"state": t[:, None] * torch.ones(1, 2), "image": {"top": image}}
    done = (t % 3 == 2)[:, None]
    return TensorDict({"observation": observation, "action": t[:, None].double(), "next": {"done": done}}, [n])


def test_rows_are_exported_as_frames(lerobot):
    """Cast, in the shape of a feature, with an end after each episode and at the end of the rows."""
    lerobot(True)
    buffer = TensorDictReplayBuffer(7)
    buffer.extend(rows(10))
    options = {"repo_id": "someone/something", "fps": 5, "features": FEATURES, "batch_size": 2}
    made = buffer.export(LeRobotDatasetAdapter(**options, task="open", root="folder", robot_type="arm"))
    created = {name: made.calls[0][1][name] for name in ("repo_id", "fps", "root", "robot_type", "use_videos")}
    assert list(created.values()) == ["someone/something", 5, "folder", "arm", True]
    assert [call[0] for call in made.calls[1:]] == [
        *["add_frame"] * 3, "save_episode", *["add_frame"] * 3, "save_episode", "add_frame", "save_episode", "finalize"
    ]  # fmt: skip
    first = made.calls[1][1]
    assert set(first) == {"task", *FEATURES}
    assert first == plain(
        {
            "task": "open",
            "observation.state": torch.tensor([3.0, 3.0]),
            "observation.images.top": torch.full((3, 8, 8), 3, dtype=torch.uint8),
            "action": torch.tensor([3.0]),
            "next.done": torch.tensor([False]),
        }
    )


def test_episodes_and_tasks_of_rows(lerobot):
    """Where the number of the episode changes, whatever the flags say; names are mapped."""
    lerobot(True)
    buffer = Rows(LazyTensorStorage(10))
    given = rows(6)
    given["number"] = torch.tensor([0, 0, 1, 1, 1, 2])
    given["say"] = NonTensorStack(*"abcdef")
    buffer.extend(given)
    features = {"speed": {"dtype": "float32", "shape": (2,)}, "timestamp": {"dtype": "float32", "shape": (1,)}}
    key_map = {"episode_index": "number", "speed": ("observation", "state")}
    adapter = LeRobotDatasetAdapter(repo_id="a/b", fps=1, features=features, key_map=key_map, task_key="say")
    made = buffer.export(adapter, trajectory_key="number")
    assert [call[0] for call in made.calls[1:-1]] == [
        *["add_frame"] * 2, "save_episode", *["add_frame"] * 3, "save_episode", "add_frame", "save_episode"
    ]  # fmt: skip
    frames = [call[1] for call in made.calls if call[0] == "add_frame"]
    assert [frame["task"] for frame in frames] == list("abcdef")
    assert set(frames[0]) == {"task", "speed"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"task": "x"}, "repo_id, fps and features"),
        ({"repo_id": "a/b", "fps": 1, "features": FEATURES}, "task= or task_key="),
    ],
)
def test_adapters_that_lack_something(options, text):
    buffer = Rows(10)
    buffer.extend(rows(3))
    with pytest.raises(ValueError, match=text):
        buffer.export(LeRobotDatasetAdapter(**options))


def test_episodes_of_several_environments_are_numbered(lerobot):
    lerobot(True)
    buffer = Rows(LazyTensorStorage(10, ndim=2))
    buffer.extend(rows(4).reshape(2, 2))
    adapter = LeRobotDatasetAdapter(repo_id="a/b", fps=1, features=FEATURES, task="x")
    with pytest.raises(ValueError, match="several environments need the number of their episode"):
        buffer.export(adapter)


def test_lerobot_reads_what_was_exported(tmp_path: Path):
    """By LeRobot's own classes, from its folder; and back into a buffer."""
    datasets = pytest.importorskip("lerobot.datasets.lerobot_dataset", reason="LeRobot is not installed")
    buffer = TensorDictReplayBuffer(10)
    buffer.extend(rows(8))
    adapter = LeRobotDatasetAdapter(repo_id="a/b", root=tmp_path / "data", fps=10, features=FEATURES, task="open")
    buffer.export(adapter)
    found = datasets.LeRobotDataset("a/b", root=tmp_path / "data")
    assert (len(found), found.num_episodes) == (8, 3)
    assert [int(found[i]["frame_index"]) for i in range(8)] == [0, 1, 2, 0, 1, 2, 0, 1]
    row = adapter.from_external(found)[4]
    assert row["observation", "state"].tolist() == [4, 4]
    assert row["observation", "image", "top"].shape == (3, 8, 8)
    assert (row["observation", "image", "top"] * 255).round().unique().tolist() == [4]
    assert (int(row["episode"]), int(row["frame"]), row["language_instruction"]) == (1, 1, "open")
