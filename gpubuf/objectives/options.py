"""The keyword arguments that losses share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tensordict.nn import TensorDictModule
from tensordict.utils import NestedKey

from gpubuf.objectives.batch import LOSS_FUNCTIONS, REDUCTIONS, one_of

CriticNetworks = TensorDictModule | Sequence[TensorDictModule]
"""One network, a list of them, or a natively batched ensemble."""


def leaf_of(spec: Any, key: NestedKey) -> tuple[Any, int]:
    """(what ``spec`` says of the entry at ``key``, number of dimensions of the containers that hold it).

    Args:
        spec: a space or spec, of the entry itself or a composite one.
        key: of the entry.
    """
    container = 0
    for name in key if isinstance(key, tuple) else (key,):
        if isinstance(spec, str) or not hasattr(spec, "keys"):
            break
        container = len(getattr(spec, "shape", None) or ())
        spec = spec[name]
    return spec, container


@dataclass(frozen=True)
class CommonOptions:
    """The keyword arguments that all losses share; :class:`~gpubuf.objectives.SACLoss` has their meaning.

    A field that is no argument of a loss, but has a value there, has ``init=False`` in its options.

    Raises:
        TypeError: ``gamma`` is given.
        RuntimeError: ``priority_key`` is given.
        ValueError: an argument is none of its choices.
    """

    #: Those that do not become attributes of the loss.
    CONSUMED: ClassVar[frozenset[str]] = frozenset({"gamma", "priority_key"})

    loss_function: str = "smooth_l1"
    gamma: float | None = None
    priority_key: str | None = None
    reduction: str | None = None
    skip_done_states: bool = False
    use_prioritized_weights: str | bool = "auto"

    def __post_init__(self) -> None:
        if self.gamma is not None:
            raise TypeError("gamma is not an argument of the loss: call loss.make_value_estimator(gamma=...)")
        if self.priority_key is not None:
            raise RuntimeError(
                "Setting 'priority_key' via the constructor is deprecated, use .set_keys(<key>='some_key') instead."
            )
        if self.reduction is None:
            object.__setattr__(self, "reduction", "mean")
        one_of(REDUCTIONS, self.reduction, "reduction")
        one_of(LOSS_FUNCTIONS, self.loss_function, "loss_function")
        one_of((False, True, "auto"), self.use_prioritized_weights, "use_prioritized_weights")


@dataclass(frozen=True)
class LossOptions(CommonOptions):
    """The keyword arguments that losses of an actor and N critics share.

    Raises:
        TypeError, RuntimeError: as :class:`CommonOptions`.
        ValueError: an argument is out of range or none of its choices.
    """

    CONSUMED = CommonOptions.CONSUMED | {"separate_losses"}

    num_qvalue_nets: int = 2
    delay_actor: bool = False
    delay_qvalue: bool = True
    separate_losses: bool = False
    deactivate_vmap: bool = False
    scalar_output_mode: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_qvalue_nets < 1:
            raise ValueError(f"num_qvalue_nets must be at least 1, got {self.num_qvalue_nets}")
        one_of((None, "exclude", "non_tensor"), self.scalar_output_mode, "scalar_output_mode")

    @property
    def further(self) -> Mapping[str, tuple[Any, bool]]:
        """Networks besides actor and critics, by name, each with whether it has target parameters."""
        return {}
