"""The reference: what `knowgate` and the faces of its packages list in `__all__`. mkdocstrings writes each entry.

Reads the source only: nothing is imported, so the documentation can be built without torch.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable

import griffe
from tests.support import house

from docs.from_code.tables import code, table

HEADINGS = {"function": "Functions", "class": "Classes"}
HIDDEN = {"cli"}  # its reference is the page on the command line
SHORT = 70  # characters of a value that are shown
READ: dict[str, griffe.Object | griffe.Alias] = {}


def public_names() -> str:
    """Everything in `knowgate.__all__`."""
    return _described("knowgate", handed_on())


def handed_on() -> list[str]:
    """The names of `knowgate` itself."""
    return sorted(house.handed_on("."))


def packages() -> list[str]:
    """Packages whose face hands something on, from the bottom of the house to the top."""
    known = [part for parts in house.LEVELS for part in parts if part in house.packages() - HIDDEN]
    return [name for name in known if house.handed_on(name)]


def package_page(name: str) -> str:
    """What a face says of itself and hands on; what `knowgate` hands on from it is described there."""
    names = sorted(house.handed_on(name))
    shared = [one for one in names if one in handed_on() and one in _taken_from(name)]
    borrowed = [one for one in names if one not in shared and _is_borrowed(name, one)]
    lines = [f"# knowgate.{name}", _docstring(name)]
    if shared:
        links = ", ".join(f"[`{one}`][knowgate.{one}]" for one in shared)
        lines.append(f"Also handed on by `knowgate`, and described there: {links}.")
    if borrowed:
        lines.append(f"From other packages: {', '.join(map(code, borrowed))}.")
    own = [one for one in names if one not in {*shared, *borrowed}]
    return "\n\n".join([*lines, _described(f"knowgate.{name}", own)])


def _is_borrowed(package: str, name: str) -> bool:
    target = target_of(f"knowgate.{package}.{name}")
    return target is not None and house.part_of(target.path) != package


def _taken_from(package: str) -> set[str]:
    """Names that `knowgate` takes from this package."""
    here = house.imports(house.SOURCE / "__init__.py")
    return {one.name for one in here if one.target == f"knowgate.{package}"}


def _docstring(package: str) -> str:
    return ast.get_docstring(house.tree(house.SOURCE / package / "__init__.py")) or ""


def _described(prefix: str, names: Iterable[str]) -> str:
    """Functions and classes in full, everything else in a table."""
    found = {name: target_of(f"{prefix}.{name}") for name in names}
    parts = []
    for kind, heading in HEADINGS.items():
        entries = [_entry(f"{prefix}.{name}", target) for name, target in found.items() if _kind(target) == kind]
        parts += [f"## {heading}", *entries] if entries else []
    rows = [(code(name), code(_value(target))) for name, target in found.items() if _kind(target) not in HEADINGS]
    parts += ["## Values", table(("name", "value"), rows)] if rows else []
    return "\n\n".join(parts)


def _kind(target: griffe.Object | None) -> str:
    return target.kind.value if target else ""


def _entry(path: str, target: griffe.Object | None) -> str:
    """For mkdocstrings. The fields of a dataclass are in its signature and not listed again."""
    members = [name for name, member in (target.members if target else {}).items() if _is_shown(name, member)]
    return f"::: {path}\n    options:\n      members: {json.dumps(members) if members else 'false'}"


def _is_shown(name: str, member: griffe.Object | griffe.Alias) -> bool:
    in_dataclass = member.parent is not None and "dataclass" in member.parent.labels
    is_field = in_dataclass and member.is_attribute and "property" not in member.labels
    return not name.startswith("_") and not is_field


def _value(target: griffe.Object | None) -> str:
    value = str(getattr(target, "value", None) or "")
    return value if len(value) <= SHORT else f"{value[:SHORT]}..."


def target_of(path: str) -> griffe.Object | None:
    """What a name such as 'knowgate.gates.load_gate' stands for; None where only running tells (`A, B = 1, 2`)."""
    try:
        found = _source()[path.partition(".")[2]]
        return found.final_target if isinstance(found, griffe.Alias) else found
    except (griffe.AliasResolutionError, KeyError):
        return None


def use_source(source: griffe.Object | griffe.Alias) -> None:
    """What somebody has read already."""
    READ["knowgate"] = source


def _source() -> griffe.Object | griffe.Alias:
    if "knowgate" not in READ:
        READ["knowgate"] = griffe.load("knowgate", search_paths=[house.SOURCE.parent])
    return READ["knowgate"]
