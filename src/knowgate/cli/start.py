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

from knowgate.cli.console import STDERR_CONSOLE, create_console
from knowgate.cli.options import ModelOption, SeedOption, parse_path
from knowgate.cli.progress import ProgressCallback, show_progress
from knowgate.core.validation import expand_path
from knowgate.data.questions import guess_data_spec
from knowgate.errors import KnowgateError
from knowgate.evaluation.first_run.gate_selection import NO_GUARANTEE_MESSAGE
from knowgate.evaluation.first_run.options import (
    DEFAULT_CONFIG,
    DEFAULT_COUNT,
    DEFAULT_MAX_LOSS,
    DEFAULT_OUT,
    FirstRunOptions,
    read_progress,
)
from knowgate.evaluation.first_run.runner import FirstRunResult, explain_interruption, first_run
from knowgate.models import load_model

RECOMMENDED_QUESTIONS = 240  # questions that leave enough of them for a learnt gate to be proven


def start(
    docs: Annotated[
        str | None, typer.Option(metavar="DIR", help="Documents: folder (txt, md, html, pdf) or JSONL file.")
    ] = None,
    index: Annotated[
        str | None, typer.Option(metavar="DIR|http:URL", help="Instead of --docs: an index folder or search endpoint.")
    ] = None,
    model: ModelOption = None,
    questions: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|SPEC",
            help="What your users ask: text (one a line), JSONL with or without gold answers, hub:... "
            "Default: the LLM writes some from the documents, marked synthetic.",
        ),
    ] = None,
    count: Annotated[
        int | None, typer.Option(min=1, show_default=str(DEFAULT_COUNT), help="Questions to label, at most.")
    ] = None,
    max_loss: Annotated[
        float | None,
        typer.Option(
            show_default=str(DEFAULT_MAX_LOSS), help="Answers that skipping may cost, at most; to be proven at 95 %."
        ),
    ] = None,
    writer: Annotated[
        str | None, typer.Option(metavar="SPEC", help="LLM that writes the questions, if not --model itself.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=parse_path,
            metavar="DIR",
            show_default=str(DEFAULT_OUT),
            help="Where everything is kept; the same command goes on there.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            parser=parse_path,
            metavar="FILE",
            show_default=str(DEFAULT_CONFIG),
            help="Settings to write, which `ask` then reads.",
        ),
    ] = None,
    seed: SeedOption = 0,
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
    wishes = merge_options(given, FirstRunOptions(out=out or DEFAULT_OUT, config=config or DEFAULT_CONFIG, seed=seed))
    if not yes and is_terminal():
        wishes = prompt_for_options(wishes, given)
    try:
        with show_progress("starting", "questions", STDERR_CONSOLE) as show:
            made = first_run(wishes, ConsoleReporter(show))
    except (KeyboardInterrupt, KnowgateError):
        if read_progress(wishes.out) is not None:
            STDERR_CONSOLE.print(explain_interruption(wishes))
        raise
    print_result(made, wishes)
    if open_page:
        webbrowser.open(made.page.resolve().as_uri())


def merge_options(given: Mapping[str, Any], usual: FirstRunOptions) -> FirstRunOptions:
    """What was given, over what an earlier start in the same folder was given, over the defaults.

    Documents of one kind take the place of those of the other.
    """
    before = read_progress(usual.out)
    known = {key: value for key, value in (before.wishes if before else {}).items() if key in given}
    if given["docs"] is not None or given["index"] is not None:
        known |= {"docs": "", "index": ""}
    wishes = replace(usual, **{**known, **{key: value for key, value in given.items() if value is not None}})
    if before is not None:
        changes = wishes.changes(dict(before.wishes))
        STDERR_CONSOLE.print(
            f"Going on in {usual.out}." + (f" Changed since: {'; '.join(changes)}." if changes else "")
        )
    return wishes


# --- asking ---------------------------------------------------------------------------------------


