"""The table of the keys in `knowgate.toml`, read from the model that validates them."""

from __future__ import annotations

from typing import get_args, get_type_hints

from pydantic.fields import FieldInfo

from knowgate.pipeline.settings import PipelineOptions
from tools.docs.markdown import code, table

TYPE_NAMES = {"str": "text", "Path": "path", "bool": "true or false", "int": "whole number", "float": "number"}


def markdown() -> str:
    """One row per key: type, default and meaning."""
    heads = ("key", "type", "default", "meaning")
    return table(heads, [_row(key, field) for key, field in PipelineOptions.model_fields.items()])


def _row(key: str, field: FieldInfo) -> tuple[str, str, str, str]:
    return (
        code(key),
        _type(get_type_hints(PipelineOptions)[key]),
        code(_default(field.default)),
        field.description or "",
    )


def _default(value: object) -> str:
    """A default as TOML writes it, without quotes."""
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _type(annotation: object) -> str:
    kinds = [kind for kind in get_args(annotation) or (annotation,) if kind is not type(None)]
    return " or ".join(TYPE_NAMES.get(name := getattr(kind, "__name__", str(kind)), name) for kind in kinds)
