"""Find the fastest configurations of the kernels on this GPU.

Times configurations of the kernels that copy rows, draw by priority and update priorities, for the sizes that you have,
and writes the fastest into a file that gpubuf uses from then on. Points for other sizes stay in the file. Exit codes: 0
done, 1 the GPU failed, 2 the request can't be met, such as without a GPU.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from gpubuf.commands import whole_number
from gpubuf.train.config import UsageError

#: The keys of a row of a task from MuJoCo, the default.
ROW_OF_MUJOCO = (
    *("observation=17:float32", "action=6:float32", "next.observation=17:float32"),
    *("next.reward=1:float32", "next.done=1:bool", "next.terminated=1:bool"),
)


def run(options: dict[str, Any]) -> int:
    import torch

    from gpubuf.info import why_no_gpu
    from gpubuf.kernels._tuned import user_folder

    missing = why_no_gpu()
    if missing:
        raise UsageError(f"tuning needs a GPU: {missing}")
    folder = options["out"] or user_folder()
    if folder is None:
        raise UsageError("there is no home folder for the tuned file: name a folder with --out FOLDER")

    from gpubuf.data.storage.host_memory import device_memory
    from gpubuf.planning import parse_entry
    from gpubuf.tuning.search import save, tune
    from gpubuf.tuning.workloads import jobs, workloads

    try:
        row = [parse_entry(text) for text in options["spec"] or ROW_OF_MUJOCO]
    except ValueError as error:
        raise UsageError(str(error)) from error
    if len({key for key, _, _ in row}) < len(row):
        raise UsageError("a key of --spec is given twice")
    if not any(math.prod(shape) for _, _, shape in row):
        raise UsageError("rows of no bytes need no tuning")
    device = torch.device(options["device"])
    if device.type != "cuda":
        raise UsageError(f"only GPUs are tuned, not {device}")
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    if device.index >= torch.cuda.device_count():
        raise UsageError(f"there is no {device}: there are {torch.cuda.device_count()} GPUs")
    name, given = torch.cuda.get_device_name(device), {key: options[key] for key in ("capacity", "batch_size", "spec")}
    todo = jobs(options["capacity"] or [1_000_000], options["batch_size"] or [256, 4096, 32768], row)
    # Rows to read, rows to write, and the tree of the capacity.
    memory = min(2**33, device_memory(device)[0] // 8)
    try:
        # A folder that can't be written to shows now, not after minutes of work.
        path = save(folder, name, [], given)
        for job in todo:
            with torch.cuda.device(device):
                result = tune(job, workloads(job, row, device, memory))
            save(folder, name, [result], given)
            print(f"{job}: {result.chosen}")
            for call, seconds in result.seconds[result.chosen].items():
                by_rule = result.seconds[result.by_rule][call]
                print(f"  {call}: {1e6 * seconds:.2f} µs, by rule {1e6 * by_rule:.2f} µs", flush=True)
            for made, reason in result.rejected.items():
                print(f"  not {made}: {reason}")
    except OSError as error:
        raise UsageError(f"the tuned file can't be written ({error}); name another folder with --out FOLDER") from error
    except RuntimeError as error:
        print(f"gpubuf tune: {error}", file=sys.stderr)
        return 1
    read = user_folder()
    print(f"Written: {path}", "" if folder == read else f"(gpubuf reads those in {read} only)")
    return 0


def add(parser: argparse.ArgumentParser) -> None:
    for name, text in {
        "--capacity": "transitions of a buffer; once for each (default: 1,000,000)",
        "--batch-size": "transitions of a batch; once for each (default: 256, 4096 and 32768)",
    }.items():
        parser.add_argument(name, type=_positive, action="append", metavar="N", help=text)
    entry = "a key of a row, such as pixels=3x84x84:uint8; once for each key (default: those of a MuJoCo task)"
    parser.add_argument("--spec", action="append", metavar="KEY=SHAPE:DTYPE", help=entry)
    parser.add_argument("--device", default="cuda", metavar="NAME", help="cuda or cuda:N (default: the current GPU)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to (default: the user's cache folder)")


def _positive(text: str) -> int:
    if (number := whole_number(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return number
