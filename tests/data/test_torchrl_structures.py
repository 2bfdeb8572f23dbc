"""Rows of many kinds come back in the structure that TorchRL gives them, by every way of reading them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpubuf import data
from tests.support.torchrl_storages import structures

RECORDED: dict[str, Any] = json.loads(structures.FILE.read_text())
BETTER = {
    # TorchRL loses the batch size of TensorDicts in other containers, and can't be extended by them.
    "TensorDict in a dict": {"extend", "overwrite two", "sample", "slice", "list", "tensor", "all", "storage list"},
    # TorchRL's default collate_fn raises for what it can't stack.
    "texts": {"sample", "info", "slice", "list", "tensor", "all"},
    "numbers": {"sample", "info", "slice", "list", "tensor", "all"},
    "tensors of different shapes": {"sample", "info", "slice", "list", "tensor", "all"},
}
"""Where gpubuf gives something else, on purpose."""


def as_recorded(found: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives it back: lists instead of tuples."""
    plain: dict[str, Any] = json.loads(json.dumps(found, sort_keys=True))
    return plain


@pytest.mark.parametrize("part", ["kinds", "objects"])
def test_structures(part: str):
    ours = as_recorded(getattr(structures, part)(data))
    assert ours.keys() == RECORDED[part].keys()
    for kind, theirs in RECORDED[part].items():
        differ = {way for way in theirs if ours[kind][way] != theirs[way]}
        assert differ == BETTER.get(kind, set()), kind
        assert not any(str(ours[kind][way]).startswith("error") for way in differ)


def test_sets():
    assert as_recorded(structures.sets(data)) == RECORDED["sets"]


def test_the_structure_of_text_and_of_objects_is_ours_to_say():
    found = as_recorded(structures.objects(data))
    assert found["texts"]["sample"] == {"list": ["str"] * 3}
    inside = as_recorded(structures.kinds(data))["TensorDict in a dict"]["sample"]
    assert inside["dict"][0] == ["td", {"TensorDict": [3], "entries": {"a": ["torch.int64", [3]]}}]
