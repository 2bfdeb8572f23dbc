"""The loss of deep Q-networks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase
from tensordict.utils import NestedKey

from gpubuf.modules.fast_call import entry, output
from gpubuf.objectives.base import LossModule
from gpubuf.objectives.batch import next_state
from gpubuf.objectives.discrete_sac import chosen_values, space_of
from gpubuf.objectives.networks import Networks, without_gradients
from gpubuf.objectives.options import CommonOptions


@dataclass(frozen=True)
class DQNOptions(CommonOptions):
    """The keyword arguments of :class:`DQNLoss`.

    Raises:
        ValueError: ``double_dqn`` without ``delay_value``.
    """

    CONSUMED = CommonOptions.CONSUMED | {"action_space"}

    loss_function: str = "l2"
    delay_value: bool = True
    double_dqn: bool = False
    action_space: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.double_dqn and not self.delay_value:
            raise ValueError(
                "double_dqn=True needs delay_value=True, got False: its two networks are the value network and its "
                "target"
            )


class DQNLoss(LossModule):
    """Deep Q-learning (Mnih et al., Nature 518, 2015), or double Q-learning (van Hasselt et al., arXiv 1509.06461).

    One network returns the values of all A actions. With S the batch shape (agents included) and ``terminated``, not
    ``done``, to stop bootstrapping, ``loss`` is ``loss_function`` between Q(s, a) and
    ``y = r + gamma^steps (1 - terminated) Qtarget(s', a')``, where a' is the best action by Qtarget, or with
    ``double_dqn`` by Q.

    Call it with a TensorDict: it returns a TensorDict of ``loss``, ``[]``, and writes ``"td_error"``, ``(Q - y)^2`` of
    shape S, into its input, the priority of each row: the square, as in TorchRL, so that ``alpha=0.3`` of a buffer is
    0.6 of the paper on priorities. Or call it with keyword arguments named after ``in_keys`` (nested keys joined by
    ``_``): it returns the loss. Nothing synchronises with the host.

    Importance weights, masks, and the shapes of rewards and flags are those of :class:`~gpubuf.objectives.SACLoss`.

    The keys of :meth:`set_keys` are action, action_value, reward, done, terminated, priority and priority_weight; value
    is accepted, as TorchRL's, and not used.

    Args:
        value_network: a module that writes the values ``[*S, A]`` at ``tensor_keys.action_value``, such as
            :func:`~gpubuf.modules.make_dqn` builds. It keeps its parameters, so that it can act.
        loss_function: "smooth_l1", "l2", "l1" or "huber" (the same as "smooth_l1").
        delay_value: evaluate the next values with target parameters.
        double_dqn: choose the next action by the network, and evaluate it by its target.
        action_space: how the batch has its actions: "one-hot" (``[*S, A]``) or "categorical" (indices, S or
            ``[*S, 1]``), or a space of TorchRL or Gymnasium. For None that of the network, if it has one as an
            attribute, else one-hot, with a warning.
        gamma: refused; see :meth:`make_value_estimator`.
        priority_key: refused; see :meth:`set_keys`.
        reduction: "mean" (default), "sum", or "none" for a loss of shape S, weighted, 0 where masked.
        skip_done_states: as in :class:`~gpubuf.objectives.SACLoss`.
        use_prioritized_weights: False, True (a batch without weights is an error), or "auto".

    Attributes:
        action_space: "one-hot" or "categorical".
        value_network_params: parameters of the network, the very ones of ``value_network``.
        target_value_network_params: their targets, as buffers; updated by :class:`~gpubuf.objectives.SoftUpdate` or
            :class:`~gpubuf.objectives.HardUpdate`.

    Raises:
        NotImplementedError: the action space is a product of several.
        RuntimeError: ``priority_key`` is given.
        TypeError: ``gamma`` is given, or the network does not say which keys it reads.
        ValueError: an argument is none of its choices.
    """

    @dataclass
    class _AcceptedKeys(LossModule._AcceptedKeys):
        action: NestedKey = "action"
        value: NestedKey = "chosen_action_value"
        action_value: NestedKey = "action_value"

    loss_names = ("loss",)
    Options = DQNOptions

    def __init__(self, value_network: Any, **options: Any) -> None:
        super().__init__()
        chosen = DQNOptions(**options)
        self._have(Networks({"value_network": (value_network, chosen.delay_value)}, (), chosen), chosen)
        space = getattr(value_network, "action_space", None) if chosen.action_space is None else chosen.action_space
        _, self.action_space = space_of(self, space)
        self.make_value_estimator()

    def _losses(self, tensordict: TensorDictBase) -> TensorDictBase:
        seen, network = self._seen(tensordict), self._networks.single["value_network"]
        following, key = next_state(seen), self.tensor_keys.action_value
        with without_gradients():
            next_q = network.target.run(following, output, following, key)
            best = network.online.run(following, output, following, key) if self.double_dqn else next_q
            next_value = next_q.gather(-1, best.argmax(-1, keepdim=True)).squeeze(-1)
            target = self.td_target(next_value.unsqueeze(0), seen, next_value.shape)
        q = network.online.run(seen, output, seen, key)
        _, mask = self.row_weights(seen, target.shape)
        # The first dimension counts critics: here there is one.
        chosen = chosen_values(q.unsqueeze(0), entry(seen, self.tensor_keys.action), self.action_space, mask)
        loss, td_error = self.td_loss(chosen, target, seen)
        self._set_priority(tensordict, seen, td_error.square())
        return self._output(tensordict, {"loss": loss}, {})
