"""What the site needs beyond Markdown: MkDocs calls the functions ``on_*`` while it builds.

- A pattern in the nav, such as ``integrations/*``, stands for all pages that match it.
- Files outside docs/ that belong to the site become pages: CONTRIBUTING.md, CHANGELOG.md, and each of examples/.
- A link to any other file outside docs/ leads to the repository; a picture is copied.
- ``<!-- api: gpubuf.data samplers Sampler -->`` becomes the reference of the names that ``gpubuf.data`` exports from
  the room ``samplers``, ``Sampler`` first. So a new public name can't be missing.
- A link whose text is the name of a page, as in ``[rows.md](rows.md)``, shows the title of that page instead.
- The table of docs/cases.md gets a column with the tests of each case.

Only functions called by MkDocs import it: the tests use the others without.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import os
import posixpath
import re
import textwrap
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
#: Pages of the site whose source is a file elsewhere.
OUTSIDE = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
PICTURES = (".png", ".svg")
#: How much a page counts in the search: first what answers questions, then guides, and last what developers read.
SEARCH = (
    *((f"{page}.md", 2) for page in ("howto", "troubleshooting", "start", "prioritized", "performance")),
    ("examples/*", 0.2),
    ("api/*", 0.05),
    ("integrations/torchrl.md", 0.3),
    ("migration-*.md", 0.3),
    ("performance-*.md", 0.4),
    *((f"{page}.md", 0.2) for page in ("changelog", "cases", "contributing", "decisions", "kernels", "architecture")),
    *((f"{page}.md", 0.4) for page in ("benchmarks", "tuning", "extending", "concepts")),
)
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\()([^)\s]+)(\))")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
#: The reference shows a name in the last of these packages that has it.
PACKAGES = ("gpubuf", "gpubuf.train", "gpubuf.optim", "gpubuf.modules", "gpubuf.objectives", "gpubuf.data")
API = re.compile(r"^<!-- api: (\S+)(?: ([a-z]\S*))?((?: \w+)*) -->$", re.MULTILINE)
ROLE = re.compile(r":(?:class|func|meth|attr|mod|exc|data):`~?([\w.]+)`")
CASE = re.compile(r"^\| (\d+) \| (.*) \|$", re.MULTILINE)


# The pages


def sources() -> dict[str, str]:
    """File in the repository of every page, by its path in the site."""
    own = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    pages = {page: f"docs/{page}" for page in sorted(own)}
    examples = {f"examples/{path.stem}.md": f"examples/{path.name}" for path in example_files()}
    return {**pages, **OUTSIDE, **examples}


def example_files() -> list[Path]:
    """The examples in the order in which docs/examples.md names them, and then the others."""
    page = (DOCS / "examples.md").read_text()
    files = sorted((ROOT / "examples").glob("*.py"))
    return sorted(files, key=lambda path: page.find(f"examples/{path.name}") % (len(page) + 1))


def expanded(nav: Any, pages: list[str]) -> Any:
    """The nav with every pattern replaced by the pages that match it and stand nowhere else."""
    named = set(entries(nav))
    if isinstance(nav, dict):
        return {title: expanded(entry, pages) for title, entry in nav.items()}
    if not isinstance(nav, list):
        return nav
    found: list[Any] = []
    for entry in nav:
        if isinstance(entry, str) and "*" in entry:
            found += [page for page in pages if fnmatch(page, entry) and page not in named]
        else:
            found.append(expanded(entry, pages))
    return found


def entries(nav: Any) -> Iterator[str]:
    """Every page or pattern of a nav."""
    if isinstance(nav, str):
        yield nav
        return
    for entry in nav.values() if isinstance(nav, dict) else nav:
        yield from entries(entry)


def example_page(source: str) -> str:
    """A page of an example: the first line of its docstring is the title, the code follows the rest."""
    text = (ROOT / source).read_text()
    title, _, rest = (ast.get_docstring(ast.parse(text)) or "").partition("\n")
    # The docstring is above the code already.
    code = text[text.index('"""', text.index('"""') + 3) + 3 :].strip()
    about = rest.strip("\n").replace("``", "`")
    # Indented lines are commands.
    about = re.sub(
        r"(?m)(?:^ {4}\S.*$\n?)+", lambda lines: f"```sh\n{textwrap.dedent(lines[0])}```\n", about + "\n"
    ).strip()
    return f'# {title.rstrip(".")}\n\n{about}\n\n```python title="{source}"\n{code}\n```\n'


# Links


def relinked(markdown: str, page: str, repository: str) -> str:
    """The text of a page with links that work in the site.

    Raises:
        ValueError: a link leads to no file.
    """
    places = {source: path for path, source in sources().items()}
    folder = posixpath.dirname(sources()[page])

    def mended(match: re.Match[str]) -> str:
        target, hash_, anchor = match[2].partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        file = posixpath.normpath(posixpath.join(folder, target))
        if not (ROOT / file).exists():
            raise ValueError(f"{sources()[page]} links to {match[2]}, which is no file")
        if file in places:
            place = posixpath.relpath(places[file], posixpath.dirname(page) or ".") + hash_ + anchor
        elif file.startswith("docs/"):
            place = posixpath.relpath(file.removeprefix("docs/"), posixpath.dirname(page) or ".")
        elif file.endswith(PICTURES):
            place = posixpath.relpath(f"files/{file}", posixpath.dirname(page) or ".")
        else:
            place = f"{repository}/{'tree' if (ROOT / file).is_dir() else 'blob'}/main/{file}{hash_}{anchor}"
        start = match[1]
        if file in places and file.endswith(".md") and start == f"[{target.replace('../', '')}](":
            start = f"[{title(file)}]("
        return start + place + match[3]

    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(mended, part) for part in parts)


def title(source: str) -> str:
    """The heading of a page."""
    return next(line.removeprefix("# ") for line in (ROOT / source).read_text().splitlines() if line.startswith("# "))


def pictures() -> list[str]:
    """Pictures outside docs/ that pages show."""
    found = set()
    for source in sources().values():
        if source.endswith(".md"):
            for match in LINK.finditer((ROOT / source).read_text()):
                file = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
                if file.endswith(PICTURES) and not file.startswith("docs/"):
                    found.add(file)
    return sorted(found)


# The API reference


def exported(module: str) -> dict[str, str]:
    """Every name in a package's ``__all__``, with the module that it comes from."""
    path = ROOT.joinpath(*module.split("."))
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    homes = {
        alias.asname or alias.name: node.module or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return {name: homes.get(name, module) for name in ast.literal_eval(node.value)}
    return {}


def public_paths() -> dict[str, str]:
    """Where the reference shows each public name."""
    return {name: f"{package}.{name}" for package in PACKAGES for name in exported(package)}


def referenced(markdown: str) -> list[str]:
    """Public paths, such as ``gpubuf.data.ReplayBuffer``, of all names that the marks of a page stand for.

    ``package A B`` stands for A, B and all others of the package, ``package only A B`` for these alone, and ``package
    module`` for those that a module holds.
    """
    found = []
    for module, room, names in API.findall(markdown):
        first = names.split()
        for package in packages(module):
            homes = exported(package)
            rest = [] if room == "only" else sorted(homes.keys() - set(first))
            shown = [n for n in [*first, *rest] if room in ("", "only") or room in homes[n].split(".")]
            found += [f"{package}.{name}" for name in shown]
    return found


def packages(module: str) -> list[str]:
    """The module, or for ``package.*`` the public modules in it."""
    if not module.endswith(".*"):
        return [module]
    package = module.removesuffix(".*")
    folder = ROOT.joinpath(*package.split("."))
    names = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    return [f"{package}.{name}" for name in sorted(names) if not name.startswith("_")]


def has_parts(path: str) -> bool:
    """Whether a class has methods from classes that are not public: from the mixins that it is made of."""
    package, _, name = path.rpartition(".")
    home = ROOT.joinpath(*exported(package)[name].split("."))
    source = home / "__init__.py" if home.is_dir() else home.with_suffix(".py")
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            known = public_paths().keys() | vars(builtins).keys()
            return any(not isinstance(base, ast.Name) or base.id not in known for base in node.bases)
    return False


def with_reference(markdown: str) -> str:
    """The text of a page with the reference in the place of its marks."""

    def entry(path: str, options: Iterable[str]) -> str:
        return "\n      ".join([f"::: {path}", *options]).replace("\n", "\n    options:\n", 1)

    def reference(match: re.Match[str]) -> str:
        entries = []
        for path in referenced(match[0]):
            options = ["inherited_members: true"] if has_parts(path) else []
            # Several of these modules have a class of the same name.
            options += ["show_root_full_path: true"] if path.startswith("gpubuf.integrations.") else []
            entries.append(entry(path, options))
        return "\n\n".join(entries)

    return API.sub(reference, markdown)


# The cases


def with_tests(markdown: str, repository: str) -> str:
    """The table of cases with a column of tests."""
    spec = importlib.util.spec_from_file_location("cases", ROOT / "tests" / "test_cases.py")
    assert spec is not None
    assert spec.loader is not None
    cases = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cases)
    covering = cases.covering_tests()

    def row(match: re.Match[str]) -> str:
        tests = covering.get(int(match[1]), [])
        links = []
        for test in tests[:3]:
            file, _, name = test.partition("::")
            links.append(f"[`{name or Path(file).stem}`]({repository}/blob/main/tests/{file})")
        more = f" and {len(tests) - 3} more" if len(tests) > 3 else ""
        return f"| {match[1]} | {match[2]} | {'<br>'.join(links)}{more} |"

    markdown = markdown.replace("| number | case |\n| ---: | --- |", "| number | case | tests |\n| ---: | --- | --- |")
    return CASE.sub(row, markdown)


# What MkDocs calls


def on_config(config: Any) -> Any:
    config.nav = expanded(config.nav, list(sources()))
    config.watch += [str(ROOT / "examples"), str(ROOT / "gpubuf")]
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for page, source in sources().items():
        if source.startswith("examples/"):
            files.append(File.generated(config, page, content=example_page(source)))
        elif not source.startswith("docs/"):
            files.append(File.generated(config, page, abs_src_path=os.fspath(ROOT / source)))
    for file in pictures():
        files.append(File.generated(config, f"files/{file}", abs_src_path=os.fspath(ROOT / file)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    from mkdocs.exceptions import PluginError

    repository, path = config.repo_url.rstrip("/"), page.file.src_uri
    try:
        markdown = relinked(markdown, path, repository)
    except ValueError as error:
        raise PluginError(str(error)) from error
    boost = next((boost for place, boost in SEARCH if fnmatch(path, place)), None)
    if boost is not None:
        page.meta["search"] = {"boost": boost}
    if path.startswith("examples/"):
        # These have one heading, and lines of 120 characters.
        page.meta["hide"] = ["toc"]
    if path == "cases.md":
        markdown = with_tests(markdown, repository)
    return with_reference(markdown)
