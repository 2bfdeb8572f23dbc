"""Training on transitions of several steps, and on observations that are stored once."""

from __future__ import annotations

import pytest
import torch

from gpubuf.train import TrainConfig, UsageError, train
from gpubuf.train.trainer import Trainer
from tests.support.train_environments import PREFIX

CPU = torch.device("cpu")
WALK = PREFIX + "Walk-v0"


def tiny(**changes):
    settings = {
        "env": WALK,
        "total_steps": 120,
        "learning_starts": 40,
        "batch_size": 8,
        "hidden": (8,),
        "eval_every": 0,
        "eval_episodes": 3,
        "log_every": 25,
        "n_steps": 3,
    }
    return TrainConfig(**{**settings, **changes})


def metrics(folder):
    return (folder / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("envs", "prioritized", "share_next"), [(1, True, False), (1, False, True), (4, False, False), (4, True, True)]
)
def test_batches_are_made_of_the_steps_of_one_environment(envs, prioritized, share_next):
    """Several environments don't take turns: each has steps of its own."""
    config = tiny(num_envs=envs, prioritized=prioritized, share_next=share_next, gamma=0.9, total_steps=200)
    trainer = Trainer(config, CPU, lambda record: None)
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
        train(tiny(num_envs=2, share_next=share_next), tmp_path / str(share_next))
    assert metrics(tmp_path / "False") == metrics(tmp_path / "True")


@pytest.mark.parametrize("n_steps", [0, 65])
def test_nonsense_is_refused(n_steps):
    with pytest.raises(UsageError, match=rf"n_steps must be in 1 \.\. 64, got {n_steps}"):
        tiny(n_steps=n_steps)
