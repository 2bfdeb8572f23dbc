"""Samplers that draw rows in the order of other programs' buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpubuf.data.samplers.base import Sampler
from gpubuf.kernels.rows import SIZE, WRITTEN


class EachEnvironment(Sampler):
    """As many rows of each environment, drawn uniformly with replacement among its steps.

    Row ``e * b + i`` of a batch of ``envs * b`` is the i-th draw of environment e: the order of FastTD3's ring.
    """

    def __init__(self) -> None:
        super().__init__()
        self._environments: dict[tuple[int, torch.device], Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_environments": {}}

    def choose(self, n: int) -> tuple[Tensor, dict[Any, Tensor]]:
        """Flat positions, int64 ``[n]``. No host sync.

        Raises:
            ValueError: ``n`` is no multiple of the number of environments.
        """
        storage = self.storage
        envs = storage.rows.envs
        if n % envs:
            raise ValueError(f"{n} rows can't be drawn of {envs} environments, the same number of each")
        environment = self._environments.get((n, storage.device))
        if environment is None:
            self._environments.clear()
            environment = torch.arange(envs, device=storage.device).repeat_interleave(n // envs)
            self._environments[n, storage.device] = environment
        uniform = self.random_state(storage.device).uniform(n)
        # The device's count: in a CUDA graph the host's would stay that of the capture.
        steps = storage.ring.counters[SIZE] // envs
        step = torch.minimum((uniform * steps).to(torch.int64), steps - 1)
        return step.mul_(envs).add_(environment), {}


class WholeWindows(Sampler):
    """Rows drawn uniformly among those that ``n_steps - 1`` steps follow.

    Programs that discount every window by ``gamma ** n_steps`` need it: windows that end at the newest row are
    shorter. Windows that end with a trajectory are drawn, as in FlashSAC's buffer.

    Args:
        n_steps: of the buffer.
    """

    def __init__(self, n_steps: int) -> None:
        super().__init__()
        self.n_steps = n_steps

    def choose(self, n: int) -> tuple[Tensor, dict[Any, Tensor]]:
        """Flat positions, int64 ``[n]``. As long as no row is followed by so many steps, the oldest step is drawn."""
        storage = self.storage
        envs = storage.rows.envs
        uniform = self.random_state(storage.device).uniform(n)
        written, size = storage.ring.counters[WRITTEN], storage.ring.counters[SIZE]
        among = (size - (self.n_steps - 1) * envs).clamp(min=envs)
        age = torch.minimum((uniform * among).to(torch.int64), among - 1)
        return age.add_(written - size).remainder_(storage.max_size), {}
