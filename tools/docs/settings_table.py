"""The table of the keys in `knowgate.toml`, read from the model that validates them."""

from __future__ import annotations

import ast
from itertools import pairwise
from typing import get_args

from pydantic.fields import FieldInfo

from knowgate.pipeline.settings import Settings
from tools import structure
from tools.docs.markdown import code, table

TYPE_NAMES = {"str": "text", "Path": "path", "bool": "true or false", "int": "whole number", "float": "number"}


def markdown() -> str:
    """One row per key: type, default and meaning."""
    heads = ("key", "type", "default", "meaning")
    return table(heads, [_row(key, field) for key, field in Settings.model_fields.items()])


def _row(key: str, field: FieldInfo) -> tuple[str, str, str, str]:
    return code(key), _type(field.annotation), code(_default(field.default)), meaning(key)


def meaning(key: str) -> str:
    """The description of a key: of its field, or the docstring below it in the source."""
    return Settings.model_fields[key].description or _docstrings().get(key, "")


def _docstrings() -> dict[str, str]:
    path = structure.modules()[Settings.__module__]
    body = next(
        node.body for node in structure.tree(path).body if isinstance(node, ast.ClassDef) and node.name == "Settings"
    )
    return {
        ast.unparse(field.target): str(text.value.value)
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def _default(value: object) -> str:
    """A default as TOML writes it, without quotes."""
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _type(annotation: object) -> str:
    kinds = [kind for kind in get_args(annotation) or (annotation,) if kind is not type(None)]
    return " or ".join(TYPE_NAMES.get(name := getattr(kind, "__name__", str(kind)), name) for kind in kinds)
