"""Error messages of commands: for wrong usage, errors of the library, and internal errors.

An internal error gets a short id and a report file. The id is computed from the place in the code where the error
occurred, so the same bug always has the same id and file. Nothing here raises an exception: if the report cannot be
written, the message does not mention it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shlex
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from knowgate.core.files import cache_dir, create_private_file
from knowgate.core.redaction import redact_secrets
from knowgate.errors import KnowgateError

EXIT_INTERNAL_ERROR = 70  # the conventional exit code for internal errors (EX_SOFTWARE in sysexits.h)
REPORT_FOLDER = "errors"
SETTINGS_FILE_PREFIX = "the config file"
REPORTED_PACKAGES = ("knowgate", "numpy", "torch", "transformers", "bm25s", "typer", "httpx")


# --- internal errors ------------------------------------------------------------------------------


def describe_internal_error(error: BaseException, arguments: Sequence[str]) -> str:
    """Write a report about an unexpected exception, and return a message with the file name.

    Args:
        error: The exception.
        arguments: Words of the command line, for the report.
    """
    error_id = compute_error_id(error)
    file = _write_report(error_id, format_error_report(error, arguments))
    request = f"Please send the report {file}" if file else "Please repeat it with --debug and send the output"
    return f"{_describe_exception(error)} (id {error_id}). {request} to the maintainers of knowgate."


def _describe_exception(error: BaseException) -> str:
    """Describe an unexpected exception in a few words. Usually only its type is named."""
    if isinstance(error, MemoryError):
        return "this machine is out of memory: use a smaller model, fewer questions or a smaller index"
    if isinstance(error, RecursionError):
        return "the input is nested too deeply"
    return f"internal error: {type(error).__name__}"


def compute_error_id(error: BaseException) -> str:
    """Return eight hex digits for the place in the code of an exception."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{Path(frame.filename).name}:{frame.name}:{frame.lineno}" for frame in frames[-8:]]  # innermost
    return hashlib.sha256("\n".join([type(error).__name__, *lines]).encode()).hexdigest()[:8]


def format_error_report(error: BaseException, arguments: Sequence[str]) -> str:
    """Format the report of an error: time, command line, versions and traceback, without secrets."""
    lines = [
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        f"knowgate {shlex.join(arguments)}",
        f"{platform.python_implementation()} {platform.python_version()}, {platform.platform()}",
        ", ".join(_list_versions()),
        "",
        format_traceback(error),
    ]
    return redact_secrets("\n".join(lines), os.environ)


def format_traceback(error: BaseException) -> str:
    """Format a traceback without secrets."""
    return redact_secrets("".join(traceback.format_exception(error, limit=-40)), os.environ)


def _list_versions() -> Iterator[str]:
    """Yield the name and version of packages for a report."""
    from importlib import metadata

    for package in REPORTED_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield f"{package} {metadata.version(package)}"


def _write_report(error_id: str, text: str) -> Path | None:
    """Write a report to the cache folder, or else to the folder for temporary files.

    Returns:
        The file; None if it could not be written.
    """
    for get_folder in (cache_dir, tempfile.gettempdir):
        with contextlib.suppress(OSError, ValueError, RuntimeError, KnowgateError):
            file = Path(get_folder()) / REPORT_FOLDER / f"{error_id}.log"
            file.parent.mkdir(parents=True, exist_ok=True)
            create_private_file(file)
            file.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
            return file
    return None


# --- wrong usage ----------------------------------------------------------------------------------


def explain_usage_error(error: Any) -> str:
    """Explain in one line how the command line was wrong.

    The line ends with the known commands or "See: knowgate ask --help".

    Args:
        error: A usage error of typer. It has `param` for a wrong value, and `option_name` for an unknown option. `ctx`
            is the context of the command, or None.
    """
    sentence = " ".join(error.format_message().split()).rstrip(".") or "no command was given"
    if not sentence.endswith("?"):
        sentence += "."
    context = getattr(error, "ctx", None)
    if context is None:
        return f"{sentence} See: knowgate --help"
    commands = getattr(context.command, "commands", ())  # only a group of commands has any
    is_about_option = hasattr(error, "option_name") or getattr(error, "param", None) is not None
    if commands and not is_about_option:  # a command is missing or unknown
        return f"{sentence} Known: {', '.join(commands)}."
    return f"{sentence} See: {context.command_path} --help"


# --- errors of the library ------------------------------------------------------------------------


def explain_library_error(message: str, arguments: Sequence[str], commands: Mapping[str, Any]) -> str:
    """Replace Python arguments in an error message by flags of the running command.

    Example: `samples=0` becomes `--samples 0`.

    Args:
        message: The message.
        arguments: Words of the command line.
        commands: All commands, keyed by name.
    """
    if message.startswith(SETTINGS_FILE_PREFIX):  # keys of a file are not flags
        return message
    command = find_command(arguments, commands)
    options = {option.name: option.opts[0] for option in getattr(command, "params", ())}
    flags = {name: flag for name, flag in options.items() if flag.startswith("--")}
    return translate_arguments(message, flags)


def find_command(arguments: Sequence[str], commands: Mapping[str, Any]) -> Any:
    """Return the command of a command line.

    Example: ['fit', 'fusion', '--labels', 'run'] gives the command `fusion` of `fit`.

    Args:
        arguments: Words of the command line.
        commands: All commands, keyed by name.

    Returns:
        The command, or the group if no command of it is named; None if there is none or if it cannot be loaded.
    """
    command = None
    for word in arguments:
        if word in commands:
            try:
                command = commands[word]
            except KnowgateError:  # a command that another package provides and that cannot be loaded
                return None
            commands = getattr(command, "commands", {})
        elif not word.startswith("-"):
            break
    return command


def translate_arguments(message: str, flags: Mapping[str, str]) -> str:
    """Replace Python arguments in a message by flags.

    Examples: `samples=0` becomes `--samples 0`, `mask=False` becomes `no --mask`.

    Args:
        message: A message of the library.
        flags: Flag of each argument, by the argument's name.
    """
    if not flags:
        return message
    names = "|".join(sorted(map(re.escape, flags), key=len, reverse=True))
    value = r"""'[^']*'|"[^"]*"|[\w.+-]*[\w]|"""  # a text in quotes, a number or word, or nothing
    # The lookbehind excludes a name that is part of a longer name or of a URL, as in `x.k=1` or `?k=1`.
    argument = rf"(?<![\w.?&#-])`?(?P<name>{names})=(?P<value>{value})`?"
    message = re.sub(argument, lambda match: _format_flag(flags[match["name"]], match["value"]), message)
    return re.sub(rf"`({names})`", lambda match: flags[match[1]], message)


def _format_flag(flag: str, value: str) -> str:
    """Format a flag with the value of a Python argument, such as '--samples 0'."""
    if value in ("False", "None"):
        return f"no {flag}"
    if value in ("", "True"):
        return flag
    return f"{flag} {value}"
