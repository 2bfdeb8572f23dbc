"""The main loops of TorchRL's training scripts, in short.

They run with gpubuf's networks and a collector of a few lines. Where TorchRL is installed (``make torchrl``), they
run with its environments, collector and networks too: once with its buffers and losses, and once with gpubuf's.
"""

from __future__ import annotations

import importlib.util
import tempfile
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch.distributions import OneHotCategorical

from gpubuf.integrations import torchrl as ours
from gpubuf.modules import MLP, make_sac_actor
from tests.contracts.torchrl_programs import torchrls

FRAMES, TOTAL, RANDOM, UPDATES, BATCH, LIMIT = 40, 240, 80, 8, 32, 15

# TorchRL's scripts: agents and collectors


@dataclass
class Agent:
    """What a script makes of its environment.

    Attributes:
        actor, critic: networks.
        policy: acts in the environment: the actor, perhaps with noise.
        batches: what the collector gives, ``[environments, steps]``.
        actions: arguments of the loss that say which actions there are.
    """

    actor: Any
    critic: Any
    policy: Any
    batches: Iterator[TensorDict]
    actions: dict[str, Any] = field(default_factory=dict)


def own_agent(script: str) -> Agent:
    discrete = script == "discrete_sac"
    width = {"norm": "batch_renorm", "norm_kwargs": {"renorm_warmup": 10}} if script == "crossq" else {}
    inputs, n = (4, 2) if discrete else (3, 1)
    if discrete:
        draw = ProbabilisticTensorDictModule(
            ["logits"],
            ["action"],
            distribution_class=OneHotCategorical,
            default_interaction_type=InteractionType.RANDOM,
        )
        body = TensorDictModule(MLP(inputs, n, (32, 32)), ["observation"], ["logits"])
        actor: Any = ProbabilisticTensorDictSequential(body, draw)
        critic = TensorDictModule(MLP(inputs, n, (32, 32)), ["observation"], ["action_value"])
    else:
        actor = make_sac_actor(inputs, n, (32, 32), low=-2.0, high=2.0)
        if script == "td3":
            body = nn.Sequential(MLP(inputs, n, (32, 32)), nn.Tanh())
            actor = TensorDictModule(lambda observation: 2 * body(observation), ["observation"], ["action"])
            actor.body = body
        critic = TensorDictModule(
            MLP(inputs + n, 1, (32, 32), **width), ["action", "observation"], ["state_action_value"]
        )
    noisy = TensorDictModule(lambda action: action + 0.1 * torch.randn_like(action), ["action"], ["action"])
    noisy.step = lambda frames: None
    policy = TensorDictSequential(actor, noisy) if script == "td3" else actor
    actions = {"td3": {"bounds": (-2.0, 2.0)}, "discrete_sac": {"num_actions": n, "action_space": "one-hot"}}.get(
        script, {}
    )
    return Agent(actor, critic, policy, collect("CartPole-v1" if discrete else "Pendulum-v1", policy), actions)


