"""The networks of a loss, and the parameters that they run on: their own, detached ones, or those of targets."""

from __future__ import annotations

import abc
import copy
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType, TensorDictModuleBase, TensorDictParams, set_interaction_type
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor, nn

from gpubuf.kernels._operations import snapshot
from gpubuf.modules.fast_call import entries, hooked, is_plain
from gpubuf.modules.linear import PLAIN_LINEAR, ensemble_input_layer, linear_product, net_by_net, runs_net_by_net
from gpubuf.modules.mlp import MLP, EnsembleMLP
from gpubuf.modules.norms import BatchNorm, count_rows, set_statistics
from gpubuf.objectives.batch import COUNTS, counting_rows

Path = tuple[str, ...]

Owners = Mapping[str, TensorDictBase]
"""The parameters of the networks that share theirs with others, by the name of the network."""

Found = TypeVar("Found")


class _ClearingNoGrad(torch.no_grad):
    """``torch.no_grad``, after which autocast casts weights anew: what it keeps of them has no gradient."""

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        torch.clear_autocast_cache()


def _no_grad() -> torch.no_grad:
    # Compiled code keeps no casts, and Dynamo knows no other class.
    return torch.no_grad() if torch.compiler.is_compiling() else _ClearingNoGrad()


# From PyTorch 2.11 on autocast keeps no weight that it has cast without gradients.
without_gradients = torch.no_grad if torch.__version__ >= "2.11" else _no_grad
"""``torch.no_grad`` for networks that learn from the same batch."""


def paths(params: TensorDictBase) -> list[Path]:
    """The path of each leaf of ``params``, as names from the root."""
    return [key if isinstance(key, tuple) else (key,) for key in params.keys(True, True)]


def leaves(params: TensorDictBase) -> list[Tensor]:
    """The tensors of ``params``, in the order of :func:`paths`."""
    return [params.get(path) for path in paths(params)]


def constants(tensors: Iterable[Tensor]) -> list[Tensor]:
    """``tensors`` without gradients. Buffers stay the same objects: compiled code must know what changes in place."""
    return [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]


def target_parameters(params: TensorDictParams) -> TensorDictParams:
    """A copy of ``params`` without gradients, registered as buffers."""
    return TensorDictParams(params.apply(lambda tensor: tensor.detach().clone()), no_convert=True)


def batch_norms(module: nn.Module) -> list[Any]:
    """The parts of ``module`` that keep running statistics of batches, gpubuf's, PyTorch's and other libraries'."""
    return [part for part in module.modules() if part._buffers.get("running_mean") is not None]


def redraw(module: nn.Module) -> None:
    """Draw all parameters anew: by ``reset_parameters`` where there is one, else uniformly in their present range."""
    for part in module.modules():
        reset = getattr(part, "reset_parameters", None)
        if callable(reset):
            reset()
            continue
        for parameter in part.parameters(recurse=False):
            with torch.no_grad():
                low, high = torch.aminmax(parameter)
                parameter.copy_(low + (high - low) * torch.rand_like(parameter))


class ParameterPlaces:
    """The places within a module that hold its parameters and buffers, in the order of given paths."""

    def __init__(self, module: nn.Module, where: Iterable[Path]) -> None:
        self._places: list[tuple[dict[str, Any], str]] = []
        for *names, last in where:
            owner = module.get_submodule(".".join(names))
            self._places.append((owner._parameters if last in owner._parameters else owner._buffers, last))
        # Recurrent layers keep a second list of their parameters.
        self._recurrent = [part for part in module.modules() if isinstance(part, nn.RNNBase)]

    def fill(self, tensors: Iterable[Tensor | None]) -> None:
        """Put ``tensors`` into these places."""
        for (owner, name), tensor in zip(self._places, tensors, strict=True):
            owner[name] = tensor
        for part in self._recurrent:
            part._flat_weights = [getattr(part, name, None) for name in part._flat_weights_names]

    def clear(self) -> None:
        """Empty the places, so that they keep no autograd graph alive."""
        self.fill([None] * len(self._places))


def _read_snapshots(norm: nn.Module, _: Any) -> None:
    """In compiled code: let ``norm`` read its running statistics as they are now, in the backward too."""
    if torch.compiler.is_compiling():
        norm.__dict__["own"] = own = norm._buffers["running_mean"], norm._buffers["running_var"]
        norm._buffers["running_mean"], norm._buffers["running_var"] = (snapshot(each) for each in own)


