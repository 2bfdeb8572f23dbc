"""Data sets of others: every format against a plain model of its episodes, in pieces of every size."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from gpubuf import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer
from gpubuf.cli import main
from gpubuf.data import Column, Steps, load_dataset, open_dataset
from gpubuf.data.loading import recording as recordings
from gpubuf.data.loading import video
from gpubuf.data.storage.placement import NothingFitsError
from tests.support import recorded_files as files
from tests.support.recorded_files import episodes, rows_of

h5py, arrow, av = (
    pytest.mark.skipif(not __import__("importlib.util").util.find_spec(name), reason=f"needs {name}")
    for name in ("h5py", "pyarrow", "av")
)

FORMATS = {
    "npz": (files.write_npz, "a.npz", {"with_next": False}, {"knows_next": False}),
    "npz with next": (files.write_npz, "a.npz", {"with_next": True}, {"knows_next": True}),
    "ogbench": (files.write_ogbench, "a.npz", {}, {"knows_next": True, "says_terminated": False}),
    "ogbench compact": (
        files.write_ogbench,
        "a.npz",
        {"compact": True},
        {"knows_next": True, "says_terminated": False},
    ),
    "d4rl": (files.write_d4rl, "a.hdf5", {"with_next": False}, {"knows_next": False}),
    "d4rl with next": (files.write_d4rl, "a.hdf5", {"with_next": True}, {"knows_next": True}),
    "robomimic": (files.write_robomimic, "a.hdf5", {}, {"knows_next": True}),
    "robomimic without next": (files.write_robomimic, "a.hdf5", {"with_next": False}, {"knows_next": False}),
    "minari": (files.write_minari, "folder", {}, {"knows_next": True}),
    "parquet": (files.write_parquet, "a.parquet", {}, {"knows_next": False}),
    "lerobot": (files.write_lerobot, "folder", {}, {"knows_next": False, "says_terminated": False}),
    "lerobot with done": (files.write_lerobot, "folder", {"done": True}, {"knows_next": False}),
}
NEEDED = {"d4rl": [h5py], "robomimic": [h5py], "minari": [h5py], "parquet": [arrow], "lerobot": [arrow, av]}
formats = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=NEEDED.get(name.split()[0], [])) for name in FORMATS]
)


@pytest.fixture
def recorded():
    return episodes(0)


def written(name: str, folder: Path, recorded) -> Path:
    write, path, options, _ = FORMATS[name]
    write(folder / path, recorded, **options)
    return folder / path


def cut(monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> None:
    monkeypatch.setattr(recordings, "CHUNK_BYTES", n_bytes)


def same(rows, expected, with_reward: bool = True) -> None:
    """All rows of a storage are these, bit for bit."""
    observation = rows["observation"]
    for part in ("state", "eef_pos"):
        observation = (
            observation[part] if not isinstance(observation, torch.Tensor) and part in observation else observation
        )
    following = rows["next", "observation"]
    for part in ("state", "eef_pos"):
        following = following[part] if not isinstance(following, torch.Tensor) and part in following else following
    columns = [torch.from_numpy(np.array(column)) for column in zip(*expected, strict=True)]
    assert len(rows) == len(expected)
    assert torch.equal(observation, columns[0])
    assert torch.equal(rows["action"], columns[1].float())
    if with_reward:
        assert torch.equal(rows["next", "reward"], columns[2].float()[:, None])
    assert torch.equal(following, columns[3])
    for flag, column in zip(("done", "terminated", "truncated"), columns[4:], strict=True):
        assert torch.equal(rows["next", flag], column[:, None]), flag


@formats
@pytest.mark.parametrize("n_bytes", [1, 200, 1 << 28])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rows_are_those_of_the_episodes(name: str, n_bytes: int, seed: int, tmp_path: Path, monkeypatch):
    """Whatever the pieces in which they are read."""
    recorded = episodes(seed)
    cut(monkeypatch, n_bytes)
    source = written(name, tmp_path, recorded)
    buffer = load_dataset(source, device="cpu", workers=4)
    expected = rows_of(recorded, **FORMATS[name][3])
    same(buffer.storage[:], expected, with_reward="ogbench" not in name)
    assert open_dataset(source).trajectories == sum(row[4] for row in expected)
    assert buffer.storage.max_size == len(expected)


@formats
def test_observations_are_stored_once(name: str, tmp_path: Path, recorded):
    buffer = load_dataset(written(name, tmp_path, recorded), device="cpu")
    ends = sum(row[4] for row in rows_of(recorded, **FORMATS[name][3]))
    # The newest one is pending.
    assert buffer.storage.sharing.used <= ends
    assert {key[0] for key in buffer.storage.sharing.keys} == {"observation"}


@formats
def test_mapped_files_hold_the_same_rows(name: str, tmp_path: Path, recorded, monkeypatch):
    cut(monkeypatch, 100)
    source = written(name, tmp_path, recorded)
    load_dataset(source, folder=tmp_path / "rows")
    same(LazyMemmapStorage.open(tmp_path / "rows")[:], rows_of(recorded, **FORMATS[name][3]), "ogbench" not in name)


@formats
def test_last_rows_are_kept_when_asked(name: str, tmp_path: Path, recorded):
    """With their own observation where nobody recorded the next one."""
    buffer = load_dataset(written(name, tmp_path, recorded), device="cpu", keep_last=True)
    same(buffer.storage[:], rows_of(recorded, **FORMATS[name][3], keep_last=True), "ogbench" not in name)


def test_without_next_observations_every_action_stays(tmp_path: Path, recorded):
    source = written("npz", tmp_path, recorded)
    buffer = load_dataset(source, device="cpu", next_observations=False)
    rows = buffer.storage[:]
    assert set(rows["next"].keys()) == {"reward", "done", "terminated", "truncated"}
    assert torch.equal(rows["action"], torch.from_numpy(np.concatenate([each.actions for each in recorded])).float())
    ends = np.concatenate([np.arange(len(each)) == len(each) - 1 for each in recorded])
    assert torch.equal(rows["next", "done"], torch.from_numpy(ends)[:, None])


def test_recorded_next_observations_may_be_any(tmp_path: Path):
    """Also where none of them is the observation of the next row."""
    columns = {name: np.random.default_rng(0).normal(size=(50, 2)) for name in ("observations", "next_observations")}
    np.savez(tmp_path / "a.npz", **columns, timeouts=np.arange(50) == 49)
    rows = load_dataset(tmp_path / "a.npz", device="cpu").storage[:]
    assert torch.equal(rows["next", "observation"], torch.from_numpy(columns["next_observations"]).float())


def test_keys_select_and_rename(tmp_path: Path, recorded):
    source = written("npz with next", tmp_path, recorded)
    listed = load_dataset(source, device="cpu", keys=["observations"]).storage[:]
    assert "action" not in listed.keys()
    assert "reward" not in listed["next"].keys()
    renamed = load_dataset(source, device="cpu", keys={("a", "pixels"): "observations", "action": "actions"}).storage[:]
    expected = rows_of(recorded, knows_next=True)
    for rows, key in ((listed, ("observation",)), (renamed, ("a", "pixels"))):
        assert torch.equal(rows[key], torch.from_numpy(np.stack([row[0] for row in expected])))
        assert torch.equal(rows["next", *key], torch.from_numpy(np.stack([row[3] for row in expected])))
    with pytest.raises(KeyError, match=r"no 'pixels'.*observations"):
        open_dataset(source, keys=["pixels"])


@h5py
def test_a_mask_of_robomimic_chooses_demonstrations(tmp_path: Path, recorded):
    source = written("robomimic", tmp_path, recorded)
    buffer = load_dataset(source, device="cpu", filter_key="train")
    same(buffer.storage[:], rows_of([recorded[2], recorded[10]], knows_next=True))
    with pytest.raises(KeyError):
        open_dataset(source, filter_key="valid")


@h5py
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_minari_reads_as_its_own_package_does(tmp_path: Path, monkeypatch):
    """A data set that the package made, with a dictionary of observations."""
    minari = pytest.importorskip("minari")
    from gymnasium import spaces
    from minari.data_collector import EpisodeBuffer

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    box = spaces.Box(-1, 1, (2,))
    rng = np.random.default_rng(0)
    buffers = [
        EpisodeBuffer(
            id=number,
            observations={
                "a": list(rng.normal(size=(n + 1, 2)).astype("f")),
                "b": list(rng.normal(size=(n + 1, 2)).astype("f")),
            },
            actions=list(rng.normal(size=(n, 2)).astype("f")),
            rewards=list(rng.normal(size=n)),
            terminations=[False] * n,
            truncations=[False] * (n - 1) + [True],
        )
        for number, n in enumerate((3, 1, 4))
    ]
    made = minari.create_dataset_from_buffers(
        "own-v0", buffers, observation_space=spaces.Dict({"a": box, "b": box}), action_space=box
    )
    rows = load_dataset(tmp_path / "own-v0", device="cpu").storage[:]
    own = list(made.iterate_episodes())
    for part in ("a", "b"):
        for key, cut in ((("observation", part), slice(None, -1)), (("next", "observation", part), slice(1, None))):
            assert torch.equal(
                rows[key], torch.from_numpy(np.concatenate([each.observations[part][cut] for each in own]))
            )
    assert torch.equal(rows["action"], torch.from_numpy(np.concatenate([each.actions for each in own])))
    ends = np.concatenate([each.truncations for each in own])
    assert torch.equal(rows["next", "truncated"], torch.from_numpy(ends)[:, None])


def test_a_reader_of_ones_own_is_taken(recorded):
    class Numbers:
        columns = {"step": Column.of(("observation",), (), np.int64)}  # noqa: RUF012
        steps = Steps.of({"episode": np.array([0, 0, 0, 1, 1])})
        identity = "numbers"
        statistics = {}  # noqa: RUF012

        def tasks(self, name, start, stop, out):
            return [lambda: np.copyto(out, np.arange(start, stop))]

    rows = load_dataset(Numbers(), device="cpu").storage[:]
    assert rows["observation"].tolist() == [0, 1, 3]
    assert rows["next", "observation"].tolist() == [1, 2, 4]
    assert rows["next", "done"].flatten().tolist() == [False, True, True]


# Where rows go


def test_a_buffer_that_is_given_gets_the_rows_after_its_own(tmp_path: Path, recorded):
    source = written("npz", tmp_path, recorded)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), batch_size=4)
    for _ in range(2):
        assert load_dataset(source, buffer) is buffer
    expected = rows_of(recorded, knows_next=False)
    same(buffer.storage[:], expected * 2)
    with pytest.raises(TypeError, match=r"folder, capacity and \['batch_size'\] are for a new buffer"):
        load_dataset(source, buffer, batch_size=3)


def test_options_are_those_of_the_buffer(tmp_path: Path, recorded):
    source = written("npz", tmp_path, recorded)
    buffer = load_dataset(source, storage=LazyTensorStorage(500, dtypes={"observation": torch.float16}), batch_size=7)
    assert buffer.sample()["observation"].shape == (7, 3)
    assert buffer.storage.max_size == 500
    assert load_dataset(source, device="cpu", capacity=300).storage.max_size == 300


def test_what_does_not_fit_is_refused_before_anything_is_read(tmp_path: Path, recorded, monkeypatch):
    recording = open_dataset(written("npz", tmp_path, recorded))
    monkeypatch.setattr(type(recording), "batches", None)
    with pytest.raises(NothingFitsError, match="no GPU"):
        load_dataset(recording, device="pinned")
    with pytest.raises(NothingFitsError, match="don't fit"):
        load_dataset(recording, device="cpu", capacity=1 << 45)
    assert recording.plan().capacity == recording.rows


KILLED = """
import os, signal, sys
from gpubuf import TensorDictReplayBuffer
from gpubuf.data import load_dataset
from gpubuf.data.loading import recording
recording.CHUNK_BYTES = 200
left = int(sys.argv[3])
extend = TensorDictReplayBuffer.extend
def counted(self, batch):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return extend(self, batch)
TensorDictReplayBuffer.extend = counted
load_dataset(sys.argv[1], folder=sys.argv[2])
"""


@pytest.mark.parametrize("pieces", [0, 4])
def test_a_load_that_was_killed_goes_on_where_it_stopped(pieces: int, tmp_path: Path, recorded, monkeypatch):
    source, rows = written("npz", tmp_path, recorded), tmp_path / "rows"
    done = subprocess.run([sys.executable, "-c", KILLED, source, rows, str(pieces)], check=False)
    assert done.returncode == -signal.SIGKILL
    before = len(LazyMemmapStorage.open(rows)) if pieces else 0
    expected = rows_of(recorded, knows_next=False)
    assert (before > 0) == (pieces > 0)
    assert before < len(expected)
    written_rows = []
    extend = TensorDictReplayBuffer.extend
    monkeypatch.setattr(
        TensorDictReplayBuffer, "extend", lambda self, batch: (written_rows.append(len(batch)), extend(self, batch))[1]
    )
    buffer = load_dataset(source, folder=rows)
    assert sum(written_rows) == len(expected) - before
    same(buffer.storage[:], expected)
    # A load that is complete is opened.
    del buffer, written_rows[:]
    same(load_dataset(source, folder=rows).storage[:], expected)
    assert not written_rows


def test_a_folder_of_another_load_is_refused(tmp_path: Path, recorded):
    source, rows = written("npz", tmp_path, recorded), tmp_path / "rows"
    load_dataset(source, folder=rows)
    with pytest.raises(ValueError, match="something else"):
        load_dataset(source, folder=rows, keys=["actions"])
    os.utime(source, ns=(1, 1))
    with pytest.raises(ValueError, match="something else"):
        load_dataset(source, folder=rows)


def test_a_capacity_means_what_it_says(tmp_path: Path, recorded):
    """Zero is refused, not taken for none; and a folder that was opened can't have another one than was asked for."""
    source, rows = written("npz", tmp_path, recorded), tmp_path / "rows"
    for where in ({"device": "cpu"}, {"folder": tmp_path / "none"}):
        with pytest.raises(ValueError, match=r"got (max_size=)?0"):
            load_dataset(source, capacity=0, **where)
    with pytest.raises(ValueError, match="got 0"):
        open_dataset(source).plan(0)
    load_dataset(source, folder=rows, capacity=300)
    with pytest.raises(ValueError, match=r"rows has room for 300 rows, got capacity=500"):
        load_dataset(source, folder=rows, capacity=500)
    for same_one in ({}, {"capacity": 300}):
        assert load_dataset(source, folder=rows, **same_one).storage.max_size == 300


