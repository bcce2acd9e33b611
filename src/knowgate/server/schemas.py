"""Pydantic models of the requests and responses of the HTTP API. The OpenAPI description is generated from them.

Chat requests and responses follow OpenAI's API. Fields that this server neither reads nor writes are allowed, too.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from typing_extensions import TypedDict

from knowgate.core.options import option
from knowgate.data.history.entries import MAX_QUESTION_CHARS, is_too_long
from knowgate.server.json_api import FieldLimit

MAX_DECIDED_QUESTIONS, MAX_RERANKED_DOCUMENTS, MAX_FEEDBACK_CHARS = 256, 1000, 10_000
MAX_FILTER_PATTERNS, MAX_PATTERN_CHARS = 32, 200
TOO_LONG = f"the question has more than {MAX_QUESTION_CHARS:,} characters after Unicode normalization"


def _check_not_blank(text: str) -> str:
    """Reject a text that consists of white space only."""
    if not text.strip():
        raise ValueError("the text must not be blank")
    return text


def _check_length(question: str) -> str:
    """Reject a question that is too long once its characters are normalized."""
    if is_too_long(question):
        raise ValueError(TOO_LONG)
    return question


QuestionLength = Field(min_length=1, max_length=MAX_QUESTION_CHARS)
UncheckedQuestion = Annotated[str, QuestionLength, AfterValidator(_check_not_blank)]  # not checked: normalized length
QuestionText = Annotated[UncheckedQuestion, AfterValidator(_check_length)]
# fail_fast: only the first error is reported, and each one takes time to build.
QuestionList = Annotated[list[UncheckedQuestion], Field(min_length=1, max_length=MAX_DECIDED_QUESTIONS, fail_fast=True)]
TextOrList = str | list[Any]
Pattern = Annotated[str, Field(max_length=MAX_PATTERN_CHARS)]
PatternList = Annotated[tuple[Pattern, ...], Field(min_length=1, max_length=MAX_FILTER_PATTERNS, fail_fast=True)]
_LIST_MAKER = BeforeValidator(lambda value: [value] if isinstance(value, str) else value, PatternList | Pattern)
Patterns = Annotated[PatternList, _LIST_MAKER]


class PassageFilter(BaseModel):
    """Filter of a search. The id and the title of a passage must each match one of the patterns, such as `hr/*`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    id: Patterns = ("*",)
    title: Patterns = ("*",)


class GateRequest(BaseModel):
    """The `knowgate` object in a request body. It controls the decision to retrieve."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    retrieve: Literal["auto", "always", "never"] = option("auto", "Whether to retrieve. auto: the gate decides.")
    threshold: float | None = option(
        None, "Retrieve if the need for retrieval (0: the LLM knows, 1: retrieve) is above this threshold.", ge=0, le=1
    )
    max_loss: float | None = option(
        None, "Retrieve unless the gate guarantees that skipping loses at most this share of answers.", ge=0, le=1
    )
    filter: Annotated[PassageFilter, Field(strict=False), FieldLimit] | None = None


class ApiRequest(BaseModel):
    """Base class of request bodies. Unknown fields are allowed. Values are not converted to other types."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)


class GatedRequest(ApiRequest):
    """Base class of requests on which a gate can decide, with their common fields."""

    model: str | None = option(
        None,
        "Name of the LLM. knowgate: the default LLM of this server. knowgate/GATE: the default LLM with another gate. "
        "GET /v1/models lists all names.",
    )
    stream: bool | None = None
    user: str | None = option(None, "Identifies the end user, who always gets the same gate of an A/B test.")
    knowgate: Annotated[GateRequest, FieldLimit] | None = None


