"""Reader of the server's decision log (`knowgate serve --decisions FILE`), as traffic or as questions.

The log is never changed. Decisions that were made without the gate are skipped and counted.
"""

from __future__ import annotations

import itertools
import math
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from knowgate.core.postgres import open_postgres
from knowgate.core.postgres.address import DatabaseAddress
from knowgate.core.schema import read_record
from knowgate.core.validation import check_regular_file, parse_json
from knowgate.data.splits import fingerprint_text_loosely
from knowgate.errors import BadInput
from knowgate.evaluation.replay import EventCost, TrafficEvent
from knowgate.evaluation.traffic_log import LoggedTraffic, split_seconds, would_skip
from knowgate.types import Question

SQLITE_MAGIC = b"SQLite format 3\0"
ERROR_STATUS = 300  # the lowest HTTP status without an answer; redirects of an upstream are not followed
SEPARATE_DRAFT = "separate-draft"  # the way of requests whose draft is read by the gate and never sent
# Whether the draft is the answer to a skipped question. Unknown for an LLM in the process of the server.
DRAFT_BY_WAY = {"question": False, "draft": True, "race": True, SEPARATE_DRAFT: False}
DECISIONS_QUERY = "SELECT id, record FROM decisions ORDER BY at, id"
AUDITS_QUERY = "SELECT decision, kind, lost FROM audits WHERE kind <> 'cleared' ORDER BY number"
QUESTIONS_QUERY = "SELECT id, question FROM decisions WHERE question IS NOT NULL ORDER BY at DESC, id"
NO_KEY = ""  # owner of decisions on a server without API keys, and of questions that several keys asked
OWNERS_QUERY = "SELECT id, owner FROM decisions WHERE question IS NOT NULL"
CORRECTIONS_QUERY = "SELECT decision, answer, at FROM corrections WHERE TRIM(answer) <> '' ORDER BY at"
FEEDBACK_QUERY = "SELECT decision, at, owner FROM feedback"

LogLocation = Path | DatabaseAddress


