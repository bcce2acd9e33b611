"""`knowgate start` is a guided first run; `knowgate refit` repeats it on the questions in a server's log.

On a terminal, `start` prompts for options that were not given.
"""

from __future__ import annotations

import json
import shlex
import sys
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from knowgate.cli.console import create_console, inform
from knowgate.cli.options import ConfigFile, parse_log_location, parse_path
from knowgate.cli.progress import ProgressCallback, show_progress
from knowgate.core.files import write_text
from knowgate.core.options import Count, get_set_fields, option
from knowgate.core.redaction import redact_urls
from knowgate.data.questions import guess_data_spec
from knowgate.errors import BadSetting, KnowgateError
from knowgate.evaluation.first_run.gate_selection import NO_GUARANTEE_MESSAGE, GateChoice
from knowgate.evaluation.first_run.labeling import POLICY_QUESTIONS, RECOMMENDED_QUESTIONS
from knowgate.evaluation.first_run.options import DEFAULT_CONFIG, FirstRunOptions, ProgressReporter, read_progress
from knowgate.evaluation.first_run.runner import FirstRunResult, first_run
from knowgate.evaluation.server_log import LoggedQuestions, is_server_log, read_logged_questions
from knowgate.gates import load_gate
from knowgate.gates.arbiters import NO_ARBITER, get_policy_arbiter
from knowgate.labels.options import DEFAULT_PASSAGES
from knowgate.models import load_model
from knowgate.pipeline.settings import PipelineOptions, load_settings
from knowgate.server.options import load_serve_options

FLAGS = {name: f"--{name.replace('_', '-')}" for name in FirstRunOptions.model_fields}


def start(
    options: FirstRunOptions,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not prompt; use defaults for options that are not given.")
    ] = False,
    open_page: Annotated[bool, typer.Option("--open", help="Open the report in a browser when it is done.")] = False,
) -> None:
    """Make a gate for your documents and your LLM, and test how many answers it loses.

    The command first says which losses your number of questions can rule out, and how long it takes. It builds an index,
    answers the questions with and without passages, and fits a gate. With 500 questions or more, it fits a policy: a gate
    with a threshold and an arbiter. Last, it writes a report and knowgate.toml. If nothing can be proven, these settings
    always retrieve. Run the same command again to continue after an interruption.

    Example: knowgate start --docs handbook/ --questions questions.jsonl
    """
    merged = merge_options(options)
    if not yes and is_terminal():
        merged = prompt_for_options(merged, options.model_fields_set)
    try:
        with show_progress("starting", "questions") as show:
            result = first_run(merged, ConsoleReporter(show))
    except (KeyboardInterrupt, KnowgateError):
        if read_progress(merged.out) is not None:  # None if no work was finished
            inform(f"Finished work is kept in {merged.out}. To continue, run: {format_start_command(merged)}")
        raise
    print_result(result, merged)
    if open_page:
        webbrowser.open(result.page.resolve().as_uri())


def merge_options(options: FirstRunOptions) -> FirstRunOptions:
    """Combine the given flags with the options of an interrupted run in the same folder. Flags take precedence."""
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
    """Format the command line of this run, with changed options. Passwords and keys in URLs are removed."""
    defaults = FirstRunOptions()
    changed = options.replace(**changes)
    words = ["knowgate", "start"]
    for name, flag in FLAGS.items():
        value = getattr(changed, name)
        if value != getattr(defaults, name):
            words += [flag, redact_urls(str(value))]
    return shlex.join(words)


# --- prompts --------------------------------------------------------------------------------------


