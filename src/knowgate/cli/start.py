"""`knowgate start`: a guided first run. On a terminal it asks for what was not given."""

from __future__ import annotations

import shlex
import sys
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from knowgate.cli.console import STDERR_CONSOLE, create_console
from knowgate.cli.error_messages import translate_arguments
from knowgate.cli.options import parse_path
from knowgate.cli.progress import ProgressCallback, show_progress
from knowgate.core.redaction import redact_urls
from knowgate.core.validation import expand_path
from knowgate.data.questions import guess_data_spec
from knowgate.errors import KnowgateError
from knowgate.evaluation.first_run.gate_selection import NO_GUARANTEE_MESSAGE
from knowgate.evaluation.first_run.options import DEFAULT_CONFIG, FirstRunOptions, read_progress
from knowgate.evaluation.first_run.runner import FirstRunResult, first_run
from knowgate.models import load_model

RECOMMENDED_QUESTIONS = 240  # leave enough questions for a trained gate to be proven
FLAGS = {name: f"--{name.replace('_', '-')}" for name in FirstRunOptions.model_fields}


def start(
    options: FirstRunOptions,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: use defaults for what is not given.")] = False,
    open_page: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
) -> None:
    """From your documents and your LLM to a gate that is proven on your questions, or the word that none is.

    Indexes, labels a hundred questions, fits and calibrates a gate, writes a report and knowgate.toml. Interrupted at
    any place, the same command continues.

    Example: knowgate start --docs handbook/ --questions questions.jsonl
    """
    merged = merge_options(options)
    if not yes and is_terminal():
        merged = prompt_for_options(merged, options.model_fields_set)
    try:
        with show_progress("starting", "questions", STDERR_CONSOLE) as show:
            result = first_run(merged, ConsoleReporter(show))
    except (KeyboardInterrupt, KnowgateError):
        if read_progress(merged.out) is not None:
            STDERR_CONSOLE.print(
                f"What is done is safe in {merged.out}; the same command continues: {format_start_command(merged)}"
            )
        raise
    print_result(result, merged)
    if open_page:
        webbrowser.open(result.page.resolve().as_uri())


def merge_options(options: FirstRunOptions) -> FirstRunOptions:
    """Combine the flags with the options of an earlier start in the same folder; flags take precedence."""
    earlier = read_progress(options.out)
    if earlier is None:
        return options
    given = {name: getattr(options, name) for name in options.model_fields_set}
    reusable = set(FirstRunOptions.model_fields) - {"out", "config", "seed"}
    reused = {name: value for name, value in earlier.options.items() if name in reusable}
    if given.keys() & {"docs", "index"}:  # one source of documents replaces the other
        reused |= {"docs": "", "index": ""}
    merged = FirstRunOptions(**{**reused, **given})
    changes = "; ".join(merged.describe_changes(earlier.options))
    note = f" Changed since: {translate_arguments(changes, FLAGS)}." if changes else ""
    STDERR_CONSOLE.print(f"Continuing in {options.out}.{note}")
    return merged


def format_start_command(options: FirstRunOptions, **changes: Any) -> str:
    """Format the command line of a first run, without logins and keys in URLs."""
    defaults, changed = FirstRunOptions(), options.replace(**changes)
    words = [
        word
        for name, flag in FLAGS.items()
        if getattr(changed, name) != getattr(defaults, name)
        for word in (flag, redact_urls(str(getattr(changed, name))))
    ]
    return shlex.join(["knowgate", "start", *words])


# --- prompts --------------------------------------------------------------------------------------


