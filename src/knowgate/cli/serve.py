"""`knowgate serve`: the OpenAI-compatible server."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from knowgate.cli.console import STDERR_CONSOLE
from knowgate.cli.demo.comparison import demo_folder
from knowgate.cli.options import LangOption, ModelOption, RetrieverOption, check_log_location, parse_path
from knowgate.cli.pipeline_options import (
    ArbiterSpec,
    ConfigFile,
    Docs,
    GateSpec,
    Index,
    K,
    Log,
    MaxTokens,
    NoRules,
    PlugIn,
    Rerank,
    RulesFile,
    Threshold,
    combine_rule_flags,
)
from knowgate.core.display import sanitize_text
from knowgate.core.redaction import redact_urls
from knowgate.pipeline.settings import load_settings
from knowgate.server.entrypoint import run_server
from knowgate.server.options import load_serve_options

DEMO_QUESTIONS = ("Who is the head of the calibration laboratory?", "What is the capital of France?", "Thanks a lot!")


def find_demo_docs() -> Path:
    """What is looked up in where nothing else is named."""
    return demo_folder() / "handbook"


def print_demo_commands(address: str) -> None:
    """Lines to copy into another terminal."""
    STDERR_CONSOLE.print(f"The handbook of a company nobody knows is in {find_demo_docs()}. Try:", markup=False)
    for question in DEMO_QUESTIONS:
        body = f'{{"model": "knowgate", "messages": [{{"role": "user", "content": "{question}"}}]}}'
        STDERR_CONSOLE.print(f"  curl {address}/v1/chat/completions -d '{body}'", markup=False, soft_wrap=True)
    STDERR_CONSOLE.print(
        f'  curl {address}/v1/decide -d \'{{"question": "{DEMO_QUESTIONS[0]}"}}\'', markup=False, soft_wrap=True
    )
    STDERR_CONSOLE.print(
        f"  curl {address}/metrics        # in a browser: {address}/docs", markup=False, soft_wrap=True
    )
    STDERR_CONSOLE.print(f"Any OpenAI client works: its base URL is {address}/v1", markup=False, soft_wrap=True)


Upstream = Annotated[list[str] | None, typer.Option(metavar="URL", help="OpenAI-compatible server that answers, up to /v1, instead of --model. May be repeated: they share the requests (URL,weight=3), and where one fails the next is asked.")]  # fmt: skip  # noqa: E501
UpstreamModel = Annotated[str | None, typer.Option(metavar="NAME", help="With --upstream: the LLM meant by the model names knowgate and knowgate/GATE. Default: the first it lists.")]  # fmt: skip  # noqa: E501
Way = Annotated[str | None, typer.Option(metavar="draft|race|question", help="With --upstream: its answer decides; retrieval begins beside it; or the question alone decides, without a call.")]  # fmt: skip  # noqa: E501
Place = Annotated[str | None, typer.Option(metavar="user|system|documents", help="With --upstream: where passages go. Default: before the last user turn.")]  # fmt: skip  # noqa: E501
Host = Annotated[str | None, typer.Option(help="Address to listen on. Default 127.0.0.1.")]
Port = Annotated[int | None, typer.Option(min=0, max=65535, help="Port to listen on. Default 8080.")]
Strict = Annotated[bool | None, typer.Option("--strict", help="Answer 503 where the documents cannot be searched, instead of from memory.")]  # fmt: skip  # noqa: E501
Keys = Annotated[Path | None, typer.Option(parser=parse_path, metavar="FILE", help="API keys made by `knowgate keys add`. Without them only this machine is answered.")]  # fmt: skip  # noqa: E501
Decisions = Annotated[str | None, typer.Option(parser=check_log_location, metavar="DB", help="Keep what was decided (SQLite file, or postgresql://USER@HOST/DATABASE for several machines), for GET /v1/decisions/ID and POST /v1/feedback.")]  # fmt: skip  # noqa: E501
KeepQuestions = Annotated[bool | None, typer.Option("--keep-questions", help="With --decisions: keep the text of the questions, too.")]  # fmt: skip  # noqa: E501
Audit = Annotated[float | None, typer.Option(min=0, max=1, metavar="SHARE", help="Draw this share of requests to see what skipping costs: skipped ones are also answered with passages, afterwards. Needs --decisions.")]  # fmt: skip  # noqa: E501
AuditBudget = Annotated[int | None, typer.Option(min=1, help="With --audit: answers an hour that nobody asked for, at most. Default 60.")]  # fmt: skip  # noqa: E501
AuditCompare = Annotated[str | None, typer.Option(metavar="words|llm", help="With --audit: answers differ where neither's words stand in the other's; llm, for answers in prose: and the upstream's LLM, asked, says so.")]  # fmt: skip  # noqa: E501
MaxLoss = Annotated[float | None, typer.Option(metavar="SHARE", help="With --audit: alarm, and look everything up, once skipping costs more answers than this. Default: what the gate promises.")]  # fmt: skip  # noqa: E501
Confidence = Annotated[float | None, typer.Option(help="Of the bounds of that loss and of the alarm, at all times together. Default 0.95.")]  # fmt: skip  # noqa: E501
Shadow = Annotated[bool | None, typer.Option("--shadow", help="Decide and log, but look everything up.")]
Canary = Annotated[float | None, typer.Option(min=0, max=1, metavar="SHARE", help="Obey the gate for this share of requests; look the others up.")]  # fmt: skip  # noqa: E501
GateB = Annotated[str | None, typer.Option(metavar="GATE", help="A second gate beside --gate, with figures of its own.")]  # fmt: skip  # noqa: E501
ThresholdB = Annotated[float | None, typer.Option(min=0, max=1, help="Threshold of --gate-b. Default: its own.")]
ShareB = Annotated[float | None, typer.Option(min=0, max=1, help="Share of requests that --gate-b decides on. Default 0.5.")]  # fmt: skip  # noqa: E501
PriceRetrieval = Annotated[float | None, typer.Option(help="For the dashboard: price of one search.")]
PriceInput = Annotated[float | None, typer.Option("--price-input-token", help="For the dashboard: price of one prompt token, e.g. 3e-7.")]  # fmt: skip  # noqa: E501
PriceOutput = Annotated[float | None, typer.Option("--price-output-token", help="For the dashboard: price of one generated token, e.g. 1.2e-6.")]  # fmt: skip  # noqa: E501
Otel = Annotated[bool | None, typer.Option("--otel", help="Send OpenTelemetry spans to the collector that OTEL_EXPORTER_OTLP_ENDPOINT names (needs the extra otel).")]  # fmt: skip  # noqa: E501
Workers = Annotated[int | None, typer.Option(min=1, help="Processes that serve, each with its own model and index. Default 1.")]  # fmt: skip  # noqa: E501
Demo = Annotated[bool, typer.Option("--demo", help="The embedded model and the packaged handbook, texts on the dashboard, with lines to try.")]  # fmt: skip  # noqa: E501
Deadline = Annotated[float | None, typer.Option(help="Seconds after which a request is over. Default 120.")]


def serve(
    model: ModelOption = None,
    upstream: Upstream = None,
    upstream_model: UpstreamModel = None,
    way: Way = None,
    place: Place = None,
    gate: GateSpec = None,
    plug_in: PlugIn = None,
    threshold: Threshold = None,
    docs: Docs = None,
    index: Index = None,
    retriever: RetrieverOption = None,
    rerank: Rerank = None,
    arbiter: ArbiterSpec = None,
    rules: RulesFile = None,
    no_rules: NoRules = False,
    k: K = None,
    max_tokens: MaxTokens = None,
    lang: LangOption = None,
    log: Log = None,
    config: ConfigFile = None,
    host: Host = None,
    port: Port = None,
    workers: Workers = None,
    strict: Strict = None,
    deadline: Deadline = None,
    keys: Keys = None,
    decisions: Decisions = None,
    keep_questions: KeepQuestions = None,
    audit: Audit = None,
    audit_budget: AuditBudget = None,
    audit_compare: AuditCompare = None,
    max_loss: MaxLoss = None,
    confidence: Confidence = None,
    shadow: Shadow = None,
    canary: Canary = None,
    gate_b: GateB = None,
    threshold_b: ThresholdB = None,
    share_b: ShareB = None,
    price_retrieval: PriceRetrieval = None,
    price_input_token: PriceInput = None,
    price_output_token: PriceOutput = None,
    otel: Otel = None,
    demo: Demo = False,
) -> None:
    """Serve an OpenAI-compatible endpoint that retrieves only where the gate says so.

    Applications change their base URL to http://HOST:PORT/v1 and nothing else. SIGHUP has gate, threshold, rules and
    documents read again; SIGTERM ends it when all streams are over.
    """
    if demo and docs is None and index is None:
        docs = find_demo_docs()
    read = partial(
        load_settings, config, model=model, gate=gate, plug_in=plug_in, threshold=threshold, docs=docs, index=index,
        retriever=retriever, rerank=rerank, arbiter=arbiter, rules=combine_rule_flags(rules, no_rules), k=k,
        max_tokens=max_tokens, lang=lang, log=log,
    )  # fmt: skip
    settings = read()
    options = load_serve_options(
        settings, upstream=upstream or None, upstream_model=upstream_model, way=way, place=place, host=host, port=port,
        workers=workers, strict=strict, deadline=deadline, keys=_text(keys), decisions=decisions,
        keep_questions=demo or keep_questions, otel=otel,
        audit=audit, audit_budget=audit_budget, audit_compare=audit_compare, max_loss=max_loss, confidence=confidence,
        shadow=shadow, canary=canary, gate_b=gate_b, threshold_b=threshold_b, share_b=share_b,
        price_retrieval=price_retrieval, price_input_token=price_input_token, price_output_token=price_output_token,
    )  # fmt: skip
    behind = redact_urls(", ".join(options.upstream)) if options.upstream else settings.model
    address = f"http://{options.host}:{options.port}"
    STDERR_CONSOLE.print(
        sanitize_text(f"Serving {behind} on {address}/v1, dashboard on {address}/. Ctrl-C ends it."), markup=False
    )
    if demo:
        print_demo_commands(address)
    run_server(settings, options, read)


def _text(file: Path | None) -> str | None:
    return None if file is None else str(file)