# Videos


class Counted:
    """A container that counts the packets that are decoded."""

    def __init__(self, container, decoded: list[int]) -> None:
        self._container, self._decoded = container, decoded

    def __getattr__(self, name):
        return getattr(self._container, name)

    def demux(self, stream):
        for packet in self._container.demux(stream):
            yield CountedPacket(packet, self._decoded)


class CountedPacket:
    def __init__(self, packet, decoded: list[int]) -> None:
        self._packet, self._decoded, self.pts = packet, decoded, packet.pts

    def decode(self):
        self._decoded.append(self.pts)
        return self._packet.decode()


VIDEOS = {
    "two": (2, {}),
    "ten": (10, {}),
    "long": (250, {"sc_threshold": "0"}),
    "many later frames first": (12, {"bf": "4", "b_strategy": "0"}),
    "open": (12, {"x264-params": "open-gop=1:bframes=3:scenecut=0"}),
}


@av
@pytest.mark.parametrize("kind", VIDEOS)
@pytest.mark.parametrize("piece", [7, 32, 50, 131])
def test_each_frame_of_a_video_is_decoded_once(kind: str, piece: int, tmp_path: Path):
    gop, options = VIDEOS[kind]
    n, path = 131, tmp_path / "a.mp4"
    files.write_video(path, np.random.default_rng(0).integers(0, 256, (n, 48, 64, 3), dtype=np.uint8), gop, options)
    expected = files.read_video(path)
    file = video.VideoFile(path)
    opened, decoded = file._open, []
    file._open = lambda name: Counted(opened(name), decoded)
    most = 0
    for start in range(0, n, piece):
        out = np.full((min(piece, n - start), 3, 48, 64), 7, np.uint8)
        tasks = file.tasks(start, out)
        most = max(most, len(tasks))
        # The order in which threads run them is any.
        for task in reversed(tasks):
            task()
        np.testing.assert_array_equal(out, expected[start : start + piece])
    assert len(decoded) == len(set(decoded)) == n
    assert (most > 1) == (piece >= 32 and kind not in ("long", "open"))


