"""Ensembles of critics that run on their own, on detached, or on target parameters."""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType, TensorDictParams, set_interaction_type
from tensordict.utils import NestedKey
from torch import Tensor, nn

from gpubuf.modules.fast_call import entries, hooked, is_plain
from gpubuf.modules.linear import PLAIN_LINEAR, ensemble_input_layer, linear_product, net_by_net, runs_net_by_net
from gpubuf.modules.mlp import MLP, EnsembleMLP
from gpubuf.modules.norms import set_statistics
from gpubuf.objectives.networks import (
    Owners,
    Path,
    SideBySide,
    SwappableCopy,
    batch_norms,
    constants,
    distinct,
    ensemble_size,
    follow_owners,
    leaves,
    own_parameters,
    paths,
    redraw,
    redrawn_copies,
    share_parameters,
    shared_paths,
    stacked_parameters,
)

_ELEMENTWISE = tuple(
    getattr(nn, name)
    for name in (
        *("CELU", "ELU", "GELU", "Hardswish", "Hardtanh", "Identity", "LeakyReLU", "Mish"),
        *("ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus", "Softsign", "Tanh"),
    )
)


class Linear(NamedTuple):
    """The positions of a linear layer's parameters in the list of stacked tensors."""

    weight: int
    bias: int | None


def run_linear(layers: Sequence[Linear | nn.Module], tensors: Sequence[Tensor], inputs: Sequence[Tensor]) -> Tensor:
    """``[N, *batch, out]`` of N networks on inputs ``[*batch, in_i]`` that they share, joined along the last dimension.

    Args:
        layers: of each network, a linear one first.
        tensors: stacked parameters, weights ``[N, out, in]`` and biases ``[N, out]``.
        inputs: as above.
    """
    x: Tensor | None = None
    for layer in layers:
        if not isinstance(layer, Linear):
            x = layer(x)
            continue
        weight = tensors[layer.weight].transpose(1, 2)
        bias = None if layer.bias is None else tensors[layer.bias].unsqueeze(1)
        x = ensemble_input_layer(inputs, weight, bias) if x is None else linear_product(x, weight, bias)
    assert x is not None
    batch = inputs[0].shape[:-1]
    return x if len(batch) == 1 else x.reshape(x.shape[0], *batch, -1)


def linear_layers(network: Any, where: Sequence[tuple[str, ...]]) -> list[Linear | nn.Module] | None:
    """The layers of ``network`` for :func:`run_linear`, on the parameters at ``where``; None if it is anything more.

    It must be a plain TensorDictModule with one output around an ``nn.Sequential`` (nested ones too) or an
    :class:`~gpubuf.modules.MLP` of ``nn.Linear`` layers and elementwise activations, without hooks; of these very
    types, since a subclass may do something else.
    """
    if not is_plain(network) or any(map(hooked, network.modules())):
        return None
    core = network.module
    if type(core) is not MLP and (type(core) is not nn.Sequential or len(network.in_keys) != 1):
        return None
    index = {path: i for i, path in enumerate(where)}
    layers: list[Linear | nn.Module] = []
    linear: set[int] = set()
    # An activation may stand in several places.
    for name, part in network.named_modules(remove_duplicate=False):
        if part is network or part is core or type(part) is nn.Sequential:
            continue
        path = tuple(name.split("."))
        if type(part) in PLAIN_LINEAR and id(part) not in linear:
            linear.add(id(part))
            layers.append(Linear(index[(*path, "weight")], index.get((*path, "bias"))))
        elif type(part) in _ELEMENTWISE:
            layers.append(part)
        else:
            return None
    return layers if layers and isinstance(layers[0], Linear) else None


_RANDOM_MODULES = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def _decided() -> set_interaction_type:
    """Within it a critic that has the actor among its parts, as actor-critics with common layers do, takes its mode."""
    return set_interaction_type(InteractionType.DETERMINISTIC)


