"""The off-policy algorithms of rsl_rl: in its runner where it is installed (make rsl_rl), else in a stand-in's."""

import copy
import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from gpubuf.integrations import rsl_rl as ours
from tests.support import rsl_rl_stand_in

EXAMPLES = Path(__file__).parents[2] / "examples"
ALGORITHMS = ("SAC", "FastSAC", "FlashSAC", "FastTD3")
SMALL = {"hidden_dims": (8, 8)}


@pytest.fixture(scope="module")
def theirs() -> Iterator[bool]:
    """Whether it is rsl_rl itself."""
    with rsl_rl_stand_in.installed() as real:
        yield real


@pytest.fixture(scope="module")
def example(theirs: bool) -> Iterator[Any]:
    """``examples/rsl_rl_pendulum.py``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("rsl_rl_pendulum")
    sys.modules.pop("rsl_rl_pendulum")


class Counting:
    """Environments whose observations count their steps; their episodes end by the time limit, or fail."""

    num_actions, max_episode_length, device = 2, 5, "cpu"

    def __init__(self, num_envs: int = 3, *, last: bool = True, limits: bool = True) -> None:
        self.num_envs, self.cfg, self._last, self._limits = num_envs, {}, last, limits
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.int64)
        self.total = 0

    def get_observations(self) -> TensorDict:
        return self._seen(self.episode_length_buf)

    def _seen(self, lengths: torch.Tensor) -> TensorDict:
        numbers = torch.stack([torch.full_like(lengths, self.total), lengths], 1).float()
        return TensorDict({"policy": numbers, "privileged": 10 * numbers[:, :1]}, [self.num_envs])

    def step(self, actions: torch.Tensor) -> tuple[TensorDict, torch.Tensor, torch.Tensor, dict[str, Any]]:
        assert actions.shape == (self.num_envs, self.num_actions)
        self.total += 1
        self.episode_length_buf += 1
        lengths = self.episode_length_buf.clone()
        time_outs = lengths >= self.max_episode_length
        fails = (lengths == 3) & (torch.arange(self.num_envs) == 0)
        extras: dict[str, Any] = {"time_outs": time_outs} if self._limits else {}
        if self._last:
            extras["time_outs_obs"] = self._seen(lengths)
        dones = time_outs | fails
        self.episode_length_buf[dones] = 0
        return self.get_observations(), lengths.float(), dones.long(), extras


def config(algorithm: str, **settings: Any) -> dict[str, Any]:
    sizes = {"batch_size": 16, "updates_per_step": 1, "buffer_steps": 8, "learning_starts": 2, **settings}
    return {
        **{"num_steps_per_env": 4, "save_interval": 1, "actor": dict(SMALL), "critic": dict(SMALL)},
        "obs_groups": {"actor": ["policy"], "critic": ["policy", "privileged"]},
        "algorithm": {"class_name": f"gpubuf.integrations.rsl_rl:{algorithm}", **sizes},
    }


def runner(algorithm: str, env: Any = None, log_dir: Any = None, **settings: Any) -> Any:
    torch.manual_seed(0)
    log = None if log_dir is None else str(log_dir)
    return ours.OffPolicyRunner(env or Counting(), config(algorithm, **settings), log)


# Learning


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.usefixtures("theirs")
def test_it_learns_and_reports_losses(algorithm: str):
    made = runner(algorithm)
    losses: list[dict[str, float]] = []
    update = made.alg.update
    made.alg.update = lambda: losses.append(update()) or losses[-1]
    before = copy.deepcopy(made.alg.policy.state_dict())
    made.learn(2, init_at_random_ep_len=True)
    assert (made.alg.steps, made.alg.updates, len(made.alg.buffer)) == (8, 6, 24)
    after = made.alg.policy.state_dict()
    assert any(not torch.equal(after[name], before[name]) for name in before if "weight" in name)
    assert losses[1].keys() >= {"loss_qvalue", "loss_actor"}
    assert all(math.isfinite(value) for value in losses[1].values())
    assert made.alg.update() == {}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_it_reaches_a_set_return(algorithm: str, example: Any):
    """A policy that does nothing has -1200, one that holds the pendulum upright -150."""
    torch.manual_seed(0)
    made = example.OffPolicyRunner(example.PendulumEnv(64), example.config(algorithm))
    made.learn(15, init_at_random_ep_len=True)
    assert example.mean_return(made, example.PendulumEnv(64, seed=1)) > -300


@pytest.mark.parametrize(("updates", "done"), [(0.5, 4), (3, 24)])
@pytest.mark.usefixtures("theirs")
def test_updates_for_each_step(updates: float, done: int):
    made = runner("SAC", updates_per_step=updates, learning_starts=0)
    made.learn(2)
    assert made.alg.updates == done


def test_rsl_rls_own_runner_takes_the_algorithm(theirs: bool):
    """As mjlab and Isaac Lab construct it: the algorithm is named, the runner is theirs."""
    from rsl_rl.runners import OnPolicyRunner

    made = OnPolicyRunner(Counting(), config("FastSAC"), log_dir=None, device="cpu")
    made.learn(num_learning_iterations=1, init_at_random_ep_len=True)
    assert type(made.alg) is ours.FastSAC
    assert made.alg.steps == 4
    assert made.cfg["algorithm"]["rnd_cfg"] is None, "rsl_rl up to 5.4 reads it"


@pytest.mark.usefixtures("theirs")
def test_log_and_checkpoints(tmp_path: Path, theirs: bool):
    made = runner("SAC", log_dir=tmp_path)
    if theirs:
        made.add_git_repo_to_log(__file__)
    made.learn(2)
    assert {"model_0.pt", "model_1.pt"} <= {path.name for path in tmp_path.iterdir()}
    assert not theirs or any(path.name.startswith("events") for path in tmp_path.iterdir())


# What is stored


@pytest.mark.parametrize("last", [True, False], ids=["last observations", "none of them"])
@pytest.mark.parametrize("limits", [True, False], ids=["time_outs", "no time_outs"])
@pytest.mark.usefixtures("theirs")
def test_rows(last: bool, limits: bool):
    """Privileged observations, flags, and what a time-out is bootstrapped from."""
    made = runner("SAC", Counting(last=last, limits=limits), learning_starts=100)
    made.learn(2)
    rows = made.alg.buffer[:].reshape(8, 3)
    lengths = rows["observation", "policy"][..., 1]
    over, fails = lengths == 4, (lengths == 2) & (torch.arange(3) == 0)
    following = rows["next"]
    assert torch.equal(following["truncated"], over & limits)
    assert torch.equal(following["terminated"], (fails | over) & ~(over & limits))
    assert torch.equal(following["reward"], lengths + 1)
    number = torch.arange(8.0)[:, None].expand(8, 3)
    assert torch.equal(rows["observation", "policy"][..., 0], number)
    assert torch.equal(rows["observation", "privileged"][..., 0], 10 * number)
    goes_on = ~(fails | over)
    ended = torch.where(following["truncated"], lengths + last, torch.zeros_like(lengths))
    assert torch.equal(following["observation", "policy"][..., 1], torch.where(goes_on, lengths + 1, ended))
    steps = torch.where(following["truncated"] & (not last), number, number + 1)
    assert torch.equal(following["observation", "privileged"][..., 0], 10 * steps)


@pytest.mark.usefixtures("theirs")
def test_actions_are_scaled_for_the_environments():
    """Rows have those of the policy."""
    made = runner("SAC", action_scale=[2.0, 0.5], learning_starts=0)
    given: list[torch.Tensor] = []
    step = made.env.step
    made.env.step = lambda actions: (given.append(actions.clone()), step(actions))[1]
    made.learn(2)
    stored = made.alg.buffer[:].reshape(8, 3)["action"]
    assert torch.equal(torch.stack(given), stored * torch.tensor([2.0, 0.5]))
    assert stored.abs().max() <= 1


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.usefixtures("theirs")
def test_observations_are_normalised(dtype: str | None):
    """The policy sees them as batches have them: with the statistics of all that were written."""
    made = runner("FastSAC", obs_storage_dtype=dtype)
    made.learn(3)
    counted = torch.arange(12.0)
    assert made.alg.policy.mean[0] == counted.mean()
    torch.testing.assert_close(made.alg.policy.factor[0], (counted.var(correction=0) + 1e-4).rsqrt())
    rows = made.alg.buffer[:].reshape(-1)["observation", "policy"]
    drawn = made.alg.buffer.sample()["observation", "policy"]
    seen = (rows - made.alg.policy.mean) * made.alg.policy.factor
    assert (torch.cdist(drawn, seen).amin(1) < 1e-5).all()


@pytest.mark.usefixtures("theirs")
def test_symmetry_appends_images():
    def mirrored(env: Any, obs: Any, actions: Any) -> tuple[Any, Any]:
        assert env.num_envs == 3
        images = None if obs is None else torch.cat([obs, obs.apply(torch.neg)])
        return images, None if actions is None else torch.cat([actions, -actions])

    symmetry = {"data_augmentation_func": mirrored, "use_data_augmentation": True}
    made = runner("SAC", symmetry_cfg=symmetry, action_scale=3.0)
    made.learn(1)
    batch = made.alg.buffer.sample()
    assert batch.shape == (32,)
    for key in (("observation", "policy"), ("next", "observation", "privileged"), "action"):
        assert torch.equal(batch[key][16:], -batch[key][:16])
    assert torch.equal(batch["next", "reward"][16:], batch["next", "reward"][:16])


# Checkpoints and exports


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.usefixtures("theirs")
def test_training_continues_exactly(algorithm: str, tmp_path: Path):
    """With the ring in the checkpoint."""
    made = runner(algorithm, save_buffer=True)
    made.learn(3)
    made.save(str(tmp_path / "model.pt"), infos={"kept": 1})
    env = copy.deepcopy(made.env)
    made.alg.buffer.end_trajectories()
    made.learn(2)
    again = runner(algorithm, env, save_buffer=True)
    assert again.load(str(tmp_path / "model.pt")) == {"kept": 1}
    assert again.current_learning_iteration == 2
    again.learn(2)
    states = made.alg.save(), again.alg.save()
    for state in states:
        del state["buffer_state_dict"]["ring"]
    for one, other in zip(*map(_tensors, states), strict=True):
        assert torch.equal(one, other)


def _tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


@pytest.mark.usefixtures("theirs")
def test_without_the_ring_it_is_filled_again(tmp_path: Path):
    made = runner("FastSAC")
    made.learn(2)
    made.save(str(tmp_path / "model.pt"))
    again = runner("FastSAC")
    again.load(str(tmp_path / "model.pt"), load_cfg={"actor": True})
    obs = made.env.get_observations()
    assert torch.equal(again.get_inference_policy()(obs), made.get_inference_policy()(obs))
    assert again.alg.updates == 0
    again.load(str(tmp_path / "model.pt"))
    assert again.alg.updates == made.alg.updates
    assert len(again.alg.buffer) == 0
    again.learn(1)
    assert again.alg.updates == made.alg.updates + 2  # not within the first two steps


@pytest.mark.usefixtures("theirs")
def test_networks_alone_keep_their_statistics(tmp_path: Path):
    """Whoever trains on with another optimiser has an actor that sees observations as it has learnt them."""
    made = runner("FastSAC")
    made.learn(4)
    made.save(str(tmp_path / "model.pt"))
    again = runner("FastSAC")
    again.load(str(tmp_path / "model.pt"), load_cfg={"actor": True, "critic": True})
    alg, env = again.alg, again.env
    alg.process_env_step(*env.step(alg.act(env.get_observations())))
    # A step moves the statistics as one of many.
    torch.testing.assert_close(alg.policy.mean, made.alg.policy.mean, rtol=0.1, atol=0)
    torch.testing.assert_close(alg.policy.factor, made.alg.policy.factor, rtol=0.1, atol=0)


# TorchScript is deprecated; rsl_rl's runner exports by it.
@pytest.mark.filterwarnings("ignore:`?torch.jit:DeprecationWarning", "ignore:`?torch.jit:FutureWarning")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.usefixtures("theirs")
def test_jit(algorithm: str, tmp_path: Path):
    made = runner(algorithm)
    made.learn(2)
    made.export_policy_to_jit(str(tmp_path), "policy.pt")
    policy, exported = made.get_inference_policy(), torch.jit.load(str(tmp_path / "policy.pt"))
    obs = made.env.get_observations()
    exported.reset()
    torch.testing.assert_close(exported(obs["policy"]), policy(obs))


@pytest.mark.parametrize("dynamo", [True, False], ids=["rsl_rl", "mjlab"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.filterwarnings("default")
def test_onnx(algorithm: str, dynamo: bool, tmp_path: Path, theirs: bool):
    """By rsl_rl's runner, and as mjlab's does it."""
    reference = pytest.importorskip("onnx.reference", reason="onnx is not installed: make rsl_rl")
    made = runner(algorithm)
    made.learn(2)
    path = tmp_path / "policy.onnx"
    if dynamo:
        made.export_policy_to_onnx(str(tmp_path), path.name)
    else:
        model = made.alg.get_policy().as_onnx(verbose=False)
        names = {"input_names": model.input_names, "output_names": model.output_names}
        torch.onnx.export(model, model.get_dummy_inputs(), str(path), opset_version=18, dynamo=False, **names)
    obs = made.env.get_observations()[:1]
    (actions,) = reference.ReferenceEvaluator(str(path)).run(None, {"obs": obs["policy"].numpy()})
    np.testing.assert_allclose(actions, made.get_inference_policy()(obs).detach().numpy(), rtol=1e-4, atol=1e-5)


# The configuration


def _changed(part: str, **values: Any) -> dict[str, Any]:
    made = config("FastSAC")
    made[part] = {**made[part], **values} if isinstance(made.get(part), dict) else values["value"]
    return made


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (lambda: _changed("algorithm", clip_param=0.2), r"unknown keys \['clip_param'\].*batch_size"),
        (lambda: _changed("critic", hidden_dim=3), r"unknown keys \['hidden_dim'\].*hidden_dims"),
        (lambda: _changed("num_steps", value=3), r"unknown keys \['num_steps'\].*num_steps_per_env"),
        (lambda: _changed("actor", activation="elu"), "activation must be 'swish'"),
        (lambda: _changed("actor", distribution_cfg={"class_name": "x"}), "distribution_cfg must be None"),
        (lambda: _changed("actor", obs_normalization=False), "obs_normalization must be the same"),
        (lambda: _changed("algorithm", rnd_cfg={}), "rnd_cfg must be None"),
        (lambda: _changed("algorithm", symmetry_cfg={"use_mirror_loss": True}), "without use_mirror_loss"),
        (lambda: _changed("torch_compile_mode", value="default"), "torch_compile_mode must be None"),
    ],
)
@pytest.mark.usefixtures("theirs")
def test_refusals(cfg: Any, message: str):
    with pytest.raises(ValueError, match=message):
        ours.OffPolicyRunner(Counting(), cfg())


@pytest.mark.usefixtures("theirs")
def test_blocks_of_flashsac_have_one_width():
    cfg = config("FlashSAC")
    cfg["actor"]["hidden_dims"] = (8, 4)
    with pytest.raises(ValueError, match="one width"):
        ours.OffPolicyRunner(Counting(), cfg)


def test_without_rsl_rl(monkeypatch: pytest.MonkeyPatch):
    for name in ("rsl_rl", "rsl_rl.runners", "rsl_rl.utils"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("runner", "algorithms"):
        monkeypatch.delitem(sys.modules, f"{ours.__name__}.{name}", raising=False)
    with pytest.raises(ModuleNotFoundError, match="pip install rsl-rl-lib"):
        _ = ours.OffPolicyRunner
    with pytest.raises(AttributeError, match="no attribute 'PPO'"):
        _ = ours.PPO


# Memory


@pytest.mark.usefixtures("theirs")
def test_the_case_of_137_gb_takes_35_gb():
    """4096 environments, 1024 steps, 2412 + 1645 numbers: each of them was stored twice, in float32."""
    env = Counting(4096)
    env.num_actions, env.max_episode_length = 29, 1000
    widths = {"privileged": 2412, "policy": 1645}
    obs = TensorDict({name: torch.zeros(1, n).expand(4096, n) for name, n in widths.items()}, [4096])
    env.get_observations = lambda: obs
    cfg = config("FastSAC", buffer_steps=1024, obs_storage_dtype="float16")
    cfg["obs_groups"] = {"actor": ["policy"], "critic": ["privileged"]}
    plan = ours.OffPolicyRunner(env, cfg).alg.plan()
    assert plan.capacity * sum(widths.values()) * 2 * 4 > 136e9
    assert plan.fit("cuda").device_bytes < 35e9


@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.usefixtures("theirs")
def test_the_plan_is_what_is_taken(n_steps: int):
    made = runner("SAC", Counting(64), obs_storage_dtype="float16", buffer_steps=32, n_steps=n_steps)
    plan = made.alg.plan()
    made.learn(1)
    storage = made.alg.buffer.storage
    assert plan.rows == storage.nbytes


# FastTD3's loss


@pytest.mark.usefixtures("theirs")
def test_the_loss_of_fasttd3():
    """Against the distribution moved and projected atom by atom, and the expected value of the smaller critic."""
    torch.manual_seed(0)
    made = runner("FastTD3", atoms=5, v_min=-2.0, v_max=2.0, policy_noise=0.0, n_steps=2)
    made.learn(2)
    loss, batch = made.alg.loss, made.alg.buffer.sample()[:6]
    found = loss(batch.clone())
    seen = batch.select("observation", "action")
    following = batch["next"].select("observation")
    with torch.no_grad():
        policy = made.alg.policy.network
        following["action"] = policy(following["observation", "policy"]).clamp(-1, 1)
        target = _critics(loss, loss.target_qvalue_network_params, following).softmax(-1)
        atoms = torch.linspace(-2, 2, 5)
        smallest = (target * atoms).sum(-1).argmin(0)
        mass = torch.zeros(6, 5)
        for row in range(6):
            discount = 0.97 ** batch["steps_to_next_obs"][row].item() * (not batch["next", "terminated"][row].item())
            for atom in range(5):
                moved = (batch["next", "reward"][row] + discount * atoms[atom]).clamp(-2, 2)
                near = (1 - (moved - atoms).abs()).clamp(min=0)
                mass[row] += target[smallest[row], row, atom] * near
        logits = _critics(loss, loss.qvalue_network_params, seen)
        entropy = -(mass * logits.log_softmax(-1)).sum(-1).mean(1).sum()
        seen["action"] = policy(seen["observation", "policy"])
        values = (_critics(loss, loss.qvalue_network_params, seen).softmax(-1) * atoms).sum(-1)
    torch.testing.assert_close(found["loss_qvalue"], entropy)
    torch.testing.assert_close(found["loss_actor"], -values.amin(0).mean())


def _critics(loss: Any, params: Any, seen: TensorDict) -> torch.Tensor:
    with params.data.to_module(loss.qvalue_network):
        return loss.qvalue_network(TensorDict(seen.to_dict(), []))["state_action_value"]