def is_terminal() -> bool:
    """Somebody sits there to be asked."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


def prompt_for_options(wishes: FirstRunOptions, given: Mapping[str, Any]) -> FirstRunOptions:
    """What was not given, each with a default; asked again until it can be used."""
    if given["docs"] is None and given["index"] is None:
        words = "Your documents (a folder of txt, md, html or pdf, or a JSONL file)"
        docs = prompt_until_valid(words, wishes.docs, _check_docs)
        wishes = replace(wishes, docs=docs, index="")
    if given["model"] is None:
        words = "Your LLM (smollm is embedded; a server: openai:MODEL@URL; see `knowgate models`)"
        wishes = replace(wishes, model=prompt_until_valid(words, wishes.model, _check_model))
    if given["questions"] is None:
        words = "A file of questions that your users ask (Enter for none: the LLM writes some)"
        wishes = replace(
            wishes, questions=prompt_until_valid(words, wishes.questions, _check_questions, may_be_empty=True)
        )
    return wishes


def prompt_until_valid(words: str, usual: str, check: Callable[[str], object], *, may_be_empty: bool = False) -> str:
    while True:
        default = usual or ("" if may_be_empty else None)
        said = str(typer.prompt(words, default=default, show_default=bool(usual), err=True)).strip()
        try:
            if said or not may_be_empty:
                check(said)
            return said
        except KnowgateError as error:
            STDERR_CONSOLE.print(str(error), style="yellow")


def _check_docs(text: str) -> None:
    if not parse_path(text).exists():
        raise KnowgateError(f"there is no folder or file '{text}'. Name a folder of documents.")


def _check_model(text: str) -> None:
    if text != FirstRunOptions().model:  # which is always there, and takes a while to unpack the first time
        load_model(text)


def _check_questions(text: str) -> None:
    guess_data_spec(text)


# --- telling --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConsoleReporter:
    """On stderr, beside the bars."""

    bars: ProgressCallback

    def say(self, line: str) -> None:
        self.bars.say(line)

    def warn(self, line: str) -> None:
        self.bars.say(f"Beware: {line}")

    def show(self, stage: str, done: int, total: int, unit: str, pace: str = "") -> None:
        self.bars(done, total, pace, stage=stage, unit=unit)


def print_result(made: FirstRunResult, wishes: FirstRunOptions) -> None:
    """How it came out, in words; then, on stdout, what to type."""
    STDERR_CONSOLE.print()
    for line in made.choice.said:
        STDERR_CONSOLE.print(f"- {line}")
    STDERR_CONSOLE.print(f"- Measured on questions that had no say: {made.verdict}")
    for line in made.cautions:
        STDERR_CONSOLE.print(f"- {line}", style="yellow")
    if not made.choice.proven:
        STDERR_CONSOLE.print(f"- {NO_GUARANTEE_MESSAGE}")
        STDERR_CONSOLE.print(f"- More questions prove more: {_more(made, wishes)}")
    STDERR_CONSOLE.print(f"Report: {made.page.resolve()}")
    STDERR_CONSOLE.print(f"Settings: {made.config.resolve()}. Use them:")
    for line in list_next_commands(made, wishes):
        create_console().print(line)


def _more(made: FirstRunResult, wishes: FirstRunOptions) -> str:
    if made.has_more:
        return wishes.command(count=max(RECOMMENDED_QUESTIONS, 2 * wishes.count))
    there = f"add some to {wishes.questions}" if wishes.questions else "give those of your users (--questions FILE)"
    return f"{there}, then {wishes.command(count=max(RECOMMENDED_QUESTIONS, wishes.count))}"


def list_next_commands(made: FirstRunResult, wishes: FirstRunOptions) -> list[str]:
    """Three lines that use the settings; only those in knowgate.toml of this folder need not be named."""
    named = [] if made.config == DEFAULT_CONFIG else ["--config", str(made.config)]
    example = shlex.quote(made.example)
    words = " ".join(["knowgate ask", *map(shlex.quote, named)])
    file = shlex.quote(question_file_name(wishes.questions))
    return [f"{words} --explain {example}", f"{words} -i", f"{words} --json < {file} > answers.jsonl"]


def question_file_name(questions: str) -> str:
    """The user's file of questions, if `ask` can read it line by line; else a name for one."""
    kind, _, file = guess_data_spec(questions).partition(":") if questions else ("", "", "")
    readable = kind in ("lines", "jsonl") and not file.endswith(".gz")
    return str(expand_path(file)) if readable else "questions.txt"
