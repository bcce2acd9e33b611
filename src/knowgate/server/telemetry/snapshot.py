"""Data for the dashboard: statistics combined over all server processes, and the recent decisions of this process.

Savings are estimated. A request that skips retrieval saves the mean cost of passages of the requests that got some. The
cost of the gate and of drafts that were discarded is subtracted. Seconds are computed as by `knowgate replay`. Before
the first request with passages, the savings are unknown.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from knowgate.core.text import estimate_tokens
from knowgate.data.history.entries import question_key
from knowgate.evaluation.replay import PolicyCost
from knowgate.evaluation.server_log import ERROR_STATUS, SEPARATE_DRAFT
from knowgate.evaluation.traffic_log import split_seconds
from knowgate.server.options import ServeOptions
from knowgate.server.telemetry.deletions import DeletionIndex
from knowgate.server.telemetry.trace import RequestTrace, TokenUsage
from knowgate.types import Decision, DecisionNote

log = logging.getLogger(__name__)

NEED_BINS = 20  # bins of the histogram of the need for retrieval, from 0 to 1
MINUTES_SHOWN = 60
MINUTE_SECONDS = 60.0
MAX_RECENT_DECISIONS = 500
MAX_STAGE_TIMES = 200  # timings stored for each stage
DRAFT_WAYS = ("draft", "race", SEPARATE_DRAFT)  # ways to answer that begin with a draft of the upstream
PROBLEM_FILE_VARIABLE = "KNOWGATE_PROBLEM_FILE"


@dataclass
class DecisionTotals:
    """Sums over the requests with a decision, either all of them or those of one gate of an A/B test.

    Attributes:
        decided: Number of decisions.
        retrieved: Number of decisions to retrieve.
        would_skip: Number of these that the gate would have skipped, in shadow or canary mode or during an alarm.
        degraded: Number of requests during which a component failed.
        with_passages: Number of requests that got passages.
        open_book_seconds: Time of these requests after the decision: the search and the answer.
        closed_book_seconds: Time of requests that skipped retrieval, after the decision.
        decision_seconds: Time of all requests until the decision: the draft and the gate.
        passage_tokens: Estimated number of tokens of the passages.
        draft_tokens: Number of tokens of drafts that always retrieving would not have made.
        draft_prompt_tokens: Number of tokens that the LLM read for these drafts.
        extra_calls: Number of LLM calls for these drafts, and of other calls of the gate.
        raced: Number of skipped requests whose search ran nevertheless, because it began before the decision.
    """

    decided: int = 0
    retrieved: int = 0
    would_skip: int = 0
    degraded: int = 0
    with_passages: int = 0
    open_book_seconds: float = 0.0
    closed_book_seconds: float = 0.0
    decision_seconds: float = 0.0
    passage_tokens: float = 0.0
    draft_tokens: float = 0.0
    draft_prompt_tokens: float = 0.0
    extra_calls: int = 0
    raced: int = 0

    def add_request(self, trace: RequestTrace, passage_tokens: float, seconds: float) -> None:
        """Add a request with a decision to the sums. A discarded draft (answer without passages) is extra cost.

        Args:
            trace: Record of the request.
            passage_tokens: Number of tokens of its passages.
            seconds: Time from the start of the request to its response.
        """
        assert trace.decision is not None
        self.decided += 1
        self.retrieved += trace.decision.retrieve
        self.would_skip += DecisionNote.WOULD_SKIP in trace.decision.notes
        self.degraded += bool(trace.degraded)
        decision_seconds, answer_seconds = split_seconds({**trace.milliseconds, "total": 1000 * seconds})
        self.decision_seconds += decision_seconds
        if not trace.decision.retrieve:
            self.closed_book_seconds += answer_seconds
        elif trace.passages:
            self.with_passages += 1
            self.passage_tokens += passage_tokens
            self.open_book_seconds += answer_seconds
        self.extra_calls += trace.gate_calls
        self.raced += trace.way == "race" and not trace.decision.retrieve
        # If a search finds nothing, the draft is sent, and its tokens are not measured.
        sends_draft = not trace.passages and trace.draft_usage == TokenUsage()
        if trace.way == SEPARATE_DRAFT or (trace.decision.retrieve and not sends_draft):
            self._add_draft(trace)

    def _add_draft(self, trace: RequestTrace) -> None:
        """Add the cost of a draft, if there was one: always retrieving would not have made it."""
        self.extra_calls += int(trace.draft is not None or trace.way in DRAFT_WAYS)  # 1 if there was a draft
        self.draft_prompt_tokens += trace.draft_usage.prompt
        if trace.draft is None:  # there was no draft, or only the arbiter read it
            self.draft_tokens += trace.draft_usage.completion
        else:
            draft_tokens = trace.draft.n_tokens or estimate_tokens(trace.draft.text)
            self.draft_tokens += max(draft_tokens, trace.draft_usage.completion)  # the latter includes reasoning

    def merge(self, other: DecisionTotals) -> None:
        """Add the totals of another process to these totals."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def to_json(self, options: ServeOptions) -> dict[str, Any]:
        """Return the counts, and the estimated savings compared with always retrieving.

        Discarded drafts and the time of the gate reduce the savings.

        Returns:
            The counts, and the object `saved`. It has the saved searches (`retrievals`), tokens, seconds and money.
            Before the first request with passages, the cost of a retrieval is unknown, and all but the searches are
            None. Without prices in the options, the money is None. If `has_unpriced_calls`, LLM calls have no price, so
            the money leaves out the calls for discarded drafts.
        """
        skipped = self.decided - self.retrieved
        saved_searches = skipped - self.raced  # a raced search ran although the gate skipped it
        saved: dict[str, float | None] = {"retrievals": saved_searches, "tokens": None, "seconds": None, "money": None}
        prices = options.prices
        if self.with_passages:
            skipped_tokens = skipped * self.passage_tokens / self.with_passages
            always_seconds = skipped * self.open_book_seconds / self.with_passages  # if these had retrieved
            saved_prompt_tokens = skipped_tokens - self.draft_prompt_tokens
            saved["tokens"] = saved_prompt_tokens - self.draft_tokens
            saved["seconds"] = always_seconds - self.closed_book_seconds - self.decision_seconds
            if prices.are_given:
                savings = PolicyCost(saved_searches, saved_prompt_tokens, -self.draft_tokens, calls=-self.extra_calls)
                saved["money"] = savings.money(prices)
        counts = {"decided": self.decided, "retrieved": self.retrieved, "degraded": self.degraded, "skipped": skipped}
        counts["would_skip"] = self.would_skip
        has_unpriced_calls = saved["money"] is not None and self.extra_calls > 0 and not prices.include_llm
        return {**counts, "extra_llm_calls": self.extra_calls, "has_unpriced_calls": has_unpriced_calls, "saved": saved}


