"""Updates written out: the losses and gradients of SAC and TD3 for perceptrons, without autograd.

The functions on layers take the memory that they write to. Rewards, distributions and reductions are the operations of
:mod:`gpubuf.kernels`, forward and backward. :func:`update_of` says whether a loss is one that is known; the gradients
then are those of autograd up to rounding, from the same noise.

Shapes: B rows, N nets side by side (one actor, or the critics), A components of an action.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import unwrap
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from gpubuf.kernels import perceptrons, td
from gpubuf.kernels._operations import dense
from gpubuf.kernels.sac import _cpu as entropies
from gpubuf.kernels.tanh_normal import _cpu as density
from gpubuf.kernels.td import _cpu as values
from gpubuf.modules.fast_call import hooked, is_plain
from gpubuf.modules.linear import ONEDNN_WORK, PLAIN_LINEAR, EnsembleLinear, _hooks_of_all, multiplied, worth_onednn
from gpubuf.modules.mlp import MLP
from gpubuf.modules.norms import LayerNorm
from gpubuf.modules.sac import GaussianParameters, SquashedGaussianParameters, TanhNormalActor, TanhNormalHead
from gpubuf.modules.tanh_normal import TanhNormal
from gpubuf.objectives.base import LossModule
from gpubuf.objectives.batch import LOSS_FUNCTIONS, REDUCTIONS, next_state, reduced
from gpubuf.objectives.networks import BatchedCritics, StackedCritics
from gpubuf.objectives.sac import SACLoss
from gpubuf.objectives.td3 import TD3Loss
from gpubuf.optim.adamw import Fused

# The formulas of the operations, without their checks and conversions.
_sample, _sample_backward = unwrap(density.sample), unwrap(density.sample_backward)
_actor_loss, _actor_loss_backward = unwrap(entropies.actor_loss), unwrap(entropies.actor_loss_backward)
_temperature_loss = unwrap(entropies.temperature_loss)
_relu_backward = torch.ops.aten.threshold_backward.grad_input


class UnknownError(Exception):
    """What an update has that is not written out."""


# --- one perceptron ---------------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """A linear layer, or its gradients; None for a gradient that nobody needs.

    Attributes:
        weight: ``[in, out]``, of any strides.
        bias: ``[out]``.
    """

    weight: Any
    bias: Any


Call = Callable[..., object]
"""Makes a call of ``(function, *arguments, **options)``, or keeps it for later."""


def at_once(function: Call, *arguments: Any, **options: Any) -> None:
    """Makes a call."""
    function(*arguments, **options)


class Calls(list[Callable[[], object]]):
    """Calls that are prepared once, on the same memory each time."""

    def __call__(self, function: Call, *arguments: Any, **options: Any) -> None:
        """Keep one."""
        self.append(functools.partial(function, *arguments, **options))

    def run(self) -> None:
        """Make them, in order."""
        for call in self:
            call()


def product(do: Call, x: Tensor, y: Tensor, out: Tensor) -> None:
    """``out = x y`` of matrices."""
    if x.dtype is torch.float32 and worth_onednn(x.shape[0], x.shape[1], y.shape[1]):
        do(lambda: out.copy_(multiplied(x, y)))
    elif x.shape[1] == 1:
        do(torch.mul, x, y, out=out)
    elif out.is_contiguous():
        do(torch.mm, x, y, out=out)
    else:
        do(torch.mm, y.T, x.T, out=out.T)


def forward(do: Call, layers: Sequence[Layer], x: Tensor, outs: Sequence[Tensor]) -> None:
    """A perceptron with ReLU.

    Args:
        do: gets the calls.
        layers: of it.
        x: ``[B, in]``.
        outs: memory for what each layer returns, ``[B, out]``.
    """
    for i, ((weight, bias), out) in enumerate(zip(layers, outs, strict=True)):
        if bias is not None and x.numel() * weight.shape[1] < ONEDNN_WORK:
            do(torch.addmm, bias, x, weight, out=out)
        else:
            # What starts from the bias reads a large result once more.
            product(do, x, weight, out)
            if bias is not None:
                do(out.add_, bias)
        if i < len(layers) - 1:
            do(out.relu_)
        x = out


def backward(
    do: Call,
    layers: Sequence[Layer],
    x: Tensor,
    outs: Sequence[Tensor],
    grad: Tensor,
    scratch: Tensor,
    into: Sequence[Layer],
) -> None:
    """The gradients of :func:`forward`. It overwrites ``outs``.

    Args:
        do: gets the calls.
        layers, x: as they were in the forward.
        outs: what the layers but the last returned.
        grad: of the result, ``[B, out]``.
        scratch: memory of at least ``B`` times the largest width.
        into: memory for the gradients of ``layers``.
    """
    for i in range(len(layers) - 1, -1, -1):
        of_weight, of_bias = into[i]
        if of_weight is not None:
            product(do, (outs[i - 1] if i else x).T, grad, of_weight)
        if of_bias is not None:
            do(torch.sum, grad, 0, out=of_bias)
        if i:
            out = outs[i - 1]
            unmasked = scratch[: out.numel()].view(out.shape)
            product(do, grad, layers[i].weight.T, unmasked)
            do(_relu_backward, unmasked, out, 0, grad_input=out)
            grad = out


# --- several of them --------------------------------------------------------------------------------------------------


class Memory:
    """Memory that perceptrons share which are not needed at once; it grows to what is asked for."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._flat: dict[Any, Tensor] = {}

    def __call__(self, name: Any, *shape: int) -> Tensor:
        """A tensor of that shape at ``name``; it overlaps with all others that were asked for by this name."""
        size = math.prod(shape)
        found = self._flat.get(name)
        if found is None or found.numel() < size:
            found = self._flat[name] = self._like.new_empty(size)
        return found[:size].view(shape)


