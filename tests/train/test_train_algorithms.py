"""Every algorithm of ``gpubuf train``: it trains, resumes exactly, and leaves a policy that says whose it is."""

import dataclasses
import itertools
import json
import math
import signal
import statistics

import pytest
import torch
from tensordict import TensorDict
from torch._subclasses.fake_tensor import FakeTensorMode

from gpubuf.cli import main
from gpubuf.objectives import SACLoss
from gpubuf.objectives.explicit import SACUpdate
from gpubuf.objectives.fused import FusedSACUpdate
from gpubuf.serialization import load
from gpubuf.train import Reporter, TrainConfig, UsageError, algorithms, load_policy, resume, train
from gpubuf.train.algorithms import StickyNoise
from gpubuf.train.config import ALGORITHM_DEFAULTS
from gpubuf.train.torch_environments import Pendulum
from gpubuf.train.trainer import Trainer
from tests.contracts import first_quick
from tests.support.fake_cuda import DataDependentOutputException
from tests.support.graph_recorder import RecordedCuda
from tests.support.sac_setup import total
from tests.support.train_environments import PREFIX
from tests.support.train_runs import run, state_of

CPU = torch.device("cpu")
ALGORITHMS = sorted(name for name, each in algorithms.ALGORITHMS.items() if not each.actions.discrete)
#: Every algorithm, and every way to draw.
CONFIGURATIONS = [
    *[(algo, {}) for algo in ALGORITHMS],
    ("sac", {"prioritized": True, "n_steps": 3}),
    ("sac", {"share_next": True}),
]


def tiny(algo, **changes):
    """Eight pendulums, 25 steps each, and one update for each pendulum's step from the tenth on."""
    settings = {
        "env": "torch/Pendulum",
        "num_envs": 8,
        "total_steps": 8 * 25,
        "learning_starts": 8 * 10,
        "update_ratio": 1.0,
        "batch_size": 8,
        "hidden": (8, 8),
        "eval_every": 0,
        "eval_episodes": 2,
        "log_every": 8 * 5,
    }
    if ALGORITHM_DEFAULTS[algo]["atoms"] is not None:
        settings["atoms"] = 11
    return TrainConfig(algo=algo, **{**settings, **changes})


@pytest.fixture(autouse=True)
def short_episodes(monkeypatch):
    monkeypatch.setattr(Pendulum, "time_limit", 12)


def metrics(folder):
    return (folder / "metrics.jsonl").read_bytes()


class Interrupting(Reporter):
    """Interrupts a run at a step."""

    def __init__(self, at):
        self.at = at

    def update(self, status):
        if status.step == self.at:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("configuration", first_quick(CONFIGURATIONS[::-1], 3), ids=str)
def test_an_interrupted_run_goes_on_as_if_never_stopped(tmp_path, configuration):
    """And the file of the model says whose policy it is, and acts as the one in memory does."""
    algo, changes = configuration
    config = tiny(algo, **changes)
    whole = train(config, tmp_path / "whole")
    assert train(config, tmp_path / "parts", reporter=Interrupting(8 * 17)).steps == 8 * 17
    assert resume(tmp_path / "parts").returns == whole.returns
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    updates = [json.loads(line) for line in metrics(tmp_path / "whole").splitlines()]
    updates = [record for record in updates if record["kind"] == "update"]
    assert updates[-1]["updates"] == 8 * 15
    assert all(math.isfinite(updates[-1][name]) for name in algorithms.ALGORITHMS[algo].losses)
    assert TrainConfig.read(tmp_path / "whole") == config
    assert json.loads((tmp_path / "whole" / "result.json").read_text())["algo"] == algo
    assert load(tmp_path / "whole" / "model.safetensors")["algo"] == algo
    observation = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    best = [load_policy(tmp_path / name)(observation) for name in ("whole", "parts")]
    assert torch.equal(*best)
    assert best[0].abs().max() <= 2


def _batch(observation):
    return TensorDict({"observation": observation}, observation.shape[:1])


def test_td3_moves_policy_and_targets_together_and_explores_near_its_actions():
    trainer = Trainer(tiny("td3", num_envs=2000, update_ratio=0.001), CPU, lambda record: None)
    agent = trainer.agent
    for _ in range(12):
        trainer.advance()
    batch = trainer.buffer.sample()

    def parts():
        state = agent.loss.state_dict()
        of = {name: [x.clone() for key, x in state.items() if key.startswith(name)] for name in NAMES}
        assert all(of.values())
        return of

    before = parts()
    values = trainer._learner(batch, policy=False)
    assert (values["loss_qvalue"] > 0, set(values.keys())) == (True, {"loss_qvalue"})
    critics = parts()
    trainer._learner(batch)
    after = parts()
    moved = [
        [not all(map(torch.equal, x[name], y[name])) for name in NAMES]
        for x, y in ((before, critics), (critics, after))
    ]
    assert moved == [[False, True, False, False], [True] * 4]

    observation = trainer._observation
    away = agent.explore(observation) - agent.act(observation)
    assert agent.explore(observation).abs().max() <= 1
    assert 0.08 < away[agent.act(observation).abs() < 0.5].std() < 0.12


