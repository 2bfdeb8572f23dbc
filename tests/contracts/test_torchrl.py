"""Programs give with gpubuf what they give with TorchRL, but for what is listed here.

``make torchrl`` runs all of them on both. Where TorchRL is not installed a few are compared with what it gave.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import warnings
from typing import Any

import pytest

from gpubuf.integrations import torchrl as data
from tests.contracts.torchrl_programs import KEPT, PROGRAMS, RECORD, differences, run, torchrls

BETTER = {
    "story */state": "TorchRL has no state of dicts and tuples",
    "story */folder": "TorchRL saves no rows of dicts and lists that stand beside each other, and no lists of rows",
    "story TensorDict*ListStorage*/r*": "rows that are read carry their index",
    "refused/a negative eps": "it is refused",
    "span 3 1": "TorchRL draws fewer slices that a trajectory's end cuts than span allows",
    "tensorclasses TensorDictReplayBuffer": "TorchRL refuses classes without a field for the index",
    "transform inserted": "functions can be inserted, not only TorchRL's transforms",
}
DIFFERENT = {
    "refused/tensors for TensorDicts": "a TypeError",
    "long edits/set_ too many": "a ValueError",
    "long edits/set_ one row": "a ValueError",
}


def unlisted(name: str, theirs: Any) -> dict[str, Any]:
    """Where a program gives something else with gpubuf, and that is not listed."""
    found = {}
    for place, (own, other) in differences(name, run(name, data), theirs).items():
        if place.endswith("/extend") and len(own) == len(other):
            # The index of rows that are gone at once, of more than the capacity, is -1: TorchRL names others.
            own = [there if here == -1 else here for here, there in zip(own, other, strict=True)]
        if own != other and not any(fnmatch.fnmatchcase(place, pattern) for pattern in (*BETTER, *DIFFERENT)):
            found[place] = own, other
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KEPT)
def test_as_torchrl_did(name: str):
    assert not unlisted(name, json.loads(RECORD.read_text())[name])


@pytest.mark.parametrize(
    "name",
    ["edits", "max_value", "few two_dimensions"],
)
def test_as_torchrl_did_through_the_launchers(name: str, interpreter: None):
    test_as_torchrl_did(f"long {name}")


@pytest.mark.skipif(importlib.util.find_spec("torchrl") is None, reason="TorchRL is not installed: make torchrl")
@pytest.mark.filterwarnings("ignore")
def test_as_torchrl_does():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = torchrls()
    listed, found = set[str](), {}
    for name in PROGRAMS:
        theirs = run(name, library)
        found |= unlisted(name, theirs)
        listed |= set(differences(name, run(name, data), theirs))
    assert not found
    assert not [pattern for pattern in (*BETTER, *DIFFERENT) if not fnmatch.filter(listed, pattern)]