@arrow
@av
@pytest.mark.parametrize("gop", [2, 250])
def test_frames_of_lerobot_belong_to_their_rows(gop: int, tmp_path: Path, monkeypatch):
    recorded = episodes(4, longest=40, count=8)
    files.write_lerobot(tmp_path / "a", recorded, gop)
    videos = sorted((tmp_path / "a/videos").rglob("*.mp4"))
    frames = np.concatenate([files.read_video(path) for path in videos])
    firsts = np.cumsum([0, *(len(each) + number % 2 for number, each in enumerate(recorded))])
    index = np.concatenate(
        [np.arange(first, first + len(each) - 1) for first, each in zip(firsts, recorded, strict=False)]
    )
    cut(monkeypatch, 300_000)
    rows = load_dataset(tmp_path / "a", device="cpu", workers=3).storage[:]
    assert torch.equal(rows["observation", "image", "top"], torch.from_numpy(frames[index]))
    assert torch.equal(rows["next", "observation", "image", "top"], torch.from_numpy(frames[index + 1]))


@arrow
@av
def test_statistics_of_lerobot_normalise(tmp_path: Path, recorded):
    files.write_lerobot(tmp_path / "a", recorded)
    recording = open_dataset(tmp_path / "a")
    buffer = load_dataset(recording, device="cpu", process=[recording.normalize()])
    states = torch.from_numpy(np.concatenate([each.observations[:-1] for each in recorded])).double()
    drawn = buffer.sample(50)
    key = "observation", "state"
    raw = buffer.storage[drawn["index"]]
    for at in (key, ("next", *key)):
        wanted = (raw[at] - states.mean(0)) / (states.var(0, correction=0) + 1e-8).sqrt()
        torch.testing.assert_close(drawn[at], wanted.float())
    with pytest.raises(KeyError, match=r"no statistics of \['action'\]"):
        recording.normalize(["action"])


