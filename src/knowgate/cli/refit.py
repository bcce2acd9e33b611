"""`knowgate refit`: fit a gate on the questions in a server's log, and prove how many answers it loses at most."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from knowgate.cli.console import create_console, inform
from knowgate.cli.options import ConfigFile, parse_log_location
from knowgate.cli.progress import show_progress
from knowgate.cli.start import ConsoleReporter, print_result
from knowgate.core.files import write_text
from knowgate.core.options import Count, option
from knowgate.core.postgres.address import DatabaseAddress
from knowgate.errors import BadSetting, KnowgateError
from knowgate.evaluation.first_run.options import FirstRunOptions
from knowgate.evaluation.first_run.runner import first_run
from knowgate.evaluation.server_log import is_server_log, read_logged_questions
from knowgate.pipeline.settings import PipelineOptions, load_settings
from knowgate.server.options import load_serve_options


class RefitOptions(FirstRunOptions):
    """Options of `knowgate refit`: those of a first run, without those that the log and the settings file replace."""

    docs: str = option("", "Documents to retrieve from. Default: those of the settings file.", metavar="DIR")
    model: str = option("", "LLM that answers. Default: the one in the settings file.")
    questions: str = option("", "Questions to label.", flag=None)
    count: Count = option(500, "Maximum number of logged questions to label; the newest are used.")
    writer: str = option("", "LLM that writes questions.", flag=None)
    out: Path = option(
        Path("knowgate-refit"),
        "Folder for the gate, the report and the settings. An interrupted run continues there.",
        metavar="DIR",
    )
    config: Path = option(Path("knowgate.toml"), "Settings file to write.", flag=None)


def refit(
    log: Annotated[
        str, typer.Argument(metavar="DB", help="Log written by `knowgate serve --decisions DB --keep-questions`.")
    ],
    *,
    config: ConfigFile = None,
    options: RefitOptions,
) -> None:
    """Fit a gate on the questions that your server was asked, prove its loss, and write settings that use it.

    Answers the newest logged questions with and without passages, by the LLM and the documents of the settings file.
    Answers that people corrected are gold answers. If fewer than half of the questions have one, an answer without
    passages counts as right if it agrees with the answer with passages.

    Example: knowgate refit decisions.db --config knowgate.toml --out refit
    """
    source = parse_log_location(log)
    if isinstance(source, Path) and not is_server_log(source):
        raise BadSetting(f"'{log}' is not a server log. Start the server with --decisions FILE --keep-questions.")
    sources = {"model": options.model or None, "docs": options.docs or None, "index": options.index or None}
    settings = load_settings(config, **sources)
    first_run_options = options.replace(
        docs=str(settings.docs or ""),
        index=settings.index or "",
        model=get_served_model(settings),
        questions=str(_write_logged_questions(source, options.count, options.out)),
        out=options.out / "run",  # A first run requires a folder that contains nothing else.
        config=options.out / "knowgate.toml",
    )
    try:
        with show_progress("refitting", "questions") as show:
            result = first_run(first_run_options, ConsoleReporter(show))
    except (KeyboardInterrupt, KnowgateError):
        inform(f"Finished work is kept in {options.out}. Run the same command again to continue.")
        raise
    print_result(result, first_run_options)
    create_console().print(f"knowgate serve --config {result.config}")


def _write_logged_questions(log: Path | DatabaseAddress, count: int, out: Path) -> Path:
    """Write the newest logged questions, with corrected answers, to OUT/questions.jsonl and return that path."""
    out.mkdir(parents=True, exist_ok=True)
    lines = []
    for question in read_logged_questions(log, count):
        answers = {"answers": list(question.answers)} if question.answers else {}
        lines.append(json.dumps({"id": question.id, "question": question.text, **answers}))
    write_text(out / "questions.jsonl", "\n".join(lines) + "\n")
    return out / "questions.jsonl"


def get_served_model(settings: PipelineOptions) -> str:
    """Return the spec of the LLM that answers: the upstream's if the [serve] settings name one, else `model`.

    Raises:
        BadSetting: The settings name an upstream without its model.
    """
    options = load_serve_options(settings)
    if not options.upstream:
        return settings.model
    if not options.upstream_model:
        raise BadSetting(
            "[serve] in the settings names an upstream but no 'upstream_model'. Add the name of the upstream's LLM."
        )
    return f"openai:{options.upstream_model}@{options.upstream}"