class ChatMessage(TypedDict):
    """Chat message. Its content is a text, a list of parts, or null."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    role: str
    content: NotRequired[TextOrList | None]


class ChatRequest(GatedRequest):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)


class LocalChatRequest(ChatRequest):
    """Body of POST /v1/chat/completions for a model in this process. Token limits are checked, too."""

    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)


class CompletionRequest(GatedRequest):
    """Body of POST /v1/completions."""

    prompt: TextOrList | None = None


class InputRequest(GatedRequest):
    """Body of POST /v1/responses and POST /v1/embeddings."""

    input: TextOrList | None = None


class DecideRequest(GatedRequest):
    """Body of POST /v1/decide. Exactly one of `question`, `questions` and `messages` is required."""

    question: QuestionText | None = None
    questions: QuestionList | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] | None = None


class RerankDocument(ApiRequest):
    """A document of a rerank request or response, as an object with a text."""

    text: str


class RerankRequest(ApiRequest):
    """Body of POST /v1/rerank, in the same format as in the APIs of Cohere and Jina."""

    query: QuestionText
    documents: list[str | RerankDocument] = Field(min_length=1, max_length=MAX_RERANKED_DOCUMENTS, fail_fast=True)
    top_n: int | None = Field(None, ge=1)
    return_documents: bool | None = None


class FeedbackRequest(ApiRequest, extra="forbid"):
    """Body of POST /v1/feedback: a rating of the decision `id`, or the right answer as `correction`. Blank means none."""

    id: str
    rating: Literal["up", "down"] | None = None
    comment: str | None = Field(None, max_length=MAX_FEEDBACK_CHARS)
    correction: Annotated[str, Field(max_length=MAX_FEEDBACK_CHARS), AfterValidator(str.strip)] | None = None


class DeletionRequest(ApiRequest, extra="forbid"):
    """Body of POST /v1/forget, with the question to delete from all logs."""

    question: QuestionText


class ClearAlarmRequest(ApiRequest, extra="forbid"):
    """Body of POST /v1/learning/clear. `arm` is the gate in the A/B test, "a" or "b"."""

    arm: str = "a"


class ApiResponse(BaseModel):
    """Base class of response bodies. Fields that were not set are left out of the JSON."""

    model_config = ConfigDict(extra="allow")


class ErrorDetail(ApiResponse):
    """The `error` object of an error response. Errors of the upstream, forwarded unchanged, may have other fields."""

    message: str
    type: str | None = None
    param: str | None = None
    code: str | None = None


class ErrorResponse(ApiResponse):
    """Body of every error response."""

    error: ErrorDetail


class DecisionSummary(ApiResponse):
    """Decision whether to retrieve.

    `need` is the score of the gate (0: the LLM knows, 1: retrieve). The server retrieves above `threshold`, but a rule
    or fallback may overrule this.
    """

    retrieve: bool | None = None
    need: float | None = None
    threshold: float | None = None
    gate: str | None = None
    reason: str | None = None


class PassageSummary(ApiResponse):
    """A retrieved passage that was inserted into the prompt of the LLM, without its text."""

    id: str
    title: str
    score: float | None


class RequestReport(DecisionSummary):
    """The `knowgate` object of a response: how the request was processed.

    Attributes:
        way: How the request was answered, such as "in-process" or "draft".
        gated: Whether there was a decision. If not, `why_not` is the reason.
        arm: Gate of the A/B test.
        mode: Why the server retrieved regardless of the gate: "shadow", "canary" or "alarm".
        choice: Which answer the arbiter chose, with or without passages.
        unweighed: Why the arbiter could not compare the answers.
        degraded: Components that failed.
        ignored: Request fields without effect, and "system message" if an LLM in this process does not read it.
    """

    id: str
    way: str
    gated: bool
    why_not: str | None = None
    arm: str | None = None
    mode: str | None = None
    passages: list[PassageSummary]
    choice: dict[str, Any] | None = None
    unweighed: str | None = None
    degraded: list[str]
    ignored: list[str] | None = None
    milliseconds: dict[str, float]


class LlmResponse(ApiResponse):
    """Response of the LLM with a `knowgate` object. In a stream, first and last chunk have it."""

    knowgate: RequestReport | None = None


class ForwardedResponse(ApiResponse):
    """Response of the upstream, which is forwarded unchanged."""


class OpenApiDocument(ApiResponse):
    """Description of the API in the OpenAPI format."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]


class DecideResponse(DecisionSummary):
    """Body of the response to POST /v1/decide: one decision, or `decisions` if the request had `questions`."""

    id: str
    degraded: list[str]
    milliseconds: dict[str, float]
    decisions: list[DecisionSummary] | None = None


class RerankResult(ApiResponse):
    """A reranked document. `index` is its position in the request. `document` is present only on request."""

    index: int
    relevance_score: float
    document: RerankDocument | None = None


class RerankResponse(ApiResponse):
    """Body of the response to POST /v1/rerank, with the most relevant document first."""

    id: str
    model: str
    results: list[RerankResult]


