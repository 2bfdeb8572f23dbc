"""The buffer calls of programs on TorchRL: the same arguments and the same order, with random data and no learning.

Each program takes a library's namespace, as its import lines would bring the names, and yields what it gets from the
buffer with a label. ``record`` runs them on TorchRL, the tests on gpubuf.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDict, tensorclass
from torch.utils._pytree import tree_map

Yielded = Iterator[tuple[str, Any]]


def transitions(*shape: int) -> TensorDict:
    """A collector's batch, with all that its environments put in."""
    flags = {name: torch.zeros(*shape, 1, dtype=torch.bool) for name in ("done", "terminated", "truncated")}
    following = {"observation": torch.randn(*shape, 4), "reward": torch.randn(*shape, 1), **flags}
    steps = torch.arange(shape[-1]).view(-1, 1).expand(*shape, 1).contiguous()
    return TensorDict(
        {
            "observation": torch.randn(*shape, 4),
            "action": torch.randn(*shape, 2),
            **{name: flag.clone() for name, flag in flags.items()},
            "step_count": steps,
            "collector": {"traj_ids": torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1)).expand(shape).clone()},
            "next": {**following, "step_count": steps + 1, "episode_reward": torch.randn(*shape, 1)},
        },
        shape,
    )


def _train(buffer: Any, prioritized: bool, device: Any) -> Yielded:
    """The loop of the off-policy scripts."""
    for step in range(3):
        collected = transitions(2, 20)
        buffer.extend(collected.reshape(-1).cpu())
        for _ in range(2):
            batch = buffer.sample()
            batch = batch.to(device, non_blocking=True) if batch.device != device else batch.clone()
            yield f"batch {step}", batch
            if prioritized:
                batch["td_error"] = torch.rand(batch.shape)
                buffer.update_tensordict_priority(batch)


def _off_policy(library: Any, prioritized: bool, on_disk: bool, prefetch: int = 3) -> Yielded:
    device = torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:

        def storage(size: int) -> Any:
            if on_disk:
                return library.LazyMemmapStorage(size, device="cpu", scratch_dir=folder)
            return library.LazyTensorStorage(size, device=device)

        options = {"pin_memory": False, "prefetch": prefetch, "storage": storage(100), "batch_size": 16}
        if prioritized:
            buffer = library.TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, **options)
        else:
            buffer = library.TensorDictReplayBuffer(**options)
        if on_disk:
            buffer.append_transform(lambda td: td.to(device))
        yield from _train(buffer, prioritized, device)
        yield "length", len(buffer)


def sac(library: Any) -> Yielded:
    return _off_policy(library, prioritized=False, on_disk=False)


def sac_prioritized(library: Any) -> Yielded:
    return _off_policy(library, prioritized=True, on_disk=True)


def td3(library: Any) -> Yielded:
    yield from _off_policy(library, prioritized=False, on_disk=True)


def td3_prioritized(library: Any) -> Yielded:
    return _off_policy(library, prioritized=True, on_disk=False)


def leanrl(library: Any) -> Yielded:
    """One step of the environments a write, and a batch at once."""
    device = torch.device("cpu")
    buffer = library.ReplayBuffer(storage=library.LazyTensorStorage(100, device=device))

    def extend_and_sample(transition: TensorDict) -> Any:
        buffer.extend(transition)
        return buffer.sample(32)

    for step in range(3):
        rows = TensorDict(
            observations=torch.randn(2, 4),
            next_observations=torch.randn(2, 4),
            actions=torch.randn(2, 2),
            rewards=torch.randn(2),
            terminations=torch.zeros(2, dtype=torch.bool),
            dones=torch.zeros(2, dtype=torch.bool),
            batch_size=2,
            device=device,
        )
        yield f"batch {step}", extend_and_sample(rows)


def td_mpc2(library: Any) -> Yielded:
    horizon = 3
    buffer = library.ReplayBuffer(
        storage=library.LazyTensorStorage(100, device=torch.device("cpu")),
        sampler=library.SliceSampler(
            num_slices=4, end_key=None, traj_key="episode", truncated_key=None, strict_length=True, cache_values=False
        ),
        pin_memory=False,
        prefetch=0,
        batch_size=4 * (horizon + 1),
    )
    for episode in range(3):
        rows = TensorDict({"obs": torch.randn(11, 4), "action": torch.randn(11, 2), "reward": torch.randn(11)}, [11])
        rows["episode"] = torch.full_like(rows["reward"], episode, dtype=torch.int64)
        buffer.extend(rows)
        batch = buffer.sample()
        yield f"batch {episode}", batch
        yield f"slices {episode}", batch.view(-1, horizon + 1).permute(1, 0)


