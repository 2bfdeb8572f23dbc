"""Soft actor-critic's update on a GPU, whole networks in one launch: see :mod:`gpubuf.kernels.perceptrons`.

What a loss may be is what :mod:`gpubuf.objectives.explicit` knows, and less: see :class:`FusedSACUpdate`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from gpubuf.data.recording import at_replays
from gpubuf.kernels import categorical, perceptrons, td
from gpubuf.kernels._operations import dense
from gpubuf.kernels.norms import RELU, SILU
from gpubuf.modules.norms import LayerNorm
from gpubuf.objectives.base import LossModule
from gpubuf.objectives.batch import next_state
from gpubuf.objectives.distributional import PRIORITIES, TARGETS, DistributionalSACLoss
from gpubuf.objectives.explicit import Perceptrons, Prepared, UnknownError, Update, policy_of
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


def products_of(
    into: list[Tensor], sizes: Sequence[int], turned: bool, inputs: list[tuple[Tensor, int]], hidden: Sequence[Tensor],
    deltas: Sequence[Tensor],
) -> Products:  # fmt: skip
    """The gradients of all parameters of N nets.

    Args:
        into: memory for them: of weight and bias of each layer, then of scale and shift of each norm.
        sizes: widths of the nets.
        turned: whether weights are ``[out, in]``.
        inputs: the parts of their input ``[n, width]``, and the first column of each.
        hidden: outputs of hidden layers, first.
        deltas: gradients by what layers compute, ``[N, n, width]``, and then the sums by scale and shift of each norm,
            ``[N, parts, width]``; of one net also without N.
    """
    depth, found = len(sizes) - 1, Products([], [], [], [], [])
    count = into[0].numel() // (sizes[0] * sizes[1])
    for i in range(depth):
        for x, start in [(hidden[i - 1], 0)] if i else inputs:
            shape = count, i == 0, start, x.shape[-1], sizes[i], sizes[i + 1], turned
            for part, more in zip(found[:4], (x, deltas[i], into[2 * i], into[2 * i + 1]), strict=True):
                part.append(more)
            found.shapes.extend(map(int, shape))
    for sums, vector in zip(deltas[depth:], into[2 * depth :], strict=True):
        for part, more in zip(found[:4], (sums, sums, vector, vector), strict=True):
            part.append(more)
        # Rows of each sum, as a power of two: kernels are compiled for it, and not for the number of sums.
        rows = 1 << (-(-len(inputs[0][0]) // sums.shape[-2]) - 1).bit_length()
        found.shapes.extend((count, 0, 0, rows, 0, sums.shape[-1], 0))
    return found


class Scratch(NamedTuple):
    """Memory of an update of n rows, N critics and A components of an action; see the kernels for what is in it."""

    actor_hidden: list[Tensor]
    drawn: Tensor
    log_prob: Tensor
    critics_hidden: list[Tensor]
    critics_deltas: list[Tensor]
    grad_action: Tensor
    actor_deltas: list[Tensor]


def _eps(norms: Iterable[nn.Module]) -> float | None:
    return next((part.eps for part in norms if type(part) is LayerNorm), None)


class FusedSACUpdate(Update):
    """Soft actor-critic of a tanh-normal policy, whole networks in one launch.

    Of :class:`~gpubuf.objectives.SACLoss` or :class:`~gpubuf.objectives.DistributionalSACLoss` without cloning. Actor
    and critics are float32 perceptrons with at least one hidden layer, all with ReLU or all with SiLU, layer norms
    behind all hidden layers of a network or none, biases everywhere and nothing frozen. The actor reads one entry, and
    critics that entry and the action. Targets are those of one step. Precision is that of PyTorch's products: TF32
    where ``torch.set_float32_matmul_precision`` allows it, bfloat16 under ``torch.autocast``, else float32, which some
    GPUs make of three products of TF32.
    """

    activations = (nn.ReLU, nn.SiLU)
    knows_more = True

    def __init__(self, loss: LossModule, parameters: Iterable[Tensor]) -> None:
        super().__init__(loss, parameters)
        bounds = [each for each in (self._policy.low, self._policy.high) if each is not None]
        if self.dtype is not torch.float32 or any(each.dtype is not self.dtype for each in bounds):
            raise UnknownError("networks of another dtype")
        if any(each.shape != (self.size,) or not each.is_contiguous() for each in bounds):
            raise UnknownError("bounds that components share, or with strides")
        if len(self._states) != 1 or sorted(map(str, self._of_critics)) != sorted(
            map(str, (*self._states, self._action))
        ):
            raise UnknownError("networks that read several entries")
        for net in (self.actor, self.target_actor, self.critics, self.target_critics):
            complete = 2 * (len(net.sizes) - 1 + net.norms)
            if any(not each.is_contiguous() for each in net.tensors) or len(net.tensors) != complete:
                raise UnknownError("layers without a bias, or with strides")
            of_norms = [len(net.nets) * width for width in net.sizes[1 : 1 + net.norms] for _ in range(2)]
            if [each.numel() for each in net.tensors[2 * len(net.sizes) - 2 :]] != of_norms:
                raise UnknownError("a norm that nets share")
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
        self._atoms = self.loss.num_atoms if isinstance(loss, DistributionalSACLoss) else 1
        self._support = (self.loss.v_min, self.loss.v_max) if self._atoms > 1 else (0.0, 0.0)
        if self.critics.outputs != self._atoms or getattr(loss, "cloning_weight", False):
            raise UnknownError("critics with other outputs, or an actor that is cloned")
        activation = SILU if self.activation is nn.SiLU else RELU
        self._of_actor = activation, _eps(self._policy.core.modules())
        self._of_values = activation, _eps(self.loss._critics.network.modules()), self.critics.turned
        self._float32 = perceptrons.float32_on(self.device)

    def _core(self, network: Any) -> nn.Module:
        self._policy = policy_of(self.loss)
        if getattr(self.loss, "value_network_params", None) is not None:
            raise UnknownError("a variant of SAC")
        return self._policy.core

    @property
    def size(self) -> int:
        return super().size // 2

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

    def _scratch(self, n: int, policy: bool, precision: int) -> Scratch:
        """Memory for n rows. A graph's lies in the pool of that graph."""
        new, count, parts = self.actor.like.new_empty, len(self.critics.nets), perceptrons.parts_of
        drawn = (1 + policy) * n

        def hidden(net: Perceptrons, *rows: int) -> list[Tensor]:
            """What layers compute, and with norms the mean and the inverse standard deviation of each row."""
            return [*(new(*rows, width) for width in net.sizes[1:]), *(new(*rows, 2) for _ in range(net.norms))]

        def deltas(net: Perceptrons, sums: tuple[int, ...], *rows: int) -> list[Tensor]:
            """Gradients, and their sums by scale and shift of norms."""
            normed = [width for width in net.sizes[1 : 1 + net.norms] for _ in range(2)]
            return [*(new(*rows, width) for width in net.sizes[1:]), *(new(*sums, width) for width in normed)]

        return Scratch(
            hidden(self.actor, drawn), new(drawn, self.size), new(drawn), hidden(self.critics, 2 + policy, count, n),
            deltas(self.critics, (count, parts(n, (1 + policy) * count, precision)), 1 + policy, count, n),
            new(count, n, self.size), deltas(self.actor, (parts(n, 1, precision),), n),
        )  # fmt: skip

    def _products(self, memory: Scratch, state: Tensor, action: Tensor, policy: bool) -> Products:
        """Those that are the gradients of parameters of the critics and, where it learns, of the policy."""
        critics, actor, (of_state, of_action) = self.critics, self.actor, self._first_columns
        layers = len(critics.sizes) - 1
        deltas = [*(each[0] for each in memory.critics_deltas[:layers]), *memory.critics_deltas[layers:]]
        found = products_of(
            cast("list[Tensor]", critics.into), critics.sizes, critics.turned, [(state, of_state), (action, of_action)],
            [each[1] for each in memory.critics_hidden], deltas,
        )  # fmt: skip
        if policy:
            outputs = [each[len(state) :] for each in memory.actor_hidden]
            into = cast("list[Tensor]", actor.into)
            found += products_of(into, actor.sizes, True, [(state, 0)], outputs, memory.actor_deltas)
        return found

    @property
    def _first_columns(self) -> tuple[int, int]:
        """Those of state and action among the inputs of critics."""
        return (self.size, 0) if self._of_critics[0] == self._action else (0, self.actor.inputs)

    def _gradients(self, batch: TensorDictBase, policy: bool) -> Prepared:
        loss, following, rows = self.loss, next_state(batch), batch.batch_size
        n, precision, given = rows[0], self._precision(), self._policy
        assert precision is not None
        memory = self._scratch(n, policy, precision)
        next_entropy, reduction = loss.temperature_from == "next", self._code[1]
        if (policy or next_entropy) and not loss._target_entropy_known:
            loss._learn_target_entropy(memory.drawn[n:], rows)
        state, after = dense(batch.get(self._states[0])), dense(following.get(self._states[0]))
        action = dense(batch.get(self._action))
        weight, _ = self._weighting(batch, rows, target=True)
        reward, terminated, steps = (None if x is None else dense(x) for x in loss.bootstrap_rows(batch, rows))
        noise = torch.randn_like(memory.drawn)
        scalars = state.new_empty(len(perceptrons.SCALARS))
        head = *self._of_actor, given.head, given.head_values, given.bounds
        perceptrons.sac_act(
            after, state, noise, given.low, given.high, self.target_actor.tensors, self.actor.tensors, *head, policy,
            precision, memory.actor_hidden, memory.drawn, memory.log_prob,
        )  # fmt: skip
        of_values = self._first_columns, *self._of_values, self._support
        logits = memory.critics_hidden[len(self.critics.sizes) - 2]
        q = logits.new_empty(logits.shape[:-1]) if self._atoms > 1 else None
        perceptrons.sac_values(
            after, state, action, memory.drawn, self.target_critics.tensors, self.critics.tensors, *of_values, policy,
            precision, memory.critics_hidden, q,
        )  # fmt: skip
        log_alpha, returns = loss.bounded_log_alpha(), (reward, terminated, loss._value_estimator.gamma, steps)
        found: dict[str, Tensor] = {}
        error, mass, average = state.new_empty(n), None, False
        if q is not None:
            average, support = loss.average_critics, self._support
            soft = logits[0], memory.log_prob[:n], log_alpha.exp(), *returns, loss.reward_scale
            mass = categorical.categorical_target(*soft, *support, TARGETS[loss.target])
            how = *support, PRIORITIES[loss.priority], average, reduction
            found["loss_qvalue"], error, _ = categorical.categorical_loss(logits[1], mass, weight, None, *how)
        combine = td.AVERAGE if loss.actor_value == "mean" else td.SMALLEST
        flags = combine, average, next_entropy, loss.temperature_loss == "alpha", policy
        perceptrons.sac_value_gradients(
            logits.squeeze(-1) if q is None else q, memory.log_prob, log_alpha, loss._target_entropy, *returns, mass,
            weight, self.critics.tensors, *of_values, *self._code, *flags, precision, memory.critics_hidden,
            memory.critics_deltas, memory.grad_action, error, scalars,
        )  # fmt: skip
        of_policy = functools.partial(
            perceptrons.sac_action_gradients, memory.grad_action, log_alpha, weight, noise, given.low, given.high,
            self.actor.tensors, *head, reduction, precision, memory.actor_hidden, memory.actor_deltas,
        )  # fmt: skip
        products = self._products(memory, state, action, policy)
        names = ["alpha"] + ["loss_qvalue"] * (q is None) + ["loss_alpha"] * (policy or next_entropy)
        names += ["loss_actor", "entropy"] * policy
        every = dict(zip(perceptrons.SCALARS, scalars.unbind(), strict=True))
        found |= {name: every[name] for name in names}
        learns = "loss_alpha" in names and loss.log_alpha.requires_grad
        # A graph writes gradients into memory of this object.
        at_replays().holds(self, "critics")
        # What follows does not wait for priorities, nor they for it.
        slope = every["slope"] if learns else None
        step_of = functools.partial(self._step_of, products, slope, of_policy if policy else None, precision)
        loss._set_priority(batch, batch, error)
        return Prepared(found, step_of)

    def _step_of(
        self,
        products: Products,
        slope: Tensor | None,
        of_policy: Callable[[], None] | None,
        precision: int,
        optimizer: Any,
    ) -> Fused | None:
        """What is left of the gradients: all of them, or an optimiser's step by them."""
        nets = [self.critics]
        if of_policy is not None:
            of_policy()
            nets.append(self.actor)
        numbers = [] if slope is None else [self.loss.log_alpha]
        own = [parameter for net in nets for parameter, _ in net.gradients]
        places = optimizer.places_of([*own, *numbers]) if isinstance(optimizer, AdamW) else None
        if places is None:
            perceptrons.weight_gradients(self.actor.like, *products, precision)
            for net in nets:
                net.set_gradients()
            for number in numbers:
                number.grad = slope
            return None
        for parameter in (*own, *numbers):
            parameter.grad = None
        of_own = dict(zip(map(id, [gradient for net in nets for _, gradient in net.gradients]), places, strict=False))
        layers = [of_own[id(each)] for pair in zip(products.weights, products.biases, strict=True) for each in pair]
        given = (*products[:2], slope, products.shapes, [*layers, *places[len(own) :]], precision)

        def step(table: Tensor, hyper: Tensor, averages: bool, *state_of: Any) -> None:
            perceptrons.step(table, *given, hyper, averages, *state_of)

        return step


FUSED: dict[type, type[Update]] = {SACLoss: FusedSACUpdate, DistributionalSACLoss: FusedSACUpdate}
"""The updates of a GPU, by the loss."""
