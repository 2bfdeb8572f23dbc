"""The ``gpubuf`` command.

Exit codes: 0 done; 1 training, the GPU or the disk failed, or a planned buffer fits nowhere; 2 what was asked for can't
be done (the message says why); 130 and 143 interrupted by Ctrl-C or SIGTERM, with everything saved.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence

import gpubuf
from gpubuf.commands import bench, info, plan, train, tune
from gpubuf.train.config import UsageError

#: What imports PyTorch or takes time is imported by a command's ``run``: help and mistyped options answer at once.
COMMANDS = {"train": train, "plan": plan, "tune": tune, "info": info, "bench": bench}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line ``arguments`` (by default those of the process) and return the exit code."""
    parser = argparse.ArgumentParser(prog="gpubuf", description=gpubuf.__doc__)
    parser.add_argument("--version", action="version", version=f"gpubuf {gpubuf.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMANDS.values():
        module.add(commands)
    options = vars(parser.parse_args(arguments))
    command = options.pop("command")
    try:
        code: int = COMMANDS[command].run(options)
        # A disk that is full, or a reader that has gone, is to show here.
        sys.stdout.flush()
        return code
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):
            # What could not be printed is not to be tried again when the process ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"gpubuf {command}: {error}", file=sys.stderr)
        return 1
    except UsageError as error:
        print(f"gpubuf {command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"gpubuf {command}: stopped at once; what was saved before is still there", file=sys.stderr)
        return train.SIGNAL_EXIT + signal.SIGINT
