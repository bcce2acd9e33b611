"""Pydantic models of the requests and responses of the HTTP API. The OpenAPI description is generated from them.

Chat requests and responses follow OpenAI's API. Only the fields that this server reads or writes are declared. All other
fields are allowed.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from knowgate.core.options import option
from knowgate.data.history.entries import MAX_QUESTION_CHARS

MAX_DECIDED_QUESTIONS = 256
MAX_RERANKED_DOCUMENTS = 1000
MAX_FEEDBACK_CHARS = 10_000
MAX_FILTER_PATTERNS = 32
MAX_PATTERN_CHARS = 200


def _check_not_blank(text: str) -> str:
    """Reject a text that consists of white space only."""
    if not text.strip():
        raise ValueError("the text must not be blank")
    return text


Text = Annotated[str, Field(min_length=1), AfterValidator(_check_not_blank)]
QuestionText = Annotated[Text, Field(max_length=MAX_QUESTION_CHARS)]
TextOrList = str | list[Any]
Pattern = Annotated[str, Field(max_length=MAX_PATTERN_CHARS)]
Patterns = Annotated[tuple[Pattern, ...], Field(min_length=1, max_length=MAX_FILTER_PATTERNS)] | Pattern


# --- requests -------------------------------------------------------------------------------------


class PassageFilter(BaseModel):
    """Restricts a search to documents whose id and title match the patterns.

    Patterns are file name patterns such as `hr/*`. A field that is left out matches every document. If there are both
    fields, a document must match one pattern of each.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: Patterns = "*"
    title: Patterns = "*"


class GateRequest(BaseModel):
    """The `knowgate` object in a request body, with which a client controls the decision to retrieve."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    retrieve: Literal["auto", "always", "never"] = option(
        "auto", "Whether to retrieve passages. auto: the gate decides."
    )
    threshold: float | None = option(
        None, "Retrieve if the need for retrieval (0: the LLM knows, 1: retrieve) is above this threshold.", ge=0, le=1
    )
    max_loss: float | None = option(
        None, "Retrieve unless the gate guarantees that skipping loses at most this share of answers.", ge=0, le=1
    )
    filter: Annotated[PassageFilter, Field(strict=False)] | None = None


class ApiRequest(BaseModel):
    """Base class of request bodies. Unknown fields are allowed. Values of a wrong type are rejected, not converted."""

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
    knowgate: GateRequest | None = None


class ChatMessage(TypedDict):
    """A chat message. Its content is a text, a list of parts, or null. The parts are not validated here."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    role: str
    content: NotRequired[TextOrList | None]


class ChatRequest(GatedRequest):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)


class LocalChatRequest(ChatRequest):
    """Body of POST /v1/chat/completions if the model runs in this process. Token limits are validated, too."""

    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)


class CompletionRequest(GatedRequest):
    """Body of POST /v1/completions."""

    prompt: TextOrList | None = None


class InputRequest(GatedRequest):
    """Body of POST /v1/responses and POST /v1/embeddings."""

    input: TextOrList | None = None


class DecideRequest(GatedRequest):
    """Body of POST /v1/decide. The handler checks that it has exactly one of `question`, `questions` and `messages`."""

    question: QuestionText | None = None
    questions: list[QuestionText] | None = Field(None, min_length=1, max_length=MAX_DECIDED_QUESTIONS)
    messages: list[ChatMessage] | None = Field(None, min_length=1)


class RerankDocument(ApiRequest):
    """A document of a rerank request or response, as an object with a text."""

    text: str


class RerankRequest(ApiRequest):
    """Body of POST /v1/rerank, in the same format as in the APIs of Cohere and Jina."""

    query: QuestionText
    documents: list[str | RerankDocument] = Field(min_length=1, max_length=MAX_RERANKED_DOCUMENTS)
    top_n: int | None = Field(None, ge=1)
    return_documents: bool | None = None


class FeedbackRequest(ApiRequest):
    """Body of POST /v1/feedback: a user's opinion about an answer, given by the id of its decision.

    The handler checks that there is a `rating`, a `correction` (the right answer), or both.
    """

    id: str
    rating: Literal["up", "down"] | None = None
    comment: str | None = Field(None, max_length=MAX_FEEDBACK_CHARS)
    correction: str | None = Field(None, max_length=MAX_FEEDBACK_CHARS)


class DeletionRequest(ApiRequest):
    """Body of POST /v1/forget, with the question to delete from all logs."""

    question: QuestionText


class ClearAlarmRequest(ApiRequest):
    """Body of POST /v1/learning/clear, with the arm of the A/B test whose alarm is cleared ("a" or "b")."""

    arm: str = "a"


# --- responses ------------------------------------------------------------------------------------


class ApiResponse(BaseModel):
    """Base class of response bodies. Fields that were not set are left out of the JSON."""

    model_config = ConfigDict(extra="allow")


