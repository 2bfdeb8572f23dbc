"""A random stream whose state is a tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpubuf.kernels import philox
from gpubuf.kernels._registry import without_dispatch

_uniform = without_dispatch(philox.uniform)


class RandomState:
    """The state of a Philox4x32-10 stream, as a tensor that the kernels advance.

    The same seed gives the same variates on every device. A CUDA graph that was captured with this state draws
    new numbers at every replay, and sees :meth:`manual_seed` and :meth:`load_state_dict`, which work in place.

    Args:
        seed: any 64-bit seed. None draws one from ``generator``, so that ``torch.manual_seed`` makes a run
            repeatable.
        generator: a seed is drawn from it; None is torch's global CPU generator.
        device: the state lives there, and draws happen there.

    Attributes:
        state: int64 ``[3]`` = (seed, offset, scratch); see :mod:`gpubuf.kernels.philox`.

    Raises:
        ValueError: both a seed and a generator are given.
    """

    def __init__(
        self,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.state: Tensor
        if seed is not None:
            if generator is not None:
                raise ValueError("give a seed or a generator to draw one from, not both")
            self.state = philox.new_state(seed, device)
            return
        origin = "cpu" if generator is None else generator.device
        drawn = torch.empty((), dtype=torch.int64, device=origin).random_(generator=generator)
        # Copied as a tensor: the host need not know the seed, so that this never synchronises with a GPU. Nor does the
        # host wait for the copy: CUDA has read memory that is not pinned when the call returns.
        self.state = torch.zeros(3, dtype=torch.int64, device=device)
        self.state[philox.SEED].copy_(drawn, non_blocking=True)

    @property
    def device(self) -> torch.device:
        """The device of the state."""
        return self.state.device

    def uniform(self, n: int) -> Tensor:
        """``n`` uniforms in [0, 1), float64 ``[n]`` on :attr:`device`, of 53 random bits each. No host sync.

        Raises:
            ValueError: ``n`` is negative.
        """
        drawn: Tensor = _uniform(self.state, n)
        return drawn

    def manual_seed(self, seed: int) -> RandomState:
        """Start the stream of ``seed``, in place, and return self."""
        self.state.copy_(philox.new_state(seed, "cpu"))
        return self

    def to(self, device: torch.device | str) -> RandomState:
        """This stream on ``device``: self if it is there, else a copy that goes on from the same point."""
        # CUDA has read memory that is not pinned when the call returns.
        moved = self.state.to(device, non_blocking=self.state.is_cpu)
        if moved is self.state:
            return self
        copy = object.__new__(type(self))
        copy.state = moved
        return copy

    def state_dict(self) -> dict[str, Any]:
        """A copy of the state."""
        return {"state": self.state.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the point at which ``state`` was taken, in place.

        Raises:
            KeyError: ``state`` has no ``"state"``.
            TypeError: the state is not int64.
            ValueError: the state has another shape than ``[3]``.
        """
        philox.check_state(state["state"])
        self.state.copy_(state["state"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}(device={str(self.device)!r})"
