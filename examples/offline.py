"""Learning from recorded data larger than memory.

Writes recordings to disk once, then clones their behaviour from batches that come straight from the files:

    python examples/offline.py --folder recordings
    python examples/offline.py --folder recordings --placement split:2GiB

The operating system keeps in memory what is in use, so the files may be larger than that. A second call finds them
and records nothing. With ``--placement`` the rows go into memory instead: "cuda", "pinned", "split" (as many as fit on
the GPU, the others in host memory, which the GPU reads by itself), or "auto".
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.progress import track
from tensordict import TensorDict
from torch import Tensor, nn

from gpubuf import LazyMemmapStorage, LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", help="where the recordings are, or go (default: a temporary folder)")
    parser.add_argument("--rows", type=int, default=200_000, help="transitions to record (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1_000, help="updates (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument("--placement", help="copy the rows into memory: cuda, pinned, split, split:2GiB or auto")
    return parser.parse_args()


def expert(pixels: Tensor) -> Tensor:
    """The action to be learned: where the image is brighter."""
    left, right = pixels.float().chunk(2, -1)
    return ((right.mean((-3, -2, -1)) - left.mean((-3, -2, -1))) / 64).unsqueeze(-1)


def recorded(folder: Path, rows: int, chunk: int = 1_000) -> LazyMemmapStorage:
    """The recordings: opened if they are there, else written a chunk at a time."""
    if (folder / "rows").exists():
        return LazyMemmapStorage.open(folder / "rows")
    storage = LazyMemmapStorage(rows, scratch_dir=folder / "rows")
    buffer = TensorDictReplayBuffer(storage=storage)
    for start in track(range(0, rows, chunk), description="recording"):
        n = min(chunk, rows - start)
        shade = torch.randint(0, 128, (n, 1, 1, 2)).repeat_interleave(16, -1)
        pixels = (torch.randint(0, 128, (n, 1, 32, 32)) + shade).to(torch.uint8)
        buffer.extend(TensorDict({"pixels": pixels, "action": expert(pixels)}, [n]))
    storage.flush()
    return storage


def in_memory(files: LazyMemmapStorage, placement: str, chunk: int = 1_000) -> LazyTensorStorage:
    """The same rows in memory, copied a chunk at a time."""
    rows = len(files)
    storage = LazyTensorStorage(rows, device=placement)
    source, copy = TensorDictReplayBuffer(storage=files), TensorDictReplayBuffer(storage=storage)
    for start in track(range(0, rows, chunk), description="loading"):
        copy.extend(source[start : min(start + chunk, rows)])
    print(f"placement: {storage.placement}")
    return storage


def main(args: argparse.Namespace, folder: Path) -> list[float]:
    """Trains, and returns the loss of every update."""
    storage = recorded(folder, args.rows)
    if args.placement:
        storage = in_memory(storage, args.placement)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    buffer = TensorDictReplayBuffer(
        storage=storage,
        sampler=SamplerWithoutReplacement(),  # every row once an epoch
        batch_size=args.batch_size,
        prefetch=1,  # the next batch is read from the disk while the model learns
        pin_memory=device == "cuda" and not args.placement,
        transform=lambda batch: batch.to(device, non_blocking=True),
    )
    policy = nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 1)
    ).to(device)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    losses: list[float] = []
    for _ in track(range(args.steps), description="learning"):
        batch = buffer.sample()
        loss = (policy(batch["pixels"].float() / 255) - batch["action"]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


if __name__ == "__main__":
    args = parse()
    with TemporaryDirectory() as temporary:
        losses = main(args, Path(args.folder or temporary))
    print(f"loss: {losses[0]:.4f} at first, {losses[-1]:.4f} at last")
