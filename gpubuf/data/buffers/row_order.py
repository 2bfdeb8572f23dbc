"""Whether the rows of a buffer with n-step transitions follow each other."""

from __future__ import annotations

import warnings

from gpubuf.data.runtime.recording import current_recording
from gpubuf.data.samplers.episode_ends import interleaved_environments
from gpubuf.data.storages.forms import NEXT_KEY
from gpubuf.data.storages.recipe import END_NAMES, Recipe
from gpubuf.data.storages.tensor_storage import TensorStorage

# The first rows tell. They are looked at whenever their number has doubled, up to so many.
_ROWS = 4096


class RowOrder:
    """Warns of environments that take turns in a 1-D storage: windows of rows would mix them.

    Args:
        recipe: of the buffer.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._look_at: int | None = 2

    def look(self, storage: TensorStorage) -> None:
        """Look at the rows after a write, where they are on the CPU.

        Raises:
            UserWarning: as a warning: environments take turns.
        """
        at = self._look_at
        if at is None or len(storage) < at or storage.device.type != "cpu" or current_recording() is not None:
            return
        if storage.ndim > 1 or self._recipe.traj_key is not None:
            self._look_at = None
            return
        self._look_at = 2 * len(storage) if len(storage) <= _ROWS else None
        apart = interleaved_environments(storage, self._recipe.end_keys or [(NEXT_KEY, name) for name in END_NAMES])
        if apart is None:
            return
        self._look_at = None
        if apart > 1:
            warnings.warn(
                f"the rows of {apart} environments take turns in this 1-D storage, so that n_steps="
                f"{self._recipe.n_steps} mixes them: use a storage with ndim=2 and batches of shape [envs, steps]",
                stacklevel=4,
            )
