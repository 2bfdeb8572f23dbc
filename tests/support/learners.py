"""Small learners, their buffers, and what users change between two updates."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from gpubuf import (
    LazyTensorStorage,
    Learner,
    SACLoss,
    SoftUpdate,
    TD3Loss,
    TensorDictPrioritizedReplayBuffer,
)
from gpubuf.modules import make_sac_actor, make_sac_critic
from gpubuf.optim import AdamW
from gpubuf.train.algorithms import ALGORITHMS

OBSERVATION, ACTION, ROWS, BATCH = 4, 2, 64, 16
DOUBLE: dict[str, Any] = {"dtype": torch.float64}


class Plain:
    """A loss as a function, which nobody knows: its learner goes the general way."""

    def __init__(self, loss: Any) -> None:
        self._loss, self.delayed_targets = loss, loss.delayed_targets

    def __call__(self, batch: TensorDict) -> Any:
        return self._loss(batch)

    def critic_losses(self, batch: TensorDict) -> Any:
        return self._loss.critic_losses(batch)


def transitions(rows: int = ROWS, device: str = "cpu", dtype: torch.dtype = torch.float64, **more: Any) -> TensorDict:
    """Rows with ends of both kinds, and rewards of several steps."""
    new = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=new, **DOUBLE).to(dtype)

    terminated = torch.rand(rows, 1, generator=new) < 0.2
    truncated = torch.rand(rows, 1, generator=new) < 0.2
    following = {"observation": normal(rows, OBSERVATION), "reward": normal(rows, 1), "terminated": terminated}
    following |= {"truncated": truncated, "done": terminated | truncated}
    action = torch.rand(rows, ACTION, generator=new, **DOUBLE).to(dtype) * 2 - 1
    steps = torch.randint(1, 4, (rows, 1), generator=new)
    entries = {"observation": normal(rows, OBSERVATION), "action": action, "steps_to_next_obs": steps, **more}
    return TensorDict({**entries, "next": TensorDict(following, [rows])}, [rows]).to(device)


def td3_actor(cells: tuple[int, ...] = (8, 8)) -> nn.Module:
    actor = ALGORITHMS["td3"].actor(OBSERVATION, ACTION, cells, device="cpu")
    return actor.double()


def sac_loss(cells: tuple[int, ...] = (8, 8), **options: Any) -> SACLoss:
    critic = make_sac_critic(OBSERVATION, ACTION, cells, num_nets=options.get("num_qvalue_nets", 2), **DOUBLE)
    actor = make_sac_actor(OBSERVATION, ACTION, cells, **DOUBLE)
    return SACLoss(actor, critic, **{"target_entropy": -1.0, **options})


def td3_loss(cells: tuple[int, ...] = (8, 8), **options: Any) -> TD3Loss:
    critic = make_sac_critic(OBSERVATION, ACTION, cells, num_nets=options.get("num_qvalue_nets", 2), **DOUBLE)
    return TD3Loss(td3_actor(cells), critic, **{"bounds": (-1.0, 1.0), **options})


LOSSES: dict[str, Callable[..., Any]] = {"sac": sac_loss, "td3": td3_loss}


class World:
    """A learner, and what it is made of.

    Args:
        kind: of the loss.
        device: of everything.
        general: whether the learner gets a loss that it does not know.
        ours: whether the optimiser is gpubuf's, which moves the targets too; else torch's.
        loss: instead of that of ``kind``.
        capture: of the learner.
        fused: of torch's optimiser.
        dtype: of the loss and its batches.
    """

    def __init__(
        self,
        kind: str = "sac",
        device: str = "cpu",
        *,
        general: bool = False,
        ours: bool = True,
        loss: Any = None,
        capture: bool = True,
        fused: bool = False,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        torch.manual_seed(0)
        self.dtype = dtype
        self.loss = (LOSSES[kind]().to(dtype) if loss is None else loss).to(device)
        learning = [each for each in self.loss.parameters() if each.requires_grad]
        self.target: Any = None
        if ours:
            self.optimizer: Any = AdamW(learning, 1e-2, weight_decay=0.1, targets=self.loss, tau=0.1)
        else:
            # Graphs need the steps on the device; what is fused has them there, also if the device is a CPU.
            self.optimizer = torch.optim.Adam(learning, 1e-2, capturable=device != "cpu", fused=fused)
            self.target = SoftUpdate(self.loss, tau=0.1)
        storage = LazyTensorStorage(ROWS, device=device)
        self.buffer = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage, batch_size=BATCH)
        self.buffer.extend(transitions(device=device, dtype=dtype))
        given = Plain(self.loss) if general else self.loss
        self.learner = Learner(given, self.optimizer, buffer=self.buffer, target=self.target, capture=capture)

    def run(self, updates: int, *, policy_every: int = 1) -> list[dict[str, float]]:
        """The losses of so many updates, each with its own noise."""
        found = []
        for number in range(updates):
            losses = self.learner(policy=number % policy_every == policy_every - 1)
            found.append({name: float(value) for name, value in losses.items()})
        return found

    def state(self) -> dict[str, Tensor]:
        """Everything that updates move, copied."""
        found = {f"loss {name}": each for name, each in self.loss.state_dict().items()}
        found |= {f"buffer {name}": each for name, each in self.buffer.sampler.state_dict().items()}
        for i, each in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer {i} {name}": value for name, value in each.items() if isinstance(value, Tensor)}
        return {name: each.detach().clone() for name, each in found.items() if isinstance(each, Tensor)}


def first_weight(loss: Any) -> nn.Parameter:
    """The actor's."""
    return next(iter(loss.actor_network_params.parameters()))


