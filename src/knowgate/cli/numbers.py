"""Whole numbers between commas, as options give them."""

from __future__ import annotations

from knowgate.doors import check_whole, shown
from knowgate.errors import BadSetting


def whole_numbers(option: str, text: str, *, least: int = 0) -> list[int]:
    """The numbers of '1,3'; refused where one is none, too small or beyond counting."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    try:
        found = [int(word) for word in words]
    except ValueError:
        found = []
    if not found:
        raise BadSetting(f"{option} is {shown(text)}: give whole numbers between commas, such as 1,3.")
    return [check_whole(number, f"a number of {option}", least=least) for number in found]
