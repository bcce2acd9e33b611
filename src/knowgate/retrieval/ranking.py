"""How many passages a search may be asked for."""

from __future__ import annotations

from knowgate.errors import BadSetting


def check_k(k: int) -> None:
    if k < 1:
        raise BadSetting(f"k is {k}; a search asks for at least 1 passage.")