def dreamer(library: Any) -> Yielded:
    """Sequences of pixels from ``[E, T]`` batches: stored as integers, drawn as floats."""
    length = 5
    with tempfile.TemporaryDirectory() as folder:

        def check_no_pixels(data: TensorDict) -> TensorDict:
            assert "pixels" not in data.keys()
            return data

        def to_floats(data: TensorDict) -> TensorDict:
            for key in (("pixels_int",), ("next", "pixels_int")):
                data[(*key[:-1], "pixels")] = data[key].permute(*range(data.ndim), -1, -3, -2).float() / 255
            return data

        transforms = library.Compose(library.ExcludeTransform("pixels", ("next", "pixels"), inverse=True))
        transforms.append(library.as_transform(check_no_pixels))
        transforms.append(library.as_transform(to_floats))
        transforms.append(library.as_transform(lambda data: data.to("cpu")))
        buffer = library.TensorDictReplayBuffer(
            pin_memory=False,
            prefetch=3,
            storage=library.LazyMemmapStorage(200, scratch_dir=folder, device="cpu", ndim=2),
            sampler=library.SliceSampler(
                slice_len=length, strict_length=False, traj_key=("collector", "traj_ids"), cache_values=True
            ),
            transform=transforms,
            batch_size=4 * length,
        )
        for step in range(2):
            collected = transitions(2, 25)
            for part in (collected, collected["next"]):
                part["pixels_int"] = torch.randint(255, (2, 25, 6, 6, 3), dtype=torch.uint8)
                part["pixels"] = torch.rand(2, 25, 3, 6, 6)
            buffer.extend(collected.cpu())
            batch = buffer.sample()
            yield f"batch {step}", batch
            yield f"sequences {step}", batch.reshape(-1, length)


def coding_ddpg(library: Any) -> Yielded:
    """Rows are trajectories, of which a transform cuts pieces."""
    yield from _coding_ddpg(library, library.RandomSampler())


def coding_ddpg_prioritized(library: Any) -> Yielded:
    yield from _coding_ddpg(library, library.PrioritizedSampler(max_capacity=50, alpha=0.7, beta=0.5))


def _coding_ddpg(library: Any, sampler: Any) -> Yielded:
    def crop(data: TensorDict) -> TensorDict:
        start = int(torch.randint(data.shape[1] - 5 + 1, ()))
        return data[:, start : start + 5]

    with tempfile.TemporaryDirectory() as folder:
        buffer = library.TensorDictReplayBuffer(
            storage=library.LazyMemmapStorage(50, scratch_dir=folder),
            batch_size=8,
            sampler=sampler,
            pin_memory=False,
            prefetch=3,
            transform=library.as_transform(crop),
        )
        for step in range(3):
            buffer.extend(transitions(4, 20))
            batch = buffer.sample(8)
            yield f"batch {step}", batch
            batch["td_error"] = torch.rand(*batch.shape, 1)
            buffer.update_tensordict_priority(batch)
        # The second half of the tutorial: one priority for a whole trajectory.
        batch = buffer.sample(8)
        index = batch.get("index")
        batch.batch_size = [8]
        batch["td_error"] = torch.rand(8)
        batch["index"] = index
        buffer.update_tensordict_priority(batch)
        yield "length", len(buffer)


