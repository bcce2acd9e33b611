"""Base class of option models: pydantic models that the library, the command line and `knowgate.toml` share.

A library function takes its options as one object or as keywords. `knowgate.cli.option_flags` derives the flags of a
command from the same model, and `read_options` reads a table of `knowgate.toml` into it.

    class LabelOptions(Options):
        samples: Count = option(30, "Sampled answers per question.")

    @with_options(LabelOptions)
    def label(data: str, *, out: Path, options: LabelOptions) -> RunFolder: ...

    label("jsonl:questions.jsonl", out=run, samples=10)
    label("jsonl:questions.jsonl", out=run, options=LabelOptions(samples=10))
"""

from __future__ import annotations

import functools
import inspect
import numbers
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from knowgate.core.schema import describe_expected
from knowgate.core.validation import MAX_COUNT, expand_path, format_value
from knowgate.errors import BadSetting, UnknownName

Result = TypeVar("Result")
OptionsType = TypeVar("OptionsType", bound="Options")
Function = Callable[..., Result]


def _to_python_number(value: Any) -> Any:
    """Convert numpy numbers to int or float. Strict pydantic fields reject numpy numbers."""
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


# Types for fields of option models. They reject booleans, NaN and numbers written as text.
WholeNumber = Annotated[int, BeforeValidator(_to_python_number), Field(strict=True, ge=0, le=MAX_COUNT)]
Count = Annotated[int, BeforeValidator(_to_python_number), Field(strict=True, ge=1, le=MAX_COUNT)]
Seed = Annotated[int, BeforeValidator(_to_python_number), Field(strict=True, ge=0, le=2**32 - 1)]
Share = Annotated[float, BeforeValidator(_to_python_number), Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
UserPath = Annotated[Path, AfterValidator(expand_path)]
FLAG_SETTINGS = ("metavar", "flag", "flag_name", "panel")


def option(default: Any, description: str, **settings: Any) -> Any:
    """Declare a field of an option model.

    Args:
        default: The default value; `...` for a required option.
        description: What the option does. It is the help text of the flag.
        settings: Settings of the command-line flag: `metavar`, `panel` (the section of the help), `flag_name` (if its
            name differs from that of the field) or `flag` (the complete flag, or None for an option without one). All
            others are constraints of pydantic, such as `ge`.
    """
    extra = {name: settings.pop(name) for name in FLAG_SETTINGS if name in settings}
    return Field(default, description=description, json_schema_extra=extra or None, **settings)


class Options(BaseModel):
    """Base class of option models.

    Options are immutable, and wrong values raise BadSetting. `renamed` maps old field names to new ones.
    """

    renamed: ClassVar[Mapping[str, str]] = {}
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, protected_namespaces=())

    @model_validator(mode="wrap")
    @classmethod
    def _validate_fields(cls, values: Any, validate: Callable[[Any], Self]) -> Self:
        """Create the options from the given values. Old field names work, too (`renamed`).

        Raises:
            BadSetting: A value is invalid. It replaces pydantic's ValidationError.
        """
        if cls.renamed and isinstance(values, dict):
            values = {cls.renamed.get(name, name): value for name, value in values.items()}
        try:
            return validate(values)
        except ValidationError as error:
            raise BadSetting(explain_option_error(error.errors()[0], cls.model_fields)) from None

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed. The copy is validated; fields that were never set stay unset."""
        return type(self)(**{**get_set_fields(self), **changes})


def get_set_fields(options: Options) -> dict[str, Any]:
    """Return the fields of an options object that were set, by name."""
    return {name: getattr(options, name) for name in options.model_fields_set}


def with_options(options_class: type[Options]) -> Callable[[Function[Result]], Function[Result]]:
    """Decorate a function to accept the fields of its argument `options` as keywords, too.

    Args:
        options_class: The class of the options that the function takes.
    """

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        signature = _expand_signature(inspect.signature(function), options_class)
        field_names = {*options_class.model_fields, *options_class.renamed}

        @functools.wraps(function)
        def wrapper(*args: Any, options: Options | None = None, **keywords: Any) -> Result:
            """Call the function with one options object, made of `options` and keywords."""
            fields = {name: keywords.pop(name) for name in list(keywords) if name in field_names}
            _check_keywords(keywords, signature)
            if options is None:
                options = options_class(**fields)
            elif fields:
                options = options.replace(**fields)
            return function(*args, options=options, **keywords)

        wrapper.__signature__ = signature  # type: ignore[attr-defined]
        wrapper.__options__ = options_class  # type: ignore[attr-defined]
        wrapper.__doc__ = _document_fields(inspect.getdoc(function) or "", options_class)
        return wrapper

    return decorate


def _check_keywords(keywords: Iterable[str], signature: inspect.Signature) -> None:
    """Raise BadSetting if a function does not accept a keyword."""
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        return  # it accepts every keyword
    for name in keywords:
        if name not in signature.parameters:
            raise BadSetting(str(UnknownName("option", name, signature.parameters)))


def read_options(model: type[OptionsType], table: Mapping[str, Any], where: str) -> OptionsType:
    """Read a table of a settings file into an options model.

    Args:
        model: The options model.
        table: Keys and values of the table.
        where: How an error names the source, such as "knowgate.toml [serve]".

    Raises:
        BadSetting: A key is unknown or has a value that cannot be used.
    """
    try:
        return model(**table)
    except BadSetting as error:
        raise BadSetting(f"{where}: {error}") from None


def explain_option_error(detail: ErrorDetails, fields: Mapping[str, FieldInfo]) -> str:
    """Describe a pydantic error in one sentence, with the option and its value.

    Args:
        detail: The error.
        fields: Fields of the option model, to suggest the right name of a misspelled option.
    """
    name = str(detail["loc"][0]) if detail["loc"] else "options"
    if detail["type"] == "extra_forbidden":
        return str(UnknownName("option", name, fields))  # suggests the most similar name
    if detail["type"] == "missing":
        return f"the required option `{name}` is missing. Give it a value."
    return f"{name}={format_value(detail['input'])} is not allowed: {describe_requirement(detail)}."


def describe_requirement(detail: ErrorDetails) -> str:
    """Say what a rejected value must be. Example: 'it must be at least 1'."""
    context = detail.get("ctx", {})
    if detail["type"] == "string_too_long":
        return f"it must have at most {context.get('max_length'):,} characters"
    if detail["type"] == "string_too_short":
        return "it must not be empty"
    expected = describe_expected(detail)
    if expected is not None:
        return f"it must be {expected}"
    bounds = {"ge": "at least ", "le": "at most ", "gt": "above ", "lt": "below ", "expected": ""}
    for name, words in bounds.items():
        if name in context:
            return f"it must be {words}{context[name]}"
    return detail["msg"].removeprefix("Value error, ").rstrip(".")


def _expand_signature(signature: inspect.Signature, model: type[Options]) -> inspect.Signature:
    """Return the signature of a decorated function. Each field of the option model is a keyword."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    others = [parameter for parameter in signature.parameters.values() if parameter.name != "options"]
    before = [parameter for parameter in others if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    after = [parameter for parameter in others if parameter.kind is inspect.Parameter.VAR_KEYWORD]
    hints = typing.get_type_hints(model)  # without the constraints of Annotated
    fields = [
        inspect.Parameter(name, keyword, annotation=hints[name], default=_get_default(field))
        for name, field in model.model_fields.items()
    ]
    options_object = inspect.Parameter("options", keyword, annotation=model | None, default=None)
    return signature.replace(parameters=[*before, *fields, options_object, *after])


def _get_default(field: FieldInfo) -> Any:
    """Return the default of a field as `inspect` expects it; a required field has none."""
    return inspect.Parameter.empty if field.is_required() else field.get_default(call_default_factory=True)


def _document_fields(docstring: str, model: type[Options]) -> str:
    """Append the descriptions of the fields to a docstring."""
    lines = [f"    {name}: {field.description}" for name, field in model.model_fields.items() if field.description]
    if not lines:
        return docstring
    return "\n".join([docstring, "", f"Options (fields of `{model.__name__}`):", *lines])
