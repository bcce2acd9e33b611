"""Flags and settings that several commands share."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from knowgate.core.options import get_set_fields
from knowgate.core.postgres.address import DatabaseAddress, is_postgres_address, parse_database_address
from knowgate.core.redaction import redact_urls
from knowgate.core.validation import check_integer, expand_path, format_value
from knowgate.data.runs.folder import is_recorded_model, strip_model_prefix
from knowgate.data.runs.records import read_needs
from knowgate.errors import BadSetting
from knowgate.pipeline.settings import DecisionOptions, PipelineOptions, load_settings


def parse_path(text: str) -> Path:
    """Parse a path, and reject an empty one. An unset shell variable would otherwise mean the current folder."""
    if not text.strip():
        raise BadSetting("a path on the command line is empty. Name a folder or file; '.' means the current folder.")
    return expand_path(text)


def path_option(metavar: str, help_text: str, *flags: str) -> Any:
    """Declare an option that is a path. Without `flags`, its flag is the name of the parameter."""
    return typer.Option(*flags, parser=parse_path, metavar=metavar, help=help_text)


def path_argument(metavar: str, help_text: str) -> Any:
    """Declare an argument that is a path."""
    return typer.Argument(parser=parse_path, metavar=metavar, help=help_text)


def parse_log_location(text: str) -> Path | DatabaseAddress:
    """Parse the location of a log of questions: a path, or the address of a PostgreSQL database."""
    return parse_database_address(text) if is_postgres_address(text) else parse_path(text)


def parse_integers(option: str, text: str, *, minimum: int = 0) -> list[int]:
    """Parse integers separated by commas, such as '1,3'.

    Args:
        option: The flag, for error messages.
        text: The value of the flag.
        minimum: Smallest allowed integer.
    """
    try:
        numbers = [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        numbers = []
    if not numbers:
        raise BadSetting(f"{option} is {format_value(text)}. Give whole numbers separated by commas, such as 1,3.")
    return [check_integer(number, f"a number of {option}", minimum=minimum) for number in numbers]


def parse_thresholds(text: str) -> list[float]:
    """Parse thresholds from a range ('0.1..0.9', steps of 0.1) or a list ('0.25,0.5').

    Raises:
        BadSetting: The text is neither, or a threshold is outside 0 to 1.
    """
    try:
        values = _parse_range(text) if ".." in text else [float(part) for part in text.split(",")]
    except (ValueError, OverflowError):
        values = []
    if not values or not all(0 <= value <= 1 for value in values):
        raise BadSetting(
            f"--thresholds '{text}' is not valid. Give a range (0.1..0.9) or numbers from 0 to 1 (0.25,0.5)."
        )
    return values


def _parse_range(text: str) -> list[float]:
    """Parse a range such as '0.1..0.9' into numbers in steps of 0.1."""
    first, _, last = text.partition("..")
    first_tenth = round(float(first) * 10)
    last_tenth = round(float(last) * 10)
    return [tenth / 10 for tenth in range(first_tenth, last_tenth + 1)]


def format_command_line() -> str:
    """Return the current command line for a model card. Private parts of paths and URLs are removed."""
    words = [Path(word).name if Path(word).is_absolute() else redact_urls(word) for word in sys.argv[1:]]
    return shlex.join(["knowgate", *(word for word in words if word != "--debug")])


LabelsOption = Annotated[list[Path], path_option("RUN", "Label run (recorded answers). Repeatable.", "--labels")]
PreferencesOption = Annotated[
    list[Path], path_option("PREF", "Folder made by `knowgate prefer`. May be repeated.", "--pref")
]
LimitOption = Annotated[int | None, typer.Option("--limit", min=1, help="Use only the first N questions.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Random seed of splits, samples and training.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print results as JSON, one object per line.")]
GatesOption = Annotated[
    list[str] | None,
    typer.Option("--gates", help="Gates to compare, separated by commas. Default: all gates that can be used."),
]
LangOption = Annotated[str | None, typer.Option("--lang", help="Language of the prompts: en or zh. Default: detected.")]
PromptsOption = Annotated[
    Path | None,
    path_option("free|FILE", "Wording of the prompts: `free` (for long answers), or a TOML file.", "--prompts"),
]


NoRules = Annotated[bool, typer.Option("--no-rules", help="Turn off the routing rules, which decide before the gate.")]
ConfigFile = Annotated[
    Path | None, path_option("FILE", "Settings file. Default: knowgate.toml in this folder, if any.", "--config")
]


def load_command_settings(config: Path | None, options: DecisionOptions, no_rules: bool) -> PipelineOptions:
    """Combine the settings file with the flags of a command. Flags take precedence.

    Args:
        config: The settings file. Default: knowgate.toml in the current folder, if there is one.
        options: Options from the flags.
        no_rules: Whether `--no-rules` was typed.
    """
    if no_rules and "rules" in options.model_fields_set:
        raise BadSetting("--rules and --no-rules are mutually exclusive; use one.")
    rules = {"rules": "none"} if no_rules else {}
    return load_settings(config, **get_set_fields(options), **rules)


def split_gate_specs(values: Sequence[str] | None, runs: Sequence[Path] = ()) -> list[str]:
    """Split the values of `--gates` into gate specs. A comma separates two gates, unless an option (NAME=VALUE) follows.

    Example: ['flare,dhicl:k=5,words=1/2'] becomes ['flare', 'dhicl:k=5,words=1/2'].

    Args:
        values: Values of the flag; None means 'auto'.
        runs: Label runs whose recorded gates may have commas in their names.

    Raises:
        BadSetting: No gate is named.
    """
    values = values or ["auto"]
    has_comma = any("," in value for value in values)
    recorded = {record.gate for run in runs for record in read_needs(run)} if has_comma else set()
    specs: list[str] = []
    for value in values:
        for piece in _join_recorded_names(value.split(","), recorded):
            _add_spec_piece(specs, piece, recorded)
    if not specs:
        raise BadSetting("--gates names no gate. Leave --gates out to use every possible gate, or see: knowgate gates")
    return specs


def _add_spec_piece(specs: list[str], piece: str, recorded: Collection[str]) -> None:
    """Append a gate to the specs, or append an option to the last gate."""
    is_option = "=" in piece and ":" not in piece and piece not in recorded
    if specs and is_option:  # 'words=1/2' belongs to the gate before it
        specs[-1] += f",{piece}"
    elif piece.strip():
        specs.append(piece.strip())


def _join_recorded_names(pieces: Sequence[str], recorded: Collection[str]) -> Iterator[str]:
    """Join pieces of gate names with commas.

    With the gate 'fusion, cheap', the pieces 'fusion' and ' cheap' become 'fusion, cheap'.

    Args:
        pieces: Pieces of a text that was split at commas.
        recorded: Names of gates, which may contain commas.
    """
    start = 0
    while start < len(pieces):
        end = len(pieces)  # try the longest name first
        while end > start + 1 and ",".join(pieces[start:end]).strip() not in recorded:
            end -= 1
        yield ",".join(pieces[start:end])
        start = end


def suggest_ask_options(model: str) -> str:
    """Return options to add to a suggested `knowgate ask` command, "" for most models.

    For a model whose answers were imported, the user must fill in its server and the documents, which are unknown.
    """
    return f" --docs DIR --model openai:{strip_model_prefix(model)}@URL" if is_recorded_model(model) else ""
