"""Make the folders in ``torchrl/`` anew, with the real TorchRL: ``python make_torchrl.py torchrl`` (0.14.1)."""

import sys
from pathlib import Path

import torch
import torchrl.data
from torchrl.data.replay_buffers.samplers import prioritized
from torchrl_rows import configurations


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
for name, buffer in configurations(torchrl.data).items():
    if name != "two_dimensions":
        buffer._storage._storage[len(buffer) :].zero_()  # memory that TorchRL leaves uninitialised
    buffer.dumps(folder / name)
    (folder / name / "prefetch.pkl").unlink()  # nothing here reads or keeps pickles