# Mistakes


@pytest.mark.parametrize(
    ("name", "n", "text"),
    [
        ("observations", 4, r"'observations' has the shape \(4, 2\), and the data set 3 records"),
        ("rewards", 2, r"'rewards' has the shape \(2,\), and the data set 3 records"),
        ("timeouts", 2, r"one number for each record, got .*'truncated': 2"),
    ],
)
def test_columns_of_another_length_are_not_left_out(name: str, n: int, text: str, tmp_path: Path):
    columns = {"observations": np.zeros((3, 2)), "rewards": np.zeros(3), "timeouts": np.zeros(3)}
    columns[name] = np.zeros((n, *columns[name].shape[1:]))
    np.savez(tmp_path / "a.npz", **columns, terminals=np.zeros(3), note=np.zeros(7))
    with pytest.raises(ValueError, match=text):
        open_dataset(tmp_path / "a.npz")


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">i4", np.longdouble])
def test_numbers_of_other_machines_are_read(dtype: str | type, tmp_path: Path):
    numbers = np.arange(6).reshape(3, 2)
    np.savez(tmp_path / "a.npz", observations=numbers.astype(dtype), rewards=np.zeros(3), terminals=np.arange(3) == 2)
    rows = load_dataset(tmp_path / "a.npz", device="cpu")[:]
    assert torch.equal(rows["observation"].double(), torch.from_numpy(numbers).double())