class Critics(abc.ABC):
    """Base class: N action-value networks, ``[*batch, ...] -> [N, *batch, 1]``.

    Attributes:
        size: number of networks, N.
        network: the network whose structure is used.
        params: the parameters.
        randomness: how random operations behave among the networks, see ``torch.vmap``; None for the default.
    """

    def __init__(self, size: int, network: Any, params: TensorDictParams, shared: dict[Path, Path]) -> None:
        self.size, self.network, self.params = size, network, params
        self.randomness: str | None = None
        self._shared = shared
        self._tensors: list[Tensor] = []
        self._target_tensors: list[Tensor] | None = None
        self._online: SwappableCopy
        self._detached: SwappableCopy
        self._target: SwappableCopy
        self._subset: SwappableCopy | None = None

    def refresh(self, params: Any, target_params: TensorDictBase | None, owners: Owners) -> None:
        """Run on these parameters from now on. Call it too after they were moved to another device or replaced."""
        self.params = params
        follow_owners(params, self._shared, owners)
        self._tensors = leaves(params)
        self._target_tensors = None
        if target_params is not None:
            self._target_tensors = [target_params.get(path) for path in paths(self.params)]

    def before_loading(self) -> None:
        """Give shared parameters memory that can be written to, until the next :meth:`refresh`."""
        for path in self._shared:
            entry = self.params.get(path)
            entry.data = entry.data.clone()

    def redraw(self) -> None:
        """Draw the parameters anew, in place."""
        redraw(self.network)

    @abc.abstractmethod
    def online(self, inputs: TensorDictBase, key: NestedKey) -> Tensor:
        """Values with gradients to parameters and inputs."""

    @abc.abstractmethod
    def detached(self, inputs: TensorDictBase, key: NestedKey) -> Tensor:
        """Values with gradients to the inputs only."""

    def detached_first(self, inputs: TensorDictBase, key: NestedKey) -> Tensor:
        """:meth:`detached`, for a loss that has gradients to the values of the first network only."""
        return self.detached(inputs, key)

    @abc.abstractmethod
    def target(self, inputs: TensorDictBase, key: NestedKey) -> Tensor:
        """Values with the target parameters, or, without target parameters, with the detached ones."""

    def expect_subsets(self, count: int) -> None:  # noqa: B027 (an ensemble need not prepare)
        """Prepare for :meth:`target_subset` of so many networks."""

    def target_subset(self, inputs: TensorDictBase, key: NestedKey, subset: Tensor) -> Tensor:
        """:meth:`target` of the networks at the indices ``subset``, ``[M] -> [M, *batch, ...]``.

        Where it can be done, the others are not run at all.
        """
        if self._subset is None:
            return self.target(inputs, key).index_select(0, subset)
        every = constants(self._tensors) if self._target_tensors is None else self._target_tensors
        return self._run_subset([tensor.index_select(0, subset) for tensor in every], inputs, key)

    @abc.abstractmethod
    def _run_subset(self, tensors: list[Tensor], inputs: TensorDictBase, key: NestedKey) -> Tensor:
        """The values of the networks whose parameters are ``tensors``, a part of all."""

    def expect_joint_batches(self) -> None:
        """From now on present and next rows come together, in one batch, to :meth:`online` and to :meth:`target`.

        There batch norms use the statistics of these batches. In :meth:`detached` they use the running ones, and leave
        them alone: rows of the present alone, with actions of the policy, are another distribution.
        """
        self._detached.keep_running_statistics()
        self._target.use_batch_statistics()

    def _running_copy(self) -> SwappableCopy:
        """A copy whose batch norms take the running statistics, which only the online networks move."""
        copy = SwappableCopy(self.network, paths(self.params))
        set_statistics(copy.module, "running")
        return copy

    @property
    def vmap_randomness(self) -> str:
        """How random operations behave among stacked networks: as set, else "different" where there is dropout."""
        if self.randomness is not None:
            return self.randomness
        random = any(isinstance(part, _RANDOM_MODULES) for part in self.network.modules())
        return "different" if random else "error"


