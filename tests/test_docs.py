"""Every code block of the documentation runs, every command in it exists, every figure in it was measured.

CASES.md 30: a documentation example that raises NameError.
"""

import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.measure.results import newest_runs
from benchmarks.report import BLOCK as FIGURES
from benchmarks.report import pages, rewritten
from gpubuf.cli import COMMANDS

ROOT = Path(__file__).parent.parent
TOP = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS = [*TOP, *sorted((ROOT / "docs").glob("*/**/*.md")), ROOT / "examples" / "README.md"]
#: Libraries that the pages of integrations show beside gpubuf.
PEERS = ("torchrl", "stable_baselines3", "holosoma", "lerobot", "datasets", "rsl_rl")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(document: Path, *languages: str) -> list[tuple[int, str]]:
    """(line number, text) of every fenced block in one of the languages; of all blocks, if none is named."""
    text = document.read_text()
    return [(text.count("\n", 0, m.start()) + 2, m[2]) for m in BLOCK.finditer(text) if m[1] in (languages or m[1])]


def name(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_python_blocks_run(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The blocks of a page, one after the other in one namespace, in an empty folder."""
    code = "\n".join(block for _, block in blocks(document, "python", "py"))
    for peer in PEERS:
        if re.search(rf"^\s*(?:import|from) {peer}\b", code, re.MULTILINE) and importlib.util.find_spec(peer) is None:
            pytest.skip(f"{peer} is not installed")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for line, block in blocks(document, "python", "py"):
        # blank lines in front, so that a traceback names the line of the page
        exec(compile("\n" * (line - 1) + block, str(document), "exec"), namespace)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_code_fits_beside_the_navigation(document: Path):
    """On a screen of 1280 pixels the site shows 88 characters of a line of code."""
    lines = [line for _, block in blocks(document) for line in block.splitlines()]
    assert [line for line in lines if len(line) > 88] == []


def test_readme_fits_on_a_screen_and_changes_one_line():
    """The program below the diff is the one that the diff changes, and no figure in the table is open."""
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 61
    (_, change), (_, example) = blocks(ROOT / "README.md", "diff", "python")
    before, after = change.splitlines()
    assert after[1:] in example.splitlines()
    assert after[1:] == before[1:].replace("torchrl", "gpubuf")
    assert "open" not in FIGURES.search(text)[0].split()


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


def test_the_first_page_lists_every_page():
    """What is not linked is not found. Pages in folders are in the nav of the site, which tests/test_site.py checks."""
    listed = (ROOT / "docs" / "index.md").read_text().partition("## All pages")[2]
    others = [page for page in TOP[1:] if page.name != "index.md"]
    assert [page for page in others if f"- [{page.name}]({os.path.relpath(page, ROOT / 'docs')}): " not in listed] == []


def test_pages_name_every_package():
    """architecture.md those of gpubuf, kernels.md those of kernels."""
    package = ROOT / "gpubuf"
    for page, places in (("architecture", (package, package / "data")), ("kernels", (package / "kernels",))):
        text = (ROOT / "docs" / f"{page}.md").read_text()
        folders = [init.parent.name for place in places for init in place.glob("*/__init__.py")]
        assert len(folders) > 5
        assert not [folder for folder in folders if folder != "kernels" and f"{folder}/" not in text]


WORD = "half|one|two|three|four|five|six|seven|eight|nine|ten|hundred|thousand|quarter|thirds?|tenths?"
UNIT = (
    r"(?:[nµum]?s|min|h|(?:nano|micro|milli)?seconds?|minutes?|hours?|[kKMGT]i?B|(?:kilo|mega|giga)?bytes?|%|per\s+cent|"
    r"x|times|fold)(?:/s)?(?![\w*])"
)
#: "4.3 µs", "5x", "30 %", "half a second", "a quarter of a byte", "seven times".
FIGURE = re.compile(rf"(?<![\w.^])(?:\d[\d.,]*\s?|(?:{WORD})(?:\s+of)?(?:\s+an?)?[\s-]+){UNIT}", re.IGNORECASE)
#: Numbers with units that nobody measured: sizes that the code chooses, and the descriptions of others' faults.
DEFINED = {
    "docs/cases.md": ["a thousand times slower"],
    # What the scripts keep to, and how long a machine is lent.
    "docs/benchmarks.md": ["within seven minutes", "ended 8 seconds later", "ten minutes a command", "below 64 MiB"],
    "docs/prefetch.md": ["up to 32 MiB"],
    "docs/writers.md": ["fit into 8 MiB"],
    "docs/checkpoints.md": ["than 256 MiB", "for 1 GiB and more"],
}


def typed_figures(page: str, defined: Sequence[str] = ()) -> list[str]:
    """Every figure with its surroundings that is neither in a code block nor between the report's markers."""
    for pattern in (BLOCK, FIGURES, re.compile(r"`[^`]*`")):
        page = pattern.sub(" ", page)
    for phrase in defined:
        assert phrase in page, f"{phrase!r} is no longer there"
        page = page.replace(phrase, " ")
    return [page[max(0, m.start() - 30) : m.end() + 10] for m in FIGURE.finditer(page)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_no_figure_is_typed_by_hand(document: Path):
    """Times, bytes and ratios come from files of results, through the report, or stay out."""
    assert not typed_figures(document.read_text(), DEFINED.get(name(document), []))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It takes 34.0 µs.", True),
        ("It takes 34 µs a call", True),
        ("at 1,700 MB/s", True),
        ("5x faster", True),
        ("rises by 30 %", True),
        ("about half a second to", True),
        ("in 3\nminutes", True),
        ("a quarter of a byte a row", True),
        ("takes seven times that", True),
        ("three per cent", True),
        ("| a | 9 ms |", True),
        ("`sleep(3 s)` and 600 million rows, 4 steps, 2^31 states, 3x84x84 pixels", False),
        ("Its second half, ten sums, 20 episodes, on one thread, as 17 others, version 2.13.0", False),
        ("```sh\ntook 3 s\n```\n", False),
        ("<!-- figures: cpu -->\n\n| 3 µs |\n\n<!-- end of figures -->\n", False),
    ],
)
def test_typed_figures_are_recognised(text: str, found: bool):
    assert bool(typed_figures(text)) == found


@pytest.mark.parametrize("page", pages())
def test_figures_are_those_of_the_committed_runs(page: str):
    """`make report` would change nothing."""
    text = (ROOT / page).read_text()
    assert rewritten(text, newest_runs(), "../" * page.count("/")) == text
