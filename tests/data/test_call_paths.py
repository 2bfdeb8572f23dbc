"""How many calls of Python lie between a user's call and the first launch."""

import pytest

from tests.support.trace_calls import traces, until_launch

#: At most so many calls, in so many files.
LIMITS = {"first extend": (139, 23), "extend": (14, 7), "sample": (10, 7), "update_tensordict_priority": (10, 7)}


def test_calls_before_the_first_launch():
    """Each call costs some 50 ns, each file is one more to read: `python -m tests.support.trace_calls` lists them."""
    found = {name: (len(steps), len({step.file for step in steps})) for name, steps in traces().items()}
    assert all(calls <= LIMITS[name][0] and files <= LIMITS[name][1] for name, (calls, files) in found.items()), found


def test_a_trace_without_launch_is_an_error():
    """The test above can't pass because a launcher is no longer recognised."""
    with pytest.raises(AssertionError, match="nothing was launched"):
        until_launch(lambda: None)
