"""Forty-four questions, as people type them into the site's search, and the place that answers each.

Lines of tests/support/questions.txt read ``question -> page#section | another``. node runs the built site's search.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from posixpath import dirname, join, normpath

import pytest

ROOT = Path(__file__).parent.parent
MKDOCS = ROOT / ".docs" / "bin" / "mkdocs"
SUPPORT = ROOT / "tests" / "support"
#: Results that are looked at, and questions that must be answered.
FIRST, ANSWERED = 3, 42
HEADING = re.compile(r'<h[1-6] id="([^"]+)"')


def linked(site: Path, place: str) -> set[str]:
    """Where a click at a place leads: the links of a section, or of what stands above a page's first one, and all
    sections of the page, which are in its table of contents.
    """
    page, _, anchor = place.partition("#")
    text = (site / page).read_text()
    text = text[text.index("<article") : text.index("</article")]
    parts = HEADING.split(text)
    anchors, bodies = parts[1::2], parts[2::2]
    body = bodies[anchors.index(anchor) if anchor else 0]
    links = {normpath(join(dirname(page), link)) if not link.startswith("#") else page + link for link in hrefs(body)}
    return links | {f"{page}#{each}" for each in anchors}


def hrefs(text: str) -> list[str]:
    return [link for link in re.findall(r'<a [^>]*href="([^"]+)"', text) if "://" not in link]


@pytest.mark.slow
@pytest.mark.skipif(not MKDOCS.exists(), reason="`make docs` has not made its environment")
@pytest.mark.skipif(shutil.which("node") is None, reason="the site's search runs in node, which is not installed")
def test_questions_are_answered_in_two_clicks(tmp_path: Path):
    """The first is on one of the first results, the second on a link there."""
    subprocess.run(
        [MKDOCS, "build", "--quiet", "--site-dir", tmp_path],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=True,
    )
    lines = (SUPPORT / "questions.txt").read_text().splitlines()
    wanted = dict(line.split(" -> ") for line in lines)
    assert len(wanted) == len(lines) == 44
    command = ["node", SUPPORT / "search_site.mjs", tmp_path]
    asked = subprocess.run(command, input="\n".join(wanted), capture_output=True, text=True, check=True)
    found = json.loads(asked.stdout)
    lost = {}
    for question, place in wanted.items():
        results = [shown for page in found[question][:FIRST] for shown in page]
        places, reached = set(place.split(" | ")), set(results).union(*(linked(tmp_path, shown) for shown in results))
        if not places & reached:
            lost[question] = results
    assert len(wanted) - len(lost) >= ANSWERED, lost
