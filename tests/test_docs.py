"""Every code block of the documentation runs, every command in it exists, every figure in it was measured.

CASES.md 30: a documentation example that raises NameError.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.report import newest_runs, pages, rewritten
from gpubuf.cli import COMMANDS

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(document: Path, *languages: str) -> list[tuple[int, str]]:
    """(line number, text) of every fenced block in one of the languages."""
    text = document.read_text()
    return [(text.count("\n", 0, m.start()) + 2, m[2]) for m in BLOCK.finditer(text) if m[1] in languages]


def name(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_python_blocks_run(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The blocks of a page, one after the other in one namespace, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for line, block in blocks(document, "python", "py"):
        # blank lines in front, so that a traceback names the line of the page
        exec(compile("\n" * (line - 1) + block, str(document), "exec"), namespace)


def test_readme_has_a_short_example():
    """About twenty lines of prioritized replay and SAC."""
    _, example = blocks(ROOT / "README.md", "python")[0]
    assert "TensorDictPrioritizedReplayBuffer" in example
    assert "SACLoss" in example
    assert len([line for line in example.splitlines() if line.strip()]) <= 25


def make_targets() -> set[str]:
    return set(re.findall(r"^(\w[\w-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_commands_exist(document: Path):
    """`make` targets, `gpubuf` subcommands and `python -m` modules, in shell blocks and in running text."""
    shell = "\n".join(block for _, block in blocks(document, "sh", "bash", "shell", "console"))
    inline = "\n".join(re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", BLOCK.sub("", document.read_text())))
    commands = re.sub(r"\s*\n\s*(?=ARGS)", " ", f"{shell}\n{inline}")
    assert set(re.findall(r"^make (\w+)", commands, re.MULTILINE)) <= make_targets()
    assert set(re.findall(r"^gpubuf (\w+)", commands, re.MULTILINE)) <= set(COMMANDS)
    for module in re.findall(r"python -m ([\w.]+)", commands):
        path = ROOT.joinpath(*module.split("."))
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_lead_somewhere(document: Path):
    for target in re.findall(r"\]\(([^)#\s]+)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), target


def test_architecture_names_every_module():
    """Every package, and every module of the layers that a newcomer looks for."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    package = ROOT / "gpubuf"
    modules = [m for f in ("", "data", "objectives", "kernels") for m in (package / f).glob("*.py")]
    packages = [init.parent for f in ("", "kernels") for init in (package / f).glob("*/__init__.py")]
    names = {m.name for m in modules if m.name != "__init__.py"} | {f"{p.name}/" for p in packages}
    assert len(names) > 20
    assert not [name for name in sorted(names) if name not in page]


@pytest.mark.parametrize("page", pages())
def test_figures_are_those_of_the_committed_runs(page: str):
    """`make report` would change nothing."""
    text = (ROOT / page).read_text()
    assert rewritten(text, newest_runs(), "../" * page.count("/")) == text
