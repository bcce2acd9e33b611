"""Registries: names that resolve to lazily imported factories, with plug-ins of other packages."""

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
    """One line of a registry.

    Attributes:
        target: Where the factory is, as "module:attribute".
        summary: One line for lists and help.
        needs: What it needs, in words.
        cost: What it costs per question, in words.
        extra: Optional dependencies that must be installed; empty for none.
        paper: Reference.
        fit: For entries that must be fitted: "module:function" that fits one from label runs.
    """

    target: str
    summary: str
    needs: str = ""
    cost: str = ""
    extra: str = ""
    paper: str = ""
    fit: str = ""


def load_entry(registry: Mapping[str, RegistryEntry], kind: str, name: str, group: str = "", *, also: str = "") -> Any:
    """Load the object behind a name, from the registry or from a plug-in.

    Args:
        registry: The entries by name.
        kind: What the entries are, for errors ("gate").
        name: The name to load.
        group: Entry point group of plug-ins; empty if there are none.
        also: What else a name may be, in words, for the error about an unknown name.
    """
    if name in registry:
        return load_target(registry[name].target, f"{kind} '{name}'", registry[name].extra)
    plugins = find_plugins(group) if group else {}
    if name in plugins:
        return load_plugin(plugins[name], f"{kind} '{name}'")
    raise UnknownName(kind, name, [*registry, *plugins], also=also)


def find_plugins(group: str) -> dict[str, Any]:
    """Return the entry points of other packages in a group, by name."""
    from importlib import metadata  # slow to import (40 ms), and most names are in the registry

    return {point.name: point for point in metadata.entry_points(group=group)}


def load_plugin(point: Any, feature: str) -> Any:
    """Load an entry point of another package."""
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise BadSetting(f"{feature}, {point.value}, cannot be loaded: {error}. Check its package.") from error


def load_target(target: str, feature: str, extra: str) -> Any:
    """Import "module:attribute". If a third-party package is missing, the error names the extra to install."""
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if extra and not (error.name or "").startswith("knowgate"):
            raise MissingExtra(feature, extra) from error
        raise


def split_spec(spec: str) -> tuple[str, str]:
    """Split 'name:value' into name and value; the value is empty if there is no colon."""
    name, _, value = spec.partition(":")
    return name.strip(), value.strip()


def parse_options(cls: type, text: str, where: str) -> dict[str, Any]:
    """Parse 'value' (for the first field) or 'key=value,key=value' into keywords for a dataclass.

    Args:
        cls: The dataclass whose fields are the options.
        text: The options as written in a spec.
        where: How an error names the source, such as "gate 'logprob'".
    """
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    hints = typing.get_type_hints(cls)
    known = ", ".join(fields) or "none"
    options: dict[str, Any] = {}
    for position, part in enumerate(part for part in text.split(",") if part.strip()):
        key, equals, value = part.partition("=")
        if not equals or "://" in key:  # an address may contain '=' itself
            if position > 0 or not fields:
                raise BadSetting(f"{where}: '{part}' is not key=value. Known options: {known}.")
            key, value = next(iter(fields)), part
        key = key.strip()
        if key not in fields:
            raise BadSetting(f"{where}: unknown option '{key}'. Known options: {known}.")
        options[key] = _convert(value.strip(), hints[key], f"{where}: option '{key}'")
    return options


def _convert(value: str, annotation: Any, where: str) -> Any:
    """Convert an option's text to the type of its annotation."""
    if isinstance(annotation, types.UnionType):
        annotation = next(kind for kind in typing.get_args(annotation) if kind is not type(None))
    if typing.get_origin(annotation) is typing.Literal:
        return _check_choice(value, typing.get_args(annotation), where)
    if annotation is bool:
        return _check_choice(value.lower(), ("true", "false"), where) == "true"
    if annotation in (int, float):
        try:
            return annotation(value)
        except ValueError:
            raise BadSetting(f"{where} must be a number, not '{value}'.") from None
    return value


def _check_choice(value: str, allowed: tuple[str, ...], where: str) -> str:
    """Return the value if it is allowed; otherwise raise BadSetting."""
    if value not in allowed:
        raise BadSetting(f"{where} is '{value}'; allowed: {', '.join(allowed)}.")
    return value