class Places(NamedTuple):
    """Where parameters are among tensors.

    Attributes:
        layers: weight and bias, or None, of each layer.
        norms: scale and shift of the layer norm behind each hidden layer; empty if there are none.
    """

    layers: list[tuple[int, int | None]]
    norms: list[tuple[int, int | None]]


class Perceptrons:
    """N perceptrons and their gradients.

    Args:
        places: of the parameters among the tensors.
        tensors: the parameters of an actor, or of N critics.
        stacked: whether a parameter is that of N nets, else that of one.
        turned: whether weights are ``[out, in]``.
        memory: for what happens in between.
    """

    def __init__(
        self,
        places: Places,
        tensors: Sequence[Tensor],
        stacked: bool,
        turned: bool,
        memory: Memory,
    ) -> None:
        def nets(found: Sequence[Tensor | None]) -> list[list[Layer]]:
            count = len(tensors[places.layers[0][0]]) if stacked else 1
            each = [[None] * count if one is None else one.unbind() if stacked else [one] for one in found]
            none = [None] * count
            layers = [
                zip(each[weight], none if bias is None else each[bias], strict=True) for weight, bias in places.layers
            ]
            return [[of_layer(*parts) for parts in net] for net in zip(*layers, strict=True)]

        def of_layer(weight: Tensor | None, bias: Tensor | None) -> Layer:
            weight = weight.t() if turned and weight is not None else weight
            return Layer(weight, None if bias is None else bias.view(-1))

        used = [place for part in (*places.layers, *places.norms) for place in part if place is not None]
        if len({id(tensors[place]) for place in used}) < len(used):
            raise UnknownError("layers that share parameters")
        learns = [each.requires_grad and i in used for i, each in enumerate(tensors)]
        kept = [torch.empty_like(each).detach() if own else None for each, own in zip(tensors, learns, strict=True)]
        #: (parameter, memory for its gradient).
        self.gradients = [(each, into) for each, into in zip(tensors, kept, strict=True) if into is not None]
        #: Weight and bias of each layer, scale and shift of each norm, of all nets, and the memory for their gradients,
        #: as the parameters are.
        self.tensors, self.into = [tensors[place].detach() for place in used], [kept[place] for place in used]
        self.turned, self.norms = turned, len(places.norms)
        self.nets, self._into = nets([tensor.detach() for tensor in tensors]), nets(kept)
        self.like: Tensor = self.nets[0][0].weight
        #: Its widths: inputs, hidden layers, outputs.
        self.sizes: list[int] = [self.like.shape[0], *(weight.shape[1] for weight, _ in self.nets[0])]
        self.inputs = self.sizes[0]
        self._memory, self._prepared = memory, (-1, 0)

    @property
    def outputs(self) -> int:
        """Numbers that a net returns for a row."""
        return self.sizes[-1]

    def _prepare(self, rows: int, batches: int) -> None:
        """Take memory for that many batches of rows, and prepare the calls on it."""
        hidden, count, total = self.sizes[1:-1], len(self.nets), rows * batches
        x, self._out = self.like.new_empty(total, self.inputs), self.like.new_empty(count, total, self.outputs)
        self._inputs = x.split(rows)
        #: Memory for the gradient of what the first batch results in, ``[N, B, out]``.
        self.grad = self.like.new_empty(count, rows, self.outputs)
        self._hidden = [self._memory(i, count, total, width) for i, width in enumerate(hidden)]
        scratch = self._memory("scratch", total * max(hidden, default=0))
        self._forward, self._backward = [Calls() for _ in self.nets], Calls()
        for i, net in enumerate(self.nets):
            outs = [each[i] for each in self._hidden]
            forward(self._forward[i], net, x, [*outs, self._out[i]])
            first = [each[:rows] for each in outs]
            backward(self._backward, net, self._inputs[0], first, self.grad[i], scratch, self._into[i])
        self._prepared = rows, batches

    def forward(self, *batches: list[Tensor], count: int | None = None) -> Tensor:
        """``[N, B, out]`` by all nets or the first ones, in memory that the next call writes to.

        Args:
            *batches: inputs ``[B, in_i]`` each, which are joined. The results of batches follow each other.
            count: of the nets.
        """
        if (len(batches[0][0]), len(batches)) != self._prepared:
            self._prepare(len(batches[0][0]), len(batches))
        for inputs, x in zip(batches, self._inputs, strict=True):
            torch.cat(inputs, -1, out=x)
        for calls in self._forward[:count]:
            calls.run()
        return self._out[:count]

    def backward(self) -> None:
        """Set the gradients of all parameters that learn, by :attr:`grad` of the last :meth:`forward`."""
        self._backward.run()
        self.set_gradients()

    def set_gradients(self) -> None:
        """Let parameters that learn have the gradients in memory."""
        for parameter, gradient in self.gradients:
            parameter.grad = gradient

    def inputs_backward(self, grad: Tensor, columns: slice, into: Tensor) -> None:
        """The gradient of inputs that all nets share, by those rows of each net whose result has one.

        Args:
            grad: of the results of the last :meth:`forward`, of one batch, ``[N, B]``, 0 for most nets of a row.
            columns: which inputs.
            into: memory for their gradient, ``[B, columns]``.
        """
        # One net after the other: k B + row.
        flat, sizes = grad.flatten(), grad.count_nonzero(1).tolist()
        places = flat.nonzero().squeeze(-1)
        found = flat.index_select(0, places)[:, None]
        for i in range(len(self._hidden), 0, -1):
            hidden = self._hidden[i - 1].flatten(0, 1)
            like = len(places), hidden.shape[1]
            kept, unmasked = self._memory(("kept", i), *like), self._memory("scratch", *like)
            torch.index_select(hidden, 0, places, out=kept)
            for net, each, out in zip(self.nets, found.split(sizes), unmasked.split(sizes), strict=False):
                product(at_once, each, net[i].weight.T, out)
            found = _relu_backward(unmasked, kept, 0, grad_input=kept)
        of_rows = into.new_empty(len(places), into.shape[1])
        for net, each, out in zip(self.nets, found.split(sizes), of_rows.split(sizes), strict=False):
            product(at_once, each, net[0].weight[columns].T, out)
        into.zero_().index_add_(0, places % len(into), of_rows)


