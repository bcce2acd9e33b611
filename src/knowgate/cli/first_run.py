"""`knowgate start`: a guided first run. Asks for what was not said, if on a terminal; says what to type afterwards."""

from __future__ import annotations

import shlex
import sys
import webbrowser
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from knowgate.cli.console import WORDS, plain_console
from knowgate.cli.options import ModelSpec, Seed
from knowgate.cli.paths import path
from knowgate.cli.progress import Show, progress
from knowgate.datasets import data_spec
from knowgate.doors import user_path
from knowgate.errors import KnowgateError
from knowgate.firstrun import (
    CONFIG,
    COUNT,
    MAX_LOSS,
    OUT,
    UNPROVEN,
    FirstRun,
    Wishes,
    earlier,
    explain_interruption,
    first_run,
)
from knowgate.models import load_model

MORE = 240  # questions that leave enough of them for a learnt gate to be proven


def start(
    docs: Annotated[
        str | None, typer.Option(metavar="DIR", help="Documents: folder (txt, md, html, pdf) or JSONL file.")
    ] = None,
    index: Annotated[
        str | None, typer.Option(metavar="DIR|http:URL", help="Instead of --docs: an index folder or search endpoint.")
    ] = None,
    model: ModelSpec = None,
    questions: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|SPEC",
            help="What your users ask: text (one a line), JSONL with or without gold answers, hub:... "
            "Default: the LLM writes some from the documents, marked synthetic.",
        ),
    ] = None,
    count: Annotated[
        int | None, typer.Option(min=1, show_default=str(COUNT), help="Questions to label, at most.")
    ] = None,
    max_loss: Annotated[
        float | None,
        typer.Option(show_default=str(MAX_LOSS), help="Answers that skipping may cost, at most; to be proven at 95 %."),
    ] = None,
    writer: Annotated[
        str | None, typer.Option(metavar="SPEC", help="LLM that writes the questions, if not --model itself.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=path,
            metavar="DIR",
            show_default=str(OUT),
            help="Where everything is kept; the same command goes on there.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            parser=path, metavar="FILE", show_default=str(CONFIG), help="Settings to write, which `ask` then reads."
        ),
    ] = None,
    seed: Seed = 0,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: what is not given is the default.")] = False,
    open_page: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
) -> None:
    """From your documents and your LLM to a gate that is proven on your questions, or the word that none is.

    Indexes, labels a hundred questions, fits and calibrates a gate, writes a report and knowgate.toml. Interrupted at
    any place, the same command goes on.

    Example: knowgate start --docs handbook/ --questions questions.jsonl
    """
    given = {"docs": docs, "index": index, "model": model, "questions": questions, "count": count,
             "max_loss": max_loss, "writer": writer}  # fmt: skip
    wishes = as_wished(given, Wishes(out=out or OUT, config=config or CONFIG, seed=seed))
    if not yes and is_terminal():
        wishes = ask_for(wishes, given)
    try:
        with progress("starting", "questions", WORDS) as show:
            made = first_run(wishes, Spoken(show))
    except (KeyboardInterrupt, KnowgateError):
        if earlier(wishes.out) is not None:
            WORDS.print(explain_interruption(wishes))
        raise
    tell(made, wishes)
    if open_page:
        webbrowser.open(made.page.resolve().as_uri())


def as_wished(given: Mapping[str, Any], usual: Wishes) -> Wishes:
    """What was given, over what an earlier start in the same folder was given, over the defaults.

    Documents of one kind take the place of those of the other.
    """
    before = earlier(usual.out)
    known = {key: value for key, value in (before.wishes if before else {}).items() if key in given}
    if given["docs"] is not None or given["index"] is not None:
        known |= {"docs": "", "index": ""}
    wishes = replace(usual, **{**known, **{key: value for key, value in given.items() if value is not None}})
    if before is not None:
        changes = wishes.changes(dict(before.wishes))
        WORDS.print(f"Going on in {usual.out}." + (f" Changed since: {'; '.join(changes)}." if changes else ""))
    return wishes


