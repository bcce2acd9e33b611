"""The server's log of decisions (`knowgate serve --decisions FILE`) read into events, and into questions to fit on.

Knows the tables; writes nothing into them. A decision that was made without the gate is left out and counted.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from knowgate.core.postgres import open_postgres
from knowgate.core.postgres.address import DatabaseAddress
from knowgate.core.schema import read_record
from knowgate.core.validation import check_regular_file, parse_json
from knowgate.errors import BadInput
from knowgate.evaluation.replay import EventCost, TrafficEvent
from knowgate.evaluation.traffic_log import LoggedTraffic
from knowgate.types import Question

SQLITE_MAGIC = b"SQLite format 3\0"
SERVER_DECISION_STAGES = ("read", "gate", "draft")  # stages before the decision
WOULD_SKIP_NOTE = "would skip"
DECISIONS_QUERY = "SELECT id, record FROM decisions ORDER BY at, id"
AUDITS_QUERY = "SELECT decision, kind, lost FROM audits WHERE lost IS NOT NULL ORDER BY number"
QUESTIONS_QUERY = "SELECT id, question FROM decisions WHERE question IS NOT NULL ORDER BY at DESC, id"
CORRECTIONS_QUERY = "SELECT decision, answer FROM corrections ORDER BY at"


def is_server_log(path: Path) -> bool:
    """Whether this is a log of the server, not lines of `ask --json`."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(SQLITE_MAGIC)) == SQLITE_MAGIC


def read_server_log(place: Path | DatabaseAddress, arm: str | None = None) -> LoggedTraffic:
    """The decisions of one gate: those of an arm, or of the gate that made most of them."""
    path = place if isinstance(place, Path) else place.shown
    log = LoggedTraffic(path)
    rows = ((id, _record(text, log.left_out)) for id, text in _rows(place, DECISIONS_QUERY))
    usable = [(id, record) for id, record in rows if record and _is_usable(record, arm, log.left_out)]
    common = Counter((str(record["gate"]), record["threshold"]) for _, record in usable).most_common(1)
    compared: dict[str, list[tuple[str, float]]] = {}
    for decision, kind, lost in _rows(place, AUDITS_QUERY):
        compared.setdefault(decision, []).append((kind, lost))
    for id, record in usable:
        if (str(record["gate"]), record["threshold"]) != common[0][0]:
            _count(log.left_out, "of another gate or threshold")
            continue
        log.events.append(_event(record, compared.get(id, ())))
        log.gates[str(record["gate"])] += 1
        log.models[str(record.get("model", "?"))] += 1
        log.thresholds[float(record["threshold"])] += 1
    if not log.events:
        others = ", ".join(f"{count} {why}" for why, count in log.left_out.items())
        left_out = f" (left out: {others})" if others else ""
        raise BadInput(
            f"there is no decision of a gate in {path}{left_out}. Let the server decide some, or name another --arm."
        )
    return log


def read_logged_questions(place: Path | DatabaseAddress, most: int) -> list[Question]:
    """The newest questions, each once, with the answers that people gave as corrections."""
    path = place if isinstance(place, Path) else place.shown
    golds: dict[str, str] = {str(id): str(answer) for id, answer in _rows(place, CORRECTIONS_QUERY)}
    found: dict[str, Question] = {}
    for id, text in _rows(place, QUESTIONS_QUERY):
        before = found.get(text)
        if before is None and len(found) >= most:
            continue
        if before is None or (not before.answers and id in golds):
            found[text] = Question(text, id=str(id), answers=(golds[id],) if id in golds else ())
    if not found:
        raise BadInput(f"there are no questions in {path}: let the server keep their texts, with --keep-questions.")
    return list(found.values())


def _rows(place: Path | DatabaseAddress, query: str) -> Iterator[tuple[Any, ...]]:
    return _rows_of_file(place, query) if isinstance(place, Path) else _rows_of_database(place, query)


def _rows_of_database(address: DatabaseAddress, query: str) -> Iterator[tuple[Any, ...]]:
    """Looking makes no tables."""
    database, words = open_postgres(address), query.split(" FROM ")
    if database.read("SELECT to_regclass(?) IS NULL", [f"{address.schema}.decisions"])[0][0]:
        raise BadInput(f"{address.shown} is not a log of the server (serve --decisions): it holds no decisions.")
    yield from database.read(f"{words[0]} FROM {address.schema}.{words[1]}")


def _rows_of_file(path: Path, query: str) -> Iterator[tuple[Any, ...]]:
    """Of a table that may not be there: audits come with the first one."""
    check_regular_file(path)
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro", uri=True)) as file:
            tables = {name for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if "decisions" not in tables:
                raise BadInput(f"{path} is not a log of the server (serve --decisions): it holds no decisions.")
            if query.split(" FROM ")[1].split()[0] in tables:
                yield from file.execute(query)
    except sqlite3.Error as error:
        raise BadInput(f"{path} cannot be read as a log of the server: {error}.") from None


@dataclass(frozen=True)
class DecisionRecord:
    """What a record must say to be of use; of a request that was passed on, nothing."""

    retrieve: bool
    gate: str
    threshold: float
    need: float | None = None
    rule: str | None = None
    milliseconds: Mapping[str, float] = field(default_factory=dict)


def _record(text: Any, left_out: dict[str, int]) -> dict[str, Any]:
    """The record of a decision; nothing, and counted, where it says something else."""
    try:
        record = parse_json(str(text), "the record")
        if not isinstance(record, dict):
            raise BadInput("the record is no object.")
        if record.get("gated") is False:
            return record
        told = read_record(DecisionRecord, record, "the record", ignore_unknown=True)
        if told.need is None and not told.rule:
            raise BadInput("the record has no need.")
    except BadInput:
        _count(left_out, "that cannot be read")
        return {}
    return record


def _is_usable(record: Mapping[str, Any], arm: str | None, left_out: dict[str, int]) -> bool:
    if arm is not None and record.get("arm", "a") != arm:
        return False
    if record.get("gated") is False:
        _count(left_out, "passed on without a decision")
        return False
    if set(record.get("degraded") or ()) - {"alarm"}:
        _count(left_out, "decided without the gate, which failed")
        return False
    return True


def _count(left_out: dict[str, int], why: str) -> None:
    left_out[why] = left_out.get(why, 0) + 1


def _event(record: Mapping[str, Any], compared: Any) -> TrafficEvent:
    """What skipping and retrieving took; tokens are not on record."""
    retrieved, times = bool(record["retrieve"]), record.get("milliseconds") or {}
    need = float(retrieved) if record.get("rule") else float(record["need"])
    reading = sum(float(times.get(stage, 0.0)) for stage in SERVER_DECISION_STAGES) / 1000
    rest = EventCost(seconds=max(0.0, float(times.get("total", 0.0)) / 1000 - reading))
    skips = not retrieved or WOULD_SKIP_NOTE in (record.get("notes") or ())
    lost = [value for kind, value in compared if kind == "label" or skips]
    return TrafficEvent(
        need,
        retrieved,
        read=EventCost(seconds=reading),
        closed=EventCost() if retrieved else rest,
        opened=rest if retrieved else EventCost(),
        loses=bool(lost[-1]) if lost else None,
    )
