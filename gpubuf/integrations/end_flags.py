"""``dones`` of the buffers of Stable-Baselines3, which programs set."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_DONE, _TERMINATED = ("next", "done"), ("next", "terminated")


class EndFlags:
    """``dones`` of a buffer. Stable-Baselines3 sets those of the newest step when training begins again.

    ``dones[step] = True`` ends the trajectories there: n-step returns end, and without ``handle_timeout_termination``
    the rows count as terminated. Reading, as in ``np.asarray(dones)``, copies.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        owner = self._owner
        flags = np.zeros((owner.buffer_size, owner.n_envs), np.float32)
        if owner.buffer.initialized:
            stored = owner.buffer.storage[:][_TERMINATED].squeeze(-1).cpu().numpy()
            flags[: len(stored)] = stored
        return flags if dtype is None else flags.astype(dtype)

    def __getitem__(self, index: Any) -> Any:
        return np.asarray(self)[index]

    def __setitem__(self, index: Any, ended: Any) -> None:
        owner = self._owner
        storage, envs = owner.buffer.storage, owner.n_envs
        steps = np.atleast_1d(np.arange(owner.buffer_size)[index])
        flat = torch.from_numpy((steps[:, None] * envs + np.arange(envs)).reshape(-1)).to(storage.device)
        with owner.buffer._lock:
            rows = storage.written_layout.assemble(storage.as_written(flat), (flat.numel(),), storage.device)
            flags = torch.full_like(rows[_TERMINATED], float(ended))
            if not owner.handle_timeout_termination:
                rows[_TERMINATED] = flags
            if owner._keeps_ends:
                rows[_DONE] = flags.bool()
            storage.write(flat, rows)
