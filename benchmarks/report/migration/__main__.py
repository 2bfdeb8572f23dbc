"""``python -m benchmarks.report.migration``: renders docs/migration.md. With ``--check`` it fails if it is stale."""

import sys

from benchmarks.report.migration.page import PAGE, render, stale_reasons, unexplained


def main(arguments: list[str]) -> int:
    """Render the page, or check it."""
    text = render()
    for line in (*stale_reasons(), *(f"{name}: no reason" for name in unexplained())):
        print(line, file=sys.stderr)
    if "--check" in arguments:
        return int(PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
