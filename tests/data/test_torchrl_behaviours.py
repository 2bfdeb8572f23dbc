"""What TorchRL's own tests look at: gpubuf's classes give the same facts, but for those that are listed here.

TorchRL's facts are recorded: tests/support/torchrl_behaviours/record.py.
"""

from __future__ import annotations

import fnmatch
import functools
from typing import Any

import pytest
import torch

from gpubuf import data
from tests.support.torchrl_behaviours import record
from tests.support.torchrl_behaviours.asking import as_recorded, same

RECORDED = record.recorded()
GROUPS = [(area, group) for area, groups in RECORDED.items() for group in groups]

GONE = "buffers/* RoundRobinWriter 3/extend"
BETTER = {
    GONE: "the index of rows that are gone at once, of more than the capacity, is -1: TorchRL's names others",
    "buffers/* LazyMemmapStorage */pickle": "TorchRL's files can't be pickled",
    "storages/TensorStorage/state of tree": "TorchRL has no state of dicts and tuples",
    "storages/TensorStorage/memmap on a GPU": "TorchRL asserts that there is a GPU before it refuses it",
    "storages/states/folder in use, existsok": "the rows that are in the folder stay, and new ones come behind them",
    "storages/states/folder of LazyTensorStorage, * begun: False": "a folder is read before the first write, too",
    "others/dimensions/TensorDict* tensordict 2": "rows that are read carry both coordinates of their index",
    "samplers/priorities/bad eps*": "a negative eps is refused",
    "samplers/priorities/bad reduction*": "an unknown reduction is refused",
    "samplers/slices/span 3*": "TorchRL draws fewer slices that a trajectory's end cuts than span allows",
    "samplers/slices/span ?4, 4?*": "as for span 3",
    "samplers/slices/refused: two flags a row": "a row of several flags ends where any of them is set",
    "samplers/epochs/drop_last needs a size": "sample(n) and an epoch of the batch size given later work",
    "others/transforms/inserted*": "functions can be inserted, not only TorchRL's transforms",
    "others/ensembles/iterated": "TorchRL's batches have no one size to iterate with",
}
DIFFERENT = {
    "buffers/ReplayBuffer *tensordict *TensorDictMaxValueWriter *add": "TorchRL's add stores an index, its extend none",
    "buffers/* TensorDictMaxValueWriter *index": "rows that are read carry their index",
    "storages/* in place/new key": "the first write lays out a row: later ones have its keys",
    "storages/*/ragged stack": "rows have one shape: a ListStorage takes others",
    "samplers/priorities/before the storage": "the priorities wait for a storage, whose size the tree takes",
    "samplers/slices/refused: no flag": "a KeyError",
    "others/default parts/tensors for TensorDicts": "a TypeError",
    "others/ensembles/*": "batches are flat, and p are shares of each: see ReplayBufferEnsemble",
}


@functools.cache
def ours(area: str) -> Any:
    torch.manual_seed(0)
    return as_recorded(record.AREAS[area](data))


@functools.cache
def differing(area: str, group: str) -> tuple[str, ...]:
    """The facts of a group that are not TorchRL's."""
    found, theirs = ours(area)[group], RECORDED[area][group]
    assert found.keys() == theirs.keys()
    return tuple(f"{area}/{group}/{fact}" for fact in theirs if not same(found[fact], theirs[fact]))


@pytest.mark.parametrize(("area", "group"), GROUPS, ids=["-".join(group).replace(" ", "_") for group in GROUPS])
def test_facts(area: str, group: str):
    listed = [*BETTER, *DIFFERENT]
    unlisted = [fact for fact in differing(area, group) if not any(fnmatch.fnmatchcase(fact, name) for name in listed)]
    assert not unlisted, {fact: ours(area)[group][fact.split("/", 2)[2]] for fact in unlisted}


def test_only_the_index_of_rows_that_are_gone_differs():
    found = [
        (ours(area)[group]["extend"], RECORDED[area][group]["extend"])
        for area, group in GROUPS
        if fnmatch.fnmatchcase(f"{area}/{group}/extend", GONE)
    ]
    assert found
    for (index, *own), (theirs, *others) in found:
        assert (index, theirs, own) == ([-1, -1, *theirs[2:]], [0, 1, 2, 0, 1], others)


def test_the_lists_are_of_what_differs():
    found = [fact for area, group in GROUPS for fact in differing(area, group)]
    assert not [name for name in [*BETTER, *DIFFERENT] if not fnmatch.filter(found, name)]
