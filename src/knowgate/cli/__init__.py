"""The command line. Thin: each command is a function around one library call. Data on stdout, words on stderr.

Exit codes: 0 good, 1 something the user can mend, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from knowgate.cli.quiet import quieten_libraries
from knowgate.cli.usage import CommandLineError, explain
from knowgate.cli.verbs import Verbs
from knowgate.display import harmless
from knowgate.errors import KnowgateError
from knowgate.files import cache_dir

__all__ = ["app", "main", "run"]

INTERRUPTED = 130
app = typer.Typer(
    name="knowgate",
    cls=Verbs,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Decide, question by question, whether an LLM already knows the answer or must retrieve.

    Words complete with TAB after: knowgate --install-completion
    """
    if version:
        from importlib import metadata  # takes 40 ms, which the other commands need not wait for

        typer.echo(f"knowgate {metadata.version('knowgate')}")
        raise typer.Exit
    if not context.invoked_subcommand:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `knowgate` command."""
    quieten_libraries()
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
    handler = logging.StreamHandler()
    handler.setFormatter(HarmlessLines())
    logger.addHandler(handler)


class HarmlessLines(logging.Formatter):
    """Messages as they are, but for what could steer the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))


def _print_any_character() -> None:
    """Half a character (a lone surrogate), or one the terminal does not know, is printed as an escape."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _say(message: str, code: int) -> int:
    """One line; nothing in the message is taken for markup."""
    from rich.text import Text

    from knowgate.cli.console import WORDS

    WORDS.print(Text.assemble(("Error:", "red"), " ", harmless(" ".join(message.split()))))
    return code


def _explain_file(error: OSError) -> str:
    """A file or folder that cannot be read or written."""
    place = str(error.filename or "a file")
    inside = place.startswith(str(cache_dir()))
    advice = "Set KNOWGATE_CACHE to a folder you can write" if inside else "Check the path and its permissions"
    return f"cannot use '{place}': {error.strerror or error}. {advice}."