class ErrorDetail(ApiResponse):
    """The `error` object of an error response, with a message for people and a code for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(ApiResponse):
    """Body of every error response."""

    error: ErrorDetail


class DecisionSummary(ApiResponse):
    """A decision whether to retrieve.

    `need` is the gate's estimate of the need for retrieval (0: the LLM knows, 1: retrieve). `retrieve` is true if it is
    above `threshold`, unless a rule or a fallback decided; `reason` says so.
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
    """The `knowgate` object of a response, which reports how the request was processed.

    `way` says how it was answered, such as "in-process" or "draft". `gated` says whether it was decided to retrieve or not;
    if nothing was decided, `why_not` is the reason. `arm` is the gate of the A/B test, and `mode` says why the server
    retrieved regardless of the gate ("shadow", "canary" or "alarm"). `choice` tells which answer the arbiter chose, that
    with or without passages, and `unweighed` why it could not compare them. `degraded` lists the components that failed,
    and `ignored` the request fields that had no effect.
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
    """The response of the LLM with a `knowgate` object. In a stream, the first and the last chunk have this object."""

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
    """A decision in the decision log. `at`: seconds since 1970. `follow_up`: whether several messages made the question."""

    at: float
    question: str | None = None
    follow_up: bool | None = None
    feedback: list[FeedbackEntry]


class FeedbackResponse(ApiResponse):
    """Confirms that feedback was stored. `learnt` is true if it was also added to the history for training gates."""

    id: str
    rating: str
    learnt: bool


class DeletionResponse(ApiResponse):
    """Confirms a deletion, with the numbers of deleted decisions and history entries, and a note if texts may remain."""

    forgotten: bool
    decisions: int
    history: int
    note: str = ""


class ConfidenceBounds(ApiResponse):
    """A mean with a confidence sequence from `low` to `high`, an interval that is valid however often it is read."""

    mean: float | None
    low: float
    high: float


class KeyLossReport(ApiResponse):
    """The audits of the requests of one API key.

    An audit compares the answer that was sent with the answer with passages. `drawn` is the number of audits, and `lost`
    how many of them found a changed answer. `alarm` is the reason why the gate is not followed for this key, or "".
    """

    drawn: int
    lost: float
    alarm: str


class LossReport(ConfidenceBounds):
    """The share of answers that change if retrieval is skipped, measured by audits.

    An audit compares the answer that was sent with the answer with passages, for a random sample of requests. `drawn` is
    the number of audits with a result, and `failed` the number of audits without one. `lost` is the number of audits that
    found a changed answer. `low` and `high` are the bounds of the share, with the given `confidence`: `low` takes the failed
    audits as unchanged, `high` as changed.

    `promised` is the maximum share of answers that skipping may change; null means that nothing is tested and that there
    is no alarm. `evidence` tells how strongly the audits speak against this maximum, from 0 (not at all) to 1 (it counts
    as exceeded); null without a maximum. `alarm` is the reason for the alarm, or "". `keys`: the audits of each API key.
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
    """The share of questions (their number is `questions`) that are unlike the training questions of the gate.

    `drifted` is true if the share is too large. `keys` names the API keys for whose own questions it is too large.
    """

    questions: int
    drifted: bool
    keys: list[str]


class ArmReport(ApiResponse):
    """Results of one gate (arm) of an A/B test. `audits` has the number of checked answers by the result of the check."""

    gate: str
    threshold: float
    audits: dict[str, int]
    loss: LossReport
    drift: DriftReport


class LearningResponse(ApiResponse):
    """Body of the response to GET /v1/learning: what the server has learnt from its requests.

    `arms` has the results of each gate of the A/B test, and `share_b` is the share of requests that get the second gate.
    `canary` is the share of requests that follow a gate; the others retrieve. `audit` is the share of requests whose
    answer is compared with the answer with passages, and `budget_left` the number of LLM calls that are left for this.
    `labelled` is the number of labels added to the history since this process started.
    """

    arms: dict[str, ArmReport]
    share_b: float
    canary: float
    audit: float
    budget_left: int
    labelled: int | None


class ModelList(ApiResponse):
    """The model names that a request can use: those of the LLMs, and knowgate/GATE for each selectable gate."""

    object: Literal["list"] = "list"
    data: list[Any]


class HealthResponse(ApiResponse):
    """Body of the response to GET /health. A server that runs always answers with it."""

    status: Literal["ok"] = "ok"


class ReadyResponse(ApiResponse):
    """Whether the server can answer requests.

    `breakers` has the states of the circuit breakers. `stale` is the reason why the calibration of the gate does not
    apply, or "". `degraded` lists the components that are not used at the moment. `lost_decisions` is the number of
    decisions that could not be stored, for example because the disk was full.
    """

    ready: bool
    breakers: dict[str, str]
    gate: str
    stale: str
    degraded: list[str]
    lost_decisions: int


class DashboardResponse(ApiResponse):
    """Body of the response to GET /v1/dashboard: all data that the dashboard shows.

    `constant` says in words that the gate always decides the same, or is "". `guarantee` describes the guarantee of the
    gate; `promise` repeats it for earlier clients. `figures` are statistics since `figures.since`.
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
