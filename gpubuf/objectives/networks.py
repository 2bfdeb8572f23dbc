"""Networks run on parameters other than their own: targets, detached parameters, stacked ensembles."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictParams
from tensordict.utils import NestedKey
from torch import Tensor, nn

Path = tuple[str, ...]

_RANDOM_MODULES = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def paths(params: TensorDictBase) -> list[Path]:
    """Where each leaf of ``params`` stands, as the names on the way to it."""
    return [key if isinstance(key, tuple) else (key,) for key in params.keys(True, True)]


def leaves(params: TensorDictBase) -> list[Tensor]:
    """The tensors of ``params``, in the order of :func:`paths`."""
    return [params.get(path) for path in paths(params)]


def ensemble_size(module: nn.Module) -> int | None:
    """The number of nets of a natively batched ensemble anywhere within ``module``, or None.

    The protocol: some submodule has an integer attribute ``ensemble_size``, and what ``module`` returns has the nets
    along a new first dimension. :class:`~gpubuf.modules.EnsembleMLP` is one.
    """
    for part in module.modules():
        size = getattr(part, "ensemble_size", None)
        if isinstance(size, int):
            return size
    return None


class Slots:
    """The places within a module where its parameters and buffers are kept, in the order of some paths."""

    def __init__(self, module: nn.Module, where: Iterable[Path]) -> None:
        self._slots: list[tuple[dict[str, Any], str]] = []
        for *names, last in where:
            owner = module.get_submodule(".".join(names))
            self._slots.append((owner._parameters if last in owner._parameters else owner._buffers, last))
        # These keep a second list of their parameters.
        self._recurrent = [part for part in module.modules() if isinstance(part, nn.RNNBase)]

    def fill(self, tensors: Iterable[Tensor | None]) -> None:
        """Put ``tensors`` there."""
        for (owner, name), tensor in zip(self._slots, tensors, strict=True):
            owner[name] = tensor
        for part in self._recurrent:
            part._flat_weights = [getattr(part, name, None) for name in part._flat_weights_names]

    def clear(self) -> None:
        """Leave nothing there, so that no graph is kept alive."""
        self.fill([None] * len(self._slots))


class Replica:
    """A copy of a module's structure, which shares its tensors until others are put in their place.

    The module itself is never touched, so that it can act in another thread meanwhile.
    """

    def __init__(self, module: nn.Module, where: Iterable[Path]) -> None:
        shared: dict[int, Any] = {id(t): t for t in (*module.parameters(), *module.buffers())}
        self.module = copy.deepcopy(module, shared)
        self.slots = Slots(self.module, where)
        self._modes = list(zip(module.modules(), self.module.modules(), strict=True))

    def follow_mode(self) -> None:
        """Take over ``training`` of every part of the original."""
        for original, part in self._modes:
            part.training = original.training


def _redraw(module: nn.Module) -> None:
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


def _copies(module: nn.Module, n: int, shared: dict[int, Tensor]) -> list[nn.Module]:
    """``n`` copies of ``module`` with parameters drawn anew, but for the ``shared`` ones, which stay what they are."""
    kept = [(p, p.detach().clone()) for p in module.parameters() if id(p) in shared]
    out = [copy.deepcopy(module, dict(shared)) for _ in range(n)]
    for each in out:
        _redraw(each)
    with torch.no_grad():
        for parameter, value in kept:
            parameter.copy_(value)
    return out


def _distinct(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """``modules``, where one that is there twice is copied and drawn anew."""
    out: list[nn.Module] = []
    for module in modules:
        if any(module is other for other in out):
            module = copy.deepcopy(module)
            _redraw(module)
        out.append(module)
    return out


def stacked_parameters(modules: Sequence[nn.Module], shared: dict[int, Tensor]) -> TensorDictParams:
    """The parameters and buffers of ``modules``, all of the same structure, stacked along a new first dimension.

    A parameter among ``shared`` (by id) is not copied but viewed ``len(modules)`` times, without gradient.
    """
    n = len(modules)
    each = [TensorDict.from_module(module) for module in modules]
    stacked: dict[NestedKey, Tensor] = {}
    for path in paths(each[0]):
        first = each[0].get(path)
        if id(first) in shared:
            stacked[path] = first.detach().expand(n, *first.shape)
            continue
        tensor = torch.stack([params.get(path).detach() for params in each])
        stacked[path] = nn.Parameter(tensor, first.requires_grad) if isinstance(first, nn.Parameter) else tensor
    return TensorDictParams(TensorDict(stacked, batch_size=[n]), no_convert=True)


class Critics:
    """An ensemble of action-value networks that runs on its own, on detached, or on target parameters.

    Args:
        networks: one natively batched ensemble (see :func:`ensemble_size`), one network to be copied
            ``size`` times and drawn anew, or a list of ``size`` networks of the same structure.
        size: number of networks, N.
        use_vmap: run stacked networks through ``torch.vmap``; otherwise one after the other.
        shared: parameters, by id, that get no gradient from here.

    Attributes:
        network: the network whose structure is used.
        params: the parameters, stacked ``[N, ...]`` unless ``native``.
        native: whether ``network`` is a natively batched ensemble.

    Raises:
        ValueError: the networks are not ``size``.
    """

    def __init__(
        self, networks: nn.Module | Sequence[nn.Module], size: int, *, use_vmap: bool, shared: dict[int, Tensor]
    ) -> None:
        self.size, self.use_vmap = size, use_vmap
        self.randomness: str | None = None
        members = list(networks) if isinstance(networks, list | tuple | nn.ModuleList) else None
        self.network: Any = networks if members is None else members[0]
        batched = ensemble_size(self.network) if members is None else None
        self.native = batched is not None
        if members is not None and len(members) != size:
            raise ValueError(f"num_qvalue_nets={size}, but {len(members)} networks were given")
        if self.native and batched != size:
            raise ValueError(f"num_qvalue_nets={size}, but the network is an ensemble of {batched}")
        if members is None:
            members = [self.network] if self.native else _copies(self.network, size, shared)
        first = TensorDict.from_module(members[0])
        self._shared = {path: first.get(path) for path in paths(first) if id(first.get(path)) in shared}
        if self.native:
            for path, tensor in self._shared.items():
                first.set(path, tensor.detach())
            self.params = TensorDictParams(first, no_convert=True)
        else:
            self.params = stacked_parameters(_distinct(members), shared)
        where = paths(self.params)
        self._own_slots = Slots(self.network, where) if self.native and not self._shared else None
        self._online = None if self._own_slots else Replica(self.network, where)
        self._detached = Replica(self.network, where) if self.native else self._online
        self._target: Replica | None = None
        self.refresh(None)

    def refresh(self, target_params: TensorDictBase | None) -> None:
        """Take up the tensors anew, after they were moved to another device or replaced."""
        where = paths(self.params)
        for path, tensor in self._shared.items():
            alias = tensor.detach()
            self.params.get(path).data = alias if self.native else alias.expand(self.size, *alias.shape)
        self._tensors = leaves(self.params)
        self._target_tensors = None if target_params is None else [target_params.get(path) for path in where]
        if self._own_slots is not None:
            self._own_slots.fill(self._tensors)
        elif self.native and self._online is not None:
            self._online.slots.fill(self._tensors)
        if self.native and self._target_tensors is not None:
            if self._target is None:
                self._target = Replica(self.network, where)
            self._target.slots.fill(self._target_tensors)
        if self.native and self._detached is not None:
            self._detached.slots.fill([t.detach() for t in self._tensors])

    def online(self, inputs: TensorDictBase, key: NestedKey) -> Tensor:
        """Values ``[N, *batch, 1]`` with gradients to the parameters."""
        if not self.native:
            return self._stacked(self._tensors, inputs, key)
        if self._online is None:
            return self._run(self.network, inputs, key)
        self._online.follow_mode()
        return self._run(self._online.module, inputs, key)

    def detached(self, inputs: TensorDictBase, key: NestedKey) -> Tensor:
        """Values ``[N, *batch, 1]`` with gradients to the inputs only."""
        if not self.native:
            return self._stacked([t.detach() for t in self._tensors], inputs, key)
        replica = self._detached
        assert replica is not None
        replica.follow_mode()
        if not torch.compiler.is_compiling():
            # A parameter whose `.data` was replaced has another memory now.
            replica.slots.fill([t.detach() for t in self._tensors])
        return self._run(replica.module, inputs, key)

    def target(self, inputs: TensorDictBase, key: NestedKey) -> Tensor:
        """Values ``[N, *batch, 1]`` of the target parameters, or, without these, of the detached ones."""
        if self._target_tensors is None:
            return self.detached(inputs, key)
        if not self.native:
            return self._stacked(self._target_tensors, inputs, key)
        assert self._target is not None
        self._target.follow_mode()
        return self._run(self._target.module, inputs, key)

    def _run(self, module: nn.Module, inputs: TensorDictBase, key: NestedKey) -> Tensor:
        # The nets come first in the output: no batch size would fit inputs and output alike.
        data = TensorDict({name: inputs.get(name) for name in self.network.in_keys}, batch_size=[])
        value = module(data).get(key)
        if value.shape[:1] != (self.size,):
            raise ValueError(
                f"an ensemble of {self.size} networks must return them along the first dimension, got {key!r} of shape "
                f"{list(value.shape)}"
            )
        return value

    def _stacked(self, tensors: list[Tensor], inputs: TensorDictBase, key: NestedKey) -> Tensor:
        replica = self._online
        assert replica is not None
        replica.follow_mode()

        def single(*own: Tensor) -> Tensor:
            replica.slots.fill(own)
            return replica.module(inputs.copy()).get(key)

        try:
            if self.use_vmap:
                return torch.vmap(single, randomness=self.vmap_randomness)(*tensors)
            return torch.stack([single(*own) for own in zip(*(t.unbind(0) for t in tensors), strict=True)])
        finally:
            replica.slots.clear()

    @property
    def vmap_randomness(self) -> str:
        """How random operations behave among stacked networks: as set, else "different" where there is dropout."""
        if self.randomness is not None:
            return self.randomness
        random = any(isinstance(part, _RANDOM_MODULES) for part in self.network.modules())
        return "different" if random else "error"


def target_parameters(params: TensorDictParams) -> TensorDictParams:
    """A copy of ``params`` without gradients, registered as buffers."""
    return TensorDictParams(params.apply(lambda tensor: tensor.detach().clone()), no_convert=True)