# --- asking ---------------------------------------------------------------------------------------


def is_terminal() -> bool:
    """Somebody sits there to be asked."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


def ask_for(wishes: Wishes, given: Mapping[str, Any]) -> Wishes:
    """What was not given, each with a default; asked again until it can be used."""
    if given["docs"] is None and given["index"] is None:
        words = "Your documents (a folder of txt, md, html or pdf, or a JSONL file)"
        docs = asked(words, wishes.docs, _check_docs)
        wishes = replace(wishes, docs=docs, index="")
    if given["model"] is None:
        words = "Your LLM (smollm is embedded; a server: openai:MODEL@URL; see `knowgate models`)"
        wishes = replace(wishes, model=asked(words, wishes.model, _check_model))
    if given["questions"] is None:
        words = "A file of questions that your users ask (Enter for none: the LLM writes some)"
        wishes = replace(wishes, questions=asked(words, wishes.questions, _check_questions, may_be_empty=True))
    return wishes


def asked(words: str, usual: str, check: Callable[[str], object], *, may_be_empty: bool = False) -> str:
    while True:
        default = usual or ("" if may_be_empty else None)
        said = str(typer.prompt(words, default=default, show_default=bool(usual), err=True)).strip()
        try:
            if said or not may_be_empty:
                check(said)
            return said
        except KnowgateError as error:
            WORDS.print(str(error), style="yellow")


def _check_docs(text: str) -> None:
    if not path(text).exists():
        raise KnowgateError(f"there is no folder or file '{text}'. Name a folder of documents.")


def _check_model(text: str) -> None:
    if text != Wishes().model:  # which is always there, and takes a while to unpack the first time
        load_model(text)


def _check_questions(text: str) -> None:
    data_spec(text)


# --- telling --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spoken:
    """On stderr, beside the bars."""

    bars: Show

    def say(self, line: str) -> None:
        self.bars.say(line)

    def warn(self, line: str) -> None:
        self.bars.say(f"Beware: {line}")

    def show(self, stage: str, done: int, total: int, unit: str, pace: str = "") -> None:
        self.bars(done, total, pace, stage=stage, unit=unit)


def tell(made: FirstRun, wishes: Wishes) -> None:
    """How it came out, in words; then, on stdout, what to type."""
    WORDS.print()
    for line in made.choice.said:
        WORDS.print(f"- {line}")
    WORDS.print(f"- Measured on questions that had no say: {made.verdict}")
    for line in made.cautions:
        WORDS.print(f"- {line}", style="yellow")
    if not made.choice.proven:
        WORDS.print(f"- {UNPROVEN}")
        WORDS.print(f"- More questions prove more: {_more(made, wishes)}")
    WORDS.print(f"Report: {made.page.resolve()}")
    WORDS.print(f"Settings: {made.config.resolve()}. Use them:")
    for line in to_type(made, wishes):
        plain_console().print(line)


def _more(made: FirstRun, wishes: Wishes) -> str:
    if made.has_more:
        return wishes.command(count=max(MORE, 2 * wishes.count))
    there = f"add some to {wishes.questions}" if wishes.questions else "give those of your users (--questions FILE)"
    return f"{there}, then {wishes.command(count=max(MORE, wishes.count))}"


def to_type(made: FirstRun, wishes: Wishes) -> list[str]:
    """Three lines that use the settings; only those in knowgate.toml of this folder need not be named."""
    named = [] if made.config == CONFIG else ["--config", str(made.config)]
    example = shlex.quote(made.example)
    words = " ".join(["knowgate ask", *map(shlex.quote, named)])
    file = shlex.quote(own_file(wishes.questions))
    return [f"{words} --explain {example}", f"{words} -i", f"{words} --json < {file} > answers.jsonl"]


def own_file(questions: str) -> str:
    """The user's file of questions, if `ask` can read it line by line; else a name for one."""
    kind, _, file = data_spec(questions).partition(":") if questions else ("", "", "")
    readable = kind in ("lines", "jsonl") and not file.endswith(".gz")
    return str(user_path(file)) if readable else "questions.txt"
