"""Conversion of parsed JSON to dataclasses. Every field is checked against its annotation, without type coercion.

The validation is done by pydantic-core. The schemas are built here because the records are plain dataclasses, may be
stored as lists of their values, and must not accept "3" or true for a number.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, TypeVar, Union, cast

from pydantic_core import CoreSchema, ErrorDetails, SchemaValidator, ValidationError, core_schema

from knowgate.errors import BadInput

Record = TypeVar("Record")
MAX_INTEGER = 2**63  # larger integers do not fit into arrays and databases
MAX_VALUE_CHARS = 40  # a wrong value is cut to this length in a message
# What a value should have been, keyed by the beginning of the name of pydantic's error type.
EXPECTED = {
    "bool_": "true or false",
    "int_": "a whole number",
    "float_": "a number",
    "finite_number": "a finite number",
    "string_": "a text",
    "path_": "a path",
    "none_": "nothing",
    "list_": "a list",
    "tuple_": "a list",
    "frozen_set_": "a list",
    "dict_": "an object",
    "arguments_": "an object",
    "unexpected_positional_": "an object",
}


@dataclass(frozen=True)
class NumberRange:
    """Allowed range of a number field, both ends included. Used as `Annotated[float, NumberRange(0, 1)]`."""

    low: float
    high: float = math.inf

    @property
    def description(self) -> str:
        """The range in words, for error messages."""
        return f"at least {self.low:g}" if self.high == math.inf else f"between {self.low:g} and {self.high:g}"


NonNegativeInt = Annotated[int, NumberRange(0)]
UnitInterval = Annotated[float, NumberRange(0, 1)]


def read_record(kind: type[Record], value: Any, where: str, *, ignore_unknown: bool = False) -> Record:
    """Convert a parsed JSON value into a dataclass.

    Args:
        kind: The dataclass. In JSON it is an object with its fields, or a list of the values in order of the fields.
        value: The parsed value.
        where: How an error names the source, such as "gate.json" or "rows.jsonl line 7".
        ignore_unknown: Ignore fields that the dataclass does not have. In nested dataclasses they are ignored if the
            class has a class variable `ignore_unknown = True`.

    Raises:
        BadInput: A field is missing, unknown or has a wrong type. The message names the field, as in `gate.layers.0`.
    """
    if ignore_unknown and isinstance(value, Mapping):
        value = _drop_unknown(cast(Any, kind), value)
    try:
        return cast(Record, _make_validator(cast(Any, kind)).validate_python(value))
    except ValidationError as error:
        raise BadInput(f"{where}: {_explain(error.errors(include_url=False)[0])}.") from None


def describe_expected(detail: ErrorDetails) -> str | None:
    """Return the expected type of a value in words. None means: the error is not about a type."""
    for prefix, text in EXPECTED.items():
        if detail["type"].startswith(prefix):
            return text
    return None


def _explain(detail: ErrorDetails) -> str:
    """Describe a pydantic error as 'PATH is VALUE, not EXPECTED'. PATH leads to the wrong field."""
    path = [str(part)[:MAX_VALUE_CHARS] for part in detail["loc"]]
    parent = ".".join(path[:-1]) or "the object"
    if detail["type"] == "missing_argument":
        return f"{parent} has no field '{path[-1]}'"
    if detail["type"] == "unexpected_keyword_argument":
        return f"{parent} has an unknown field '{path[-1]}'"
    value = repr(detail["input"])
    if len(value) > MAX_VALUE_CHARS:
        value = f"{value[:MAX_VALUE_CHARS]}…"
    return f"{'.'.join(path) or 'the value'} is {value}, not {describe_expected(detail) or detail['msg']}"


def _drop_unknown(kind: type, value: Any) -> Any:
    """Remove the keys of a JSON object that are not fields of a dataclass."""
    if not isinstance(value, Mapping):
        return value
    names = _get_field_names(kind)
    return {name: item for name, item in value.items() if name in names}


@functools.cache
def _get_field_names(kind: type) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(kind))


@functools.cache
def _make_validator(kind: Any) -> SchemaValidator:
    """Build and cache the validator of a dataclass."""
    return SchemaValidator(_make_schema(kind))


def _make_schema(annotation: Any) -> CoreSchema:
    """Build the pydantic-core schema that validates values of a type annotation."""
    origin = typing.get_origin(annotation)  # such as `list` for list[int]
    arguments = typing.get_args(annotation)  # such as (int,)
    if annotation in _PLAIN_SCHEMAS:
        return _PLAIN_SCHEMAS[annotation]
    if origin is Annotated:
        return _make_range_schema(_make_schema(arguments[0]), arguments[1])
    if origin in (Union, types.UnionType):
        return _make_union_schema(arguments)
    if origin is Literal:
        return _expect(core_schema.literal_schema(list(arguments)), f"one of {', '.join(map(str, arguments))}")
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        values = ", ".join(str(member.value) for member in annotation)
        return _expect(core_schema.enum_schema(annotation, list(annotation)), f"one of {values}")
    if dataclasses.is_dataclass(annotation):
        return _make_record_schema(cast(type, annotation))
    return _make_container_schema(origin, arguments)


def _expect(schema: CoreSchema, description: str) -> CoreSchema:
    """Replace the message of every error of a schema by the expected type, such as 'a list of 3'."""
    # pydantic-core formats the message, so braces must be doubled.
    message = description.replace("{", "{{").replace("}", "}}")
    return core_schema.custom_error_schema(schema, custom_error_type="expected", custom_error_message=message)


_PLAIN_SCHEMAS: dict[Any, CoreSchema] = {
    str: core_schema.str_schema(strict=True),
    bool: core_schema.bool_schema(strict=True),
    int: _expect(core_schema.int_schema(strict=True, gt=-MAX_INTEGER, lt=MAX_INTEGER), "a whole number"),
    float: core_schema.float_schema(strict=True, allow_inf_nan=False),
    type(None): core_schema.none_schema(),
    Any: core_schema.any_schema(),
}


def _make_range_schema(schema: CoreSchema, allowed: NumberRange) -> CoreSchema:
    """Add the bounds of a NumberRange to the schema of a number."""
    bounds: CoreSchema = core_schema.float_schema(ge=allowed.low, le=allowed.high)
    if schema is _PLAIN_SCHEMAS[int]:
        highest = None if allowed.high == math.inf else math.floor(allowed.high)
        bounds = core_schema.int_schema(ge=math.ceil(allowed.low), le=highest)
    return core_schema.chain_schema([schema, _expect(bounds, allowed.description)])


def _make_union_schema(kinds: tuple[Any, ...]) -> CoreSchema:
    """Build the schema of a union such as `int | str | None`. Its error names all allowed types."""
    choices = [kind for kind in kinds if kind is not type(None)]
    schemas: list[Any] = [_make_schema(kind) for kind in choices]
    schema: CoreSchema = schemas[0]
    if len(schemas) > 1:
        names = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}
        descriptions = [names.get(kind, "a list or object") for kind in choices]
        distinct = dict.fromkeys(descriptions)  # two kinds of lists have the same description
        union = core_schema.union_schema(schemas, mode="left_to_right")
        schema = _expect(union, " or ".join(distinct))
    return core_schema.nullable_schema(schema) if type(None) in kinds else schema


def _make_container_schema(origin: Any, arguments: tuple[Any, ...]) -> CoreSchema:
    """Build the schema of a tuple, list, set or mapping.

    Args:
        origin: The container type, such as `list` for `list[int]`.
        arguments: The types of its items, such as (`int`,). For a tuple of any length, the last one is `...`.
    """
    if origin is tuple and arguments[-1] is not Ellipsis:  # the length is fixed, so it is checked first
        schema = core_schema.tuple_schema([_make_schema(argument) for argument in arguments])
        length = core_schema.list_schema(min_length=len(arguments), max_length=len(arguments))
        return core_schema.chain_schema([_expect(length, f"a list of {len(arguments)}"), schema])
    lists: dict[Any, Callable[..., CoreSchema]] = {
        tuple: core_schema.tuple_variable_schema,
        list: core_schema.list_schema,
        frozenset: core_schema.frozenset_schema,
    }
    if origin in lists:
        return lists[origin](_make_schema(arguments[0]))
    if origin in (dict, Mapping):
        return core_schema.dict_schema(_PLAIN_SCHEMAS[str], _make_schema(arguments[1]))
    raise TypeError(f"a record class cannot have a field of type {origin}")


def _make_record_schema(kind: type) -> CoreSchema:
    """Build the schema for making a dataclass from JSON. An object gives keyword arguments, a list positional ones."""
    hints = typing.get_type_hints(kind, include_extras=True)
    # Keyword-only fields come last, as in a function signature.
    fields = sorted((field for field in dataclasses.fields(kind) if field.init), key=lambda field: bool(field.kw_only))
    parameters = [
        core_schema.arguments_parameter(
            field.name,
            _make_field_schema(field, hints[field.name]),
            mode="keyword_only" if field.kw_only else "positional_or_keyword",
        )
        for field in fields
    ]
    schema = core_schema.call_schema(core_schema.arguments_schema(parameters), kind)
    if getattr(kind, "ignore_unknown", False):
        return core_schema.no_info_before_validator_function(functools.partial(_drop_unknown, kind), schema)
    return schema


def _make_field_schema(field: dataclasses.Field[Any], annotation: Any) -> CoreSchema:
    """Build the schema of a dataclass field, with its default."""
    schema = _make_schema(annotation)
    if field.default is not dataclasses.MISSING:
        return core_schema.with_default_schema(schema, default=field.default)
    if field.default_factory is not dataclasses.MISSING:
        return core_schema.with_default_schema(schema, default_factory=field.default_factory)
    return schema
