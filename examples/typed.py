"""Types, checked by mypy and pyright.

What calls take and return, as an editor shows it, in one update of soft actor-critic with prioritized replay:

    python examples/typed.py
"""

from typing import assert_type

import torch
from tensordict import TensorDict

from gpubuf import (
    LazyTensorStorage,
    ReplayBuffer,
    SACLoss,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from gpubuf.modules import make_sac_actor, make_sac_critic
from gpubuf.optim import AdamW


def transitions(n: int) -> TensorDict:
    """``n`` random transitions of a task with three observed numbers and one action."""
    following = TensorDict(
        {
            "observation": torch.randn(n, 3),
            "reward": torch.randn(n, 1),
            "done": torch.zeros(n, 1, dtype=torch.bool),
            "terminated": torch.zeros(n, 1, dtype=torch.bool),
        },
        batch_size=[n],
    )
    entries = {"observation": torch.randn(n, 3), "action": torch.rand(n, 1) * 2 - 1, "next": following}
    return TensorDict(entries, batch_size=[n])


def main() -> None:
    buffer = TensorDictPrioritizedReplayBuffer(
        storage=LazyTensorStorage(1_000, device="cpu"), alpha=0.6, beta=0.4, batch_size=32
    )
    index = buffer.extend(transitions(100))
    assert_type(index, torch.Tensor)
    buffer.sampler.beta = 0.5

    batch = buffer.sample()
    assert_type(batch, TensorDict)
    _, info = buffer.sample(return_info=True)
    print("weights of", info["index"].numel(), "rows")

    loss = SACLoss(make_sac_actor(3, 1), make_sac_critic(3, 1))
    optimizer = AdamW(loss.parameters(), 1e-3, targets=loss, tau=0.005)
    losses = loss(batch)
    assert_type(losses, TensorDict)
    (losses["loss_qvalue"] + losses["loss_actor"] + losses["loss_alpha"]).backward()
    optimizer.step()
    buffer.update_tensordict_priority(batch)

    small = TensorDictReplayBuffer(100)
    small.extend({"observation": torch.zeros(5, 3)})
    assert_type(small.sample(2), TensorDict)
    plain = ReplayBuffer(100, batch_size=2)
    plain.extend(torch.arange(5))
    print(len(plain), "rows,", f"loss {losses['loss_qvalue'].item():.3f}")


if __name__ == "__main__":
    main()
