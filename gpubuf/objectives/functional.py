"""Lets ``torch.func.functional_call`` find and replace the parameters of a loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict import TensorDict
from tensordict.nn import TensorDictParams
from torch import Tensor, nn

from gpubuf.objectives.networks import Path, leaves, paths


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
