"""The loss of soft actor-critic over a finite set of actions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
from tensordict.utils import NestedKey
from torch import Tensor
from torch.distributions import Categorical, OneHotCategorical

from gpubuf.kernels import discrete_sac
from gpubuf.kernels._operations import direct
from gpubuf.modules.fast_call import entry
from gpubuf.objectives.base import LossModule, warn
from gpubuf.objectives.batch import REDUCTIONS, next_state
from gpubuf.objectives.networks import without_gradients
from gpubuf.objectives.options import leaf_of
from gpubuf.objectives.sac import SACOptions, SoftActorCritic

ONE_HOT, CATEGORICAL = "one-hot", "categorical"

#: By name, or by the name of the class of a space of TorchRL or Gymnasium.
_SPACES = {
    **dict.fromkeys(("one-hot", "one_hot", "OneHot", "OneHotDiscreteTensorSpec"), ONE_HOT),
    **dict.fromkeys(("categorical", "Categorical", "DiscreteTensorSpec", "Discrete"), CATEGORICAL),
}


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


def space_of(loss: LossModule, space: Any) -> tuple[Any, str]:
    """(the space of the actions that ``loss`` reads, its :func:`action_space_name`), with a warning for None."""
    if space is None:
        name = type(loss).__name__
        warn(
            f"{name} reads actions as one-hot vectors. Pass action_space='one-hot' to silence this warning, or "
            "'categorical' if they are indices."
        )
        space = ONE_HOT
    space, _ = leaf_of(space, loss.tensor_keys.action)
    return space, action_space_name(space)


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
    kind = type(last)
    if (
        kind is not ProbabilisticTensorDictModule
        or last.distribution_class not in (Categorical, OneHotCategorical)
        or {*last.distribution_kwargs} - {"validate_args"}
        or last.dist_keys not in (["logits"], ["probs"])
    ):
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


_soft_value = direct(discrete_sac.soft_value)


@dataclass(frozen=True)
class DiscreteSACOptions(SACOptions):
    """The keyword arguments of :class:`DiscreteSACLoss`."""

    CONSUMED = SACOptions.CONSUMED | {"action_space", "num_actions", "target_entropy_weight"}

    action_space: Any = None
    num_actions: int | None = None
    target_entropy_weight: float = 0.98
    delay_actor: bool = field(default=False, init=False)
    action_spec: Any = field(default=None, init=False)


class DiscreteSACLoss(SoftActorCritic):
    """Soft actor-critic over a finite set of actions (Christodoulou, arXiv 1910.07207).

    The critics return the values of all A actions, so that every expectation over the policy ``p`` is exact. With S the
    batch shape of the policy (agents included), N critics and ``terminated``, not ``done``, to stop bootstrapping:

    * ``loss_qvalue``: sum over critics of ``loss_function`` between Q(s, a) and
      ``y = r + gamma^steps (1 - terminated) sum_a' p(a'|s') (min_k Qtarget_k(s', a') - alpha log p(a'|s'))``;
    * ``loss_actor``: ``sum_a p(a|s) (alpha log p(a|s) - min_k Q_k(s, a))``, with gradients to the actor only;
    * ``loss_alpha``: ``-log_alpha (sum_a p(a|s) log p(a|s) + target_entropy)``, on log_alpha, as in TorchRL.

    An action with p = 0 takes no part: 0 log 0 is 0. Policies may therefore rule actions out by logits of -inf.

    Call it with a TensorDict: it returns a TensorDict of ``loss_actor``, ``loss_qvalue``, ``loss_alpha``, ``alpha`` and
    ``entropy``, all ``[]``, and writes ``"td_error"``, ``max_k |Q_k - y|`` of shape S, into its input, the priority of
    each row. Or call it with keyword arguments named after ``in_keys`` (nested keys joined by ``_``): it returns a
    tuple in the order of ``out_keys``. Nothing synchronises with the host. Critics run once on the present state, for
    their own loss and for the actor's. Losses are float32, or float64 where a network is, whatever autocast does.

    Importance weights, masks, and the shapes of rewards and flags are those of :class:`~gpubuf.objectives.SACLoss`.

    The keys of :meth:`set_keys` are action, action_value, reward, done, terminated, priority and priority_weight; value
    and log_prob are accepted, as TorchRL's, and not used.

    Args:
        actor_network: the policy, with a method ``get_dist(tensordict)`` that returns a distribution with ``logits``
            ``[*S, A]``, such as ``torch.distributions.Categorical`` or ``OneHotCategorical``. Distributions that check
            their parameters make the host wait; PyTorch's own two do not within ``ProbabilisticTensorDictSequential``,
            since the loss reads their parameters itself.
        qvalue_network: one network, which is copied ``num_qvalue_nets`` times and drawn anew; a list of networks; or a
            natively batched ensemble. It returns ``[*S, A]``, an ensemble ``[num_qvalue_nets, *S, A]``, at
            ``tensor_keys.action_value``.
        action_space: how the batch has its actions: "one-hot" (``[*S, A]``) or "categorical" (indices, S or
            ``[*S, 1]``), or a space of TorchRL or Gymnasium. One-hot for None, with a warning.
        num_actions: A, for ``target_entropy="auto"``. Not needed where ``action_space`` knows it.
        num_qvalue_nets: number of critics, N.
        loss_function: "smooth_l1", "l2", "l1" or "huber" (the same as "smooth_l1").
        alpha_init: first temperature.
        min_alpha: lower bound of the temperature, applied at each call.
        max_alpha: upper bound.
        fixed_alpha: keep the temperature as a buffer instead of a parameter.
        target_entropy_weight: the share of the largest entropy, log A, that "auto" aims at.
        target_entropy: a number, or "auto".
        delay_qvalue: evaluate the next values with target parameters of the critics.
        priority_key: refused; see :meth:`set_keys`.
        separate_losses: parameters that critics and actor share get gradients from the actor's loss only.
        reduction: "mean" (default), "sum", or "none" for losses of shape S, weighted, 0 where masked.
        skip_done_states: as in :class:`~gpubuf.objectives.SACLoss`.
        deactivate_vmap: run several critics one after the other.
        use_prioritized_weights: False, True (a batch without weights is an error), or "auto".
        scalar_output_mode: whether ``alpha`` and ``entropy`` are returned with ``reduction="none"``: "exclude" (also
            for None, with a warning) or "non_tensor".

    Attributes:
        action_space: "one-hot" or "categorical".
        actor_network_params: parameters of the actor, the very ones of ``actor_network``.
        qvalue_network_params: parameters of the critics; stacked ``[N, ...]`` unless the ensemble is natively batched.
        target_qvalue_network_params: their targets, as buffers; updated by :class:`~gpubuf.objectives.SoftUpdate`.
        log_alpha: logarithm of the temperature, ``[]``.

    Raises:
        NotImplementedError: the action space is a product of several.
        RuntimeError: ``priority_key`` is given.
        ValueError: an argument is out of range, the critics are not ``num_qvalue_nets``, or the number of actions is
            needed and unknown.
    """

    @dataclass
    class _AcceptedKeys(LossModule._AcceptedKeys):
        action: NestedKey = "action"
        value: NestedKey = "state_value"
        action_value: NestedKey = "action_value"
        log_prob: NestedKey = "log_prob"

    Options = DiscreteSACOptions

    def _known_entropy(self, options: Any) -> float | None:
        space, self.action_space = space_of(self, options.action_space)
        if options.target_entropy != "auto":
            return float(options.target_entropy)
        num_actions = number_of_actions(space) if options.num_actions is None else options.num_actions
        if num_actions is None or num_actions < 1:
            raise ValueError(
                "target_entropy='auto' needs the number of actions: pass num_actions, or a space that knows it, "
                f"got num_actions={num_actions}"
            )
        return float(options.target_entropy_weight * math.log(num_actions))

    def _critic_loss(self, tensordict: TensorDictBase, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """(reduced loss of all critics, priority of each row S, values of all actions ``[N, *S, A]``)."""
        keys, critics, state = self.tensor_keys, self._critics, next_state(tensordict)
        with without_gradients():
            logits = self._actor.target.run(state, policy_logits, state)
            next_q = critics.target(state, keys.action_value)
            value = _soft_value(next_q, self._checked_logits(logits, next_q), alpha)
            target = self.td_target(value.unsqueeze(0), tensordict, value.shape)
        q = critics.online(tensordict, keys.action_value)
        if q.shape[1:-1] != target.shape:
            raise ValueError(
                f"the critics' {keys.action_value!r} must be {[q.shape[0], *target.shape, 'A']} to go with targets of "
                f"shape {list(target.shape)}, got {list(q.shape)}"
            )
        _, mask = self.row_weights(tensordict, target.shape)
        chosen = chosen_values(q, entry(tensordict, keys.action), self.action_space, mask)
        loss, td_error = self.td_loss(chosen, target, tensordict)
        return loss, td_error, q

    def _actor_loss(
        self, tensordict: TensorDictBase, alpha: Tensor, found: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(reduced loss of the actor, its mean log-probabilities S, mean entropy ``[]``).

        Args:
            tensordict: the batch.
            alpha: the temperature.
            found: values of all actions, which the critics' loss has computed; None to compute them.
        """
        logits = self._actor.online.run(tensordict, policy_logits, tensordict)
        inputs = (entry(tensordict, key) for key in self.qvalue_network.in_keys)
        if found is None or any(tensor.requires_grad for tensor in inputs):
            values = self._critics.detached(tensordict, self.tensor_keys.action_value)
        else:
            values = found.detach()
        weight, mask = self.row_weights(tensordict, logits.shape[:-1])
        loss, log_prob, entropy, _ = discrete_sac.actor_loss_direct(
            values, self._checked_logits(logits, values), alpha, weight, mask, REDUCTIONS[self.reduction]
        )
        return loss, log_prob, entropy

    def _checked_logits(self, logits: Tensor, q: Tensor) -> Tensor:
        """``logits``; ValueError unless they go with the critics' values ``q``."""
        if q.shape[1:] != logits.shape:
            raise ValueError(
                f"the critics' {self.tensor_keys.action_value!r} must be {[q.shape[0], *logits.shape]} to go with a "
                f"policy of shape {list(logits.shape)}, got {list(q.shape)}"
            )
        return logits