class MetricsSnapshot(BaseModel):
    """Statistics of one server process, or of several combined.

    Attributes:
        since: When the process started, or the first of several, in seconds since 1970.
        requests: Number of requests by class of HTTP status, such as "2xx".
        totals: Sums by arm of the A/B test. The key "" is for all requests.
        retrieved_needs: Histogram of the need for retrieval, for questions that retrieved. Requests with options of
            their own, and those for the second gate of an A/B test, are not counted.
        skipped_needs: Histogram of the need for retrieval, for questions that skipped it.
        minutes: Minute since 1970 -> [number of questions that retrieved, number that skipped retrieval].
        times: The latest durations of each stage of a request, in milliseconds.
        lost_decisions: Number of decisions that could not be stored in the decision log.
    """

    since: float = Field(default_factory=time.time)
    requests: Counter[str] = Field(default_factory=Counter)
    totals: dict[str, DecisionTotals] = Field(default_factory=lambda: {"": DecisionTotals()})
    retrieved_needs: list[int] = Field(default_factory=lambda: [0] * NEED_BINS)
    skipped_needs: list[int] = Field(default_factory=lambda: [0] * NEED_BINS)
    minutes: dict[int, list[int]] = Field(default_factory=dict)
    times: dict[str, deque[float]] = Field(default_factory=dict)
    lost_decisions: int = 0

    def add_request(self, status: int, seconds: float, trace: RequestTrace) -> None:
        """Add a request to the statistics. Without a decision, or after an error, it is only counted by its status.

        Args:
            status: HTTP status of the response.
            seconds: Time from the start of the request to its response.
            trace: Record of the request, with its decision if there is one.
        """
        self.requests[f"{status // 100}xx"] += 1
        if trace.decision is None or status >= ERROR_STATUS:
            return
        passage_tokens = sum(estimate_tokens(f"{passage.title} {passage.text}") for passage in trace.passages)
        for arm in {"", trace.arm}:  # an arm is a gate of an A/B test; "" has the sums over all requests
            if arm not in self.totals:
                self.totals[arm] = DecisionTotals()
            self.totals[arm].add_request(trace, passage_tokens, seconds)
        # The histogram leaves out decisions that the gate did not make, and requests with options such as a threshold.
        is_by_gate = not trace.decision.rule and not trace.degraded and trace.arm in ("", "a")
        if is_by_gate and not trace.has_own_options:
            self._count_need(trace.decision)
        minute = int(time.time() / MINUTE_SECONDS)
        self.minutes.setdefault(minute, [0, 0])[0 if trace.decision.retrieve else 1] += 1
        if len(self.minutes) > MINUTES_SHOWN:  # after a correction of the clock, minutes can be in the future
            self.minutes = {key: self.minutes[key] for key in self.minutes if minute - MINUTES_SHOWN < key <= minute}
        for stage, milliseconds in {**trace.milliseconds, "total": 1000 * seconds}.items():
            self.times.setdefault(stage, deque(maxlen=MAX_STAGE_TIMES)).append(milliseconds)

    def _count_need(self, decision: Decision) -> None:
        """Add a decision to the histogram of needs: 0 if the LLM knows the answer, 1 if it does not."""
        needs = self.retrieved_needs if decision.retrieve else self.skipped_needs
        needs[min(NEED_BINS - 1, int(decision.need * NEED_BINS))] += 1

    def drop_times(self) -> None:
        """Forget durations, and minutes before the last hour."""
        first_minute = int(time.time() / MINUTE_SECONDS) - MINUTES_SHOWN
        self.minutes = {minute: counts for minute, counts in self.minutes.items() if minute > first_minute}
        self.times.clear()

    def combine(self, serialized: Sequence[str]) -> MetricsSnapshot:
        """Return these statistics combined with those of other processes.

        Args:
            serialized: Statistics of other processes, as JSON. Those that cannot be read are skipped with a warning.
        """
        combined = self.model_copy(deep=True)
        for text in serialized:
            try:
                combined._merge(MetricsSnapshot.model_validate_json(text))
            except ValueError as error:
                log.warning("The statistics of another server process are ignored: they cannot be read: %s", error)
        return combined

    def _merge(self, other: MetricsSnapshot) -> None:
        """Add the statistics of another process."""
        self.since = min(self.since, other.since)
        self.lost_decisions += other.lost_decisions
        self.requests.update(other.requests)
        for arm, totals in other.totals.items():
            self.totals.setdefault(arm, DecisionTotals()).merge(totals)
        self.retrieved_needs = _add_lists(self.retrieved_needs, other.retrieved_needs)
        self.skipped_needs = _add_lists(self.skipped_needs, other.skipped_needs)
        for minute, counts in other.minutes.items():
            self.minutes[minute] = _add_lists(self.minutes.get(minute, [0, 0]), counts)
        for stage, times in other.times.items():
            self.times[stage] = deque([*self.times.get(stage, ()), *times])

    def to_json(self, options: ServeOptions) -> dict[str, Any]:
        """Return the statistics as JSON for the dashboard. The list of minutes covers the last hour."""
        now = int(time.time() / MINUTE_SECONDS)
        return {
            "since": self.since,
            "requests": dict(self.requests),
            "lost_decisions": self.lost_decisions,
            "arms": {arm or "all": totals.to_json(options) for arm, totals in self.totals.items()},
            "needs": {"retrieved": self.retrieved_needs, "skipped": self.skipped_needs},
            "minutes": [self.minutes.get(minute, [0, 0]) for minute in range(now - MINUTES_SHOWN + 1, now + 1)],
            "stages": {stage: _compute_percentiles(times) for stage, times in self.times.items()},
        }


