"""The ``gpubuf`` command.

Exit codes: 0 done; 1 training, the GPU or the disk failed, or a planned buffer fits nowhere; 2 the request can't
be met (the message says why); 130 and 143 interrupted by Ctrl-C or SIGTERM, with everything saved.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import re
import signal
import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn

import gpubuf
from gpubuf.commands import compare, info, inspect, load, plan, train, tune
from gpubuf.terminal import wrapped
from gpubuf.train.config import UsageError

#: A command's ``run`` imports PyTorch and other slow modules: help and mistyped options answer at once.
COMMANDS = {
    "train": train,
    "compare": compare,
    "inspect": inspect,
    "plan": plan,
    "load": load,
    "tune": tune,
    "info": info,
}


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line: the usage of a command can be longer than a screen."""

    def error(self, message: str) -> NoReturn:
        text = f"{self.prog}: error: {message} (see {self.prog} --help)"
        self.exit(2, f"{wrapped(text, sys.stderr)}\n")


def unrecognized(words: Sequence[str], known: Iterable[str]) -> str:
    """What to say of the first word that a command doesn't know."""
    name = words[0].partition("=")[0]
    text = f"unrecognized arguments: {' '.join(words)}"
    if not name.startswith("-"):
        return f"{text}; an option takes one value, and a list is written with commas, as in --hidden 256,256"
    # --lr stands for --learning-rate, --steps for --total-steps.
    short = [option for option in known if "".join(word[:1] for word in option[2:].split("-")) == name.lstrip("-")]
    part = [option for option in known if option.startswith(name) or option.endswith(name[1:])]
    near = short or part or difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"{text}; did you mean {' or '.join(near)}?" if near else text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line ``arguments`` (by default those of the process) and return the exit code."""
    about = "Replay buffers that stay on the GPU, and training with them."
    parser = Parser(prog="gpubuf", description=about)
    parser.add_argument("--version", action="version", version=f"gpubuf {gpubuf.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        text = " ".join((module.__doc__ or "").split())
        module.add(commands.add_parser(name, help=text.partition(".")[0], description=text, allow_abbrev=False))
    parsed, unknown = parser.parse_known_args(arguments)
    options = vars(parsed)
    command = options.pop("command")
    if unknown:
        chosen = commands.choices[command]
        chosen.error(unrecognized(unknown, re.findall(r"--[\w-]+", chosen.format_usage())))
    try:
        code: int = COMMANDS[command].run(options)
        # A full disk, or a reader that has gone, must show here.
        sys.stdout.flush()
        return code
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):
            # Python must not try to print the rest again when the process ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # A reader such as head has seen enough.
        if not isinstance(error, BrokenPipeError):
            print(wrapped(f"gpubuf {command}: {error}", sys.stderr), file=sys.stderr)
        return 1
    except UsageError as error:
        print(wrapped(f"gpubuf {command}: error: {error}", sys.stderr), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"gpubuf {command}: stopped at once; everything saved before is still there", file=sys.stderr)
        return train.SIGNAL_EXIT + signal.SIGINT
