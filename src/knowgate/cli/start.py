"""`knowgate start`: a guided first run. On a terminal it prompts for options that were not given."""

from __future__ import annotations

import shlex
import sys
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from knowgate.cli.console import create_console, inform
from knowgate.cli.options import parse_path
from knowgate.cli.progress import ProgressCallback, show_progress
from knowgate.core.options import get_set_fields
from knowgate.core.redaction import redact_urls
from knowgate.core.validation import expand_path
from knowgate.data.questions import guess_data_spec
from knowgate.errors import KnowgateError
from knowgate.evaluation.first_run.gate_selection import NO_GUARANTEE_MESSAGE
from knowgate.evaluation.first_run.labeling import POLICY_QUESTIONS, RECOMMENDED_QUESTIONS
from knowgate.evaluation.first_run.options import DEFAULT_CONFIG, FirstRunOptions, ProgressReporter, read_progress
from knowgate.evaluation.first_run.runner import FirstRunResult, first_run
from knowgate.models import load_model

FLAGS = {name: f"--{name.replace('_', '-')}" for name in FirstRunOptions.model_fields}


def start(
    options: FirstRunOptions,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not prompt; use defaults for options that are not given.")
    ] = False,
    open_page: Annotated[bool, typer.Option("--open", help="Open the report in a browser when it is done.")] = False,
) -> None:
    """Make a gate for your documents and your LLM, and prove on your questions that it loses few answers.

    First says what your questions can prove and how long it takes. Then builds an index, answers the questions with and
    without passages, fits a gate, or a policy if there are 500 questions, and writes a report and knowgate.toml. If
    nothing can be proven, the settings always retrieve. After an interruption, run the same command again to continue.

    Example: knowgate start --docs handbook/ --questions questions.jsonl
    """
    merged = merge_options(options)
    if not yes and is_terminal():
        merged = prompt_for_options(merged, options.model_fields_set)
    try:
        with show_progress("starting", "questions") as show:
            result = first_run(merged, ConsoleReporter(show))
    except (KeyboardInterrupt, KnowgateError):
        if read_progress(merged.out) is not None:
            inform(f"Finished work is kept in {merged.out}. To continue, run: {format_start_command(merged)}")
        raise
    print_result(result, merged)
    if open_page:
        webbrowser.open(result.page.resolve().as_uri())


def merge_options(options: FirstRunOptions) -> FirstRunOptions:
    """Combine the given flags with the options of an earlier, interrupted run in the same folder.

    Flags take precedence. If there was an earlier run, prints that it continues.
    """
    earlier = read_progress(options.out)
    if earlier is None:
        return options
    given = get_set_fields(options)
    reusable = set(FirstRunOptions.model_fields) - {"out", "config", "seed"}
    reused = {name: value for name, value in earlier.options.items() if name in reusable}
    if given.keys() & {"docs", "index"}:  # A new source of documents replaces the earlier one.
        reused |= {"docs": "", "index": ""}
    merged = FirstRunOptions(**{**reused, **given})
    inform(f"Continuing in {options.out}.")
    return merged


