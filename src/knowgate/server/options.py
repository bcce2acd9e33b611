"""What only the server reads: the table [serve] of `knowgate.toml`, then flags."""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from knowgate.core.postgres.address import is_postgres_address
from knowgate.core.redaction import redact_secrets
from knowgate.core.validation import format_value
from knowgate.errors import BadSetting
from knowgate.pipeline.settings import PipelineOptions

LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")
ForwardingMode = Literal["draft", "race", "question"]
PassagePlacement = Literal["user", "system", "documents"]


class ServeOptions(BaseModel):
    """Every key of [serve], with its default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    upstream: tuple[str, ...] | None = Field(default=None, repr=False)  # its URL may hold a login
    """OpenAI-compatible server that answers, up to /v1; several share the requests by weight (`URL,weight=3`), and
    where one fails the next is asked. Without any the model runs in this process."""
    upstream_model: str | None = None
    """The LLM meant by the model names knowgate and knowgate/GATE. Default: the first one the upstream lists."""
    way: ForwardingMode | None = None
    """draft: its answer decides; race: retrieval begins beside it; question: no call. Default: draft, if any."""
    place: PassagePlacement = "user"
    """Where passages go: before the last user turn, into the system prompt, or into a field `documents`."""
    host: str = "127.0.0.1"
    """Address to listen on; other than loopback only with API keys."""
    port: int = Field(default=8080, ge=0, le=65535)
    """Port to listen on."""
    strict: bool = False
    """Where the retriever fails: 503, instead of an answer from memory that is marked."""
    deadline: float = Field(default=120.0, gt=0, le=86_400)
    """Seconds after which a request is over."""
    gate_seconds: float = Field(default=10.0, gt=0, le=3_600)
    """Seconds after which a gate or retriever counts as failed."""
    largest_body: int = Field(default=4 << 20, ge=1024, le=1 << 30)
    """Bytes of a request."""
    most_tokens: int = Field(default=1024, ge=1, le=1_000_000)
    """With a model in this process: the longest answer that a request may ask for."""

    waiting: int = Field(default=128, ge=1, le=100_000)
    """Requests at work or waiting; one more is answered 429."""
    batch: int = Field(default=16, ge=1, le=1024)
    """With a model in this process: questions that are answered together; 1: one after the other."""
    workers: int = Field(default=1, ge=1, le=256)
    """Processes that serve; each loads its own model and index. Keys, decisions and history are shared."""
    keys: str | None = None
    """File of API keys, made by `knowgate keys add`. Without it only this machine is answered."""
    decisions: str | None = Field(default=None, repr=False)  # its address may hold a password
    """SQLite file or postgresql://... that keeps what was decided, for GET /v1/decisions/ID and POST /v1/feedback."""
    keep_questions: bool = False
    """With decisions: keep the text of the questions, too."""
    otel: bool = False
    """Send OpenTelemetry spans to the collector that OTEL_EXPORTER_OTLP_ENDPOINT names."""

    @field_validator("upstream", mode="before")
    @classmethod
    def _is_several(cls, value: object) -> object:
        """One may be written without a list; none is None."""
        return (value,) if isinstance(value, str) else value or None

    audit: float = Field(default=0.0, ge=0, le=1)
    """Share of requests drawn to see what skipping costs: skipped ones are answered with passages, too. 0: none."""
    audit_budget: int = Field(default=60, ge=1, le=1_000_000)
    """With audit: answers an hour that nobody asked for, at most; while it is spent nothing is drawn."""
    audit_compare: Literal["words", "llm"] = "words"
    """With audit: answers differ where neither's words stand in the other's; llm: and the upstream's LLM says so."""
    max_loss: float | None = Field(default=None, gt=0, lt=1)
    """With audit: alarm, and look everything up, once skipping costs more answers. Default: what the gate promises."""
    confidence: float = Field(default=0.95, gt=0, lt=1)
    """Of the bounds of that loss and of the alarm, at all times together."""
    shadow: bool = False
    """Decide and log, but look everything up."""
    canary: float | None = Field(default=None, ge=0, le=1)
    """Share of requests for which the gate is obeyed; the others are looked up."""
    gate_b: str | None = None
    """A second gate beside the first, with figures of its own."""
    threshold_b: float | None = Field(default=None, ge=0, le=1)
    """Threshold of the second gate. Default: its own."""
    share_b: float = Field(default=0.5, ge=0, le=1)
    """Share of requests that the second gate decides on."""

    price_retrieval: float = Field(default=0.0, ge=0)
    """For the dashboard: price of one search, in any currency."""
    price_input_token: float = Field(default=0.0, ge=0)
    """For the dashboard: price of one prompt token, e.g. 3e-7."""
    price_output_token: float = Field(default=0.0, ge=0)
    """For the dashboard: price of one generated token, e.g. 1.2e-6."""

    @field_validator("upstream")
    @classmethod
    def _is_address(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if value is None else tuple(_address(written) for written in value)

    @property
    def database(self) -> str | None:
        """Where decisions are kept, if that is one that several machines can share."""
        return self.decisions if self.decisions is not None and is_postgres_address(self.decisions) else None

    @property
    def is_local(self) -> bool:
        """Nobody from outside can reach it."""
        return self.host in LOOPBACK_HOSTS


def _address(written: str) -> str:
    url, comma, weight = written.partition(",")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("it is no address such as http://127.0.0.1:8000/v1")
    return url.rstrip("/") + comma + weight


def load_serve_options(settings: PipelineOptions, **flags: Any) -> ServeOptions:
    """The table [serve] of these settings, overridden by the flags that were given."""
    values = {**settings.serve, **{key: value for key, value in flags.items() if value is not None}}
    unknown = sorted(set(values) - set(ServeOptions.model_fields))
    if unknown:
        raise BadSetting(f"[serve]: unknown key '{unknown[0]}'. Known: {', '.join(ServeOptions.model_fields)}.")
    try:
        return ServeOptions(**values)
    except ValidationError as error:
        first = error.errors()[0]
        said = redact_secrets(format_value(first["input"]))
        raise BadSetting(f"[serve]: '{first['loc'][0]}' is {said}: {first['msg'].lower()}.") from None
