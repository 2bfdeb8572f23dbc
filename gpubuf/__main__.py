"""``python -m gpubuf``: the same as the ``gpubuf`` command."""

import sys

from gpubuf.cli import main

if __name__ == "__main__":
    sys.exit(main())
