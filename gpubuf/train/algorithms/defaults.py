"""The defaults of the settings that depend on the algorithm. Nothing here imports PyTorch."""

from __future__ import annotations

from typing import Any

_SAC: dict[str, Any] = {
    "batch_size": 256,
    "learning_rate": 1e-3,
    "gamma": 0.99,
    "n_steps": 1,
    "tau": 0.005,
    "hidden": (256, 256),
    "critics": 2,
    "policy_every": 1,
    "atoms": None,
    "v_min": None,
    "v_max": None,
    "scale_rewards": False,
    "normalize_observations": False,
    "noise_hold": 1,
}

#: By the name that ``--algo`` takes. A setting that is None has no meaning for the algorithm, and can't be given.
ALGORITHM_DEFAULTS: dict[str, dict[str, Any]] = {
    "sac": _SAC,
    "fastsac": {
        **_SAC,
        **{"learning_rate": 3e-4, "tau": 0.05, "hidden": (256, 128, 64), "policy_every": 2},
        **{"atoms": 101, "v_min": -10.0, "v_max": 10.0, "scale_rewards": True, "normalize_observations": True},
    },
    # FlashSAC's program has tau 0.01 and makes a million updates; docs/training.md says why a short run needs more.
    "flashsac": {
        **_SAC,
        **{"tau": 0.05, "hidden": (128,), "policy_every": 2},
        **{"atoms": 101, "v_min": -5.0, "v_max": 5.0, "scale_rewards": True, "noise_hold": 16},
    },
    "redq": {**_SAC, "learning_rate": 3e-4, "critics": 10, "policy_every": 5},
    "crossq": {**_SAC, "tau": None, "policy_every": 3},
}

#: Updates for each update of ``sac``, where ``--update-ratio`` is not given.
UPDATES: dict[str, int] = {"redq": 5}
