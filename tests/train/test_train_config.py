"""Settings of a run: checked when made, the same again from JSON, and which of them a resumed run may change."""

import dataclasses
import json

import pytest

from gpubuf.train.config import CHANGEABLE_ON_RESUME, TrainConfig, UsageError

#: Settings of which there is one or more.
COUNTS = ["total_steps", "num_envs", "batch_size", "buffer_size", "threads", "critics", "eval_episodes", "log_every"]
COUNTS += ["policy_every", "noise_hold"]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("env", "", "must name an environment"),
        *((name, 0, "at least 1, got 0") for name in COUNTS),
        ("batch_size", -3, "at least 1, got -3"),
        *((name, -1, "at least 0") for name in ("seed", "learning_starts", "eval_every", "checkpoint_every")),
        ("seed", 2**64, rf"below 2\*\*64, got {2**64}"),
        ("n_steps", 0, r"in 1 \.\. 64, got 0"),
        ("n_steps", 65, r"in 1 \.\. 64, got 65"),
        ("algo", "sarsa", "one of sac"),
        ("atoms", 51, "sac has no atoms, got 51"),
        ("v_max", 3.0, r"sac has no v_max, got 3\.0"),
        ("learning_starts", 10_000, r"below total_steps \(10000\), got 10000"),
        ("update_ratio", 0.0, "above 0"),
        ("learning_rate", float("nan"), "above 0 and finite, got nan"),
        ("learning_rate", float("inf"), "finite"),
        ("gamma", 1.01, r"in \[0, 1\], got 1.01"),
        ("gamma", float("nan"), "gamma"),
        ("tau", 0.0, r"in \(0, 1\]"),
        ("priority_alpha", 0.6, "means nothing to a run that is not prioritized, got 0.6"),
        ("priority_beta", 0.4, "means nothing to a run that is not prioritized, got 0.4"),
        ("hidden", (), "one or more widths"),
        ("hidden", (64, 0), r"one or more widths above 0, got \(64, 0\)"),
    ],
)
def test_nonsense_is_refused_with_both_sides(name, value, message):
    with pytest.raises(UsageError, match=message) as caught:
        TrainConfig(**{name: value})
    assert name in str(caught.value)


def test_what_only_some_runs_have():
    """A discount of 1 is legal, and priorities have exponents where there are priorities."""
    assert TrainConfig(gamma=1).gamma == 1
    assert (TrainConfig().priority_alpha, TrainConfig(prioritized=True).priority_alpha) == (None, 0.6)
    for name in ("priority_alpha", "priority_beta"):
        with pytest.raises(UsageError, match=rf"{name} must be in \[0, 1\], got 1.5"):
            TrainConfig(prioritized=True, **{name: 1.5})


def test_json_there_and_back(tmp_path):
    config = TrainConfig(hidden=(3, 4), buffer_size=7, gamma=0.5, prioritized=False)
    (tmp_path / "config.json").write_text(config.to_json())
    assert TrainConfig.read(tmp_path) == config
    assert TrainConfig.from_mapping({"gamma": 0}).gamma == 0.0
    assert isinstance(TrainConfig.from_mapping({"gamma": 0}).gamma, float)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no run"),
        ("{", "cannot be read as JSON"),
        ("[1]", "must hold a JSON object, got list"),
        ('{"colour": 1}', r"unknown settings \['colour'\]"),
        ('{"seed": "0"}', "seed must be of type int, got '0'"),
        ('{"seed": true}', "seed must be of type int, got True"),
        ('{"seed": 1.5}', "seed must be of type int"),
        ('{"hidden": 256}', "hidden must be a list of integers"),
        ('{"hidden": [2.5]}', "hidden must be a list of integers"),
        ('{"buffer_size": "all"}', "buffer_size must be of type int or null"),
        ('{"total_steps": "10"}', "total_steps must be of type int or null, got '10'"),
        ('{"update_ratio": true}', "update_ratio must be of type float or null, got True"),
        ('{"cuda_graph": 1}', "cuda_graph must be of type bool or null, got 1"),
        ('{"gamma": 2}', r"config.json: gamma must be in \[0, 1\]"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match=message):
        TrainConfig.read(tmp_path)


def test_omegaconf_structures_the_settings():
    """As Hydra does: defaults that the environment and the algorithm give are filled when the object is made."""
    omegaconf = pytest.importorskip("omegaconf", reason="OmegaConf is not installed")
    config = omegaconf.OmegaConf.structured(TrainConfig)
    given = omegaconf.OmegaConf.from_dotlist(["algo=fastsac", "total_steps=5000", "hidden=[32,32]"])
    merged = omegaconf.OmegaConf.merge(config, given)
    expected = TrainConfig(algo="fastsac", total_steps=5000, hidden=(32, 32))
    assert omegaconf.OmegaConf.to_object(merged) == expected
    assert TrainConfig.from_mapping(omegaconf.OmegaConf.to_container(merged)) == expected
    assert hash(omegaconf.OmegaConf.to_object(merged)) == hash(expected)
    with pytest.raises(omegaconf.ValidationError):
        omegaconf.OmegaConf.merge(config, {"total_steps": "many"})


def test_settings_that_depend_on_the_environment():
    """Gymnasium's stay as they are, however many there are; on the device they grow with their number."""
    assert {TrainConfig(num_envs=n).total_steps for n in (1, 8, 4096)} == {10_000}
    config = TrainConfig(env="torch/Pendulum", num_envs=4096)
    assert (config.total_steps, config.learning_starts, config.log_every) == (4096 * 500, 4096 * 10, 4096 * 25)
    assert (config.update_ratio * 4096, config.eval_every) == (16, 4096 * 50)
    few = TrainConfig(env="torch/Pendulum", num_envs=1, eval_episodes=7)
    assert (few.total_steps, few.update_ratio, few.eval_episodes) == (10_000, 1.0, 7)
    # Stored as what they have become, so that a later version's defaults don't change a run that is resumed.
    assert TrainConfig.from_mapping(json.loads(config.to_json())) == config
    assert json.loads(config.to_json())["total_steps"] == 2_048_000


def test_the_capacity_is_bounded_by_the_steps_and_a_million():
    assert TrainConfig(total_steps=5_000).capacity == 5_000
    assert TrainConfig(total_steps=5_000_000).capacity == 1_000_000
    assert TrainConfig(total_steps=5_000_000, buffer_size=2_000_000).capacity == 2_000_000


@pytest.mark.parametrize("name", sorted(field.name for field in dataclasses.fields(TrainConfig)))
def test_which_settings_a_resumed_run_may_change(name):
    values = json.loads(TrainConfig().to_json())
    other = {"env": "Other-v0", "algo": "redq", "prioritized": True, "device": "cpu", "hidden": (3,)}.get(name)
    if other is None:
        other = 0.5 if isinstance(values[name], float) else 20_000 if name == "total_steps" else 3
    config = TrainConfig(buffer_size=1000)
    assert config.resumed_with({name: getattr(config, name)}) == config
    if name in CHANGEABLE_ON_RESUME:
        assert getattr(config.resumed_with({name: other}), name) == other
    else:
        with pytest.raises(UsageError, match=f"{name} is .* in the run, .* was asked for"):
            config.resumed_with({name: other})


def test_a_longer_run_keeps_the_size_of_its_buffer():
    assert TrainConfig(total_steps=5_000).resumed_with({"total_steps": 9_000}).capacity == 5_000
