"""Entry point of the command line. Data goes to stdout, messages to stderr.

Exit codes: 0 success, 1 an error that the user can fix, 2 wrong usage, 3 an evaluation is worse than allowed
(`compare --fail-if-worse`), 70 an internal error, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated

import typer

from knowgate.cli.commands import CommandLineError, LazyGroup
from knowgate.core import VERSION
from knowgate.core.display import sanitize_text
from knowgate.errors import KnowgateError

EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
DEBUG_FLAG = "--debug"
EXIT_CODES_HELP = (
    "Exit codes: 0 success, 1 an error that you can fix, 2 wrong usage, 3 an evaluation is worse than allowed "
    "(compare --fail-if-worse), 70 an internal error, 130 interrupted."
)
# Environment variables that turn off progress bars and warnings of other packages.
QUIET_ENVIRONMENT = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
}
app = typer.Typer(
    name="knowgate",
    cls=LazyGroup,
    pretty_exceptions_enable=False,
    epilog=EXIT_CODES_HELP,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


@app.callback(invoke_without_command=True)
def root_command(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[
        bool, typer.Option(DEBUG_FLAG, help="Show the traceback of an error. Same as KNOWGATE_DEBUG=1.")
    ] = False,
) -> None:
    """Decide, question by question, whether an LLM already knows the answer or must retrieve.

    To complete commands with TAB, run: knowgate --install-completion
    """
    if version:
        typer.echo(f"knowgate {VERSION}")
        raise typer.Exit
    if not context.invoked_subcommand:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the `knowgate` command and exit with its exit code."""
    # SIGHUP tells a server to reload its settings. While the server is still starting, the signal would end the
    # process, so it is blocked until the server handles it.
    if "serve" in (arguments or sys.argv) and hasattr(signal, "SIGHUP"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    silence_libraries()
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. An error is printed as one line, and with `--debug` as a traceback.

    Args:
        arguments: Words of the command line without the program name. Default: those of this process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("--") if "--" in words else len(words)  # words after "--" are not options
    without_debug = [word for word in words[:end] if word != DEBUG_FLAG] + words[end:]
    is_debug = DEBUG_FLAG in words[:end] or os.environ.get("KNOWGATE_DEBUG", "") not in ("", "0")
    try:
        return _run_and_explain(without_debug, is_debug)
    except Exception as error:  # noqa: BLE001 - everything unexpected ends here
        # Imported late, because the import is slow and few commands fail.
        from knowgate.cli.error_messages import EXIT_INTERNAL_ERROR, describe_internal_error

        return _print_error(describe_internal_error(error, without_debug), EXIT_INTERNAL_ERROR, is_debug)


def silence_libraries() -> None:
    """Turn off progress bars, warnings and logs of other packages. Must be called before they are imported."""
    for name, value in QUIET_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    logging.getLogger().addHandler(logging.NullHandler())  # without a handler, Python prints warnings to stderr


def _run_and_explain(arguments: list[str], is_debug: bool) -> int:
    """Run a command and return its exit code. Expected errors are printed, unexpected ones are raised."""
    try:
        return _run(arguments)
    except (KnowgateError, CommandLineError) as error:
        code = EXIT_FAILURE if isinstance(error, KnowgateError) else EXIT_USAGE
        return _print_error(_explain_error(error, arguments), code, is_debug)
    except (KeyboardInterrupt, typer.Abort):
        return _print_error("interrupted.", EXIT_INTERRUPTED, is_debug)
    except (BrokenPipeError, SystemExit):
        # No program reads our output any more, as with `head`. Then typer raises SystemExit.
        # Python flushes stdout at its exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno is None:  # raised by a library, not by the operating system
            raise
        return _print_error(_explain_os_error(error), EXIT_FAILURE, is_debug)


def _explain_error(error: Exception, arguments: list[str]) -> str:
    """Explain an error of the library, or wrong usage of the command line."""
    from knowgate.cli.error_messages import explain_library_error, explain_usage_error  # the help page needs none

    if isinstance(error, KnowgateError):
        return explain_library_error(str(error), arguments, typer.main.get_group(app).commands)
    return explain_usage_error(error)


def _run(arguments: list[str]) -> int:
    """Run a command with typer and return its exit code."""
    _log_to_stderr()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # characters that the terminal cannot encode
    code = typer.main.get_command(app).main(arguments, prog_name="knowgate", standalone_mode=False)
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt  # typer catches it and returns the code instead
    return code if isinstance(code, int) else 0


def _log_to_stderr() -> None:
    """Print log messages of knowgate, but not of other packages, to stderr."""
    logger = logging.getLogger("knowgate")
    logger.setLevel(logging.INFO)
    handler = logging.StreamHandler()
    handler.setFormatter(SanitizingFormatter())
    logger.handlers = [handler]  # replaces that of an earlier run in this process, whose stderr may be closed


class SanitizingFormatter(logging.Formatter):
    """Log formatter that escapes control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return sanitize_text(super().format(record))


def _print_error(message: str, code: int, is_debug: bool) -> int:
    """Print an error message on one line of stderr and return the exit code."""
    from rich.text import Text

    from knowgate.cli.console import inform

    error = sys.exception()
    line = Text.assemble(("Error:", "red"), " ", sanitize_text(" ".join(message.split())))
    with contextlib.suppress(OSError):  # stderr is closed or its disk is full; the exit code still shows the error
        if is_debug and error is not None:
            from knowgate.cli.error_messages import format_traceback

            sys.stderr.write(format_traceback(error))
        inform(line)
    return code


def _explain_os_error(error: OSError) -> str:
    """Explain why a file or folder cannot be read or written."""
    action = f"use '{error.filename}'" if error.filename else "read or write"
    return f"cannot {action}: {error.strerror or error}. Check the path, its permissions and the free disk space."
