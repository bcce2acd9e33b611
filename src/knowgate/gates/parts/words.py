"""Two label words written as known/unknown, as in 'true/false'."""

from __future__ import annotations

from knowgate.errors import BadSetting


def split_words(words: str, gate: str) -> tuple[str, str]:
    """(known, unknown); anything else is refused."""
    known, _, unknown = (part.strip() for part in words.partition("/"))
    if not (known and unknown):
        raise BadSetting(f"{gate}: words is '{words}'; write two labels as known/unknown.")
    return known, unknown