def _read_statistics(norm: nn.Module, *_: Any) -> None:
    if torch.compiler.is_compiling():
        norm._buffers["running_mean"], norm._buffers["running_var"] = norm.__dict__["own"]
        # Dynamo of PyTorch 2.11 traces no `pop` of this dict.
        del norm.own


class SwappableCopy:
    """A copy of a module's structure. It shares the tensors of the module until you put others in their places.

    The module itself never changes, so that it can act in another thread meanwhile.

    Args:
        module: the original.
        where: the paths of its parameters and buffers.
        copied: False to run the original itself, with its hooks.
    """

    def __init__(self, module: nn.Module, where: Iterable[Path], copied: bool = True) -> None:
        shared: dict[int, Any] = {id(t): t for t in (*module.parameters(), *module.buffers())}
        self.module: Any = copy.deepcopy(module, shared) if copied else module
        self._counts = any(isinstance(part, BatchNorm) for part in self.module.modules())
        self.places = ParameterPlaces(self.module, where)
        self._modes = list(zip(module.modules(), self.module.modules(), strict=True)) if copied else []

    def run(self, inputs: TensorDictBase, function: Callable[..., Found], *args: Any) -> Found:
        """``function(module, *args)``, with ``training`` of every part set to that of the original.

        Rows masked in ``inputs`` enter no batch norm's statistics.
        """
        module = self.module
        for original, part in self._modes:
            # An assignment to an attribute of a module costs ten times the comparison.
            if part.training is not original.training:
                part.training = original.training
        if not self._counts or COUNTS not in inputs.keys():
            return function(module, *args)
        count_rows(module, counting_rows(inputs, module.in_keys))
        try:
            return function(module, *args)
        finally:
            count_rows(module, None)

    def keep_running_statistics(self) -> None:
        """From now on batch norms normalise by their running statistics, and leave these alone, in either mode."""
        norms = batch_norms(self.module)
        fixed = set(map(id, norms))
        self._modes = [pair for pair in self._modes if id(pair[1]) not in fixed]
        for norm in norms:
            norm.training = False
            if not isinstance(norm, BatchNorm):
                norm.register_forward_pre_hook(_read_snapshots)
                norm.register_forward_hook(_read_statistics)


def shared_paths(params: TensorDictBase, shared: Mapping[int, Path]) -> dict[Path, Path]:
    """For each parameter of ``params`` that is ``shared``, the name of its owner and its path there."""
    return {path: shared[id(params.get(path))] for path in paths(params) if id(params.get(path)) in shared}


def own_parameters(network: nn.Module, shared: Mapping[int, Path]) -> tuple[TensorDictParams, dict[Path, Path]]:
    """(the parameters of ``network``, the very ones but for those ``shared``; the owners of these, by their paths)."""
    own = TensorDict.from_module(network)
    owners = shared_paths(own, shared)
    for path in owners:
        own.set(path, own.get(path).detach())
    return TensorDictParams(own, no_convert=True), owners


class Network:
    """A network of a loss, and the parameters that it runs on.

    Attributes:
        network: the network whose structure is used.
        params: the parameters.
    """

    def __init__(self, network: Any, params: TensorDictParams, shared: dict[Path, Path]) -> None:
        self.network, self.params, self._shared = network, params, shared
        self._tensors: list[Tensor] = []
        self._target_tensors: list[Tensor] | None = None

    def refresh(self, params: Any, target_params: TensorDictBase | None, owners: Owners) -> None:
        """Run on these parameters from now on. Call it too after they were moved to another device or replaced."""
        self.params = params
        for path, (name, *where) in self._shared.items():
            # Shared parameters have the memory of their owner's, without gradient.
            own = params.get(path)
            own.data = owners[name].get(tuple(where)).detach().expand(own.shape)
        self._tensors = leaves(params)
        self._target_tensors = None if target_params is None else [target_params.get(path) for path in paths(params)]

    def before_loading(self) -> None:
        """Give shared parameters memory that can be written to, until the next :meth:`refresh`."""
        for path in self._shared:
            own = self.params.get(path)
            own.data = own.data.clone()

    def redraw(self) -> None:
        """Draw the parameters anew, in place."""
        redraw(self.network)


