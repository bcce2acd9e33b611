"""Names that resolve to lazy factories: importing a table imports none of the things in it.

A table is a dict of `Entry`. Packages outside knowgate add entries through an entry point group.
"""

from __future__ import annotations

import dataclasses
import importlib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from knowgate.errors import BadSetting, MissingExtra, UnknownName


@dataclass(frozen=True)
class RegistryEntry:
    """One line of a table. `target` is "module:attribute"; `extra` is what must be installed, "" for nothing.

    fit: "module:function" that makes it from label runs, for what must be fitted first.
    """

    target: str
    summary: str
    needs: str = ""
    cost: str = ""
    extra: str = ""
    paper: str = ""
    fit: str = ""


def load_entry(table: Mapping[str, RegistryEntry], what: str, name: str, group: str = "", *, also: str = "") -> Any:
    """The object behind `name`: from the table, else from an entry point of `group`. also: what else a name may be."""
    if name in table:
        return load_target(table[name].target, f"{what} '{name}'", table[name].extra)
    outside = find_plugins(group) if group else {}
    if name in outside:
        return load_plugin(outside[name], f"{what} '{name}'")
    raise UnknownName(what, name, [*table, *outside], also=also)


def find_plugins(group: str) -> dict[str, Any]:
    """Entry points that other packages have in this group, by name."""
    from importlib import metadata  # here and not above: it takes 40 ms, and most names are in the table

    return {point.name: point for point in metadata.entry_points(group=group)}


def load_plugin(point: Any, feature: str) -> Any:
    """What an entry point of another package names; a package that cannot be loaded is named in a sentence."""
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise BadSetting(f"{feature}, {point.value}, cannot be loaded: {error}. Check its package.") from error


def load_target(target: str, feature: str, extra: str) -> Any:
    """Import "module:attribute"; a missing third-party package becomes a sentence that names the extra."""
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if extra and not (error.name or "").startswith("knowgate"):
            raise MissingExtra(feature, extra) from error
        raise


def split_spec(spec: str) -> tuple[str, str]:
    """'name:rest' -> (name, rest); rest is '' when there is no colon."""
    name, _, rest = spec.partition(":")
    return name.strip(), rest.strip()


def parse_options(cls: type, text: str, what: str) -> dict[str, Any]:
    """Options written as 'value' (for the first field) or 'key=value,key=value', checked against a dataclass."""
    fields = {item.name: item for item in dataclasses.fields(cls) if item.init}
    hints = typing.get_type_hints(cls)
    options: dict[str, Any] = {}
    for position, part in enumerate(part for part in text.split(",") if part.strip()):
        key, equals, value = part.partition("=")
        if not equals or "://" in key:  # the address of a database or a server may hold parameters of its own
            if position > 0 or not fields:
                raise BadSetting(f"{what}: '{part}' is not key=value. Known options: {_list(fields)}.")
            key, value = next(iter(fields)), part
        key = key.strip()
        if key not in fields:
            raise BadSetting(f"{what}: unknown option '{key}'. Known options: {_list(fields)}.")
        options[key] = _convert(value.strip(), hints[key], f"{what}: option '{key}'")
    return options


def _list(names: Mapping[str, Any]) -> str:
    return ", ".join(names) if names else "none"


def _convert(value: str, hint: Any, where: str) -> Any:
    if isinstance(hint, types.UnionType):
        hint = next(option for option in typing.get_args(hint) if option is not type(None))
    if typing.get_origin(hint) is typing.Literal:
        return _one_of(value, typing.get_args(hint), where)
    if hint is bool:
        return _one_of(value.lower(), ("true", "false"), where) == "true"
    if hint in (int, float):
        try:
            return hint(value)
        except ValueError:
            raise BadSetting(f"{where} must be a number, not '{value}'.") from None
    return value


def _one_of(value: str, allowed: tuple[str, ...], where: str) -> str:
    if value not in allowed:
        raise BadSetting(f"{where} is '{value}'; allowed: {', '.join(allowed)}.")
    return value
