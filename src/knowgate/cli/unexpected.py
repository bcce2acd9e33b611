"""Where exceptions end that nobody foresaw: a sentence with a short id, and the details in a file for who mends it.

The id is made from where the error came from, so one defect has one id and one file, however often it happens. Knows
nothing of commands. Nothing here fails: what cannot be written is left away.
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

from knowgate.errors import KnowgateError
from knowgate.files import cache_dir

EXIT = 70  # EX_SOFTWARE of sysexits.h
FOLDER = "errors"
PACKAGES = ("knowgate", "numpy", "torch", "transformers", "bm25s", "typer", "httpx")
SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
SHORTEST_SECRET = 6  # characters; shorter values ("1", "true") would blot out half of the text
HIDDEN = "[hidden]"
SECRETS = [
    (re.compile(r"(?<=://)[^/\s@'\"]+@"), f"{HIDDEN}@"),  # a login in an address
    (re.compile(r"(?i)([?&;](?:[\w-]*(?:key|token|secret|passw\w*|sig|auth\w*))=)[^&\s'\"]+"), rf"\1{HIDDEN}"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{6,}"), rf"\1 {HIDDEN}"),
    (re.compile(r"\b(?:sk|hf|ghp|pk)[-_][\w-]{8,}"), HIDDEN),  # how servers' keys look
    (re.compile(r"(?i)(--[\w-]*(?:key|token|secret|password)[= ])\S+"), rf"\1{HIDDEN}"),
]


def describe_unexpected(error: BaseException, arguments: Sequence[str]) -> str:
    """The sentence, once the details are on disk."""
    number = error_id(error)
    file = _keep(number, details(error, arguments))
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


def error_id(error: BaseException) -> str:
    """Eight digits that tell this place in the code from others."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{Path(frame.filename).name}:{frame.name}:{frame.lineno}" for frame in frames[-8:]]
    return hashlib.sha256("\n".join([type(error).__name__, *places]).encode()).hexdigest()[:8]


def details(error: BaseException, arguments: Sequence[str]) -> str:
    """When, what with, what was typed, and where it broke; without secrets."""
    lines = [
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        f"knowgate {shlex.join(arguments)}",
        f"{platform.python_implementation()} {platform.python_version()}, {platform.platform()}",
        ", ".join(_versions()),
        "",
        traced(error),
    ]
    return without_secrets("\n".join(lines), os.environ)


def traced(error: BaseException) -> str:
    """The traceback, without secrets."""
    return without_secrets("".join(traceback.format_exception(error, limit=-40)), os.environ)


def without_secrets(text: str, environment: Mapping[str, str]) -> str:
    """Keys from the environment, logins in addresses and what looks like a key are blotted out."""
    values = {value.strip() for name, value in environment.items() if SECRET_NAME.search(name)}
    for value in sorted((value for value in values if len(value) >= SHORTEST_SECRET), key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    for pattern, instead in SECRETS:
        text = pattern.sub(instead, text)
    return text


def _versions() -> Iterator[str]:
    from importlib import metadata

    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield f"{package} {metadata.version(package)}"


def _keep(number: str, text: str) -> Path | None:
    """Write the details into the cache folder, else into the system's folder for temporary files, else nowhere."""
    for folder in (_cache, tempfile.gettempdir):
        with contextlib.suppress(OSError, ValueError, RuntimeError, KnowgateError):
            file = Path(folder()) / FOLDER / f"{number}.log"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
            return file
    return None


def _cache() -> str:
    return str(cache_dir())
