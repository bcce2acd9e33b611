"""Logged questions as plain records: what `history export` writes and `history import` reads back."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from knowgate.doors import check_text, check_within, shown
from knowgate.errors import BadInput
from knowgate.history.entries import Known, LogEntry, Outcome, Scope, Source

LAST_SECOND = 1e11  # since 1970: the year 5138


def entry_record(entry: LogEntry) -> dict[str, Any]:
    values = {key: value for key, value in asdict(entry).items() if key != "scope"}
    return {**values, **asdict(entry.scope)}


def entry_of(record: Mapping[str, Any], where: str) -> LogEntry:
    """The entry; what is missing or unknown is named."""
    for key in ("weight", "created", "expires"):
        value = record.get(key)
        check_within(0 if value is None else value, f"'{key}' of {where}", most=LAST_SECOND)
    try:
        scope = Scope(str(record["model"]), str(record["prompts"]), str(record.get("tenant") or ""))
        outcome = Outcome(record["outcome"]) if record.get("outcome") else None
        return LogEntry(
            _text(record["question"]),
            Known(record["label"]),
            scope,
            Source(record.get("source") or "human"),
            outcome,
            record.get("weight"),
            record.get("created") or time.time(),
            record.get("expires"),
        )
    except (KeyError, ValueError) as error:
        raise BadInput(
            f"{where}: {error}. Expected question, label (known, unknown, time-sensitive), model, prompts."
        ) from None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"the question is {shown(value)}")
    check_text(value, "the question")
    return value
