"""Requests and responses of the HTTP API as pydantic models; the OpenAPI description is generated from them.

Chat requests and responses follow OpenAI's API. Only the fields that matter here are declared; all others are allowed.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema
from typing_extensions import TypedDict

from knowgate.types import Passage

MAX_DECIDED_QUESTIONS = 256
MAX_RERANKED_DOCUMENTS = 1000
MAX_FEEDBACK_CHARS = 10_000


def _check_not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("it must not be blank")
    return text


Text = Annotated[str, Field(min_length=1), AfterValidator(_check_not_blank)]
TextOrList = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array"}]})]
Patterns = tuple[str, ...] | str


# --- requests -------------------------------------------------------------------------------------


class PassageFilter(BaseModel):
    """Restricts a search to documents whose id and title match one of the patterns, such as hr/*."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: Patterns = ()
    title: Patterns = ()

    def matches(self, passage: Passage) -> bool:
        return _matches_any(passage.id, self.id) and _matches_any(passage.title, self.title)


def _matches_any(text: str, patterns: Patterns) -> bool:
    listed = (patterns,) if isinstance(patterns, str) else patterns
    return not listed or any(fnmatchcase(text, pattern) for pattern in listed)


class GateRequest(BaseModel):
    """The `knowgate` object of a request: what it asks of the gate."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    retrieve: Literal["auto", "always", "never"] = Field(default="auto", description="auto: the gate decides.")
    threshold: float | None = Field(default=None, ge=0, le=1, description="Retrieve if the need is above it.")
    max_loss: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Retrieve unless skipping is guaranteed to lose at most this share of answers.",
    )
    filter: Annotated[PassageFilter, Field(strict=False)] | None = None


class ApiRequest(BaseModel):
    """Base of request bodies: unknown fields are allowed, values are not converted."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)


class GatedRequest(ApiRequest):
    """Fields that all requests to an LLM have in common."""

    model: str | None = Field(default=None, description="knowgate, knowgate/GATE, or a name that GET /v1/models lists.")
    stream: bool | None = None
    knowgate: GateRequest | None = None


class ChatMessage(TypedDict):
    """A message of a chat. The content is a text, a list of parts, or null."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    role: str


class ChatRequest(GatedRequest):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)


class LocalChatRequest(ChatRequest):
    """A chat request to a model in this process, which checks more fields."""

    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)


class CompletionRequest(GatedRequest):
    """Body of POST /v1/completions."""

    prompt: TextOrList = None


class InputRequest(GatedRequest):
    """Body of POST /v1/responses and POST /v1/embeddings."""

    input: TextOrList = None


class DecideRequest(GatedRequest):
    """Body of POST /v1/decide: exactly one of `question`, `questions` and `messages`."""

    question: Text | None = None
    questions: list[Text] | None = Field(default=None, min_length=1, max_length=MAX_DECIDED_QUESTIONS)
    messages: list[ChatMessage] | None = Field(default=None, min_length=1)


class RerankDocument(ApiRequest):
    """A document with a text."""

    text: str


class RerankRequest(ApiRequest):
    """Body of POST /v1/rerank, as in the APIs of Cohere and Jina."""

    query: Text
    documents: list[str | RerankDocument] = Field(min_length=1, max_length=MAX_RERANKED_DOCUMENTS)
    top_n: int | None = Field(default=None, ge=1)
    return_documents: bool | None = None


class FeedbackRequest(ApiRequest):
    """Body of POST /v1/feedback: a rating, a correction (the right answer), or both."""

    id: str
    rating: Literal["up", "down"] | None = None
    comment: str | None = Field(default=None, max_length=MAX_FEEDBACK_CHARS)
    correction: str | None = Field(default=None, max_length=MAX_FEEDBACK_CHARS)


class DeletionRequest(ApiRequest):
    """Body of POST /v1/forget."""

    question: Text


class ClearAlarmRequest(ApiRequest):
    """Body of POST /v1/learning/clear."""

    arm: str = "a"


# --- responses ------------------------------------------------------------------------------------


class ApiResponse(BaseModel):
    """Base of response bodies. Fields that do not apply are left out."""

    model_config = ConfigDict(extra="allow")


class ErrorDetail(ApiResponse):
    """What went wrong: a message for people, a code for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(ApiResponse):
    """Body of every error response."""

    error: ErrorDetail


class DecisionSummary(ApiResponse):
    """A decision of a gate."""

    retrieve: bool | None = None
    need: float | None = None
    threshold: float | None = None
    gate: str | None = None
    reason: str | None = None


class PassageSummary(ApiResponse):
    """A passage that the LLM was given."""

    id: str
    title: str
    score: float | None


class RequestReport(DecisionSummary):
    """The `knowgate` object of a response: what happened to the request."""

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
    """The LLM's response with a `knowgate` object; of a stream, its first and last chunk have one."""

    knowgate: RequestReport | None = None


class DecideResponse(DecisionSummary):
    """The decision on one question, or a list of decisions on several."""

    id: str
    degraded: list[str]
    milliseconds: dict[str, float]
    decisions: list[DecisionSummary] | None = None


class RerankResult(ApiResponse):
    """A document's position in the request, its score, and on request the document."""

    index: int
    relevance_score: float
    document: RerankDocument | None = None


class RerankResponse(ApiResponse):
    """Documents by descending relevance."""

    id: str
    model: str
    results: list[RerankResult]


class FeedbackEntry(ApiResponse):
    """Feedback on a decision. `at` is in seconds since 1970."""

    at: float
    rating: str
    comment: str | None


class StoredDecision(RequestReport):
    """A decision in the log. `at` is in seconds since 1970."""

    at: float
    question: str | None = None
    feedback: list[FeedbackEntry]


class FeedbackResponse(ApiResponse):
    """Confirms feedback. `learnt`: it was added to the history as a label."""

    id: str
    rating: str
    learnt: bool


class DeletionResponse(ApiResponse):
    """How many decisions and history entries were deleted."""

    forgotten: bool
    decisions: int
    history: int


class ConfidenceBounds(ApiResponse):
    """A mean with bounds that hold at all times at once."""

    mean: float | None
    low: float
    high: float


class LossReport(ConfidenceBounds):
    """What skipping costs, measured by audits: the share of answers that differ from those with passages."""

    drawn: int
    lost: float
    promised: float | None
    confidence: float
    evidence: float | None
    alarm: str


class DriftReport(ConfidenceBounds):
    """The share of questions that are unlike those the gate was trained on."""

    questions: int
    drifted: bool


class ArmReport(ApiResponse):
    """What was learnt about one gate of the experiment."""

    gate: str
    threshold: float
    audits: dict[str, int]
    loss: LossReport
    drift: DriftReport


class LearningResponse(ApiResponse):
    """What was learnt from traffic."""

    arms: dict[str, ArmReport]
    share_b: float
    canary: float
    audit: float
    budget_left: int
    labelled: int | None


class ModelList(ApiResponse):
    """The models of the upstream, or the model in this process, and the gates that a request can select."""

    object: Literal["list"] = "list"
    data: list[Any]


class HealthResponse(ApiResponse):
    """Shows that the server runs."""

    status: Literal["ok"] = "ok"


class ReadyResponse(ApiResponse):
    """Whether the server can answer, and the states of its circuit breakers."""

    ready: bool
    breakers: dict[str, str]
    gate: str
    stale: str
    degraded: list[str]


class DashboardResponse(ApiResponse):
    """Everything that the dashboard shows."""

    version: str
    gate: str
    threshold: float
    model: str
    retriever: str | None
    stale: str
    promise: str
    breakers: dict[str, str]
    keeps_texts: bool
    takes_feedback: bool
    learning: LearningResponse | None
    figures: dict[str, Any]
    recent: list[dict[str, Any]]
