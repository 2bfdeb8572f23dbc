"""One network that runs on its own, or on target parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictParams
from torch import Tensor

from gpubuf.objectives.networks import ParameterPlaces, Path, SwappableCopy, batch_norms, leaves, paths

Owners = Mapping[str, TensorDictBase]
"""The parameters of the networks that share theirs with others, by the name of the network."""


def shared_paths(params: TensorDictBase, shared: Mapping[int, Path]) -> dict[Path, Path]:
    """For each parameter of ``params`` that is ``shared``, the name of its owner and its path there."""
    return {path: shared[id(params.get(path))] for path in paths(params) if id(params.get(path)) in shared}


def shared_tensor(owners: Owners, owner: Path) -> Tensor:
    """The parameter of ``owner``, without gradient."""
    tensor: Tensor = owners[owner[0]].get(owner[1:])
    return tensor.detach()


class SingleNetwork:
    """A network such as an actor or a state value.

    Args:
        network: the network. It keeps its parameters.
        shared: parameters that get no gradient from this network: their owners, by id.
        delayed: whether it has target parameters.

    Attributes:
        network: as given.
        params: its parameters, the very ones of ``network`` except for the shared ones.
    """

    def __init__(self, network: Any, shared: Mapping[int, Path], delayed: bool) -> None:
        own = TensorDict.from_module(network)
        self._shared = shared_paths(own, shared)
        for path in self._shared:
            own.set(path, own.get(path).detach())
        self.network, self.params = network, TensorDictParams(own, no_convert=True)
        self._where = where = paths(self.params)
        self._places = ParameterPlaces(network, where)
        self._copy = SwappableCopy(network, where) if self._shared else None
        self._target = SwappableCopy(network, where) if delayed else None

    def refresh(self, params: TensorDictBase, target_params: TensorDictBase | None, owners: Owners) -> None:
        """Run on these parameters from now on."""
        for path, owner in self._shared.items():
            params.get(path).data = shared_tensor(owners, owner)
        (self._places if self._copy is None else self._copy.places).fill(leaves(params))
        if self._target is not None:
            self._target.places.fill(leaves(params if target_params is None else target_params))

    def keep_running_statistics(self) -> None:
        """Let :meth:`target` normalise by the running statistics of batch norms, in either mode, for good."""
        if not batch_norms(self.network):
            return
        if self._target is None:
            self._target = SwappableCopy(self.network, self._where)
        self._target.keep_running_statistics()

    def online(self) -> Any:
        """The module that runs on the network's own parameters."""
        return self.network if self._copy is None else _ready(self._copy)

    def target(self) -> Any:
        """The module that runs on the target parameters; the online one where there are none."""
        return self.online() if self._target is None else _ready(self._target)


def _ready(copy: SwappableCopy) -> Any:
    copy.follow_mode()
    return copy.module