@pytest.mark.parametrize("other", ["obs", "observation.part"])
def test_two_columns_for_one_key_are_refused_by_name(other: str, tmp_path: Path):
    """Also where one key is below the other; and a choice of one of them is taken."""
    columns = {"observations": np.zeros((3, 2)), other: np.ones((3, 2)), "terminals": np.arange(3) == 2}
    np.savez(tmp_path / "a.npz", **columns, rewards=np.zeros(3))
    first, second = sorted(["observations", other], key=len)
    with pytest.raises(ValueError, match=rf"'{first}' and '{second}' are both for 'observation' of a row"):
        open_dataset(tmp_path / "a.npz")
    rows = load_dataset(tmp_path / "a.npz", device="cpu", keys={"observation": other})[:]
    assert (rows["observation"] == 1).all()
    with pytest.raises(ValueError, match="each column for one key"):
        open_dataset(tmp_path / "a.npz", keys={"a": "rewards", "b": "rewards"})


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128, np.clongdouble])
def test_complex_numbers_are_read(dtype: type, tmp_path: Path):
    signal = (np.arange(6) + 1j * np.arange(6, 0, -1)).reshape(3, 2).astype(dtype)
    np.savez(tmp_path / "a.npz", observations=signal, rewards=np.zeros(3), terminals=np.arange(3) == 2)
    rows = load_dataset(tmp_path / "a.npz", device="cpu")[:]
    assert rows["observation"].dtype == torch.complex64
    assert torch.equal(rows["observation"], torch.from_numpy(signal.astype(np.complex64)))
    with pytest.raises(KeyError, match="no 'note' of numbers, one for each record"):
        open_dataset(tmp_path / "a.npz", keys=["note"])


