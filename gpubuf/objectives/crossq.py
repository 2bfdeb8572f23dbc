"""The loss of CrossQ: batch norms in the place of target networks."""

from __future__ import annotations

from dataclasses import dataclass, field

from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from gpubuf.objectives.base import LossModule
from gpubuf.objectives.sac import SACOptions, SoftActorCritic


@dataclass(frozen=True)
class CrossQOptions(SACOptions):
    """The keyword arguments of :class:`CrossQLoss`: those of SAC but for target networks."""

    delay_actor: bool = field(default=False, init=False)
    delay_qvalue: bool = field(default=False, init=False)


class CrossQLoss(SoftActorCritic):
    """CrossQ: SAC without target networks, for critics with batch norms (Bhatt et al., arXiv 1902.05605).

    The formulas are those of :class:`~gpubuf.objectives.SACLoss`, with Q in the place of Qtarget. The rows (s, a) and
    (s', a') pass the critics as one batch, of ``2 B`` rows, so that batch norms see both; the second half makes the
    targets, without gradient.

    In the critics' loss batch norms use the statistics of that batch, and their running ones follow. In the actor's
    loss the critics use their running statistics, and the actor those of the batch. The next actions come from an actor
    with running statistics. All this holds in training mode; in evaluation mode every norm uses its running statistics.
    It holds for :class:`~gpubuf.modules.BatchNorm`, for those of PyTorch, and for others that keep a ``running_mean``.

    There is nothing for a target updater to update: make none.

    Args:
        actor_network: as in :class:`~gpubuf.objectives.SACLoss`, and so are all other arguments.
        qvalue_network: as in :class:`~gpubuf.objectives.SACLoss`.
    """

    @dataclass
    class _AcceptedKeys(SoftActorCritic._AcceptedKeys):
        log_prob: NestedKey = "_log_prob"

    Options = CrossQOptions
    joint_batch = "critics"
    _keys_of_actors = LossModule._keys_of_actors

    def alpha_loss(self, log_prob: Tensor, tensordict: TensorDictBase | None = None) -> Tensor:
        """``loss_alpha``, reduced, as TorchRL's.

        Args:
            log_prob: log-densities S of the actor's actions, which :meth:`actor_loss` returns.
            tensordict: the batch, for its importance weights and masks.
        """
        batch = TensorDict({}, []) if tensordict is None else tensordict
        return self._temperature_loss(batch, log_prob.detach())
