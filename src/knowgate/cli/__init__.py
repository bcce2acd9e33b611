"""The command line. Thin: each command is a function around one library call. Data on stdout, words on stderr.

Exit codes: 0 good, 1 something the user can mend, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

import click
import typer
from rich.console import Console

from knowgate.cli import ask, demo, doctor, index, lists
from knowgate.errors import KnowgateError

app = typer.Typer(
    name="knowgate",
    help="Decide, question by question, whether an LLM already knows the answer or must retrieve.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("ask")(ask.ask)
app.command("decide")(ask.decide)
app.command("index")(index.index)
app.command("gates")(lists.gates)
app.add_typer(lists.models_app, name="models")
app.command("doctor")(doctor.doctor)
app.command("demo")(demo.demo)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `knowgate` command."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command; gives back the exit code. Errors become one sentence on stderr."""
    _log_to_stderr()
    try:
        result = typer.main.get_command(app).main(arguments, prog_name="knowgate", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except KnowgateError as error:
        return _say(str(error), 1)
    except click.NoSuchOption as error:
        return _say(_unknown_option(error), 1)
    except click.ClickException as error:
        return _say(error.format_message(), 2)
    except (KeyboardInterrupt, click.Abort):
        return _say("interrupted.", 130)
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _log_to_stderr() -> None:
    """Our own messages only; libraries keep theirs."""
    logger = logging.getLogger("knowgate")
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())


def _say(message: str, code: int) -> int:
    Console(stderr=True, soft_wrap=True).print(f"[red]Error:[/red] {message}", highlight=False, markup=True)
    return code


def _unknown_option(error: click.NoSuchOption) -> str:
    command = error.ctx.command if error.ctx else None
    known = sorted(option for param in (command.params if command else []) for option in param.opts)
    listed = ", ".join(option for option in known if option.startswith("--"))
    return f"unknown option '{error.option_name}'. Known: {listed}."
