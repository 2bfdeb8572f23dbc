"""What is said once and needed in several places agrees: version, Pythons, tools."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import gpubuf

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", line)]


def test_the_version_is_that_of_pyproject():
    assert gpubuf.__version__ == PROJECT["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", gpubuf.__version__)


def test_the_version_needs_no_installation(tmp_path: Path):
    """In a checkout that nobody installed, and where another version of gpubuf is installed."""
    (tmp_path / "elsewhere" / "gpubuf-9.9.9.dist-info").mkdir(parents=True)
    (tmp_path / "elsewhere" / "gpubuf-9.9.9.dist-info" / "METADATA").write_text("Name: gpubuf\nVersion: 9.9.9\n")
    for installed in ("", str(tmp_path / "elsewhere")):
        # -S: without site-packages, where an editable installation is
        run = subprocess.run(
            [sys.executable, "-S", "-c", "import gpubuf; print(gpubuf.__version__)"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [installed, str(ROOT)]))},
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout.strip() == PROJECT["version"]


def test_the_version_is_written_once():
    """In pyproject.toml; the changelog names it too."""
    for path in (ROOT / "gpubuf").rglob("*.py"):
        assert f'"{PROJECT["version"]}"' not in path.read_text(), path
    assert PROJECT["version"] in (ROOT / "CHANGELOG.md").read_text()


def test_the_workflow_runs_the_check_on_every_python_and_at_both_ends_of_the_versions():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    pinned = re.search(r"^ *python: (\[.*\])$", workflow, re.MULTILINE)
    assert pinned is not None
    assert json.loads(pinned[1]) == PYTHONS
    assert "run: ${{ matrix.command || '.ci/run' }}\n" in workflow
    assert "PYTHON: " in workflow
    makefile = (ROOT / "Makefile").read_text()
    for end, target in (("oldest", "compat"), ("newest", "newest")):
        assert re.search(rf"versions: {end}, .*command: make {target} ", workflow)
        assert f"\n{target}: " in makefile
        assert re.search(r"^torch==", (ROOT / f"constraints-{target}.txt").read_text(), re.MULTILINE)


def test_the_oldest_versions_are_tested():
    """`make compat` has what pyproject.toml still accepts, and the documentation says so."""
    accepted = dict(
        re.findall(r"^(torch|triton|tensordict)>=([\d.]+)", "\n".join(PROJECT["dependencies"]), re.MULTILINE)
    )
    pinned = dict(re.findall(r"^(\w+)==([\d.]+)$", (ROOT / "constraints-compat.txt").read_text(), re.MULTILINE))
    assert list(accepted) == ["torch", "triton", "tensordict"]
    oldest = {name: version if version.count(".") == 2 else f"{version}.0" for name, version in accepted.items()}
    assert {name: pinned.get(name) for name in accepted} == oldest
    (row,) = re.findall(r"^\| oldest \|.*$", (ROOT / "docs" / "stability.md").read_text(), re.MULTILINE)
    assert row == f"| oldest | {PYTHONS[0]} | {' | '.join(oldest.values())} | `make compat` |"


@pytest.mark.parametrize("workflow", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_workflows_are_yaml(workflow: Path):
    """Every job has steps that either use an action or run a command, and every action has a version."""
    yaml = pytest.importorskip("yaml", reason="PyYAML, which OmegaConf brings, is not installed")
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    assert jobs
    for job in jobs.values():
        # A wheel is made on Linux, and tried elsewhere.
        assert job["runs-on"] == ("${{ matrix.system }}" if job.get("needs") == "wheel" else "ubuntu-latest")
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), step
            assert "@" in step.get("uses", "@"), step


def test_the_nightly_fuzz_keeps_what_failed():
    """Examples are restored before the tests and saved after them, also where they fail."""
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    job = workflow.partition("\n  fuzz:\n")[2].partition("\n  torchrl:\n")[0]
    assert "if: github.event_name == 'schedule'" in job
    order = [job.index(text) for text in ("cache/restore@", "pytest -n 2 -m hypothesis", "cache/save@")]
    assert order == sorted(order)
    assert re.search(r"- if: always\(\)\n *uses: actions/cache/save@", job)
    assert re.findall(r"path: (.*)", job) == [".hypothesis"] * 3
    # A variable that the tests read, and a marker that Hypothesis gives.
    assert re.search(r'GPUBUF_FUZZ: "\d+"', job)
    assert "GPUBUF_FUZZ" in (ROOT / "tests" / "support" / "fuzzing.py").read_text()


def test_the_hooks_are_the_tools_of_make_test():
    """The same commands in the same environment, hence in the versions of constraints.txt."""
    hooks = re.findall(r"^ *entry: (.*)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.MULTILINE)
    recipe = (ROOT / "Makefile").read_text().partition("\ntest:")[2].partition("\n\n")[0]
    commands = [line.strip().replace("$(VENV)", ".venv") for line in recipe.splitlines()[1:]]
    assert hooks == [command for command in commands if "pytest" not in command]
    pinned = (ROOT / "constraints.txt").read_text()
    for tool in ("ruff", "mypy"):
        assert re.search(rf"^{tool}==", pinned, re.MULTILINE)


STAND_IN = """#!/bin/sh
echo "$@" >> calls
case "$*" in
  "-m venv "*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" && cp "$0" "$4/bin/ruff" ;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The files that decide about set-up, in a folder with a blank, and an interpreter that notes its calls."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    folder = tmp_path / "a clone"
    shutil.copytree(ROOT / ".ci", folder / ".ci")
    for name in ("Makefile", "pyproject.toml", "setup.py", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "stand-in").write_text(STAND_IN)
    (folder / "stand-in").chmod(0o755)
    return folder


