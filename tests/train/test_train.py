"""Training in-process, with tiny networks: what a run leaves behind, the same seed twice, and interruption at any step.

None of these runs learns anything worth having; docs/training.md has the runs that do.
"""

import contextlib
import dataclasses
import json
import signal

import gymnasium as gym
import numpy as np
import pytest
import torch

from gpubuf.cli import main
from gpubuf.serialization import load, save
from gpubuf.train import Reporter, TrainConfig, UsageError, load_policy, resume, train
from gpubuf.train.environments import NotFiniteError
from gpubuf.train.metrics import JsonLines, read
from gpubuf.train.run import CHECKPOINT_FILE, _settings_of_pytorch, default_threads, free_folder
from gpubuf.train.trainer import DivergedError, Trainer
from tests.support import train_environments
from tests.support.train_environments import PREFIX

WALK = PREFIX + "Walk-v0"
SIGNALLING = PREFIX + "Signalling-v0"


def tiny(env=WALK, **changes):
    """A run of a second or less."""
    settings = {
        "prioritized": True,
        "total_steps": 120,
        "learning_starts": 40,
        "batch_size": 8,
        "hidden": (8,),
        "eval_every": 50,
        "eval_episodes": 3,
        "log_every": 25,
    }
    return TrainConfig(env=env, **{**settings, **changes})


