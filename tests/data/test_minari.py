"""Minari data sets as buffers: what becomes what, and what is refused.

Most tests use stand-ins with Minari's documented interface; the last ones use Minari itself, where it is installed.
"""

import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gpubuf import LazyMemmapStorage, LazyTensorStorage, SamplerWithoutReplacement, SliceSampler, from_minari


def episode(steps: int, first: int = 0, ending: str = "truncated", **changes: Any) -> SimpleNamespace:
    """Observation t of an episode is ``first + t``, its action half of it, its reward the negative of it."""
    time = first + np.arange(steps + 1.0)
    last = np.arange(steps) == steps - 1
    entries = {
        "observations": time[:, None] + np.array([0.0, 0.25]),
        "actions": time[:-1, None] / 2,
        "rewards": -time[:-1],
        "terminations": last & (ending == "terminated"),
        "truncations": last & (ending == "truncated"),
    }
    return SimpleNamespace(**entries | changes)


class Dataset:
    """What of minari.MinariDataset is used."""

    def __init__(self, *episodes: SimpleNamespace, total_steps: int | None = None):
        self._episodes = episodes
        self.total_episodes = len(episodes)
        self.total_steps = sum(len(e.rewards) for e in episodes) if total_steps is None else total_steps

    def iterate_episodes(self):
        return iter(self._episodes)


def dataset() -> Dataset:
    return Dataset(episode(3), episode(2, 10, "terminated"), episode(4, 20, "neither"))


def test_transitions():
    rows = from_minari(dataset()).storage[:]
    step = torch.tensor([0.0, 1, 2, 10, 11, 20, 21, 22, 23])
    offset = torch.tensor([0.0, 0.25])
    expected = {
        "observation": step[:, None] + offset,
        "action": step[:, None] / 2,
        ("collector", "traj_ids"): torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2]),
        ("next", "observation"): step[:, None] + 1 + offset,
        ("next", "reward"): -step[:, None],
        ("next", "terminated"): torch.isin(step, torch.tensor([11.0]))[:, None],
        ("next", "truncated"): torch.isin(step, torch.tensor([2.0, 23.0]))[:, None],
        ("next", "done"): torch.isin(step, torch.tensor([2.0, 11.0, 23.0]))[:, None],
        "index": torch.arange(9),
    }
    found = dict(rows.items(True, True))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype is value.dtype, key
        assert torch.equal(found[key], value), key


def test_fills_exactly():
    """CASES.md 18: the default storage is exactly full."""
    buffer = from_minari(dataset(), batch_size=9, sampler=SamplerWithoutReplacement())
    assert (len(buffer), buffer.storage.max_size, buffer.storage.cursor) == (9, 9, 0)
    assert sorted(buffer.sample()["index"].tolist()) == list(range(9))


@pytest.mark.parametrize("keys", [{}, {"traj_key": ("collector", "traj_ids")}])
def test_slices_stay_in_their_episode(keys: dict[str, Any]):
    """CASES.md 19: also where the data set forgot to mark an episode's end."""
    data = Dataset(episode(4, ending="neither"), episode(5, 10, "neither"), episode(2, 20, "neither"))
    batch = from_minari(data, sampler=SliceSampler(slice_len=3, **keys), batch_size=300).sample()
    starts = batch["observation"][:, 0].view(100, 3)
    assert (starts.diff(dim=1) == 1).all()
    assert set(starts[:, 0].tolist()) == {0, 1, 10, 11, 12}