def test_files_that_say_nothing_of_ends_are_refused(tmp_path: Path):
    np.savez(tmp_path / "a.npz", observations=np.zeros((3, 2)), rewards=np.zeros(3))
    with pytest.raises(ValueError, match=r"where trajectories end: expected one of.*'timeouts'"):
        open_dataset(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", observations=np.zeros((3, 2)).T.copy().T, rewards=np.zeros(3), terminals=np.zeros(3))
    with pytest.raises(ValueError, match="Fortran order"):
        open_dataset(tmp_path / "a.npz")
    with pytest.raises(FileNotFoundError, match=r"no data set at .*missing"):
        open_dataset(tmp_path / "missing")
    (tmp_path / "a.csv").write_text("")
    with pytest.raises(ValueError, match="no known format"):
        open_dataset(tmp_path / "a.csv")


@pytest.mark.parametrize(("path", "package"), [("a.hdf5", "h5py"), ("a.parquet", "pyarrow.parquet")])
def test_a_missing_package_is_named(path: str, package: str, tmp_path: Path, monkeypatch):
    (tmp_path / path).write_bytes(b"")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf'needs {package.partition(".")[0]}: pip install "gpubuf\[datasets\]"'):
        open_dataset(tmp_path / path)


# The command


def test_the_command_plans_and_loads(tmp_path: Path, recorded, capsys):
    source = str(written("npz", tmp_path, recorded))
    assert main(["load", source, "--plan"]) == 0
    assert "placement" in capsys.readouterr().out
    rows = tmp_path / "rows"
    assert main(["load", source, "--into", str(rows), "--keys", "observations,actions", "--keep-last"]) == 0
    printed = capsys.readouterr().out
    storage = LazyMemmapStorage.open(rows)
    assert f"{len(storage)} transitions of {len(recorded)} trajectories" in printed
    assert all(
        len(line) <= 80 for line in printed.splitlines() if not line.startswith(" ") and str(tmp_path) not in line
    )
    assert len(storage) == sum(map(len, recorded))
    assert "reward" not in storage[:]["next"].keys()
    assert main(["load", source, "--into", str(rows)]) == 2
    assert main(["load", source, "--plan", "--keys", "pixels"]) == 2
    assert main(["load", str(tmp_path / "missing"), "--plan"]) == 2
    assert "no data set at" in capsys.readouterr().err