def collect(name: str, policy: Callable[[TensorDict], Any]) -> Iterator[TensorDict]:
    """Steps of two environments, with the keys that TorchRL's collector and its transforms give."""
    envs = [gym.make(name, max_episode_steps=LIMIT) for _ in range(2)]

    def begin(env: gym.Env[Any, Any], seed: int | None = None) -> TensorDict:
        return state(torch.as_tensor(env.reset(seed=seed)[0]), 0, 0.0, False, False)

    def state(seen: Tensor, count: int, total: float, terminated: bool, truncated: bool) -> TensorDict:
        flags = {"terminated": terminated, "truncated": truncated, "done": terminated or truncated}
        rest = {**flags, "is_init": count == 0, "step_count": count, "episode_reward": total}
        return TensorDict({"observation": seen.float(), **{key: torch.tensor([value]) for key, value in rest.items()}})

    def step(env: gym.Env[Any, Any], row: TensorDict) -> TensorDict:
        action = row["action"].numpy() if name == "Pendulum-v1" else int(row["action"].argmax())
        seen, reward, *ended, _ = env.step(action)
        total = float(row["episode_reward"]) + float(reward)
        made = state(torch.as_tensor(seen), int(row["step_count"]) + 1, total, *map(bool, ended))
        return made.set("reward", torch.tensor([float(reward)]))

    now = [begin(env, seed) for seed, env in enumerate(envs)]
    for _ in range(TOTAL // FRAMES):
        rows = []
        for _ in range(FRAMES // 2):
            row = torch.stack(now)
            with torch.no_grad():
                policy(row)
            row["next"] = torch.stack([step(env, row[i]) for i, env in enumerate(envs)])
            ended = row["next", "done"].flatten().tolist()
            now = [begin(env) if ended[i] else row["next"][i].exclude("reward") for i, env in enumerate(envs)]
            rows.append(row)
        yield torch.stack(rows, 1)


def torchrl_agent(script: str) -> Agent:
    from torchrl import envs, modules
    from torchrl.collectors import Collector
    from torchrl.data import Composite

    discrete = script == "discrete_sac"
    name = "CartPole-v1" if discrete else "Pendulum-v1"
    made = envs.SerialEnv(2, lambda: envs.GymEnv(name))
    env = envs.TransformedEnv(
        made, envs.Compose(envs.InitTracker(), envs.StepCounter(LIMIT), envs.DoubleToFloat(), envs.RewardSum())
    )
    env.set_seed(0)
    spec = env.action_spec_unbatched
    n = spec.shape[-1]
    norm = {
        "norm_class": modules.BatchRenorm1d,
        "norm_kwargs": {"momentum": 0.01, "num_features": 32, "warmup_steps": 10},
    }
    cells = {"num_cells": [32, 32], "activation_class": nn.ReLU, **(norm if script == "crossq" else {})}
    critic: Any = modules.ValueOperator(modules.MLP(out_features=1, **cells), in_keys=["action", "observation"])
    actions: dict[str, Any] = {}
    if discrete:
        actor: Any = modules.ProbabilisticActor(
            spec=Composite(action=env.action_spec),
            module=modules.SafeModule(
                modules.MLP(out_features=n, **cells), in_keys=["observation"], out_keys=["logits"]
            ),
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=modules.OneHotCategorical,
            default_interaction_type=InteractionType.RANDOM,
        )
        critic = TensorDictModule(modules.MLP(out_features=n, **cells), ["observation"], ["action_value"])
        actions = {"num_actions": actor.spec["action"].space.n}
    elif script == "td3":
        actor = modules.SafeSequential(
            modules.SafeModule(modules.MLP(out_features=n, **cells), in_keys=["observation"], out_keys=["param"]),
            modules.TanhModule(in_keys=["param"], out_keys=["action"], spec=spec),
        )
        actions = {"action_spec": actor[1].spec}
    else:
        layers = nn.Sequential(
            modules.MLP(out_features=2 * n, **cells), modules.NormalParamExtractor("biased_softplus_1.0")
        )
        actor = modules.ProbabilisticActor(
            spec=spec,
            in_keys=["loc", "scale"],
            module=TensorDictModule(layers, ["observation"], ["loc", "scale"]),
            distribution_class=modules.TanhNormal,
            distribution_kwargs={"low": spec.space.low, "high": spec.space.high, "tanh_loc": False},
            default_interaction_type=InteractionType.RANDOM,
        )
    with torch.no_grad():
        example = env.fake_tensordict().reshape(-1)
        for network in (actor, critic):
            network.eval()
            network(example)
            network.train()
    policy = actor
    if script == "td3":
        policy = TensorDictSequential(
            actor, modules.AdditiveGaussianModule(spec=spec, sigma_init=1, sigma_end=1, std=0.1)
        )
    collector = Collector(env, policy, frames_per_batch=FRAMES, total_frames=TOTAL, init_random_frames=RANDOM)
    return Agent(actor, critic, policy, iter(collector), actions)


# TorchRL's scripts: buffers, losses and updates


def make_buffer(lib: Any, script: str, prioritized: bool) -> Any:
    """``td3`` and ``discrete_sac`` name a temporary folder that is gone when the first row is written."""
    with tempfile.TemporaryDirectory() as folder:
        storage = {
            "sac": lambda: lib.LazyTensorStorage(1_000, device="cpu"),
            "crossq": lambda: lib.LazyMemmapStorage(1_000, scratch_dir=None),
        }.get(script, lambda: lib.LazyMemmapStorage(1_000, scratch_dir=folder, device="cpu"))()
        kind = lib.TensorDictPrioritizedReplayBuffer if prioritized else lib.TensorDictReplayBuffer
        shared = {"shared": False} if script == "sac" else {}
        priorities = {"alpha": 0.7, "beta": 0.5} if prioritized else {}
        made = kind(**priorities, pin_memory=False, prefetch=3, storage=storage, batch_size=BATCH, **shared)
    if script in ("td3", "crossq"):
        made.append_transform(lambda rows: rows.to("cpu", non_blocking=True))
    return made


def optimizers(loss: Any) -> list[torch.optim.Adam]:
    critics = list(loss.qvalue_network_params.flatten_keys().values())
    actor = list(loss.actor_network_params.flatten_keys().values())
    alpha = [loss.log_alpha] if hasattr(loss, "log_alpha") else []
    return [torch.optim.Adam(group, lr=1e-3, eps=1e-8) for group in (actor, critics, alpha) if group]


def together(parts: list[torch.optim.Adam]) -> torch.optim.Adam:
    return torch.optim.Adam([group for part in parts for group in part.param_groups])


Update = Callable[[TensorDictBase, int], TensorDictBase]


def sac(lib: Any, agent: Agent) -> tuple[Any, Update]:
    loss = lib.SACLoss(
        actor_network=agent.actor,
        qvalue_network=agent.critic,
        num_qvalue_nets=2,
        loss_function="l2",
        delay_actor=False,
        delay_qvalue=True,
        alpha_init=1.0,
        **({} if hasattr(agent.actor, "spec") else {"target_entropy": -1.0}),
    )
    loss.make_value_estimator(gamma=0.99)
    targets, optimizer = lib.SoftUpdate(loss, eps=0.9), together(optimizers(loss))

    def update(batch: TensorDictBase, number: int) -> TensorDictBase:
        found = loss(batch)
        (found["loss_actor"] + found["loss_qvalue"] + found["loss_alpha"]).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        targets.step()
        assert found["alpha"].isfinite()
        assert found["entropy"].isfinite()
        return found.detach().select("loss_actor", "loss_qvalue", "loss_alpha")

    return loss, update


def td3(lib: Any, agent: Agent) -> tuple[Any, Update]:
    loss = lib.TD3Loss(
        actor_network=agent.actor,
        qvalue_network=agent.critic,
        num_qvalue_nets=2,
        loss_function="l2",
        delay_actor=True,
        delay_qvalue=True,
        policy_noise=0.2,
        noise_clip=0.5,
        **agent.actions,
    )
    loss.make_value_estimator(gamma=0.99)
    targets, (of_actor, of_critics) = lib.SoftUpdate(loss, eps=0.9), optimizers(loss)

    def update(batch: TensorDictBase, number: int) -> TensorDictBase:
        value, *_ = loss.value_loss(batch)
        of_critics.zero_grad()
        value.backward()
        of_critics.step()
        found = {"loss_qvalue": value}
        if number % 2:
            found["loss_actor"], *_ = loss.actor_loss(batch)
            of_actor.zero_grad()
            found["loss_actor"].backward()
            of_actor.step()
            targets.step()
        return TensorDict({key: entry.detach() for key, entry in found.items()})

    return loss, update


def crossq(lib: Any, agent: Agent) -> tuple[Any, Update]:
    loss = lib.CrossQLoss(
        actor_network=agent.actor,
        qvalue_network=agent.critic,
        num_qvalue_nets=2,
        loss_function="l2",
        alpha_init=1.0,
        **({} if hasattr(agent.actor, "spec") else {"target_entropy": -1.0}),
    )
    loss.make_value_estimator(gamma=0.99, device=torch.device("cpu"))
    optimizer = together(optimizers(loss))

    def update(batch: TensorDictBase, number: int) -> TensorDictBase:
        optimizer.zero_grad(set_to_none=True)
        value, further = loss.qvalue_loss(batch)
        batch.set(loss.tensor_keys.priority, further["td_error"])
        found = {"loss_qvalue": value.mean()}
        if number % 2:
            of_actor, further = loss.actor_loss(batch)
            found["loss_actor"] = of_actor.mean()
            found["loss_alpha"] = loss.alpha_loss(log_prob=further["log_prob"].detach()).mean()
        sum(found.values()).backward()  # type: ignore[union-attr]
        optimizer.step()
        return TensorDict(found, device="cpu").detach()

    return loss, update


def discrete_sac(lib: Any, agent: Agent) -> tuple[Any, Update]:
    loss = lib.DiscreteSACLoss(
        actor_network=agent.actor,
        qvalue_network=agent.critic,
        num_qvalue_nets=2,
        loss_function="l2",
        target_entropy_weight=0.2,
        delay_qvalue=True,
        **agent.actions,
    )
    loss.make_value_estimator(gamma=0.99)
    targets, parts = lib.SoftUpdate(loss, eps=0.9), optimizers(loss)
    names = ("loss_actor", "loss_qvalue", "loss_alpha")

    def update(batch: TensorDictBase, number: int) -> TensorDictBase:
        found = loss(batch)
        for optimizer, name in zip(parts, names, strict=True):
            optimizer.zero_grad()
            found[name].backward()
            optimizer.step()
        targets.step()
        return found.detach().select(*names)

    return loss, update


SCRIPTS = {"sac": sac, "td3": td3, "crossq": crossq, "discrete_sac": discrete_sac}


def train(lib: Any, agent: Agent, script: str, prioritized: bool) -> dict[str, Any]:
    """A script's main loop. Returns which keys a batch has, with shapes and dtypes, and those of the losses."""
    buffer = make_buffer(lib, script, prioritized)
    loss, update = SCRIPTS[script](lib, agent)
    # The scripts pass a batch to update_priority(), which TorchRL's buffers take no more.
    here = lib.SACLoss is ours.SACLoss
    update_priority = buffer.update_priority if here else buffer.update_tensordict_priority
    before = {key: value.detach().clone() for key, value in loss.state_dict().items()}
    batch, losses, collected, number = TensorDict(), TensorDict(), 0, 0
    for rows in agent.batches:
        if script == "td3":
            agent.policy[1].step(rows.numel())
        collected += rows.numel()
        buffer.extend(rows.reshape(-1))
        losses = TensorDict(batch_size=[UPDATES])
        for i in range(UPDATES if collected >= RANDOM else 0):
            batch = buffer.sample().clone()
            number += 1
            found = update(batch, number).clone()
            assert all(value.isfinite().all() for value in found.values())
            losses[i] = found
            if prioritized:
                update_priority(batch)
        ends = rows["next", "done"]
        assert rows["next", "episode_reward"][ends].shape == rows["next", "step_count"][ends].shape
    assert len(buffer) == collected == TOTAL
    moved = {key for key, value in loss.state_dict().items() if not torch.equal(value, before[key])}
    parameters = {key for key, _ in loss.named_parameters()}
    assert parameters <= moved, parameters - moved
    # The values of TorchRL's TD3Loss.value_loss are not in its batch.
    if prioritized and here:
        assert len({*buffer.sample()["priority_weight"].tolist()}) > 1

    def form(data: TensorDictBase) -> dict[str, Any]:
        return {str(key): (tuple(value.shape), value.dtype) for key, value in data.items(True, True)}

    kept = batch.exclude("index_generation", "td_error")
    return {
        "batch": form(kept),
        "losses": form(losses[0]),
        "parameters": sorted(value.shape for value in loss.parameters()),
    }


def torchrl_library() -> Any:
    import torchrl.objectives

    return types.SimpleNamespace(**{**vars(torchrl.objectives), **vars(torchrls())})


needs_torchrl = pytest.mark.skipif(
    importlib.util.find_spec("torchrl") is None, reason="TorchRL is not installed: make torchrl"
)


@pytest.mark.parametrize(
    ("script", "prioritized"),
    [("sac", False), ("sac", True), ("td3", True), ("crossq", False), ("discrete_sac", True)],
)
def test_torchrls_script(script: str, prioritized: bool):
    torch.manual_seed(0)
    found = train(ours, own_agent(script), script, prioritized)
    assert {"('next', 'observation')", "('next', 'reward')", "action", "index"} <= set(found["batch"])


@needs_torchrl
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("prioritized", [False, True], ids=["uniform", "prioritized"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_torchrls_script_with_its_networks(script: str, prioritized: bool):
    """The same keys, shapes and dtypes of batches, losses and parameters, before the change of imports and after it."""
    found = []
    for lib in (torchrl_library(), ours):
        torch.manual_seed(0)
        found.append(train(lib, torchrl_agent(script), script, prioritized))
    assert found[0] == found[1]
