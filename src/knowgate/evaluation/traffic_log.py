"""Reader of logged traffic: the output of `knowgate ask --json` or `decide --json`, or a label run with a gate.

Lines that cannot be used are skipped and counted by reason.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from knowgate.core.files import read_lines
from knowgate.core.text import estimate_tokens
from knowgate.core.validation import parse_json
from knowgate.data.runs.columns import count_answer_tokens
from knowgate.data.runs.folder import RunFolder
from knowgate.data.runs.records import TableScores
from knowgate.data.runs.rows import GradedAnswer, LabelRow
from knowgate.data.runs.table import LabelTable, load_label_table
from knowgate.errors import BadInput
from knowgate.evaluation.replay import AnswerGrades, EventCost, TrafficEvent
from knowgate.gates import load_gate
from knowgate.gates.arbiters import NO_ARBITER, get_policy_arbiter
from knowgate.gates.arbiters.abstention import answers_differ
from knowgate.gates.arbiters.offline_arbitration import ArbiterChoices, arbitrate, get_arbiter_folder
from knowgate.gates.artifacts.gate_folder import is_artifact, read_artifact
from knowgate.gates.baselines import CONSTANT_GATE, CONSTANT_NEED
from knowgate.gates.calibration.threshold_calibration import select_usable_rows
from knowgate.gates.offline_scoring import score_gate
from knowgate.types import DecisionNote

DECISION_STAGES = ("read", "gate")  # pipeline stages before the decision
SERVER_DECISION_STAGES = ("rewrite", "read", "gate", "draft")  # the same of a server, as keys of `milliseconds`
SERVER_ANSWER_STAGES = ("retrieve", "answer")
CONSTANT_GATES = {"always", "never", CONSTANT_GATE}  # names of gates that decide the same for every question


@dataclass
class LoggedTraffic:
    """Questions of a log as events, with facts about the log.

    Attributes:
        path: File, folder or database address of the log.
        events: The questions that can be used.
        gates: Gates that decided, with their number of decisions.
        models: LLMs that answered, with their number of answers.
        thresholds: Thresholds that were in use, with their number of decisions.
        bad_lines: Numbers of the lines that cannot be used, by reason.
        left_out: Number of records left out, by reason.
        run_threshold: If the traffic is a label run: the threshold of the gate that decides on it. None for a log.
        n_estimated: Number of events whose prompt tokens are estimated from the text.
        arbiter: If the traffic is a label run: name of the arbiter, which chooses between the answers with and without
            passages. Empty without an arbiter.
    """

    path: Path | str
    events: list[TrafficEvent] = field(default_factory=list)
    gates: Counter[str] = field(default_factory=Counter)
    models: Counter[str] = field(default_factory=Counter)
    thresholds: Counter[float] = field(default_factory=Counter)
    bad_lines: dict[str, list[int]] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    run_threshold: float | None = None
    n_estimated: int = 0
    arbiter: str = ""

    @property
    def constant_decision(self) -> str:
        """What the gate decides on every question: 'always retrieves' or 'never retrieves'. '' if decisions vary."""
        if not self.gates or not set(self.gates) <= CONSTANT_GATES:
            return ""
        thresholds = [threshold for threshold in (*self.thresholds, self.run_threshold) if threshold is not None]
        # This gate gives every question the same need. It skips every search if its threshold is not below that need.
        constant_gate_skips = CONSTANT_GATE in self.gates and any(value >= CONSTANT_NEED for value in thresholds)
        skips = "never" in self.gates or constant_gate_skips
        return "never retrieves" if skips else "always retrieves"

    def describe_bad_lines(self) -> str:
        """Describe how many lines were skipped, and why; empty if none were."""
        return ", ".join(
            f"{len(numbers)} because {reason}, first in line {numbers[0]}" for reason, numbers in self.bad_lines.items()
        )


def read_traffic_log(path: Path) -> LoggedTraffic:
    """Read a log written by `knowgate ask --json` or `decide --json`. Unusable lines are counted in `bad_lines`.

    Raises:
        BadInput: No line can be used, or the log mixes several gates or LLMs.
    """
    log = LoggedTraffic(path)
    for number, line in read_lines(path):
        try:
            record = _parse_line(line)
            if "skipped" not in record:  # an empty question is skipped, and not answered
                _add_event(log, record)
        except ValueError as error:
            log.bad_lines.setdefault(str(error), []).append(number)
    _check_log(log)
    return log


def _add_event(log: LoggedTraffic, record: dict[str, Any]) -> None:
    """Add a logged question to the traffic. Raises ValueError for an unusable record."""
    log.events.append(parse_event(record))
    log.gates[str(record.get("gate", "?"))] += 1
    log.models[str(record.get("model", "?"))] += 1
    if _is_amount(record.get("threshold")):
        log.thresholds[float(record["threshold"])] += 1
    log.n_estimated += _has_estimated_prompt(record)


def _check_log(log: LoggedTraffic) -> None:
    """Raise BadInput if a log has no events, or events of several gates or LLMs."""
    if not log.events:
        problem = "the file is empty"
        if log.bad_lines:
            problem = f"none of its lines can be used ({log.describe_bad_lines()})"
        raise BadInput(
            f"the log {log.path} contains no questions: {problem}. First save JSON output of `knowgate ask` in it."
        )
    for kind, counts in (("gates", log.gates), ("models", log.models)):
        if len(counts) > 1:
            listing = ", ".join(f"{name} {count}" for name, count in counts.most_common())
            raise BadInput(
                f"the log {log.path} mixes several {kind}: {listing}. Their scores cannot be compared. Split the log into one "
                "file for each."
            )


def _has_estimated_prompt(record: Mapping[str, Any]) -> bool:
    """Return whether the record of an answer lacks a token count of a prompt."""
    prompts = ["closed_prompt", "open_prompt"] if record.get("passages") else ["closed_prompt"]
    recorded_counts = record.get("tokens") or ()
    return "answer" in record and any(prompt not in recorded_counts for prompt in prompts)


# --- one line -------------------------------------------------------------------------------------


def _parse_line(line: str) -> dict[str, Any]:
    """Parse a line with a JSON object, or raise ValueError."""
    try:
        record = parse_json(line, "the line")
    except BadInput:
        raise ValueError("the line is not JSON") from None
    if not isinstance(record, dict):
        raise ValueError("the line is not a JSON object")
    return record


def parse_event(record: Mapping[str, Any]) -> TrafficEvent:
    """Parse a record of `ask --json` or `decide --json`.

    Raises:
        ValueError: The record cannot be used; the message says why.
    """
    need, retrieved = record.get("need"), record.get("retrieve")
    if isinstance(need, bool) or not isinstance(need, int | float) or not 0 <= need <= 1:
        raise ValueError("the field 'need' is not a number from 0 to 1")
    if not isinstance(retrieved, bool):
        raise ValueError("the field 'retrieve' is neither true nor false")
    if record.get("rule"):  # an infinite need stands for a rule, which decides the same at every threshold
        need = -math.inf if would_skip(record) else math.inf
    if "answer" not in record:  # written by `decide`, which gives no answer
        return TrafficEvent(float(need), retrieved)
    return _parse_answer(record, float(need), retrieved=retrieved)


def would_skip(record: Mapping[str, Any]) -> bool:
    """Return whether the gate or a rule decided to skip the search, even if shadow mode retrieved anyway."""
    return not record["retrieve"] or DecisionNote.WOULD_SKIP in (record.get("notes") or ())


def _parse_answer(record: Mapping[str, Any], need: float, *, retrieved: bool) -> TrafficEvent:
    """Parse the record of an answered question. Unknown amounts are NaN.

    The log has the costs of the answer that was given, with or without passages. The costs of the other answer are mostly
    unknown.
    """
    passages = _get_passages(record)
    deciding, after, llm_after = _parse_seconds(
        record
    )  # seconds: until the decision, after it, and of the LLM after it
    tokens = _parse_tokens(record, passages)
    prompt, draft, answer = tokens["closed_prompt"], tokens["draft"], tokens["answer"]
    draft_cost = EventCost(seconds=deciding, prompt=prompt, completion=draft, gpu=deciding)
    decision_cost = draft_cost if draft else draft_cost._replace(prompt=0.0)  # a gate without a draft reads no prompt
    is_different = _answers_differ(record, has_passages=bool(passages))
    event = TrafficEvent(need, retrieved, decision_cost, loses_answer=is_different)
    if retrieved:
        rest = EventCost(seconds=after, prompt=tokens["open_prompt"], completion=answer, gpu=llm_after)
        event = replace(event, cost_if_retrieved=rest)
        return _add_costs_without_search(event, draft_cost, is_whole_answer="draft" in record)
    rest_prompt = 0.0 if draft else prompt  # a draft has read the prompt already, and the answer continues it
    rest = EventCost(seconds=after, prompt=rest_prompt, completion=_subtract(answer, draft), gpu=llm_after)
    whole = EventCost(seconds=deciding + after, prompt=prompt, completion=answer, gpu=deciding + llm_after)
    return replace(event, cost_if_skipped=rest, cost_without_gate=whole)


def _parse_seconds(record: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return three times: until the decision, after the decision, and of the LLM's answering after the decision."""
    seconds = _get_numbers(record, "seconds")
    if not seconds:
        return math.nan, math.nan, math.nan
    before = sum(seconds.get(stage, 0.0) for stage in DECISION_STAGES)
    return before, seconds.get("total", math.nan) - before, seconds.get("answer", 0.0)


