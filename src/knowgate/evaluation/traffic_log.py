"""Logged traffic read into events: lines of `knowgate ask --json` or `decide --json`, or a label run scored by a gate.

A line that cannot be used is counted, with the number of the first of its kind; it is never guessed at.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.core.files import read_lines
from knowgate.core.text import contains_tokens, estimate_tokens, tokenize
from knowgate.core.validation import parse_json
from knowgate.data.runs.folder import RunFolder
from knowgate.data.runs.rows import GradedAnswer, LabelRow
from knowgate.data.runs.table import LabelTable, load_label_table
from knowgate.errors import BadInput, BadSetting
from knowgate.evaluation.replay import EventCost, TrafficEvent
from knowgate.gates import load_gate
from knowgate.gates.arbiters.offline_arbitration import arbitrate, get_arbiter_folder
from knowgate.gates.artifacts.gate_folder import is_artifact, read_artifact
from knowgate.gates.calibration.threshold_calibration import select_usable_rows
from knowgate.gates.offline_scoring import TableScores, score_gate

DECISION_STAGES = ("read", "gate")  # stages of the pipeline that come before the decision
ANSWER_STAGES = ("answer",)  # those in which the LLM answers after it


@dataclass
class LoggedTraffic:
    """What a log holds. bad: reason -> line numbers. estimated: events whose prompts were measured by their characters.

    thresholds: those the gate ran with. own: that of the gate tried on a label run.
    """

    path: Path | str
    events: list[TrafficEvent] = field(default_factory=list)
    gates: Counter[str] = field(default_factory=Counter)
    models: Counter[str] = field(default_factory=Counter)
    thresholds: Counter[float] = field(default_factory=Counter)
    bad: dict[str, list[int]] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    own: float | None = None
    estimated: int = 0


def read_traffic_log(path: Path) -> LoggedTraffic:
    """The usable lines of a log of one gate and one model."""
    log = LoggedTraffic(path)
    for number, line in read_lines(path):
        try:
            record = _parsed(line)
            if "skipped" in record:  # an empty line
                continue
            log.events.append(parse_event(record))
        except ValueError as error:
            log.bad.setdefault(str(error), []).append(number)
            continue
        log.gates[str(record.get("gate", "?"))] += 1
        log.models[str(record.get("model", "?"))] += 1
        if _is_amount(record.get("threshold")):
            log.thresholds[float(record["threshold"])] += 1
        log.estimated += _is_estimated(record)
    _check(log)
    return log


def _check(log: LoggedTraffic) -> None:
    if not log.events:
        why = f"none of its lines can be used ({format_bad_lines(log)})" if log.bad else "it is empty"
        raise BadInput(
            f"there is no traffic in {log.path}: {why}. Log some: knowgate ask --json ... >> {log.path}",
        )
    for what, counted in (("gates", log.gates), ("models", log.models)):
        if len(counted) > 1:
            listed = ", ".join(f"{name} {count}" for name, count in counted.most_common())
            raise BadInput(
                f"{log.path} mixes lines of several {what} ({listed}); their needs cannot be compared. Split the log."
            )


def format_bad_lines(log: LoggedTraffic) -> str:
    return ", ".join(f"{len(lines)} {reason}, first in line {lines[0]}" for reason, lines in log.bad.items())


def _is_estimated(record: Mapping[str, Any]) -> bool:
    needed = {"closed_prompt"} | ({"open_prompt"} if record.get("passages") else set())
    return "answer" in record and not needed <= set(record.get("tokens") or ())


# --- one line -------------------------------------------------------------------------------------


def _parsed(line: str) -> dict[str, Any]:
    try:
        record = parse_json(line, "the line")
    except BadInput:
        raise ValueError("not JSON") from None
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    return record


def parse_event(record: Mapping[str, Any]) -> TrafficEvent:
    """A line of `ask --json` or `decide --json`; ValueError says what is wrong with it."""
    need, retrieved = record.get("need"), record.get("retrieve")
    if isinstance(need, bool) or not isinstance(need, int | float) or not 0 <= need <= 1:
        raise ValueError("without a need between 0 and 1")
    if not isinstance(retrieved, bool):
        raise ValueError("without a decision ('retrieve')")
    if record.get("rule"):  # decided whatever the need, so it would be at any threshold
        need = float(retrieved)
    if "answer" not in record:  # of `decide`: nothing was answered
        return TrafficEvent(float(need), retrieved)
    seconds, counts = _numbers(record, "seconds"), _numbers(record, "tokens")
    question, passages = _text(record, "question"), _passages(record)
    reading = sum(seconds.get(stage, 0.0) for stage in DECISION_STAGES) if seconds else math.nan
    rest = seconds["total"] - reading if "total" in seconds else math.nan
    asked = counts.get("closed_prompt", estimate_tokens(question))
    drafted, written = counts.get("draft", math.nan), counts.get("answer", estimate_tokens(_text(record, "answer")))
    shown = counts.get("open_prompt", asked + sum(map(estimate_tokens, passages)))
    whole = (
        EventCost(0.0, 0.0, 0.0, 0.0) if "draft" in record else EventCost()
    )  # the gate had read the whole closed-book answer
    answering = sum(seconds.get(stage, 0.0) for stage in ANSWER_STAGES) if seconds else math.nan
    if retrieved:
        alone = EventCost(reading, asked, drafted, reading) if "draft" in record else EventCost(prompt=asked)
    else:
        alone = EventCost(reading + rest, asked, written, reading + answering)
    return TrafficEvent(
        float(need),
        retrieved,
        read=EventCost(reading, asked if drafted else 0.0, drafted, reading),
        closed=whole if retrieved else EventCost(rest, 0.0 if drafted else asked, _left(written, drafted), answering),
        opened=EventCost(rest, shown, written, answering) if retrieved else EventCost(),
        alone=alone,
        loses=_loses(record, shown=bool(passages)),
    )


def _loses(record: Mapping[str, Any], *, shown: bool) -> bool | None:
    """Whether the two answers disagree: draft and answer, or answer and the audit of a skip."""
    key = "audit" if not record["retrieve"] else "draft" if shown else ""
    return not answers_agree(_text(record, key), _text(record, "answer")) if key in record else None


def answers_agree(one: str, other: str) -> bool:
    """One answer's words stand in the other's, in a row. A weak sign: both may be wrong."""
    first, second = tokenize(one), tokenize(other)
    return contains_tokens(first, second) or contains_tokens(second, first)


def _left(written: float, drafted: float) -> float:
    """Tokens of an answer that were not in its draft; unknown if either is."""
    left = written - drafted
    return left if math.isnan(left) else max(0.0, left)


def _text(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key, "")
    if not isinstance(value, str):
        raise ValueError(f"with '{key}' that is no text")
    return value


def _numbers(record: Mapping[str, Any], key: str) -> dict[str, float]:
    value = record.get(key) or {}
    if not isinstance(value, dict) or not all(_is_amount(amount) for amount in value.values()):
        raise ValueError(f"with '{key}' that are no numbers by name")
    return {name: float(amount) for name, amount in value.items()}


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _passages(record: Mapping[str, Any]) -> list[str]:
    value = record.get("passages") or []
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise ValueError("with 'passages' that are no list of objects")
    return [f"{_text(one, 'title')} {_text(one, 'text')}" for one in value]


# --- label runs -----------------------------------------------------------------------------------


def read_label_run_traffic(path: Path, gate: str | None, arbiter: str | None = None) -> LoggedTraffic:
    """A label run as traffic: the gate's need, both answers, both grades. Seconds per way are not on record there.

    arbiter: chooses after retrieval; skipping a question then loses what it would have given.
    """
    if not gate:
        raise BadSetting(
            f"'{path}' is a label run, which holds no needs: say whose to try, as --gate logprob or a folder."
        )
    artefact = read_artifact(gate) if is_artifact(gate) else None
    trial, left_out = select_usable_rows(load_label_table([path]), artefact, get_arbiter_folder(arbiter))
    if not trial.rows:
        raise BadInput(f"the gate '{gate}' was fitted on every question of '{path}': replay others.")
    scored = score_gate(trial, gate)
    drafted = np.minimum(trial.closed_tokens, _draft_limit(trial, gate, scored)) + scored.extra_tokens
    pace = _pace(path)
    given = trial.always_right if arbiter is None else arbitrate(trial, arbiter).right
    events = [
        _graded(row, float(need), float(read), None if trial.open_right is None else bool(opened and not closed), pace)
        for row, need, read, closed, opened in zip(
            trial.rows, scored.needs, drafted, trial.closed_right, given, strict=True
        )
    ]
    log = LoggedTraffic(path, events, left_out=left_out, own=scored.threshold, estimated=len(events))
    log.gates[scored.name] = log.models[str(trial.settings["model"])] = len(events)
    return log


def _draft_limit(trial: LabelTable, gate: str, scored: TableScores) -> float:
    """Draft tokens the gate reads; of a recorded gate only whether it does is known."""
    if gate in trial.recorded_needs:
        return math.inf if scored.drafts else 0.0
    return float(load_gate(gate).request.draft_tokens)


def _pace(path: Path) -> float:
    """Seconds that the LLM took for a token when the run was labelled, many questions at a time."""
    rate = RunFolder(path).manifest().get("totals", {}).get("tokens_per_second")
    return 1 / rate if rate else math.nan


def _length(side: GradedAnswer | None) -> float:
    """Tokens of an answer, words where there are none; not a number where neither is on record."""
    if side is None or (side.tokens is None and not side.text):
        return math.nan
    return float(len(side.tokens) if side.tokens is not None else len(side.text.split()))


def _graded(row: LabelRow, need: float, drafted: float, loses: bool | None, pace: float) -> TrafficEvent:
    asked = estimate_tokens(row.question)
    closed, opened = (_length(side) for side in (row.closed, row.open))
    shown = asked + sum(estimate_tokens(f"{one.title} {one.text}") for one in row.passages)
    return TrafficEvent(
        need,
        read=EventCost(prompt=asked if drafted else 0.0, completion=drafted, gpu=drafted * pace),
        closed=EventCost(
            prompt=0.0 if drafted else asked, completion=_left(closed, drafted), gpu=_left(closed, drafted) * pace
        ),
        opened=EventCost(prompt=shown if row.passages else math.nan, completion=opened, gpu=opened * pace),
        loses=loses,
        alone=EventCost(prompt=asked, completion=closed, gpu=closed * pace),
    )