def is_server_log(path: Path) -> bool:
    """Return whether a file is an SQLite database, as the decision logs of a server are. Other logs are text."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(SQLITE_MAGIC)) == SQLITE_MAGIC


def read_server_log(location: LogLocation, arm: str | None = None) -> LoggedTraffic:
    """Read the server's decision log as traffic, for replaying thresholds.

    Only decisions of the most frequent combination of gate, threshold and arm are read.

    Args:
        location: SQLite file or PostgreSQL address.
        arm: Read only decisions of this arm of an A/B test ('a' or 'b').

    Raises:
        BadInput: The log contains no decision of a gate, or is not a decision log.
    """
    decisions, left_out = _read_usable_decisions(location, arm)
    if not decisions:
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
        explanation = f" (left out: {reasons})" if reasons else ""
        raise BadInput(
            f"the decision log {_get_path(location)} contains no usable decision{explanation}. Send more questions to the "
            "server. Or choose another `arm` (group of the A/B test)."
        )
    counts = Counter(map(_get_gate_threshold_and_arm, decisions.values()))
    most_frequent, n_events = counts.most_common(1)[0]
    if n_events < len(decisions):
        left_out["of another gate, threshold or arm"] = len(decisions) - n_events
    selected = {key: item for key, item in decisions.items() if _get_gate_threshold_and_arm(item) == most_frequent}
    audits = _read_audits(location)
    drafts_for_arbiter = _has_drafts_for_arbiter(selected.values())
    _, threshold, _ = most_frequent
    return LoggedTraffic(
        _get_path(location),
        events=[_make_event(record, audits.get(key, ()), drafts_for_arbiter) for key, record in selected.items()],
        gates=Counter(str(record["gate"]) for record in selected.values()),
        models=Counter(str(record.get("model", "?")) for record in selected.values()),
        thresholds=Counter({threshold: n_events}),
        left_out=left_out,
    )


def _read_usable_decisions(location: LogLocation, arm: str | None) -> tuple[dict[str, dict[str, Any]], Counter[str]]:
    """Read the decisions of one arm that can be replayed; all arms if `arm` is None.

    Returns:
        The decisions by their key, and how many were left out for each reason.
    """
    decisions: dict[str, dict[str, Any]] = {}
    left_out = Counter[str]()
    for key, text in _read_rows(location, DECISIONS_QUERY):
        try:
            record = _parse_record(text)
        except BadInput:
            left_out["that cannot be read"] += 1
            continue
        if arm in (None, _get_arm(record)):
            reason = _find_reason_to_leave_out(record)
            if reason:
                left_out[reason] += 1
            else:
                decisions[key] = record
    return decisions, left_out


def _read_audits(location: LogLocation) -> dict[str, list[tuple[str, float | None]]]:
    """Read the audits of each decision, as (kind, 1 if skipping the search lost the answer; None if the audit failed).

    An audit answers a question with and without passages.
    """
    audits: dict[str, list[tuple[str, float | None]]] = {}
    for decision, kind, lost in _read_rows(location, AUDITS_QUERY):
        audits.setdefault(decision, []).append((kind, lost))
    return audits


def _get_gate_threshold_and_arm(record: Mapping[str, Any]) -> tuple[str, float, str]:
    """Return the gate, the threshold and the arm of a stored decision. Both arms may have gates of the same name."""
    gate = record.get("gate_spec") or record["gate"]  # such as 'logprob:mean'; earlier versions stored only 'logprob'
    return str(gate), float(record["threshold"]), _get_arm(record)


def _get_arm(record: Mapping[str, Any]) -> str:
    """Return the arm of an A/B test that made a stored decision; 'a' without an A/B test."""
    return str(record.get("arm") or "a")


@dataclass(frozen=True)
class LoggedQuestions:
    """Questions of a decision log, with corrections by users as gold answers.

    Attributes:
        questions: The questions, newest first.
        n_corrections: Number of questions with a correction.
        n_keys: Number of API keys that gave these corrections.
        n_unused: Number of these corrections that are not used, because one key gave most of them, or because another key
            asked the question, too.
    """

    questions: list[Question]
    n_corrections: int = 0
    n_keys: int = 0
    n_unused: int = 0


@dataclass(frozen=True)
class Correction:
    """The right answer to a question, from a user's feedback.

    Attributes:
        answer: The right answer.
        giver: Name of the API key that gave it; empty on a server without keys.
        is_trusted: Whether it counts in full: it comes from an admin key, or from a server without keys.
    """

    answer: str
    giver: str
    is_trusted: bool


def read_logged_questions(location: LogLocation, limit: int, *, trusts_keys: bool = False) -> LoggedQuestions:
    """Read the newest distinct questions of a decision log. Corrections by people become gold answers.

    If several API keys asked questions, they take turns. One key gives at most half of the gold answers, and none to
    questions that another key asked, too. Neither applies to an admin key.

    Args:
        location: SQLite file or PostgreSQL address.
        limit: Maximum number of questions.
        trusts_keys: Use all questions and corrections, because all API keys belong together.

    Raises:
        BadInput: The log contains no texts of questions.
    """
    owners = {str(key): str(owner or "") for key, owner in _read_rows(location, OWNERS_QUERY)}
    corrections = _read_corrections(location, owners)
    newest, askers = _read_distinct(location, corrections, owners, limit)
    questions = newest[:limit]
    limits_keys = not trusts_keys and len(set(owners.values())) > 1
    if limits_keys:
        questions = _take_turns(newest, askers, limit)
    if not questions:
        raise BadInput(
            f"the decision log {_get_path(location)} contains no question texts. Start the server with keep_questions=True to "
            "store them."
        )
    found = {item.id: corrections[item.id] for item in questions if item.answers}
    unused = _list_unused(found, askers) if limits_keys else []
    kept = [replace(item, answers=()) if item.id in unused else item for item in questions]
    n_keys = len({correction.giver for correction in found.values()})
    return LoggedQuestions(kept, len(found), n_keys, n_unused=len(unused))


def _read_distinct(
    location: LogLocation, corrections: Mapping[str, Correction], owners: Mapping[str, str], limit: int
) -> tuple[list[Question], dict[str, str]]:
    """Read the newest distinct questions of each API key, at most `limit` of a key. Case and punctuation do not matter.

    Returns:
        The questions, newest first, each with its newest correction as gold answer, if there is one, but trusted
        corrections first; and for the id of each question, the API key that asked it, or NO_KEY if several keys did.
    """
    questions: dict[str, Question] = {}  # by fingerprint
    askers: dict[str, str] = {}  # by fingerprint
    counts = Counter[str]()
    for decision_id, text in _read_rows(location, QUESTIONS_QUERY):  # from newest to oldest
        key, asker = fingerprint_text_loosely(text), owners.get(decision_id, NO_KEY)
        correction = corrections.get(decision_id)
        is_new = key not in questions and counts[asker] < limit
        # A corrected decision replaces a newer one of the same question that was not corrected.
        if is_new or (key in questions and _is_better(correction, corrections.get(questions[key].id))):
            questions[key] = Question(text, id=str(decision_id), answers=(correction.answer,) if correction else ())
        if key in questions:
            askers[key] = asker if askers.get(key, asker) == asker else NO_KEY
            counts[asker] += is_new
    return list(questions.values()), {question.id: askers[key] for key, question in questions.items()}


def _is_better(correction: Correction | None, newer: Correction | None) -> bool:
    """Return whether a correction replaces a newer one of the same question, or none."""
    return correction is not None and (newer is None or (correction.is_trusted and not newer.is_trusted))


def _take_turns(questions: Sequence[Question], askers: Mapping[str, str], limit: int) -> list[Question]:
    """Select at most `limit` questions, so that the API keys take turns. The order of the questions stays the same.

    `questions` are newest first, so each key contributes its newest questions.
    """
    by_key: dict[str, list[Question]] = {}
    for question in questions:
        by_key.setdefault(askers[question.id], []).append(question)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*by_key.values()))
    ids_in_turns = [question.id for question in turns if question is not None]
    selected = set(ids_in_turns[:limit])
    return [question for question in questions if question.id in selected]


def _read_corrections(location: LogLocation, owners: Mapping[str, str]) -> dict[str, Correction]:
    """Read the corrections by the id of their decision. `owners` has the API key of each decision."""
    # A correction has the same time as the feedback that it came with.
    givers = {(decision, at): str(key or NO_KEY) for decision, at, key in _read_rows(location, FEEDBACK_QUERY)}
    corrections = {}
    for decision, answer, at in _read_rows(location, CORRECTIONS_QUERY):
        owner = owners.get(decision, NO_KEY)
        giver = givers.get((decision, at), owner)
        # A server without keys trusts everyone. Only an admin key can correct an answer for another key.
        is_trusted = giver == NO_KEY or giver != owner
        corrections[str(decision)] = Correction(str(answer), giver, is_trusted)
    return corrections


def _list_unused(corrections: Mapping[str, Correction], askers: Mapping[str, str]) -> list[str]:
    """Return the ids of questions whose correction may not be used, so that no API key decides for the others.

    Args:
        corrections: Correction of each question, by its id.
        askers: API key that asked each question, or NO_KEY if several did.
    """
    foreign = [id for id, item in corrections.items() if not item.is_trusted and askers[id] == NO_KEY]
    givers = {id: NO_KEY if item.is_trusted else item.giver for id, item in corrections.items() if id not in foreign}
    return foreign + _list_excess(givers)


def _list_excess(keys: Mapping[str, str]) -> list[str]:
    """Return the ids to remove, so that the API key with most ids has at most half of the ids that remain.

    Args:
        keys: API key of each id. NO_KEY stands for ids that are not limited. The last ids of a key are removed.
    """
    ids_by_key: dict[str, list[str]] = {}
    for id, key in keys.items():
        if key != NO_KEY:
            ids_by_key.setdefault(key, []).append(id)
    largest = max(ids_by_key.values(), key=len, default=[])
    n_others = len(keys) - len(largest)
    return largest[n_others:]


# --- tables ---------------------------------------------------------------------------------------


def _get_path(location: LogLocation) -> Path | str:
    """Return the file, or the address without its password."""
    return location if isinstance(location, Path) else location.redacted


def _read_rows(location: LogLocation, query: str) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a query. Raises BadInput if the database is not a decision log."""
    if isinstance(location, Path):
        return _read_sqlite_rows(location, query)
    return _read_postgres_rows(location, query)


