"""Writes record.json: the batches of FlashSAC's buffer at given positions.

FlashSAC is not on PyPI. Run this from the root of the repository with a checkout of it:
``PYTHONPATH=.:/path/to/FlashSAC python -m tests.support.flashsac_buffer.record``.
"""

from __future__ import annotations

from typing import Any

import torch
from flash_rl.buffers.torch_buffer import TorchUniformBuffer

from tests.support.flashsac_buffer.steps import ACT, ENVS, GAMMA, OBS, STEPS, WRITTEN, Box, slots, step_of
from tests.support.records import write


def recorded() -> dict[str, Any]:
    """Batches by the number of steps of a transition, the number of steps written, and the dtype in storage."""
    found: dict[str, Any] = {}
    for n_step in (1, 3):
        for written in WRITTEN:
            for dtype in (None, torch.bfloat16):
                arguments = Box(OBS), Box(ACT), n_step, GAMMA, ENVS * STEPS, 1, 4, "cpu", dtype
                buffer = TorchUniformBuffer(*arguments)
                for step in range(written):
                    buffer.add(step_of(step))
                name = f"{n_step} steps, {written} written" + ("" if dtype is None else ", bfloat16")
                found[name] = buffer.sample(slots(written, n_step).numpy())
    return found


if __name__ == "__main__":
    write(__file__, recorded())
