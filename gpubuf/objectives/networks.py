"""Networks of a loss, apart from their parameters: finds, stacks, redraws and swaps these."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase, TensorDictParams
from tensordict.utils import NestedKey
from torch import Tensor, nn

from gpubuf.kernels._operations import snapshot
from gpubuf.modules.norms import BatchNorm, count_rows, set_statistics
from gpubuf.objectives.batch import COUNTS, counting_rows

Path = tuple[str, ...]

Found = TypeVar("Found")


def paths(params: TensorDictBase) -> list[Path]:
    """The path of each leaf of ``params``, as names from the root."""
    return [key if isinstance(key, tuple) else (key,) for key in params.keys(True, True)]


def leaves(params: TensorDictBase) -> list[Tensor]:
    """The tensors of ``params``, in the order of :func:`paths`."""
    return [params.get(path) for path in paths(params)]


def constants(tensors: Iterable[Tensor]) -> list[Tensor]:
    """``tensors`` without gradients. Buffers stay the same objects: compiled code must know what changes in place."""
    return [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]


def ensemble_size(module: nn.Module) -> int | None:
    """The number of nets of a natively batched ensemble anywhere within ``module``, or None.

    The protocol: some submodule has an integer attribute ``ensemble_size``, and ``module`` returns the nets along a new
    first dimension. :class:`~gpubuf.modules.EnsembleMLP` is one.
    """
    for part in module.modules():
        size = getattr(part, "ensemble_size", None)
        if isinstance(size, int):
            return size
    return None


class ParameterPlaces:
    """The places within a module that hold its parameters and buffers, in the order of given paths."""

    def __init__(self, module: nn.Module, where: Iterable[Path]) -> None:
        self._places: list[tuple[dict[str, Any], str]] = []
        for *names, last in where:
            owner = module.get_submodule(".".join(names))
            self._places.append((owner._parameters if last in owner._parameters else owner._buffers, last))
        # Recurrent layers keep a second list of their parameters.
        self._recurrent = [part for part in module.modules() if isinstance(part, nn.RNNBase)]

    def fill(self, tensors: Iterable[Tensor | None], constant: bool = False) -> None:
        """Put ``tensors``, or :func:`constants` of them, into these places."""
        for (owner, name), tensor in zip(self._places, tensors, strict=True):
            owner[name] = tensor.detach() if constant and tensor is not None and tensor.requires_grad else tensor
        for part in self._recurrent:
            part._flat_weights = [getattr(part, name, None) for name in part._flat_weights_names]

    def clear(self) -> None:
        """Empty the places, so that they keep no autograd graph alive."""
        self.fill([None] * len(self._places))


def batch_norms(module: nn.Module) -> list[Any]:
    """The parts of ``module`` that keep running statistics of batches, gpubuf's, PyTorch's and other libraries'."""
    return [part for part in module.modules() if part._buffers.get("running_mean") is not None]


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

    def use_batch_statistics(self) -> None:
        """From now on gpubuf's batch norms normalise by the batch also where nothing needs gradients."""
        # Others do so in training mode anyway.
        set_statistics(self.module, "batch")


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