NAMES = ("actor_network_params", "qvalue_network_params", "target_actor_network", "target_qvalue_network")


def test_discrete_actions_are_numbers_of_the_environment(tmp_path):
    """One-hot in the buffer; exploration draws by the logits, and what is best has the largest."""
    trainer = Trainer(tiny("discrete-sac", env=PREFIX + "Choices-v0", num_envs=4), CPU, lambda record: None)
    for _ in range(40):
        trainer.advance()
    actions = trainer.buffer[:]["action"]
    assert set(actions.flatten().tolist()) == {0.0, 1.0}
    assert (actions.sum(-1) == 1).all()
    # The observation after a step says which action was taken.
    assert torch.equal(trainer.buffer[:]["next", "observation"][:, 0], actions.argmax(-1).float() + 7)
    agent, observation = trainer.agent, torch.randn(1, 2).expand(20000, 2)
    drawn = agent.explore(observation).mean(0)
    probabilities = agent._output(observation[:1])[0].softmax(-1)
    torch.testing.assert_close(drawn, probabilities, atol=0.02, rtol=0)
    assert agent.act(observation[:1])[0].argmax() == probabilities.argmax()
    trainer.save_model(tmp_path / "model.safetensors")
    assert load_policy(tmp_path)(observation[0].numpy()) == 7 + int(probabilities.argmax())


def test_discrete_sac_is_resumed_exactly(tmp_path):
    config = tiny("discrete-sac", env=PREFIX + "Choices-v0", prioritized=True)
    whole = train(config, tmp_path / "whole")
    train(config, tmp_path / "parts", reporter=Interrupting(8 * 17))
    assert resume(tmp_path / "parts").returns == whole.returns
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")


