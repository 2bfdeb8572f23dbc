"""A buffer in an actor of Ray: written by tasks, sampled from here, killed, and restored."""

import importlib
import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

ray = pytest.importorskip("ray", reason="Ray is not installed: make ray")

ROOT = Path(__file__).parents[2]


#: What the processes of the actors and tasks import: gpubuf, and the example.
FOLDERS = [str(ROOT), str(ROOT / "examples")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A small one, of this machine alone."""
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(FOLDERS)}}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """``examples/ray_actor.py``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDERS[1])
        yield importlib.import_module("ray_actor")


def columns(first: int, n: int) -> dict[Any, np.ndarray]:
    number = np.arange(first, first + n, dtype=np.float32)[:, None]
    return {"observation": number, ("next", "reward"): number * 2}


def test_the_owner_is_killed_and_restored(cluster, example, tmp_path: Path):
    """Rows and priorities of the last save are there again; those written after it have died with the process."""
    replay = example.start(tmp_path / "buffer", capacity=100)
    ray.get(replay.extend.remote(columns(0, 20)))
    batch = ray.get(replay.sample.remote())
    assert torch.equal(batch["next", "reward"], batch["observation"] * 2)
    # Of all rows but one the priority is so low that they are not drawn.
    index = torch.arange(20)
    priority = torch.where(index == 7, 1e9, 1e-9)
    generation = batch["index_generation"][:1].expand(20).contiguous()
    ray.get(replay.update_priority.remote(index, generation, priority))
    assert ray.get(replay.save.remote()) == 20
    ray.get(replay.extend.remote(columns(20, 20)))
    process = ray.get(replay.process.remote())
    os.kill(process, signal.SIGKILL)
    assert example.while_it_restarts(lambda: replay.process.remote()) != process
    batch = ray.get(replay.sample.remote())
    assert set(batch["observation"].reshape(-1).tolist()) == {7.0}
    assert ray.get(replay.extend.remote(columns(20, 1))) == 21


def test_tasks_collect_and_this_process_learns(
    cluster, example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    """The example itself: values rise from left to right."""
    options = ["--folder", str(tmp_path / "buffer"), "--rounds", "3", "--steps", "400", "--updates", "60"]
    monkeypatch.setattr(sys, "argv", ["ray_actor.py", *options])
    example.main()
    values = [float(value) for value in capsys.readouterr().out.rpartition("values:")[2].split()]
    assert len(values) == example.STATES
    assert values[0] < values[4] < values[8]


def rows(n: int) -> TensorDict:
    number = torch.arange(float(n)).unsqueeze(1)
    done = torch.zeros(n, 1, dtype=torch.bool)
    following = {"observation": number + 1, "reward": number * 2, "done": done, "terminated": done}
    return TensorDict({"observation": number, "next": following}, [n])


@pytest.mark.parametrize("name", ["TensorDictReplayBuffer", "TensorDictPrioritizedReplayBuffer"])
def test_torchrls_owner_has_gpubufs_buffer(cluster, name: str):
    """``RayReplayBuffer`` makes the actor; its client writes, samples and sets priorities from a task."""
    data = pytest.importorskip("torchrl.data", reason="TorchRL is not installed: make ray")
    from gpubuf.integrations import torchrl as ours

    options = {"alpha": 0.7, "beta": 0.5} if "Prioritized" in name else {}
    buffer = data.RayReplayBuffer(
        storage=partial(ours.LazyTensorStorage, 100),
        replay_buffer_cls=getattr(ours, name),
        batch_size=16,
        ray_init_config={"num_cpus": 2},
        **options,
    )
    try:
        client = buffer.client()

        @ray.remote
        def write(n: int) -> int:
            client.extend(rows(n))
            return len(client)

        assert ray.get(write.remote(30)) == 30
        assert (len(buffer), buffer.write_count, buffer.batch_size) == (30, 30, 16)
        batch = buffer.sample()
        assert torch.equal(batch["next", "reward"], batch["observation"] * 2)
        if options:
            buffer.update_tensordict_priority(
                batch.set("td_error", torch.where(batch["index"] == batch["index"][0], 1e9, 0.0))
            )
            assert (buffer.sample()["index"] == batch["index"][0]).all()
    finally:
        buffer.close()