class BatchedCritics(Critics):
    """One natively batched ensemble (see :func:`ensemble_size`), which runs as it is."""

    def __init__(self, network: Any, size: int, shared: dict[int, Path]) -> None:
        params, owners = own_parameters(network, shared)
        super().__init__(size, network, params, owners)
        # Without shared parameters the network itself runs, with its hooks.
        self._online = SwappableCopy(network, paths(self.params), copied=bool(owners))
        self._detached, self._target = (self._running_copy() for _ in range(2))
        self._plain = is_plain(self._target.module)

    def refresh(self, params: Any, target_params: TensorDictBase | None, owners: Owners) -> None:
        super().refresh(params, target_params, owners)
        self._online.places.fill(self._tensors)
        self._detached.places.fill(self._tensors, constant=True)
        if self._target_tensors is not None:
            self._target.places.fill(self._target_tensors)

    def online(self, inputs: TensorDictBase, key: NestedKey) -> Tensor:
        return self._online.run(inputs, self._values, inputs, key)

    def detached(self, inputs: TensorDictBase, key: NestedKey) -> Tensor:
        if not torch.compiler.is_compiling():
            # A parameter may have other memory by now: somebody has replaced its `.data`.
            self._detached.places.fill(self._tensors, constant=True)
        return self._detached.run(inputs, self._values, inputs, key, self._plain)

    def target(self, inputs: TensorDictBase, key: NestedKey) -> Tensor:
        if self._target_tensors is None:
            return self.detached(inputs, key)
        return self._target.run(inputs, self._values, inputs, key, self._plain)

    def expect_subsets(self, count: int) -> None:
        core = getattr(self.network, "module", None)
        known = is_plain(self.network) and type(core) is EnsembleMLP and core.shared_input
        if known and not batch_norms(self.network):
            self._subset = SwappableCopy(self.network, paths(self.params))
            copied: Any = self._subset.module.module
            copied.ensemble_size = count

    def _run_subset(self, tensors: list[Tensor], inputs: TensorDictBase, key: NestedKey) -> Tensor:
        assert self._subset is not None
        self._subset.places.fill(tensors)
        try:
            return self._subset.run(inputs, self._values, inputs, key, True, len(tensors[0]))
        finally:
            self._subset.places.clear()

    def detached_first(self, inputs: TensorDictBase, key: NestedKey) -> Tensor:
        core = getattr(self.network, "module", None)
        if type(core) is not EnsembleMLP or not core.shared_input or not is_plain(self.network) or hooked(core):
            return super().detached_first(inputs, key)
        given = entries(inputs, self.network.in_keys)
        if not runs_net_by_net(list(core.layers), given, many=0):
            return super().detached_first(inputs, key)
        self._detached.places.fill(self._tensors, constant=True)
        detached: Any = self._detached.module
        out, batch = net_by_net(list(detached.module.layers), given, 1), given[0].shape[:-1]
        return out if len(batch) == 1 else out.reshape(len(out), *batch, -1)

    def _values(
        self, module: Any, inputs: TensorDictBase, key: NestedKey, plain: bool | None = None, size: int | None = None
    ) -> Tensor:
        given = entries(inputs, module.in_keys)
        value: Tensor
        # The network itself may have got hooks since; its copies get none.
        if is_plain(module) if plain is None else plain:
            value = module.module(*given)
        else:
            # The nets come first in the output: no batch size would fit inputs and output alike.
            data = TensorDict(dict(zip(module.in_keys, given, strict=True)), batch_size=[])
            with _decided():
                value = module(data).get(key)
        if value.shape[:1] != (self.size if size is None else size,):
            raise ValueError(
                f"an ensemble of {self.size} networks must return them along the first dimension, got {key!r} of shape "
                f"{list(value.shape)}"
            )
        return value


