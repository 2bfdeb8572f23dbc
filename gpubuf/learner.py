"""An update that captures itself: ``learner = gpubuf.Learner(loss, optimizer, buffer=buffer)``."""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from gpubuf import graphs
from gpubuf.data.storage.layout import priority_mask_key
from gpubuf.data.transforms import Compose
from gpubuf.objectives.base import LossModule, _check_updater
from gpubuf.objectives.explicit import KNOWN, UnknownError, Update, Watch, update_of
from gpubuf.optim import AdamW


class Target(Protocol):
    """What moves target parameters after a step of the optimiser, as :class:`~gpubuf.objectives.SoftUpdate` does."""

    def step(self) -> None: ...


class Learner:
    """An update of an off-policy algorithm: draw, losses, gradients, optimiser, targets, priorities. ``learner()``.

    On a GPU the first calls run it as it is; then it is captured as one CUDA graph, and replayed (see
    :func:`gpubuf.capture`). Whatever a graph would repeat leads to a new one: a mode (``train()``, ``eval()``), a
    module or parameter that was replaced or frozen, options, keys and value estimator of the loss, transforms and
    settings of the buffer, other parts of the learner, hyperparameters of an optimiser that keeps them on the host.
    :class:`gpubuf.optim.AdamW`, buffers and schedules of the loss are read on the device, and need none. An update
    that can't be captured runs eagerly, and a warning says why, once.

    On a CPU, :class:`~gpubuf.objectives.SACLoss` and :class:`~gpubuf.objectives.TD3Loss` of plain perceptrons (see
    :mod:`gpubuf.modules`) have their gradients written out, without autograd: the same up to rounding, and faster. They
    are written into the same memory at each call, and are the ``grad`` of the parameters. All else, and parameters with
    hooks, goes through autograd.

    Args:
        loss: a loss of :mod:`gpubuf.objectives` or another library, or a function: it takes a batch, and returns a
            TensorDict or dict whose entries ``"loss_*"`` are minimised together. It writes priorities into the batch.
        optimizer: of the parameters that learn.
        buffer: what batches are drawn from, and priorities given back to. None: each call gets a batch.
        target: moves the targets after each step; None where the optimiser does it, or there are none.
        capture: whether to capture on a GPU.
    """

    def __init__(
        self,
        loss: Any,
        optimizer: torch.optim.Optimizer,
        *,
        buffer: Any = None,
        target: Target | None = None,
        capture: bool = True,
    ) -> None:
        self.loss, self.optimizer, self.buffer, self.target = loss, optimizer, buffer, target
        if isinstance(loss, LossModule):
            _check_updater(loss, None)
        self._capture = capture
        self._explicit: Update | None = None
        self._watch: Watch | None = None
        if not isinstance(optimizer, AdamW):
            # Another optimiser loads its state into new tensors.
            optimizer.register_load_state_dict_post_hook(functools.partial(_reset, weakref.ref(self)))
        self.reset()

    def reset(self) -> None:
        """Drop the graphs: the next calls are those of a new warm-up."""
        self._graphs: dict[Any, graphs.Captured] = {}
        self._captured_for: Any = None

    @property
    def captured(self) -> bool:
        """Whether all kinds of updates so far are replayed as graphs."""
        return bool(self._graphs) and all(each.captured for each in self._graphs.values())

    def __call__(self, batch: TensorDictBase | None = None, *, policy: bool = True) -> TensorDict:
        """One update. Never waits for a GPU, but for the call that captures.

        Args:
            batch: to learn from; None: drawn from the buffer. Its priorities are written into it.
            policy: whether policy and temperature learn. False for a policy that learns more rarely than its critics:
                the loss needs a method ``critic_losses``. Targets of :class:`~gpubuf.objectives.TD3Loss` move with the
                policy, as in its paper, and all others at every call.

        Returns:
            The losses, and other scalars that the loss returned, ``[]``, without gradient. A graph writes them into the
            same tensors at each call: clone those that you keep.

        Raises:
            ValueError: there is neither batch nor buffer; a loss is no scalar; or a priority is refused.
        """
        if batch is None and self.buffer is None:
            raise ValueError("a learner without a buffer needs a batch: learner(batch)")
        if not self._capture or self._device.type not in graphs.GRAPH_DEVICES:
            return self._update(batch, policy)[0]
        state = self._graph_state()
        if state != self._captured_for:
            self.reset()
            self._captured_for = state
        losses, written = self._replayed(batch, policy)
        if batch is not None:
            for key, value in written.items():
                batch.set(key, value.clone())
        return losses

    # --- an update ---

    def _update(self, batch: TensorDictBase | None, policy: bool) -> tuple[TensorDict, dict[Any, Tensor]]:
        """(the losses, what was written into the batch)."""
        if batch is None:
            batch = self.buffer.sample()
        assert batch is not None
        losses = self._gradients(batch, policy)
        moving = policy or not getattr(self.loss, "delayed_targets", False)
        if isinstance(self.optimizer, AdamW):
            self.optimizer.step(targets=moving)
        else:
            self.optimizer.step()
        if self.target is not None and moving:
            self.target.step()
        if self.buffer is not None:
            self.buffer.update_tensordict_priority(batch)
        keys = getattr(self.loss, "tensor_keys", None)
        priority = getattr(keys, "priority", "td_error")
        written = {key: batch.get(key, None) for key in (priority, priority_mask_key(priority))}
        return losses, {key: value for key, value in written.items() if value is not None}

    def _gradients(self, batch: TensorDictBase, policy: bool) -> TensorDict:
        """Set the gradients; the losses."""
        explicit = self._known()
        if explicit is not None and explicit.fits(batch):
            losses: Mapping[str, Tensor] = explicit(batch, policy)
            if not self.loss.nan_named:
                self.loss._look_for_nan(batch, losses)
            return TensorDict(dict(losses), batch_size=[])
        found = self.loss(batch) if policy else self.loss.critic_losses(batch)
        losses = {name: value for name, value in found.items() if value.ndim == 0 or name.startswith("loss_")}
        minimised = [value for name, value in losses.items() if name.startswith("loss_")]
        if not minimised or any(value.ndim for value in minimised):
            raise ValueError(f"a learner minimises scalars called 'loss_*', got {dict(found.items()).keys()}")
        self.optimizer.zero_grad(set_to_none=True)
        # The losses share no parameters, so their sum gives each parameter the gradient of its own loss.
        # By this thread: another one, which PyTorch has for each GPU, waits for Python at every function of ours.
        with torch.autograd.set_multithreading_enabled(False):
            sum(minimised[1:], minimised[0]).backward()
        return TensorDict({name: value.detach() for name, value in losses.items()}, batch_size=[])

    def _known(self) -> Update | None:
        """The update that is written out, if there is one for the loss as it is."""
        loss = self.loss
        if type(loss) not in KNOWN or self._device.type in graphs.GRAPH_DEVICES:
            return None
        if torch.is_autocast_enabled("cpu"):
            return None
        if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
            return None
        if self._watch is None or not self._watch.unchanged():
            # Set at the end: who is interrupted before does it again.
            self._watch, self._explicit = None, None
            watch = Watch(loss, self.optimizer)
            with contextlib.suppress(UnknownError):
                groups = self.optimizer.param_groups
                self._explicit = update_of(loss, [each for group in groups for each in group["params"]])
            self._watch = watch
        return self._explicit

    # --- graphs ---

    @property
    def _device(self) -> torch.device:
        device: torch.device = self.optimizer.param_groups[0]["params"][0].device
        return device

    def _replayed(self, batch: TensorDictBase | None, policy: bool) -> tuple[TensorDict, dict[Any, Tensor]]:
        form: Any = policy
        if batch is not None:
            kinds = ((str(key), each) for key, each in batch.items(True, True) if isinstance(each, Tensor))
            form = policy, batch.batch_size, frozenset((key, each.shape, each.dtype) for key, each in kinds)
        step = self._graphs.get(form)
        if step is None:
            # With a buffer there is nothing to pass, and nothing to look at.
            run = functools.partial(self._update, policy=policy)
            step = self._graphs[form] = graphs.capture(run if batch is not None else functools.partial(run, None))
        replaying = step.captured
        try:
            return step() if batch is None else step(batch)  # type: ignore[no-any-return]
        except graphs.CaptureError as error:
            if replaying:
                # A buffer or a parameter was moved, and nothing has run.
                step.reset()
                return self._replayed(batch, policy)
            warnings.warn(f"the learner runs eagerly: {error}", category=UserWarning, stacklevel=3)
            self._capture = False
            return self._update(batch, policy)

    def _graph_state(self) -> list[Any]:
        """All that a graph repeats, and that may change: another one is captured for another state."""
        loss, optimizer, target, kind = self.loss, self.optimizer, self.target, self._device.type
        found: list[Any] = [loss, optimizer, target, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)]
        found += self._state_of_draws()
        found += (getattr(target, name, None) for name in ("eps", "value_network_update_interval"))
        options = ((name, each) for name, each in getattr(loss, "__dict__", {}).items() if not name.startswith("_"))
        found += (each for each in options if type(each[1]) in (bool, int, float, str))
        roots: list[Any] = [loss] if isinstance(loss, nn.Module) else []
        if isinstance(loss, LossModule):
            found += (*vars(loss._tensor_keys).values(), loss._mask_keys, getattr(loss, "_value_estimator", None))
            found += (*map(id, loss._parameters.values()), *map(id, loss._buffers.values()))
            roots = [each.network for each in loss._networks.every.values()] if loss._networks else roots
        for part in (part for root in roots for part in root.modules()):
            # The rate is that of dropout.
            found += (id(part), part.training, vars(part).get("p"))
            found += (*map(id, part._parameters.values()), *map(id, part._buffers.values()))
        for group in optimizer.param_groups:
            found += ((each.data_ptr(), each.requires_grad) for each in group["params"])
            if not isinstance(optimizer, AdamW):
                found += (
                    id(each) if isinstance(each, Tensor) else each for key, each in group.items() if key != "params"
                )
        return found

    def _state_of_draws(self) -> list[Any]:
        """The buffer, and what its batches depend on."""
        buffer = self.buffer
        sampler, transforms = getattr(buffer, "sampler", None), getattr(buffer, "transform", None)
        found = [buffer, getattr(buffer, "batch_size", None), sampler]
        if isinstance(transforms, Compose):
            found += transforms
        settings = (getattr(sampler, name, None) for name in getattr(sampler, "settings", None) or ())
        return found + [each for each in settings if not isinstance(each, Tensor)]


def _reset(learner: weakref.ref[Learner], _: torch.optim.Optimizer) -> None:
    found = learner()
    if found is not None:
        found.reset()
