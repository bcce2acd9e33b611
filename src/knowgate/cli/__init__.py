"""The command line. Thin: each command is a function around one library call. Data on stdout, words on stderr.

Exit codes: 0 good, 1 something the user can mend, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from knowgate.cli import (
    ask,
    calibrate,
    demo,
    doctor,
    eval,
    eval_rerank,
    eval_self,
    fit,
    history,
    import_answers,
    index,
    label,
    lists,
    prefer,
    replay,
    report,
    sweep,
)
from knowgate.cli.usage import CommandLineError, explain
from knowgate.errors import KnowgateError
from knowgate.files import cache_dir

INTERRUPTED = 130
app = typer.Typer(
    name="knowgate",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("ask")(ask.ask)
app.command("decide")(ask.decide)
app.command("index")(index.index)
app.command("label")(label.label)
app.command("import-answers")(import_answers.import_answers)
app.command("report")(report.report)
app.command("fit")(fit.fit)
app.command("prefer")(prefer.prefer)
app.command("calibrate")(calibrate.calibrate_command)
app.command("eval")(eval.eval_)
app.command("replay")(replay.replay_command)
app.command("eval-self")(eval_self.eval_self)
app.command("eval-rerank")(eval_rerank.eval_rerank)
app.add_typer(sweep.app, name="sweep")
app.add_typer(history.app, name="history")
app.command("gates")(lists.gates)
app.add_typer(lists.models_app, name="models")
app.command("doctor")(doctor.doctor)
app.command("demo")(demo.demo)


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Decide, question by question, whether an LLM already knows the answer or must retrieve."""
    if version:
        typer.echo(f"knowgate {metadata.version('knowgate')}")
        raise typer.Exit
    if not context.invoked_subcommand:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `knowgate` command."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command; gives back the exit code. Errors become one sentence on stderr."""
    _log_to_stderr()
    _print_any_character()
    try:
        code = typer.main.get_command(app).main(arguments, prog_name="knowgate", standalone_mode=False)
        return _say("interrupted.", code) if code == INTERRUPTED else code if isinstance(code, int) else 0
    except KnowgateError as error:
        return _say(str(error), 1)
    except CommandLineError as error:
        return _say(*explain(error))
    except (KeyboardInterrupt, typer.Abort):
        return _say("interrupted.", INTERRUPTED)
    except (BrokenPipeError, SystemExit):  # the reader of our output went away, as `head` does; typer and rich exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _say(_explain_file(error), 1)


def _log_to_stderr() -> None:
    """Our own messages only; libraries keep theirs."""
    logger = logging.getLogger("knowgate")
    logger.setLevel(logging.INFO)
    for handler in list(logger.handlers):  # of an earlier run in this process, whose stderr may be closed
        logger.removeHandler(handler)
    logger.addHandler(logging.StreamHandler())


def _print_any_character() -> None:
    """Half a character (a lone surrogate), or one the terminal does not know, is printed as an escape."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _say(message: str, code: int) -> int:
    """One line; nothing in the message is taken for markup."""
    line = Text.assemble(("Error:", "red"), " ", " ".join(message.split()))
    Console(stderr=True, soft_wrap=True, highlight=False).print(line)
    return code


def _explain_file(error: OSError) -> str:
    """A file or folder that cannot be read or written."""
    place = str(error.filename or "a file")
    inside = place.startswith(str(cache_dir()))
    advice = "Set KNOWGATE_CACHE to a folder you can write" if inside else "Check the path and its permissions"
    return f"cannot use '{place}': {error.strerror or error}. {advice}."
