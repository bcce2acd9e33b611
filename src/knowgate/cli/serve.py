"""`knowgate serve`: the OpenAI-compatible server."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from typing import Annotated

import typer

from knowgate.cli.console import inform
from knowgate.cli.demo.comparison import demo_folder
from knowgate.cli.options import ConfigFile, NoRules, load_command_settings
from knowgate.core.display import sanitize_text
from knowgate.core.redaction import redact_urls
from knowgate.pipeline.settings import PipelineOptions
from knowgate.server.entrypoint import run_server
from knowgate.server.options import ServeOptions, load_serve_options

DEMO_QUESTIONS = ("Who is the head of the calibration laboratory?", "What is the capital of France?", "Thanks a lot!")
DemoFlag = Annotated[
    bool,
    typer.Option("--demo", help="Start with a small model and a sample handbook, and print example requests."),
]


def serve(
    *,
    pipeline: PipelineOptions,
    options: ServeOptions,
    no_rules: NoRules = False,
    config: ConfigFile = None,
    demo: DemoFlag = False,
) -> None:
    """Serve an OpenAI-compatible endpoint that retrieves only if the gate says so.

    In applications, change only the base URL, to http://HOST:PORT/v1. The signal SIGHUP reloads the gate, threshold,
    rules and documents. SIGTERM stops the server after all running streams have ended.
    """
    if demo:
        options = options.replace(keep_questions=True)  # the dashboard of the demo shows them
    if demo and not {"docs", "index"} & pipeline.model_fields_set:  # the user has named no documents
        pipeline = pipeline.replace(docs=demo_folder() / "handbook")
    read_settings = partial(load_command_settings, config, pipeline, no_rules)  # SIGHUP reads them again
    settings = read_settings()
    serve_options = load_serve_options(settings, options)
    announce = partial(_announce, settings.model, serve_options, demo)  # called when the server is ready
    with suppress(KeyboardInterrupt):
        run_server(settings, serve_options, read_settings, announce)
    inform("Stopped.")


def _announce(local_model: str, options: ServeOptions, demo: bool) -> None:
    """Print the address of the server, and requests to try in the demo."""
    address = f"http://{options.host}:{options.port}"
    model = redact_urls(options.upstream) if options.upstream else local_model
    inform(sanitize_text(f"Serving {model} on {address}/v1, dashboard on {address}/. Press Ctrl-C to stop."))
    if demo:
        _print_demo_requests(address)


def _print_demo_requests(address: str) -> None:
    """Print curl commands to copy into another terminal."""
    inform(f"The documents are the handbook of a fictional company, in {demo_folder() / 'handbook'}. Try:")
    for question in DEMO_QUESTIONS:
        chat = json.dumps({"model": "knowgate", "messages": [{"role": "user", "content": question}]})
        inform(f"  curl {address}/v1/chat/completions -d '{chat}'")
    inform(f"  curl {address}/v1/decide -d '{json.dumps({'question': DEMO_QUESTIONS[0]})}'")
    inform(f"  curl {address}/metrics        # list of endpoints, in a browser: {address}/docs")
    inform(f"OpenAI clients work with the base URL {address}/v1")
