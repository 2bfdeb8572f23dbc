"""An update that captures itself: ``learner = gpubuf.Learner(loss, optimizer, buffer=buffer)``."""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, Protocol, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictParams
from torch import Tensor, nn

from gpubuf import graphs
from gpubuf.data.recording import current, is_same
from gpubuf.data.storage.layout import priority_mask_key
from gpubuf.data.transforms import Compose
from gpubuf.modules.linear import _hooks_of_all
from gpubuf.objectives.base import LossModule, _check_updater
from gpubuf.objectives.explicit import KNOWN, UnknownError, Update, no_step, update_of
from gpubuf.objectives.fused import FUSED, precision_of_products
from gpubuf.optim import AdamW

_modes = torch._C._len_torch_dispatch_stack


class Target(Protocol):
    """What moves target parameters after a step of the optimiser, as :class:`~gpubuf.objectives.SoftUpdate` does."""

    def step(self) -> None: ...


class Learner:
    """An update of an off-policy algorithm: draw, losses, gradients, optimiser, targets, priorities. ``learner()``.

    On a GPU the first calls run it as it is; then it is captured as one CUDA graph, and replayed (see
    :func:`gpubuf.capture`). Whatever a graph would repeat leads to a new one: a mode (``train()``, ``eval()``), a
    module or parameter that was replaced or frozen, hooks, flags, fractions and texts among the attributes of modules,
    options, keys and value estimator of the loss, transforms and settings of the buffer, other parts of the learner,
    hyperparameters of an optimiser that keeps them on the host. After other changes, as of whole numbers in a module or
    of what a transform or a value estimator keeps on the host, call :meth:`reset`; also after changes of the modules of
    a loss that is a function, which doesn't say what they are. :class:`gpubuf.optim.AdamW`, buffers and schedules of
    the loss are read on the device, and need none. An update that can't be captured runs eagerly, and a warning says
    why, once.

    :class:`~gpubuf.objectives.SACLoss` of plain perceptrons (see :mod:`gpubuf.modules`), on a CPU
    :class:`~gpubuf.objectives.TD3Loss`, and on a GPU :meth:`FastSAC's loss
    <gpubuf.objectives.DistributionalSACLoss.fastsac>`, have their gradients written out, without autograd: the same up
    to rounding, and faster. On a GPU whole networks are then one launch (:mod:`gpubuf.kernels.perceptrons`), by
    TF32 where ``torch.set_float32_matmul_precision("high")`` allows it, and in bfloat16 under autocast. Gradients
    are written into the same memory at each call, and are the ``grad`` of the parameters. All else, and parameters
    with hooks, goes through autograd.

    Args:
        loss: a loss of :mod:`gpubuf.objectives` or another library, or a function: it takes a batch, and returns a
            TensorDict or dict whose entries ``"loss_*"`` are minimised together, or ``"loss"`` if there is no such
            entry. It writes priorities into the batch.
        optimizer: of the parameters that learn.
        buffer: what batches are drawn from, always without autocast, and priorities given back to. None: each call gets
            a batch.
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
        self._begin()

    def _begin(self) -> None:
        self._explicit: Update | None = None
        self._watch: Watch | None = None
        if not isinstance(self.optimizer, AdamW):
            # Another optimiser loads its state into new tensors.
            self.optimizer.register_load_state_dict_post_hook(functools.partial(_reset, weakref.ref(self)))
        self.reset()

    def __getstate__(self) -> dict[str, Any]:
        """The parts of the learner: all else is bound to their memory, and a copy makes its own."""
        return {name: vars(self)[name] for name in ("loss", "optimizer", "buffer", "target", "_capture")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def reset(self) -> None:
        """Drop the graphs: the next calls are those of a new warm-up."""
        self._graphs: dict[Any, graphs.Captured] = {}

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
            The losses, and other scalars that the loss returned, ``[]``, without gradient.

        Raises:
            ValueError: there is neither batch nor buffer; a loss is no scalar; or a priority is refused.
        """
        if batch is None and self.buffer is None:
            raise ValueError("a learner without a buffer needs a batch: learner(batch)")
        if not self._capture or self._device.type not in graphs.GRAPH_DEVICES:
            return self._update(batch, policy)[0]
        self._look()
        losses, written = self._replayed(batch, policy)
        if batch is not None:
            for key, value in written.items():
                batch.set(key, value)
        return losses

    # --- an update ---

    def _update(self, batch: TensorDictBase | None, policy: bool) -> tuple[TensorDict, dict[Any, Tensor]]:
        """(the losses, what was written into the batch)."""
        if batch is None:
            kind = self._device.type
            # Autocast is for the loss, and not for networks among the buffer's transforms.
            with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext():
                batch = self.buffer.sample()
        assert batch is not None
        explicit = self._known()
        if explicit is not None and explicit.fits(batch):
            losses, step_of = explicit.prepare(batch, policy)
            if not self.loss.nan_named:
                self.loss._look_for_nan(batch, losses)
        else:
            losses, step_of = self._gradients(batch, policy), no_step
        moving = policy or not getattr(self.loss, "delayed_targets", False)
        with self._giving_priorities(batch):
            step = step_of(self.optimizer)
            if isinstance(self.optimizer, AdamW):
                more: dict[str, Any] = {} if step is None else {"fused": step}
                self.optimizer.step(targets=moving, **more)
            else:
                self.optimizer.step()
            if self.target is not None and moving:
                self.target.step()
        keys = getattr(self.loss, "tensor_keys", None)
        priority = getattr(keys, "priority", "td_error")
        written = {key: batch.get(key, None) for key in (priority, priority_mask_key(priority))}
        scalars = TensorDict(dict(losses), batch_size=[])
        return scalars, {key: value for key, value in written.items() if value is not None}

    @contextlib.contextmanager
    def _giving_priorities(self, batch: TensorDictBase) -> Iterator[None]:
        """Give the batch's priorities back, in a graph by a branch of it: what comes within goes on meanwhile."""
        if self.buffer is None:
            yield
        elif current.recording is None:
            yield
            self.buffer.update_tensordict_priority(batch)
        else:
            main, side = torch.cuda.current_stream(self._device), torch.cuda.Stream(self._device)
            side.wait_stream(main)
            with torch.cuda.stream(side):
                self.buffer.update_tensordict_priority(batch)
            try:
                yield
            finally:
                main.wait_stream(side)

    def _gradients(self, batch: TensorDictBase, policy: bool) -> dict[str, Tensor]:
        """Set the gradients by autograd; the losses."""
        # Of an autocast around several updates it would have the weights of the first.
        torch.clear_autocast_cache()
        found = self.loss(batch) if policy else self.loss.critic_losses(batch)
        losses = {name: value for name, value in found.items() if value.ndim == 0 or name.startswith("loss")}
        parts = [value for name, value in losses.items() if name.startswith("loss_")]
        minimised = parts or [value for name, value in losses.items() if name == "loss"]
        if not minimised or any(value.ndim for value in minimised):
            raise ValueError(f"a learner minimises scalars called 'loss_*', or 'loss', got {[*map(str, found.keys())]}")
        self.optimizer.zero_grad(set_to_none=True)
        # The losses share no parameters, so their sum gives each parameter the gradient of its own loss.
        # By this thread: another one, which PyTorch has for each GPU, waits for Python at every function of ours.
        with torch.autograd.set_multithreading_enabled(False):
            sum(minimised[1:], minimised[0]).backward()
        return {name: value.detach() for name, value in losses.items()}

    def _known(self) -> Update | None:
        """The update that is written out, if there is one for the loss as it is."""
        if type(self.loss) not in self._forms or _modes():
            return None
        if torch.is_autocast_enabled("cpu") or torch._C._are_functorch_transforms_active():
            return None
        self._look()
        return self._explicit

    def _look(self) -> None:
        """Where something has changed since the last update, drop the graphs, and find the update that fits.

        What notices the next change is set when that is done: who is interrupted before does it again.
        """
        parts = self.loss, self.optimizer, self.target, self.buffer
        if self._watch is not None and self._watch.parts == parts and self._watch.unchanged():
            return
        self._watch = None
        watch = Watch(*parts)
        self.reset()
        self._explicit = None
        with contextlib.suppress(UnknownError):
            learning = [each for group in self.optimizer.param_groups for each in group["params"]]
            self._explicit = update_of(self.loss, learning, self._forms)
        self._watch = watch

    @property
    def _forms(self) -> Mapping[type, type[Update]]:
        """The updates that are written out for the device, by the loss."""
        return FUSED if self._device.type in graphs.GRAPH_DEVICES else KNOWN

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


