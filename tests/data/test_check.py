"""What a report says of rows that are right, and of rows with one fault each."""

from __future__ import annotations

import re

import pytest
import torch
from tensordict import TensorDict

from gpubuf.cli import main
from gpubuf.data import LazyTensorStorage, PrioritizedReplayBuffer, ReplayBuffer, TensorDictReplayBuffer
from gpubuf.data import check as module
from gpubuf.integrations.torchrl import ListStorage
from gpubuf.train import TrainConfig, train


def episodes(steps=130, envs=1, length=20):
    """``[steps, envs]`` rows that follow each other; environment e's episodes begin e steps earlier."""
    time = torch.arange(steps)[:, None] + torch.arange(envs)
    place = torch.arange(steps + 1)[:, None] + 1000.0 * torch.arange(envs)
    done = (time % length == length - 1).unsqueeze(-1)
    terminated = done & (time % (2 * length) == length - 1).unsqueeze(-1)
    following = place[1:].clone()
    following[done[..., 0]] *= -1
    return TensorDict(
        {
            "observation": torch.stack([place[:-1], -place[:-1]], -1),
            "action": torch.rand(steps, envs, 2),
            "next": {
                "observation": torch.stack([following, -following], -1),
                "reward": (time % length).unsqueeze(-1).float(),
                "done": done,
                "terminated": terminated,
                "truncated": done & ~terminated,
            },
        },
        [steps, envs],
    )


@pytest.mark.parametrize("chunk", [1, 400, 1 << 26])
@pytest.mark.parametrize("share_next", [False, True])
def test_rows_that_are_right(chunk, share_next, monkeypatch):
    """A ring that went round, whose seam is no fault, in chunks of a row, of some rows, and at once."""
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100, share_next=share_next))
    buffer.extend(episodes(130)[:90, 0])
    buffer.extend(episodes(130)[90:, 0])
    report = buffer.check()
    assert report.findings == []
    assert (report.rows, report.envs, report.compared, report.broken) == (100, 1, 94, 0)
    assert report.rates == {"done": 0.05, "terminated": 0.02, "truncated": 0.03}
    # The first of the five is not stored from its beginning.
    assert report.lengths.tolist() == [20] * 4
    assert report.returns.tolist() == [190.0] * 4
    bounds = {column.key: (column.lowest, column.highest) for column in report.columns}
    assert bounds["observation"] == (-129.0, 129.0)
    assert bounds["next.reward"] == (0.0, 19.0)
    assert report.as_dict()["lengths"] == [20] * 4
    assert str(report).endswith("Nothing looks wrong.")
    assert "4 whole episodes, length 20 to 20, median 20" in str(report)


@pytest.mark.parametrize("chunk", [1, 1 << 26])
def test_environments_side_by_side(chunk, monkeypatch):
    """Their episodes end at different steps, and each continues its own."""
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(300, ndim=2))
    buffer.extend(episodes(130, envs=3).transpose(0, 1))
    report = buffer.check()
    assert report.findings == []
    assert (report.rows, report.envs) == (300, 3)
    assert report.lengths.tolist().count(20) == len(report.lengths) == 12
    assert set(report.returns.tolist()) == {190.0}


def faulty(change, rows=None, **options):
    data = episodes(100)[:, 0] if rows is None else rows
    change(data)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1000, **options))
    buffer.extend(data)
    return buffer.check()


def of_next(key, row, value):
    def change(data):
        data["next", key][row] = value

    return change


@pytest.mark.parametrize(
    ("change", "text", "rows"),
    [
        (
            lambda data: data["observation"][7:9, 1].fill_(torch.nan),
            "observation: 2 rows have NaN",
            (7, 8),
        ),
        (of_next("reward", 5, torch.inf), r"next.reward: 1 rows have NaN or infinity", (5,)),
        (of_next("observation", 12, 77.0), r"1 rows \(1.1%\) lead to another observation", (12,)),
        (of_next("done", 19, False), r"terminated or truncated, but not done", (19,)),
        (lambda data: data["action"].fill_(0.5), "action is the same in all rows", ()),
        (lambda data: data.__setitem__("next", data["next"].exclude("terminated")), "terminated is not stored", ()),
        (
            lambda data: data.__setitem__("next", data["next"].select("observation")),
            "no key says where episodes",
            (),
        ),
        (
            lambda data: [data["next", flag].zero_() for flag in module.FLAGS],
            "no episode ends",
            (),
        ),
    ],
)
def test_one_fault_is_found(change, text, rows):
    report = faulty(change)
    (found,) = [finding for finding in report.findings if re.search(text, finding.text)]
    assert found.rows == rows
    assert f"- {found}" in str(report)


