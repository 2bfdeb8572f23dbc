"""``python -m benchmarks.report.migration``: renders docs/migration*.md. With ``--check`` it fails if one is stale."""

import sys

from benchmarks.report.migration.page import comparison, render


def main(arguments: list[str]) -> int:
    """Render the pages, or check them."""
    pages = render()
    _, wrong = comparison()
    for line in wrong:
        print(line, file=sys.stderr)
    if "--check" in arguments:
        return int(any(not page.exists() or page.read_text() != text for page, text in pages.items()))
    for page, text in pages.items():
        page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
