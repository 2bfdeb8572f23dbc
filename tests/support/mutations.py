"""Plants faults in the source, one at a time, and asks the tests whether they notice.

``python -m tests.support.mutations`` draws small changes at random from the areas of :data:`AREAS`: a comparison
turned, a sum for a difference, a number one too large, a condition dropped, a statement left out. The same seed and
source give the same ones. Each is planted in a copy of the checkout, where the tests of its area run until one fails.

Before tests are deleted, run it with the old tests and with the new ones (``--tests FOLDER`` of another checkout) on
the same source: the new ones must notice as many faults.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: Files of the source, and the tests that have to notice a fault in them, as patterns from the root of the project.
AREAS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "sum tree": (
        (
            "kernels/sum_tree/_numba*.py",
            "kernels/sum_tree/_launch.py",
            "gpubuf/data/samplers/sum_tree.py",
            "gpubuf/data/samplers/priorities.py",
        ),
        (
            "tests/kernels/test_sum_tree*.py",
            "tests/data/test_sum_tree*.py",
            "tests/data/test_prioritized*.py",
            "tests/data/test_sampler_contract.py",
        ),
    ),
    "ring": (
        ("gpubuf/data/storage/ring.py", "gpubuf/data/storage/storage.py", "gpubuf/data/storage/indexing.py"),
        ("tests/data/test_storage*.py", "tests/data/test_user_mistakes.py", "tests/data/test_buffer_contract.py"),
    ),
    "n-step": (
        ("kernels/rows/_numba*.py", "gpubuf/data/storage/plan.py"),
        ("tests/kernels/test_rows*.py", "tests/data/test_n_step*.py", "tests/data/test_buffer_contract.py"),
    ),
    "share_next": (
        ("gpubuf/data/storage/share_next.py",),
        ("tests/data/test_share*.py", "tests/data/test_buffer_contract.py"),
    ),
    "stacks": (("gpubuf/data/stacks.py",), ("tests/data/test_stacks.py",)),
    "returns to go": (
        ("gpubuf/data/storage/returns.py", "gpubuf/data/storage/plans.py"),
        ("tests/data/test_returns_to_go.py", "tests/data/test_n_step.py"),
    ),
    "places": (
        (
            "gpubuf/data/storage/column.py",
            "gpubuf/data/storage/placement.py",
            "gpubuf/data/storage/memmap*.py",
            "gpubuf/data/moving.py",
            "gpubuf/planning.py",
        ),
        (
            "tests/data/test_placement*.py",
            "tests/data/test_memmap*.py",
            "tests/data/test_plan.py",
            "tests/data/test_buffer_contract.py",
            "tests/data/test_sampler_contract.py",
        ),
    ),
    "mixes": (("gpubuf/data/mixed*.py", "gpubuf/data/shares.py"), ("tests/data/test_mixed.py",)),
    "processing": (("gpubuf/data/processing/*.py",), ("tests/data/test_processing*.py",)),
    "slices": (
        ("gpubuf/data/samplers/*slice*.py", "kernels/trajectories/_numba*.py"),
        ("tests/data/test_slice*.py", "tests/data/test_sampler_contract.py", "tests/kernels/test_trajector*.py"),
    ),
    "samplers": (
        (
            "gpubuf/data/samplers/uniform.py",
            "gpubuf/data/samplers/prioritized*.py",
            "gpubuf/data/samplers/slice*.py",
            "gpubuf/data/samplers/trajectory_index.py",
            "gpubuf/data/samplers/row_order.py",
            "gpubuf/data/hindsight.py",
            "gpubuf/data/storage/windows.py",
        ),
        (
            "tests/data/test_slice*.py",
            "tests/data/test_sampler*.py",
            "tests/data/test_prioritized.py",
            "tests/data/test_hindsight.py",
            "tests/data/test_whole_trajectories.py",
            "tests/data/test_windows.py",
            "tests/data/test_row_order.py",
        ),
    ),
    "checkpoints": (
        ("gpubuf/data/checkpoints/*.py",),
        ("tests/data/test_checkpoint*.py", "tests/data/test_shard_checkpoints.py"),
    ),
    "losses": (("gpubuf/objectives/*.py",), ("tests/objectives/test_*.py",)),
    "kernels of losses": (
        (
            "kernels/td/_[cl]*.py",
            "kernels/*sac/_[cl]*.py",
            "kernels/categorical/_[cl]*.py",
            "kernels/tanh_normal/_[cl]*.py",
            "kernels/norms/_[cl]*.py",
            "kernels/optim/_[cl]*.py",
            "kernels/perceptrons/_[cl]*.py",
        ),
        (
            "tests/kernels/test_losses*.py",
            "tests/kernels/test_categorical*.py",
            "tests/kernels/test_tanh_normal.py",
            "tests/kernels/test_norms*.py",
            "tests/kernels/test_optim.py",
            "tests/kernels/test_perceptrons.py",
        ),
    ),
    "launch rules": (("kernels/config.py",), ("tests/kernels/test_config.py",)),
    "adapters": (("gpubuf/integrations/*.py",), ("tests/integrations/test_*.py",)),
    "training": (("gpubuf/train/*.py",), ("tests/train/test_*.py", "tests/test_cli.py")),
}

TURNED: dict[type[ast.AST], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "*",
    ast.Mod: "+",
    ast.And: "or",
    ast.Or: "and",
}


@dataclass(frozen=True)
class Fault:
    """A change of the text of one file.

    Attributes:
        area: its name in :data:`AREAS`.
        file: from the root of the project.
        line: where it begins.
        start, end: the bytes of the file that it replaces.
        before, after: their text.
    """

    area: str
    file: str
    line: int
    start: int
    end: int
    before: str
    after: str


def replacements(node: ast.AST, text: Callable[[ast.AST], str]) -> Iterator[tuple[ast.AST, str]]:
    """The changes that can be made to a node: what is replaced, and by which text."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in TURNED:
        yield node, f"{text(node.left)} {TURNED[type(node.ops[0])]} {text(node.comparators[0])}"
    elif isinstance(node, ast.BinOp) and type(node.op) in TURNED and "'" not in text(node) and '"' not in text(node):
        yield node, f"({text(node.left)}) {TURNED[type(node.op)]} ({text(node.right)})"
    elif isinstance(node, ast.BoolOp):
        yield node, "(" + f" {TURNED[type(node.op)]} ".join(f"({text(value)})" for value in node.values) + ")"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, f"bool({text(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node, str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield node, str(node.value + 1)
    elif isinstance(node, ast.IfExp):
        yield node, f"({text(node.orelse)} if {text(node.test)} else {text(node.body)})"
    elif (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)) or isinstance(node, ast.AugAssign):
        yield node, "pass"


