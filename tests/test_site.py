"""The documentation site: every page is in the nav, every public name in the reference, every link leads somewhere.

`make docs` builds it. Where its environment is, the test marked slow does too.
"""

import importlib
import importlib.util
import os
import re
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
MKDOCS = ROOT / ".docs" / "bin" / "mkdocs"
PACKAGES = ("gpubuf", "gpubuf.data", "gpubuf.objectives", "gpubuf.modules", "gpubuf.optim", "gpubuf.train")


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    """docs/hooks.py, which is no module of the package."""
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def nav() -> list[str]:
    """Pages and patterns of the nav: mkdocs.yml is not parsed, because that would take a package."""
    text = (ROOT / "mkdocs.yml").read_text()
    section = text[text.index("\nnav:") : text.index("\ntheme:")]
    return [match[1] for match in re.finditer(r"^ +- (?:Home: )?(\S+(?:\.md|\*))$", section, re.MULTILINE)]


def test_every_page_is_in_the_nav_once(hooks: ModuleType):
    pages = hooks.expanded(nav(), list(hooks.sources()))
    assert sorted(pages) == sorted(hooks.sources())


def test_a_page_has_one_name(hooks: ModuleType):
    """The nav gives none beside the heading, and no two pages have the same."""
    titles = [hooks.title(source) for source in hooks.sources().values() if source.endswith(".md")]
    assert len(titles) == len(set(titles))


#: Sections that have moved to pages of their own, and where they were: links to them still lead there.
MOVED = {
    "performance": (
        *("how-it-is-measured", "between-updates", "on-a-cpu", "why-gpubuf-is-faster", "several-threads"),
        *("threads-on-the-cpu", "on-a-gpu", "prediction-for-an-h200", "slices"),
    ),
    "rows": (
        *("what-happens-to-a-batch-on-its-way-out", "several-batches-at-once", "several-buffers-in-one-batch"),
        *("writing-back", "hindsight-relabelling"),
    ),
    "migration": ("buffers", "storages", "samplers", "replaybuffer", "slicesampler", "sacloss", "value-estimators"),
}


@pytest.mark.parametrize("page", MOVED)
def test_moved_sections_are_linked_where_they_were(page: str):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    for anchor in MOVED[page]:
        link = re.search(rf'<a id="{anchor}"></a>\[[^]]+\]\(([\w-]+\.md)(?:#([\w-]+))?\)', text)
        assert link is not None, anchor
        there = (ROOT / "docs" / link[1]).read_text()
        headings = {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in re.findall("^#+ (.+)$", there, re.M)}
        assert link[2] is None or link[2] in headings, anchor


def test_patterns_of_the_nav(hooks: ModuleType):
    pages = ["a.md", "more/b.md", "more/c.md", "more/index.md"]
    nested: Any = [{"Home": "a.md"}, {"More": ["more/index.md", "more/*"]}, {"None": ["none/*"]}]
    assert hooks.expanded(nested, pages) == [
        {"Home": "a.md"},
        {"More": ["more/index.md", "more/b.md", "more/c.md"]},
        {"None": []},
    ]


def references() -> dict[str, str]:
    return {page.name: page.read_text() for page in (ROOT / "docs" / "api").glob("*.md")}


def test_every_public_name_is_in_the_reference(hooks: ModuleType):
    """Under the name of a package that exports it."""
    listed = [path for text in references().values() for path in hooks.referenced(text)]
    assert len(listed) == len(set(listed))
    names = {path.rpartition(".")[2] for path in listed}
    for package in PACKAGES:
        assert not set(importlib.import_module(package).__all__) - names
    for path in listed:
        package, _, name = path.rpartition(".")
        if not package.startswith("gpubuf.integrations"):  # these may need other libraries
            assert hasattr(importlib.import_module(package), name)


def test_links_lead_to_pages_or_to_the_repository(hooks: ModuleType):
    repository = "https://repository.example/gpubuf"
    text = hooks.relinked(
        "[a](../README.md#x) [b](rows.md#y) [c](../tests) ![d](../docs/pendulum.png)", "data.md", repository
    )
    assert text == (
        f"[a]({repository}/blob/main/README.md#x) [b](rows.md#y) [c]({repository}/tree/main/tests) ![d](pendulum.png)"
    )
    assert hooks.relinked("[a](../CONTRIBUTING.md#x)", "data.md", repository) == "[a](contributing.md#x)"
    assert hooks.relinked("[a](docs/data.md)", "contributing.md", repository) == "[a](data.md)"
    assert hooks.relinked("```\n[a](gone.md)\n```\n", "data.md", repository) == "```\n[a](gone.md)\n```\n"
    with pytest.raises(ValueError, match=r"docs/data\.md links to gone\.md"):
        hooks.relinked("[a](gone.md)", "data.md", repository)


def test_every_link_of_every_page(hooks: ModuleType):
    for page, source in hooks.sources().items():
        if source.endswith(".md"):
            hooks.relinked((ROOT / source).read_text(), page, "https://repository.example")


def test_the_cases_name_their_tests(hooks: ModuleType):
    page = hooks.with_tests((ROOT / "docs" / "cases.md").read_text(), "https://repository.example")
    rows = re.findall(r"^\| \d+ \| (.*) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) >= 68
    # None, where the feature is still to come.
    assert all(("/blob/main/tests/" in tests) if "*later*" not in case else tests == "" for case, tests in rows)


def test_commands_of_an_example_are_code(hooks: ModuleType):
    page = hooks.example_page("examples/collectors.py")
    assert "```sh\npython examples/collectors.py\npython examples/collectors.py --env HalfCheetah-v5" in page


def test_nothing_is_loaded_from_elsewhere():
    """The site works without a network: no fonts, scripts or pictures of other hosts."""
    config = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in config
    assert re.findall(r"https?://\S+", config) == ["https://repository.example/gpubuf"]


@pytest.mark.slow
@pytest.mark.skipif(not MKDOCS.exists(), reason="`make docs` has not made its environment")
def test_the_site_builds(tmp_path: Path):
    """Warnings are errors: pages without an entry in the nav, links and anchors that lead nowhere."""
    run = subprocess.run(
        [MKDOCS, "build", "--strict", "--quiet", "--site-dir", tmp_path],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    for page in tmp_path.rglob("*.html"):
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)=\"(https?://[^\"]+)", text)
        assert not [url for url in loaded if not url.startswith("https://repository.example/")], page
        assert not re.search(r"<p>(?:Args|Returns|Raises):", text), f"{page} shows a docstring that nothing has parsed"
