"""gpubuf's buffers and losses inside TorchRL's own classes. Skipped without TorchRL."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

import gpubuf.data
import gpubuf.objectives
from tests.support import torchrl_stand_in
from tests.support.n_step_model import Model

if not torchrl_stand_in.installed():
    pytest.skip("needs TorchRL", allow_module_level=True)

JOINED = torchrl_stand_in.joined()

import torchrl.data  # noqa: E402
import torchrl.objectives  # noqa: E402
from torchrl.data import replay_buffers as theirs  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def batch(n: int, *shape: int) -> TensorDict:
    done = (torch.arange(n) % 5 == 4).view(n, 1).expand(*shape, n, 1)
    flags = {"done": done, "terminated": done, "truncated": torch.zeros_like(done)}
    following = {"observation": torch.randn(*shape, n, 3), "reward": torch.randn(*shape, n, 1), **flags}
    return TensorDict({"observation": torch.randn(*shape, n, 3), "next": following}, (*shape, n))


# gpubuf's buffers where TorchRL's are asked for


def of_gpubuf(name: str = "TensorDictReplayBuffer", **options: Any) -> Any:
    buffer = getattr(JOINED, name)(storage=JOINED.LazyTensorStorage(100), **options)
    buffer.extend(batch(50))
    return buffer


def test_ensemble():
    ensemble = theirs.ReplayBufferEnsemble(of_gpubuf(), of_gpubuf(), batch_size=8, p=[0.5, 0.5])
    drawn, info = ensemble.sample(return_info=True)
    assert drawn.shape == (2, 4)
    assert info["index"]["buffer_ids"].shape[0] == 2


def test_ensemble_that_is_written():
    one, other = of_gpubuf("ReplayBuffer"), of_gpubuf("ReplayBuffer")
    ensemble = theirs.ReplayBufferEnsemble(one, other, batch_size=8, routing_key="which")
    data = batch(10)
    data["which"] = torch.arange(10) % 2
    with pytest.raises(ValueError, match="which"):
        ensemble.extend(data)
    one, other = (JOINED.ReplayBuffer(storage=JOINED.LazyTensorStorage(100)) for _ in range(2))
    ensemble = theirs.ReplayBufferEnsemble(one, other, batch_size=8, routing_key="which")
    ensemble.extend(data)
    assert (len(one), len(other)) == (5, 5)


def test_offline_to_online():
    buffer = torchrl.data.OfflineToOnlineReplayBuffer(of_gpubuf("ReplayBuffer"), online_capacity=60, batch_size=16)
    for _ in range(5):
        buffer.extend(batch(20))
        drawn = buffer.sample()
        assert drawn.shape == (16,)
    assert len(buffer) == 110
    torchrl.data.prefill_replay_buffer(buffer.online_buffer, of_gpubuf("ReplayBuffer"), 30, chunk_size=10)


def test_trainer_hooks():
    from torchrl.trainers import ReplayBufferTrainer

    buffer = of_gpubuf("TensorDictPrioritizedReplayBuffer", alpha=0.6, beta=0.4)
    hook = ReplayBufferTrainer(buffer, batch_size=8, flatten_tensordicts=True)
    hook.extend(batch(5, 4))
    assert len(buffer) == 70
    drawn = hook.sample(batch(1))
    drawn["td_error"] = torch.rand(8)
    hook.update_priority(drawn)
    hook.load_state_dict(hook.state_dict())


def test_collector():
    pytest.importorskip("gymnasium")
    from torchrl.collectors import Collector
    from torchrl.envs import GymEnv
    from torchrl.modules import RandomPolicy

    environment = GymEnv("CartPole-v1")
    buffer = JOINED.TensorDictReplayBuffer(storage=JOINED.LazyTensorStorage(100), batch_size=8)
    collector = Collector(
        environment,
        RandomPolicy(environment.action_spec),
        replay_buffer=buffer,
        frames_per_batch=8,
        total_frames=32,
    )
    for _ in collector:
        pass
    collector.shutdown()
    assert len(buffer) == buffer.write_count == 32
    assert buffer.sample()["next", "observation"].shape == (8, 4)


def pendulum() -> Any:
    from torchrl.envs import GymEnv, StepCounter, TransformedEnv

    return TransformedEnv(GymEnv("Pendulum-v1"), StepCounter(20))


def steps_follow_each_other(rows: TensorDict) -> int:
    """Check that the rows of each trajectory are its steps. Returns how many trajectories there are."""
    trajectories = rows["collector", "traj_ids"].unique()
    for one in trajectories:
        steps = rows[rows["collector", "traj_ids"] == one]
        assert torch.equal(steps["step_count"].flatten(), torch.arange(len(steps)))
        assert torch.equal(steps["next", "observation"][:-1], steps["observation"][1:])
        assert not steps["next", "done"][:-1].any()
    return len(trajectories)


@pytest.mark.slow
def test_collectors_that_fill_a_buffer_from_their_processes():
    """Case 69: MultiAsyncCollector ended cleanly, and none of its rows was there."""
    pytest.importorskip("gymnasium")
    from torchrl.collectors import MultiAsyncCollector

    buffer = JOINED.TensorDictReplayBuffer(storage=JOINED.LazyTensorStorage(2000), batch_size=16, shared=True)
    collector = MultiAsyncCollector(
        [pendulum, pendulum], None, frames_per_batch=50, total_frames=400, replay_buffer=buffer
    )
    assert [batch for batch in collector if batch is not None] == []
    collector.shutdown()
    assert len(buffer) == buffer.write_count >= 400
    assert steps_follow_each_other(buffer[:]) >= 400 // 20
    assert buffer.sample()["next", "observation"].shape == (16, 3)


@pytest.mark.slow
def test_a_script_that_waits_for_its_collector():
    """Case 69: the loop of TorchRL's sac-async.py, which waited for ever."""
    pytest.importorskip("gymnasium")
    from torchrl.collectors import AsyncCollector

    buffer = JOINED.TensorDictReplayBuffer(storage=JOINED.LazyTensorStorage(5000), batch_size=16, shared=True)
    buffer.extend(pendulum().rollout(1).view(-1))
    buffer.empty()
    collector = AsyncCollector(pendulum, None, frames_per_batch=50, total_frames=-1, replay_buffer=buffer)
    collector.start()
    patience = time.monotonic() + 120
    while buffer.write_count <= 300 and time.monotonic() < patience:
        time.sleep(0.01)
    for _ in range(100):
        assert buffer.sample()["next", "reward"].shape == (16, 1)
    (collector.async_shutdown if hasattr(collector, "async_shutdown") else collector.shutdown)()
    assert len(buffer) == buffer.write_count > 300
    assert steps_follow_each_other(buffer[:]) >= 300 // 20