def _parse_tokens(record: Mapping[str, Any], passages: list[str]) -> dict[str, float]:
    """Return the token counts of prompts, draft and answer. All but the draft are estimated if missing."""
    tokens = {"draft": math.nan, **_get_numbers(record, "tokens")}
    tokens.setdefault("closed_prompt", estimate_tokens(_get_text(record, "question")))
    tokens.setdefault("open_prompt", tokens["closed_prompt"] + sum(map(estimate_tokens, passages)))
    tokens.setdefault("answer", estimate_tokens(_get_text(record, "answer")))
    return tokens


def _add_costs_without_search(event: TrafficEvent, draft_cost: EventCost, *, is_whole_answer: bool) -> TrafficEvent:
    """Add to a question that was searched for what it would cost without the search.

    If the draft is a whole answer, its cost is that of an answer without a search. Otherwise, only the length of its
    prompt is known.
    """
    if not is_whole_answer:
        return replace(event, cost_without_gate=EventCost(prompt=draft_cost.prompt))
    nothing = EventCost(0.0, 0.0, 0.0, 0.0)  # the whole answer is written before the decision
    return replace(event, cost_if_skipped=nothing, cost_without_gate=draft_cost)


def _answers_differ(record: Mapping[str, Any], *, has_passages: bool) -> bool | None:
    """Return whether the answers with and without passages differ. None if one is missing."""
    if record["retrieve"] and not has_passages:
        return None
    # Either the answer without passages was made before retrieving, or the one with passages as a check after skipping.
    keys = ("draft", "answer") if record["retrieve"] else ("answer", "audit")
    if not all(key in record for key in keys):
        return None
    closed_book_answer, open_book_answer = (_get_text(record, key) for key in keys)
    return answers_differ(closed_book_answer, open_book_answer)


