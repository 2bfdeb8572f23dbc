"""Compares TorchRL's names with gpubuf's, and renders docs/migration.md and the two pages of tables beside it."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpubuf.data
import gpubuf.objectives
from benchmarks.report.migration.signatures import REQUIRED, Member, Name, described
from gpubuf import missing_names

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


@dataclass(frozen=True)
class Reason:
    """Why a name or an item is not the same.

    Attributes:
        state: one of ``STATES``.
        why: one sentence or two.
        probe: a call that raises while the reason holds, for an argument that is accepted at its default only.
        whole: the sentence says it for all members of the class, and they are not listed.
    """

    state: str
    why: str
    probe: str = ""
    whole: bool = False


@dataclass
class Compared:
    """A name of TorchRL's, and how it is here. Items are members, arguments, and arguments of members."""

    name: str
    area: str
    state: str
    why: str = ""
    found: bool = False
    same: list[str] = field(default_factory=list)
    others: dict[str, Reason] = field(default_factory=dict)


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
    found = {name: Reason("missing", sentence(text)) for name, text in missing_names.DATA.items()}
    found["area objectives"] = Reason("missing", sentence(missing_names.OTHER_OBJECTIVES))
    found["losses"] = Reason("missing", sentence(missing_names.OBJECTIVES))
    for name, entry in by_hand.items():
        found[name] = Reason(**{"why": found[name].why if name in found else "", **entry})
    return found


def own_names() -> dict[str, Any]:
    """gpubuf's public names in the same modules."""
    return {name: getattr(module, name) for module in (gpubuf.data, gpubuf.objectives) for name in module.__all__}


def items_of(entry: Name) -> Iterator[tuple[str, str]]:
    """Every item of a class with the default of an argument, or nothing. A member comes before its arguments."""
    for name, default in entry.get("args", {}).items():
        yield f"({name})", default
    for name, member in entry.get("members", {}).items():
        yield f".{name}", ""
        for argument, default in member.get("args", {}).items():
            yield f".{name}({argument})", default


def automatic(theirs: Member, own: Member, argument: str, item: str) -> Reason | None:
    """The difference of one argument of a method, or of a constructor, if there is one."""
    default, found = theirs["args"][argument], own.get("args", {})
    if argument in found:
        if found[argument] == default:
            return None
        here = "required" if found[argument] == REQUIRED else f"`{found[argument]}`"
        there = "required" if default == REQUIRED else f"`{default}`"
        return Reason("different", f"Default here: {here}; there: {there}.")
    if own.get("passes_on"):
        return None
    position = list(theirs["args"]).index(argument)
    at_position = list(found)[position : position + 1]
    if default == REQUIRED and item.startswith(".") and at_position and at_position[0] not in theirs["args"]:
        return Reason("different", f"Named `{at_position[0]}` here: pass it by position.")
    return Reason("missing", "")


def compared(name: str, entry: Name, value: Any, written: dict[str, Reason]) -> Compared:
    """A name that both have, item by item."""
    found = Compared(name, entry["area"], "same", found=True)
    own = described(value, "gpubuf", set())
    theirs: dict[str, Member] = {"": {"args": entry.get("args", {})}, **entry.get("members", {})}
    ours: dict[str, Member] = {"": {"args": own.get("args", {})}, **own.get("members", {})}
    bases = (name, *entry.get("bases", ()))
    for item, _ in items_of(entry):
        member, _, argument = item.removeprefix(".").rstrip(")").partition("(")
        exists = member in ours or hasattr(value, member)
        if argument and not exists:
            continue  # said once, for the member
        difference = None if exists else Reason("missing", "")
        if argument and ours.get(member, {}).get("kind", "method") == "method" and member in ours:
            difference = automatic(theirs[member], ours[member], argument, item)
        by_hand = next((written[f"{base}{item}"] for base in bases if f"{base}{item}" in written), None)
        if by_hand is None and difference is not None and not difference.why:
            by_hand = next((written[f"{base}.*"] for base in bases if f"{base}.*" in written), None)
        if by_hand is not None or difference is not None:
            found.others[item] = by_hand or difference  # type: ignore[assignment]
        else:
            found.same.append(item)
    reason = written.get(name)
    if reason is not None:
        found.state, found.why = reason.state, reason.why
        if reason.whole:
            found.same, found.others = [], {}
    elif any(reason.state in ("different", "missing") for reason in found.others.values()):
        found.state = "different"
    elif any(reason.state == "better" for reason in found.others.values()):
        found.state = "better"
    return found


