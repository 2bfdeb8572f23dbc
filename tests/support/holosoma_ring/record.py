"""Writes record.json: the batches of holosoma 0.0.3's ring at given positions.

Run it from the root of the repository: ``.peers/holosoma/bin/python -m tests.support.holosoma_ring.record``.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from holosoma.agents.fast_sac.fast_sac_utils import SimpleReplayBuffer

from tests.support.holosoma_ring.steps import ACT, CRITIC, ENVS, GAMMA, OBS, STEPS, WRITTEN, positions, step_of
from tests.support.records import write


def batch_at(ring: SimpleReplayBuffer, steps: torch.Tensor) -> Any:
    """The batch of ``steps`` of each environment."""
    with mock.patch.object(torch, "randint", return_value=steps.expand(ENVS, -1)):
        return ring.sample(steps.numel())


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
    write(__file__, recorded())
