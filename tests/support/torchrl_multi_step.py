"""Compares MultiStepTransform with TorchRL's, in an environment that has TorchRL.

Run as ``python -m tests.support.torchrl_multi_step``. It prints one line of JSON: for each key, in how many rows the
two differ, and where.
"""

from __future__ import annotations

import json
import warnings

import torch
from torchrl.envs.transforms import MultiStepTransform as TorchRLs

from gpubuf import LazyTensorStorage, MultiStepTransform, SamplerWithoutReplacement, TensorDictReplayBuffer
from tests.support.n_step_model import Model


def main() -> None:
    warnings.simplefilter("ignore")
    arguments = {"n_steps": 3, "gamma": 0.9}
    own, other = MultiStepTransform(**arguments, write_time=True), TorchRLs(**arguments)
    model = Model(1000, envs=2, seed=1)
    made, theirs = [], []
    for n in (7, 1, 12, 3):
        data = model.write(n)
        rows = own.inv(data.clone())
        if rows.numel():
            made.append(rows)
        rows = other.inv(data.clone())
        if rows is not None:
            theirs.append(rows)
    mine, due = torch.cat(made, 1), torch.cat(theirs, 1)
    found = {"rows": [mine.shape[1], due.shape[1]]}
    mine = mine[:, : due.shape[1]]
    later = mine["steps_to_next_obs"].squeeze(-1) > 1
    for key in mine.keys(True, True):
        # TorchRL's number of steps has no last dimension.
        differ = (mine[key].flatten(2) != due[key].reshape(*due.shape, -1)).any(-1)
        if mine[key].is_floating_point():
            differ = ((mine[key] - due[key]).abs() > 1e-5).flatten(2).any(-1)
        name = ".".join(key) if isinstance(key, tuple) else key
        found[name] = [int(differ.sum()), int((differ & ~later).sum())]
    found["more keys"] = sorted(map(str, set(due.keys(True, True)) - set(mine.keys(True, True))))

    # TorchRL's object, given to a buffer of ours.
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(12),
        sampler=SamplerWithoutReplacement(),
        transform=TorchRLs(**arguments, reward_keys=["reward"], done_keys=["terminated", "truncated"]),
    )
    single = Model(12)
    buffer.extend(single.write(20))
    single.check(buffer.sample(12), 3, 0.9)
    found["given to a buffer"] = [buffer._recipe.n_steps, buffer._recipe.gamma, len(buffer.transform)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