def calls_of(clone: Path, *command: str) -> list[str]:
    """What a command has the interpreter do."""
    (clone / "calls").unlink(missing_ok=True)
    environment = {**os.environ, "PYTHON": "./stand-in", "ARGS": "--seed 1"}
    subprocess.run(command, cwd=clone, env=environment, check=True, capture_output=True)
    calls = (clone / "calls").read_text().splitlines()
    return [call for call in calls if not call.startswith("-c")]


def test_the_check_runs_on_the_interpreter_named(clone: Path):
    """.ci/run makes the environment with PYTHON, and tests in it."""
    calls = calls_of(clone, ".ci/run")
    assert "-m venv --clear .venv" in calls
    assert any(call.startswith("-m pytest") for call in calls)


def test_make_sets_up_once(clone: Path):
    """`make train` installs at the first call, not at the second, and again when the constraints change."""
    train, install = "-m gpubuf train --seed 1", "-m pip install -q -e .[train]"
    make = ("make", "-s", "train", "PYTHON=./stand-in", "ARGS=--seed 1")
    assert calls_of(clone, *make) == ["-m venv --clear .venv", install, train]
    assert calls_of(clone, *make) == [train]
    later = (clone / ".venv" / ".train").stat().st_mtime + 10
    os.utime(clone / "constraints.txt", (later, later))
    assert calls_of(clone, *make) == [install, train]


def test_readme_is_ready_but_for_the_address():
    """The clone line names a placeholder, once."""
    assert (ROOT / "README.md").read_text().count("REPOSITORY") == 1


def test_types_are_checked_strictly_but_in_kernels():
    """Only the modules of Triton kernels may leave functions untyped, of whatever family."""
    mypy = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert mypy["strict"] is True
    (lenient,) = (each["module"] for each in mypy["overrides"] if each.get("disallow_untyped_defs") is False)
    files = list((ROOT / "gpubuf" / "kernels").glob("*/_triton*.py"))
    of_benchmarks = (ROOT / "benchmarks").rglob("_triton*.py")
    measuring = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in of_benchmarks}
    assert sorted(lenient) == sorted({f"gpubuf.kernels.*.{path.stem}" for path in files} | measuring)