def _copied(module: nn.Module) -> nn.Module:
    """A copy of ``module`` with parameters and buffers of its own."""

    def own(tensor: Tensor) -> Tensor:
        clone = tensor.detach().clone()
        return nn.Parameter(clone, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else clone

    return copy.deepcopy(module, {id(t): own(t) for t in (*module.parameters(), *module.buffers())})


def redrawn_copies(module: nn.Module, n: int, shared: Collection[int]) -> list[nn.Module]:
    """``n`` copies of ``module`` with parameters drawn anew, except for the ``shared`` ones, which nobody touches."""
    kept = {tuple(name.split(".")): p for name, p in module.named_parameters(remove_duplicate=False) if id(p) in shared}
    out = [_copied(module) for _ in range(n)]
    for each in out:
        redraw(each)
        ParameterPlaces(each, kept).fill(kept.values())
    return out


def distinct(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """``modules``; each further occurrence of the same module is replaced by a copy, drawn anew."""
    out: list[nn.Module] = []
    for module in modules:
        if any(module is other for other in out):
            module = _copied(module)
            redraw(module)
        out.append(module)
    return out


def share_parameters(modules: Sequence[nn.Module], apart: Collection[int]) -> bool:
    """Whether two of ``modules`` have a parameter in common that is trained, other than those ``apart`` (by id)."""
    owners: dict[int, nn.Module] = {}
    for module in modules:
        for parameter in module.parameters():
            owner = owners.setdefault(id(parameter), module)
            if owner is not module and parameter.requires_grad and id(parameter) not in apart:
                return True
    return False


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


def target_parameters(params: TensorDictParams) -> TensorDictParams:
    """A copy of ``params`` without gradients, registered as buffers."""
    return TensorDictParams(params.apply(lambda tensor: tensor.detach().clone()), no_convert=True)


Owners = Mapping[str, TensorDictBase]
"""The parameters of the networks that share theirs with others, by the name of the network."""


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


def follow_owners(params: TensorDictBase, shared: Mapping[Path, Path], owners: Owners) -> None:
    """Let the parameters at the paths ``shared`` have the memory of their owners', without gradient."""
    for path, (name, *where) in shared.items():
        own = params.get(path)
        own.data = owners[name].get(tuple(where)).detach().expand(own.shape)


class SingleNetwork:
    """A network such as an actor or a state value.

    Args:
        network: the network. It keeps its parameters.
        shared: parameters that get no gradient from this network: their owners, by id.
        delayed: whether it has target parameters.

    Attributes:
        network: as given.
        params: its parameters, the very ones of ``network`` except for the shared ones.
        online: runs on the network's own parameters.
        target: runs on the target parameters; the online one where there are none.
    """

    def __init__(self, network: Any, shared: Mapping[int, Path], delayed: bool) -> None:
        self.network = network
        self.params, self._shared = own_parameters(network, shared)
        self._where = paths(self.params)
        self.online = SwappableCopy(network, self._where, copied=bool(self._shared))
        self.target = SwappableCopy(network, self._where) if delayed else self.online

    def refresh(self, params: TensorDictBase, target_params: TensorDictBase | None, owners: Owners) -> None:
        """Run on these parameters from now on."""
        follow_owners(params, self._shared, owners)
        self.online.places.fill(leaves(params))
        if self.target is not self.online:
            self.target.places.fill(leaves(params if target_params is None else target_params))

    def keep_running_statistics(self) -> None:
        """Let :attr:`target` normalise by the running statistics of batch norms, in either mode, for good."""
        if batch_norms(self.network):
            if self.target is self.online:
                self.target = SwappableCopy(self.network, self._where)
            self.target.keep_running_statistics()


class ParametersByName:
    """Modules that hold the tensors of ``TensorDictParams`` under the names by which PyTorch looks for them.

    ``functional_call`` replaces a module's parameters for one call. A ``TensorDictParams`` makes a new module each time
    one of its levels is accessed, so the tensors would be put where nobody reads them. Here every level is one
    permanent module.

    Args:
        params: the parameters by the name that the loss has for them.
    """

    def __init__(self, params: Mapping[str, TensorDictParams]) -> None:
        self._owners: list[tuple[dict[str, Any], str, Tensor]] = []
        self._places: dict[str, list[tuple[Path, dict[str, Any], Tensor]]] = {}
        for name, each in params.items():
            root, places = nn.Module(), []
            for path, leaf in zip(paths(each), leaves(each), strict=True):
                level = root
                for part in path[:-1]:
                    level._modules.setdefault(part, nn.Module())
                    level = level._modules[part]  # type: ignore[assignment]
                owner: Any = level._parameters if isinstance(leaf, nn.Parameter) else level._buffers
                owner[path[-1]] = leaf
                places.append((path, owner, leaf))
            self._places[name] = places
            self._owners += [(owner, path[-1], leaf) for path, owner, leaf in places]
            # Before `__getattr__`, which makes the modules that nobody reads.
            each.__dict__.update(root._modules)

    def replaced(self) -> dict[str, TensorDict] | None:
        """All parameters by name if any of them is replaced, else None."""
        # Asked at every call of the loss.
        for owner, last, leaf in self._owners:
            if owner[last] is not leaf:
                break
        else:
            return None
        out = {}
        for name, places in self._places.items():
            out[name] = TensorDict({}, batch_size=[])
            for path, owner, _ in places:
                out[name].set(path, owner[path[-1]])
        return out
