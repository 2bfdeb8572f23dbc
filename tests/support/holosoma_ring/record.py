"""Writes record.json: the batches of holosoma 0.0.3's ring at given positions.

Run it from the root of the repository: ``.peers/holosoma/bin/python -m tests.support.holosoma_ring.record``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from holosoma.agents.fast_sac.fast_sac_utils import SimpleReplayBuffer

from tests.support.holosoma_ring.steps import ACT, CRITIC, ENVS, GAMMA, OBS, STEPS, WRITTEN, positions, step_of

FILE = Path(__file__).with_suffix(".json")


def batch_at(ring: SimpleReplayBuffer, steps: torch.Tensor) -> dict[str, Any]:
    """The batch of ``steps`` of each environment."""
    drawn = steps.expand(ENVS, -1)
    with mock.patch.object(torch, "randint", return_value=drawn):
        batch = ring.sample(steps.numel())
    return {
        ".".join(key if isinstance(key, tuple) else (key,)): {
            "dtype": str(value.dtype).removeprefix("torch."),
            "values": value.tolist(),
        }
        for key, value in sorted(batch.items(True, True), key=str)
    }


def recorded() -> dict[str, Any]:
    """Batches by the number of steps of a transition, the number of steps written, and the flags."""
    found: dict[str, Any] = {}
    for n_steps in (1, 3):
        for written in WRITTEN:
            for alone in (False, True) if n_steps > 1 else (False,):
                ring = SimpleReplayBuffer(ENVS, STEPS, OBS, ACT, CRITIC, n_steps=n_steps, gamma=GAMMA)
                for step in range(written):
                    ring.extend(step_of(step, alone=alone))
                name = f"{n_steps} steps, {written} written" + (", truncations alone" if alone else "")
                found[name] = batch_at(ring, positions(written, n_steps))
    return found


if __name__ == "__main__":
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(batch)}" for name, batch in recorded().items())
    FILE.write_text("{" + lines + "}\n")