def is_terminal() -> bool:
    """Return whether a user is at the terminal who can answer prompts."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


def prompt_for_options(options: FirstRunOptions, given: set[str]) -> FirstRunOptions:
    """Prompt for the documents, the LLM, the questions and their number, and return the changed options.

    Args:
        options: Options so far; they are the defaults of the prompts.
        given: Names of the options that were given as flags. They are not prompted for.
    """
    if not given & {"docs", "index"}:
        text = "Your documents (a folder of txt, md, html or pdf, or a JSONL file)"
        options = options.replace(docs=_prompt_until_valid(text, options.docs, _check_docs), index="")
    if "model" not in given:
        text = "Your LLM (smollm comes with knowgate; openai:MODEL@URL for a server; more: `knowgate models`)"
        options = options.replace(model=_prompt_until_valid(text, options.model, _check_model))
    if "questions" not in given:
        text = "A file with questions of your users (press Enter if you have none; the LLM then writes some)"
        options = options.replace(questions=_prompt_until_valid(text, options.questions, _check_questions))
    if "count" not in given:
        text = (
            f"How many questions to label ({options.count} show a direction, {RECOMMENDED_QUESTIONS} can prove a gate, "
            f"{POLICY_QUESTIONS} a policy)"
        )
        options = options.replace(count=typer.prompt(text, default=options.count, type=int, err=True))
    return options


def _prompt_until_valid(text: str, default: str, check: Callable[[str], object]) -> str:
    """Prompt the user until `check` accepts the answer, and return the answer.

    Args:
        text: Text of the prompt.
        default: Answer if the user only presses Enter.
        check: Raises a KnowgateError, which is printed, if the answer is invalid.
    """
    while True:
        answer = str(typer.prompt(text, default=default, show_default=bool(default), err=True)).strip()
        try:
            check(answer)
            return answer
        except KnowgateError as error:
            inform(str(error), style="yellow")


def _check_docs(text: str) -> None:
    """Raise a KnowgateError if the folder or file does not exist."""
    if not parse_path(text).exists():
        raise KnowgateError(f"the folder or file '{text}' does not exist. Enter the path of your documents.")


def _check_questions(spec: str) -> None:
    """Raise a KnowgateError if the spec, such as a file name, names no readable questions. "" is allowed."""
    if spec:  # without questions, the LLM writes some
        guess_data_spec(spec)


def _check_model(text: str) -> None:
    """Raise a KnowgateError if the model cannot be loaded."""
    # The default model always exists, and unpacking it the first time would delay the next prompt.
    if text != FirstRunOptions().model:
        load_model(text)


# --- output ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConsoleReporter(ProgressReporter):
    """Shows the messages, warnings and progress bars of a first run on stderr."""

    bars: ProgressCallback  # shows the progress bars, and prints lines above them

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
    """Print how the gate was chosen, how it performs, and the commands to use it."""
    inform()
    for line in result.choice.explanations:
        inform(f"- {line}")
    inform(f"- Measured on held-out questions: {result.verdict}")
    for line in result.caveats:
        inform(f"- {line}", style="yellow")
    if not result.choice.guarantee:
        inform(f"- {NO_GUARANTEE_MESSAGE}")
        count = max(RECOMMENDED_QUESTIONS, 2 * options.count)
        inform(f"- A proof needs more questions of your users: {format_start_command(options, count=count)}")
    inform(f"Report: {result.page.resolve()}")
    inform(f"Settings: {result.config.resolve()}. Use them:")
    for line in list_next_commands(result):
        create_console().print(line)


def list_next_commands(result: FirstRunResult) -> list[str]:
    """List three commands to try next, with the written settings.

    Settings in ./knowgate.toml are found without --config.
    """
    config = [] if result.config == DEFAULT_CONFIG else ["--config", str(result.config)]
    command = " ".join(["knowgate ask", *map(shlex.quote, config)])
    example = shlex.quote(result.example)
    return [f"{command} --explain {example}", f"{command} -i", f"{command} --json < questions.txt > answers.jsonl"]


class RefitOptions(FirstRunOptions):
    """Options of `knowgate refit`: the options of `knowgate start`, with other defaults.

    The server's log provides the questions, so `questions` and `writer` have no flag.
    """

    docs: str = option("", "Documents to search. Default: the documents of the settings file.", metavar="DIR")
    model: str = option("", "LLM that answers. Default: the one in the settings file.")
    questions: str = option("", "Questions to label.", flag=None)
    count: Count = option(500, "Maximum number of logged questions to label. The newest ones are used.")
    writer: str = option("", "LLM that writes questions.", flag=None)
    out: Path = option(Path("knowgate-refit"), "Output folder. An interrupted run continues there.", metavar="DIR")
    config: Path = option(Path("knowgate.toml"), "Settings file to write.", flag=None)


def refit(
    log: Annotated[
        str, typer.Argument(metavar="DB", help="Log written by `knowgate serve --decisions DB --keep-questions`.")
    ],
    *,
    config: ConfigFile = None,
    options: RefitOptions,
) -> None:
    """Fit a gate on the questions that your server was asked, test it, and write settings.

    Answers the newest logged questions with and without passages. The settings file names the LLM and the documents.
    Answers that people corrected are gold answers. If fewer than half of the questions have one, agreement counts
    instead. Then an answer without passages is right if it agrees with the answer with passages.

    Example: knowgate refit decisions.db --config knowgate.toml --out refit
    """
    flags = {"model": options.model or None, "docs": options.docs or None, "index": options.index or None}
    settings = load_settings(config, **flags)
    logged = _read_logged_questions(log, options.count, settings)
    options.out.mkdir(mode=0o700, parents=True, exist_ok=True)
    first_run_options = options.replace(
        docs=str(settings.docs or ""),
        index=settings.index or "",
        model=get_served_model(settings, options.model),
        questions=str(_write_logged_questions(logged, options.out)),
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
    if config is None and not DEFAULT_CONFIG.exists():
        create_console().print(f"knowgate serve --config {result.config}")
        return
    inform("Serve the new gate with the settings of your server:")
    create_console().print(format_serve_command(config, settings, result.choice))


def format_serve_command(config: Path | None, settings: PipelineOptions, choice: GateChoice) -> str:
    """Format the command that runs the server as its settings say, but with a new gate.

    Args:
        config: Settings file of the server; None for ./knowgate.toml.
        settings: What the file says.
        choice: The new gate, whose guarantee was tested with DEFAULT_PASSAGES passages per question.
    """
    # The file may set a threshold and an arbiter for the earlier gate, so those of the new gate are always given.
    threshold = load_gate(choice.gate).threshold if choice.threshold is None else choice.threshold
    arbiter = get_policy_arbiter(choice.gate) or NO_ARBITER  # other gates than policies were measured without one
    command = ["knowgate", "serve", *(["--config", str(config)] if config else []), "--gate", choice.gate]
    command += ["--threshold", str(threshold), "--arbiter", arbiter]
    if settings.k != DEFAULT_PASSAGES:
        command += ["--k", str(DEFAULT_PASSAGES)]
    return shlex.join(command)


def _read_logged_questions(log: str, count: int, settings: PipelineOptions) -> LoggedQuestions:
    """Read the newest questions from a server log, at most `count`, and print how many have corrected answers."""
    source = parse_log_location(log)
    if isinstance(source, Path) and not is_server_log(source):
        raise BadSetting(f"'{log}' is not a server log. Start the server with --decisions FILE --keep-questions.")
    # With `share_labels`, all API keys belong together, so the corrections of each of them are trusted.
    logged = read_logged_questions(source, count, trusts_keys=load_serve_options(settings).share_labels)
    _report_corrections(logged)
    return logged


def _write_logged_questions(logged: LoggedQuestions, out: Path) -> Path:
    """Write the newest logged questions, with corrected answers, to OUT/questions.jsonl and return that path."""
    lines = []
    for question in logged.questions:
        answers = {"answers": list(question.answers)} if question.answers else {}
        lines.append(json.dumps({"id": question.id, "question": question.text, **answers}))
    write_text(out / "questions.jsonl", "\n".join(lines) + "\n")
    return out / "questions.jsonl"


def _report_corrections(logged: LoggedQuestions) -> None:
    """Print how many corrections there are, and from how many API keys."""
    if not logged.n_corrections:
        return
    keys = "1 API key" if logged.n_keys == 1 else f"{logged.n_keys} API keys"
    inform(f"Corrections: {logged.n_corrections}, from {keys}.")
    if logged.n_unused:
        inform(
            f"{logged.n_unused} of them are not used, because one key may give at most half of the gold answers, "
            "and none to a question that another key asked, too. If all keys belong together, set share_labels = true in the "
            "table [serve] of the settings.",
            style="yellow",
        )


def get_served_model(settings: PipelineOptions, model: str = "") -> str:
    """Return the spec of the LLM that answers: the given one, else the upstream in the [serve] settings, else `model`.

    Raises:
        BadSetting: The settings name an upstream without its model.
    """
    if model:
        return model
    options = load_serve_options(settings)
    if not options.upstream:
        return settings.model
    if not options.upstream_model:
        raise BadSetting("[serve] in the settings has 'upstream' but no 'upstream_model'. Add the name of that LLM.")
    return f"openai:{options.upstream_model}@{options.upstream}"
