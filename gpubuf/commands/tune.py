"""``gpubuf tune``: finds the fastest configurations of the kernels on this GPU, and writes them to a file."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from gpubuf.commands import whole_number
from gpubuf.train.config import UsageError

SECONDS = 60.0


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

    from gpubuf import terminal
    from gpubuf.data.storage.host_memory import device_memory
    from gpubuf.tuning import report, timing, workloads
    from gpubuf.tuning.operations import jobs
    from gpubuf.tuning.report import notes, progress, table
    from gpubuf.tuning.search import tune

    shapes = _shapes(options)
    device = torch.device(options["device"])
    if device.type != "cuda":
        raise UsageError(f"only GPUs are tuned, not {device}")
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    if device.index >= torch.cuda.device_count():
        raise UsageError(f"there is no {device}: there are {torch.cuda.device_count()} GPUs")
    todo, timer = jobs(shapes), timing.GraphTimer(device)
    # Rows to read, rows to write, and the tree of the capacity.
    bench = workloads.Bench(shapes, device, memory=min(2**33, device_memory(device)[0] // 8))
    results = []
    try:
        with torch.cuda.device(device), progress(len(todo)) as show:
            device_name, made = torch.cuda.get_device_name(device), report.heading(shapes, timer, device)
            # A folder that can't be written to shows now, not after hours of work.
            path = report.save(folder, device_name, [], made)
            for result in tune(todo, bench, timer, budget=options["seconds"] or math.inf):
                report.save(folder, device_name, [result], made)
                show(result)
                results.append(result)
    except (timing.DeviceError, timing.UnusableError) as error:
        print(f"gpubuf tune: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        raise UsageError(f"the tuned file can't be written ({error}); name another folder with --out FOLDER") from error
    terminal.show(table(results))
    for note in notes(results):
        print(note)
    print(
        f"A copy on this GPU moves {made['copy_bytes_per_second'] / 1e9:,.0f} GB/s, read and written; "
        f"an empty kernel in a graph takes {1e6 * made['launch_seconds']:.2f} µs."
    )
    print(f"Written: {path}. {report.caveat(path) or 'gpubuf goes by it from now on'}.")
    return 0


def _shapes(options: dict[str, Any]) -> Any:
    from gpubuf.planning import parse_entry
    from gpubuf.tuning.operations import Shapes

    given = {name: tuple(options[name]) for name in ("capacities", "batch_sizes") if options[name]}
    try:
        if options["spec"]:
            given["row"] = tuple(parse_entry(text) for text in options["spec"])
        return Shapes(**given)
    except ValueError as error:
        raise UsageError(str(error)) from error


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "tune",
        help="find the fastest configurations of the kernels on this GPU",
        description="Time configurations of the kernels that copy rows, draw by priority and update priorities on this "
        "GPU, for the sizes that you have, and write the fastest into a file that gpubuf uses from then on. Points for "
        "other sizes stay in the file.",
        epilog="Exit codes: 0 done, 1 the GPU failed, 2 the request can't be met, such as without a GPU.",
        allow_abbrev=False,
    )
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument(
        "--capacity",
        dest="capacities",
        type=whole_number,
        action="append",
        metavar="N",
        help="transitions of a buffer; once for each (default: 1,000,000)",
    )
    sizes.add_argument(
        "--batch-size",
        dest="batch_sizes",
        type=whole_number,
        action="append",
        metavar="N",
        help="transitions of a batch; once for each (default: 256, 4096 and 32768)",
    )
    sizes.add_argument(
        "--spec",
        action="append",
        metavar="KEY=SHAPE:DTYPE",
        help="a key of a row, such as pixels=3x84x84:uint8; once for each key (default: those of a MuJoCo task)",
    )
    text = f"time for all; 0 for no limit (default: {SECONDS:.0f})"
    parser.add_argument("--seconds", type=_seconds, default=SECONDS, metavar="N", help=text)
    parser.add_argument("--device", default="cuda", metavar="NAME", help="cuda or cuda:N (default: the current GPU)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to (default: the user's cache folder)")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of seconds, got {text!r}")
    return seconds
