"""The page of names: each public name of TorchRL's buffers and losses, and its state here (docs/migration.md).

``record`` runs in TorchRL's environment and writes ``torchrl.json``. ``page`` compares it with gpubuf as it is imported
now, adds the reasons of ``reasons.toml``, and renders the page.
"""
