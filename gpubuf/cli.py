"""The ``gpubuf`` command.

Exit codes: 0 done; 1 training, the GPU or the disk failed, or a planned buffer fits nowhere; 2 the request can't
be met (the message says why); 130 and 143 interrupted by Ctrl-C or SIGTERM, with everything saved.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence

import gpubuf
from gpubuf.commands import compare, info, inspect, plan, train, tune, watch
from gpubuf.train.config import UsageError

#: A command's ``run`` imports PyTorch and other slow modules: help and mistyped options answer at once.
COMMANDS = {
    "train": train,
    "watch": watch,
    "compare": compare,
    "inspect": inspect,
    "plan": plan,
    "tune": tune,
    "info": info,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line ``arguments`` (by default those of the process) and return the exit code."""
    about = "Replay buffers that stay on the GPU, and training with them."
    parser = argparse.ArgumentParser(prog="gpubuf", description=about)
    parser.add_argument("--version", action="version", version=f"gpubuf {gpubuf.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMANDS.values():
        module.add(commands)
    options = vars(parser.parse_args(arguments))
    command = options.pop("command")
    try:
        code: int = COMMANDS[command].run(options)
        # A full disk, or a reader that has gone, must show here.
        sys.stdout.flush()
        return code
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):
            # Python must not try to print the rest again when the process ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"gpubuf {command}: {error}", file=sys.stderr)
        return 1
    except UsageError as error:
        print(f"gpubuf {command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"gpubuf {command}: stopped at once; everything saved before is still there", file=sys.stderr)
        return train.SIGNAL_EXIT + signal.SIGINT
