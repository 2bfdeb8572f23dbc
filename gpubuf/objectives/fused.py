"""Soft actor-critic's update on a GPU, in five launches: see :mod:`gpubuf.kernels.perceptrons`.

What a loss may be is what :mod:`gpubuf.objectives.explicit` knows, and less: see :class:`FusedSACUpdate`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from gpubuf.data.recording import at_replays
from gpubuf.kernels import perceptrons
from gpubuf.kernels._operations import dense
from gpubuf.kernels.norms import RELU, SILU
from gpubuf.objectives.base import LossModule
from gpubuf.objectives.batch import next_state
from gpubuf.objectives.explicit import Perceptrons, SACUpdate, UnknownError, Update
from gpubuf.objectives.sac import SACLoss
from gpubuf.objectives.values import TD0Estimator
from gpubuf.optim.adamw import AdamW, Fused

_C: Any = torch._C
#: A setting of PyTorch, read by C alone at every update; PyTorch 2.8 has the older one alone.
precision_of_products: Callable[[], Any] = (
    functools.partial(_C._get_fp32_precision_getter, "cuda", "matmul")
    if hasattr(_C, "_get_fp32_precision_getter")
    else _C._get_cublas_allow_tf32
)


def allows_tf32() -> bool:
    """Whether products of float32 on a GPU may be those of TF32."""
    return precision_of_products() in ("tf32", True)


class Products(NamedTuple):
    """Arguments of :data:`gpubuf.kernels.perceptrons.weight_gradients`, of several layers."""

    inputs: list[Tensor]
    grads: list[Tensor]
    weights: list[Tensor]
    biases: list[Tensor]
    shapes: list[int]

    def __add__(self, other: Any) -> Any:
        return Products(*(some + more for some, more in zip(self, other, strict=True)))


class Scratch(NamedTuple):
    """Memory of an update of n rows, N critics and A components of an action; see the kernels for what is in it."""

    of_actor: list[Tensor]
    head: Tensor
    drawn: Tensor
    log_prob: Tensor
    of_critics: list[Tensor]
    q: Tensor
    critics_deltas: list[Tensor]
    grad_q: Tensor
    grad_action: Tensor
    actor_deltas: list[Tensor]
    grad_head: Tensor


def products_of(
    net: Perceptrons, inputs: list[tuple[Tensor, int]], hidden: list[Tensor], grads: list[Tensor]
) -> Products:
    """The gradients of all layers.

    Args:
        net: whose gradients they are.
        inputs: the parts of its input ``[n, width]``, and the first column of each.
        hidden: sums of its hidden layers ``[N, n, width]``.
        grads: by the sums of all layers.
    """
    count, found = len(net.nets), Products([], [], [], [], [])
    for i, (weight, bias) in enumerate(zip(net.into[::2], net.into[1::2], strict=True)):
        fan_in, fan_out = net.sizes[i : i + 2]
        for x, start in [(hidden[i - 1], 0)] if i else inputs:
            found.inputs.append(x)
            found.grads.append(grads[i])
            found.weights.append(cast(Tensor, weight))
            found.biases.append(cast(Tensor, bias))
            found.shapes.extend((count, i == 0, start, x.shape[-1], fan_in, fan_out, net.turned, i > 0))
    return found


class FusedSACUpdate(SACUpdate):
    """Soft actor-critic: :class:`~gpubuf.objectives.SACLoss` of a tanh-normal policy, whole networks in one launch.

    Actor and critics are float32 perceptrons with at least one hidden layer, all with ReLU or all with SiLU, biases
    everywhere and nothing frozen. The
    actor reads one entry, and critics that entry and the action. Targets are those of one step. Precision is that of
    PyTorch's products: TF32 where ``torch.set_float32_matmul_precision`` allows it, bfloat16 under ``torch.autocast``,
    else float32, which some GPUs make of three products of TF32.
    """

    activations = (nn.ReLU, nn.SiLU)

    def __init__(self, loss: LossModule, parameters: Iterable[Tensor]) -> None:
        super().__init__(loss, parameters)
        if self.dtype is not torch.float32 or any(
            low is not None and low.dtype is not self.dtype for low in self._bounds[:1]
        ):
            raise UnknownError("networks of another dtype")
        if len(self._states) != 1 or sorted(map(str, self._of_critics)) != sorted(
            map(str, (*self._states, self._action))
        ):
            raise UnknownError("networks that read several entries")
        for net in (self.actor, self.target_actor, self.critics, self.target_critics):
            if any(not each.is_contiguous() for each in net.tensors) or len(net.tensors) != 2 * len(net.sizes) - 2:
                raise UnknownError("layers without a bias, or with strides")
            if any(each.numel() >> 31 for each in net.tensors):
                raise UnknownError("more weights than 32 bits count")
        if any(each is None for net in (self.actor, self.critics) for each in net.into):
            raise UnknownError("frozen layers")
        if len(self.actor.sizes) < 3 or len(self.critics.sizes) < 3:
            raise UnknownError("networks without hidden layers")
        if type(loss._value_estimator) is not TD0Estimator or self.loss.log_alpha.dtype is not self.dtype:
            raise UnknownError("targets over several steps, or a temperature of another dtype")
        if self.loss.log_alpha.ndim:
            raise UnknownError("a temperature of another shape")
        self._act = SILU if self.activation is nn.SiLU else RELU
        self._float32 = perceptrons.float32_on(self.device)

    def fits(self, batch: TensorDictBase) -> bool:
        """As that of every update; and without masks, or states to skip."""
        if not super().fits(batch) or self.loss._seen(batch) is not batch:
            return False
        # Kernels count elements in 32 bits.
        largest = 3 * len(self.critics.nets) * max(*self.critics.sizes, *self.actor.sizes)
        if batch.batch_size[0] * largest >= 1 << 31:
            return False
        return self.loss.row_weights(batch, batch.batch_size, target=True)[1] is None and self._precision() is not None

    def _precision(self) -> int | None:
        """That of products; None: autocast wants another one."""
        kind = self.device.type
        if torch.is_autocast_enabled(kind):
            return perceptrons.BF16 if torch.get_autocast_dtype(kind) is torch.bfloat16 else None
        return perceptrons.TF32 if allows_tf32() else self._float32

    def _scratch(self, n: int) -> Scratch:
        """Memory for n rows. A graph's lies in the pool of that graph."""
        new, count, size = self.actor.like.new_empty, len(self.critics.nets), self.size
        of_actor, of_critics = self.actor.sizes[1:-1], self.critics.sizes[1:-1]
        return Scratch(
            [new(2 * n, width) for width in of_actor], new(2 * n, 2 * size), new(2 * n, size), new(2 * n),
            [new(3, count, n, width) for width in of_critics], new(3, count, n),
            [new(2, count, n, width) for width in of_critics], new(count, n), new(count, n, size),
            [new(n, width) for width in of_actor], new(n, 2 * size),
        )  # fmt: skip

    def _products(self, memory: Scratch, state: Tensor, action: Tensor, policy: bool) -> Products:
        """Those that are the gradients of weights, of the critics and, where it learns, of the policy."""
        of_state, of_action = self._first_columns
        found = products_of(
            self.critics, [(state, of_state), (action, of_action)], [each[1] for each in memory.of_critics],
            [*(each[0] for each in memory.critics_deltas), memory.grad_q],
        )  # fmt: skip
        if policy:
            found += products_of(
                self.actor, [(state, 0)], [each[len(state) :] for each in memory.of_actor],
                [*memory.actor_deltas, memory.grad_head],
            )  # fmt: skip
        return found

    @property
    def _first_columns(self) -> tuple[int, int]:
        """Those of state and action among the inputs of critics."""
        return (self.size, 0) if self._of_critics[0] == self._action else (0, self.actor.inputs)

    def _gradients(self, batch: TensorDictBase, policy: bool) -> dict[str, Tensor]:
        loss, following, rows = self.loss, next_state(batch), batch.batch_size
        n, (low, high, *limits) = rows[0], self._bounds
        memory, precision = self._scratch(n), self._precision()
        if loss.min_log_alpha is not None:
            # Within its bounds from now on.
            loss.alpha  # noqa: B018
        if policy and not loss._target_entropy_known:
            loss._learn_target_entropy(memory.drawn[n:], rows)
        state, after = dense(batch.get(self._states[0])), dense(following.get(self._states[0]))
        action = dense(batch.get(self._action))
        weight, _ = self._weighting(batch, rows, target=True)
        returns = [None if each is None else dense(each) for each in loss.bootstrap_rows(batch, rows)]
        reward, terminated, steps = returns
        noise = torch.randn_like(memory.drawn[: n * (1 + policy)])
        error, scalars = state.new_empty(n), state.new_empty(len(perceptrons.SCALARS))
        head = self._act, self._gaussian.shift, self._gaussian.scale_lb
        perceptrons.sac_act(
            after, state, noise, low, high, self.target_actor.tensors, self.actor.tensors, *head, *limits, policy,
            precision, memory.of_actor, memory.head, memory.drawn, memory.log_prob,
        )  # fmt: skip
        networks = self._first_columns, self._act, self.critics.turned
        critics = self.critics.tensors
        perceptrons.sac_values(
            after, state, action, memory.drawn, self.target_critics.tensors, critics, *networks, policy, precision,
            memory.of_critics, memory.q,
        )  # fmt: skip
        log_alpha = loss.log_alpha.detach()
        perceptrons.sac_value_gradients(
            memory.q, memory.log_prob, log_alpha, loss._target_entropy, reward, terminated, loss._value_estimator.gamma,
            steps, weight, critics, memory.of_critics, *networks, *self._code, policy, precision,
            memory.critics_deltas, memory.grad_q, memory.grad_action, error, scalars,
        )  # fmt: skip
        of_policy = functools.partial(
            perceptrons.sac_action_gradients, memory.grad_action, log_alpha, weight, noise, low, high, memory.head,
            self.actor.tensors, memory.of_actor, self._act, self._code[1], self._gaussian.scale_lb, *limits, precision,
            memory.actor_deltas, memory.grad_head,
        )  # fmt: skip
        products = self._products(memory, state, action, policy)
        found = dict(zip(perceptrons.SCALARS, scalars.unbind(), strict=True))
        slope = found.pop("slope")
        if not policy:
            found = {name: found[name] for name in ("loss_qvalue", "alpha")}
        learns = policy and loss.log_alpha.requires_grad
        # A graph writes gradients into memory of this object.
        at_replays().holds(self, "critics")
        # What follows does not wait for priorities, nor they for it.
        self._pending = state, products, slope if learns else None, of_policy if policy else None, precision
        loss._set_priority(batch, batch, error)
        return found

    def step_of(self, optimizer: Any) -> Fused | None:
        state, products, slope, of_policy, precision = self._pending
        del self._pending
        nets = [self.critics]
        if of_policy is not None:
            of_policy()
            nets.append(self.actor)
        numbers = [] if slope is None else [self.loss.log_alpha]
        own = [parameter for net in nets for parameter, _ in net.gradients]
        places = optimizer.places_of([*own, *numbers]) if isinstance(optimizer, AdamW) else None
        if places is None:
            perceptrons.weight_gradients(state, *products, self._act, precision)
            for net in nets:
                net.set_gradients()
            for number in numbers:
                number.grad = slope
            return None
        for parameter in (*own, *numbers):
            parameter.grad = None
        of_own = dict(zip(map(id, [gradient for net in nets for _, gradient in net.gradients]), places, strict=False))
        layers = [of_own[id(each)] for pair in zip(products.weights, products.biases, strict=True) for each in pair]
        given = (*products[:2], slope, products.shapes, [*layers, *places[len(own) :]], self._act, precision)

        def step(table: Tensor, hyper: Tensor, averages: bool, *state_of: Any) -> None:
            perceptrons.step(table, state, *given, hyper, averages, *state_of)

        return step


FUSED: dict[type, type[Update]] = {SACLoss: FusedSACUpdate}
"""The updates of a GPU, by the loss."""
