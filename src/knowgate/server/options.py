"""Options of the server: the table [serve] of `knowgate.toml`, and the flags of `knowgate serve`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import field_validator

from knowgate.core.options import Count, Options, Share, UserPath, get_set_fields, option, read_options
from knowgate.core.postgres.address import is_postgres_address
from knowgate.core.redaction import redact_secrets
from knowgate.core.validation import expand_path
from knowgate.errors import BadSetting
from knowgate.evaluation.replay import Price, Prices
from knowgate.pipeline.settings import PipelineOptions

LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")
ForwardingMode = Literal["draft", "race", "question"]
PassagePlacement = Literal["user", "system", "documents"]


class ServeOptions(Options):
    """Options of the server, for `run_server`, `create_app` and `knowgate serve`.

    The upstream is another OpenAI-compatible server with the LLM. Without an upstream, the LLM runs in this process.
    """

    upstream: str | None = option(
        None,
        "URL of an OpenAI-compatible server that generates the answers, ending in /v1. Default: the model runs in "
        "this process.",
        repr=False,
    )
    upstream_model: str | None = option(
        None,
        "With `upstream`: name of the LLM that answers requests for the models knowgate and knowgate/GATE. Default: "
        "the first model that the upstream lists.",
    )
    connect_seconds: float = option(10.0, "With `upstream`: maximum seconds to open a connection.", gt=0, le=3_600)
    first_byte_seconds: float | None = option(
        None,
        "With `upstream`: maximum seconds until a response starts, and between two parts of it. Default and maximum: "
        "0.9 times `deadline`.",
        gt=0,
        le=3_600,
    )
    way: ForwardingMode | None = option(
        None,
        "With `upstream`: what the gate reads before it decides. draft: the answer that the upstream gives without "
        "passages. race: like draft, but the search runs at the same time. question: only the question. Default: draft "
        "if the gate needs a draft, otherwise question.",
    )
    place: PassagePlacement = option(
        "user",
        "With `upstream`: where passages are inserted into the request. user: before the last user message. system: "
        "at the end of the system prompt. documents: in a separate field named documents.",
    )
    cite: bool = option(
        True, "With `upstream`: ask the LLM to cite each passage that it uses, as [id]. Never done in JSON mode."
    )
    host: str = option("127.0.0.1", "Address to listen on. An address that other machines can reach requires `keys`.")
    port: int = option(8080, "Port to listen on.", ge=0, le=65535)
    workers: int = option(1, "Number of server processes. Each one loads its own model and index.", ge=1, le=256)
    strict: bool = option(False, "Return HTTP status 503 if a search fails. Default: answer without passages.")
    deadline: float = option(120.0, "Maximum seconds for one request.", gt=0, le=3_600)
    gate_seconds: float = option(10.0, "Maximum seconds for one decision or one search.", gt=0, le=3_600)
    largest_body: int = option(4 << 20, "Maximum size of a request body, in bytes.", ge=1024, le=1 << 30)
    most_tokens: Count = option(
        1024, "Without `upstream`: maximum tokens of an answer. Requests for more are reduced to this number."
    )
    waiting: Count = option(128, "Maximum number of requests in progress. Further requests get HTTP status 429.")
    batch: Count = option(
        16,
        "Without `upstream`: maximum number of questions that the model answers at once. 1 turns batching off.",
        le=1024,
    )
    keys: UserPath | None = option(
        None,
        "File of API keys that clients must use. Create keys with `knowgate keys add`. Without this file, the server "
        "accepts requests from this machine only.",
    )
    decisions: str | None = option(
        None,
        "Where to store the decision log, which feedback and audits need: an SQLite file, or "
        "postgresql://USER@HOST/DATABASE if servers on several machines share it.",
        repr=False,
    )
    keep_questions: bool = option(
        False, "Store the text of questions in the decision log, and show it on the dashboard and in traces."
    )
    retain_days: float = option(
        30.0, "With `decisions`: days after which decisions, questions and feedback are deleted.", gt=0, le=36_500
    )
    durable: bool = option(
        False,
        "With `decisions`: send a response only after its decision is on disk. Default: write decisions within "
        "milliseconds after the response, so that a crash can lose the latest ones.",
    )
    otel: bool = option(False, "Send OpenTelemetry traces to the URL in OTEL_EXPORTER_OTLP_ENDPOINT.")

    audit: Share = option(
        0.0,
        "Share of requests to audit. If an audited request was answered without passages, the server answers it again with "
        "passages, after the response, to measure how often skipping retrieval changes the answer. Needs `decisions`.",
    )
    share_labels: bool = option(
        False,
        "With `keys` and `log`: requests of all keys add labels to the history. Default: only those of admin keys.",
    )
    audit_budget: Count = option(60, "With `audit`: maximum number of additional LLM calls per hour.")
    audit_compare: Literal["words", "llm"] = option(
        "words",
        "With `audit`: how two answers are compared. words: they agree if the words of one occur in the other. llm: "
        "if the words differ, the LLM of the upstream decides, which suits long answers.",
    )
    max_changed: float | None = option(
        None,
        "With `audit`: maximum share of answers, right or wrong, that may change because retrieval is skipped. If "
        "audits show more changed answers, the server raises an alarm and always retrieves. Default: the bound that "
        "`knowgate calibrate` recorded for the gate.",
        gt=0,
        lt=1,
    )
    confidence: float = option(
        0.95, "With `audit`: confidence level of the measured share of changed answers and of the alarm.", gt=0, lt=1
    )
    shadow: bool = option(False, "Always retrieve, and only log what the gate would decide.")
    canary: Share | None = option(
        None, "Share of requests for which the gate decides. The server always retrieves for the others. Default: 1."
    )
    gate_b: str | None = option(None, "Second gate for an A/B test: its name or its folder. It has its own statistics.")
    threshold_b: Share | None = option(
        None, "Decision threshold of `gate_b`. Default: the threshold that is stored with the gate."
    )
    share_b: Share = option(0.5, "With `gate_b`: share of requests that the second gate decides.")

    renamed: ClassVar[Mapping[str, str]] = {"price_retrieval": "price_search", "max_loss": "max_changed"}
    price_search: Price = option(0.0, "Price of one search. The dashboard computes the money saved from it.")
    price_llm_call: Price | None = option(
        None,
        (
            "Price of one LLM call, if you pay per call. The dashboard subtracts the price of the gate's extra calls "
            "from the money saved."
        ),
    )
    price_token: Price | None = option(
        None, "Price of one token that the LLM reads or writes. The dashboard computes the money saved from it."
    )
    price_input_token: Price | None = option(None, "Price of one prompt token. Default: the price in `price_token`.")
    price_output_token: Price | None = option(
        None, "Price of one generated token. Default: the price in `price_token`."
    )

    @field_validator("upstream")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        """Check that the upstream is a single HTTP URL, and remove trailing slashes."""
        if url is None:
            return None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or "," in url:
            message = f"upstream={redact_secrets(url)!r} is not a valid URL. Use one such as http://127.0.0.1:8000/v1."
            raise BadSetting(message)
        return url.rstrip("/")

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
    def prices(self) -> Prices:
        """The prices from which the dashboard computes savings."""
        names = ("search", "llm_call", "token", "input_token", "output_token")
        prices = {name: getattr(self, f"price_{name}") for name in names}
        return Prices(**{name: price for name, price in prices.items() if price is not None})

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

    Raises:
        BadSetting: The table has an unknown option, or one that belongs to the top level of the settings.
    """
    misplaced = sorted(settings.serve.keys() & PipelineOptions.model_fields.keys() - ServeOptions.model_fields.keys())
    if misplaced:
        name = misplaced[0]
        raise BadSetting(
            f"knowgate.toml: the table [serve] has no option '{name}'. Move '{name}' to the top, before the first table."
        )
    changes = {} if overrides is None else get_set_fields(overrides)
    return read_options(ServeOptions, {**settings.serve, **changes}, "knowgate.toml [serve]")
