"""Process groups of Gloo in processes of their own, and what their collectives cost."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode


def _run(rank: int, size: int, target: Callable[..., Any], folder: str, timeout: float, arguments: Any) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    torch.save(target(rank, size, *arguments), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def run_ranks(target: Callable[..., Any], size: int, *arguments: Any, timeout: float = 60) -> list[Any]:
    """What ``target(rank, size, *arguments)`` returns on each rank: tensors, numbers, and lists and dicts of them.

    None for a rank that has left.

    Args:
        target: a function of a module. It is imported once, in a process from which the ranks are forked.
        size: ranks.
        arguments: more arguments of it.
        timeout: of the group, in seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.get_context("forkserver").set_forkserver_preload([target.__module__])
        mp.start_processes(_run, (size, target, folder, timeout, arguments), nprocs=size, start_method="forkserver")
        files = [Path(folder, f"{rank}.pt") for rank in range(size)]
        return [torch.load(file) if file.exists() else None for file in files]


def leave() -> None:
    """End this process as a lost rank ends: at once, and without a word to the others."""
    os._exit(0)


class CountedCollectives(TorchDispatchMode):
    """Counts the collectives that run inside, on any group, and the bytes that this rank gives to each.

    Attributes:
        calls: names of the operations, and bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.name().partition("::")[2]
            # Gathers have the results before what is given.
            given = args[1] if "allgather" in name else args[0]
            tensors = [given] if isinstance(given, torch.Tensor) else given
            self.calls.append((name, sum(tensor.nbytes for tensor in tensors)))
        return func(*args, **(kwargs or {}))
