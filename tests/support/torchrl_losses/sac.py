"""Writes sac.json: what TorchRL's SACLoss says of the cases in sac_cases.py.

Run it where TorchRL 0.14.1 is installed, from the root of the repository:
``python -m tests.support.torchrl_losses.sac``.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import torch

from tests.support.torchrl_losses.sac_cases import CASES

FILE = Path(__file__).with_suffix(".json")
COMMON = {"alpha_init": 0.25, "target_entropy": -1.5}


def outcomes() -> dict[str, object]:
    """For each case the numbers, or the error that TorchRL raises."""
    from torchrl.objectives import SACLoss

    found: dict[str, object] = {}
    for name, case in CASES.items():
        actor, critics, value = case.networks()
        try:
            loss = SACLoss(actor, critics, value, **COMMON | case.options)
            found[name] = case.outcome(loss)
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    return found


def target_entropies() -> dict[str, float | str]:
    """What "auto" makes of specs: TorchRL 1494, 3291, 3292 and 3312."""
    from torchrl.data import Bounded, Composite
    from torchrl.objectives import SACLoss

    case = CASES["plain"]

    def box(*shape: int) -> Bounded:
        return Bounded(-1, 1, shape)

    specs = {
        "leaf": box(4),
        "matrix": box(2, 3),
        "composite": Composite(action=box(4)),
        "batched": Composite(action=box(5, 4), shape=[5]),
        "composite action": Composite(action=Composite(arm=box(3), hand=box(2, 2))),
        "batched composite action": Composite(action=Composite(arm=box(5, 3), hand=box(5, 2), shape=[5]), shape=[5]),
    }
    found: dict[str, float | str] = {}
    for name, spec in specs.items():
        actor, critics, _ = case.networks()
        try:
            found[name] = float(SACLoss(actor, critics, action_spec=spec).target_entropy)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def updaters() -> dict[str, object]:
    """Updates of either library on losses of either."""
    from torchrl import objectives as theirs

    import gpubuf.objectives as ours

    theirs.LossModule.register(ours.LossModule)
    case = CASES["state value"]
    found = {}
    for library in (ours, theirs):
        for updates in (ours, theirs):
            actor, critics, value = case.networks()
            loss = library.SACLoss(actor, critics, value, target_entropy=-1.5)
            updater = updates.SoftUpdate(loss, tau=0.25)
            pairs = [
                (targets.get(path), getattr(loss, name.removeprefix("target_")).get(path))
                for name, targets in loss.named_children()
                if name.startswith("target_")
                for path in targets.keys(True, True)
            ]
            with torch.no_grad():
                for _, source in pairs:
                    source.add_(1.0)
            before = [(target.clone(), source.detach().clone()) for target, source in pairs]
            updater.step()
            after = [target for target, _ in pairs]
            right = all(
                torch.allclose(now, old + 0.25 * (source - old))
                for now, (old, source) in zip(after, before, strict=True)
            )
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loss(case.batch())
            names = library.__name__.partition(".")[0], updates.__name__.partition(".")[0]
            found[f"{names[0]}'s loss, {names[1]}'s update"] = {
                "right": right,
                "warned": any("update" in str(warning.message) for warning in caught),
            }
    return found


def main() -> None:
    import torchrl

    warnings.simplefilter("ignore")
    found = {
        "torchrl": torchrl.__version__,
        "cases": outcomes(),
        "target_entropy": target_entropies(),
        "updaters": updaters(),
    }
    FILE.write_text(json.dumps(found, indent=None, separators=(",", ":")).replace('},"', '},\n"') + "\n")
    for name, outcome in found["cases"].items():
        if "error" in outcome:
            print(name, outcome["error"])
    print(found["target_entropy"])
    print(found["updaters"])


if __name__ == "__main__":
    main()
