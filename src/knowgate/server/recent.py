"""The last requests, in memory: what was decided, and the answers where their texts may be kept."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

MOST = 500


class Recent:
    """keeps_texts: questions and answers, too. The oldest of more than `most` are forgotten."""

    def __init__(self, *, keeps_texts: bool, most: int = MOST):
        self.keeps_texts = keeps_texts
        self._most = most
        self._rows: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def see(self, record: Mapping[str, Any], question: str | None) -> None:
        asked = {"question": question} if self.keeps_texts else {}
        self._rows[record["id"]] = {**record, "at": time.time(), **asked}
        while len(self._rows) > self._most:
            self._rows.popitem(last=False)

    def add(self, id: str, found: Mapping[str, Any]) -> None:
        """More about a request: its answers (`closed`, `opened`), whether they differ (`lost`), a `rating`."""
        kept = {key: value for key, value in found.items() if self.keeps_texts or key in ("lost", "rating")}
        if id in self._rows:
            self._rows[id] |= {key: value for key, value in kept.items() if value is not None}

    def find(self, id: str) -> dict[str, Any] | None:
        return self._rows.get(id)

    def forget(self, ids: Sequence[str]) -> None:
        for id in ids:
            self._rows.pop(id, None)

    def newest(self, count: int) -> list[dict[str, Any]]:
        return list(self._rows.values())[: -count - 1 : -1]
