"""Which adapters are measured. To add one, write a function that returns its contenders, and a line here."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Contender:
    """A buffer full of rows.

    Attributes:
        calls: what is timed, by name. The same names in all contenders of a table, as far as they have them.
        n_bytes: of all memory that the buffer keeps.
    """

    calls: Mapping[str, Callable[[], object]]
    n_bytes: int


@dataclass(frozen=True)
class Adapter:
    """One table: a program's buffer, and ours in its place.

    Attributes:
        page: the part of the figures' name: ``<!-- figures: adapters_PAGE -->``.
        title: of the table.
        peer: the environment in ``.peers`` that has the program.
        contenders: ``"module:function"``. The function returns a dict of :class:`Contender` by name, that of the
            program first; it is called in the program's environment.
    """

    page: str
    title: str
    peer: str
    contenders: str

    def make(self) -> dict[str, Contender]:
        """The contenders. Raises ImportError where the program is missing."""
        module, _, name = self.contenders.partition(":")
        found: dict[str, Contender] = getattr(importlib.import_module(module), name)()
        return found


_SB3 = "benchmarks.studies.adapters.stable_baselines"
_RINGS = "benchmarks.studies.adapters.rings"

#: By name.
ADAPTERS: dict[str, Adapter] = {
    "sb3": Adapter("sb3", "one environment, 17 + 6 + 17 numbers, 1 M rows", "sb3", f"{_SB3}:one"),
    "sb3_envs": Adapter("sb3", "eight environments, 1 M rows", "sb3", f"{_SB3}:eight"),
    "sb3_n_step": Adapter("sb3", "n-step returns, n = 3, one environment", "sb3", f"{_SB3}:n_step"),
    "sb3_images": Adapter("sb3", "images of 4 x 84 x 84 bytes, 10 000 rows", "sb3", f"{_SB3}:images"),
    "sb3_dicts": Adapter("sb3", "dicts of two observations, 1 M rows", "sb3", f"{_SB3}:dicts"),
    "cleanrl": Adapter("cleanrl", "one environment, 17 + 6 + 17 numbers, 1 M rows", "sb3", f"{_SB3}:cleanrl"),
    "fasttd3_16": Adapter("fasttd3", "16 environments, n = 3, 65 536 rows", "holosoma", f"{_RINGS}:single"),
    "fasttd3_128": Adapter("fasttd3", "128 environments, n = 3, 65 536 rows", "holosoma", f"{_RINGS}:few"),
    "fasttd3_1024": Adapter("fasttd3", "1024 environments, n = 3, 65 536 rows", "holosoma", f"{_RINGS}:some"),
    "fasttd3_4096": Adapter("fasttd3", "4096 environments, n = 3, 65 536 rows", "holosoma", f"{_RINGS}:many"),
    # FlashSAC is not on PyPI: run the study with a checkout of it in PYTHONPATH.
    "flashsac": Adapter("flashsac", "1024 environments, n = 3, 262 144 rows", "flashsac", f"{_RINGS}:flashsac"),
    "lerobot": Adapter(
        "lerobot",
        "one camera of 3 x 64 x 64 pixels, 1000 transitions",
        "lerobot",
        "benchmarks.studies.adapters.lerobot:camera",
    ),
}