def _read_postgres_rows(address: DatabaseAddress, query: str) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a query from a PostgreSQL database.

    The table in the query gets its schema: 'SELECT id FROM audits' becomes 'SELECT id FROM knowgate.audits'.

    Raises:
        BadInput: The schema has no table `decisions`, so it is not a decision log.
    """
    database = open_postgres(address)
    ((is_missing,),) = database.read("SELECT to_regclass(?) IS NULL", [f"{address.schema}.decisions"])
    if is_missing:
        raise BadInput(
            f"the database {address.redacted} is not a decision log: the table `decisions` is missing. Check the address and "
            "the PostgreSQL schema."
        )
    columns, _, table_and_conditions = query.partition(" FROM ")
    yield from database.read(f"{columns} FROM {address.schema}.{table_and_conditions}")


def _read_sqlite_rows(path: Path, query: str) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a query from an SQLite file.

    There are no rows if the table or column in the query is missing, as in logs of earlier versions.

    Raises:
        BadInput: The file is not a SQLite database with a table `decisions`.
    """
    check_regular_file(path)
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro", uri=True)) as database:
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if "decisions" not in tables:
                raise BadInput(
                    f"the file {path} is not a decision log: the table `decisions` is missing. Check the file name."
                )
            queried_table = query.split(" FROM ")[1].split()[0]
            if queried_table in tables:
                yield from database.execute(query)
    except sqlite3.Error as error:
        if "no such column" in str(error):  # earlier versions did not store API keys
            return
        raise BadInput(
            f"the decision log {path} cannot be read: {error}. Check the file, or restore a backup."
        ) from None


