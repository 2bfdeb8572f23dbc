"""Make the folders in ``torchrl/`` anew, with the real TorchRL: ``python make_torchrl.py torchrl`` (0.14.1)."""

import sys
from pathlib import Path

import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, PrioritizedSampler, ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import prioritized


class Tree(dict):
    """TorchRL's trees are C++ that its wheels lack for some versions of PyTorch; dumps() only reads the leaves."""

    def __init__(self, capacity: int, empty: float):
        super().__init__(dict.fromkeys(range(capacity), empty))

    def __setitem__(self, index, value):
        index = torch.as_tensor(index).reshape(-1)
        self.update(zip(index.tolist(), torch.as_tensor(value).expand(index.numel()).tolist(), strict=True))


for dtype in ("Fp32", "Fp64"):
    setattr(prioritized, f"SumSegmentTree{dtype}", lambda n: Tree(n, 0.0))
    setattr(prioritized, f"MinSegmentTree{dtype}", lambda n: Tree(n, torch.finfo(torch.float32).max))


def transitions(n: int, first: int = 0) -> TensorDict:
    step = torch.arange(first, first + n)
    return TensorDict(
        {
            "observation": step[:, None] + torch.tensor([0.0, 0.25, 0.5]),
            "action": step[:, None].double() / 4,
            "pixels": step[:, None, None].expand(n, 2, 2).to(torch.uint8),
            "collector": {"traj_ids": step // 4},
            "next": {
                "observation": step[:, None] + torch.tensor([1.0, 1.25, 1.5]),
                "reward": -step[:, None].bfloat16(),
                "done": ((step + 1) % 4 == 0)[:, None],
            },
        },
        [n],
    )


def filled(buffer: ReplayBuffer, *sizes: int) -> ReplayBuffer:
    first = 0
    for n in sizes:
        buffer.extend(transitions(n, first))
        first += n
    return buffer


folder = Path(sys.argv[1])
folder.mkdir(exist_ok=True)
made = {
    "wrapped": filled(TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=4), 6, 5),
    "full": filled(TensorDictReplayBuffer(storage=LazyMemmapStorage(8)), 8),
    "partial": filled(TensorDictReplayBuffer(storage=LazyTensorStorage(16)), 6),
    "tensor": ReplayBuffer(storage=LazyTensorStorage(5)),
    "two_dimensions": TensorDictReplayBuffer(storage=LazyTensorStorage(12, ndim=2)),
    "prioritized": filled(
        TensorDictReplayBuffer(storage=LazyTensorStorage(8), sampler=PrioritizedSampler(8, 0.5, 0.25, eps=0.0)), 6
    ),
}
made["tensor"].extend(torch.arange(3) * 1.5)
made["two_dimensions"].extend(transitions(8).reshape(2, 4))
made["two_dimensions"].extend(transitions(6, 100).reshape(2, 3))
made["prioritized"].update_priority(torch.arange(1, 5), torch.tensor([4.0, 9.0, 0.25, 0.0]))
for name, buffer in made.items():
    if name != "two_dimensions":
        buffer._storage._storage[len(buffer) :].zero_()  # memory that TorchRL leaves uninitialised
    buffer.dumps(folder / name)
    (folder / name / "prefetch.pkl").unlink()  # nothing here reads or keeps pickles