def is_terminal() -> bool:
    """Return whether a user can be asked."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


def prompt_for_options(options: FirstRunOptions, given: set[str]) -> FirstRunOptions:
    """Ask for documents, LLM and questions that were not given."""
    if not given & {"docs", "index"}:
        text = "Your documents (a folder of txt, md, html or pdf, or a JSONL file)"
        options = options.replace(docs=_prompt_until_valid(text, options.docs, _check_docs), index="")
    if "model" not in given:
        text = "Your LLM (smollm is embedded; a server: openai:MODEL@URL; see `knowgate models`)"
        options = options.replace(model=_prompt_until_valid(text, options.model, _check_model))
    if "questions" not in given:
        text = "A file of questions that your users ask (Enter for none: the LLM writes some)"
        answer = _prompt_until_valid(text, options.questions, guess_data_spec, may_be_empty=True)
        options = options.replace(questions=answer)
    return options


def _prompt_until_valid(text: str, default: str, check: Callable[[str], object], *, may_be_empty: bool = False) -> str:
    while True:
        value = default or ("" if may_be_empty else None)
        answer = str(typer.prompt(text, default=value, show_default=bool(default), err=True)).strip()
        try:
            if answer or not may_be_empty:
                check(answer)
            return answer
        except KnowgateError as error:
            STDERR_CONSOLE.print(str(error), style="yellow")


def _check_docs(text: str) -> None:
    if not parse_path(text).exists():
        raise KnowgateError(f"there is no folder or file '{text}'. Name a folder of documents.")


def _check_model(text: str) -> None:
    if text != FirstRunOptions().model:  # the default always exists, and takes a while to unpack the first time
        load_model(text)


# --- output ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConsoleReporter:
    """Prints messages and progress bars on stderr."""

    bars: ProgressCallback

    def say(self, line: str) -> None:
        """Print a message."""
        self.bars.say(line)

    def warn(self, line: str) -> None:
        """Print a warning."""
        self.bars.say(f"Warning: {line}")

    def show(self, stage: str, done: int, total: int, unit: str, pace: str = "") -> None:
        """Update the progress bar."""
        self.bars(done, total, pace, stage=stage, unit=unit)


def print_result(result: FirstRunResult, options: FirstRunOptions) -> None:
    """Print how the gate was chosen and measured; on stdout, the commands to use it."""
    STDERR_CONSOLE.print()
    for line in result.choice.explanations:
        STDERR_CONSOLE.print(f"- {line}")
    STDERR_CONSOLE.print(f"- Measured on held-out questions: {result.verdict}")
    for line in result.caveats:
        STDERR_CONSOLE.print(f"- {line}", style="yellow")
    if not result.choice.guarantee:
        STDERR_CONSOLE.print(f"- {NO_GUARANTEE_MESSAGE}")
        STDERR_CONSOLE.print(f"- More questions prove more: {_suggest_more_questions(result, options)}")
    STDERR_CONSOLE.print(f"Report: {result.page.resolve()}")
    STDERR_CONSOLE.print(f"Settings: {result.config.resolve()}. Use them:")
    for line in list_next_commands(result, options):
        create_console().print(line)


def _suggest_more_questions(result: FirstRunResult, options: FirstRunOptions) -> str:
    if result.has_more:
        return format_start_command(options, count=max(RECOMMENDED_QUESTIONS, 2 * options.count))
    source = f"add some to {options.questions}" if options.questions else "give those of your users (--questions FILE)"
    return f"{source}, then {format_start_command(options, count=max(RECOMMENDED_QUESTIONS, options.count))}"


def list_next_commands(result: FirstRunResult, options: FirstRunOptions) -> list[str]:
    """List three commands that use the settings; knowgate.toml in the current folder needs no flag."""
    config = [] if result.config == DEFAULT_CONFIG else ["--config", str(result.config)]
    command = " ".join(["knowgate ask", *map(shlex.quote, config)])
    example, file = shlex.quote(result.example), shlex.quote(get_question_file(options.questions))
    return [f"{command} --explain {example}", f"{command} -i", f"{command} --json < {file} > answers.jsonl"]


def get_question_file(questions: str) -> str:
    """Return the user's file of questions if `ask` can read it line by line, otherwise an example name."""
    kind, _, file = guess_data_spec(questions).partition(":") if questions else ("", "", "")
    is_readable = kind in ("lines", "jsonl") and not file.endswith(".gz")
    return str(expand_path(file)) if is_readable else "questions.txt"