class SingleNetwork(Network):
    """A network such as an actor or a state value.

    Args:
        network: the network. It keeps its parameters.
        shared: parameters that get no gradient from this network: their owners, by id.
        delayed: whether it has target parameters.

    Attributes:
        params: its parameters, the very ones of ``network`` except for the shared ones.
        online: runs on the network's own parameters.
        target: runs on the target parameters; the online one where there are none.
    """

    def __init__(self, network: Any, shared: Mapping[int, Path], delayed: bool) -> None:
        super().__init__(network, *own_parameters(network, shared))
        self._where = paths(self.params)
        self.online = SwappableCopy(network, self._where, copied=bool(self._shared))
        self.target = SwappableCopy(network, self._where) if delayed else self.online

    def refresh(self, params: Any, target_params: TensorDictBase | None, owners: Owners) -> None:
        super().refresh(params, target_params, owners)
        self.online.places.fill(self._tensors)
        if self.target is not self.online:
            self.target.places.fill(self._tensors if self._target_tensors is None else self._target_tensors)

    def keep_running_statistics(self) -> None:
        """Let :attr:`target` normalise by the running statistics of batch norms, in either mode, for good."""
        if batch_norms(self.network):
            if self.target is self.online:
                self.target = SwappableCopy(self.network, self._where)
            self.target.keep_running_statistics()


_ELEMENTWISE = tuple(
    getattr(nn, name)
    for name in (
        *("CELU", "ELU", "GELU", "Hardswish", "Hardtanh", "Identity", "LeakyReLU", "Mish"),
        *("ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus", "Softsign", "Tanh"),
    )
)

_RANDOM_MODULES = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

Layer = tuple[int, int | None] | nn.Module
"""The positions of a linear layer's weight and bias in the list of stacked tensors, or what comes between layers."""


def linear_layers(network: Any, where: Sequence[Path]) -> list[Layer] | None:
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
    layers: list[Layer] = []
    linear: set[int] = set()
    # An activation may stand in several places.
    for name, part in network.named_modules(remove_duplicate=False):
        if part is network or part is core or type(part) is nn.Sequential:
            continue
        path = tuple(name.split("."))
        if type(part) in PLAIN_LINEAR and id(part) not in linear:
            linear.add(id(part))
            layers.append((index[(*path, "weight")], index.get((*path, "bias"))))
        elif type(part) in _ELEMENTWISE:
            layers.append(part)
        else:
            return None
    return layers if layers and isinstance(layers[0], tuple) else None


def run_linear(layers: Sequence[Layer], tensors: Sequence[Tensor], inputs: Sequence[Tensor]) -> Tensor:
    """``[N, *batch, out]`` of N networks on inputs ``[*batch, in_i]`` that they share, joined along the last dimension.

    Args:
        layers: of each network, a linear one first.
        tensors: stacked parameters, weights ``[N, out, in]`` and biases ``[N, out]``.
        inputs: as above.
    """
    x: Tensor | None = None
    for layer in layers:
        if not isinstance(layer, tuple):
            x = layer(x)
            continue
        weight = tensors[layer[0]].transpose(1, 2)
        bias = None if layer[1] is None else tensors[layer[1]].unsqueeze(1)
        x = ensemble_input_layer(inputs, weight, bias) if x is None else linear_product(x, weight, bias)
    assert x is not None
    batch = inputs[0].shape[:-1]
    return x if len(batch) == 1 else x.reshape(x.shape[0], *batch, -1)


