"""FastTD3's replay buffer, with its names: ``from gpubuf.integrations.fasttd3 import SimpleReplayBuffer``.

FastTD3 is at https://github.com/younggyoseo/FastTD3. :mod:`gpubuf.integrations.holosoma` has holosoma's variant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict

from gpubuf.data.buffer import ReplayBuffer
from gpubuf.data.storage.layout import Key
from gpubuf.data.storage.lazy import LazyTensorStorage
from gpubuf.data.storage.plan import STEPS_KEY
from gpubuf.data.storage.schema import Codec
from gpubuf.integrations.draw_orders import EachEnvironment
from gpubuf.integrations.environment_steps import Column, StepWriter

__all__ = ["SimpleReplayBuffer"]


class SimpleReplayBuffer:
    """The buffer of FastTD3's ``fast_td3_utils``: the same arguments, keys, shapes, dtypes and law of sampling.

    It differs where FastTD3's returns other numbers than the n-step return:

    * A window never crosses the newest row of a full ring. FastTD3 adds the rewards of the oldest rows there.
    * ``effective_n_steps`` is the number of rewards that were added, also where the window ends at a truncation or at
      the newest row, so that ``gamma ** effective_n_steps`` is the right discount. FastTD3 counts ``dones`` alone.
    * A truncation ends a window even if ``dones`` is not set with it.
    * Every stored step can be drawn. FastTD3 leaves out the newest ``n_steps - 1`` until the ring is full.
    * ``truncations`` are those that were written: none is made at the newest row.

    Flags take one byte each in memory instead of eight. It is no ``nn.Module``: nothing of it is a parameter.

    Args:
        n_env: number of environments, E.
        buffer_size: steps of each environment, T. There are ``T * E`` rows.
        n_obs: length of an observation.
        n_act: length of an action.
        n_critic_obs: length of an observation of the critic. Without ``asymmetric_obs`` it has no effect.
        asymmetric_obs: whether there are observations of the critic.
        playground_mode: those begin with the observation. Then they alone are stored, and batches have the observation
            as a view of them. On the CPU a write compares the two and raises ValueError if they differ.
        n_steps: steps of a transition, 1 .. 64.
        gamma: the discount.
        device: where the rows are, and the batches: as for :class:`LazyTensorStorage`. Default: the CPU.
        share_next: store observations once: half the memory. See :class:`LazyTensorStorage`.
        next_capacity: with ``share_next``, room for the last observations of trajectories.
        dtypes: how keys are stored, such as ``{"observations": torch.bfloat16}``. See :class:`LazyTensorStorage`.
        autoreset: when the environments reset: ``"same_step"`` that ends an episode; ``"next_step"``, the one after it,
            as Gymnasium's vector environments do by default: such a step is no transition, and the one before it is
            stored once more in its place; or ``"disabled"``, where the program calls ``reset``. Gymnasium's
            ``AutoresetMode``, and environments whose metadata has one, say it too.

    Attributes:
        buffer: the :class:`ReplayBuffer` in it, for everything that FastTD3's buffer does not have.

    Raises:
        ValueError: ``n_steps``, ``gamma`` or a size is out of range, or ``autoreset`` is none of these.
    """

    def __init__(
        self,
        n_env: int,
        buffer_size: int,
        n_obs: int,
        n_act: int,
        n_critic_obs: int,
        asymmetric_obs: bool = False,
        playground_mode: bool = False,
        n_steps: int = 1,
        gamma: float = 0.99,
        device: torch.device | str | None = None,
        *,
        share_next: bool = False,
        next_capacity: int | None = None,
        dtypes: Mapping[Any, torch.dtype | Codec] | None = None,
        autoreset: Any = "same_step",
    ) -> None:
        self.n_env = n_env
        self.buffer_size = buffer_size
        self.n_obs = n_obs
        self.n_act = n_act
        self.n_critic_obs = n_critic_obs
        self.asymmetric_obs = asymmetric_obs
        self.playground_mode = playground_mode and asymmetric_obs
        self.gamma = gamma
        self.n_steps = n_steps
        self.device = device
        widths = {"critic_observations": n_critic_obs} if asymmetric_obs else {}
        if not self.playground_mode:
            widths = {"observations": n_obs, **widths}
        kinds: dict[Key, tuple[torch.dtype, tuple[int, ...]]] = {
            **{(name,): (torch.float32, (width,)) for name, width in widths.items()},
            ("actions",): (torch.float32, (n_act,)),
            **{("next", name): (torch.float32, (width,)) for name, width in widths.items()},
            ("next", "rewards"): (torch.float32, ()),
            ("next", "dones"): (torch.int64, ()),
            ("next", "truncations"): (torch.int64, ()),
        }
        flags = {("next", "dones"): torch.bool, ("next", "truncations"): torch.bool}
        storage = LazyTensorStorage(
            n_env * buffer_size,
            device="cpu" if device is None else device,
            ndim=2,
            dtypes={**flags, **(dtypes or {})},
            share_next=list(widths) if share_next else False,
            next_capacity=next_capacity,
        )
        self.buffer = ReplayBuffer(
            storage=storage,
            sampler=EachEnvironment(),
            dim_extend=0,
            n_steps=n_steps,
            gamma=gamma,
            reward_keys=[("next", "rewards")],
            end_keys=[("next", "dones"), ("next", "truncations")],
        )
        self._steps = StepWriter(
            self.buffer, [Column(key, key, *kind) for key, kind in kinds.items()], autoreset, n_env
        )

    @property
    def ptr(self) -> int:
        """The number of steps that were ever written."""
        return self.buffer.write_count // self.n_env

    def __len__(self) -> int:
        """The number of rows: of stored steps times environments."""
        return len(self.buffer)

    def extend(self, tensor_dict: Any) -> None:
        """Write one step of all environments. No host sync.

        Args:
            tensor_dict: ``"observations"`` ``[E, n_obs]``, ``"actions"`` ``[E, n_act]`` and, if there are any,
                ``"critic_observations"`` ``[E, n_critic_obs]``; under ``"next"`` both observations, ``"rewards"``,
                ``"dones"`` and ``"truncations"`` ``[E]``. Other keys are left alone, and other dtypes converted.

        Raises:
            KeyError: a key is missing.
            ValueError: a tensor has another shape; or on the CPU: numbers that its key can't hold, or in
                ``playground_mode`` observations of the critic that don't begin with the observation. Nothing is
                written.
        """
        if self.playground_mode:
            for part in (tensor_dict, tensor_dict["next"]):
                own, begins = part["observations"], part["critic_observations"][..., : self.n_obs]
                if own.shape != begins.shape or (own.is_cpu and begins.is_cpu and not torch.equal(own, begins)):
                    raise ValueError("playground_mode: critic_observations must begin with observations")
        self._steps.write(tensor_dict)

    def sample(self, batch_size: int) -> TensorDict:
        """``E * batch_size`` transitions, ``batch_size`` of each environment in turn. No host sync.

        Args:
            batch_size: transitions of each environment.

        Returns:
            A TensorDict ``[E * batch_size]`` with the keys that were written. Under ``"next"`` are also
            ``"effective_n_steps"``, float32 (int64 with ``n_steps=1``); the flags are int64. The caller owns it.

        Raises:
            RuntimeError: nothing has been written.
            ValueError: ``batch_size`` is below 1.
        """
        n = self.n_env * batch_size
        data: TensorDict = self.buffer.sample(n)
        following: TensorDict = data["next"]
        steps = torch.ones_like(following["dones"]) if self.n_steps == 1 else data.pop(STEPS_KEY).squeeze(-1).float()
        following.set("effective_n_steps", steps)
        for part in (data, following) if self.playground_mode else ():
            part.set("observations", part["critic_observations"][..., : self.n_obs])
        return data

    def state_dict(self) -> dict[str, Any]:
        """Rows, counters and the random stream. FastTD3's buffer keeps none of them."""
        return self.buffer.state_dict()

    def load_state_dict(self, state: dict[str, Any], *, end_trajectories: bool = True) -> None:
        """Restore :meth:`state_dict`; see :meth:`gpubuf.ReplayBuffer.load_state_dict`."""
        self.buffer.load_state_dict(state, end_trajectories=end_trajectories)
        self._steps.begin_anew()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(n_env={self.n_env}, n_steps={self.n_steps}, buffer={self.buffer!r})"