def _add_lists(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Add two lists of the same length element by element."""
    return [a + b for a, b in zip(first, second, strict=True)]


def _compute_percentiles(milliseconds: Iterable[float]) -> dict[str, float]:
    """Return the number of durations, and three percentiles. Example: [1.0, 2.0, 9.0] has "p50": 2.0."""
    ordered = sorted(milliseconds)
    count = len(ordered)
    percentiles = {f"p{percent}": round(ordered[count * percent // 100], 3) for percent in (50, 95, 99)}
    return {"n": count, **percentiles}


def read_worker_problem() -> str:
    """Return what the parent process says about workers that cannot start, or "" for no problem or a single worker."""
    path = os.environ.get(PROBLEM_FILE_VARIABLE)
    with suppress(OSError):  # the file exists only if there is a problem
        return Path(path).read_text(encoding="utf-8") if path else ""
    return ""


class RecentDecisions:
    """Keeps the newest decisions of this process in memory.

    Args:
        stores_texts: Whether to keep the texts of questions and answers.
    """

    def __init__(self, *, stores_texts: bool):
        self.stores_texts = stores_texts
        self._rows: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._keys: dict[str, frozenset[str]] = {}  # id -> hashes of its question and source questions
        self._owners: dict[str, str] = {}

    def append(
        self,
        record: Mapping[str, Any],
        question: str | None,
        owner: str = "",
        question_keys: Iterable[str] = (),
        seconds: float = 0.0,
    ) -> None:
        """Add or update a decision. Drop the oldest one of too many.

        Args:
            record: The decision, as a JSON object.
            question: The question, if there is one.
            owner: Name of the API key of the request.
            question_keys: Hashes of the question and of the messages from which it was made.
            seconds: Age of the request.
        """
        texts = {"question": question, "owner": owner}
        row = {**record, "at": time.time() - seconds, **(texts if self.stores_texts else {})}
        self._rows.setdefault(record["id"], {}).update(row)
        self._keys[record["id"]], self._owners[record["id"]] = frozenset(question_keys), owner
        if len(self._rows) > MAX_RECENT_DECISIONS:
            self.delete([next(iter(self._rows))])

    def update(self, id: str, fields: Mapping[str, Any]) -> None:
        """Add fields to a decision. Does nothing if the decision is no longer in memory.

        Args:
            id: Id of the decision.
            fields: The answers without and with passages (`closed`, `opened`), whether they differ (`lost`), or a
                `rating`. Answers are dropped if texts may not be stored. Fields that are None are ignored.
        """
        if id in self._rows:
            self._rows[id] |= {
                name: value
                for name, value in fields.items()
                if value is not None and (self.stores_texts or name in ("lost", "rating"))
            }

    def find(self, id: str) -> dict[str, Any] | None:
        return self._rows.get(id)

    def find_ids(self, question: str, owner: str | None) -> list[str]:
        """Return the ids of all decisions on a question. Owner None means all API keys."""
        key = question_key(question)
        return [id for id, keys in self._keys.items() if key in keys and owner in (None, self._owners[id])]

    async def apply_deletions(self, deletions: DeletionIndex) -> None:
        """Delete what clients have deleted, also through other processes or while the request still ran."""
        rows = self._rows.items()
        self.delete([id for id, row in rows if deletions.covers(id, self._keys[id], self._owners[id], row["at"])])

    def delete(self, ids: Iterable[str]) -> None:
        for id in self._rows.keys() & ids:
            del self._rows[id], self._keys[id], self._owners[id]

    def list_newest(self, count: int) -> list[dict[str, Any]]:
        """Return up to `count` decisions, newest first."""
        return list(reversed(self._rows.values()))[:count]