class Critics(Network, abc.ABC):
    """Base class: N action-value networks, ``[*batch, ...] -> [N, *batch, 1]``.

    Attributes:
        size: number of networks, N.
        randomness: how random operations behave among the networks, see ``torch.vmap``; None for the default.
    """

    _online: SwappableCopy
    _detached: SwappableCopy
    _target: SwappableCopy
    #: What can run some of the networks alone.
    _subset: SwappableCopy | None = None
    randomness: str | None = None

    def __init__(self, size: int, network: Any, params: TensorDictParams, shared: dict[Path, Path]) -> None:
        super().__init__(network, params, shared)
        self.size = size

    @abc.abstractmethod
    def _run(self, copied: SwappableCopy, tensors: list[Tensor], inputs: TensorDictBase, key: NestedKey) -> Tensor:
        """The values of networks whose parameters are ``tensors``."""

    def online(self, inputs: TensorDictBase, key: NestedKey) -> Tensor:
        """Values with gradients to parameters and inputs."""
        return self._run(self._online, self._tensors, inputs, key)

    def detached(self, inputs: TensorDictBase, key: NestedKey) -> Tensor:
        """Values with gradients to the inputs only."""
        return self._run(self._detached, constants(self._tensors), inputs, key)

    def detached_first(self, inputs: TensorDictBase, key: NestedKey) -> Tensor:
        """:meth:`detached`, for a loss that has gradients to the values of the first network only."""
        return self.detached(inputs, key)

    def target(self, inputs: TensorDictBase, key: NestedKey) -> Tensor:
        """Values with the target parameters, or, without target parameters, with the detached ones."""
        if self._target_tensors is None:
            return self.detached(inputs, key)
        return self._run(self._target, self._target_tensors, inputs, key)

    def expect_subsets(self, count: int) -> None:
        """Prepare for :meth:`target_subset` of so many networks."""

    def target_subset(self, inputs: TensorDictBase, key: NestedKey, subset: Tensor) -> Tensor:
        """:meth:`target` of the networks at the indices ``subset``, ``[M] -> [M, *batch, ...]``.

        Where it can be done, the others are not run at all.
        """
        if self._subset is None:
            return self.target(inputs, key).index_select(0, subset)
        every = constants(self._tensors) if self._target_tensors is None else self._target_tensors
        return self._run(self._subset, [tensor.index_select(0, subset) for tensor in every], inputs, key)

    def expect_joint_batches(self) -> None:
        """From now on present and next rows come together, in one batch, to :meth:`online` and to :meth:`target`.

        There batch norms use the statistics of these batches. In :meth:`detached` they use the running ones, and leave
        them alone: rows of the present alone, with actions of the policy, are another distribution.
        """
        self._detached.keep_running_statistics()
        # gpubuf's batch norms, also where nothing needs gradients. Others do so in training mode anyway.
        set_statistics(self._target.module, "batch")

    def _running_copies(self) -> tuple[SwappableCopy, SwappableCopy]:
        """Two whose batch norms take the running statistics, which only the online networks move."""
        first, second = (SwappableCopy(self.network, paths(self.params)) for _ in range(2))
        for each in (first, second):
            set_statistics(each.module, "running")
        return first, second

    @property
    def vmap_randomness(self) -> str:
        """How random operations behave among stacked networks: as set, else "different" where there is dropout."""
        if self.randomness is not None:
            return self.randomness
        random = any(isinstance(part, _RANDOM_MODULES) for part in self.network.modules())
        return "different" if random else "error"


def _decided() -> set_interaction_type:
    """Within it a critic that has the actor among its parts, as actor-critics with common layers do, takes its mode."""
    return set_interaction_type(InteractionType.DETERMINISTIC)


class BatchedCritics(Critics):
    """One natively batched ensemble (see :func:`ensemble_size`), which runs as it is."""

    def __init__(self, network: Any, size: int, shared: Mapping[int, Path]) -> None:
        super().__init__(size, network, *own_parameters(network, shared))
        # Without shared parameters the network itself runs, with its hooks.
        self._online = SwappableCopy(network, paths(self.params), copied=bool(self._shared))
        self._detached, self._target = self._running_copies()
        self._plain = is_plain(self._target.module)
        core = getattr(network, "module", None)
        self._is_mlp = self._plain and type(core) is EnsembleMLP and core.shared_input and not hooked(core)

    def refresh(self, params: Any, target_params: TensorDictBase | None, owners: Mapping[str, TensorDictBase]) -> None:
        super().refresh(params, target_params, owners)
        self._online.places.fill(self._tensors)
        self._detached.places.fill(constants(self._tensors))
        if self._target_tensors is not None:
            self._target.places.fill(self._target_tensors)

    def _run(self, copied: SwappableCopy, tensors: list[Tensor], inputs: TensorDictBase, key: NestedKey) -> Tensor:
        if copied is self._subset:
            copied.places.fill(tensors)
            try:
                return copied.run(inputs, _values, inputs, key, True)
            finally:
                copied.places.clear()
        if copied is self._detached and not torch.compiler.is_compiling():
            # A parameter may have other memory by now: somebody has replaced its `.data`.
            copied.places.fill(tensors)
        # The network itself may have got hooks since; its copies get none.
        plain = is_plain(copied.module) if copied is self._online else self._plain
        value = copied.run(inputs, _values, inputs, key, plain)
        if value.shape[:1] != (self.size,):
            raise ValueError(
                f"an ensemble of {self.size} networks must return them along the first dimension, got {key!r} of shape "
                f"{list(value.shape)}"
            )
        return value

    def expect_subsets(self, count: int) -> None:
        if self._is_mlp and not batch_norms(self.network):
            self._subset = SwappableCopy(self.network, paths(self.params))
            self._subset.module.module.ensemble_size = count

    def detached_first(self, inputs: TensorDictBase, key: NestedKey) -> Tensor:
        if not self._is_mlp:
            return self.detached(inputs, key)
        layers, given = list(self._detached.module.module.layers), entries(inputs, self.network.in_keys)
        if not runs_net_by_net(layers, given, many=0):
            return self.detached(inputs, key)
        self._detached.places.fill(constants(self._tensors))
        out, batch = net_by_net(layers, given, 1), given[0].shape[:-1]
        return out if len(batch) == 1 else out.reshape(len(out), *batch, -1)


