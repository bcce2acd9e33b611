"""Flags of a command, derived from the option model of the library function that the command calls.

A command has a parameter whose type is the option model. Every field of the model becomes a flag:

    def label(data: ..., out: ..., options: LabelOptions) -> None:
        run_label(data, out=out, options=options)

The flag is `--` and the name of the field, with dashes instead of underscores. A field can change this in
`option(...)` with these settings:
- `flag_name`: name of the flag instead of the name of the field,
- `flag`: the complete flag, such as "--mask/--no-mask", or None for no flag,
- `metavar`: placeholder of the value on the help page,
- `panel`: heading of the help page under which the flag appears.

If a flag is not given, its field stays unset, so `options.model_fields_set` contains exactly the flags that were typed.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import annotated_types
import typer
from pydantic.fields import FieldInfo

from knowgate.cli.error_messages import translate_arguments
from knowgate.cli.options import parse_path
from knowgate.core.options import Options
from knowgate.core.validation import MAX_COUNT

KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
FLAG_TYPES = (str, Path, float, int, bool)  # a field that accepts several types is parsed as the first of these


def expand_options(function: Callable[..., None], **panels: str) -> Callable[..., None]:
    """Turn a function with option models into a typer command.

    Each field of a model becomes a flag: `LabelOptions.seed` becomes `--seed`.

    Args:
        function: The function behind a command.
        panels: Heading of the help page for the flags of a model, by the name of its parameter.
    """
    parameters = inspect.signature(function, eval_str=True).parameters
    models = {name: parameter.annotation for name, parameter in parameters.items() if _is_model(parameter)}
    if not models:
        return function

    def command(**values: Any) -> None:
        """Make the option models from the flags, and call the original function."""
        for name, model in models.items():
            values[name] = _pop_options(model, values)
        function(**values)

    # A parameter without a default may follow others only by keyword.
    flags = [parameter.replace(kind=KEYWORD_ONLY) for name, parameter in parameters.items() if name not in models]
    for name, model in models.items():
        flags += make_flags(model, panels.get(name))
    command.__signature__ = inspect.Signature(flags)  # type: ignore[attr-defined] # typer reads the flags from it
    command.__name__ = function.__name__
    command.__doc__ = function.__doc__
    return command


def _pop_options(model: type[Options], values: dict[str, Any]) -> Options:
    """Remove the values of a model's flags from `values`, and make the model from them."""
    flag_values = {name: values.pop(name, None) for name in _list_flags(model)}
    # A flag that was not typed is None. Its field stays unset.
    return model(**{name: value for name, value in flag_values.items() if value is not None})


def make_flags(model: type[Options], panel: str | None = None) -> list[inspect.Parameter]:
    """Make a typer parameter for each field of an option model with a flag."""
    flags = _list_flags(model)
    short_flags = {name: flag.partition("/")[0] for name, flag in flags.items()}  # '--mask' of '--mask/--no-mask'
    return [_make_flag(name, model.model_fields[name], flag, short_flags, panel) for name, flag in flags.items()]


def _list_flags(model: type[Options]) -> dict[str, str]:
    """Return the flags of an option model by field name."""
    flags = {name: get_flag(name, field) for name, field in model.model_fields.items()}
    return {name: flag for name, flag in flags.items() if flag}


def get_flag(name: str, field: FieldInfo) -> str | None:
    """Return the flag of a field, such as '--max-tokens' or '--mask/--no-mask', or None."""
    extra = _get_extra(field)
    if "flag" in extra:
        return str(extra["flag"]) if extra["flag"] else None
    flag = str(extra.get("flag_name", name)).replace("_", "-")
    is_switch = _get_flag_type(field.annotation) is bool and not flag.startswith("no-")
    return f"--{flag}/--no-{flag}" if is_switch else f"--{flag}"


def _is_model(parameter: inspect.Parameter) -> bool:
    """Return whether a parameter is annotated with an option model."""
    return isinstance(parameter.annotation, type) and issubclass(parameter.annotation, Options)


def _make_flag(
    name: str, field: FieldInfo, flag: str, flags: Mapping[str, str], panel: str | None
) -> inspect.Parameter:
    """Make the typer parameter of one field of an option model.

    Args:
        name: Name of the field.
        field: The field.
        flag: Flag of the field, such as '--mask/--no-mask'.
        flags: Flag of every field of the model, by field name. In the help text, they replace names of fields.
        panel: Heading on the help page, unless the field sets its own.
    """
    option = _make_typer_option(field, flag, flags, panel)
    flag_type = _get_flag_type(field.annotation)
    annotation: Any = list[flag_type] if _is_list(field.annotation) else flag_type  # type: ignore[valid-type]
    if field.is_required():
        return inspect.Parameter(name, KEYWORD_ONLY, annotation=Annotated[annotation, option])
    # None means that the flag was not typed.
    return inspect.Parameter(name, KEYWORD_ONLY, default=None, annotation=Annotated[annotation | None, option])


