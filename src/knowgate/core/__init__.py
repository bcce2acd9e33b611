"""Shared foundations: validation, option models, files, text, HTTP, PostgreSQL, registries, tables and charts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar, cast

VERSION = "0.2.0"
Items = TypeVar("Items")


def split_batches(items: Items, size: int) -> Iterator[Items]:
    """Yield consecutive slices of at most `size` items. Lists, tuples, texts and arrays can be split."""
    values = cast(Any, items)
    for start in range(0, len(values), size):
        yield values[start : start + size]
