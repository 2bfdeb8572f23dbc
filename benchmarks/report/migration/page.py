"""Compares TorchRL's names with gpubuf's, and renders docs/migration.md and the two pages of tables beside it."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpubuf.data
import gpubuf.objectives
from benchmarks.report.migration.signatures import REQUIRED, Entry, described
from gpubuf import missing_names
from gpubuf.integrations import torchrl

HERE = Path(__file__).parent
DOCS = HERE.parents[2] / "docs"
#: How to switch; every name; what differs in those that both have.
PAGE, NAMES, ARGUMENTS = DOCS / "migration.md", DOCS / "migration-names.md", DOCS / "migration-arguments.md"
STATES = ("same", "better", "different", "missing")
#: The parts of the page: their heading, and the areas that each lists.
PARTS = {
    "Buffers": ("replay_buffers", "her", "offline_to_online", "ray_buffer"),
    "Storages": ("storages",),
    "Samplers": ("samplers",),
    "Writers": ("writers",),
    "Sample units and transforms": ("sample_units", "transforms"),
    "Checkpointers, queries and data formats": ("checkpointers", "query", "utils"),
    "Losses and updates of targets": ("objectives",),
    "Value estimators": ("values",),
}


@dataclass
class Reason:
    """Why a name or an item is not the same.

    Attributes:
        state: one of ``STATES``.
        why: one sentence or two.
        probe: a call that raises while the reason holds, for an argument that is accepted at its default only.
        whole: the sentence says it for all members of the class, and they are not listed.
        used: something is as it says; else it is stale.
    """

    state: str
    why: str
    probe: str = ""
    whole: bool = False
    used: bool = False


@dataclass
class Compared:
    """A name of TorchRL's, and how it is here. Items are members, arguments, and arguments of members."""

    name: str
    area: str
    state: str
    why: str = ""
    found: bool = False
    items: dict[str, Reason] = field(default_factory=dict)


#: Of an item that nothing has to be said about.
SAME = Reason("same", "")


def recorded() -> dict[str, Any]:
    """TorchRL's names."""
    return dict(json.loads((HERE / "torchrl.json").read_text()))


#: Calls, dotted names, names with capitals inside or with underscores.
_NAMES = re.compile(r"\b(?:\w+=)?[\w.]+\([^()]*\)|\b\w+(?:\.\w+)+|\b[A-Z]\w*[a-z][A-Z]\w*|\b\w+_\w+")


def sentence(text: str) -> str:
    """What follows a colon in a message, as a sentence of the page, with names of gpubuf's and TorchRL's as code."""
    text = _NAMES.sub(lambda found: found[0] if found[0] == "TorchRL" else f"`{found[0]}`", text)
    return text[0].upper() + text[1:] + "."


def reasons() -> dict[str, Reason]:
    """What was written by hand, by name (``ReplayBuffer``), item (``ReplayBuffer.sample(batch_size)``) or area."""
    by_hand = tomllib.loads((HERE / "reasons.toml").read_text())
    gone = missing_names.DATA.keys() - set(torchrl.__all__)
    found = {name: Reason("missing", sentence(missing_names.DATA[name])) for name in sorted(gone)}
    found["area objectives"] = Reason("missing", sentence(missing_names.OTHER_OBJECTIVES))
    found["losses"] = Reason("missing", sentence(missing_names.OBJECTIVES))
    for name, entry in by_hand.items():
        found[name] = Reason(**{"why": found[name].why if name in found else "", **entry})
    return found


def items_of(entry: Entry) -> Iterator[str]:
    """Every item of a class. A member comes before its arguments."""
    yield from (f"({name})" for name in entry.get("args", {}))
    for name, member in entry.get("members", {}).items():
        yield f".{name}"
        yield from (f".{name}({argument})" for argument in member.get("args", {}))