class FeedbackEntry(ApiResponse):
    """Feedback that a user gave on a decision. `at` is the time in seconds since 1970."""

    at: float
    rating: str
    comment: str | None


class StoredDecision(RequestReport):
    """Decision in the log, with its feedback. `at` is its time in seconds since 1970.

    `follow_up`: the question was made from several chat messages. `only_decided`: no answer was requested.
    """

    at: float
    question: str | None = None
    follow_up: bool | None = None
    only_decided: bool | None = None
    feedback: list[FeedbackEntry]
    correction: str | None = None


class FeedbackResponse(ApiResponse):
    """Confirmation of stored feedback. `learnt` is true if the feedback also became a training label."""

    id: str
    rating: str
    learnt: bool


class DeletionResponse(ApiResponse):
    """Confirmation of a deletion, with the numbers of deleted entries. `note` warns about texts left behind."""

    forgotten: bool
    decisions: int
    history: int
    note: str = ""


class ConfidenceBounds(ApiResponse):
    """Mean with its confidence interval from `low` to `high`, which is valid however often it is read."""

    mean: float | None
    low: float
    high: float


class KeyLossReport(ApiResponse):
    """Audits of one API key: `drawn` is their number, `lost` is the number of changed answers.

    `alarm` is the reason for an alarm of this key, or "".
    """

    drawn: int
    lost: float
    alarm: str


class LossReport(ConfidenceBounds):
    """Share of answers changed by skipping retrieval. Audits measure it by comparison with the answer with passages.

    Attributes:
        drawn: Number of audits with a result.
        lost: Number of audits with a changed answer.
        failed: Number of audits without a result. `low` counts their answers as unchanged, `high` as changed.
        promised: Maximum share of answers that may change. Null if there is no limit, and so no alarm.
        evidence: Strength of the evidence against this maximum, from 0 (none) to 1 (exceeded).
        alarm: Reason for the alarm, or "".
    """

    drawn: int
    lost: float
    failed: int
    promised: float | None
    confidence: float
    evidence: float | None
    alarm: str
    keys: dict[str, KeyLossReport]


class DriftReport(ConfidenceBounds):
    """Share of questions unlike the training questions of the gate.

    `drifted` means a too large share. `keys` lists API keys with a too large share.
    """

    questions: int
    drifted: bool
    keys: list[str]


class ArmReport(ApiResponse):
    """Results of one gate (arm) of an A/B test. `audits` counts the checked answers by result."""

    gate: str
    threshold: float
    audits: dict[str, int]
    loss: LossReport
    drift: DriftReport


class LearningResponse(ApiResponse):
    """Body of the response to GET /v1/learning: results of audits and A/B tests, for each gate in `arms`.

    Attributes:
        share_b: Share of requests with the second gate.
        canary: Share of requests that follow the gate. All others retrieve.
        audit: Share of requests that are audited.
        budget_left: Number of LLM calls left for audits in this process. Each worker has an equal part of the budget.
        labelled: Number of labels that this process added to the history. Repeated questions and feedback count again.
    """

    arms: dict[str, ArmReport]
    share_b: float
    canary: float
    audit: float
    budget_left: int
    labelled: int | None


class ModelList(ApiResponse):
    """Model names for requests: the LLMs, and knowgate/GATE for each selectable gate."""

    object: Literal["list"] = "list"
    data: list[Any]


class HealthResponse(ApiResponse):
    """Body of the response to GET /health. A server that runs always answers with it."""

    status: Literal["ok"] = "ok"


class ReadyResponse(ApiResponse):
    """Whether the server can answer requests.

    `degraded` lists its problems. `stale` is why the calibration of the gate does not apply, or "".
    """

    ready: bool
    breakers: dict[str, str]
    gate: str
    stale: str
    degraded: list[str]
    lost_decisions: int


class DashboardResponse(ApiResponse):
    """Body of the response to GET /v1/dashboard.

    `constant` tells that the gate always decides the same, or is "". `promise` repeats `guarantee` for earlier clients.
    """

    version: str
    gate: str
    threshold: float
    model: str
    retriever: str | None
    stale: str
    constant: str
    guarantee: str
    promise: str
    breakers: dict[str, str]
    keeps_texts: bool
    takes_feedback: bool
    learning: LearningResponse | None
    figures: dict[str, Any]
    recent: list[dict[str, Any]]