def _set(world: World, **values: Any) -> None:
    world.optimizer.param_groups[0].update(values)


def _schedule(world: World) -> None:
    """PyTorch's schedulers set the rate of a group."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(world.optimizer, 0.3)
    world.optimizer._opt_called = True
    scheduler.step()


def _load_optimizer(world: World) -> None:
    state = copy.deepcopy(world.optimizer.state_dict())
    for each in state["state"].values():
        each["exp_avg"] = each["exp_avg"] * -3
    world.optimizer.load_state_dict(state)


def _load_loss(world: World) -> None:
    state = {name: each * 1.5 if each.is_floating_point() else each for name, each in world.loss.state_dict().items()}
    world.loss.load_state_dict(state)


def _move(world: World) -> None:
    """The parameter gets other memory, as ``.to()`` gives it."""
    weight = first_weight(world.loss)
    weight.data = weight.data * 1.5


def _freeze(world: World) -> None:
    first_weight(world.loss).requires_grad_(False)


def _gamma(world: World) -> None:
    world.loss.value_estimator.gamma.fill_(0.5)


def _option(world: World) -> None:
    world.loss.loss_function = "l1"


def _seed(world: World) -> None:
    torch.manual_seed(5)


def _beta(world: World) -> None:
    world.buffer.sampler.beta = 1.0


def _estimator(world: World) -> None:
    world.loss.make_value_estimator(gamma=0.3)


def _buffer(world: World) -> None:
    storage = LazyTensorStorage(ROWS, device=world.buffer.storage.device)
    other = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage, batch_size=BATCH)
    other.extend(
        transitions(device=str(storage.device), dtype=world.dtype).apply(
            lambda each: each * 2 if each.is_floating_point() else each
        )
    )
    world.learner.buffer = world.buffer = other


def _transform(world: World) -> None:
    world.buffer.append_transform(lambda batch: batch.set("observation", 2 * batch["observation"]))


def _stratified(world: World) -> None:
    world.buffer.sampler.stratified = True


#: What may change between two updates: by name, a function of a world.
CHANGES: Mapping[str, Callable[[World], None]] = {
    "nothing": lambda world: None,
    "the learning rate": lambda world: _set(world, lr=1e-4),
    "the moments' decay": lambda world: _set(world, betas=(0.5, 0.6)),
    "weight decay": lambda world: _set(world, weight_decay=0.5),
    "a scheduler": _schedule,
    "the importance exponent": _beta,
    "the discount": _gamma,
    "an option of the loss": _option,
    "a loaded optimiser state": _load_optimizer,
    "a loaded loss state": _load_loss,
    "a parameter in other memory": _move,
    "a frozen parameter": _freeze,
    "the seed": _seed,
    "the value estimator": _estimator,
    "the buffer": _buffer,
    "the buffer's transforms": _transform,
    "how the buffer draws": _stratified,
}

#: Those that a graph sees: what is changed is read on the device.
CONSTANT = frozenset(CHANGES) - {
    *("an option of the loss", "a loaded loss state"),
    *("a parameter in other memory", "a frozen parameter"),
    *("the value estimator", "the buffer", "the buffer's transforms", "how the buffer draws"),
}


def changed(world: World, change: Callable[[World], None]) -> dict[str, Tensor]:
    """The state after updates of both kinds, a change, and more updates: each half has warm-up, capture and replays."""
    torch.manual_seed(2)
    world.run(12, policy_every=2)
    change(world)
    world.run(12, policy_every=2)
    return world.state()