def automatic(theirs: Entry, own: Entry, argument: str) -> Reason | None:
    """The difference of one argument of a method, or of a constructor, if there is one."""
    default, found = theirs["args"][argument], own.get("args", {})
    if argument in found:
        if found[argument] == default:
            return None
        here, there = (each if each == REQUIRED else f"`{each}`" for each in (found[argument], default))
        return Reason("different", f"Default here: {here}; there: {there}.")
    if own.get("passes_on"):
        return None
    position = list(theirs["args"]).index(argument)
    at_position = list(found)[position : position + 1]
    if default == REQUIRED and theirs["kind"] == "method" and at_position and at_position[0] not in theirs["args"]:
        return Reason("different", f"Named `{at_position[0]}` here: pass it by position.")
    return Reason("missing", "")


def compared(name: str, entry: Entry, value: Any, written: dict[str, Reason]) -> Compared:
    """A name that both have, item by item."""
    found = Compared(name, entry["area"], "same", found=True)
    theirs, ours = ({"": each, **each.get("members", {})} for each in (entry, described(value, "gpubuf", set())))
    bases = (name, *entry.get("bases", ()))
    for item in items_of(entry):
        member, _, argument = item.removeprefix(".").rstrip(")").partition("(")
        exists = member in ours or hasattr(value, member)
        if argument and not exists:
            continue  # said once, for the member
        difference = None if exists else Reason("missing", "")
        if argument and ours.get(member, {}).get("kind") in ("method", "class"):
            difference = automatic(theirs[member], ours[member], argument)
        keys = [f"{base}{item}" for base in bases]
        if difference is not None and not difference.why:
            keys += [f"{base}.*" for base in bases]
        by_hand = next((written[key] for key in keys if key in written), None)
        found.items[item] = by_hand or difference or SAME
        if by_hand is not None:
            # What is there is not missing, unless it is refused.
            gone = difference is not None and difference.state == "missing"
            by_hand.used |= by_hand.state != "missing" or bool(by_hand.probe) or gone
    states = {each.state for each in found.items.values()}
    if name in written:
        reason = written[name]
        reason.used = reason.state != "missing"
        found.state, found.why = reason.state, reason.why
        if reason.whole:
            found.items = {}
    elif states & {"different", "missing"}:
        found.state = "different"
    elif "better" in states:
        found.state = "better"
    return found


def comparison() -> tuple[list[Compared], list[str]]:
    """Every name of TorchRL's; and which reasons are stale or missing, a line for each."""
    modules = gpubuf.data, gpubuf.objectives, torchrl
    own = {name: getattr(torchrl, name) for module in modules for name in module.__all__}
    written, found, wrong = reasons(), [], []
    for name, entry in recorded()["names"].items():
        if name in own:
            found.append(compared(name, entry, own[name], written))
            wrong += [
                f"{name}{item}: no reason"
                for item, reason in found[-1].items.items()
                if reason is not SAME and not reason.why
            ]
            continue
        area = "losses" if name.endswith("Loss") else f"area {entry['area']}"
        reason = written.get(name) or written.get(area) or Reason("missing", "")
        reason.used = True
        found.append(Compared(name, entry["area"], reason.state, reason.why))
        if not reason.why and not entry["area"].startswith("other: "):
            wrong.append(f"{name}: no reason")
    wrong += [f"{key}: its reason is stale" for key, reason in written.items() if not reason.used]
    return found, wrong


# Rendering


def code(item: str) -> str:
    """An item as the page shows it: constructor arguments without parentheses."""
    shown = item.removeprefix(".")
    return f"`{shown[1:-1]}=`" if shown.startswith("(") else f"`{shown}`"


def table(rows: list[list[str]]) -> str:
    """A Markdown table of names."""
    head = "| name | state | |\n| --- | --- | --- |\n"
    return head + "\n".join("| " + " | ".join(row) + " |" for row in rows)


