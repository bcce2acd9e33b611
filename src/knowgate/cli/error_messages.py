"""Where exceptions end that nobody foresaw: a sentence with a short id, and the details in a file for who mends it.

The id is made from where the error came from, so one defect has one id and one file, however often it happens. Knows
nothing of commands. Nothing here fails: what cannot be written is left away.
"""

from __future__ import annotations

import contextlib
import difflib
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

import typer

from knowgate.core.files import cache_dir
from knowgate.core.redaction import redact_secrets
from knowgate.errors import KnowgateError

EXIT_INTERNAL_ERROR = 70  # EX_SOFTWARE of sysexits.h
REPORT_FOLDER = "errors"
REPORTED_PACKAGES = ("knowgate", "numpy", "torch", "transformers", "bm25s", "typer", "httpx")


def describe_internal_error(error: BaseException, arguments: Sequence[str]) -> str:
    """The sentence, once the details are on disk."""
    number = compute_error_id(error)
    file = _keep(number, format_error_report(error, arguments))
    where = (
        f"Details are in {file}; please send that file" if file else "Run it again with --debug and send what it says"
    )
    return f"{_kind(error)} (id {number}). {where} to whoever looks after knowgate."


def _kind(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "this machine's memory is full: use a smaller model, fewer questions or a smaller index"
    if isinstance(error, RecursionError):
        return "something here is nested deeper than can be followed"
    return f"this should not have happened: {type(error).__name__}"


def compute_error_id(error: BaseException) -> str:
    """Eight digits that tell this place in the code from others."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{Path(frame.filename).name}:{frame.name}:{frame.lineno}" for frame in frames[-8:]]
    return hashlib.sha256("\n".join([type(error).__name__, *places]).encode()).hexdigest()[:8]


def format_error_report(error: BaseException, arguments: Sequence[str]) -> str:
    """When, what with, what was typed, and where it broke; without secrets."""
    lines = [
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        f"knowgate {shlex.join(arguments)}",
        f"{platform.python_implementation()} {platform.python_version()}, {platform.platform()}",
        ", ".join(_versions()),
        "",
        format_traceback(error),
    ]
    return redact_secrets("\n".join(lines), os.environ)


def format_traceback(error: BaseException) -> str:
    """The traceback, without secrets."""
    return redact_secrets("".join(traceback.format_exception(error, limit=-40)), os.environ)


def _versions() -> Iterator[str]:
    from importlib import metadata

    for package in REPORTED_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield f"{package} {metadata.version(package)}"


def _keep(number: str, text: str) -> Path | None:
    """Write the details into the cache folder, else into the system's folder for temporary files, else nowhere."""
    for folder in (_cache, tempfile.gettempdir):
        with contextlib.suppress(OSError, ValueError, RuntimeError, KnowgateError):
            file = Path(folder()) / REPORT_FOLDER / f"{number}.log"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
            return file
    return None


def _cache() -> str:
    return str(cache_dir())


CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]  # BadParameter < UsageError < ClickException


def explain_usage_error(error: Any) -> tuple[str, int]:
    """(sentence, exit code) for an error of typer's."""
    if hasattr(error, "option_name") and hasattr(error, "possibilities"):
        return _unknown_option(error), 2
    sentence = " ".join(error.format_message().split()).rstrip(".") or "no command was named"
    sentence += "" if sentence.endswith("?") else "."
    context = getattr(error, "ctx", None)
    is_value = getattr(error, "param", None) is not None
    known = ", ".join(getattr(context.command, "commands", ())) if context and not is_value else ""
    hint = f"Known: {known}." if known else f"See: {context.command_path if context else 'knowgate'} --help"
    return f"{sentence} {hint}", 2