def comparison() -> list[Compared]:
    """Every name of TorchRL's."""
    own, written = own_names(), reasons()
    found = []
    for name, entry in recorded()["names"].items():
        if name in own:
            found.append(compared(name, entry, own[name], written))
        else:
            area = "losses" if name.endswith("Loss") else f"area {entry['area']}"
            reason = written.get(name) or written.get(area) or Reason("missing", "")
            found.append(Compared(name, entry["area"], reason.state, reason.why))
    return found


def stale_reasons() -> list[str]:
    """Reasons for names that TorchRL has no more, and those that call missing what is here."""
    names, own = recorded()["names"], own_names()
    known = {f"area {entry['area']}" for entry in names.values()} | set(names) | {"losses"}
    known |= {f"{name}.*" for name, entry in names.items() if "members" in entry}
    known |= {f"{name}{item}" for name, entry in names.items() for item, _ in items_of(entry)}
    here = set(own) | {
        f"{name}{item}" for name, value in own.items() for item, _ in items_of(described(value, "gpubuf", set()))
    }
    stale = []
    for key, reason in reasons().items():
        if key not in known:
            stale.append(f"{key}: TorchRL has no such name")
        elif reason.state not in STATES:
            stale.append(f"{key}: {reason.state} is no state")
        elif reason.state == "missing" and not reason.probe and key in here:
            stale.append(f"{key}: it is here, so it is not missing")
    return stale


def unexplained() -> list[str]:
    """Names and items that are not the same, with no sentence that says why."""
    found = []
    for each in comparison():
        if each.state != "same" and not each.why and not each.found and not each.area.startswith("other: "):
            found.append(each.name)
        found += [f"{each.name}{item}" for item, reason in each.others.items() if not reason.why]
    return found


# Rendering


def code(item: str) -> str:
    """An item as the page shows it: constructor arguments without parentheses."""
    shown = item.removeprefix(".")
    return f"`{shown[1:-1]}=`" if shown.startswith("(") else f"`{shown}`"


def table(rows: list[list[str]]) -> str:
    """A Markdown table of names."""
    head = "| name | state | |\n| --- | --- | --- |\n"
    return head + "\n".join("| " + " | ".join(row) + " |" for row in rows)


def differences(others: dict[str, Reason]) -> str:
    """The table of what differs in one class: items of one state and reason together."""
    together: dict[tuple[str, str], list[str]] = {}
    for item, reason in sorted(others.items(), key=lambda pair: (STATES.index(pair[1].state), pair[0])):
        together.setdefault((reason.state, reason.why), []).append(code(item))
    return table([[", ".join(items), *reason] for reason, items in together.items()])


def told(each: Compared) -> str:
    """The sentence of a class that nothing was written about: how many of its items are the same."""
    if not each.same and not each.others:
        return ""
    total = len(each.same) + len(each.others)
    same = len(each.same) + sum(reason.state in ("same", "better") for reason in each.others.values())
    which = f"All {total}" if same == total else f"{same} of {total}"
    return f"{which} arguments and members are the same."


def counts(found: list[Compared]) -> str:
    """How many names are in which state."""
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
    found, data = comparison(), recorded()
    listed = [each for each in found if not each.area.startswith("other: ")]
    inside = [each for each in listed if each.found]
    items = [Compared("", "", reason.state) for each in inside for reason in each.others.values()]
    items += [Compared("", "", "same") for each in inside for _ in each.same]
    by_name = {each.name: each for each in found}
    summary = (
        f"TorchRL {data['version']} has {len(listed)} public names for replay buffers and losses: {counts(listed)}. Of "
        f"the {len(items)} arguments and members of the {len(inside)} names that are here too: {counts(items)}. "
        "*Missing* means an error, never another result."
    )
    names = {}
    for title, areas in PARTS.items():
        rows = [[f"`{each.name}`", each.state, each.why or told(each)] for each in listed if each.area in areas]
        names[title] = table(rows)
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
        above = [by_name[base] for base in data["names"][each.name].get("bases", ()) if base in by_name]
        said = {item: reason for base in above for item, reason in base.others.items()}
        others = {item: reason for item, reason in each.others.items() if said.get(item) != reason}
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
