"""`knowgate refit`: a gate for what is asked now, from the log of the server, in one command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from knowgate.cli.console import WORDS, plain_console
from knowgate.cli.first_run import Spoken, tell
from knowgate.cli.options import ModelSpec, Seed
from knowgate.cli.paths import log_place, path
from knowgate.cli.progress import progress
from knowgate.errors import BadSetting, KnowgateError
from knowgate.evaluation import is_served, served_questions
from knowgate.files import write_text
from knowgate.firstrun import MAX_LOSS, FirstRun, Wishes, first_run
from knowgate.pipeline import Settings, load_settings
from knowgate.postgres import DatabaseAddress
from knowgate.server import serve_options

MOST, OUT = 500, Path("knowgate-refit")


def refit(
    log: Annotated[str, typer.Argument(metavar="DB", help="Log of `knowgate serve --decisions DB --keep-questions`.")],
    config: Annotated[
        Path | None,
        typer.Option(parser=path, metavar="FILE", help="Settings of the server. Default: knowgate.toml, if there."),
    ] = None,
    docs: Annotated[str | None, typer.Option(metavar="DIR", help="Documents, if the settings name none.")] = None,
    index: Annotated[str | None, typer.Option(metavar="DIR|http:URL", help="Instead of --docs: an index.")] = None,
    model: ModelSpec = None,
    count: Annotated[int, typer.Option(min=1, help="Questions to label, at most; the newest ones.")] = MOST,
    max_loss: Annotated[
        float, typer.Option(help="Answers that skipping may cost, at most; to be proven at 95 %.")
    ] = MAX_LOSS,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=path, metavar="DIR", show_default=str(OUT), help="Where gate, report and settings go; goes on there."
        ),
    ] = None,
    seed: Seed = 0,
) -> None:
    """Fit and prove a gate on what the server was asked, and write settings for it.

    Labels the newest questions of the log with the LLM and the documents of the settings; answers that people corrected
    are gold, where most questions have one, else agreement of both answers grades. Interrupted, it goes on.

    Example: knowgate refit decisions.db --config knowgate.toml --out refit
    """
    source = log_place(log)
    if isinstance(source, Path) and not is_served(source):
        raise BadSetting(f"'{log}' is no log of the server. Start it with --decisions FILE --keep-questions.")
    settings, place = load_settings(config, model=model, docs=docs, index=index), out or OUT
    wishes = _wishes(settings, _written(source, count, place), count, max_loss, place, seed)
    try:
        with progress("refitting", "questions", WORDS) as show:
            made = first_run(wishes, Spoken(show))
    except (KeyboardInterrupt, KnowgateError):
        WORDS.print(f"What is done is safe in {place}; the same command goes on.")
        raise
    tell_refit(made, wishes)


def _written(log: Path | DatabaseAddress, count: int, out: Path) -> Path:
    """The questions as a file, which the same command finds again."""
    out.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"id": one.id, "question": one.text, **({"answers": list(one.answers)} if one.answers else {})})
        for one in served_questions(log, count)
    ]
    write_text(out / "questions.jsonl", "\n".join(lines) + "\n")
    return out / "questions.jsonl"


def _wishes(settings: Settings, questions: Path, count: int, max_loss: float, out: Path, seed: int) -> Wishes:
    return Wishes(
        docs=str(settings.docs or ""),
        index=settings.index or "",
        model=llm_of(settings),
        questions=str(questions),
        count=count,
        max_loss=max_loss,
        out=out / "run",  # a folder of its own, which nothing else is written to
        config=out / "knowgate.toml",
        seed=seed,
    )


def llm_of(settings: Settings) -> str:
    """The LLM that answers: the upstream's, where the settings of the server name one."""
    options = serve_options(settings)
    if not options.upstream:
        return settings.model
    if not options.upstream_model:
        raise BadSetting("[serve] names an upstream but no 'upstream_model': add it, so that its LLM can be asked.")
    address = options.upstream[0].partition(",weight=")[0]
    return f"openai:{options.upstream_model}@{address}"


def tell_refit(made: FirstRun, wishes: Wishes) -> None:
    tell(made, wishes)
    plain_console().print(f"knowgate serve --config {made.config}")
