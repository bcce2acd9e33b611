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
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

from knowgate.cli.error_messages import translate_arguments
from knowgate.cli.options import parse_path
from knowgate.core.options import Options
from knowgate.core.validation import MAX_COUNT

KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
Schema = Mapping[str, Any]  # JSON schema of a field, with the settings of its flag
# Types of flags by their names in a JSON schema. A field that accepts several types is parsed as the first of these.
FLAG_TYPES: dict[str, type] = {"string": str, "path": Path, "number": float, "integer": int, "boolean": bool}


def expand_options(function: Callable[..., None], **panels: str) -> Callable[..., None]:
    """Turn a function with option models into a typer command.

    Each field of a model becomes a flag: `LabelOptions.seed` becomes `--seed`.

    Args:
        function: The function behind a command.
        panels: For each parameter that is an option model, the section of the help page that lists its flags.
    """
    parameters = inspect.signature(function, eval_str=True).parameters
    models = {name: parameter.annotation for name, parameter in parameters.items() if _is_model(parameter)}
    if not models:
        return function
    flags = {name: make_flags(model, panels.get(name)) for name, model in models.items()}

    def command(**values: Any) -> None:
        """Make the option models from the flags, and call the original function."""
        for name, model in models.items():
            values[name] = _pop_options(model, flags[name], values)
        function(**values)

    # Keyword-only, because a positional parameter without a default may not follow one with a default.
    others = [parameter.replace(kind=KEYWORD_ONLY) for name, parameter in parameters.items() if name not in models]
    all_flags = [*others, *chain.from_iterable(flags.values())]
    command.__signature__ = inspect.Signature(all_flags)  # type: ignore[attr-defined] # typer reads the flags from it
    command.__name__ = function.__name__
    command.__doc__ = function.__doc__
    return command


def _is_model(parameter: inspect.Parameter) -> bool:
    """Return whether a parameter is annotated with an option model."""
    return isinstance(parameter.annotation, type) and issubclass(parameter.annotation, Options)


def _pop_options(model: type[Options], flags: Sequence[inspect.Parameter], values: dict[str, Any]) -> Options:
    """Remove the values of a model's flags from `values`, and make the model from them."""
    flag_values = {flag.name: values.pop(flag.name, None) for flag in flags}
    # A flag that was not typed is None. Its field stays unset.
    return model(**{name: value for name, value in flag_values.items() if value is not None})


def make_flags(model: type[Options], panel: str | None = None) -> list[inspect.Parameter]:
    """Make a typer parameter for each field of an option model with a flag."""
    schemas = model.model_json_schema(schema_generator=FlagSchemaGenerator)["properties"]
    flags = {name: flag for name, schema in schemas.items() if (flag := _get_flag(name, schema))}
    short_flags = {name: flag.partition("/")[0] for name, flag in flags.items()}  # '--mask' of '--mask/--no-mask'
    parameters = []
    for name, flag in flags.items():
        field = model.model_fields[name]
        help_text = translate_arguments(field.description or "", short_flags) + _format_default(field)
        bounds = {"min": _get_bound(field, "ge"), "max": _get_bound(field, "le")}
        option = _make_typer_option(schemas[name], flag, panel, help=help_text, **bounds)
        parameters.append(_make_parameter(name, schemas[name], option, is_required=field.is_required()))
    return parameters


class FlagSchemaGenerator(GenerateJsonSchema):
    """Generator of the JSON schemas that flags are made from. Types that JSON lacks become text."""

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> dict[str, Any]:
        return {"type": "string"}

    def literal_schema(self, schema: Any) -> dict[str, Any]:
        return {
            **super().literal_schema(schema),
            "enum": schema["expected"],
        }  # a literal with one value has no `enum` otherwise


def _get_flag(name: str, schema: Schema) -> str | None:
    """Return the flag of a field, such as '--max-tokens' or '--mask/--no-mask', or None."""
    if "flag" in schema:
        return schema["flag"] or None
    flag = schema.get("flag_name", name).replace("_", "-")
    is_switch = _get_flag_type(schema) is bool and not flag.startswith("no-")
    return f"--{flag}/--no-{flag}" if is_switch else f"--{flag}"


def _make_parameter(name: str, schema: Schema, option: Any, *, is_required: bool) -> inspect.Parameter:
    """Make the parameter of a flag. It is repeatable if the field is a list."""
    flag_type = _get_flag_type(schema)
    accepted = [kind.get("type") for kind in schema.get("anyOf", [schema])]
    # A field that also accepts one text, such as `str | list[str]`, takes a single value on the command line.
    is_list = "array" in accepted and "string" not in accepted
    annotation: Any = list[flag_type] if is_list else flag_type  # type: ignore[valid-type]
    if is_required:
        return inspect.Parameter(name, KEYWORD_ONLY, annotation=Annotated[annotation, option])
    # None means that the flag was not typed.
    return inspect.Parameter(name, KEYWORD_ONLY, default=None, annotation=Annotated[annotation | None, option])


def _make_typer_option(schema: Schema, flag: str, panel: str | None, **settings: Any) -> Any:
    """Make the typer option of a flag. `settings` are its help text and bounds."""
    choices = [str(value) for kind in _list_types(schema) for value in kind.get("enum", ())]  # empty if all are allowed
    return typer.Option(
        flag,
        metavar=schema.get("metavar") or "|".join(choices) or None,
        autocompletion=_make_completion(choices) if choices else None,
        rich_help_panel=schema.get("panel", panel),
        parser=parse_path if _get_flag_type(schema) is Path else None,
        **settings,
    )


def _make_completion(choices: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a function for the shell that completes a choice. Typer requires the name `incomplete`."""
    return lambda incomplete: [choice for choice in choices if choice.startswith(incomplete)]


def _list_types(schema: Schema) -> list[Schema]:
    """List the plain types in a field. Example: `list[int] | None` gives integer and null."""
    parts = schema.get("anyOf") or schema.get("prefixItems")  # of a union, or of a tuple of fixed length
    if parts is None and "items" not in schema:
        return [schema]
    return [kind for part in parts or [schema["items"]] for kind in _list_types(part)]


def _get_flag_type(schema: Schema) -> type:
    """Return the type of a flag's value. The default is str."""
    names = {kind.get("format", kind.get("type")) for kind in _list_types(schema)}
    return next((flag_type for name, flag_type in FLAG_TYPES.items() if name in names), str)


def _format_default(field: FieldInfo) -> str:
    """Return the end of a help text, such as ' Default: 20.'. An obvious default gives ''."""
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    is_obvious = isinstance(default, bool) or default in (None, "", (), [])
    is_named = "Default" in (field.description or "")
    return "" if is_obvious or is_named else f" Default: {default}."


def _get_bound(field: FieldInfo, name: str) -> float | None:
    """Return the minimum ('ge') or maximum ('le') of a field. A bound too large to be worth showing gives None."""
    bounds = [getattr(item, name) for item in _iter_metadata(field) if hasattr(item, name)]
    return bounds[0] if bounds and bounds[0] < MAX_COUNT else None


def _iter_metadata(field: FieldInfo) -> Iterator[Any]:
    """Yield the constraints of a field, such as its minimum `Ge(1)`.

    In a union such as `Annotated[int, Ge(1)] | None`, the constraints belong to a member, not to the field.
    """
    yield from field.metadata
    for member in typing.get_args(field.annotation):
        for item in getattr(member, "__metadata__", ()):
            # In `Annotated[int, Field(ge=1)]`, the item `Field(ge=1)` holds a list of constraints. `Ge(1)` itself is one.
            yield from getattr(item, "metadata", [item])
