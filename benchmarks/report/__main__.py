"""``python -m benchmarks.report``: writes the figures of the newest results into the pages."""

import sys

from benchmarks.report.write import main

sys.exit(main())