def _subtract(total: float, part: float) -> float:
    """Return total - part, but at least 0; NaN if either is unknown."""
    difference = total - part
    return difference if math.isnan(difference) else max(0.0, difference)


def _get_text(record: Mapping[str, Any], key: str) -> str:
    """Return a text of a record, or '' if missing. Raises ValueError if the value is not a text."""
    value = record.get(key, "")
    if not isinstance(value, str):
        raise ValueError(f"the field '{key}' is not a text")
    return value


def _get_numbers(record: Mapping[str, Any], key: str) -> dict[str, float]:
    """Return an object of named numbers, or {} if missing. Raises ValueError if the value is anything else."""
    value = record.get(key) or {}
    if not isinstance(value, dict) or not all(_is_amount(amount) for amount in value.values()):
        raise ValueError(f"the field '{key}' must be a JSON object whose values are numbers of at least 0")
    return {name: float(amount) for name, amount in value.items()}


def _is_amount(value: object) -> bool:
    """Return whether a value is a finite number of at least 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _get_passages(record: Mapping[str, Any]) -> list[str]:
    """Return title and text of each passage. Raises ValueError if 'passages' is not a list of JSON objects."""
    value = record.get("passages") or []
    if not isinstance(value, list) or not all(isinstance(passage, dict) for passage in value):
        raise ValueError("the field 'passages' is not a list of JSON objects")
    return [f"{_get_text(passage, 'title')} {_get_text(passage, 'text')}" for passage in value]


# --- label runs -----------------------------------------------------------------------------------


def read_label_run_traffic(path: Path, gate: str, arbiter: str | None = None) -> LoggedTraffic:
    """Read a label run, a folder of graded answers, as if a gate had decided on its questions.

    Questions that the gate or the arbiter was fitted on are left out.

    Args:
        path: Folder of the run.
        gate: Spec or folder of the gate.
        arbiter: Arbiter, which chooses one of both answers after a search. 'none' for no arbiter, None for the one that
            is stored with the gate, if any.

    Raises:
        BadInput: The gate or the arbiter was fitted on all questions of the run.
    """
    arbiter = arbiter or get_policy_arbiter(gate) or NO_ARBITER
    artifact = read_artifact(gate) if is_artifact(gate) else None
    table, left_out = select_usable_rows(load_label_table([path]), artifact, get_arbiter_folder(arbiter))
    if not table.rows:
        raise BadInput(
            f"the gate '{gate}' was trained on every question of '{path}', so a replay proves nothing. Use a label run "
            "(recorded answers) with other questions."
        )
    scores = score_gate(table, gate)
    choices = None if arbiter == NO_ARBITER else arbitrate(table, arbiter)
    events = _make_graded_events(table, gate, scores, choices, _get_seconds_per_token(path))
    return LoggedTraffic(
        path,
        events,
        gates=Counter({scores.gate: len(events)}),
        models=Counter({str(table.settings["model"]): len(events)}),
        left_out=Counter(left_out),
        run_threshold=scores.threshold,
        n_estimated=int(table.has_text.sum()),
        arbiter=choices.name if choices else "",
    )


def _make_graded_events(
    table: LabelTable, gate: str, scores: TableScores, choices: ArbiterChoices | None, seconds_per_token: float
) -> list[TrafficEvent]:
    """Make a traffic event per graded question, with need, costs and grades.

    Args:
        table: The labeled questions.
        gate: Spec or folder of the gate.
        scores: The need for retrieval of each question, and how many tokens and calls the gate needs to decide.
        choices: Which answers an arbiter chooses after a search; None without an arbiter.
        seconds_per_token: GPU seconds of the LLM per generated token.
    """
    has_draft = scores.drafts or choices is not None
    # An arbiter reads the whole draft. How much of it a gate with stored decisions reads is unknown: assume all.
    reads_whole_draft = choices is not None or table.find_recorded(gate) is not None
    max_draft_tokens = math.inf if reads_whole_draft else load_gate(gate).request.draft_tokens
    given_right = choices.right if choices else table.retrieved_right
    grades = map(AnswerGrades, table.closed_book_right.tolist(), table.retrieved_right.tolist(), given_right.tolist())
    events = []
    for row, need, grade in zip(table.rows, scores.needs.tolist(), grades, strict=True):
        draft_tokens = min(_count_known_tokens(row.closed), max_draft_tokens) if has_draft else 0.0
        event = _make_graded_event(row, need, draft_tokens + scores.extra_tokens, seconds_per_token)
        event = replace(event, extra_calls=scores.calls, has_draft=has_draft)
        if table.open_book_right is not None:
            event = replace(event, loses_answer=grade.given and not grade.closed_book, right=grade)
        events.append(event)
    return events


def _get_seconds_per_token(path: Path) -> float:
    """Return the LLM's seconds per token, measured while labeling. NaN if unknown."""
    rate = RunFolder(path).manifest().get("totals", {}).get("tokens_per_second")
    return 1 / rate if rate else math.nan


