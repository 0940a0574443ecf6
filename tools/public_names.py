"""Says how many of the names that custom-node packs import exist here, and which do not.

The record, tests/public_names/names.json, was made from 129 public packs: module -> name -> number
of packs that use it, what breaks without it (`load`: the pack does not load; `listing`: its nodes
are not listed; `run`: a node fails), and for functions the parameter names that must be accepted
and the ways packs call them: `2p+crop=` is two positional arguments and the keyword `crop`. Names
with a dot are members of classes; the object itself is not counted among the arguments.

    python -m tools.public_names             # coverage by module
    python -m tools.public_names --missing   # every gap as well
    python -m tools.public_names --update    # rewrite the list of known gaps that a test allows
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "public_names"
NEEDS = ("load", "listing", "run")
NO_MODULE = "no such module"
BROKEN = "does not import"

Names = dict[str, dict[str, dict[str, Any]]]


@dataclass(frozen=True)
class Gap:
    """A name that is not there as packs expect it.

    Attributes:
        module, name: What packs import and use; the name is empty for a module without names.
        need: What breaks without it: `load`, `listing` or `run`.
        packs: How many packs use it.
        reason: What is wrong.
    """

    module: str
    name: str
    need: str
    packs: int
    reason: str


def recorded_names() -> Names:
    """The record: module -> name -> facts."""
    names: Names = json.loads((FOLDER / "names.json").read_text(encoding="utf-8"))
    return names


def known_gaps() -> dict[str, list[str]]:
    """Module -> names that are known to be missing."""
    gaps: dict[str, list[str]] = json.loads((FOLDER / "missing.json").read_text(encoding="utf-8"))
    return gaps


def gaps_of(module: str, names: Mapping[str, Mapping[str, Any]]) -> list[Gap]:
    """What is missing of one module."""
    entries = names or {"": {"packs": 1, "need": "load"}}
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        is_absent = bool(error.name) and f"{module}.".startswith(f"{error.name}.")
        reason = NO_MODULE if is_absent else f"{BROKEN}: {error}"
        return [
            Gap(module, name, facts["need"], facts["packs"], reason)
            for name, facts in entries.items()
        ]
    gaps = []
    for name, facts in names.items():
        reason = problem(found, name, facts)
        if reason:
            gaps.append(Gap(module, name, facts["need"], facts["packs"], reason))
    return gaps


def problem(module: Any, name: str, facts: Mapping[str, Any]) -> str:
    """Why a dotted name of a module does not serve; empty if it does."""
    owner = found = module
    for part in name.split("."):
        if not hasattr(found, part):
            return f"no {part}"
        owner, found = found, getattr(found, part)
    if not callable(found):
        return ""
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # built-in functions and enumerations tell nothing
        return ""
    lacking = lacking_parameters(signature, facts.get("parameters", ()))
    if lacking:
        return f"lacks the parameters {', '.join(lacking)}"
    own = int(_takes_self(owner, name.rsplit(".", 1)[-1]))
    refused = [form for form in facts.get("calls", ()) if not accepts_call(signature, form, own)]
    return f"cannot be called as {' or '.join(refused)}" if refused else ""


def lacking_parameters(signature: inspect.Signature, parameters: Iterable[str]) -> list[str]:
    """The named parameters that a function does not accept."""
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return []
    return [
        name for name in parameters if not name.startswith("*") and name not in signature.parameters
    ]


def accepts_call(signature: inspect.Signature, form: str, own: int) -> bool:
    """Whether a function can be called in a form such as `2p+crop=`.

    Args:
        own: Positional arguments on top of those of the form, for the object of a method.
    """
    positional = re.match(r"(\d+)p", form)
    count = own + (int(positional.group(1)) if positional else 0)
    try:
        signature.bind(*[None] * count, **dict.fromkeys(re.findall(r"(\w+)=", form)))
    except TypeError:
        return False
    return True


def _takes_self(owner: Any, name: str) -> bool:
    """Whether a function found on a class expects the object as its first argument."""
    if not inspect.isclass(owner) or isinstance(inspect.getattr_static(owner, name), staticmethod):
        return False
    return inspect.isfunction(getattr(owner, name))


def make_server() -> None:
    """Makes the server object whose members packs use; it opens no port."""
    from server import PromptServer

    loop = asyncio.new_event_loop()
    PromptServer(loop)
    loop.close()


def all_gaps(names: Names) -> dict[str, list[Gap]]:
    """Module -> what is missing of it, modules without gaps left out."""
    make_server()
    found = {module: gaps_of(module, entries) for module, entries in names.items()}
    return {module: gaps for module, gaps in found.items() if gaps}


def forgivable(gaps: Mapping[str, list[Gap]]) -> dict[str, list[str]]:
    """Module -> names that do not exist yet; a module that fails to import is never forgiven."""
    names = {
        module: sorted(gap.name for gap in found if not gap.reason.startswith(BROKEN))
        for module, found in gaps.items()
    }
    return {module: found for module, found in names.items() if found}


def summary(names: Names, gaps: Mapping[str, list[Gap]]) -> list[str]:
    """Coverage as lines of text: by need, then by module, most used first."""
    lines = []
    everything = [facts["need"] for entries in names.values() for facts in entries.values()]
    missing = [gap.need for found in gaps.values() for gap in found if gap.name]
    for need in NEEDS:
        total, lacking = everything.count(need), missing.count(need)
        lines.append(f"{need:8} {total - lacking:4} of {total:4} names")
    absent = sum(_is_absent(gaps, module) for module in names)
    lines.append(f"modules  {len(names) - absent:4} of {len(names):4}")
    lines.append("")
    for module in sorted(names, key=lambda name: -_reach(names[name])):
        total = max(1, len(names[module]))
        lines.append(f"{total - len(gaps.get(module, ())):4} of {total:4}  {module}")
    return lines


def _is_absent(gaps: Mapping[str, list[Gap]], module: str) -> bool:
    return any(gap.reason == NO_MODULE for gap in gaps.get(module, ()))


def _reach(entries: Mapping[str, Mapping[str, Any]]) -> int:
    return max((facts["packs"] for facts in entries.values()), default=1)


def main() -> None:
    """Prints the coverage; see the module's docstring for the options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0] if __doc__ else "")
    parser.add_argument("--missing", action="store_true", help="list every gap")
    parser.add_argument("--update", action="store_true", help="rewrite the list of known gaps")
    options = parser.parse_args()
    names = recorded_names()
    gaps = all_gaps(names)
    print("\n".join(summary(names, gaps)))
    if options.missing:
        for gap in sorted((g for found in gaps.values() for g in found), key=lambda g: -g.packs):
            print(f"{gap.need:8} {gap.packs:3}  {gap.module}.{gap.name}: {gap.reason}")
    if options.update:
        text = json.dumps(forgivable(gaps), indent=1, sort_keys=True)
        (FOLDER / "missing.json").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(FOLDER.parent.parent))
    main()
