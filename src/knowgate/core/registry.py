"""Registries: tables that map names to classes and functions, which are imported on first use.

Other packages can add names by entry points (plug-ins).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from knowgate.core.redaction import redact_message, redact_urls
from knowgate.errors import BadSetting, UnknownName, require_extra


@dataclass(frozen=True)
class RegistryEntry:
    """Entry of a registry: where an object is defined, and its description.

    Attributes:
        target: Where the class or function is defined, as "module:attribute".
        summary: One line for lists and help.
        needs: What it needs from the LLM or the data, in words.
        cost: What it costs per question, in words.
        extra: The optional dependency group that it needs, as in knowgate[EXTRA]; empty for none.
        paper: Paper that describes the method; may be empty.
        fit: "module:function" that fits it from label runs; empty if it needs no fitting.
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
        kind: What the entries are, for error messages ("gate").
        name: The name to load.
        group: Entry point group in which other packages register plug-ins; empty if plug-ins are not allowed.
        also: What else is allowed instead of a name, in words, for the error about an unknown name.

    Raises:
        UnknownName: Neither the registry nor a plug-in has the name.
    """
    if name in registry:
        return load_target(registry[name].target, f"{kind} '{name}'", registry[name].extra)
    plugins = find_plugins(group) if group else {}
    if name in plugins:
        return load_plugin(plugins[name], f"{kind} '{name}'")
    raise UnknownName(kind, name, [*registry, *plugins], also=also)


def find_plugins(group: str) -> dict[str, Any]:
    """Return the plug-ins of installed packages, by name."""
    from importlib import metadata  # slow to import (40 ms), and most names are in the registry

    return {point.name: point for point in metadata.entry_points(group=group)}


def load_plugin(point: Any, feature: str) -> Any:
    """Import the object of a plug-in.

    Args:
        point: Entry point of the package.
        feature: How an error names the plug-in, such as "gate 'mine'".
    """
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise BadSetting(f"{feature} ({point.value}) cannot be loaded: {error}. Check the plugin's package.") from error


def load_target(target: str, feature: str, extra: str) -> Any:
    """Import an object that is given as "module:attribute".

    Args:
        target: Module and attribute.
        feature: How an error names the object, such as "gate 'ik'".
        extra: The optional dependency group that the object needs; empty for none.

    Raises:
        MissingExtra: A package of the optional dependency group is not installed.
    """
    module, _, attribute = target.partition(":")
    with require_extra(feature, extra) if extra else contextlib.nullcontext():
        return getattr(importlib.import_module(module), attribute)


def split_spec(spec: str) -> tuple[str, str]:
    """Split 'name:value' into name and value. Without a colon, the value is ''."""
    name, _, value = spec.partition(":")
    return name.strip(), value.strip()


def parse_server_spec(spec: str, form: str, key_variable: str) -> tuple[str, str]:
    """Split a spec 'MODEL@URL' into model and URL.

    Args:
        spec: The spec.
        form: How to write it, for the error: "api:MODEL@URL".
        key_variable: The environment variable of the API key, for the error.

    Raises:
        BadSetting: The spec has another form, or its URL contains a login.
    """
    match = re.fullmatch(r"(\S+?)@(https?://[^/@\s]+(?:/\S*)?)", spec)
    if match is None:
        raise BadSetting(
            f"'{redact_message(redact_urls(spec))}' does not name a model and its server. Write {form}, with an http:// or "
            f"https:// URL without user name and password. Put the API key into the environment variable {key_variable}."
        )
    return match[1], match[2]


def parse_options(cls: type, text: str, where: str) -> dict[str, Any]:
    """Parse the options of a spec into keyword arguments.

    Example: 'mean,window=5' gives {"statistic": "mean", "window": 5}.

    Args:
        cls: The dataclass whose fields are the options.
        text: The options as written in a spec.
        where: How an error names the source, such as "gate 'logprob'".
    """
    names = [field.name for field in dataclasses.fields(cls) if field.init]
    known = ", ".join(names) or "none"
    hints = typing.get_type_hints(cls)
    options: dict[str, Any] = {}
    parts = [part for part in text.split(",") if part.strip()]
    if names and parts and not _has_key(parts[0]):  # the first part may be a value alone, of the first option
        parts[0] = f"{names[0]}={parts[0]}"
    for part in parts:
        key, _, value = map(str.strip, part.partition("="))
        if not _has_key(part):
            raise BadSetting(f"{where}: {part!r} does not have the form key=value. Known options: {known}.")
        if key not in names:
            raise BadSetting(f"{where}: unknown option {key!r}. Known options: {known}.")
        options[key] = _convert(value, hints[key], f"{where}: option '{key}'")
    return options


def _has_key(part: str) -> bool:
    """Return whether a part of a spec has the form key=value. An address may contain '=' itself."""
    key, equals, _ = part.partition("=")
    return bool(equals) and "://" not in key


def _convert(value: str, annotation: Any, where: str) -> Any:
    """Convert the text of an option to the type of its field."""
    if isinstance(annotation, types.UnionType):  # such as `int | None`, where text can only mean the int
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
    """Return the value, or raise BadSetting if the value is not allowed."""
    if value not in allowed:
        raise BadSetting(f"{where} is '{value}'. Use one of: {', '.join(allowed)}.")
    return value