def _values(module: Any, inputs: TensorDictBase, key: NestedKey, plain: bool) -> Tensor:
    """What an ensemble says at ``key``."""
    given = entries(inputs, module.in_keys)
    if plain:
        value: Tensor = module.module(*given)
        return value
    # The nets come first in the output: no batch size would fit inputs and output alike.
    data = TensorDict(dict(zip(module.in_keys, given, strict=True)), batch_size=[])
    with _decided():
        value = module(data).get(key)
    return value


class StackedCritics(Critics):
    """Networks of the same structure, their parameters stacked ``[N, ...]``.

    Linear layers with activations between them run as one ``torch.baddbmm`` per layer; anything else through
    ``torch.vmap``, or one after the other without ``use_vmap``.
    """

    def __init__(self, members: list[Any], use_vmap: bool, shared: Mapping[int, Path]) -> None:
        owners = shared_paths(TensorDict.from_module(members[0]), shared)
        super().__init__(len(members), members[0], stacked_parameters(members, shared), owners)
        self._use_vmap = use_vmap
        where = paths(self.params)
        self._online = self._detached = self._target = SwappableCopy(self.network, where)
        if batch_norms(self.network):
            self._detached, self._target = self._running_copies()
        else:
            self._subset = self._target
        self._layers = linear_layers(self.network, where)

    def redraw(self) -> None:
        for own in zip(*(tensor.detach().unbind(0) for tensor in self._tensors), strict=True):
            self._online.places.fill(own)
            redraw(self._online.module)
        self._online.places.clear()

    def _run(self, copied: SwappableCopy, tensors: list[Tensor], inputs: TensorDictBase, key: NestedKey) -> Tensor:
        if self._layers is not None:
            return run_linear(self._layers, tensors, entries(inputs, self.network.in_keys))

        def single(module: Any, *own: Tensor) -> Tensor:
            copied.places.fill(own)
            with _decided():
                output: Tensor = module(inputs.copy()).get(key)
            return output

        def every(module: Any) -> Tensor:
            if self._use_vmap:
                found: Tensor = torch.vmap(functools.partial(single, module), randomness=self.vmap_randomness)(*tensors)
                return found
            return torch.stack([single(module, *own) for own in zip(*(t.unbind(0) for t in tensors), strict=True)])

        try:
            return copied.run(inputs, every)
        finally:
            copied.places.clear()


def stacked_parameters(modules: Sequence[nn.Module], shared: Collection[int]) -> TensorDictParams:
    """The parameters and buffers of ``modules``, all of the same structure, stacked along a new first dimension.

    A parameter among ``shared`` (by id) is not copied but viewed ``len(modules)`` times, without gradient. One that has
    several places in a module has them here, too.
    """
    n = len(modules)
    each = [TensorDict.from_module(module) for module in modules]
    stacked: dict[NestedKey, Tensor] = {}
    found: dict[tuple[int, ...], Tensor] = {}
    for path in paths(each[0]):
        first = each[0].get(path)
        if id(first) in shared:
            stacked[path] = first.detach().expand(n, *first.shape)
            continue
        own = [params.get(path) for params in each]
        same = tuple(map(id, own))
        if same not in found:
            tensor = torch.stack([one.detach() for one in own])
            found[same] = nn.Parameter(tensor, first.requires_grad) if isinstance(first, nn.Parameter) else tensor
        stacked[path] = found[same]
    return TensorDictParams(TensorDict(stacked, batch_size=[n]), no_convert=True)


