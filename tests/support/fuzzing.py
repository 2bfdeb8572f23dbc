"""How many examples Hypothesis tries: a few, the same in every run, and in the nightly fuzz others each time."""

import os

from hypothesis import HealthCheck, settings

#: How many times as many examples, drawn anew. Those that failed are kept in .hypothesis, and are tried first.
FUZZ = int(os.environ.get("GPUBUF_FUZZ", "0"))


def examples(count: int) -> settings:
    """The settings of a property that ``count`` examples show in an ordinary run."""
    common = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    if FUZZ:
        # The blob in the message of a failure makes that example again, on any machine.
        return settings(common, max_examples=count * FUZZ, print_blob=True)
    return settings(common, max_examples=count, derandomize=True, database=None)