def test_transforms_of_torchrl():
    from torchrl.envs.transforms import RewardScaling

    scaling = RewardScaling(0.0, 10.0, in_keys=[("next", "reward")])
    buffer = of_gpubuf(transform=scaling, batch_size=8)
    drawn = buffer.sample()
    stored = buffer.storage[drawn["index"]]["next", "reward"]
    torch.testing.assert_close(drawn["next", "reward"], stored * 10)


def test_a_transform_of_several_steps():
    """TorchRL's object, given to a buffer of gpubuf's, which makes the transitions itself."""
    from torchrl.envs.transforms import MultiStepTransform

    options = {"reward_keys": ["reward"], "done_keys": ["terminated", "truncated"]}
    buffer = gpubuf.data.TensorDictReplayBuffer(
        storage=gpubuf.data.LazyTensorStorage(12),
        sampler=gpubuf.data.SamplerWithoutReplacement(),
        transform=MultiStepTransform(n_steps=3, gamma=0.9, **options),
    )
    model = Model(12)
    buffer.extend(model.write(20))
    model.check(buffer.sample(12), 3, 0.9)
    assert len(buffer.transform) == 0


# Losses


@pytest.mark.parametrize("updates", ["SoftUpdate", "HardUpdate"])
@pytest.mark.parametrize("updater", [torchrl.objectives, gpubuf.objectives], ids=["TorchRL's", "gpubuf's"])
@pytest.mark.parametrize("losses", [torchrl.objectives, gpubuf.objectives], ids=["TorchRL's", "gpubuf's"])
def test_updates_and_losses_mix(losses: Any, updater: Any, updates: str):
    """Targets follow after the same number of steps by the same amount."""
    torch.manual_seed(0)
    loss = losses.TD3Loss(
        TensorDictModule(torch.nn.Linear(3, 2), ["observation"], ["action"]),
        TensorDictModule(torch.nn.Linear(3, 1), ["observation"], ["state_action_value"]),
        bounds=(-1.0, 1.0),
    )
    options = {"eps": 0.9} if updates == "SoftUpdate" else {"value_network_update_interval": 1}
    update = getattr(updater, updates)(loss, **options)
    target, source = (
        dict(getattr(loss, name).items(True, True))
        for name in ("target_qvalue_network_params", "qvalue_network_params")
    )
    with torch.no_grad():
        for parameter in source.values():
            parameter.add_(1.0)
    expected = {key: value + (0.1 if updates == "SoftUpdate" else 1.0) for key, value in target.items()}
    update.step()
    if updates == "HardUpdate" and updater is torchrl.objectives:
        update.step()  # counts from zero
    for key, value in expected.items():
        torch.testing.assert_close(target[key].data, value.data)


def test_torchrls_loss_takes_gpubufs_batch():
    buffer = of_gpubuf("TensorDictPrioritizedReplayBuffer", alpha=0.6, beta=0.4, batch_size=8)
    loss = torchrl.objectives.DDPGLoss(
        TensorDictModule(torch.nn.Linear(3, 2), ["observation"], ["action"]),
        TensorDictModule(torch.nn.Linear(3, 1), ["observation"], ["state_action_value"]),
    )
    drawn = buffer.sample()
    out = loss(drawn)
    (out["loss_actor"] + out["loss_value"]).backward()
    assert drawn["td_error"].shape == (8,)
    buffer.update_tensordict_priority(drawn)


def test_the_manuals_blocks_run():
    page = (Path(__file__).parents[2] / "docs" / "integrations" / "torchrl.md").read_text()
    namespace: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        exec(block, namespace)


def test_parts_in_a_buffer_of_torchrls():
    with pytest.raises(NotImplementedError, match=r"make the buffer of this name in gpubuf\.integrations\.torchrl"):
        theirs.ReplayBuffer(storage=JOINED.LazyTensorStorage(10))
    with pytest.raises(TypeError, match="gpubuf's writers need a TensorStorage, got TorchRL's LazyTensorStorage"):
        theirs.ReplayBuffer(storage=theirs.LazyTensorStorage(10), writer=JOINED.RoundRobinWriter())
    buffer = theirs.ReplayBuffer(storage=theirs.LazyTensorStorage(10), sampler=JOINED.RandomSampler())
    buffer.extend(batch(4))
    with pytest.raises(TypeError, match="gpubuf's samplers need a TensorStorage, got TorchRL's LazyTensorStorage"):
        buffer.sample(4)