class SideBySide(TensorDictModuleBase):
    """An ensemble (see :func:`ensemble_size`) of networks that share parameters. They run one after the other."""

    def __init__(self, members: Sequence[Any]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.ensemble_size = len(members)
        self.in_keys, self.out_keys = members[0].in_keys, members[0].out_keys

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        found = [member(tensordict.copy()) for member in self.members]
        for key in self.out_keys:
            tensordict.set(key, torch.stack([each.get(key) for each in found]))
        return tensordict


def ensemble_size(module: nn.Module) -> int | None:
    """The number of nets of a natively batched ensemble anywhere within ``module``, or None.

    The protocol: some submodule has an integer attribute ``ensemble_size``, and ``module`` returns the nets along a new
    first dimension. :class:`~gpubuf.modules.EnsembleMLP` is one.
    """
    sizes = (getattr(part, "ensemble_size", None) for part in module.modules())
    return next((size for size in sizes if isinstance(size, int)), None)


def redrawn_copies(module: nn.Module, count: int, shared: Collection[int]) -> list[nn.Module]:
    """Copies of ``module`` with parameters drawn anew, except for the ``shared`` ones, which nobody touches."""

    def own(tensor: Tensor) -> Tensor:
        clone = tensor.detach().clone()
        return nn.Parameter(clone, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else clone

    kept = {tuple(name.split(".")): p for name, p in module.named_parameters(remove_duplicate=False) if id(p) in shared}
    tensors = (*module.parameters(), *module.buffers())
    out = [copy.deepcopy(module, {id(tensor): own(tensor) for tensor in tensors}) for _ in range(count)]
    for each in out:
        redraw(each)
        ParameterPlaces(each, kept).fill(kept.values())
    return out


def share_parameters(modules: Sequence[nn.Module], apart: Collection[int]) -> bool:
    """Whether two of ``modules`` have a parameter in common that is trained, other than those ``apart`` (by id)."""
    trained = [{id(p) for p in each.parameters() if p.requires_grad and id(p) not in apart} for each in modules]
    return len(set().union(*trained)) < sum(map(len, trained))


def make_critics(networks: Any, size: int, *, use_vmap: bool, shared: Mapping[int, Path]) -> Critics:
    """Make the ensemble of ``networks``.

    Args:
        networks: one natively batched ensemble (see :func:`ensemble_size`), one network to be copied ``size`` times
            and drawn anew, or a list of ``size`` networks of the same structure. Those of a list that share parameters
            keep sharing them; each further occurrence of the same network is replaced by a copy, drawn anew.
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
        members: list[Any] = []
        for network in networks:
            again = any(network is member for member in members)
            members += redrawn_copies(network, 1, ()) if again else [network]
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


class Networks:
    """Networks of one value or action, critics, and the parameters and target parameters that they run on.

    Args:
        single: the actor, and further networks, by name, each with whether it has target parameters.
        qvalue_network: one network, a list of ``num_qvalue_nets``, or a natively batched ensemble. An empty tuple: no
            critics.
        options: the arguments of the loss. Of networks that share parameters, actor, further networks and critics, the
            first owns them.

    Attributes:
        single: as given, ready to run.
        critics: the ensemble.
        every: both.

    Raises:
        TypeError: a network does not say which keys it reads.
        ValueError: the critics are not ``num_qvalue_nets``.
    """

    def __init__(self, single: Mapping[str, tuple[Any, bool]], qvalue_network: Any, options: Any) -> None:
        several = qvalue_network if isinstance(qvalue_network, list | tuple | nn.ModuleList) else [qvalue_network]
        critics = [("qvalue_network", each) for each in several]
        for name, network in (*((name, network) for name, (network, _) in single.items()), *critics):
            if not hasattr(network, "in_keys"):
                raise TypeError(
                    f"{name} must say which keys it reads and writes, and a {type(network).__name__} does not: wrap it "
                    "in tensordict.nn.TensorDictModule(network, in_keys=[...], out_keys=[...]), or take one of "
                    "gpubuf.modules, such as make_sac_actor and make_sac_critic"
                )
        self.single: dict[str, SingleNetwork] = {}
        #: Parameters that networks added from now on may share, but not train: their owner and path, by id.
        shared: dict[int, Path] = {}
        for name, (network, delayed) in single.items():
            self.single[name] = own = SingleNetwork(network, shared, delayed)
            if critics and options.separate_losses:
                trained = zip(paths(own.params), leaves(own.params), strict=True)
                shared |= {id(tensor): (name, *path) for path, tensor in trained if tensor.requires_grad}
        self.every: dict[str, Network] = {**self.single}
        self._delayed = {name for name, each in self.single.items() if each.target is not each.online}
        if critics:
            self.critics = self.every["qvalue_network"] = make_critics(
                qvalue_network, options.num_qvalue_nets, use_vmap=not options.deactivate_vmap, shared=shared
            )
            if options.delay_qvalue:
                self._delayed.add("qvalue_network")

    def parameters(self) -> dict[str, TensorDictParams]:
        """The parameters of all networks, and new target parameters, by the names under which a loss has them."""
        found = {}
        for name, each in self.every.items():
            found[f"{name}_params"] = each.params
            if name in self._delayed:
                found[f"target_{name}_params"] = target_parameters(each.params)
        return found

    def refresh(self, params: Mapping[str, Any]) -> None:
        """Run on ``params``, by the names that the loss has for them, from now on."""
        owners = {name: params[f"{name}_params"] for name in self.single}
        for name, each in self.every.items():
            each.refresh(params[f"{name}_params"], params.get(f"target_{name}_params"), owners)

    def keys(self, action: NestedKey) -> tuple[list[NestedKey], list[NestedKey]]:
        """(entries that the networks read, other than actions; actions, or parts of them, that the critics read).

        Args:
            action: the key of the action. What a network draws counts as one, too.
        """
        own = unravel_key(action)
        root = own if isinstance(own, tuple) else (own,)
        sampled = (getattr(each.network, "dist_sample_keys", None) or () for each in self.single.values())
        drawn = [unravel_key(key) for keys in sampled for key in keys]

        def is_action(key: Any) -> bool:
            return (key if isinstance(key, tuple) else (key,))[: len(root)] == root or key in drawn

        keys = dict.fromkeys(key for each in self.every.values() for key in _read_by(each.network))
        critics = self.every.get("qvalue_network")
        actions = [] if critics is None else [*filter(is_action, map(unravel_key, critics.network.in_keys))]
        return [key for key in keys if not is_action(key)], actions


def _read_by(network: Any) -> list[NestedKey]:
    """The keys that ``network`` reads, without those of TensorDicts that its first modules fill entry by entry."""
    read = [unravel_key(key) for key in network.in_keys]
    parts: list[Any] = list(network.module) if isinstance(getattr(network, "module", None), nn.ModuleList) else []
    filled = {key[0] for part in parts for key in map(unravel_key, part.out_keys) if isinstance(key, tuple)}
    return [key for key in read if key not in filled or key in parts[0].in_keys]


class ParametersByName:
    """Modules that hold the tensors of ``TensorDictParams`` under the names by which PyTorch looks for them.

    ``functional_call`` replaces a module's parameters for one call. A ``TensorDictParams`` makes a new module each time
    one of its levels is accessed, so the tensors would be put where nobody reads them. Here every level is one
    permanent module.

    Args:
        params: the parameters by the name that the loss has for them.
    """

    def __init__(self, params: Mapping[str, TensorDictParams]) -> None:
        self._names = list(params)
        #: (name, path, the dict that holds it, its name there, the tensor) of each.
        self._places: list[tuple[str, Path, dict[str, Any], str, Tensor]] = []
        for name, each in params.items():
            root = nn.Module()
            for path, leaf in zip(paths(each), leaves(each), strict=True):
                level = root
                for part in path[:-1]:
                    level = level._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
                owner: Any = level._parameters if isinstance(leaf, nn.Parameter) else level._buffers
                owner[path[-1]] = leaf
                self._places.append((name, path, owner, path[-1], leaf))
            # Before `__getattr__`, which makes the modules that nobody reads.
            each.__dict__.update(root._modules)

    def replaced(self) -> dict[str, TensorDict] | None:
        """All parameters by name if any of them is replaced, else None."""
        # Asked at every call of the loss.
        for _, _, owner, last, leaf in self._places:
            if owner[last] is not leaf:
                break
        else:
            return None
        out = {name: TensorDict({}, batch_size=[]) for name in self._names}
        for name, path, owner, last, _ in self._places:
            out[name].set(path, owner[last])
        return out
