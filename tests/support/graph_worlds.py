"""Training steps to be captured or compiled: a buffer, what is done with it at each step, and all that this changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf import (
    Codec,
    HardUpdate,
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    SliceSampler,
    SoftUpdate,
    TensorDictReplayBuffer,
)
from gpubuf.data import Window
from gpubuf.modules import make_sac_actor, make_sac_critic
from gpubuf.objectives import SACLoss
from tests.support.sac_setup import ACTION, CELLS, OBSERVATION, make_batch, total

CAPACITY, BATCH, WRITTEN = 48, 16, 6  # WRITTEN steps at a time: the ring wraps every eighth call

SAMPLERS: dict[str, Callable[[], Any]] = {
    "uniform": RandomSampler,
    "prioritized": lambda: PrioritizedSampler(CAPACITY, alpha=0.6, beta=0.4),
    "prioritized within the buffer": lambda: PrioritizedSampler(CAPACITY, 0.6, 0.4, max_priority_within_buffer=True),
    "slices": lambda: SliceSampler(slice_len=4, weighting="transition"),
    "padded slices": lambda: SliceSampler(slice_len=4, strict_length=False, pad_output=True, span=1, stack=True),
    "prioritized slices": lambda: PrioritizedSliceSampler(CAPACITY, 0.6, 0.4, slice_len=4),
}


@dataclass
class World:
    """What a step works on.

    Attributes:
        sampler: a name in ``SAMPLERS``.
        envs: environments; with more than one the storage is two-dimensional.
        device: where everything is.
        learn: how the targets are updated; None: the step only writes, draws, and sets priorities.
        n_steps: steps of a transition.
        windows: of the buffer.
        storage: further options of the storage.
        rows: where the rows are; None: on the device.
        prefetch: as of the buffer.
    """

    sampler: str
    envs: int = 1
    device: str = "cpu"
    learn: str | None = None
    n_steps: int = 1
    windows: Any = None
    storage: Mapping[str, Any] = field(default_factory=dict)
    rows: str | None = None
    prefetch: int | None = None
    buffer: TensorDictReplayBuffer = field(init=False)
    loss: SACLoss | None = None

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        rows = self.rows or self.device
        storage = LazyTensorStorage(CAPACITY, device=rows, ndim=1 if self.envs == 1 else 2, **self.storage)
        sampler, options = SAMPLERS[self.sampler](), {"n_steps": self.n_steps, "prefetch": self.prefetch}
        options["windows"] = self.windows
        self.buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=BATCH, **options)
        # Not float64: compiled code leaves changes in place of such a number on the CPU out (PyTorch 2.13).
        self.beta = torch.full((), 0.4, dtype=torch.float32, device=self.device)
        if self.learn is not None:
            on_device: dict[str, Any] = {"dtype": torch.float64, "device": self.device}
            actor = make_sac_actor(OBSERVATION, ACTION, CELLS, **on_device)
            self.loss = SACLoss(actor, make_sac_critic(OBSERVATION, ACTION, CELLS, **on_device), target_entropy=-3.0)
            parameters = [parameter for parameter in self.loss.parameters() if parameter.requires_grad]
            self.optimizer = torch.optim.Adam(parameters, lr=1e-2, fused=True, capturable=True)
            self.updater: Any = {
                "soft": lambda loss: SoftUpdate(loss, tau=0.1),
                "hard": lambda loss: HardUpdate(loss, value_network_update_interval=3),
            }[self.learn](self.loss)
        for number in range(3):
            self.buffer.extend(self.data(-1 - number))

    def data(self, number: int) -> TensorDict:
        """The batch that is written at a step."""
        shape = (WRITTEN,) if self.envs == 1 else (self.envs, WRITTEN // self.envs)
        data = make_batch(*shape, seed=1000 + number)
        # Trajectories of about ten steps.
        data["next", "done"] = torch.zeros(*shape, 1, dtype=torch.bool)
        data["next", "done"][..., -1, :] = number % 2 == 0
        return data.apply(lambda tensor: tensor.to(self.device), device=torch.device(self.device))

    def step(self, data: TensorDict) -> tuple[Tensor, TensorDict]:
        """Draw, write, learn, and set priorities; the index of what was written, and the batch."""
        self._anneal()
        batch = self.buffer.sample()
        index = self.buffer.extend(data)
        if self.loss is None:
            batch["td_error"] = batch["observation"].abs().sum(-1, keepdim=True)
        else:
            loss = total(self.loss(batch.view(-1)))
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            self.updater.step()
        self.buffer.update_tensordict_priority(batch)
        return index, batch

    def learning(self, data: TensorDict) -> tuple[Tensor, Tensor, TensorDict]:
        """The part of a step that is compiled: all but the optimiser's; the sum of the losses, the index, the batch."""
        self._anneal()
        batch = self.buffer.sample()
        index = self.buffer.extend(data)
        assert self.loss is not None
        out = self.loss(batch)
        self.buffer.update_tensordict_priority(batch)
        return out["loss_qvalue"] + out["loss_actor"] + out["loss_alpha"], index, batch

    def _anneal(self) -> None:
        sampler = self.buffer.sampler
        if isinstance(sampler, PrioritizedSampler):
            self.beta.add_(0.05).clamp_(max=1.0)
            sampler.beta = self.beta

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Everything that a step changes, by name."""
        storage, sampler = self.buffer.storage, self.buffer.sampler
        yield "ring", storage.ring.counters.clone()
        for i, rows in enumerate(storage.columns.parts):
            yield f"rows {i}", rows[: len(self.buffer) // self.envs].clone()
        if storage.readers.end_bits is not None:
            yield "end bits", storage.readers.end_bits.ends.clone()
        yield "random", sampler.random_state(self.device).state.clone()
        if isinstance(sampler, PrioritizedSampler):
            for name in ("leaves", "nodes", "scalars"):
                yield name, getattr(sampler.tree, name).clone()
            if sampler.tree.eligible is not None:
                yield "eligible", sampler.tree.eligible.clone()
        if isinstance(sampler, SliceSampler):
            index = sampler.trajectory_index
            yield from (("ends", index.ends.clone()), ("sums", index.sums.clone()))
        if self.loss is not None:
            for name, tensor in self.loss.state_dict().items():
                if isinstance(tensor, Tensor):
                    yield name, tensor.clone()


class Pinned(World):
    """Rows in pinned memory, of which each step draws before it does anything else."""

    def __init__(self, sampler: str, draws: int = 1, **options: Any) -> None:
        super().__init__(sampler, **{"rows": "pinned", "prefetch": 1, **options})
        self.draws = draws

    def draw(self) -> TensorDict:
        """The next batch."""
        return self.buffer.sample()

    def step(self, data: TensorDict) -> tuple[Tensor, TensorDict]:
        """Draw, learn, set priorities, and write."""
        batches = []
        for _ in range(self.draws):
            batch = self.draw()
            batch["td_error"] = batch["observation"].abs().sum(-1, keepdim=True)
            self.buffer.update_tensordict_priority(batch)
            batches.append(batch)
        self._anneal()
        return self.buffer.extend(data), torch.stack(batches)


class InBranches(Pinned):
    """What replays do with prefetch and rows on a GPU, by eager calls: each draw gets what the one before has left.

    Attributes:
        replays: whether the calls are replays: others draw as without prefetch.
        ahead: the batch that the next replay gets.
    """

    def __init__(self, sampler: str, draws: int = 1, **options: Any) -> None:
        super().__init__(sampler, draws, rows=None, prefetch=None, **options)
        self.replays = False
        self.ahead: TensorDict | None = None

    def draw(self) -> TensorDict:
        if not self.replays:
            return self.buffer.sample()
        batch = self.buffer.sample() if self.ahead is None else self.ahead
        self.ahead = self.buffer.sample()
        return batch


#: Rows whose batches are computed: in fewer bytes than they are written, and drawn in others.
COMPUTED = {
    "dtypes": {"observation": torch.bfloat16, "action": Codec(torch.uint8, scale=1 / 100, offset=-1.0)},
    "batch_dtypes": {"observation": torch.float32},
}
WINDOWS = {"observation": Window(-2, 0), "action": Window(0, 2, outside="zero", mask="action_is_pad")}
#: By name, what to make of a device.
WORLDS: dict[str, Callable[[str], World]] = {
    **{name: lambda device, name=name: World(name, device=device) for name in SAMPLERS},
    "slices of two environments": lambda device: World("slices", envs=2, device=device),
    "prioritized slices of two environments": lambda device: World("prioritized slices", envs=2, device=device),
    "rows of fewer bytes": lambda device: World("prioritized", device=device, storage=COMPUTED),
    "slices of fewer bytes": lambda device: World("slices", envs=2, device=device, storage=COMPUTED),
    "three steps": lambda device: World("uniform", device=device, n_steps=3),
    "three steps of two environments": lambda device: World("prioritized", envs=2, device=device, n_steps=3),
    "windows": lambda device: World("uniform", device=device, windows=WINDOWS),
    "windows of two environments": lambda device: World("prioritized", envs=2, device=device, windows=WINDOWS),
    "soft actor-critic of three steps": lambda device: World("prioritized", device=device, learn="soft", n_steps=3),
    "soft actor-critic": lambda device: World("prioritized", device=device, learn="soft"),
    "soft actor-critic on uniform batches, targets copied": lambda device: World(
        "uniform", device=device, learn="hard"
    ),
}


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two results or states are not the same, bit for bit."""
    if isinstance(a, Tensor):
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [path]
    if isinstance(a, TensorDict):
        keys = {str(key): key for key in a.keys(True, True)}
        if keys.keys() != {str(key) for key in b.keys(True, True)}:
            return [f"{path}: keys"]
        return [name for text, key in keys.items() for name in differences(a[key], b[key], f"{path} {text}")]
    assert len(a) == len(b)
    return [name for i, (x, y) in enumerate(zip(a, b, strict=True)) for name in differences(x, y, f"{path}[{i}]")]


def run(world: World, step: Callable[..., Any], n: int) -> list[Any]:
    """Results, length and state after each of ``n`` calls, copied."""
    out = []
    for number in range(n):
        index, batch = step(world.data(number))
        out.append((index.clone(), batch.clone(), torch.tensor(len(world.buffer)), [v for _, v in world.state()]))
    return out
