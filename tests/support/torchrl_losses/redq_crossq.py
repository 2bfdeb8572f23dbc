"""Writes redq_crossq.json: what TorchRL's REDQLoss and CrossQLoss say of the networks and batch in fixed_noise.py.

Run it where TorchRL 0.14.1 is installed, from the root of the repository:
``python -m tests.support.torchrl_losses.redq_crossq``.
"""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import torch

from tests.support.torchrl_losses.fixed_noise import make_actor, make_batch, make_critics, outcome

FILE = Path(__file__).with_suffix(".json")
SUBSET = [3, 1, 0, 2, 4]
"""The permutation of five critics that stands for the random one."""

COMMON = {"alpha_init": 0.2, "target_entropy": -1.5, "loss_function": "l2"}
REDQ = {
    "all": {"num_qvalue_nets": 3, "sub_sample_len": 3},
    "subset": {"num_qvalue_nets": 5, "sub_sample_len": 2},
}


def main() -> None:
    import torchrl
    from torchrl.objectives import CrossQLoss, REDQLoss

    found = {"torchrl": torchrl.__version__}
    for name, options in REDQ.items():
        loss = REDQLoss(make_actor(), make_critics(options["num_qvalue_nets"]), **options, **COMMON)
        loss.make_value_estimator(gamma=0.9)
        for key in loss.target_qvalue_network_params.keys(True, True):
            loss.target_qvalue_network_params.get(key).data.mul_(0.8)
        with mock.patch.object(torch, "randperm", lambda n, **_: torch.tensor([k for k in SUBSET if k < n])):
            found[f"redq {name}"] = outcome(loss, make_batch())
    for name, normalised in {"plain": False, "batch norm": True}.items():
        loss = CrossQLoss(make_actor(), make_critics(2, normalised), **COMMON)
        loss.make_value_estimator(gamma=0.9)
        found[f"crossq {name}"] = outcome(loss, make_batch())
    FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