def format_start_command(options: FirstRunOptions, **changes: Any) -> str:
    """Format the command line that starts this run, with changed options; passwords and keys in URLs are removed.

    Options that have their default value are left out.
    """
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
    """Return whether a user is at the terminal who can answer prompts."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


def prompt_for_options(options: FirstRunOptions, given: set[str]) -> FirstRunOptions:
    """Prompt for the documents, the LLM, the questions and their number, except those that were given as flags.

    Args:
        options: Options so far; they are the defaults of the prompts.
        given: Names of the options that were given as flags.
    """
    if not given & {"docs", "index"}:
        text = "Your documents (a folder of txt, md, html or pdf, or a JSONL file)"
        options = options.replace(docs=_prompt_until_valid(text, options.docs, _check_docs), index="")
    if "model" not in given:
        text = "Your LLM (smollm comes with knowgate; openai:MODEL@URL for a server; more: `knowgate models`)"
        options = options.replace(model=_prompt_until_valid(text, options.model, _check_model))
    if "questions" not in given:
        text = "A file with questions of your users (press Enter if you have none; the LLM then writes some)"
        answer = _prompt_until_valid(text, options.questions, guess_data_spec, may_be_empty=True)
        options = options.replace(questions=answer)
    if "count" not in given:
        text = (
            f"How many questions to label ({options.count} show a direction, {RECOMMENDED_QUESTIONS} can prove a gate, "
            f"{POLICY_QUESTIONS} a policy)"
        )
        options = options.replace(count=typer.prompt(text, default=options.count, type=int, err=True))
    return options


def _prompt_until_valid(text: str, default: str, check: Callable[[str], object], *, may_be_empty: bool = False) -> str:
    """Prompt the user until `check` accepts the answer, and return the answer.

    Args:
        text: Text of the prompt.
        default: Answer if the user only presses Enter; "" for none.
        check: Raises a KnowgateError, which is printed, if the answer is invalid.
        may_be_empty: Accept an empty answer without checking it.
    """
    while True:
        value = default or ("" if may_be_empty else None)
        answer = str(typer.prompt(text, default=value, show_default=bool(default), err=True)).strip()
        try:
            if answer or not may_be_empty:
                check(answer)
            return answer
        except KnowgateError as error:
            inform(str(error), style="yellow")


def _check_docs(text: str) -> None:
    if not parse_path(text).exists():
        raise KnowgateError(f"the folder or file '{text}' does not exist. Enter the path of your documents.")


def _check_model(text: str) -> None:
    # The default model always exists, and unpacking it the first time would delay the next prompt.
    if text != FirstRunOptions().model:
        load_model(text)


# --- output ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConsoleReporter(ProgressReporter):
    """Shows the messages, warnings and progress bars of a first run on stderr."""

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
    """Print how the gate was chosen and how it performs (on stderr), and the commands to use it (on stdout)."""
    inform()
    for line in result.choice.explanations:
        inform(f"- {line}")
    inform(f"- Measured on held-out questions: {result.verdict}")
    for line in result.caveats:
        inform(f"- {line}", style="yellow")
    if not result.choice.guarantee:
        inform(f"- {NO_GUARANTEE_MESSAGE}")
        inform(f"- A proof needs more questions: {_suggest_more_questions(result, options)}")
    inform(f"Report: {result.page.resolve()}")
    inform(f"Settings: {result.config.resolve()}. Use them:")
    for line in list_next_commands(result, options):
        create_console().print(line)


def _suggest_more_questions(result: FirstRunResult, options: FirstRunOptions) -> str:
    """Return the command that labels more questions, preceded by how to get them if all were used."""
    if result.has_more:
        return format_start_command(options, count=max(RECOMMENDED_QUESTIONS, 2 * options.count))
    source = "collect questions of your users (--questions FILE)"
    if options.questions:
        source = f"add some to {options.questions}"
    return f"{source}, then {format_start_command(options, count=max(RECOMMENDED_QUESTIONS, options.count))}"


def list_next_commands(result: FirstRunResult, options: FirstRunOptions) -> list[str]:
    """List three commands to try next, which use the written settings.

    Settings in ./knowgate.toml are found automatically; for another file the commands contain --config.
    """
    config = [] if result.config == DEFAULT_CONFIG else ["--config", str(result.config)]
    command = " ".join(["knowgate ask", *map(shlex.quote, config)])
    example, file = shlex.quote(result.example), shlex.quote(get_question_file(options.questions))
    return [f"{command} --explain {example}", f"{command} -i", f"{command} --json < {file} > answers.jsonl"]


def get_question_file(questions: str) -> str:
    """Return the file name to show in the example `knowgate ask < FILE`.

    This is the user's question file if `knowgate ask` can read it: one question per line, or JSONL, not compressed.
    """
    kind, _, file = guess_data_spec(questions).partition(":") if questions else ("", "", "")
    is_readable = kind in ("lines", "jsonl") and not file.endswith(".gz")
    return str(expand_path(file)) if is_readable else "questions.txt"
