"""Options of the server: the table [serve] of `knowgate.toml`, and the flags of `knowgate serve`."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from knowgate.core.options import Count, Options, Share, UserPath, read_options
from knowgate.core.postgres.address import is_postgres_address
from knowgate.core.redaction import redact_secrets
from knowgate.core.validation import expand_path
from knowgate.errors import BadSetting
from knowgate.pipeline.settings import PipelineOptions

LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")
ForwardingMode = Literal["draft", "race", "question"]
PassagePlacement = Literal["user", "system", "documents"]


class ServeOptions(Options):
    """Options of `run_server` and `create_app`."""

    upstream: str | None = Field(
        default=None,
        repr=False,  # may contain a login
        description="OpenAI-compatible server that answers, up to /v1. Default: the model runs in this process.",
    )
    upstream_model: str | None = Field(
        default=None,
        description="With `upstream`: the LLM behind the model names knowgate and knowgate/GATE. Default: its first.",
    )
    connect_seconds: float = Field(
        default=10.0, gt=0, le=3_600, description="With `upstream`: longest time to open a connection."
    )
    first_byte_seconds: float | None = Field(
        default=None, gt=0, le=86_400, description="With `upstream`: longest wait for a response. Default: `deadline`."
    )
    way: ForwardingMode | None = Field(
        default=None,
        description="With `upstream`: draft (the gate reads the upstream's answer), race (the same, while the search "
        "already runs) or question (the gate reads only the question). Default: draft, if the gate reads drafts.",
    )
    place: PassagePlacement = Field(
        default="user",
        description="With `upstream`: put passages before the last user message, into the system prompt, "
        "or into a field `documents`.",
    )
    host: str = Field(default="127.0.0.1", description="Address to listen on. Other hosts than loopback need `keys`.")
    port: int = Field(default=8080, ge=0, le=65535, description="Port to listen on.")
    workers: int = Field(default=1, ge=1, le=256, description="Server processes, each with its own model and index.")
    strict: bool = Field(default=False, description="Answer 503 if the search fails, instead of without passages.")
    deadline: float = Field(default=120.0, gt=0, le=86_400, description="Longest time for one request, in seconds.")
    gate_seconds: float = Field(default=10.0, gt=0, le=3_600, description="Longest time for a decision or a search.")
    largest_body: int = Field(default=4 << 20, ge=1024, le=1 << 30, description="Largest request body, in bytes.")
    most_tokens: Count = Field(default=1024, description="Longest answer that a request can ask a local model for.")
    waiting: Count = Field(default=128, description="Requests in progress; further ones are answered 429.")
    batch: Count = Field(default=16, le=1024, description="Questions per batch of a local model. 1: no batching.")
    keys: UserPath | None = Field(
        default=None,
        description="File of API keys (`knowgate keys add`). Without it, only loopback clients are served.",
    )
    decisions: str | None = Field(
        default=None,
        repr=False,  # may contain a password
        description="Decision log: an SQLite file, or postgresql://USER@HOST/DATABASE for several machines. "
        "Feedback and audits need it.",
    )
    keep_questions: bool = Field(default=False, description="Store the text of questions in the decision log.")
    otel: bool = Field(default=False, description="Send OpenTelemetry spans to OTEL_EXPORTER_OTLP_ENDPOINT.")

    audit: Share = Field(
        default=0.0,
        description="Share of requests to audit: skipped ones are also answered with passages, after the response, "
        "to measure what skipping costs. Needs `decisions`.",
    )
    audit_budget: Count = Field(default=60, description="With `audit`: extra answers per hour, at most.")
    audit_compare: Literal["words", "llm"] = Field(
        default="words",
        description="With `audit`: two answers agree if the words of one occur in the other; with llm, also if the "
        "upstream's LLM says so (for answers in prose).",
    )
    max_loss: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="With `audit`: raise the alarm and always retrieve once skipping loses a larger share of the "
        "answers. Default: the loss that the gate guarantees.",
    )
    confidence: float = Field(default=0.95, gt=0, lt=1, description="Confidence of the loss bounds and of the alarm.")
    shadow: bool = Field(default=False, description="Log what the gate decides, but always retrieve.")
    canary: Share | None = Field(default=None, description="Share of requests that follow the gate; others retrieve.")
    gate_b: str | None = Field(default=None, description="Second gate for an A/B test, with its own statistics.")
    threshold_b: Share | None = Field(default=None, description="Threshold of `gate_b`. Default: its own.")
    share_b: Share = Field(default=0.5, description="Share of requests that `gate_b` decides.")

    price_retrieval: float = Field(default=0.0, ge=0, description="For the dashboard: price of a search.")
    price_input_token: float = Field(default=0.0, ge=0, description="For the dashboard: price of a prompt token.")
    price_output_token: float = Field(default=0.0, ge=0, description="For the dashboard: price of a generated token.")

    @field_validator("upstream")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or "," in url:
            raise BadSetting(f"upstream={redact_secrets(url)!r} is not a URL such as http://127.0.0.1:8000/v1.")
        return url.rstrip("/")

    @field_validator("decisions")
    @classmethod
    def _expand_path(cls, location: str | None) -> str | None:
        return location if location is None or is_postgres_address(location) else str(expand_path(location))

    @property
    def database(self) -> str | None:
        """Address of the shared PostgreSQL database, or None if decisions are stored in a file."""
        return self.decisions if self.decisions is not None and is_postgres_address(self.decisions) else None

    @property
    def is_local(self) -> bool:
        """Whether the server listens on loopback only."""
        return self.host in LOOPBACK_HOSTS


def load_serve_options(settings: PipelineOptions, overrides: ServeOptions | None = None) -> ServeOptions:
    """Read the table [serve] of the settings; the fields that are set in `overrides` take precedence."""
    changes = {} if overrides is None else {name: getattr(overrides, name) for name in overrides.model_fields_set}
    return read_options(ServeOptions, {**settings.serve, **changes}, "knowgate.toml [serve]")
