"""Finite sets of actions: the spaces in which losses accept them, and the logits of policies over them."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
from tensordict.utils import NestedKey
from torch import Tensor
from torch.distributions import Categorical, OneHotCategorical

from gpubuf.modules.plain import entry
from gpubuf.objectives.masks import counting_rows
from gpubuf.objectives.networks import run_counting

ONE_HOT, CATEGORICAL = "one-hot", "categorical"

#: By name, or by the name of the class of a space of TorchRL or Gymnasium.
_SPACES = {
    "one-hot": ONE_HOT,
    "one_hot": ONE_HOT,
    "OneHot": ONE_HOT,
    "OneHotDiscreteTensorSpec": ONE_HOT,
    "categorical": CATEGORICAL,
    "Categorical": CATEGORICAL,
    "DiscreteTensorSpec": CATEGORICAL,
    "Discrete": CATEGORICAL,
}


def leaf_space(space: Any, key: NestedKey) -> Any:
    """The space of the action at ``key`` in a composite one; any other space as it is."""
    for name in key if isinstance(key, tuple) else (key,):
        if isinstance(space, str) or not hasattr(space, "keys"):
            break
        space = space[name]
    return space


def action_space_name(space: Any) -> str:
    """``"one-hot"`` or ``"categorical"``.

    Args:
        space: one of these names, or a space of TorchRL (``OneHot``, ``Categorical``) or Gymnasium (``Discrete``).

    Raises:
        NotImplementedError: a product of several sets of actions, such as ``"mult_one_hot"``.
        ValueError: anything else.
    """
    name = space if isinstance(space, str) else type(space).__name__
    if name in _SPACES:
        return _SPACES[name]
    if name.lower().startswith(("mult", "binary")):
        raise NotImplementedError(f"expectations are taken over one set of actions, not over the product {name!r}")
    raise ValueError(f"action_space must be 'one-hot' or 'categorical', or such a space, got {space!r}")


def number_of_actions(space: Any) -> int | None:
    """How many actions ``space`` has; None where it does not say."""
    for owner in (space, getattr(space, "space", None)):
        n = getattr(owner, "n", None)
        if n is not None:
            return int(n)
    return None


def _of_probabilities(probs: Tensor) -> Tensor:
    """Logarithms; -inf for 0, without gradient: that of the logarithm is infinite, and 0 times that is NaN."""
    possible = probs > 0
    return torch.where(possible, torch.where(possible, probs, 1).log(), -torch.inf)


def action_logits(distribution: Any) -> Tensor:
    """Logits of a distribution over a finite set of actions, ``[*S, A]``, for :mod:`gpubuf.kernels.discrete_sac`.

    Args:
        distribution: anything with ``logits``, such as ``torch.distributions.Categorical`` and ``OneHotCategorical``.
            One that was made from probabilities gives the logarithms of these. ``torch.distributions`` would cut them
            off at the precision of the dtype: here a probability of 0 stays 0.

    Raises:
        TypeError: it has none.
    """
    own = vars(getattr(distribution, "_categorical", distribution))
    if "probs" in own and "logits" not in own:
        return _of_probabilities(own["probs"])
    logits = getattr(distribution, "logits", None)
    if not isinstance(logits, Tensor):
        raise TypeError(f"a policy over a finite set of actions must have logits, got {type(distribution).__name__}")
    return logits


def policy_logits(actor: Any, tensordict: TensorDictBase) -> Tensor:
    """Logits of the policy of ``actor`` in the states of ``tensordict``, ``[*S, A]``, of any size.

    They are those of ``actor.get_dist(tensordict)``. Where that would make one of PyTorch's own distributions, they are
    taken as the networks give them: PyTorch checks the values of parameters, for which the host waits, and normalises
    them, which the kernels do anyway.
    """
    last: Any = actor[-1] if type(actor) is ProbabilisticTensorDictSequential and not actor.return_composite else None
    plain = type(last) is ProbabilisticTensorDictModule and last.distribution_class in (Categorical, OneHotCategorical)
    return run_counting(actor, counting_rows(tensordict, actor.in_keys), lambda: _logits(actor, tensordict, plain))


def _logits(actor: Any, tensordict: TensorDictBase, plain: bool) -> Tensor:
    last: Any = actor[-1] if plain else None
    if not plain or {*last.distribution_kwargs} - {"validate_args"} or last.dist_keys not in (["logits"], ["probs"]):
        return action_logits(actor.get_dist(tensordict.copy()))
    found: Tensor = entry(actor.get_dist_params(tensordict.copy()), last.in_keys[0])
    return found if last.dist_keys == ["logits"] else _of_probabilities(found)


def chosen_values(q: Tensor, action: Tensor, space: str, mask: Tensor | None) -> Tensor:
    """Values ``[N, *S]`` of the actions that were taken.

    Args:
        q: values of all actions, ``[N, *S, A]``.
        action: ``[*S, A]``, one-hot, of any dtype; or indices, S or ``[*S, 1]``.
        space: "one-hot" or "categorical".
        mask: rows that count; the actions of others may be anything. None: all of them.

    Raises:
        ValueError: the action does not fit the values.
    """
    rows = q.shape[1:-1]
    if space == ONE_HOT:
        if action.shape != q.shape[1:]:
            raise ValueError(f"a one-hot action must have shape {list(q.shape[1:])}, got {list(action.shape)}")
        return torch.where(action != 0, q, 0).sum(-1)
    if action.shape not in (rows, (*rows, 1)):
        raise ValueError(f"a categorical action must have shape {list(rows)}, got {list(action.shape)}")
    index = action.reshape(rows).long()
    if mask is not None:
        index = torch.where(mask.reshape(rows).bool(), index, 0)
    return q.gather(-1, index.expand(q.shape[:-1]).unsqueeze(-1)).squeeze(-1)