@pytest.fixture(autouse=True)
def no_signals():
    """No signals are planned, and the process still handles them as it did."""
    train_environments.signals_at.clear()
    train_environments.steps_taken = 0
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    yield
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def metrics(folder):
    return (folder / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("prioritized", [True, False])
def test_a_run_leaves_everything_in_its_folder(tmp_path, capsys, picture, prioritized):
    folder = tmp_path / "deep" / "run"
    result = train(tiny(prioritized=prioritized), folder)
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "metrics.jsonl",
        "learning_curve.png",
        "model.safetensors",
        "checkpoint.safetensors",
        "result.json",
    }
    assert (result.steps, len(result.returns), result.signal) == (120, 3, None)
    assert TrainConfig.read(folder) == tiny(prioritized=prioritized)
    assert (folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")

    records = list(read(folder / "metrics.jsonl"))
    updates = [record for record in records if record["kind"] == "update"]
    assert [(record["step"], record["updates"]) for record in updates] == [(50, 10), (75, 35), (100, 60)]
    assert all(("beta" in record) == prioritized for record in updates)
    assert [record["step"] for record in records if record["kind"] == "evaluation"] == [50, 100]
    episodes = [record for record in records if record["kind"] == "episode"]
    assert episodes
    assert all(0 < record["length"] <= 20 for record in episodes)
    assert records[-1]["kind"] == "final_evaluation"
    assert records[-1]["returns"] == list(result.returns)

    stored = json.loads((folder / "result.json").read_text())
    assert stored["mean_return"] == pytest.approx(result.mean_return)
    assert "evaluation over 3 episodes: mean return" in capsys.readouterr().out


def test_beta_is_annealed_to_one(tmp_path):
    train(tiny(log_every=40), tmp_path)
    betas = {
        record["step"]: record["beta"] for record in read(tmp_path / "metrics.jsonl") if record["kind"] == "update"
    }
    assert betas == {80: pytest.approx(0.8), 120: pytest.approx(1.0)}


@pytest.mark.parametrize("env", [WALK, "torch/Pendulum"])
def test_the_same_seed_gives_the_same_metrics(tmp_path, env):
    for name, seed in (("first", 3), ("again", 3), ("other", 4)):
        train(tiny(env, seed=seed, num_envs=4), tmp_path / name)
    assert metrics(tmp_path / "first") == metrics(tmp_path / "again")
    assert metrics(tmp_path / "first") != metrics(tmp_path / "other")


@pytest.mark.parametrize(
    ("envs", "step", "changes"),
    [
        (1, 7, {}),
        (1, 66, {"prioritized": False, "n_steps": 3}),
        (3, 110, {"n_steps": 3, "share_next": True}),
    ],
)
def test_an_interrupted_run_goes_on_as_if_never_stopped(tmp_path, envs, step, changes):
    config = tiny(SIGNALLING, num_envs=envs, eval_every=0, **changes)
    whole = train(config, tmp_path / "whole")
    train_environments.steps_taken = 0
    train_environments.signals_at[step] = [signal.SIGINT]
    part = train(config, tmp_path / "parts")
    assert part.signal == signal.SIGINT
    assert part.steps == -(-step // envs) * envs
    assert part.returns == ()
    assert metrics(tmp_path / "whole").startswith(metrics(tmp_path / "parts"))
    rest = resume(tmp_path / "parts")
    assert (rest.steps, rest.returns) == (whole.steps, whole.returns)
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    ends = [load(tmp_path / name / "model.safetensors")["actor"] for name in ("whole", "parts")]
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


def test_a_run_is_resumed_from_its_last_checkpoint_when_it_was_killed(tmp_path):
    """The metrics written after the checkpoint are written again, not twice."""
    config = tiny(checkpoint_every=50)
    train(config, tmp_path / "whole")

    class KilledError(KeyboardInterrupt):
        """A second Ctrl-C: it saves nothing."""

    class Killer(Reporter):
        def update(self, status):
            if status.step == 90:
                raise KilledError

    with pytest.raises(KilledError):
        train(config, tmp_path / "killed", reporter=Killer())
    assert load(tmp_path / "killed" / CHECKPOINT_FILE)["trainer"]["step"] == 50
    resume(tmp_path / "killed")
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")


def test_sigterm_saves_as_well(tmp_path, capsys):
    """The command exits with 128 and the signal's number."""
    train_environments.signals_at[60] = [signal.SIGTERM]
    settings = "--total-steps 120 --learning-starts 40 --batch-size 8 --hidden 8 --eval-every 0"
    assert main(["train", "--env", SIGNALLING, *settings.split(), "--out", str(tmp_path), "--quiet"]) == 143
    assert load(tmp_path / CHECKPOINT_FILE)["trainer"]["step"] == 60
    assert f"gpubuf train --resume {tmp_path}" in capsys.readouterr().out


def test_an_interrupted_evaluation_is_done_when_the_run_is_resumed(tmp_path):
    config = tiny(SIGNALLING, eval_every=0)
    whole = train(config, tmp_path / "whole")
    train_environments.steps_taken = 0
    train_environments.signals_at[125] = [signal.SIGINT]
    part = train(config, tmp_path / "parts")
    assert (part.signal, part.steps, part.returns) == (signal.SIGINT, 120, ())
    assert not (tmp_path / "parts" / "result.json").exists()
    assert resume(tmp_path / "parts").returns == whole.returns
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")


def test_environments_that_cannot_be_played_again_are_announced(tmp_path, capsys):
    train(tiny(PREFIX + "Unrepeatable-v0"), tmp_path)
    result = resume(tmp_path, {"total_steps": 150})
    assert result.steps == 150
    assert "could not be played again" in capsys.readouterr().out


def test_a_complete_run_goes_on_with_more_steps_only(tmp_path):
    train(tiny(), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for changes, message in [
        ({}, "complete, with 120 steps"),
        ({"seed": 1}, "seed is 0 in the run"),
        ({"device": "cuda:7"}, "no device cuda:7"),
    ]:
        with pytest.raises(UsageError, match=message):
            resume(tmp_path, changes)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert resume(tmp_path / CHECKPOINT_FILE, {"total_steps": 160, "eval_episodes": 2}).steps == 160
    config = TrainConfig.read(tmp_path)
    assert (config.total_steps, config.capacity, config.eval_episodes) == (160, 120, 2)
    final = [record for record in read(tmp_path / "metrics.jsonl") if record["kind"] == "final_evaluation"]
    assert [record["step"] for record in final] == [160]


def test_damaged_checkpoints_are_refused_and_change_nothing(tmp_path):
    train(tiny(), tmp_path)
    good = (tmp_path / CHECKPOINT_FILE).read_bytes()
    other = {"trainer": {"step": 1}, "lines": {"metrics.jsonl": 0}, "seconds": 1.0}
    save(tmp_path / "other", other)
    for content, message in [
        (good[: len(good) // 2], "damaged"),
        (b"", "not a checkpoint"),
        ((tmp_path / "other").read_bytes(), "does not fit this run"),
        ((tmp_path / "model.safetensors").read_bytes(), "does not fit this run"),
    ]:
        (tmp_path / CHECKPOINT_FILE).write_bytes(content)
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        with pytest.raises(UsageError, match=message):
            resume(tmp_path, {"total_steps": 150})
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / CHECKPOINT_FILE).unlink()
    with pytest.raises(UsageError, match="before its first checkpoint"):
        resume(tmp_path)


def test_a_folder_that_holds_a_run_is_only_overwritten_when_told_to(tmp_path):
    train(tiny(), tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="already holds a run"):
        train(tiny(seed=1), tmp_path)
    train(tiny(seed=1), tmp_path, overwrite=True)
    assert TrainConfig.read(tmp_path).seed == 1
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_nothing_is_written_when_the_run_cannot_begin(tmp_path):
    for change, message in [
        ({"env": "CartPole-v1"}, "discrete"),
        ({"env": "Nowhere-v1"}, "unknown environment"),
        ({"device": "cuda:7"}, "no device cuda:7: PyTorch .* sees 0"),
        ({"device": "abacus"}, "device must be auto, cpu, cuda"),
        ({"device": "meta"}, "device must be auto, cpu, cuda"),
    ]:
        with pytest.raises(UsageError, match=message):
            train(tiny(**change), tmp_path / "run")
        assert not (tmp_path / "run").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write to"):
        train(tiny(), tmp_path / "file" / "run")


@pytest.mark.parametrize(
    ("prioritized", "message"),
    [(True, " by step 42: priorities must be finite"), (False, ": the policy's actions for")],
)
def test_losses_that_are_no_numbers_end_the_run(tmp_path, prioritized, message):
    """At once where they would become priorities, or at the next step, before an environment gets such an action."""
    with pytest.raises(NotFiniteError, match=f"training diverged{message}"):
        train(tiny(PREFIX + "Infinite-v0", prioritized=prioritized), tmp_path)


@pytest.mark.parametrize(("what", "key"), [("reward", "reward"), ("large", "reward"), ("observation", "observation")])
def test_what_is_no_number_in_an_environment_ends_the_run_before_it_is_stored(tmp_path, what, key):
    """Case 87. The text names the environment, not the policy, and the run goes on from the step before."""
    name = f"{PREFIX}Broken-{what}-v0"
    with pytest.raises(NotFiniteError, match=f"the {key} of {name} is NaN or infinite, as float32: .* in copy 0 of 1"):
        train(tiny(name, eval_every=0), tmp_path)
    state = load(tmp_path / CHECKPOINT_FILE)["trainer"]
    assert state["step"] == 69
    assert all(tensor.isfinite().all() for tensor in state["agent"]["loss"].values() if tensor.is_floating_point())
    # The environment has recovered.
    train_environments.steps_taken = 100
    assert resume(tmp_path).returns


@pytest.mark.parametrize(("envs", "changes"), [(1, {}), (3, {"n_steps": 3, "share_next": True})])
@pytest.mark.parametrize("what", ["error", "reward"])
def test_a_run_that_its_environment_ends_goes_on_as_if_never_stopped(tmp_path, capsys, what, envs, changes):
    """Case 87. Also where the environments before it had taken the step that failed, or begun another episode in it."""
    config = tiny(f"{PREFIX}Broken-{what}-v0", num_envs=envs, eval_every=0, **changes)
    train_environments.steps_taken = 100
    train(config, tmp_path / "whole")
    train_environments.steps_taken = 0
    with pytest.raises((OSError, NotFiniteError)):
        train(config, tmp_path / "parts")
    assert f"an error after 69 steps; saved, go on with\n  gpubuf train --resume {tmp_path}" in capsys.readouterr().out
    resume(tmp_path / "parts")
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")


def test_an_error_of_a_reporter_saves_as_well(tmp_path):
    """Case 87. Whatever ends a run, but for a second Ctrl-C."""

    class Full(Reporter):
        def update(self, status):
            if status.step == 90:
                raise OSError("no space left")

        def message(self, text):
            if "an error after" in text:
                raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        train(tiny(eval_every=0), tmp_path / "parts", reporter=Full())
    assert load(tmp_path / "parts" / CHECKPOINT_FILE)["trainer"]["step"] == 90
    resume(tmp_path / "parts")
    train(tiny(eval_every=0), tmp_path / "whole")
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")


def test_networks_that_are_no_numbers_are_not_saved():
    trainer = Trainer(tiny(), torch.device("cpu"), lambda record: None)
    trainer._sums[0] = float("nan")
    with pytest.raises(DivergedError, match="training diverged by step 0"):
        trainer.state_dict()


def test_the_stored_transitions_are_those_of_the_environment():
    """CASES 22: a truncated row's next observation is the final one, and truncated is not terminated."""
    config = tiny(PREFIX + "Counting-v0", num_envs=2, total_steps=30, learning_starts=20, prioritized=False)
    trainer = Trainer(config, torch.device("cpu"), lambda record: None)
    for _ in range(12):
        trainer.advance()
    rows = trainer.buffer[:]
    observation, following = rows["observation"], rows["next", "observation"]
    assert rows.shape == (24,)
    # Every row stays in its episode and goes one step further, also the third one, which ends it.
    assert torch.equal(following, observation + torch.tensor([0.0, 1.0]))
    over = following[:, 1:] == 3
    odd = following[:, :1] % 2 == 1
    assert torch.equal(rows["next", "done"], over)
    assert torch.equal(rows["next", "terminated"], over & odd)
    assert torch.equal(rows["next", "truncated"], over & ~odd)
    assert torch.equal(rows["next", "reward"], following[:, 1:])
    assert rows["action"].abs().max() <= 1
    trainer.close()


@pytest.mark.parametrize(
    ("envs", "prioritized", "share_next"), [(1, True, False), (1, False, True), (4, False, False), (4, True, True)]
)
def test_batches_are_made_of_the_steps_of_one_environment(envs, prioritized, share_next):
    """Several environments don't take turns: each has steps of its own."""
    changes = {"num_envs": envs, "prioritized": prioritized, "share_next": share_next}
    config = tiny(**changes, n_steps=3, gamma=0.9, total_steps=200, eval_every=0)
    trainer = Trainer(config, torch.device("cpu"), lambda record: None)
    for _ in range(120 // envs):
        trainer.advance()
    storage = trainer.buffer.storage
    assert storage.shape == ((200,) if envs == 1 else (50, 4))
    rows = storage[:]
    steps = 120 // envs
    reward, done, coming = (rows["next", key].view(steps, envs, -1) for key in ("reward", "done", "observation"))
    batch = trainer.buffer.sample(batches=8).reshape(-1)
    index = batch["index"].reshape(64, -1)
    for i in range(64):
        t, e = index[i].tolist() if envs > 1 else (int(index[i]), 0)
        total, last = torch.zeros(()), t
        for k in range(min(3, steps - t)):
            total, last = total + 0.9**k * reward[t + k, e, 0], t + k
            if done[t + k, e]:
                break
        torch.testing.assert_close(batch["next", "reward"][i, 0], total)
        assert torch.equal(batch["next", "observation"][i], coming[last, e])
        assert batch["steps_to_next_obs"][i].tolist() == [last - t + 1]


def test_observations_that_are_stored_once_change_no_number(tmp_path):
    """The same metrics, of fewer bytes."""
    for share_next in (False, True):
        train(tiny(num_envs=2, n_steps=3, share_next=share_next), tmp_path / str(share_next))
    assert metrics(tmp_path / "False") == metrics(tmp_path / "True")


def test_a_mujoco_environment(tmp_path, monkeypatch):
    """Observations in float64, six actions; MuJoCo writes a log into the current folder."""
    pytest.importorskip("mujoco")
    pytest.importorskip("imageio")
    monkeypatch.chdir(tmp_path)
    config = tiny("HalfCheetah-v5", eval_every=0, eval_episodes=1)
    whole = train(config, tmp_path / "whole")
    assert np.isfinite(whole.mean_return)
    train(dataclasses.replace(config, total_steps=80), tmp_path / "parts")
    assert resume(tmp_path / "parts", {"total_steps": 120}).steps == 120


@pytest.mark.parametrize(("ratio", "envs", "updates"), [(0.5, 1, 40), (2.0, 4, 160)])
def test_the_number_of_updates_follows_the_ratio(tmp_path, ratio, envs, updates):
    train(tiny(update_ratio=ratio, num_envs=envs, log_every=120, eval_every=0), tmp_path)
    assert [r["updates"] for r in read(tmp_path / "metrics.jsonl") if r["kind"] == "update"] == [updates]


def test_the_saved_model_acts_as_the_evaluated_one(tmp_path):
    result = train(tiny("Pendulum-v1", eval_episodes=1), tmp_path)
    policy = load_policy(tmp_path)
    # The final evaluation's environment: the third stream of the seed, its first number.
    env = gym.make("Pendulum-v1")
    observation, _ = env.reset(seed=int(np.random.SeedSequence((0, 2)).generate_state(1)[0]))
    total, over = 0.0, False
    while not over:
        observation, reward, terminated, truncated, _ = env.step(policy(observation))
        total, over = total + reward, terminated or truncated
    assert total == pytest.approx(result.mean_return, rel=1e-4)


def test_a_file_without_a_policy_is_refused(tmp_path):
    save(tmp_path / "other", {"actor": {}})
    with pytest.raises(ValueError, match="does not hold a policy"):
        load_policy(tmp_path / "other")


def test_small_networks_get_one_thread():
    assert default_threads(TrainConfig()) == 1
    assert default_threads(TrainConfig(hidden=(1024, 1024), batch_size=4096)) >= 1


def test_denormal_numbers_are_flushed_while_a_run_lasts():
    smallest = torch.tensor(5e-324, dtype=torch.float64)
    with _settings_of_pytorch(TrainConfig(), torch.device("cpu")):
        assert smallest * 1 == 0
    assert smallest * 1 > 0


@pytest.mark.parametrize(("device", "within"), [("cuda", "high"), ("cpu", "highest")])
def test_tf32_lasts_as_long_as_a_run(device, within):
    """Also where it fails. On a CPU it changes nothing."""
    before = torch.get_float32_matmul_precision()
    assert before == "highest"
    with contextlib.suppress(KeyboardInterrupt), _settings_of_pytorch(TrainConfig(tf32=True), torch.device(device)):
        assert torch.get_float32_matmul_precision() == within
        raise KeyboardInterrupt
    assert torch.get_float32_matmul_precision() == before
    with _settings_of_pytorch(TrainConfig(), torch.device(device)):
        assert torch.get_float32_matmul_precision() == before


def test_default_folders_are_new(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = TrainConfig(env="a/b:C-v1", prioritized=False, seed=2)
    first = free_folder(config)
    assert first.as_posix() == "runs/a-b-C-v1-uniform-seed2"
    first.mkdir(parents=True)
    assert free_folder(config) == first
    (first / "config.json").write_text("{}")
    assert free_folder(config).as_posix() == "runs/a-b-C-v1-uniform-seed2-2"


def test_json_lines_keep_what_they_are_told_to(tmp_path):
    path = tmp_path / "lines"
    lines = JsonLines(path)
    for i in range(4):
        lines.write({"i": i})
    lines.close()
    lines = JsonLines(path, keep=2)
    lines.write({"i": 9})
    assert lines.lines == 3
    lines.close()
    assert [record["i"] for record in read(path)] == [0, 1, 9]
    with pytest.raises(ValueError, match="3 lines, the checkpoint was taken after 7"):
        JsonLines(path, keep=7)
    assert len(list(read(path))) == 3