def _count_known_tokens(answer: GradedAnswer | None) -> float:
    """Count the tokens of an answer, or its words. NaN if neither is stored."""
    is_known = answer and (answer.text or answer.tokens is not None or answer.n_tokens is not None)
    return count_answer_tokens(answer) if is_known else math.nan


def _make_graded_event(row: LabelRow, need: float, draft: float, seconds_per_token: float) -> TrafficEvent:
    """Make the traffic event of a labeled question: need and costs, without grades. Unknown amounts are NaN.

    Args:
        row: The labeled question.
        need: Need for retrieval that the gate gives.
        draft: Number of draft tokens that the gate reads. The answer without passages continues the draft.
        seconds_per_token: GPU seconds of the LLM per generated token.
    """
    closed_book_prompt = estimate_tokens(row.question) if row.question else math.nan
    open_book_prompt = math.nan
    if row.passages:
        passage_tokens = sum(estimate_tokens(f"{passage.title} {passage.text}") for passage in row.passages)
        open_book_prompt = closed_book_prompt + passage_tokens
    closed_book_answer = _count_known_tokens(row.closed)
    # The prompt is read once: before the decision if there is a draft, else after it.
    no_tokens = 0.0 if row.question else math.nan  # without the text of the question, all counts are unknown
    prompt_before, prompt_after = (closed_book_prompt, no_tokens) if draft else (no_tokens, closed_book_prompt)

    def make_cost(prompt: float, completion: float) -> EventCost:
        return EventCost(prompt=prompt, completion=completion, gpu=completion * seconds_per_token)

    return TrafficEvent(
        need,
        decision_cost=make_cost(prompt_before, draft),
        cost_if_skipped=make_cost(prompt_after, _subtract(closed_book_answer, draft)),
        cost_if_retrieved=make_cost(open_book_prompt, _count_known_tokens(row.open)),
        cost_without_gate=make_cost(closed_book_prompt, closed_book_answer),
    )


def split_seconds(milliseconds: Mapping[str, float]) -> tuple[float, float]:
    """Return the seconds of a request until its decision, and the seconds after it. The keys are stages and "total".

    While a search runs beside the draft, the time counts as that of the search, which always retrieving needs, too.
    """
    deciding = sum(float(milliseconds.get(stage, 0.0)) for stage in SERVER_DECISION_STAGES)
    total = float(milliseconds.get("total", 0.0))
    answering = sum(float(milliseconds.get(stage, 0.0)) for stage in SERVER_ANSWER_STAGES)
    deciding -= min(deciding, max(0.0, deciding + answering - total))
    return deciding / 1000, max(0.0, total - deciding) / 1000
