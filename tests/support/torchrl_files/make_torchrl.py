"""Make the folders in ``torchrl/`` anew, with the real TorchRL: ``python make_torchrl.py torchrl`` (0.14.1)."""

import sys
from pathlib import Path

import torch
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, PrioritizedSampler, ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import prioritized
from torchrl_rows import filled, transitions


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