# --- records --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecisionRecord:
    """Fields of a stored decision that must be valid. Other fields are ignored.

    Attributes:
        retrieve: Whether passages were retrieved.
        gate: Name of the gate.
        threshold: Threshold of the gate.
        need: Need for retrieval that the gate computed; None if a rule decided.
        rule: Name of the rule that decided instead of the gate.
        milliseconds: Time of each stage.
        status: HTTP status of the response; earlier versions did not store it.
    """

    retrieve: bool
    gate: str
    threshold: float
    need: float | None = None
    rule: str | None = None
    milliseconds: Mapping[str, float] = field(default_factory=dict)
    status: int = 200


def _parse_record(text: Any) -> dict[str, Any]:
    """Parse the JSON of a stored decision. Raises BadInput if it is not valid."""
    record = parse_json(str(text), "the record")
    if not isinstance(record, dict):
        raise BadInput("the decision is not a JSON object.")
    if record.get("gated") is False:  # forwarded without a decision, so the fields below are missing
        return record
    decision = read_record(DecisionRecord, record, "the record", ignore_unknown=True)
    if decision.need is None and not decision.rule:
        raise BadInput("the decision lacks the field 'need' (the score of the gate).")
    return record


def _find_reason_to_leave_out(record: Mapping[str, Any]) -> str | None:
    """Return why a decision cannot be replayed; None if it can. The text follows a number: '3 whose search failed'."""
    if record.get("own_options"):
        return "that set options of their own"
    if record.get("gated") is False:
        return "passed on without a decision"
    if record.get("status", 200) >= ERROR_STATUS:
        return "answered with an error"
    failed = set(record.get("degraded") or ()) - {"alarm", "arbiter"}  # with these alone, the gate has decided
    if failed:
        return "whose search failed" if failed == {"retriever"} else "decided without the gate, which failed"
    return None


def _has_drafts_for_arbiter(records: Collection[Mapping[str, Any]]) -> bool:
    """Return whether only the arbiter reads drafts, so that a draft is made only after a decision to retrieve."""
    ways = {(record.get("way"), bool(record["retrieve"])) for record in records if not record.get("rule")}
    return ("question", False) in ways and bool(ways & {("draft", True), ("race", True)})


def _make_event(
    record: Mapping[str, Any], audits: Sequence[tuple[str, float | None]], drafts_for_arbiter: bool = False
) -> TrafficEvent:
    """Convert a logged decision to a traffic event. The log has no token counts.

    Args:
        record: The decision.
        audits: Audits of the decision, oldest first, as of `_read_audits`. The newest that compared both answers counts.
        drafts_for_arbiter: Whether a question that was skipped would get a draft if it were retrieved for.
    """
    skips = would_skip(record)
    rule_need = -math.inf if skips else math.inf  # a rule decides the same at every threshold
    deciding_seconds, answering_seconds = split_seconds(record.get("milliseconds") or {})
    answering = EventCost(seconds=answering_seconds)
    # An audit of kind 'label' always compares both answers. Other audits compare them only if the client may have
    # received the answer without passages: because the gate skipped the search, or because the arbiter sent the draft.
    choice = record.get("choice")
    sent_draft = isinstance(choice, dict) and choice.get("given") == "draft"
    losses = [lost for kind, lost in audits if lost is not None and (kind == "label" or skips or sent_draft)]
    retrieved = bool(record["retrieve"])
    way = str(record.get("way"))  # how the request was processed; 'race' starts the search together with the draft
    nothing_found = retrieved and record.get("passages") == []  # then the draft is sent, and there is no second answer
    would_draft = drafts_for_arbiter and way == "question" and not retrieved
    event = TrafficEvent(
        rule_need if record.get("rule") or record["gate"] == "always" else float(record["need"]),
        retrieved,
        decision_cost=EventCost(seconds=deciding_seconds),
        loses_answer=bool(losses[-1]) if losses else None,
        audit_failed=not losses and any(lost is None for _, lost in audits),
        extra_calls=float(way == SEPARATE_DRAFT) + record.get("gate_calls", 0),  # earlier versions did not store them
        has_draft=would_draft or (DRAFT_BY_WAY.get(way) and not nothing_found),
        is_searched_early=way == "race" and not drafts_for_arbiter,
    )
    if record.get("only_decided"):  # the costs of searching and answering are known only to the application
        return event
    return replace(event, cost_if_retrieved=answering) if retrieved else replace(event, cost_if_skipped=answering)
