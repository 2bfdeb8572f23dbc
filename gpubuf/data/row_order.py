"""Whether the rows of a buffer whose batches are made of several steps follow each other."""

from __future__ import annotations

import warnings

from gpubuf.data.recording import current_recording
from gpubuf.data.samplers.episode_ends import continues_across, interleaved_environments
from gpubuf.data.storage.recipe import END_NAMES, Recipe
from gpubuf.data.storage.schema import NEXT_KEY
from gpubuf.data.storage.tensor_storage import TensorStorage

# The first rows tell. They are looked at whenever their number has doubled, up to so many.
_ROWS = 4096


class RowOrder:
    """Warns of rows that continue where windows of rows don't: of environments that take turns in a storage of one, and
    of batches in the other order of time and environments.

    Args:
        recipe: of the buffer.
        dim_extend: the dimension of a written batch along which time runs.
        refused: whether the sampler refuses environments that take turns, when it draws.
    """

    def __init__(self, recipe: Recipe, dim_extend: int, refused: bool) -> None:
        self._recipe, self._dim_extend, self._refused = recipe, dim_extend, refused
        self._look_at: int | None = 2

    def look(self, storage: TensorStorage) -> None:
        """Look at the rows after a write, where they are on the CPU.

        Raises:
            UserWarning: as a warning: they continue elsewhere.
        """
        at = self._look_at
        if at is None or len(storage) < at or storage.device.type != "cpu" or current_recording() is not None:
            return
        if storage.ndim > 2 or self._recipe.traj_key is not None or (storage.ndim == 1 and self._refused):
            self._look_at = None
            return
        self._look_at = 2 * len(storage) if len(storage) <= _ROWS else None
        ends = self._recipe.end_keys or [(NEXT_KEY, name) for name in END_NAMES]
        apart = interleaved_environments(storage, ends)
        across = None
        if storage.ndim == 2:
            across = continues_across(storage, ends) if apart is None else apart > 1
        elif apart is not None:
            across = apart > 1
        if across is None:
            return
        self._look_at = None
        if across and storage.ndim == 2:
            time = self._dim_extend
            warnings.warn(
                f"rows continue along dimension {1 - time}, not {time}: transpose, or pass dim_extend={1 - time}; "
                f"time is read along dimension {time} of a batch, so that windows of several steps mix environments",
                stacklevel=4,
            )
        elif across:
            steps = self._recipe.n_steps
            what = f"n_steps={steps} mixes" if steps > 1 else "windows of several steps mix"
            warnings.warn(
                f"the rows of {apart} environments take turns in this 1-D storage, so that {what} them: use a storage "
                "with ndim=2 and batches of shape [envs, steps]",
                stacklevel=4,
            )