def test_nested_spaces():
    """Dictionaries nest, tuples are numbered, discrete spaces stay integers without a dimension."""
    observations = {
        "camera": np.arange(4 * 12, dtype=np.uint8).reshape(4, 2, 2, 3),
        "body": {"joints": np.arange(4.0), "limbs": (np.arange(4), np.arange(8.0).reshape(4, 2))},
    }
    given = episode(3, observations=observations, actions=(np.array([2, 0, 1]), np.arange(3.0)))
    buffer = from_minari(Dataset(given))
    rows = buffer.storage[:]
    assert rows["observation", "camera"].dtype is torch.uint8
    assert rows["next", "observation", "camera"].tolist() == observations["camera"][1:].tolist()
    assert rows["next", "observation", "body", "joints"].tolist() == [1, 2, 3]
    assert rows["observation", "body", "limbs", "0"].dtype is torch.int64
    assert rows["observation", "body", "limbs", "1"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert rows["action", "0"].tolist() == [2, 0, 1]
    assert rows["action", "1"].dtype is torch.float32


def test_dtypes():
    data = Dataset(episode(3, rewards=np.array([1, 2, 3])))
    as_they_are = from_minari(data, dtype=None).storage[:]
    assert as_they_are["observation"].dtype is torch.float64
    assert as_they_are["next", "reward"].dtype is torch.float32
    half = from_minari(data, dtype=torch.bfloat16).storage[:]
    assert half["observation"].dtype is half["next", "reward"].dtype is torch.bfloat16


def test_arrays_of_any_kind():
    """Lists, read-only arrays, arrays of foreign byte order, strided arrays."""
    frozen = np.arange(4.0)[:, None]
    frozen.flags.writeable = False
    foreign = np.arange(6).astype(">i4")[::2]
    rows = from_minari(Dataset(episode(3, observations=frozen, actions=foreign, rewards=[1.0, 2.0, 3.0]))).storage[:]
    assert rows["observation"].flatten().tolist() == [0, 1, 2]
    assert rows["action"].tolist() == [0, 2, 4]


def test_nothing_of_the_data_set_is_changed():
    """The last truncation is set in the buffer, not in the data set; the rows don't follow the arrays."""
    given = episode(3, ending="neither")
    buffer = from_minari(Dataset(given), dtype=None)
    assert not given.truncations.any()
    given.observations[:] = 7
    assert buffer.storage[:]["observation"][:, 0].tolist() == [0, 1, 2]


def test_exclude():
    text = {"image": np.zeros((4, 2)), "mission": ["go"] * 4}
    data = Dataset(episode(3, observations=text))
    with pytest.raises(TypeError, match=r"episode 0: \('observation', 'mission'\) holds <U2"):
        from_minari(data)
    rows = from_minari(data, exclude=[("observation", "mission"), ("next", "observation"), "collector"]).storage[:]
    assert set(rows.keys(True, True)) == {
        ("observation", "image"),
        "action",
        *(("next", name) for name in ("reward", "terminated", "truncated", "done")),
        "index",
    }
    assert "observation" not in from_minari(data, exclude=["observation"]).storage[:]["next"].keys()


def test_into_files(tmp_path: Path):
    from_minari(dataset(), storage=LazyMemmapStorage(20, scratch_dir=tmp_path))
    assert LazyMemmapStorage.open(tmp_path)[8]["observation"].tolist() == [23, 23.25]


def test_one_episode_at_a_time():
    """Each episode is let go before the next one is read."""
    alive: list[int] = []

    class Tracked(SimpleNamespace):
        def __init__(self, **entries: Any):
            super().__init__(**entries)
            alive.append(1)

        def __del__(self):
            alive.pop()

    counts = []

    def episodes():
        for _ in range(4):
            yield Tracked(**vars(episode(3)))
            counts.append(len(alive))

    from_minari(SimpleNamespace(total_steps=12, total_episodes=4, iterate_episodes=episodes))
    assert max(counts) <= 1


def test_storages_that_do_not_fit():
    with pytest.raises(ValueError, match="9 steps, the storage has room for 8"):
        from_minari(dataset(), storage=LazyTensorStorage(8))
    with pytest.raises(ValueError, match="of one dimension"):
        from_minari(dataset(), storage=LazyTensorStorage(20, ndim=2))
    used = from_minari(dataset()).storage
    with pytest.raises(ValueError, match="must be empty"):
        from_minari(dataset(), storage=used)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"observations": np.zeros((3, 2))}, "'observation' has 3 entries, expected are 4"),
        ({"actions": np.zeros((4, 1))}, "'action' has 4 entries, expected are 3"),
        ({"terminations": np.zeros(2, bool)}, "3 rewards, 2 terminations and 3 truncations"),
        ({"observations": np.zeros((4, 3))}, r"episode 1 doesn't fit: key 'observation'"),
        ({"observations": {"a": np.zeros((4, 2))}}, r"episode 1 doesn't fit: key 'observation'"),
    ],
)
def test_contradictions(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        from_minari(Dataset(episode(3), episode(3, **changes)))


def test_empty_and_wrong_totals():
    with pytest.raises(ValueError, match="no steps"):
        from_minari(Dataset())
    with pytest.raises(ValueError, match="more than the 2 steps"):
        from_minari(Dataset(episode(3), total_steps=2))
    with pytest.raises(ValueError, match="says that it has 5 steps, but has 3"):
        from_minari(Dataset(episode(3), total_steps=5))
    with pytest.raises(ValueError, match="0 rewards"):
        from_minari(Dataset(episode(0), total_steps=5))


def test_progress_bar(capsys: pytest.CaptureFixture):
    """None where nobody looks, one where it is asked for."""
    pytest.importorskip("rich")
    from_minari(dataset())
    assert capsys.readouterr().err == ""
    from_minari(dataset(), progress=True)
    assert "3/3" in capsys.readouterr().err


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "minari", None)
    with pytest.raises(ImportError, match=r"gpubuf\[minari\]"):
        from_minari("D4RL/door/human-v2")


def test_minari_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A data set that Minari wrote, by name, and filtered."""
    minari = pytest.importorskip("minari")
    pytest.importorskip("h5py")
    gymnasium = pytest.importorskip("gymnasium")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    box = gymnasium.spaces.Box(-100, 100, (2,))
    space = gymnasium.spaces.Dict({"vector": box, "number": gymnasium.spaces.Discrete(100)})
    recorded = []
    for given in dataset().iterate_episodes():
        observations = {"vector": given.observations, "number": given.observations[:, 0].astype(np.int64)}
        recorded.append(
            minari.data_collector.EpisodeBuffer(
                id=len(recorded),
                observations={name: list(value) for name, value in observations.items()},
                actions=list(given.actions),
                rewards=given.rewards.tolist(),
                terminations=given.terminations.tolist(),
                truncations=given.truncations.tolist(),
            )
        )
    with warnings.catch_warnings(action="ignore"):  # about who made the data, and how
        minari.create_dataset_from_buffers(
            "gpubuf/test-v0",
            recorded,
            observation_space=space,
            action_space=gymnasium.spaces.Box(-100, 100, (1,)),
            data_format="hdf5",
        )
    rows = from_minari("gpubuf/test-v0").storage[:]
    assert rows["observation", "number"].tolist() == [0, 1, 2, 10, 11, 20, 21, 22, 23]
    assert torch.equal(rows["next", "observation", "vector"], rows["observation", "vector"] + 1)
    assert rows["next", "done"].flatten().nonzero().flatten().tolist() == [2, 4, 8]
    few = minari.load_dataset("gpubuf/test-v0").filter_episodes(lambda e: e.terminations[-1])
    assert from_minari(few).storage[:]["observation", "number"].tolist() == [10, 11]