_PLAIN = (bool, int, float, str, type(None))
_PLACES = ("_modules", "_parameters", "_buffers")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_owned: Callable[[dict[str, Any]], tuple[dict[str, Any], ...]] = itemgetter(*_PLACES, *_HOOKS)
_params_of = itemgetter("params")
_learns, _hooks = attrgetter("requires_grad"), attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")


class Watch:
    """Notices changes of what an update depends on, by functions that are written in C: it looks at every update.

    That is which parts the update has, with their options, keys, modes and hooks; other attributes of modules that are
    flags, fractions or texts; where parameters are; the buffer's transforms; autocast. The settings of its sampler are
    for the capture to know.

    Args:
        parts: loss, optimiser, target and buffer.
    """

    def __init__(self, *parts: Any) -> None:
        loss, optimizer, target, buffer = self.parts = parts
        known = loss._networks.every.values() if isinstance(loss, LossModule) and loss._networks else ()
        roots: list[Any] = [each.network for each in known] or [loss]
        # What a loss of the user's own has besides.
        added = [name for name, each in loss._modules.items() if type(each) is not TensorDictParams] if known else []
        roots += [loss._modules[name] for name in added if name != "_value_estimator"]
        modules = [part for root in roots if isinstance(root, nn.Module) for part in root.modules()]
        own, drawing = (getattr(each, "__dict__", {}) for each in (loss, getattr(buffer, "parts", buffer)))
        self._attributes = [own, *map(vars, modules)]
        named = [(own, name) for name, each in own.items() if type(each) in _PLAIN and name[0] != "_"]
        for part in self._attributes[1:]:
            named += [
                (part, name) for name, each in part.items() if type(each) in (bool, float, str) and name[0] != "_"
            ]
        named += [(own, name) for name in ("_mask_keys", "_value_estimator", "_networks")]
        keys: list[dict[str, Any]] = [vars(own["_tensor_keys"])] if "_tensor_keys" in own else []
        keys += [vars(target)] if hasattr(target, "__dict__") else []
        named += [(each, name) for each in keys for name in each if type(each[name]) in (tuple, *_PLAIN)]
        read = [(each, name) for each in self._attributes for name in ("in_keys", "_in_keys") if name in each]
        named += read
        self._keys = [each[name] for each, name in read]
        named += [(drawing, name) for name in ("batch_size", "_batch_size", "sampler", "transform") if name in drawing]
        self._named = [*map(itemgetter(0), named)], [*map(itemgetter(1), named)]
        places = [each for part in self._attributes if "_modules" in part for each in _owned(part)]
        transforms = getattr(buffer, "transform", None)
        places += [transforms.steps._modules] if isinstance(transforms, Compose) else []
        self._learning = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        places += [each for tensor in self._learning for each in _hooks(tensor) if each]
        places += [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
        # Most are empty, and have to stay so.
        self._places, self._empty = [each for each in places if each], [each for each in places if not each]
        self._empty += cast("Any", _hooks_of_all)
        further = [tensor for each in known for tensor in (*each._tensors, *(each._target_tensors or ()))]
        self._tensors = list(dict.fromkeys((*self._learning, *further)))
        self._kind = self._learning[0].device.type
        self._values, self._objects, self._numbers = self._now()

    def _now(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Values that may be replaced by equal ones, objects that may not, and numbers."""
        groups = self.parts[1].param_groups
        values = [*map(dict.get, *self._named)]
        if not isinstance(self.parts[1], AdamW):
            values += (value for group in groups for name, value in group.items() if name != "params")
        parameters = chain.from_iterable(map(_params_of, groups))
        objects = [*chain.from_iterable(map(dict.values, self._places)), *parameters]
        numbers = [
            len(groups),
            *map(len, self._attributes),
            *chain.from_iterable(self._keys),
            any(self._empty),
            *map(Tensor.data_ptr, self._tensors),
            *map(Tensor.stride, self._tensors),
            *map(_learns, self._learning),
            *map(any, map(_hooks, self._learning)),
            torch.is_autocast_enabled(self._kind),
            torch.get_autocast_dtype(self._kind),
            precision_of_products(),
        ]
        return values, objects, numbers

    def unchanged(self) -> bool:
        """Whether everything is as it was."""
        values, objects, numbers = self._now()
        if numbers != self._numbers or not _are(objects, self._objects):
            return False
        if len(values) != len(self._values):
            return False
        # Most are the same objects: no call of ours for each.
        return all(map(is_, values, self._values)) or all(map(is_same, values, self._values))


def _are(some: list[Any], others: list[Any]) -> bool:
    """Whether these are the very same objects."""
    return len(some) == len(others) and all(map(is_, some, others))


def _reset(learner: weakref.ref[Learner], _: torch.optim.Optimizer) -> None:
    found = learner()
    if found is not None:
        found.reset()