# --- what is known ----------------------------------------------------------------------------------------------------


_ACTIVATIONS = {"relu": nn.ReLU, "silu": nn.SiLU}


def _activation_of(part: nn.Module) -> type | None:
    """The kind of activation that a part is, or ends with."""
    if type(part) is LayerNorm:
        return _ACTIVATIONS.get(cast(str, part.activation))
    return type(part) if type(part) in _ACTIVATIONS.values() else None


def _activation(parts: Iterable[nn.Module], known: Sequence[type]) -> type:
    """The only kind of activation among ``parts``, which is one of those known; the first of these if there is none."""
    found = {kind for kind in map(_activation_of, parts) if kind is not None}
    if len(found) > 1 or not found <= {*known}:
        raise UnknownError("other activations")
    return found.pop() if found else known[0]


def _perceptron(
    parts: Iterable[nn.Module], kinds: tuple[type, ...], activation: type
) -> tuple[list[nn.Module], list[nn.Module]]:
    """The linear layers among ``parts``, and the norms behind the hidden ones, if there are any.

    Between each two layers there is an activation, or a norm that ends with one, and nothing else.
    """
    found = list(parts)
    linear, between = found[::2], found[1::2]
    norms = [part for part in between if type(part) is LayerNorm]
    if (
        len(linear) == len(between)
        or any(type(part) not in kinds for part in linear)
        or any(_activation_of(part) is not activation for part in between)
        or len(norms) not in (0, len(between))
        or len({part.eps for part in norms}) > 1
        or any(part.bias is None for part in norms)
    ):
        raise UnknownError(f"a network of {', '.join(type(part).__name__ for part in found)}")
    return linear, cast("list[nn.Module]", norms)