class StackedCritics(Critics):
    """Networks of the same structure, their parameters stacked ``[N, ...]``.

    Linear layers with activations between them run as one ``torch.baddbmm`` per layer; anything else through
    ``torch.vmap``, or one after the other without ``use_vmap``.
    """

    def __init__(self, members: list[Any], use_vmap: bool, shared: dict[int, Path]) -> None:
        owners = shared_paths(TensorDict.from_module(members[0]), shared)
        super().__init__(len(members), members[0], stacked_parameters(members, shared), owners)
        self._use_vmap = use_vmap
        where = paths(self.params)
        self._online = self._detached = self._target = SwappableCopy(self.network, where)
        if batch_norms(self.network):
            self._detached, self._target = (self._running_copy() for _ in range(2))
        else:
            self._subset = self._target
        self._layers = linear_layers(self.network, where)

    def redraw(self) -> None:
        for own in zip(*(tensor.detach().unbind(0) for tensor in self._tensors), strict=True):
            self._online.places.fill(own)
            redraw(self._online.module)
        self._online.places.clear()

    def online(self, inputs: TensorDictBase, key: NestedKey) -> Tensor:
        return self._run(self._online, self._tensors, inputs, key)

    def detached(self, inputs: TensorDictBase, key: NestedKey) -> Tensor:
        return self._run(self._detached, constants(self._tensors), inputs, key)

    def target(self, inputs: TensorDictBase, key: NestedKey) -> Tensor:
        if self._target_tensors is None:
            return self.detached(inputs, key)
        return self._run(self._target, self._target_tensors, inputs, key)

    def _run_subset(self, tensors: list[Tensor], inputs: TensorDictBase, key: NestedKey) -> Tensor:
        return self._run(self._target, tensors, inputs, key)

    def _run(self, copy: SwappableCopy, tensors: list[Tensor], inputs: TensorDictBase, key: NestedKey) -> Tensor:
        if self._layers is not None:
            return run_linear(self._layers, tensors, entries(inputs, self.network.in_keys))

        def single(module: Any, *own: Tensor) -> Tensor:
            copy.places.fill(own)
            with _decided():
                output: Tensor = module(inputs.copy()).get(key)
            return output

        def every(module: Any) -> Tensor:
            if self._use_vmap:
                found: Tensor = torch.vmap(functools.partial(single, module), randomness=self.vmap_randomness)(*tensors)
                return found
            return torch.stack([single(module, *own) for own in zip(*(t.unbind(0) for t in tensors), strict=True)])

        try:
            return copy.run(inputs, every)
        finally:
            copy.places.clear()


def make_critics(networks: Any, size: int, *, use_vmap: bool, shared: dict[int, Path]) -> Critics:
    """Make the ensemble of ``networks``.

    Args:
        networks: one natively batched ensemble (see :func:`ensemble_size`), one network to be copied ``size`` times
            and drawn anew, or a list of ``size`` networks of the same structure. Those of a list that share parameters
            keep sharing them.
        size: number of networks, N.
        use_vmap: run networks that need it through ``torch.vmap``; otherwise one after the other.
        shared: parameters that get no gradient from the critics: their owner and path there, by id.

    The ensemble is ready after its first :meth:`Critics.refresh`.

    Raises:
        ValueError: the networks are not ``size``.
    """
    if isinstance(networks, list | tuple | nn.ModuleList):
        if len(networks) != size:
            raise ValueError(f"num_qvalue_nets={size}, but {len(networks)} networks were given")
        members = distinct(list(networks))
        if share_parameters(members, shared):
            # Stacked, each would get a copy of its own.
            return BatchedCritics(SideBySide(members), size, shared)
        return StackedCritics(members, use_vmap, shared)
    batched = ensemble_size(networks)
    if batched is None:
        return StackedCritics(redrawn_copies(networks, size, shared), use_vmap, shared)
    if batched != size:
        raise ValueError(f"num_qvalue_nets={size}, but the network is an ensemble of {batched}")
    return BatchedCritics(networks, size, shared)
