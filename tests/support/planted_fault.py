"""A kernel that writes beyond its tensor, and the proof that compute-sanitizer sees it.

``python -m tests.support.planted_fault compute-sanitizer ...`` runs this module under that command. It succeeds where
the command fails and names the write: a sanitizer that can't look, as in some sandboxes, finds nothing in good kernels
either.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

#: What memcheck says of a store beyond an allocation.
SAID = "Invalid __global__ write"

BLOCK = 128


@triton.jit  # type: ignore[untyped-decorator]
def planted_kernel(out, block: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(out + tl.program_id(0) * block + tl.arange(0, block), 1.0)


def write_beyond() -> None:
    """Launch one program more than the tensor has room for. No other tensor is there that could lie behind it."""
    planted_kernel[(2,)](torch.empty(BLOCK, device="cuda"), BLOCK)
    torch.cuda.synchronize()


def main(sanitizer: Sequence[str]) -> int:
    command = [*sanitizer, sys.executable, "-m", "tests.support.planted_fault"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    caught = done.returncode != 0 and SAID in done.stdout + done.stderr
    print((done.stdout + done.stderr)[-4000:])
    print(f"{sanitizer[0]} {'sees' if caught else 'DOES NOT SEE'} the planted fault; exit code {done.returncode}")
    return int(not caught)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(main(sys.argv[1:]))
    write_beyond()