def _places(parts: Iterable[Sequence[nn.Module]], tensors: Sequence[Tensor]) -> Places:
    """Where the parameters of layers and of norms are among ``tensors``."""
    index = {id(tensor): i for i, tensor in enumerate(tensors)}
    try:
        own = [[(part._parameters["weight"], part._parameters.get("bias")) for part in some] for some in parts]
        return Places(*([(index[id(w)], None if b is None else index[id(b)]) for w, b in some] for some in own))
    except KeyError:
        raise UnknownError("a parameter that was replaced") from None


def _actor(loss: Any, core: nn.Module, activation: type, memory: Memory) -> tuple[Perceptrons, Perceptrons]:
    """The actor that learns, and the one that acts in the next states."""
    own, network = loss._actor, loss.actor_network
    if type(core) is not MLP or own.online.module is not network:
        raise UnknownError(f"an actor of {type(core).__name__}")
    places = _places(_perceptron(core, PLAIN_LINEAR, activation), own._tensors)
    # Critics run between the actor's forward and its backward.
    mine = Perceptrons(places, own._tensors, False, True, Memory(own._tensors[0]))
    targets = own._target_tensors
    return mine, mine if targets is None else Perceptrons(places, targets, False, True, memory)


def _critics(loss: Any, activation: type, memory: Memory) -> tuple[Perceptrons, Perceptrons]:
    """The critics that learn, and those of the targets."""
    own = loss._critics
    if type(own) is BatchedCritics and own._is_mlp and own._online.module is own.network:
        parts = _perceptron(own.network.module.layers, (EnsembleLinear,), activation)
        places, turned = _places(parts, own._tensors), False
    elif type(own) is StackedCritics and own._layers is not None and not own._shared:
        places, turned = Places(cast("list[tuple[int, int | None]]", own._layers[::2]), []), True
        if len(own._layers) % 2 == 0 or any(type(each) is not activation for each in own._layers[1::2]):
            raise UnknownError("critics with other activations")
    else:
        raise UnknownError(f"critics of {type(own.network).__name__}")
    mine, targets = Perceptrons(places, own._tensors, True, turned, memory), own._target_tensors
    return mine, mine if targets is None else Perceptrons(places, targets, True, turned, memory)


def _modules(loss: Any) -> list[nn.Module]:
    """The parts of the networks."""
    return [*loss.actor_network.modules(), *loss._critics.network.modules()]


def _replaced(part: nn.Module) -> bool:
    """Whether a method of its class has a substitute among its attributes."""
    return any(callable(getattr(type(part), name, None)) for name in vars(part))


