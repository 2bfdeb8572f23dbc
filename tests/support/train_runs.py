"""Runs of the training loop without a folder, and all that they leave behind."""

import torch

from gpubuf.train.trainer import Trainer


def state_of(trainer):
    """Every tensor that the rest of a run depends on, by a name."""
    found = {}

    def walk(value, name):
        if isinstance(value, torch.Tensor):
            found[name] = value.clone()
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{name}.{key}")
        elif hasattr(value, "items"):
            for key, item in value.items(True, True):
                walk(item, f"{name}.{key}")

    walk(trainer.state_dict(), "")
    return found


def run(config, iterations=20, machine=None):
    """A trainer after so many steps of all environments, and its records. ``machine`` records graphs."""
    records = []
    trainer = Trainer(config, torch.device("cpu"), records.append)
    for _ in range(iterations):
        trainer.advance()
        if machine is not None:
            # Rows are written by address, which the recorder can't see.
            storage = trainer.buffer.storage
            machine.memory = [*storage.columns.parts, *(storage.sharing.sides if storage.sharing else ())]
    return trainer, records