def _make_typer_option(field: FieldInfo, flag: str, flags: Mapping[str, str], panel: str | None) -> Any:
    """Make what typer shows and checks of a flag: its help text, allowed values and bounds."""
    extra = _get_extra(field)
    flag_type = _get_flag_type(field.annotation)
    choices = _list_values(field.annotation)  # empty if every value is allowed
    return typer.Option(
        flag,
        help=translate_arguments(field.description or "", flags) + _format_default(field),
        metavar=extra.get("metavar") or "|".join(choices) or None,
        autocompletion=_make_completion(choices) if choices else None,
        rich_help_panel=extra.get("panel", panel),
        parser=parse_path if flag_type is Path else None,
        **_get_bounds(field, flag_type),
    )


def _make_completion(choices: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a function for the shell that completes the start of a choice."""

    def complete(start: str) -> list[str]:
        return [choice for choice in choices if choice.startswith(start)]

    return complete


def _get_bounds(field: FieldInfo, flag_type: type) -> dict[str, Any]:
    """Return the smallest and largest value of a numeric flag, for the help page."""
    if flag_type not in (int, float):
        return {}
    minimum = _get_bound(field, annotated_types.Ge, "ge")
    maximum = _get_bound(field, annotated_types.Le, "le")
    return {"min": minimum, "max": maximum}


def _get_extra(field: FieldInfo) -> dict[str, Any]:
    """Return the `json_schema_extra` of a field; empty if it has none."""
    return dict(field.json_schema_extra) if isinstance(field.json_schema_extra, dict) else {}


def _flatten(annotation: Any) -> Iterable[Any]:
    """Yield the plain types in an annotation. Example: `list[int] | None` gives int and NoneType."""
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
    """Return whether a flag can be repeated.

    True for `list[int]` and `list[int] | None`, False for `int` and `str | list[str]`.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        # A field that also accepts one text, such as `str | list[str]`, takes a single value on the command line.
        return str not in arguments and any(_is_list(argument) for argument in arguments)
    return origin in (list, tuple, frozenset) or getattr(origin, "__name__", "") in ("Sequence", "Iterable")


def _get_flag_type(annotation: Any) -> type:
    """Return the type of a flag's value. The default is str."""
    plain_types = set(_flatten(annotation))
    return next((flag_type for flag_type in FLAG_TYPES if flag_type in plain_types), str)


def _list_values(annotation: Any) -> list[str]:
    """List the allowed values of `Literal[...]`. Empty for other annotations."""
    for part in (annotation, *typing.get_args(annotation)):
        if typing.get_origin(part) is typing.Literal:
            return [str(value) for value in typing.get_args(part)]
    return []


def _format_default(field: FieldInfo) -> str:
    """Return the end of a help text, such as ' Default: 20.'. An obvious default gives ''."""
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    is_obvious = isinstance(default, bool) or default in (None, "", (), [])
    is_named = "Default" in (field.description or "")
    return "" if is_obvious or is_named else f" Default: {default}."


def _get_bound(field: FieldInfo, kind: type, name: str) -> float | None:
    """Return the minimum or maximum of a field, for the help page.

    Args:
        field: The field.
        kind: Class of the constraint: `annotated_types.Ge` for the minimum, `annotated_types.Le` for the maximum.
        name: Attribute that holds the value: 'ge' of `Ge`, 'le' of `Le`.

    Returns:
        The bound; None if the field has none, or one that is too large to be worth showing.
    """
    bounds = [getattr(item, name) for item in _iter_metadata(field) if isinstance(item, kind)]
    return bounds[0] if bounds and bounds[0] < MAX_COUNT else None


def _iter_metadata(field: FieldInfo) -> Iterator[Any]:
    """Yield the constraints of a field, such as its minimum `Ge(1)`.

    For `Annotated[int, Ge(1)] | None`, they are in the union members.
    """
    yield from field.metadata
    for member in typing.get_args(field.annotation):
        for item in getattr(member, "__metadata__", ()):
            if isinstance(item, FieldInfo):  # as in `Annotated[int, Field(ge=1)]`
                yield from item.metadata
            else:
                yield item
