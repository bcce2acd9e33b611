"""`knowgate refit`: fit and prove a gate on the questions in a server's log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from pydantic import Field

from knowgate.cli.console import STDERR_CONSOLE, create_console
from knowgate.cli.options import parse_log_location
from knowgate.cli.pipeline_options import ConfigFile
from knowgate.cli.progress import show_progress
from knowgate.cli.start import ConsoleReporter, print_result
from knowgate.core.files import write_text
from knowgate.core.options import Count, Options, Seed
from knowgate.core.postgres.address import DatabaseAddress
from knowgate.errors import BadSetting, KnowgateError
from knowgate.evaluation.first_run.options import DEFAULT_MAX_LOSS, FirstRunOptions
from knowgate.evaluation.first_run.runner import first_run
from knowgate.evaluation.server_log import is_server_log, read_logged_questions
from knowgate.pipeline.settings import PipelineOptions, load_settings
from knowgate.server.options import load_serve_options


class RefitOptions(Options):
    """Options of `knowgate refit`."""

    docs: str | None = Field(
        default=None, description="Documents, if the settings name none.", json_schema_extra={"metavar": "DIR"}
    )
    index: str | None = Field(
        default=None,
        description="Instead of `docs`: an index.",
        json_schema_extra={"metavar": "DIR|http:URL"},
    )
    model: str | None = Field(default=None, description="The LLM. Default: as in the settings.")
    count: Count = Field(default=500, description="Questions to label, at most; the newest ones.")
    max_loss: float = Field(
        default=DEFAULT_MAX_LOSS,
        description="Share of answers that skipping may lose, at most; to be proven at 95 %.",
    )
    out: Path = Field(
        default=Path("knowgate-refit"),
        description="Folder for gate, report and settings; the same command continues there.",
        json_schema_extra={"metavar": "DIR"},
    )
    seed: Seed = Field(default=0, description="Seed of splits, samples and training.")


def refit(
    log: Annotated[str, typer.Argument(metavar="DB", help="Log of `knowgate serve --decisions DB --keep-questions`.")],
    *,
    config: ConfigFile = None,
    options: RefitOptions,
) -> None:
    """Fit and prove a gate on the questions that the server was asked, and write settings for it.

    Labels the newest questions of the log with the LLM and the documents of the settings. If most questions have an
    answer that people corrected, those are gold answers; otherwise agreement of both answers is the grade.

    Example: knowgate refit decisions.db --config knowgate.toml --out refit
    """
    source = parse_log_location(log)
    if isinstance(source, Path) and not is_server_log(source):
        raise BadSetting(f"'{log}' is not a log of the server. Start it with --decisions FILE --keep-questions.")
    settings = load_settings(config, model=options.model, docs=options.docs, index=options.index)
    questions = _write_logged_questions(source, options.count, options.out)
    first_run_options = _make_first_run_options(settings, questions, options)
    try:
        with show_progress("refitting", "questions", STDERR_CONSOLE) as show:
            result = first_run(first_run_options, ConsoleReporter(show))
    except (KeyboardInterrupt, KnowgateError):
        STDERR_CONSOLE.print(f"What is done is safe in {options.out}; the same command continues.")
        raise
    print_result(result, first_run_options)
    create_console().print(f"knowgate serve --config {result.config}")


def _write_logged_questions(log: Path | DatabaseAddress, count: int, out: Path) -> Path:
    """Write the questions of a log to a file."""
    out.mkdir(parents=True, exist_ok=True)
    lines = []
    for question in read_logged_questions(log, count):
        answers = {"answers": list(question.answers)} if question.answers else {}
        lines.append(json.dumps({"id": question.id, "question": question.text, **answers}))
    write_text(out / "questions.jsonl", "\n".join(lines) + "\n")
    return out / "questions.jsonl"


def _make_first_run_options(settings: PipelineOptions, questions: Path, options: RefitOptions) -> FirstRunOptions:
    return FirstRunOptions(
        docs=str(settings.docs or ""),
        index=settings.index or "",
        model=get_served_model(settings),
        questions=str(questions),
        count=options.count,
        max_loss=options.max_loss,
        out=options.out / "run",  # a folder of its own, which nothing else is written to
        config=options.out / "knowgate.toml",
        seed=options.seed,
    )


def get_served_model(settings: PipelineOptions) -> str:
    """Return the spec of the LLM that answers: that of the upstream if the server's settings name one."""
    options = load_serve_options(settings)
    if not options.upstream:
        return settings.model
    if not options.upstream_model:
        raise BadSetting("[serve] names an upstream but no 'upstream_model': add it, so that its LLM can be asked.")
    return f"openai:{options.upstream_model}@{options.upstream}"
