"""How many calls of Python lie between a user's call and the first launch."""

import pytest

from tests.support.trace_calls import traces, until_launch


def test_calls_before_the_first_launch():
    """Each call costs some 50 ns, and is one more thing to read: `python -m tests.support.trace_calls` lists them."""
    found = {name: len(steps) for name, steps in traces().items()}
    assert found["sample"] <= 14
    assert found["update_tensordict_priority"] <= 10


def test_a_trace_without_launch_is_an_error():
    """The test above can't pass because a launcher is no longer recognised."""
    with pytest.raises(AssertionError, match="nothing was launched"):
        until_launch(lambda: None)
