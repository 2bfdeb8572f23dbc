"""A whole update of soft actor-critic, by each library on the same networks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.peers.libraries import ALPHA, BETA, EPS, UnavailableError, needing
from benchmarks.peers.sources import TRANSITIONS
from benchmarks.workloads import losses
from benchmarks.workloads.losses import BY_HAND, OURS, TORCHRL
from benchmarks.workloads.plain_losses import make_batch
from benchmarks.workloads.workload import Workload
from gpubuf import Learner
from gpubuf.optim import AdamW

#: How the contenders of the study of losses are called here.
WHO = {"torchrl": TORCHRL, "plain": BY_HAND}
#: Rows of the buffer that updates draw from, speed of the targets, learning rate.
STORED, TAU, RATE = 100_000, 0.005, 3e-4


@dataclass(frozen=True, kw_only=True)
class Sac(Workload):
    """Soft actor-critic: the loss and its backward, or a whole update."""

    def prepare(self, filled: None, library: str, device: str) -> Callable[[], object]:
        if "SAC-update" in self.name:
            return prepare_update(library, self.batch, device)
        return losses.prepare("sac", WHO.get(library, OURS), self.batch, device)


def prepare_update(library: str, rows: int, device: str) -> Callable[[], object]:
    """A whole update: sample by priority, losses, backward, Adam, targets, new priorities."""
    if library == "gpubuf-graph" and device != "cuda":
        raise UnavailableError("CUDA graphs need a GPU: elsewhere a gpubuf.Learner runs the same calls one by one")
    loss, _ = losses.made("sac", WHO.get(library, OURS), rows, device)
    buffer = filled_buffer(library, rows, device)
    update = updating(library, loss, buffer, device)
    if library == "gpubuf-graph":
        # So that replays are checked, and timed: the first calls are those of the step itself.
        for _ in range(6):
            update()
        assert update.captured
    check_update(loss, buffer, update, rows, device)
    return update


def filled_buffer(library: str, rows: int, device: str) -> Any:
    """A prioritized buffer of :data:`STORED` transitions, which draws batches of ``rows``."""
    with needing(library):
        data = importlib.import_module("torchrl.data" if library == "torchrl" else "gpubuf")
        storage = data.LazyTensorStorage(STORED, device=device)
        options = {"alpha": ALPHA, "beta": BETA, "eps": EPS, "storage": storage, "batch_size": rows}
        buffer = data.TensorDictPrioritizedReplayBuffer(**options)
    buffer.extend(make_batch(STORED).to(device))
    return buffer


def updating(library: str, loss: Any, buffer: Any, device: str) -> Any:
    """One update: gpubuf's learner, or what a user of TorchRL writes."""
    if library != "torchrl":
        optimizer = AdamW(loss.parameters(), RATE, weight_decay=0.0, targets=loss, tau=TAU)
        return Learner(loss, optimizer, buffer=buffer, capture=library == "gpubuf-graph")
    target = importlib.import_module("torchrl.objectives").SoftUpdate(loss, tau=TAU)
    on_gpu = device == "cuda"
    adam = torch.optim.Adam(loss.parameters(), lr=RATE, capturable=on_gpu, fused=on_gpu)

    def update() -> None:
        batch = buffer.sample()
        losses = loss(batch)
        adam.zero_grad(set_to_none=True)
        (losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]).backward()
        adam.step()
        target.step()
        buffer.update_tensordict_priority(batch)

    return update


def check_update(loss: Any, buffer: Any, update: Callable[[], Any], rows: int, device: str) -> None:
    """Assert that an update moves all networks, the targets as far as they should, and sets priorities."""
    everything = torch.arange(STORED, device=device)
    # So little that the rows of one update outweigh all others together.
    buffer.update_priority(everything, torch.full((STORED,), 1e-8, device=device))
    learned = [name for name in loss.state_dict() if "network_params." in name or name == "log_alpha"]
    before = {name: loss.state_dict()[name].detach().clone() for name in learned}
    update()
    after = loss.state_dict()
    for name, value in before.items():
        assert not torch.equal(after[name], value), f"{name} did not change"
        assert after[name].isfinite().all(), f"{name} is not finite"
    critics, targets = loss.qvalue_network_params, loss.target_qvalue_network_params
    old = {name: value for name, value in before.items() if "target_qvalue" in name}
    assert len(old) == len(list(targets.values(True, True)))
    for (name, was), critic in zip(old.items(), critics.values(True, True), strict=True):
        torch.testing.assert_close(after[name], was.lerp(critic.detach(), TAU), rtol=1e-4, atol=1e-6)
    # Of all rows 8 batches would have drawn many more.
    again = torch.cat([buffer.sample()["index"] for _ in range(8)])
    assert again.unique().numel() < 2 * rows
    buffer.update_priority(everything, torch.ones(STORED, device=device))


def _workload(title: str, rows: int, libraries: tuple[str, ...], stored: int, **more: Any) -> Sac:
    named = {"name": f"{title.replace(' ', '-')}-{rows}", "title": f"{title}, {rows}", "libraries": libraries}
    return Sac(**named, capacity=stored, batch=rows, row_bytes=TRANSITIONS.row_bytes, quick=rows == 256, **more)


_ALL = (
    *(_workload("SAC loss and backward", rows, ("gpubuf", "torchrl", "plain"), rows) for rows in (256, 1024)),
    _workload("SAC update", 256, ("gpubuf", "gpubuf-graph", "torchrl"), STORED),
)
#: By name.
WORKLOADS = {workload.name: workload for workload in _ALL}
