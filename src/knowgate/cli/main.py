"""The command line. Thin: each command is a function around one library call. Data on stdout, words on stderr.

Exit codes: 0 good, 1 something the user can mend, 2 wrong usage, 3 worse than allowed (`compare --fail-if-worse`), 70 a
defect of knowgate's own (see `unexpected`), 130 interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated

import typer

from knowgate.cli import error_messages as unexpected
from knowgate.cli.commands import RootGroup
from knowgate.cli.error_messages import CommandLineError, explain_usage_error
from knowgate.core import VERSION
from knowgate.core.display import sanitize_text
from knowgate.core.files import cache_dir
from knowgate.errors import KnowgateError

QUIET_ENVIRONMENT = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
}


def silence_libraries() -> None:
    """Before any of them is imported: they look once."""
    for name, value in QUIET_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    logging.getLogger().addHandler(logging.NullHandler())  # else Python prints what nobody handles


__all__ = ["app", "main", "run"]

EXIT_INTERRUPTED = 130
DEBUG_FLAG = "--debug"
DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
EXIT_CODES_HELP = (
    "Exit codes: 0 good, 1 something you can mend, 2 wrong usage, 3 worse than allowed (compare --fail-if-worse), "
    "70 a defect of knowgate's own, 130 interrupted."
)
app = typer.Typer(
    name="knowgate",
    cls=RootGroup,
    pretty_exceptions_enable=False,
    epilog=EXIT_CODES_HELP,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root_command(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
    debug: Annotated[
        bool,
        typer.Option(DEBUG_FLAG, help="Show where an error came from; also after the command, or KNOWGATE_DEBUG=1."),
    ] = False,
) -> None:
    """Decide, question by question, whether an LLM already knows the answer or must retrieve.

    Words complete with TAB after: knowgate --install-completion
    """
    if version:
        typer.echo(f"knowgate {VERSION}")
        raise typer.Exit
    if not context.invoked_subcommand:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `knowgate` command."""
    silence_libraries()
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command; gives back the exit code. Errors become one sentence on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("--") if "--" in words else len(words)
    given = [word for word in words[:end] if word != DEBUG_FLAG] + words[end:]
    is_debugging = len(given) < len(words) or os.environ.get("KNOWGATE_DEBUG", "") not in ("", "0")
    try:
        return _explained(given, is_debugging)
    except Exception as error:  # noqa: BLE001 - what nobody foresaw ends here
        return _say(unexpected.describe_internal_error(error, given), unexpected.EXIT_INTERNAL_ERROR, is_debugging)


def _explained(arguments: list[str], is_debugging: bool) -> int:
    """Errors that are foreseen."""
    try:
        return _run(arguments)
    except KnowgateError as error:
        return _say(_explain_library_error(str(error), arguments), 1, is_debugging)
    except CommandLineError as error:
        return _say(*explain_usage_error(error), is_debugging)
    except (KeyboardInterrupt, typer.Abort):
        return _say("interrupted.", EXIT_INTERRUPTED, is_debugging)
    except (BrokenPipeError, SystemExit):  # the reader of our output went away, as `head` does; typer and rich exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno is None:  # not the system's: a library uses the class for faults of its own
            raise
        return _say(_explain_file(error), 1, is_debugging)


def _run(arguments: list[str]) -> int:
    _log_to_stderr()
    _print_any_character()
    code = typer.main.get_command(app).main(arguments, prog_name="knowgate", standalone_mode=False)
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    return code if isinstance(code, int) else 0


def _log_to_stderr() -> None:
    """Our own messages only; libraries keep theirs."""
    logger = logging.getLogger("knowgate")
    logger.setLevel(logging.INFO)
    for handler in list(logger.handlers):  # of an earlier run in this process, whose stderr may be closed
        logger.removeHandler(handler)
    handler = logging.StreamHandler()
    handler.setFormatter(SanitizingFormatter())
    logger.addHandler(handler)


class SanitizingFormatter(logging.Formatter):
    """Messages as they are, but for what could steer the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return sanitize_text(super().format(record))


def _print_any_character() -> None:
    """Half a character (a lone surrogate), or one the terminal does not know, is printed as an escape."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _say(message: str, code: int, is_debugging: bool) -> int:
    """One line; nothing in the message is taken for markup. is_debugging: after where the error came from."""
    from rich.text import Text

    from knowgate.cli.console import STDERR_CONSOLE

    error = sys.exception()
    line = Text.assemble(("Error:", "red"), " ", sanitize_text(" ".join(message.split())))
    with contextlib.suppress(OSError):  # nobody reads it, or its disk is full: the exit code still tells
        if is_debugging and error is not None:
            sys.stderr.write(unexpected.format_traceback(error))
        STDERR_CONSOLE.print(line)
    return code


def _explain_library_error(message: str, arguments: list[str]) -> str:
    return unexpected.explain_library_error(message, arguments, typer.main.get_group(app).commands)


def _explain_file(error: OSError) -> str:
    """A file or folder that cannot be read or written."""
    place = f"use '{error.filename}'" if error.filename else "read or write"
    inside = _is_in_cache(str(error.filename))
    advice = "Set KNOWGATE_CACHE to a folder you can write" if inside else "Check the path and its permissions"
    if error.errno in DISK_FULL_ERRORS:
        advice = "Make room, then run the same command again"
    return f"cannot {place}: {error.strerror or error}. {advice}."


def _is_in_cache(place: str) -> bool:
    try:
        return place.startswith(str(cache_dir()))
    except KnowgateError:  # there is no cache folder
        return False
