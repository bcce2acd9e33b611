"""Trace of one request: its decision, passages, failures and timings, as JSON and as response headers."""

from __future__ import annotations

import json
import secrets
import string
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeGuard
from urllib.parse import quote

from starlette.datastructures import Headers

from knowgate.core.text import estimate_tokens
from knowgate.data.history.entries import get_max_normalized_length, question_key
from knowgate.models.backend import allow_interruption
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.answer_json import decision_record
from knowgate.server.database import WRITE_LOCK, Store
from knowgate.server.load_limits import run_in_thread
from knowgate.types import (
    Answer,
    ArbiterChoice,
    Completion,
    Decision,
    DecisionNote,
    Model,
    Passage,
    Prompt,
    Question,
    TokenizingModel,
)


@dataclass(frozen=True)
class TokenUsage:
    """Tokens that an LLM read and generated, and their price, if the upstream reports it, as OpenRouter does."""

    prompt: int = 0
    completion: int = 0
    cost: float = 0.0

    def __add__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(self.prompt + other.prompt, self.completion + other.completion, self.cost + other.cost)

    def to_json(self) -> dict[str, int]:
        """Return the field `usage` of a chat completion."""
        total = self.prompt + self.completion
        return {"prompt_tokens": self.prompt, "completion_tokens": self.completion, "total_tokens": total}

    def add_to(self, reply: dict[str, Any]) -> None:
        """Add these tokens to the field `usage` of a reply, in place.

        The APIs for chats and for responses name the fields of `usage` differently. Those that are there are increased.
        """
        response = reply.get("response")
        usage = (response if isinstance(response, dict) else reply).get("usage")
        if not isinstance(usage, dict):
            return
        amounts = {
            "prompt_tokens": self.prompt,
            "input_tokens": self.prompt,
            "completion_tokens": self.completion,
            "output_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
        }
        for name, amount in amounts.items():
            if is_token_count(usage.get(name)):
                usage[name] += amount
        if self.cost and "cost" in usage:
            usage["cost"] = get_cost(usage) + self.cost


def get_cost(usage: Mapping[str, Any]) -> float:
    """Return the price in the field `usage` of a response, and 0 if there is none."""
    cost = usage.get("cost")
    return float(cost) if isinstance(cost, int | float) and 0 <= cost <= MAX_TOKENS else 0.0