@pytest.mark.parametrize("share_next", [False, True])
@pytest.mark.parametrize("flag", ["truncated", "terminated"])
def test_next_observations_that_are_the_resets(flag, share_next):
    """Of one flag alone: the rows of the other are right."""

    def change(data):
        ends = data["next", flag][:-1, 0].nonzero()[:, 0]
        data["next", "observation"][ends] = data["observation"][ends + 1]

    report = faulty(change, share_next=share_next)
    (found,) = report.findings
    assert found.text.startswith(f"100.0% of the rows that are {flag} have the first observation of the next episode")
    assert found.rows == tuple(range(19, 99, 20))[flag == "truncated" :: 2]
    assert report.resets[flag] == 1.0
    assert report.resets["done"] == 0.5


def test_an_observation_that_stands_still_is_no_reset():
    def change(data):
        data["observation"].fill_(1.0)
        data["next", "observation"].fill_(1.0)

    report = faulty(change)
    assert set(report.resets.values()) == {0.0}
    assert [finding.text for finding in report.findings] == [
        "observation is the same in all rows",
        "next.observation is the same in all rows",
    ]


def test_one_key_that_goes_on_does_not_hide_another():
    """The goal of an episode stays the same in it, whatever the observation does."""
    data = episodes(100)[:, 0]
    data["goal"] = data["next", "goal"] = (torch.arange(100) // 20).float()[:, None]
    report = faulty(of_next("observation", 12, 77.0), data)
    assert report.broken == 1
    assert report.findings[0].rows == (12,)


def test_dtypes_that_were_hardly_meant():
    data = episodes(100)[:, 0]
    data["pixels"] = torch.arange(100 * 4, dtype=torch.int64).remainder(256).to(torch.uint8).view(100, 2, 2)
    data["next", "pixels"] = torch.rand(100, 2, 2)
    data["action"] = data["action"].double()
    text = str(faulty(lambda data: None, data))
    assert "action is float64, twice the memory of float32" in text
    assert "pixels is uint8 of up to 255, and next.pixels lies in [0, 1]: is one of them scaled" in text


def test_only_the_first_rows_are_named():
    report = faulty(lambda data: data["observation"].fill_(torch.nan))
    assert report.findings[0].rows == (0, 1, 2)
    assert "observation: 100 rows" in report.findings[0].text


def test_other_rows_than_tensordicts():
    buffer = PrioritizedReplayBuffer(10, alpha=0.6, beta=0.4)
    buffer.extend((torch.arange(5), torch.tensor([0.0, 1.0, torch.nan, 0.0, 0.0])))
    report = buffer.check()
    assert [column.key for column in report.columns] == ["0", "1"]
    assert report.findings[0].rows == (2,)
    flat = ReplayBuffer(10)
    flat.extend(torch.arange(5))
    assert flat.check().columns[0].key == "row"
    empty = ReplayBuffer(10)
    empty.extend(TensorDict({"nothing": torch.zeros(5, 0), "number": torch.arange(5.0)}, [5]))
    assert [column.lowest for column in empty.check().columns][1] == 0.0
    assert ReplayBuffer(10).check().findings[0].text == "nothing is stored"
    with pytest.raises(TypeError, match="a ListStorage holds any objects"):
        ReplayBuffer(storage=ListStorage(10)).check()


class TestInspect:
    @pytest.mark.parametrize("share_next", [False, True])
    def test_a_saved_buffer(self, share_next, tmp_path, capsys):
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100, share_next=share_next))
        buffer.extend(episodes(130)[:, 0])
        buffer.save(tmp_path / "saved")
        assert main(["inspect", str(tmp_path / "saved")]) == 0
        assert capsys.readouterr().out.startswith(str(buffer.check()))

    @pytest.mark.parametrize("share_next", [False, True])
    def test_a_run(self, share_next, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr("gpubuf.train.run.draw_curve", lambda *_: None)
        sizes = {"total_steps": 480, "num_envs": 2, "learning_starts": 470, "hidden": (8,), "eval_every": 0}
        train(TrainConfig("torch/Pendulum", eval_episodes=2, share_next=share_next, **sizes), tmp_path)
        capsys.readouterr()
        assert main(["inspect", str(tmp_path)]) == 0
        output = capsys.readouterr().out
        assert output.startswith("480 rows")
        # Two pendulums take turns in storage of one dimension, which uniform draws of single rows don't mind.
        assert ("480 rows of 2 environments" in output) is share_next
        assert ("the rows of 2 environments take turns" in output) is not share_next

    def test_refused(self, tmp_path, capsys):
        buffer = ReplayBuffer(storage=LazyTensorStorage(10, dtypes={"x": torch.bfloat16}))
        buffer.extend(TensorDict({"x": torch.rand(5)}, [5]))
        buffer.save(tmp_path / "saved")
        for folder, text in (
            (tmp_path / "saved", r"print(buffer.check())"),
            (tmp_path / "none", "none can't be looked at"),
        ):
            assert main(["inspect", str(folder)]) == 2
            assert text in capsys.readouterr().err
