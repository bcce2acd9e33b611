"""What web search keeps on disk: replies that expire, recordings that do not, and how much of the budget is spent.

Knows nothing of engines. A file that was damaged is no reply: it is asked for again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from knowgate.doors import read_json
from knowgate.errors import BadInput, KnowgateError, ServerError
from knowgate.files import locked, sha256_file, sha256_text, write_json
from knowgate.integrations.web_engines import Result
from knowgate.typed import read_record

MINUTE, DAY = 60.0, 86_400.0


class Replies:
    """A folder of replies, each good for `seconds`."""

    def __init__(self, folder: Path, seconds: float):
        self._folder, self._seconds = folder, seconds

    def find(self, key: str, *, expired: bool = False) -> list[Result] | None:
        """None where there is none, or none that is still good. expired: those that are not do, too."""
        kept = _read(self._folder / f"{key}.json")
        if kept is None or not (expired or 0 <= time.time() - kept["at"] < self._seconds):
            return None
        return _results(kept)

    def keep(self, key: str, results: Sequence[Result]) -> None:
        if self._seconds > 0:
            _write(self._folder / f"{key}.json", {"at": time.time(), "results": [asdict(one) for one in results]})


class Recording:
    """A folder of what was found for each query, for good."""

    def __init__(self, folder: Path):
        self._folder = folder

    def keep(self, query: str, results: Sequence[Result]) -> None:
        file = self._file(query)
        if not file.exists():
            _write(file, {"query": query, "at": time.time(), "results": [asdict(one) for one in results]})

    def find(self, query: str) -> list[Result]:
        kept = _read(self._file(query))
        if kept is None:
            raise BadInput(
                f"the recording '{self._folder}' holds nothing for '{query[:80]}': record it, "
                "--index 'web:ENGINE?record=DIR'."
            )
        return _results(kept)

    def digest(self) -> str:
        files = sorted(self._folder.glob("*.json"))
        return sha256_text(*(file.name for file in files), *(sha256_file(file) for file in files))

    def _file(self, query: str) -> Path:
        return self._folder / f"{sha256_text('query', query)[:32]}.json"


class Budget:
    """So many searches a minute and a day, of all processes that share the file."""

    def __init__(self, file: Path, minute: int, day: int):
        self._file, self._minute, self._day = file, minute, day

    def spend(self, patience: float) -> None:
        """One search; waits for its turn as long as `patience` seconds, and says so where that is not enough."""
        end = time.monotonic() + patience
        while (wait := self._try()) > 0:
            if time.monotonic() + wait > end:
                raise ServerError(
                    f"the budget of {self._minute} searches a minute is spent; the next is due in {wait:.0f} s. Wait, "
                    "or raise it: ?minute=N"
                )
            time.sleep(wait)

    def _try(self) -> float:
        """Seconds until there is room; 0 where there was, and it is taken."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with locked(self._file.with_suffix(".lock")):
            now = time.time()
            spent = [at for at in (_read(self._file) or {}).get("spent", []) if 0 <= now - at < DAY]
            if len(spent) >= self._day:
                raise ServerError(
                    f"the budget of {self._day:,} searches a day is spent. Wait until tomorrow, or raise it: ?day=N"
                )
            recent = [at for at in spent if now - at < MINUTE]
            if len(recent) >= self._minute:
                return float(MINUTE - (now - recent[-self._minute]))
            write_json(self._file, {"spent": [*spent, now]})
        return 0.0


def _read(file: Path) -> dict[str, Any] | None:
    try:
        kept = read_json(file)
    except (OSError, KnowgateError):
        return None
    usable = isinstance(kept, dict) and isinstance(kept.get("at", 0.0), int | float)
    numbers = kept.get("spent", []) if isinstance(kept, dict) else None
    spent = isinstance(numbers, list) and all(isinstance(at, int | float) for at in numbers)
    return kept if usable and spent else None


def _results(kept: dict[str, Any]) -> list[Result]:
    listed = kept.get("results")
    return [read_record(Result, one, "a kept result") for one in (listed if isinstance(listed, list) else [])]


def _write(file: Path, value: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, value)