def is_token_count(value: object) -> TypeGuard[int]:
    """Return whether a value of an upstream's `usage` can be a number of tokens."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS


OPTIONAL_FIELDS = ("why_not", "arm", "mode", "ignored")  # fields of a report that are left out if they are empty
HEADER_PREFIX = "x-knowgate-"
MAX_HEADER_CHARS = 300
SELECT_NEIGHBOR_TEXTS = (
    "SELECT id, record FROM decisions WHERE id > ? "
    'AND record LIKE \'%"neighbours": [{"question":%\' ORDER BY id LIMIT 1000'
)
MAX_TOKENS = 1_000_000_000  # a larger number of tokens is not believed
MAX_INLINE_CHARS = 2_000  # longer texts are hashed in a thread
UNQUOTED_CHARS = string.punctuation.replace("%", "") + " "  # besides letters and digits


@dataclass(frozen=True)
class ClientRequest:
    """A request as the client sent it. `path` is its API path without /v1."""

    body: Mapping[str, Any]
    headers: Headers
    path: str = "/chat/completions"


class StageTiming(NamedTuple):
    """Timing of one stage of a request, such as "gate" or "retrieve". `start` is a value of `time.perf_counter`."""

    name: str
    start: float
    seconds: float


@dataclass
class RequestTrace:
    """Collects what happens to one request while it is processed.

    Attributes:
        way: How the request is answered: "in-process" (by a model in this process), "draft", "race" or "question" (by
            the upstream, see the option `way`), "separate-draft", or "pass-through" (forwarded without a decision).
        id: Identifier of the request and of its decision.
        owner: Name of the API key of the request, or "" if the server uses no keys.
        is_admin: Whether the client may see and delete the data of all keys.
        shares_labels: Whether a label of the question may go into the history, which decides for all keys.
        decision: The decision whether to retrieve, if one was made.
        passages: Passages that were inserted into the prompt.
        degraded: Components that failed or were not used, such as "gate" or "retriever".
        ungated_reason: Reason why no decision was made.
        question: The question that was decided on. It is never part of the JSON.
        source_questions: Messages of the user from which the question was made, if it is a follow-up: the last one and
            earlier ones, which the question may repeat.
        question_keys: Hashes of the question and of `source_questions`, if they are stored.
        arm: Arm (gate) of the A/B test for which the request counts: "a" or "b". "" if it counts for none.
        gate_spec: The gate of the server or arm, as the user names it, such as 'logprob:mean'.
        has_own_options: Whether the request sets options of its own, so that it says nothing about the server's gate.
        max_loss: Share of answers that may become wrong because the gate skips retrieval, if the request limits it.
        mode: Why the server retrieves regardless of the gate: "shadow", "canary", "alarm", or "" if it does not.
        client_request: The original request, which audits send again.
        draft: The answer without passages that the gate read.
        choice: Choice of the arbiter between the answers with and without passages.
        accepting_arbiter: Arbiter that accepted the answer with passages by its beginning, so that `choice` is None.
        arbitration_gap: Reason why the arbiter was not used although there is a draft.
        model_name: Name of the LLM that answers.
        other_model: The same, if it is not the LLM of this server; otherwise "".
        ignored_fields: Request fields that a model in this process ignores.
        body_memory: Estimated memory of the body of the request, in bytes, if it is large.
        extra_usage: Tokens of calls to the LLM whose answers are not sent, such as a discarded draft.
        draft_usage: Tokens of the draft, if there was a search after it or the gate alone read it.
        gate_calls: Number of LLM calls of the gate besides the draft.
        milliseconds: Duration of each stage.
        stages: Timings of the stages, in the order in which they ran.
        start: When the request started, as a value of `time.perf_counter`.
        on_end: Functions to call when the request has ended, however it ended, such as to close a connection.
    """

    way: str = "pass-through"
    id: str = field(default_factory=lambda: f"kg-{secrets.token_hex(12)}")
    owner: str = ""
    is_admin: bool = False
    shares_labels: bool = True
    decision: Decision | None = None
    passages: tuple[Passage, ...] = ()
    degraded: list[str] = field(default_factory=list)
    ungated_reason: str = ""
    question: str | None = None
    source_questions: tuple[str, ...] = ()
    question_keys: tuple[str, ...] = ()
    arm: str = ""
    gate_spec: str = ""
    has_own_options: bool = False
    max_loss: float | None = None
    mode: str = ""
    client_request: ClientRequest | None = None
    draft: Completion | None = None
    choice: ArbiterChoice | None = None
    accepting_arbiter: str = ""
    arbitration_gap: str = ""
    model_name: str = ""
    other_model: str = ""
    ignored_fields: tuple[str, ...] = ()
    body_memory: int = 0
    extra_usage: TokenUsage = field(default_factory=TokenUsage)
    draft_usage: TokenUsage = field(default_factory=TokenUsage)
    gate_calls: int = 0
    milliseconds: dict[str, float] = field(default_factory=dict)
    stages: list[StageTiming] = field(default_factory=list)
    start: float = field(default_factory=time.perf_counter)
    on_end: list[Callable[[], None]] = field(default_factory=list)

    @property
    def owner_filter(self) -> str | None:
        """The API key whose decisions the request may use, or None if it may use those of all keys."""
        return None if self.is_admin else self.owner

    def set_question(self, question: Question) -> None:
        """Store the question to decide on. A follow-up (made from several messages) adds no label to the history."""
        self.question = question.text
        if "asked" in question.meta:
            self.source_questions = (question.meta["asked"], *question.meta["earlier"])
            self.shares_labels = False

    def end(self) -> None:
        """Call the functions in `on_end`. Call this once, when the request has ended."""
        functions, self.on_end = self.on_end, []  # they refer to this trace, so its memory could not be freed at once
        for function in functions:
            function()

    async def hash_questions(self, threads: Executor) -> None:
        """Hash the question and the messages from which it was made. Long texts are hashed in a thread."""
        texts = () if self.question is None else (self.question, *self.source_questions)
        if sum(map(get_max_normalized_length, texts)) <= MAX_INLINE_CHARS:
            self.question_keys = tuple(map(question_key, texts))
        else:
            self.question_keys = await run_in_thread(threads, lambda: tuple(map(question_key, texts)))

    def note_nothing_found(self) -> None:
        """Add a note to the decision: the search worked but found nothing."""
        if self.decision is not None and "retriever" not in self.degraded:
            self.decision = replace(self.decision, notes=(*self.decision.notes, DecisionNote.NOTHING_FOUND))

    def measure(self, stage: str) -> StageMeter:
        """Measure the duration of the `with` body as a stage of the request."""
        return StageMeter(self, stage)

    def add_time(self, stage: str, seconds: float, start: float | None = None) -> None:
        """Record the duration of a stage. Two successive stages with the same name become one.

        Args:
            stage: Name of the stage, such as "gate" or "retrieve".
            seconds: Duration of the stage.
            start: When the stage started, as a value of `time.perf_counter`. Default: when the previous stage ended.
        """
        previous = self.stages[-1] if self.stages else StageTiming("", self.start, 0.0)
        start = previous.start + previous.seconds if start is None else start
        if previous.name == stage:
            self.stages[-1] = StageTiming(stage, previous.start, start + seconds - previous.start)
        else:
            self.stages.append(StageTiming(stage, start, seconds))
        self.milliseconds[stage] = round(self.milliseconds.get(stage, 0.0) + 1000 * seconds, 3)

    def to_json(self) -> dict[str, Any]:
        """Return the `knowgate` object of a response: how the request was processed."""
        report = {
            "id": self.id,
            "way": self.way,
            "gated": self.decision is not None,
            **({} if self.decision is None else describe_decision(self.decision)),
            "why_not": self.ungated_reason,
            "arm": self.arm,
            "mode": self.mode,
            "passages": [{"id": hit.id, "title": hit.title, "score": hit.score} for hit in self.passages],
            **self._choice_json(),
            "degraded": list(self.degraded),
            "ignored": list(self.ignored_fields),
            "milliseconds": {**self.milliseconds, "total": round(1000 * (time.perf_counter() - self.start), 3)},
        }
        return {name: value for name, value in report.items() if value or name not in OPTIONAL_FIELDS}

    def to_record(self, model: str, status: int) -> dict[str, Any]:
        """Return what the server stores about a decision: the `knowgate` object of the response, and more.

        Args:
            model: Name of the LLM of this server.
            status: HTTP status of the response.
        """
        return {
            **self.to_json(),
            "status": status,
            "model": f"openai:{self.other_model}" if self.other_model else model,
            "gate_spec": self.gate_spec,
            "gate_calls": self.gate_calls,
            "own_options": self.has_own_options,
            "follow_up": bool(self.source_questions),  # whether the question was made from several messages of a chat
        }

    def _choice_json(self) -> dict[str, Any]:
        """Return the JSON fields about the arbiter, which picks one of two answers.

        Returns:
            The field `choice`, which says which answer it picked and why. If it could not compare them, the field
            `unweighed` with the reason instead. No field if the pipeline has no arbiter.
        """
        if self.accepting_arbiter:  # it accepted the answer with passages without comparing whole answers
            reason = "the beginning of the answer with passages is a proper answer"
            return {"choice": {"given": "passages", "arbiter": self.accepting_arbiter, "reason": reason}}
        if self.choice is None:
            return {"unweighed": self.arbitration_gap} if self.arbitration_gap else {}
        source = "draft" if self.choice.is_closed_book else "passages"
        return {"choice": {"given": source, "arbiter": self.choice.arbiter, "reason": self.choice.reason}}

    @property
    def headers(self) -> dict[str, str]:
        """The `x-knowgate-*` headers of the response, without empty ones."""
        values = {"id": self.id, "way": self.way, "degraded": "; ".join(self.degraded), "reason": self.ungated_reason}
        values |= {"arm": self.arm, "mode": self.mode}
        if self.decision is not None:
            values |= {
                "retrieve": "true" if self.decision.retrieve else "false",
                "need": f"{self.decision.need:.4f}",
                "threshold": f"{self.decision.threshold:g}",
                "gate": self.decision.gate,
                "reason": self.decision.reason,
                "passages": str(len(self.passages)),
            }
        values["ms"] = ", ".join(f"{stage}={value:.1f}" for stage, value in self.milliseconds.items())
        return {HEADER_PREFIX + name: _to_header_value(value) for name, value in values.items() if value}


def describe_decision(decision: Decision) -> dict[str, Any]:
    """Convert a decision to JSON, without the texts of similar logged questions: other clients may have asked them."""
    return _remove_neighbor_texts(decision_record(decision))


def _remove_neighbor_texts(record: dict[str, Any]) -> dict[str, Any]:
    for neighbor in record.get("neighbours", ()):
        neighbor.pop("question", None)
    return record


def upgrade_records(store: Store) -> None:
    """Remove the texts of similar questions from decisions that earlier versions stored."""
    last_id = ""
    while True:
        with store.transaction(WRITE_LOCK) as transaction:
            rows = transaction.execute(SELECT_NEIGHBOR_TEXTS, (last_id,)).fetchall()
            values = [(json.dumps(_remove_neighbor_texts(json.loads(record))), id) for id, record in rows]
            transaction.executemany("UPDATE decisions SET record = ? WHERE id = ?", values)
        if not rows:
            break
        last_id = rows[-1][0]
    if last_id:
        store.vacuum(["decisions"])


def to_decision(at: float, question: str | None, record: str) -> dict[str, Any]:
    """Convert a row of the table of decisions to a JSON object."""
    return {**json.loads(record), "at": at, **({} if question is None else {"question": question})}


def find_decision(store: Store, id: str, owner: str | None = None) -> dict[str, Any] | None:
    """Return a decision with its feedback, or None. With `owner`, only decisions of this API key count."""
    rows = store.fetch_rows("SELECT at, question, record, owner FROM decisions WHERE id = ?", (id,))
    if not rows or owner not in (None, rows[0][3] or ""):
        return None
    at, question, record, _ = rows[0]
    feedback_rows = store.fetch_rows("SELECT at, rating, comment FROM feedback WHERE decision = ?", (id,))
    feedback = [{"at": row[0], "rating": row[1], "comment": row[2]} for row in feedback_rows]
    decision = {**to_decision(at, question, record), "feedback": feedback}
    for (answer,) in store.fetch_rows("SELECT answer FROM corrections WHERE decision = ?", (id,)):
        decision["correction"] = answer
    return decision


def _to_header_value(text: str) -> str:
    """Shorten a text for a header, and percent-encode it if it has unusual characters, such as line breaks."""
    text = text[:MAX_HEADER_CHARS]
    if text.isascii() and text.isprintable():
        return text
    # Quoting makes a text longer, so shorten the text in proportion until the quoted text fits.
    while len(quoted := quote(text, safe=UNQUOTED_CHARS, errors="replace")) > MAX_HEADER_CHARS:
        text = text[: len(text) * MAX_HEADER_CHARS // len(quoted)]
    return quoted


def count_usage(answer: Answer, rag: AdaptiveRAG) -> TokenUsage:
    """Count the tokens of all prompts and answers. The draft (answer without passages) counts even when discarded."""
    prompts = []
    if answer.passages:
        prompts.append(rag.prompts.open(answer.question, answer.passages))
    if answer.draft is not None or not answer.passages:
        prompts.append(rag.prompts.closed(answer.question))
    completion_tokens = answer.n_tokens  # of the answer that is sent; add those of the other one, if there are two
    if answer.passages and answer.draft is not None:
        if answer.choice is not None and answer.choice.is_closed_book:  # the draft is sent
            completion_tokens += round(estimate_tokens(answer.choice.open))
        else:
            completion_tokens += round(answer.draft.n_tokens or 0)
    return TokenUsage(_count_prompt_tokens(rag.model, prompts), completion_tokens)


def _count_prompt_tokens(model: Model, prompts: Sequence[Prompt]) -> int:
    """Count the tokens of prompts. They are estimated if the model has no tokenizer."""
    if isinstance(model, TokenizingModel):
        return sum(len(model.tokenize(prompt.text)) for prompt in prompts)
    return round(sum(estimate_tokens(prompt.text) for prompt in prompts))


@dataclass
class StageMeter:
    """Context manager that adds the duration of its body to a trace. A class, because a generator would take longer."""

    trace: RequestTrace
    stage: str
    start: float = 0.0

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.trace.add_time(self.stage, time.perf_counter() - self.start, self.start)


@dataclass
class RewriteMeter:
    """Wrapper of an LLM that rewrites follow-up questions. It measures the tokens and seconds of the latest call."""

    model: Model
    usage: TokenUsage = field(default_factory=TokenUsage)
    seconds: float = 0.0

    def generate(self, prompts: Sequence[Prompt], *, max_tokens: int) -> list[list[Completion]]:
        """Let the LLM generate texts. Calls of other clients may interrupt a local LLM."""
        start = time.perf_counter()
        with allow_interruption(self.model):
            completions = self.model.generate(prompts, max_tokens=max_tokens)
        self.seconds = time.perf_counter() - start
        n_tokens = sum(completion.n_tokens for samples in completions for completion in samples)
        self.usage = TokenUsage(_count_prompt_tokens(self.model, prompts), round(n_tokens))
        return completions