def _unknown_option(error: Any) -> str:
    """Says what is known and what may be meant; an old name that was mistyped leads to the new one."""
    command, name = error.ctx.command if error.ctx else None, error.option_name
    params = command.params if command else ()
    listed = sorted(opt for param in params if not getattr(param, "hidden", False) for opt in param.opts)
    known = [opt for opt in [*listed, "--help"] if opt.startswith("--")]
    meant = {**{opt: opt for opt in known if opt != "--help"}, **getattr(command, "renamed", {})}
    words = {opt.lstrip("-"): new for opt, new in meant.items()}
    near = difflib.get_close_matches(name.lstrip("-"), words, n=1)
    hint = f" Did you mean '{words[near[0]]}'?" if near else ""
    hint += getattr(command, "elsewhere", lambda option: "")(name)
    if getattr(command, "commands", None):
        hint += f" Options of a command follow its name: {error.ctx.command_path} NAME {name}."
    return f"unknown option '{name}'.{hint} Known: {', '.join(known)}."


ADVICE_VERBS = (
    "Add|Ask|Build|Check|Choose|Convert|Correct|Delete|Fetch|Fill|Fit|Give|Install|Label|Leave|Let|Look|Make|Mark|Mend|"
    "Move|Name|Put|Record|Rename|Repair|Run|Save|Set|Shorten|Split|Take|Try|Type|Use|Write"
)
COMMAND_PATTERN = (
    r"\bknowgate [a-z]|\bpip install\b|(^|[\s'(])--[a-z]"  # a command or an option, to be typed as it stands
)
CHOICES_PATTERN = r"\b[Aa]llowed\b|\b[Kk]nown( options)?: |\bmust (be|begin|hold|have)\b|\bat (least|most)\b"
ADVICE_PATTERN = rf"(^|[.;:,]\s|\bor\s)({ADVICE_VERBS}|{ADVICE_VERBS.lower()})\b"
NEXT_STEP_PATTERN = re.compile(f"{COMMAND_PATTERN}|{CHOICES_PATTERN}|{ADVICE_PATTERN}")


def has_next_step(message: str) -> bool:
    """Whether it has a command, an option, what is allowed, or says what to do."""
    return NEXT_STEP_PATTERN.search(message) is not None


def explain_library_error(message: str, arguments: Sequence[str], commands: Mapping[str, Any]) -> str:
    """Translate a library message for the command that is running: name flags, and say what to type next."""
    path, command = find_command(arguments, commands)
    options = {option.name: option.opts[0] for option in getattr(command, "params", ())}
    flags = {name: flag for name, flag in options.items() if flag.startswith("--")}
    return add_next_step(translate_arguments(message, flags), path)


def add_next_step(message: str, path: Sequence[str]) -> str:
    """Add where to find help to a message that does not say what to do itself."""
    if has_next_step(message):
        return message
    return f"{message.rstrip()} See: {' '.join(['knowgate', *path])} --help"


def find_command(arguments: Sequence[str], commands: Mapping[str, Any]) -> tuple[list[str], Any]:
    """Find the command that a command line runs: its names, such as ['fit', 'fusion'], and the command."""
    path, command = list[str](), None
    for word in arguments:
        if word in commands:
            path.append(word)
            command = commands[word]
            commands = getattr(command, "commands", {})
        elif not word.startswith("-"):
            break
    return path, command


def translate_arguments(message: str, flags: Mapping[str, str]) -> str:
    """Replace the Python arguments that a library message names by the flags of a command.

    `samples=0` becomes `--samples 0`, `mask=True` becomes `--mask`, and an argument in backticks its flag.

    Args:
        message: A message of the library.
        flags: Flag of each argument, by the argument's name.
    """
    if not flags:
        return message
    names = "|".join(sorted(map(re.escape, flags), key=len, reverse=True))

    def translate(match: re.Match[str]) -> str:
        flag, value = flags[match["name"]], match["value"]
        return flag if value in ("", "True") else f"no {flag}" if value in ("False", "None") else f"{flag} {value}"

    value = r"""'[^']*'|"[^"]*"|[\w.+-]*[\w]|"""
    message = re.sub(rf"(?<![\w.?&-])`?(?P<name>{names})=(?P<value>{value})`?", translate, message)
    return re.sub(rf"`({names})`", lambda match: flags[match[1]], message)