def decision_transformer(library: Any) -> Yielded:
    """An offline data set whose storage is exchanged, and an online buffer that is filled from it."""
    rows = transitions(30, 12)
    rows.batch_size = [30, 12]
    offline = library.TensorDictReplayBuffer(
        storage=library.TensorStorage(rows.clone()),
        sampler=library.RandomSampler(),
        writer=library.RoundRobinWriter(),
        prefetch=4,
        batch_size=6,
    )
    everything = offline[:]
    yield "everything", everything
    with everything.unlock_():
        everything["return_to_go"] = everything["next", "reward"].flip(1).cumsum(1).flip(1)
    offline._storage = library.TensorStorage(everything.exclude("index"))
    yield "mean", offline[:]["observation"].flatten(0, -2).mean(0)

    def rename(data: TensorDict) -> TensorDict:
        return data.rename_key_("observation", "observation_cat").rename_key_("action", "action_cat")

    offline.append_transform(library.as_transform(lambda data: data[:, :5]))
    offline.append_transform(library.as_transform(rename))
    yield "offline batch", offline.sample()
    with tempfile.TemporaryDirectory() as folder:
        online = library.TensorDictReplayBuffer(
            pin_memory=False,
            prefetch=3,
            storage=library.LazyMemmapStorage(max_size=40, scratch_dir=folder, device="cpu"),
            batch_size=6,
        )
        data = offline[:20]
        if "index" in data.keys():
            data.del_("index")
        online.extend(data.clone().detach().to_tensordict())
        online.append_transform(library.as_transform(lambda batch: batch.set("scaled", batch["return_to_go"] * 0.001)))
        yield "online batch", online.sample()


@tensorclass
class Pictures:
    """Of the buffer tutorial."""

    images: torch.Tensor
    labels: torch.Tensor


def tutorial_storages(library: Any) -> Yielded:
    data = TensorDict({"a": torch.arange(12).view(3, 4), ("b", "c"): torch.arange(15).view(3, 5)}, [3])
    for name in ("LazyTensorStorage", "LazyMemmapStorage"):
        buffer = library.ReplayBuffer(storage=getattr(library, name)(10_000))
        buffer.extend(data)
        yield f"{name} length", len(buffer)
        yield name, buffer.sample(5)
    with tempfile.TemporaryDirectory() as folder:
        buffer = library.ReplayBuffer(storage=library.LazyMemmapStorage(10_000, scratch_dir=folder))
        buffer.extend(data)
        yield "file of a", str(buffer._storage._storage["a"].filename).endswith("a.memmap")
        yield "file of b, c", str(buffer._storage._storage["b", "c"].filename).endswith("c.memmap")
        yield "all rows", buffer._storage._storage
    buffer = library.TensorDictReplayBuffer(storage=library.LazyMemmapStorage(10_000), batch_size=12)
    buffer.extend(data)
    yield "with info", buffer.sample()


def tutorial_any_data(library: Any) -> Yielded:
    buffer = library.ReplayBuffer()
    buffer.extend(range(2000))
    yield "length", len(buffer)
    buffer = library.ReplayBuffer(storage=library.ListStorage(10_000), collate_fn=lambda found: found)
    buffer.extend(["a", 0, "b"])
    yield "list", len(buffer.sample(3))


def tutorial_tensorclass(library: Any) -> Yielded:
    data = Pictures(images=torch.randint(255, (10, 6, 6, 3)), labels=torch.randint(100, (10,)), batch_size=[10])
    buffer = library.TensorDictReplayBuffer(storage=library.LazyMemmapStorage(100), batch_size=12)
    buffer.extend(data)
    yield "of a TensorDict buffer", buffer.sample()


def tutorial_tensorclass_plain(library: Any) -> Yielded:
    data = Pictures(images=torch.randint(255, (10, 6, 6, 3)), labels=torch.randint(100, (10,)), batch_size=[10])
    buffer = library.ReplayBuffer(storage=library.LazyMemmapStorage(100), batch_size=12)
    buffer.add(data)
    yield "one row", buffer.sample()
    buffer = library.ReplayBuffer(storage=library.LazyMemmapStorage(100), batch_size=12, prefetch=10)
    buffer.add(data)
    for step, batch in enumerate(buffer):
        yield f"prefetched {step}", batch
        if step == 3:
            break


def tutorial_pytree(library: Any) -> Yielded:
    transform = library.as_transform(lambda found: tree_map(lambda y: y * 0, found))
    buffer = library.ReplayBuffer(storage=library.LazyMemmapStorage(100), transform=transform)
    buffer.add({"a": torch.randn(3), "b": {"c": (torch.zeros(2), [torch.ones(1)])}, 30: -torch.ones(())})
    yield "batch", buffer.sample(10)