def faults_in(area: str, path: Path, root: Path) -> list[Fault]:
    """Every fault that can be planted in a file."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: ast.AST) -> tuple[int, int]:
        first, last = starts[node.lineno - 1], starts[node.end_lineno - 1]  # type: ignore[attr-defined]
        return first + node.col_offset, last + node.end_col_offset  # type: ignore[attr-defined]

    def text(node: ast.AST) -> str:
        return source[slice(*span(node))].decode()

    found = []
    for outer in ast.walk(ast.parse(source)):
        # Annotations, defaults and decorators stay: mypy has them.
        if not isinstance(outer, ast.FunctionDef):
            continue
        for statement in outer.body:
            for node in ast.walk(statement):
                if isinstance(node, ast.Constant) and isinstance(getattr(node, "value", None), str):
                    continue
                for place, after in replacements(node, text):
                    start, end = span(place)
                    line = place.lineno  # type: ignore[attr-defined]
                    found.append(Fault(area, str(path.relative_to(root)), line, start, end, text(place), after))
    return sorted(set(found), key=lambda fault: (fault.start, fault.end))


def drawn(areas: Sequence[str], count: int, seed: int, root: Path = ROOT) -> list[Fault]:
    """``count`` faults of each area, drawn without replacement; the same for the same seed and source."""
    chosen: list[Fault] = []
    for area in areas:
        paths = sorted({path for pattern in AREAS[area][0] for path in root.glob(pattern)})
        every = [fault for path in paths for fault in faults_in(area, path, root)]
        chosen += random.Random(f"{seed} {area}").sample(every, min(count, len(every)))
    return chosen


def fails(area: str, copy: Path, seconds: float) -> bool | None:
    """Whether a test of an area fails in ``copy``, as it is now; None: they ran out of time."""
    tests = sorted({str(path) for pattern in AREAS[area][1] for path in copy.glob(pattern)})
    options = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow and not nightly"]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", *options, *tests]
    try:
        ended = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return None
    return ended.returncode != 0


def noticed(fault: Fault, copy: Path, seconds: float) -> bool | None:
    """Whether a test of its area fails with the fault planted in ``copy``; None: they ran out of time."""
    file = copy / fault.file
    whole = file.read_bytes()
    file.write_bytes(whole[: fault.start] + fault.after.encode() + whole[fault.end :])
    try:
        return fails(fault.area, copy, seconds)
    finally:
        file.write_bytes(whole)


def copied(root: Path, tests: Path, target: Path) -> Path:
    """A copy of what git knows of the checkout, with the tests of another one."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True).stdout
    for name in names.decode().split("\0")[:-1]:
        if not name.startswith("tests/") and (root / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, target / name, follow_symlinks=False)
    shutil.copytree(tests, target / "tests", symlinks=True)
    # The machine code that Numba keeps beside the kernels, which takes minutes to compile.
    for cache in (root / "kernels").rglob("__pycache__"):
        shutil.copytree(cache, target / cache.relative_to(root), dirs_exist_ok=True)
    return target


def main(arguments: Sequence[str] | None = None) -> int:
    """Plant the faults, print each with what became of it, and a count for each area."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.mutations", description=__doc__.partition("\n")[0])
    parser.add_argument("--areas", nargs="+", choices=AREAS, default=list(AREAS))
    parser.add_argument("--count", type=int, default=13, help="faults of each area; default: 13")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", type=Path, default=ROOT / "tests", help="a folder of tests; default: this one")
    parser.add_argument("--seconds", type=float, default=900, help="for the tests of one fault; default: 900")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    options = parser.parse_args(arguments)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(ROOT, options.tests.resolve(), Path(folder))
        sound = [area for area in options.areas if fails(area, copy, options.seconds) is False]
        for area in options.areas:
            if area not in sound:
                print(f"{area}: its tests fail or run out of time without a fault, and can't tell")
        for fault in drawn(sound, options.count, options.seed):
            began = time.perf_counter()
            found = noticed(fault, copy, options.seconds)
            took = time.perf_counter() - began
            word = {True: "noticed", False: "SURVIVED", None: "out of time"}[found]
            change = f"{' '.join(fault.before.split())} -> {' '.join(fault.after.split())}"
            print(f"{word:11} {took:5.0f} s  {fault.file}:{fault.line}  {change[:110]}", flush=True)
            results.append({**asdict(fault), "noticed": found, "seconds": round(took, 1)})
            if options.out:
                options.out.write_text(json.dumps(results, indent=1))
    for area in sound:
        of_area = [each["noticed"] for each in results if each["area"] == area]
        # A test that hangs has noticed, too.
        print(f"{area}: {sum(each is not False for each in of_area)} of {len(of_area)} noticed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
