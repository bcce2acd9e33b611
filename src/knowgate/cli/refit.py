"""`knowgate refit`: a gate for what is asked now, from the log of the server, in one command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from knowgate.cli.console import STDERR_CONSOLE, create_console
from knowgate.cli.options import ModelOption, SeedOption, parse_log_location, parse_path
from knowgate.cli.progress import show_progress
from knowgate.cli.start import ConsoleReporter, print_result
from knowgate.core.files import write_text
from knowgate.core.postgres.address import DatabaseAddress
from knowgate.errors import BadSetting, KnowgateError
from knowgate.evaluation.first_run.options import DEFAULT_MAX_LOSS, FirstRunOptions
from knowgate.evaluation.first_run.runner import FirstRunResult, first_run
from knowgate.evaluation.server_log import is_server_log, read_logged_questions
from knowgate.pipeline.settings import PipelineOptions, load_settings
from knowgate.server.options import load_serve_options

DEFAULT_REFIT_COUNT, DEFAULT_REFIT_OUT = 500, Path("knowgate-refit")


def refit(
    log: Annotated[str, typer.Argument(metavar="DB", help="Log of `knowgate serve --decisions DB --keep-questions`.")],
    config: Annotated[
        Path | None,
        typer.Option(
            parser=parse_path, metavar="FILE", help="Settings of the server. Default: knowgate.toml, if there."
        ),
    ] = None,
    docs: Annotated[str | None, typer.Option(metavar="DIR", help="Documents, if the settings name none.")] = None,
    index: Annotated[str | None, typer.Option(metavar="DIR|http:URL", help="Instead of --docs: an index.")] = None,
    model: ModelOption = None,
    count: Annotated[
        int, typer.Option(min=1, help="Questions to label, at most; the newest ones.")
    ] = DEFAULT_REFIT_COUNT,
    max_loss: Annotated[
        float, typer.Option(help="Answers that skipping may cost, at most; to be proven at 95 %.")
    ] = DEFAULT_MAX_LOSS,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=parse_path,
            metavar="DIR",
            show_default=str(DEFAULT_REFIT_OUT),
            help="Where gate, report and settings go; goes on there.",
        ),
    ] = None,
    seed: SeedOption = 0,
) -> None:
    """Fit and prove a gate on what the server was asked, and write settings for it.

    Labels the newest questions of the log with the LLM and the documents of the settings; answers that people corrected
    are gold, where most questions have one, else agreement of both answers grades. Interrupted, it goes on.

    Example: knowgate refit decisions.db --config knowgate.toml --out refit
    """
    source = parse_log_location(log)
    if isinstance(source, Path) and not is_server_log(source):
        raise BadSetting(f"'{log}' is no log of the server. Start it with --decisions FILE --keep-questions.")
    settings, place = load_settings(config, model=model, docs=docs, index=index), out or DEFAULT_REFIT_OUT
    wishes = _wishes(settings, _written(source, count, place), count, max_loss, place, seed)
    try:
        with show_progress("refitting", "questions", STDERR_CONSOLE) as show:
            made = first_run(wishes, ConsoleReporter(show))
    except (KeyboardInterrupt, KnowgateError):
        STDERR_CONSOLE.print(f"What is done is safe in {place}; the same command goes on.")
        raise
    print_refit_result(made, wishes)


def _written(log: Path | DatabaseAddress, count: int, out: Path) -> Path:
    """The questions as a file, which the same command finds again."""
    out.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"id": one.id, "question": one.text, **({"answers": list(one.answers)} if one.answers else {})})
        for one in read_logged_questions(log, count)
    ]
    write_text(out / "questions.jsonl", "\n".join(lines) + "\n")
    return out / "questions.jsonl"


def _wishes(
    settings: PipelineOptions, questions: Path, count: int, max_loss: float, out: Path, seed: int
) -> FirstRunOptions:
    return FirstRunOptions(
        docs=str(settings.docs or ""),
        index=settings.index or "",
        model=served_model_spec(settings),
        questions=str(questions),
        count=count,
        max_loss=max_loss,
        out=out / "run",  # a folder of its own, which nothing else is written to
        config=out / "knowgate.toml",
        seed=seed,
    )


def served_model_spec(settings: PipelineOptions) -> str:
    """The LLM that answers: the upstream's, where the settings of the server name one."""
    options = load_serve_options(settings)
    if not options.upstream:
        return settings.model
    if not options.upstream_model:
        raise BadSetting("[serve] names an upstream but no 'upstream_model': add it, so that its LLM can be asked.")
    return f"openai:{options.upstream_model}@{options.upstream}"


def print_refit_result(made: FirstRunResult, wishes: FirstRunOptions) -> None:
    print_result(made, wishes)
    create_console().print(f"knowgate serve --config {made.config}")
