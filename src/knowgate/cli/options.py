"""Options and parsers that several commands share."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from knowgate.core.postgres.address import DatabaseAddress, is_postgres_address, parse_database_address
from knowgate.core.redaction import redact_urls
from knowgate.core.validation import check_integer, expand_path, format_value
from knowgate.errors import BadSetting


def parse_path(text: str) -> Path:
    """Parse a path. An empty one, as from an unset shell variable, would mean the current folder."""
    if not text.strip():
        raise BadSetting("a path on the command line is empty. Name a folder or file ('.' is this folder).")
    return expand_path(text)


def parse_log_location(text: str) -> Path | DatabaseAddress:
    """Parse the location of a log: a path, or the address of a database."""
    return parse_database_address(text) if is_postgres_address(text) else parse_path(text)


def parse_integers(option: str, text: str, *, minimum: int = 0) -> list[int]:
    """Parse integers separated by commas, such as '1,3'."""
    try:
        numbers = [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        numbers = []
    if not numbers:
        raise BadSetting(f"{option} is {format_value(text)}. Give whole numbers separated by commas, such as 1,3.")
    return [check_integer(number, f"a number of {option}", minimum=minimum) for number in numbers]


def format_command_line() -> str:
    """Return the current command line for a model card: folders without their location, no logins or keys."""
    words = [Path(word).name if Path(word).is_absolute() else redact_urls(word) for word in sys.argv[1:]]
    return shlex.join(["knowgate", *(word for word in words if word != "--debug")])


LabelsOption = Annotated[
    list[Path], typer.Option("--labels", parser=parse_path, metavar="RUN", help="Label run; may be repeated.")
]
PreferencesOption = Annotated[
    list[Path], typer.Option("--pref", parser=parse_path, metavar="PREF", help="Preference folder; may be repeated.")
]
LimitOption = Annotated[int | None, typer.Option("--limit", min=1, help="Use only the first questions, this many.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of splits, samples and training.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]
GatesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--gates", help="Gate specs and folders, separated by commas. Default: auto, all that the rows allow."
    ),
]
PlugInOption = Annotated[bool, typer.Option("--plug-in", help="Allow gates that were fitted on another LLM.")]
LangOption = Annotated[
    str | None, typer.Option("--lang", help="Force the prompt language: en or zh. Default: detected.")
]
PromptsOption = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        parser=parse_path,
        metavar="free|FILE",
        help="Wording: free (long answers), or your own TOML file.",
    ),
]