def no_step(optimizer: Any) -> Fused | None:
    """Gradients are set, and the optimiser steps itself."""
    return None


class Prepared(NamedTuple):
    """What an update has computed.

    Attributes:
        losses: and the scalars of the loss.
        step_of: of an optimiser, what makes its step; None: it steps itself, by gradients that are then set.
    """

    losses: dict[str, Tensor]
    step_of: Callable[[Any], Fused | None] = no_step


class Update(abc.ABC):
    """The losses and gradients of a batch.

    Args:
        loss: a loss whose networks are known.
        parameters: those of the optimiser.

    Raises:
        UnknownError: the loss has other networks, or parameters that learn without the optimiser.
    """

    loss: Any
    #: Between layers: one of them everywhere.
    activations: tuple[type, ...] = (nn.ReLU,)
    #: Whether there may be layer norms, and critics with several outputs.
    knows_more = False

    def __init__(self, loss: LossModule, parameters: Iterable[Tensor]) -> None:
        self.loss = loss
        if hooked(loss) or any(_hooks_of_all) or any(map(hooked, _modules(loss))):
            raise UnknownError("hooks")
        if any(map(_replaced, (loss, *_modules(loss)))):
            raise UnknownError("a method that was replaced in an object")
        if getattr(loss, "joint_batch", False) or loss.reduction == "none":
            raise UnknownError("a joint batch, or losses of rows")
        memory = Memory(next(loss.actor_network_params.parameters()).detach())
        activation = _activation(_modules(loss), self.activations)
        self.critics, self.target_critics = _critics(loss, activation, memory)
        self.actor, self.target_actor = _actor(loss, self._core(loss.actor_network), activation, memory)
        self.activation = activation
        if not self.knows_more and (self.actor.norms or self.critics.norms or self.critics.outputs != 1):
            raise UnknownError("norms, or critics with several outputs")
        learning = [each for each in loss.parameters() if each.requires_grad]
        owned = {id(each) for net in (self.actor, self.critics) for each, _ in net.gradients}
        if {id(each) for each in learning} - {id(getattr(loss, "log_alpha", None))} != owned:
            raise UnknownError("parameters of no layer")
        parameters = list(parameters)
        if not {id(each) for each in learning} <= {id(each) for each in parameters}:
            # Autograd adds up gradients that the optimiser does not set to zero.
            raise UnknownError("parameters of no optimiser")
        self._rest = [each for each in parameters if id(each) not in owned]
        if any(each._backward_hooks or each._post_accumulate_grad_hooks for each in loss.parameters()):
            raise UnknownError("hooks")
        self.dtype = self.actor.like.dtype
        if self.dtype not in (torch.float32, torch.float64) or self.critics.like.dtype is not self.dtype:
            raise UnknownError("networks in several dtypes, or a short one")
        self.device = self.actor.like.device
        if self.critics.like.device != self.device:
            raise UnknownError("networks on several devices")
        self._states: list[Any] = loss.actor_network.in_keys
        self._of_critics: list[Any] = loss._critics.network.in_keys
        self._action = loss.tensor_keys.action
        if self._action not in self._of_critics or self._action in self._states:
            raise UnknownError("critics that read no action")
        self._code = LOSS_FUNCTIONS[loss.loss_function], REDUCTIONS[loss.reduction]
        self._one = self.actor.like.new_ones(())

    @abc.abstractmethod
    def _core(self, network: Any) -> nn.Module:
        """The perceptron of an actor."""

    @abc.abstractmethod
    def _gradients(self, batch: TensorDictBase, policy: bool) -> Prepared:
        """See the call."""

    def fits(self, batch: TensorDictBase) -> bool:
        """Whether the batch is one of rows, ``[B]``, on the device and in the dtype of the networks."""
        rows, following = batch.batch_size, batch.get("next", None)
        if len(rows) != 1 or not rows[0] or following is None:
            return False
        actor = critics = size = 0
        for key in dict.fromkeys((*self._states, *self._of_critics)):
            for step in (batch,) if key == self._action else (batch, following):
                each = step.get(key, None)
                if (
                    type(each) is not Tensor
                    or each.ndim != 2
                    or each.dtype is not self.dtype
                    or each.device != self.device
                ):
                    return False
                # What has made it learns as well.
                if each.requires_grad:
                    return False
            width = each.shape[1]
            size = width if key == self._action else size
            actor += width if key in self._states else 0
            critics += width if key in self._of_critics else 0
        return (actor, critics, size) == (self.actor.inputs, self.critics.inputs, self.size)

    def __call__(self, batch: TensorDictBase, policy: bool = True) -> dict[str, Tensor]:
        """Set the gradients of all parameters that learn from the batch, and write its priorities into it.

        Args:
            batch: transitions ``[B]``, which :meth:`fits`.
            policy: whether actor and temperature learn. Otherwise their gradients are None.

        Returns:
            The losses, and the scalars of the loss.
        """
        losses, step_of = self.prepare(batch, policy)
        step_of(None)
        return losses

    @torch.no_grad()
    def prepare(self, batch: TensorDictBase, policy: bool) -> Prepared:
        """The call, but for gradients that an optimiser may make unnecessary."""
        idle = [] if policy else [parameter for parameter, _ in self.actor.gradients]
        for parameter in (*self._rest, *idle):
            parameter.grad = None
        return self._gradients(batch, policy)

    def _inputs(self, step: TensorDictBase, action: Tensor | None = None) -> list[Tensor]:
        """Those of the actor, or of critics with this action, ``[B, in_i]``."""
        if action is None:
            return [step.get(key) for key in self._states]
        return [action if key == self._action else step.get(key) for key in self._of_critics]

    @property
    def size(self) -> int:
        """Components of an action, A."""
        return self.actor.outputs

    def _columns(self, step: TensorDictBase) -> slice:
        """Those of the action among the inputs of critics."""
        before = self._of_critics[: self._of_critics.index(self._action)]
        start = sum(step.get(key).shape[-1] for key in before)
        return slice(start, start + self.size)

    def _weighting(
        self, batch: TensorDictBase, rows: torch.Size, target: bool = False
    ) -> tuple[Tensor | None, Tensor | None]:
        """(weights, mask) of rows, as formulas take them."""
        weight, mask = self.loss.row_weights(batch, rows, target=target)
        return (
            None if weight is None else dense(weight, self.dtype),
            None if mask is None else dense(mask, torch.bool),
        )

    def _learn_values(
        self, batch: TensorDictBase, following: TensorDictBase, action: Tensor, *entropy: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(loss of the critics, ``max_k |Q_k - y|`` of each row), and their gradients.

        Args:
            batch: transitions.
            following: the next states.
            action: in them.
            entropy: log-densities of the actions, and the temperature.
        """
        count, (code, reduction) = len(action), self._code
        rows = torch.Size([count])
        next_q = self.target_critics.forward(self._inputs(following, action))
        target = self.loss.td_target(next_q, batch, rows, *entropy)
        q = self.critics.forward(self._inputs(batch, batch.get(self._action)))
        weight, mask = self._weighting(batch, rows, target=True)
        difference = q.squeeze(-1) - target.view(count)
        far = difference.abs()
        value, norm = values.reduced(values.distances(difference, far, code).sum(0), weight, mask, reduction)
        slope = values.slopes(difference, code)
        if mask is not None:
            slope = slope.where(mask.view(count), 0)
        factor = values.factors(self._one, norm, count, weight, mask)
        torch.mul(slope, factor, out=self.critics.grad.squeeze(-1))
        self.critics.backward()
        return value, far.amax(0)

    def _learn_actions(
        self, batch: TensorDictBase, action: Tensor, log_prob: Tensor, alpha: Tensor, nets: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(loss of the actor, entropy, gradient of its actions ``[B, A]``, gradient of the log-densities ``[B]``)."""
        q = self.critics.forward(self._inputs(batch, action), count=nets)
        weighting, last = self._weighting(batch, log_prob.shape), (td.SMALLEST, *q.shape[:2][::-1])
        value, entropy, norm = _actor_loss(q, log_prob, alpha, *weighting, self._code[1], *last)
        of_q, of_log_prob = _actor_loss_backward(self._one, q, alpha, *weighting, norm, *last)
        of_action = torch.empty_like(action)
        self.critics.inputs_backward(of_q, self._columns(batch), of_action)
        return value, entropy, of_action, of_log_prob


class Policy(NamedTuple):
    """A tanh-normal policy.

    Attributes:
        core: its perceptron.
        head, head_values: what makes a scale of the core's result, see :mod:`gpubuf.kernels.perceptrons`.
        low, high: bounds of the actions, ``[A]``, or None for the numbers ``bounds``.
    """

    core: nn.Module
    head: int
    head_values: tuple[float, float]
    low: Tensor | None
    high: Tensor | None
    bounds: tuple[float, float]


def policy_of(loss: Any) -> Policy:
    """The policy of a loss."""
    network = loss.actor_network
    if type(network) is not TanhNormalActor:
        raise UnknownError(f"an actor of {type(network).__name__}")
    first, head = cast("list[Any]", network.module)
    parts = first.module if is_plain(first, outputs=2) else ()
    if type(parts) is not nn.Sequential or len(parts) != 2:
        raise UnknownError("a policy of another form")
    core, parameters = parts
    scale: tuple[int, tuple[float, float]]
    if type(parameters) is GaussianParameters:
        scale = perceptrons.SOFTPLUS, (parameters.shift, parameters.scale_lb)
    elif type(parameters) is SquashedGaussianParameters:
        scale = perceptrons.SQUASHED, (parameters.log_centre, parameters.log_half)
    else:
        raise UnknownError("a policy of another form")
    if head.out_keys[0] != loss.tensor_keys.action or head.distribution_class is not TanhNormal:
        raise UnknownError("a policy of another distribution")
    options: Any = head.distribution_kwargs or {}
    if isinstance(head, TanhNormalHead):
        return Policy(core, *scale, head.low, head.high, (-1.0, 1.0))
    if set(options) <= {"low", "high"} and not any(isinstance(each, Tensor) for each in options.values()):
        return Policy(core, *scale, None, None, (options.get("low", -1.0), options.get("high", 1.0)))
    raise UnknownError("a policy of another distribution")


class SACUpdate(Update):
    """Soft actor-critic: :class:`~gpubuf.objectives.SACLoss` of a tanh-normal policy."""

    def _core(self, network: Any) -> nn.Module:
        loss = self.loss
        variant = loss.actor_value, loss.temperature_from, loss.temperature_loss
        if loss.value_network_params is not None or variant != ("min", "current", "log_alpha"):
            raise UnknownError("a variant of SAC")
        self._policy = policy_of(loss)
        if self._policy.head != perceptrons.SOFTPLUS:
            raise UnknownError("a policy of another form")
        return self._policy.core

    @property
    def size(self) -> int:
        return super().size // 2

    def _draw(self, actor: Perceptrons, *steps: TensorDictBase) -> list[tuple[Tensor, ...]]:
        """(action, its log-density, what softplus got, loc, scale, noise) for each step; noise is drawn for the last
        one first."""
        policy = self._policy
        loc, raw = actor.forward(*map(self._inputs, steps))[0].chunk(2, -1)
        shift, smallest = policy.head_values
        loc, raw = loc.contiguous(), raw + shift
        scale = nn.functional.softplus(raw).add_(smallest)
        noise = [torch.randn(len(loc) // len(steps), self.size, dtype=self.dtype, device=loc.device) for _ in steps]
        drawn = loc, scale, torch.cat(noise[::-1])
        found = *_sample(*drawn, policy.low, policy.high, *policy.bounds, *loc.shape), raw, *drawn
        return list(zip(*(each.chunk(len(steps)) for each in found), strict=True))

    def _gradients(self, batch: TensorDictBase, policy: bool) -> Prepared:
        loss, alpha = self.loss, self.loss.alpha
        seen = loss._seen(batch)
        following = next_state(seen)
        # One pass through an actor that is its own target.
        joint = (seen,) if policy and self.target_actor is self.actor else ()
        *drawn, (action, log_prob, *_) = self._draw(self.target_actor, *joint, following)
        value, error = self._learn_values(seen, following, action, log_prob, alpha)
        losses = {"loss_qvalue": value, "alpha": alpha}
        if policy:
            losses |= self._learn_policy(seen, alpha, *(drawn or self._draw(self.actor, seen)))
        loss._set_priority(batch, seen, error)
        return Prepared(losses)

    def _learn_policy(self, seen: TensorDictBase, alpha: Tensor, drawn: tuple[Tensor, ...]) -> dict[str, Tensor]:
        loss, (action, log_prob, raw, *given) = self.loss, drawn
        if not loss._target_entropy_known:
            loss._learn_target_entropy(action, log_prob.shape)
        value, entropy, of_action, of_log_prob = self._learn_actions(seen, action, log_prob, alpha)
        low, high, bounds = self._policy[3:]
        of_loc, of_scale = _sample_backward(*given, low, high, of_action, of_log_prob, *bounds, *action.shape)
        of_raw = torch.ops.aten.softplus_backward(of_scale, raw, 1, 20)
        torch.cat([of_loc, of_raw], -1, out=self.actor.grad[0])
        self.actor.backward()
        weight, mask = self._weighting(seen, log_prob.shape)
        if mask is not None:
            entropy = -reduced(log_prob, None, mask, "mean")
        log_alpha, last = loss.log_alpha.detach(), (self._code[1], len(log_prob))
        of_alpha, slope = _temperature_loss(log_alpha, log_prob, loss._target_entropy, weight, mask, *last)
        if loss.log_alpha.requires_grad:
            loss.log_alpha.grad = slope.to(log_alpha.dtype).reshape(log_alpha.shape)
        return {"loss_actor": value, "loss_alpha": of_alpha, "entropy": entropy}


class TD3Update(Update):
    """Twin delayed deep deterministic policy gradients: :class:`~gpubuf.objectives.TD3Loss` of a policy with tanh."""

    def _core(self, network: Any) -> nn.Module:
        parts = network.module if is_plain(network) else ()
        if type(parts) is not nn.Sequential or len(parts) != 2 or type(parts[1]) is not nn.Tanh:
            raise UnknownError("a policy of another form")
        if network.out_keys[0] != self.loss.tensor_keys.action:
            raise UnknownError("a policy that writes its action elsewhere")
        return parts[0]

    def _gradients(self, batch: TensorDictBase, policy: bool) -> Prepared:
        loss = self.loss
        seen = loss._seen(batch)
        losses = self._learn_policy(seen) if policy else {}
        following = next_state(seen)
        action = self.target_actor.forward(self._inputs(following))[0].tanh_()
        noise = torch.randn_like(action).mul_(loss.policy_noise).clamp_(-loss.noise_clip, loss.noise_clip)
        action = noise.add_(action).clamp_(loss.min_action, loss.max_action)
        value, error = self._learn_values(seen, following, action)
        loss._set_priority(batch, seen, error.square_())
        return Prepared({**losses, "loss_qvalue": value})

    def _learn_policy(self, seen: TensorDictBase) -> dict[str, Tensor]:
        action = self.actor.forward(self._inputs(seen))[0].tanh()
        # The loss of soft actor-critic's actor, by the first critic alone and without entropy.
        nothing = action.new_zeros(len(action))
        value, _, of_action, _ = self._learn_actions(seen, action, nothing, nothing.new_zeros(()), 1)
        torch.ops.aten.tanh_backward.grad_input(of_action, action, grad_input=self.actor.grad[0])
        self.actor.backward()
        return {"loss_actor": value}


KNOWN: Mapping[type, type[Update]] = {SACLoss: SACUpdate, TD3Loss: TD3Update}
"""The updates of a CPU, by the loss."""


def update_of(loss: Any, parameters: Iterable[Tensor], known: Mapping[type, type[Update]] = KNOWN) -> Update:
    """The update of ``loss``, written out, for an optimiser of ``parameters``.

    Raises:
        UnknownError: it is not.
    """
    kind = known.get(type(loss))
    if kind is None:
        raise UnknownError(f"a {type(loss).__name__}")
    return kind(loss, parameters)