def tutorial_epochs(library: Any) -> Yielded:
    data = TensorDict({"a": torch.arange(512).view(128, 4), ("b", "c"): torch.arange(1024).view(128, 8)}, [128])
    options = {"storage": library.LazyMemmapStorage(1000), "sampler": library.SamplerWithoutReplacement()}
    buffer = library.ReplayBuffer(batch_size=32, **options)
    buffer.extend(data)
    yield "batches", sum(1 for _ in buffer)
    buffer = library.ReplayBuffer(storage=library.LazyMemmapStorage(1000), sampler=library.SamplerWithoutReplacement())
    buffer.extend(data)
    yield "3", buffer.sample(3)
    yield "5", buffer.sample(5)


def tutorial_priorities_of_objects(library: Any) -> Yielded:
    buffer = library.ReplayBuffer(
        storage=library.ListStorage(1000),
        sampler=library.PrioritizedSampler(max_capacity=1000, alpha=0.8, beta=1.1),
        collate_fn=lambda found: found,
    )
    index = buffer.extend([1, "foo", None])
    buffer.update_priority(index=index, priority=torch.tensor([0, 1_000, 0.1]))
    found, info = buffer.sample(10, return_info=True)
    yield "rows", len(found)
    yield "info", dict(info)


def tutorial_priorities(library: Any) -> Yielded:
    data = TensorDict({"a": torch.arange(512).view(128, 4), ("b", "c"): torch.arange(1024).view(128, 8)}, [128])
    buffer = library.TensorDictReplayBuffer(
        storage=library.ListStorage(1000),
        sampler=library.PrioritizedSampler(1000, alpha=0.8, beta=1.1),
        priority_key="td_error",
        batch_size=1024,
    )
    data["td_error"] = torch.arange(data.numel())
    buffer.extend(data)
    batch = buffer.sample()
    yield "batch", batch
    batch["td_error"] = data.numel() - batch["index"]
    buffer.update_tensordict_priority(batch)
    yield "next batch", buffer.sample()


def tutorial_transforms(library: Any) -> Yielded:
    """Raw pictures are stored, and transformed ones drawn; a row may be a whole rollout."""

    def scaled(data: TensorDict) -> TensorDict:
        for key in (("pixels",), ("next", "pixels")):
            data[(*key[:-1], "pixels_trsf")] = data[key].float() / 255
        return data

    rollout = transitions(10)
    for part in (rollout, rollout["next"]):
        part["pixels"] = torch.randint(255, (10, 4, 4, 3), dtype=torch.uint8)
    buffer = library.TensorDictReplayBuffer(
        storage=library.LazyMemmapStorage(1000), transform=library.as_transform(scaled), batch_size=16
    )
    buffer.extend(rollout)
    yield "steps", buffer.sample()
    buffer = library.TensorDictReplayBuffer(
        storage=library.LazyMemmapStorage(1000), transform=library.as_transform(scaled), batch_size=16
    )
    buffer.add(rollout)
    yield "rollout", buffer.sample(1)


PROGRAMS: dict[str, Callable[[Any], Yielded]] = {
    program.__name__: program
    for program in (
        sac,
        sac_prioritized,
        td3,
        td3_prioritized,
        leanrl,
        td_mpc2,
        dreamer,
        coding_ddpg,
        coding_ddpg_prioritized,
        decision_transformer,
        tutorial_storages,
        tutorial_any_data,
        tutorial_tensorclass,
        tutorial_tensorclass_plain,
        tutorial_pytree,
        tutorial_epochs,
        tutorial_priorities_of_objects,
        tutorial_priorities,
        tutorial_transforms,
    )
}


def described(found: Any) -> Any:
    """Keys, shapes and dtypes, in plain values."""
    if isinstance(found, torch.Tensor):
        return [list(found.shape), str(found.dtype)]
    if hasattr(found, "batch_size"):
        entries = {str(key): described(value) for key, value in sorted(found.items(True, True), key=str)}
        return {"class": type(found).__name__, "batch_size": list(found.batch_size), "entries": entries}
    if isinstance(found, dict):
        return {str(key): described(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [type(found).__name__, *map(described, found)]
    return found


def outcome(program: str, library: Any) -> dict[str, Any]:
    """What a program gets, by label; if it raises, the type of the error under ``"error"``."""
    torch.manual_seed(0)
    told: dict[str, Any] = {}
    try:
        for label, found in PROGRAMS[program](library):
            told[label] = described(found)
    except Exception as error:
        told["error"] = type(error).__name__
        told["message"] = str(error)
    return told