@pytest.mark.parametrize(
    ("algo", "env", "message"),
    [
        (
            "sac",
            "Choices-v0",
            "Choices-v0 has discrete actions, and sac learns continuous ones: say --algo discrete-sac or dqn$",
        ),
        (
            "discrete-sac",
            "Walk-v0",
            "Walk-v0 has continuous actions, and .* discrete ones: say --algo sac or fastsac or",
        ),
    ],
)
def test_an_algorithm_for_other_actions_names_one_that_fits(algo, env, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        train(tiny(algo, env=PREFIX + env), tmp_path)


def test_options_of_the_command(tmp_path, capsys):
    sizes = "--total-steps 24 --num-envs 4 --learning-starts 16 --hidden 8 --batch-size 8 --eval-episodes 1"
    chosen = "--env torch/Pendulum --noise-hold 5 --scale-rewards --policy-every 3"
    assert main(["train", *chosen.split(), *sizes.split(), "--out", str(tmp_path / "run"), "--quiet"]) == 0
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert {"algo": "sac", "noise_hold": 5, "scale_rewards": True, "policy_every": 3}.items() <= stored.items()
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    options = ("--algo", "--policy-every", "--atoms", "--v-min", "--v-max", "--no-scale-rewards", "--noise-hold")
    assert [word for word in (*ALGORITHMS, *options) if word not in text] == []


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_bfloat16(algo, monkeypatch):
    """The layers of an update compute in it, and nothing else: losses, parameters and moments are float32."""
    seen = []
    layer = torch.nn.functional.linear

    def linear(x, *parameters):
        out = layer(x, *parameters)
        seen.append((torch.is_grad_enabled() and out.requires_grad, out.dtype))
        return out

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    trainer = Trainer(tiny(algo, bfloat16=True), CPU, lambda record: None)
    for _ in range(12):
        trainer.advance()
    assert {dtype for learns, dtype in seen if learns} == {torch.bfloat16}
    assert torch.float32 in {dtype for _, dtype in seen}
    assert trainer._sums.isfinite().all()
    # By an update of the policy too, which some algorithms have in few.
    with torch.autocast("cpu", torch.bfloat16):
        total(trainer.agent.losses(trainer.buffer.sample())).backward()
    assert [name for name, each in trainer.agent.loss.named_parameters() if each.grad is None] == []
    assert {each.dtype for each in state_of(trainer).values() if each.is_floating_point()} <= {
        torch.float32,
        torch.float64,
    }


@pytest.mark.parametrize("apart", [False, True])
def test_rewards_are_scaled_by_the_returns_of_each_environment(apart):
    """Of a storage in which environments take turns, and of one with a column for each."""
    config = tiny("sac", scale_rewards=True, share_next=apart, gamma=0.9)
    trainer = Trainer(config, CPU, lambda record: None)
    for _ in range(10):
        trainer.advance()
    rewards = trainer.buffer.storage[:]["next", "reward"].reshape(10, 8).double()
    returns = []
    for reward in rewards:
        returns.append(reward + (0.9 * returns[-1] if returns else 0.0))
    all_returns = torch.stack(returns)
    scale = max(float(all_returns.var(correction=0).sqrt()), float(all_returns.abs().max()) / 5.0)
    batch = trainer.buffer.sample(batches=8).reshape(-1)
    stored = rewards.reshape(-1)[batch["index"].reshape(64, -1) @ torch.tensor([8, 1] if apart else [1])]
    torch.testing.assert_close(batch["next", "reward"].reshape(-1).double(), stored / scale, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("algo", "changes"), CONFIGURATIONS)
def test_graphs_do_what_the_trainer_does(algo, changes, monkeypatch):
    """CASES 33: steps, and updates with and without the policy, replayed as graphs: the same run, bit for bit."""
    machine = RecordedCuda().install(monkeypatch)
    config = tiny(algo, policy_every=2, update_ratio=0.5, noise_hold=4, scale_rewards=True, log_every=8 * 2, **changes)
    eager, expected = run(dataclasses.replace(config, cuda_graph=False))
    assert not machine.log
    captured, records = run(config, machine=machine)
    assert records == expected
    found, due = state_of(captured), state_of(eager)
    assert found.keys() == due.keys()
    assert not [name for name in due if not torch.equal(found[name], due[name])]
    # A graph for the steps, and one for each kind of update: 10 steps by policy, 20 updates of each kind, 3 warm-up.
    assert sum(entry.startswith("capture") for entry in machine.log) == 3
    assert machine.log.count("replay") == (10 - 3) + 2 * (20 - 3)


# On a CPU the first rows of windows are read, to see whether they continue: so none with several steps here. Losses and
# norms read nothing by test_no_host_sync of their contract.
@pytest.mark.parametrize("algo", first_quick(sorted(ALGORITHMS, key=lambda algo: algo != "sac")))
def test_an_iteration_reads_no_value(algo):
    """Act, step, write, draw, both kinds of updates, priorities: on fake tensors, whose values nobody can read."""
    with FakeTensorMode():
        trainer = Trainer(
            tiny(algo, policy_every=2, noise_hold=4, log_every=8 * 15, cuda_graph=False), CPU, lambda record: None
        )
        for _ in range(14):
            trainer.advance()
        assert trainer._updates == 8 * 4
        with pytest.raises(DataDependentOutputException):
            trainer.advance()


@pytest.mark.slow
@pytest.mark.parametrize("update", [FusedSACUpdate, SACUpdate])
def test_sac_swings_the_pendulum_up(update, monkeypatch):
    """By the update of a GPU, here in plain PyTorch, as by that of a CPU."""
    monkeypatch.setattr("gpubuf.learner.KNOWN", {SACLoss: update})
    config = TrainConfig(
        env="torch/Pendulum", hidden=(64, 64), num_envs=8, total_steps=12_000, batch_size=128, update_ratio=0.25,
        learning_rate=1e-3, eval_every=0, log_every=1_000,
    )  # fmt: skip
    trainer = Trainer(config, CPU, lambda record: None)
    while trainer.step < config.total_steps:
        trainer.advance()
    assert type(trainer._learner._explicit) is update
    returns = trainer._evaluation(64, 7).run()
    assert len(returns) == 64
    assert statistics.fmean(returns) > -250


@pytest.mark.parametrize(
    "algo",
    [
        # Compiling flashsac's takes a minute and more, and its loss is that of fastsac.
        pytest.param(algo, marks=pytest.mark.nightly if algo == "flashsac" else pytest.mark.slow)
        for algo in ALGORITHMS
        if algo != "sac"
    ],
)
def test_compiled_updates_are_the_same(algo, monkeypatch):
    """Both kinds of updates become one graph each, by the tracer and AOTAutograd, and compute what they did."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile_(f, backend="aot_eager", **options))
    torch._dynamo.reset()
    sums = [
        run(tiny(algo, policy_every=2, log_every=8 * 100, compile=compiled), iterations=12)[0]._sums
        for compiled in (False, True)
    ]
    assert sums[1] == pytest.approx(sums[0], rel=1e-4)


def test_the_policy_learns_at_some_updates_only():
    config = tiny("sac", policy_every=3, num_envs=1, total_steps=100, learning_starts=10, log_every=1, gamma=0.9)
    records = []
    trainer = Trainer(config, CPU, records.append)
    moved = []
    for _ in range(10 + 6):
        before = [p.detach().clone() for p in trainer.agent.parameters()]
        trainer.advance()
        critics = {id(p) for p in trainer.agent.loss.qvalue_network_params.parameters()}
        changed = [bool((a != b).any()) for a, b in zip(before, trainer.agent.parameters(), strict=True)]
        kinds = [id(p) in critics for p in trainer.agent.parameters()]
        moved.append(
            [any(c for c, kind in zip(changed, kinds, strict=True) if kind is which) for which in (True, False)]
        )
    assert moved == [[False, False]] * 10 + [[True, i % 3 == 0] for i in range(1, 7)]
    updates = [set(record) & {"loss_qvalue", "loss_actor"} for record in records if record["kind"] == "update"]
    assert updates == [{"loss_qvalue", "loss_actor"} if i % 3 == 0 else {"loss_qvalue"} for i in range(1, 7)]


# Noise that is held


def test_noise_is_held_for_a_zeta_distributed_number_of_steps():
    torch.manual_seed(0)
    noise = StickyNoise(2000, 2, 4, CPU)
    drawn = torch.stack([noise.draw().clone() for _ in range(60)])
    changed = (drawn[1:] != drawn[:-1]).any(-1)
    lengths = []
    for changes in changed.T:
        at = [0, *(changes.nonzero()[:, 0] + 1).tolist()]
        lengths += [b - a for a, b in itertools.pairwise(at)][:10]
    counts = torch.bincount(torch.tensor(lengths), minlength=5).double()
    assert counts[0] == 0
    assert len(counts) == 5
    weights = torch.tensor([1, 1 / 4, 1 / 9, 1 / 16], dtype=torch.float64)
    expected = weights / weights.sum() * counts.sum()
    # Chi-square with 3 degrees of freedom, at 1 in 10^4.
    assert float(((counts[1:] - expected) ** 2 / expected).sum()) < 21.1
    assert abs(float(drawn[0].mean())) < 0.06
    assert float(drawn[0].std()) == pytest.approx(1.0, abs=0.05)


def test_sticky_noise_is_that_of_the_policy_s_distribution():
    """The action of a held step is tanh(mean + deviation * noise), and the noise goes on after a restart."""
    config = tiny("sac", noise_hold=16)
    torch.manual_seed(0)
    agent = Trainer(config, CPU, lambda record: None).agent
    observation = torch.randn(8, 3)
    seen = [agent.explore(observation) for _ in range(3)]
    policy = agent.actor.get_dist(_batch(observation))
    expected = torch.tanh(policy.loc + policy.scale * agent._noise.noise)
    torch.testing.assert_close(seen[-1], expected.detach())
    other = Trainer(dataclasses.replace(config, seed=5), CPU, lambda record: None).agent
    other.load_state_dict(agent.state_dict())
    torch.manual_seed(3)
    following = [agent.explore(observation) for _ in range(4)]
    torch.manual_seed(3)
    assert all(torch.equal(other.explore(observation), action) for action in following)


def test_observations_are_normalised(tmp_path):
    """Batches, actions, evaluations and the saved policy see the statistics of all stored rows; a resumed run too."""
    config = tiny("fastsac")
    assert config.normalize_observations
    assert not any(tiny(algo).normalize_observations for algo in ALGORITHMS if algo != "fastsac")
    trainer = Trainer(config, CPU, lambda record: None)
    for _ in range(12):
        trainer.advance()
    stored = trainer.buffer.storage[:]["observation"].double()
    mean, deviation = stored.mean(0), (stored.var(0, correction=0) + 1e-4).sqrt()
    batch = trainer.buffer.sample(batches=8).reshape(-1)
    raw = trainer.buffer.storage[batch["index"]]
    for key in ("observation", ("next", "observation")):
        torch.testing.assert_close(batch[key].double(), (raw[key].double() - mean) / deviation, rtol=1e-4, atol=1e-5)
    observation = torch.randn(5, 3) * torch.tensor([1.0, 1.0, 8.0])
    normal = ((observation - mean) / deviation).float()
    with torch.no_grad():
        due = trainer.agent.actor.get_dist(TensorDict({"observation": normal}, [5])).deterministic_sample
    action = trainer.agent.act(observation)
    torch.testing.assert_close(action, due, rtol=1e-4, atol=1e-5)

    trainer.save_model(tmp_path / "model.safetensors")
    policy = load_policy(tmp_path / "model.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(policy(observation), torch.lerp(policy.low, policy.high, (action + 1) / 2))

    resumed = Trainer(config, CPU, lambda record: None)
    resumed.load_state_dict(trainer.state_dict())
    assert torch.equal(resumed.agent.act(observation), action)