def differences(items: dict[str, Reason]) -> str:
    """The table of what differs in one class: items of one state and reason together."""
    together: dict[tuple[str, str], list[str]] = {}
    for item, reason in sorted(items.items(), key=lambda pair: (STATES.index(pair[1].state), pair[0])):
        together.setdefault((reason.state, reason.why), []).append(code(item))
    return table([[", ".join(items), *reason] for reason, items in together.items()])


def told(each: Compared) -> str:
    """The sentence of a class that nothing was written about: how many of its items are the same."""
    total, same = len(each.items), sum(reason.state in ("same", "better") for reason in each.items.values())
    which = f"All {total}" if same == total else f"{same} of {total}"
    return f"{which} arguments and members are the same." if total else ""


def counts(found: Sequence[Compared | Reason]) -> str:
    """How many names, or items, are in which state."""
    of_each = {state: sum(each.state == state for each in found) for state in STATES}
    return ", ".join(f"{count} {state}" for state, count in of_each.items() if count)


def pointers(page: Path, headings: list[str]) -> str:
    """Links to the sections of another page, which keep the anchors that they had on this one."""
    links = []
    for heading in headings:
        anchor = re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")
        links.append(f'- <a id="{anchor}"></a>[{heading}]({page.name}#{anchor})')
    return "\n".join(links)


def render() -> dict[Path, str]:
    """The pages."""
    (found, _), data = comparison(), recorded()
    listed = [each for each in found if not each.area.startswith("other: ")]
    inside = [each for each in listed if each.found]
    items = [reason for each in inside for reason in each.items.values()]
    by_name = {each.name: each for each in found}
    summary = (
        f"TorchRL {data['version']} has {len(listed)} public names for replay buffers and losses: {counts(listed)}. Of "
        f"the {len(items)} arguments and members of the {len(inside)} names that are here too: {counts(items)}. "
        "*Missing* means an error, never another result."
    )
    names = {
        title: table([[f"`{each.name}`", each.state, each.why or told(each)] for each in listed if each.area in areas])
        for title, areas in PARTS.items()
    }
    other: dict[str, list[str]] = {}
    for each in found:
        if each not in listed:
            other.setdefault(each.area.removeprefix("other: "), []).append(f"`{each.name}`")
    lines = "\n".join(f"- {area}: {', '.join(sorted(of_area))}" for area, of_area in sorted(other.items()))
    names["The rest of `torchrl.data`"] = (
        "These names have nothing to do with buffers. Import them from TorchRL; what they do works with gpubuf's "
        f"buffers as with TorchRL's.\n\n{lines}"
    )
    arguments = {}
    for each in inside:
        bases = [by_name[base] for base in data["names"][each.name].get("bases", ()) if base in by_name]
        said = {item: reason for base in bases for item, reason in base.items.items() if reason is not SAME}
        others = {item: reason for item, reason in each.items.items() if reason not in (SAME, said.get(item))}
        if others:
            arguments[f"`{each.name}`"] = differences(others)
    introduction = (HERE / "introduction.md").read_text().strip()
    differing = "Of the classes that both have; all other arguments and members are the same."
    parts = {
        PAGE: [
            introduction,
            f"## Every name\n\n{summary}",
            pointers(NAMES, list(names)),
            f"## Arguments and members that differ\n\n{differing}",
            pointers(ARGUMENTS, list(arguments)),
        ],
        NAMES: [
            "# Every name of TorchRL",
            f"{summary} [How to switch](migration.md) is a page of its own; it is generated, as this one is.",
            *(f"## {title}\n\n{text}" for title, text in names.items()),
        ],
        ARGUMENTS: [
            "# Arguments that differ from TorchRL's",
            f"{differing} A class has what its base has, and only what differs from that is listed for it. "
            "[Every name of TorchRL](migration-names.md) has the names that are missing as a whole.",
            *(f"## {title}\n\n{text}" for title, text in arguments.items()),
        ],
    }
    return {page: "\n\n".join(text) + "\n" for page, text in parts.items()}
