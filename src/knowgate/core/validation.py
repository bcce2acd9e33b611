"""The doors for what comes from outside: files, JSON, TOML, numbers. What passes is whole, finite and of known size.

Every refusal is a sentence that names the source (`where`: a file, a line of it, a server's reply). Knows nothing of
what the values mean: the records they become are checked where they are made.
"""

from __future__ import annotations

import functools
import json
import math
import numbers
import re
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from knowgate.errors import BadInput, BadSetting

MAX_TEXT_BYTES = 256 << 20  # a file read in one piece: more than any manifest, table or document we know of
MAX_COUNT = 1_000_000_000  # the most of anything that can be asked for
MAX_DEPTH = 64  # of nested lists and objects; our own files need 6
MAX_DIGITS = 300  # of a whole number: one that a float can hold, which ends at 309
SURROGATES = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")  # what a half character needs to come in


def check_regular_file(path: Path) -> None:
    """Refuse what is no ordinary file: a pipe waits for ever, a device never ends."""
    try:
        mode = path.stat().st_mode
    except ValueError:  # NUL in the name
        raise BadInput(f"{str(path)!r} is not a file name.") from None
    if stat.S_ISDIR(mode):
        raise BadInput(f"'{path}' is a folder, not a file. Name a file in it.")
    if not stat.S_ISREG(mode):
        raise BadInput(f"'{path}' is not an ordinary file (a pipe or a device); save its content to a file first.")


def read_text(path: Path, *, most: int = MAX_TEXT_BYTES) -> str:
    """A whole UTF-8 file of at most `most` bytes, without its byte order mark."""
    check_regular_file(path)
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise BadInput(f"{path} is larger than {most:,} bytes, which is more than is read in one piece.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{path} is not a UTF-8 text file: byte {error.start} is part of no character. Save it as UTF-8."
        ) from None


def read_json(path: Path) -> Any:
    """A JSON file."""
    return parse_json(read_text(path), str(path))


def parse_json(text: str, where: str, *, halves: bool = False) -> Any:
    """JSON as its standard has it: no NaN, no numbers beyond a float, no half characters, no endless nesting.

    halves: let half characters pass, for a caller who replaces them.
    """
    try:
        value = _decoder().decode(text)
    except json.JSONDecodeError as error:
        place = f"{error.msg} at character {error.colno}" + (f" of line {error.lineno}" if error.lineno > 1 else "")
        raise BadInput(f"{where} is not valid JSON: {place}.") from None
    except RecursionError:
        raise _too_deep(where) from None
    except ValueError as error:
        raise BadInput(f"{where} is not valid JSON: {error}.") from None
    if _may_hold_halves(text) or text.count("[") + text.count("{") > MAX_DEPTH:  # most rows need no second look
        check_parsed_value(value, where, halves=halves)
    return value


def parse_toml(text: str, where: str) -> dict[str, Any]:
    try:
        value = tomllib.loads(text)
    except RecursionError:
        raise _too_deep(where) from None
    except ValueError as error:  # TOMLDecodeError is one
        raise BadInput(f"{where} is not valid TOML: {error}.") from None
    check_parsed_value(value, where)
    return value


def check_parsed_value(value: Any, where: str, *, halves: bool = False) -> None:
    """Refuse half characters and endless nesting in what was parsed; without recursion, which they would break."""
    level = [value]
    for _ in range(MAX_DEPTH):
        for text in (one for one in level if isinstance(one, str) and not halves):
            check_encodable(text, where)
        level = list(_inside(level))
        if not level:
            return
    raise _too_deep(where)


def format_value(value: object, most: int = 80) -> str:
    """A value in a sentence: its beginning, where it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= most else f"{text[:most]}..."


def check_encodable(text: str, where: str) -> None:
    """Refuse half a character (a lone surrogate), which no file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise BadInput(f"{where} holds half a character ({half} without its other half); mend or remove it.") from None


def check_integer(value: Any, name: str, *, least: int = 1, most: int = MAX_COUNT) -> int:
    """A whole number within bounds, as an option or argument gives it: not NaN, not 2.5, not 10**400."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not least <= int(value) <= most:
        raise BadSetting(
            f"{name} is {format_value(value)}; it must be at least {least} and at most {most:,}, and whole."
        )
    return int(value)


def check_seed(value: Any) -> int:
    """What every generator of random numbers takes."""
    return check_integer(value, "the seed", least=0, most=2**32 - 1)


def check_number(value: Any, name: str, *, least: float = 0, most: float = 1) -> float:
    """A number within bounds, 0 to 1 where nothing else is said; NaN is none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not bool(least <= value <= most):  # type: ignore[operator]
        raise BadSetting(f"{name} is {format_value(value)}; it must be between {least:g} and {most:g}.")
    return float(value)


def expand_path(text: str | Path) -> Path:
    """A path as people write it, '~' for their home; refused where it can be none."""
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        raise BadSetting(f"{format_value(str(text))}: there is no such home folder; write the path in full.") from None
    if "\0" in str(path):
        raise BadSetting(f"{format_value(str(path))} is not a path: it holds the character NUL.")
    return path


def _inside(values: list[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, dict):
            yield from value
            yield from value.values()
        elif isinstance(value, list):
            yield from value


def _too_deep(where: str) -> BadInput:
    return BadInput(f"{where} is nested more than {MAX_DEPTH} deep, which is more than is read.")


@functools.cache
def _decoder() -> json.JSONDecoder:
    """Made once: `json.loads` would make one for every row."""
    return json.JSONDecoder(parse_constant=_no_number, parse_int=_whole_number, parse_float=_finite)


def _may_hold_halves(text: str) -> bool:
    return not (text.isascii() and "\\u" not in text) and SURROGATES.search(text) is not None


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON's")


def _whole_number(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits is more than is read")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits[:40]} is beyond what a computer's number can hold")
    return value
