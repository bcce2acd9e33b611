"""Options of the server: the table [serve] of `knowgate.toml`, and the flags of `knowgate serve`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

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
    """Options of the server, shared by `run_server`, `create_app` and `knowgate serve`.

    The upstream is another OpenAI-compatible server that generates the answers. Without one, an LLM in this process
    answers ("local model").
    """

    upstream: str | None = Field(
        default=None,
        repr=False,  # may contain a login
        description="URL of an OpenAI-compatible server that generates the answers, ending in /v1. "
        "Default: the model runs in this process.",
    )
    upstream_model: str | None = Field(
        default=None,
        description="With `upstream`: name of the LLM that answers requests for the models knowgate and knowgate/GATE. "
        "Default: the first model that the upstream lists.",
    )
    connect_seconds: float = Field(
        default=10.0, gt=0, le=3_600, description="With `upstream`: maximum seconds to open a connection."
    )
    first_byte_seconds: float | None = Field(
        default=None,
        gt=0,
        le=86_400,
        description="With `upstream`: maximum seconds until a response starts, and between two parts of it. "
        "Default and maximum: 0.9 times `deadline`.",
    )
    way: ForwardingMode | None = Field(
        default=None,
        description="With `upstream`: what the gate reads before it decides. draft: the answer that the upstream gives "
        "without passages. race: the same, and the search already runs meanwhile. question: only the question. "
        "Default: draft if the gate needs a draft, otherwise question.",
    )
    place: PassagePlacement = Field(
        default="user",
        description="With `upstream`: where passages are inserted into the request. user: before the last user message. "
        "system: at the end of the system prompt. documents: in a separate field named documents.",
    )
    cite: bool = Field(
        default=True,
        description="With `upstream`: ask the LLM to cite the passages that it uses as [id]. Never done in JSON mode.",
    )
    host: str = Field(
        default="127.0.0.1",
        description="Address to listen on. An address that other machines can reach requires `keys`.",
    )
    port: int = Field(default=8080, ge=0, le=65535, description="Port to listen on.")
    workers: int = Field(
        default=1, ge=1, le=256, description="Number of server processes. Each one loads its own model and index."
    )
    strict: bool = Field(
        default=False, description="Return HTTP status 503 if a search fails. Default: answer without passages."
    )
    deadline: float = Field(default=120.0, gt=0, le=86_400, description="Maximum seconds for one request.")
    gate_seconds: float = Field(
        default=10.0, gt=0, le=3_600, description="Maximum seconds for one decision or one search."
    )
    largest_body: int = Field(
        default=4 << 20, ge=1024, le=1 << 30, description="Maximum size of a request body, in bytes."
    )
    most_tokens: Count = Field(
        default=1024,
        description="Without `upstream`: maximum tokens of an answer. Requests for more are reduced to this number.",
    )
    waiting: Count = Field(
        default=128, description="Maximum number of requests in progress. Further requests get HTTP status 429."
    )
    batch: Count = Field(
        default=16,
        le=1024,
        description="Without `upstream`: maximum number of questions that the model answers at once. 1 turns batching off.",
    )
    keys: UserPath | None = Field(
        default=None,
        description="File of API keys that clients must use. Create keys with `knowgate keys add`. "
        "Without this file, the server accepts requests from this machine only.",
    )
    decisions: str | None = Field(
        default=None,
        repr=False,  # may contain a password
        description="Where to store the decision log, which feedback and audits need: an SQLite file, "
        "or postgresql://USER@HOST/DATABASE if servers on several machines share it.",
    )
    keep_questions: bool = Field(default=False, description="Store the text of questions in the decision log.")
    retain_days: float = Field(
        default=30.0,
        gt=0,
        le=36_500,
        description="With `decisions`: days after which decisions, questions and feedback are deleted.",
    )
    durable: bool = Field(
        default=False,
        description="With `decisions`: send a response only after its decision is on disk. "
        "Default: write decisions within milliseconds after the response, so that a crash can lose the latest ones.",
    )
    otel: bool = Field(
        default=False, description="Send OpenTelemetry traces to the URL in OTEL_EXPORTER_OTLP_ENDPOINT."
    )

    audit: Share = Field(
        default=0.0,
        description="Share of requests to audit. If an audited request was answered without passages, the server also "
        "answers it with passages, after the response is sent, to measure how many answers skipping retrieval "
        "changes. Needs `decisions`.",
    )
    audit_budget: Count = Field(
        default=60, description="With `audit`: maximum number of additional LLM calls per hour."
    )
    audit_compare: Literal["words", "llm"] = Field(
        default="words",
        description="With `audit`: how two answers are compared. words: they agree if the words of one occur in the "
        "other. llm: if the words differ, the LLM of the upstream decides, which suits long answers.",
    )
    max_changed: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="With `audit`: maximum share of answers that skipping retrieval may change, whether they were right "
        "or wrong. If audits show that it is exceeded, the server raises an alarm and always retrieves. "
        "Default: the bound that `knowgate calibrate` recorded for the gate.",
    )
    max_loss: float | None = Field(default=None, gt=0, lt=1, description="Old name of `max_changed`.")
    confidence: float = Field(
        default=0.95,
        gt=0,
        lt=1,
        description="With `audit`: statistical confidence of the measured loss and of the alarm.",
    )
    shadow: bool = Field(default=False, description="Always retrieve, and only log what the gate would decide.")
    canary: Share | None = Field(
        default=None,
        description="Share of requests that follow the decision of the gate. All others retrieve. Default: all follow.",
    )
    gate_b: str | None = Field(
        default=None, description="Second gate for an A/B test: a name or a file. It has its own statistics."
    )
    threshold_b: Share | None = Field(
        default=None, description="Decision threshold of `gate_b`. Default: the threshold that is stored with the gate."
    )
    share_b: Share = Field(default=0.5, description="With `gate_b`: share of requests that the second gate decides.")

    renamed: ClassVar[Mapping[str, str]] = {"price_retrieval": "price_search"}
    price_search: float = Field(
        default=0.0, ge=0, description="Price of one search, from which the dashboard computes savings."
    )
    price_token: float = Field(
        default=0.0,
        ge=0,
        description="Price of one token that the LLM reads or writes, from which the dashboard computes savings.",
    )
    price_input_token: float | None = Field(
        default=None, ge=0, description="Price of one prompt token, if it differs from `price_token`."
    )
    price_output_token: float | None = Field(
        default=None, ge=0, description="Price of one generated token, if it differs from `price_token`."
    )

    @field_validator("upstream")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        """Check that the upstream is a single HTTP URL, and remove trailing slashes."""
        if url is None:
            return None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or "," in url:
            raise BadSetting(
                f"upstream={redact_secrets(url)!r} is not a valid URL. Use one such as http://127.0.0.1:8000/v1."
            )
        return url.rstrip("/")

    @model_validator(mode="after")
    def _rename_max_loss(self) -> ServeOptions:
        """Use `max_loss`, the old name, as `max_changed` if that is not set."""
        if self.max_loss is not None and self.max_changed is None:
            object.__setattr__(self, "max_changed", self.max_loss)
        return self

    @field_validator("decisions")
    @classmethod
    def _expand_path(cls, location: str | None) -> str | None:
        """Expand `~` in the path of a decision log. PostgreSQL addresses stay as they are."""
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
    """Read the server's options from the table [serve] of the settings.

    Args:
        settings: Settings that may contain the table [serve].
        overrides: Options that take precedence, such as those of the command line. Fields that were not set in this
            object do not override anything.
    """
    changes = {} if overrides is None else {name: getattr(overrides, name) for name in overrides.model_fields_set}
    return read_options(ServeOptions, {**settings.serve, **changes}, "knowgate.toml [serve]")
