"""Flags of a command, derived from the option model of the library function that it calls.

A command names the model as a parameter; every field becomes a flag:

    def label(data: ..., out: ..., options: LabelOptions) -> None:
        run_label(data, out=out, options=options)

The flag is `--` and the field's name with dashes. A field can say more in `Field(json_schema_extra={...})`:
`flag_name` (instead of the field's name), `flag` ("--mask/--no-mask", or None for no flag), `metavar`, and `panel` (a
heading of the help page).
Fields whose flags are not given stay unset, so that `options.model_fields_set` holds only what was typed.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import annotated_types
import typer
from pydantic.fields import FieldInfo

from knowgate.cli.error_messages import translate_arguments
from knowgate.cli.options import parse_path
from knowgate.core.options import Options
from knowgate.core.validation import MAX_COUNT

FLAG_TYPES = (str, Path, float, int, bool)  # in order of preference, where a field accepts several


def expand_options(function: Callable[..., None]) -> Callable[..., None]:
    """Replace every parameter that is an option model by one flag for each of its fields.

    Commands of the main table are expanded when they are loaded; use it as a decorator for commands of a group.
    """
    signature = inspect.signature(function, eval_str=True)
    models = {name: parameter.annotation for name, parameter in signature.parameters.items() if _is_model(parameter)}
    if not models:
        return function

    def command(**values: Any) -> None:
        for argument, model in models.items():
            flags = {name: values.pop(name) for name in list(model.model_fields) if name in values}
            values[argument] = model(**{name: value for name, value in flags.items() if value is not None})
        function(**values)

    arguments = [parameter for name, parameter in signature.parameters.items() if name not in models]
    flags = [flag for model in models.values() for flag in make_flags(model)]
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in [*arguments, *flags]]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    return command


def make_flags(model: type[Options]) -> list[inspect.Parameter]:
    """Make a typer parameter for each field of an option model that has a flag."""
    flags = {name: get_flag(name, field) for name, field in model.model_fields.items()}
    names = {name: flag.partition("/")[0] for name, flag in flags.items() if flag}
    return [_make_flag(name, model.model_fields[name], str(flags[name]), names) for name in names]


def get_flag(name: str, field: FieldInfo) -> str | None:
    """Return the flag of a field, such as '--max-tokens' or '--mask/--no-mask'; None if it has none."""
    extra = _get_extra(field)
    if "flag" in extra:
        return str(extra["flag"]) if extra["flag"] else None
    flag = str(extra.get("flag_name", name)).replace("_", "-")
    is_switch = _get_flag_type(field.annotation) is bool and not flag.startswith("no-")
    return f"--{flag}/--no-{flag}" if is_switch else f"--{flag}"


def _is_model(parameter: inspect.Parameter) -> bool:
    """Return whether a parameter is annotated with an option model."""
    return isinstance(parameter.annotation, type) and issubclass(parameter.annotation, Options)


def _make_flag(name: str, field: FieldInfo, flag: str, names: Mapping[str, str]) -> inspect.Parameter:
    """Make the typer parameter of one field."""
    extra, flag_type = _get_extra(field), _get_flag_type(field.annotation)
    is_list = _is_list(field.annotation)
    is_number = flag_type in (int, float)
    option = typer.Option(
        flag,
        help=translate_arguments(field.description or "", names) + _format_default(field),
        metavar=extra.get("metavar") or _get_metavar(field.annotation),
        rich_help_panel=extra.get("panel"),
        parser=parse_path if flag_type is Path else None,
        min=_get_bound(field, annotated_types.Ge, "ge") if is_number else None,
        max=_get_bound(field, annotated_types.Le, "le") if is_number else None,
    )
    annotation: Any = list[flag_type] if is_list else flag_type  # type: ignore[valid-type]
    value = inspect.Parameter.empty if field.is_required() else None
    annotation = annotation if field.is_required() else annotation | None
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=value, annotation=Annotated[annotation, option])


def _get_extra(field: FieldInfo) -> dict[str, Any]:
    return dict(field.json_schema_extra) if isinstance(field.json_schema_extra, dict) else {}


def _flatten(annotation: Any) -> Iterable[Any]:
    """Yield the plain types of an annotation: of unions, of Annotated, and of the items of lists."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        yield from _flatten(arguments[0])
    elif origin in (typing.Union, types.UnionType) or _is_list(annotation):
        for argument in arguments:
            yield from _flatten(argument)
    elif origin is typing.Literal:
        yield from {type(value) for value in arguments}
    else:
        yield annotation


def _is_list(annotation: Any) -> bool:
    """Whether a field takes several values, so that its flag can be repeated."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return str not in arguments and any(_is_list(argument) for argument in arguments)
    return origin in (list, tuple, frozenset) or getattr(origin, "__name__", "") in ("Sequence", "Iterable")


def _get_flag_type(annotation: Any) -> type:
    """Choose the type that a flag is parsed as."""
    plain = set(_flatten(annotation))
    return next((flag_type for flag_type in FLAG_TYPES if flag_type in plain), str)


def _get_metavar(annotation: Any) -> str | None:
    """Show the values of a Literal as 'a|b'."""
    options = [annotation, *typing.get_args(annotation)]
    literal = next((option for option in options if typing.get_origin(option) is typing.Literal), None)
    return "|".join(map(str, typing.get_args(literal))) if literal else None


def _format_default(field: FieldInfo) -> str:
    """Show a default in the help. typer cannot, because a flag that is not given stays unset."""
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    is_told = isinstance(default, bool) or default in (None, "", (), []) or "Default" in (field.description or "")
    return "" if is_told else f" Default: {default}."


def _get_bound(field: FieldInfo, kind: type, name: str) -> float | None:
    """Return the smallest or largest value that a field allows; None if there is none worth showing."""
    bounds = [getattr(item, name) for item in _iter_metadata(field) if isinstance(item, kind)]
    return bounds[0] if bounds and bounds[0] < MAX_COUNT else None


def _iter_metadata(field: FieldInfo) -> Iterator[Any]:
    """Yield the constraints of a field, also those inside 'Annotated[...] | None'."""
    yield from field.metadata
    for part in typing.get_args(field.annotation):
        for item in getattr(part, "__metadata__", ()):
            yield from item.metadata if isinstance(item, FieldInfo) else [item]
