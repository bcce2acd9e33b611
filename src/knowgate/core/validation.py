"""Validation of external input: files, JSON, TOML and numbers.

Errors name the source of a value (`where`: a file, a line of it, a server's response).
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

MAX_TEXT_BYTES = 256 << 20  # of a file that is read into memory at once
MAX_COUNT = 1_000_000_000
MAX_DEPTH = 64  # of nested lists and objects
MAX_DIGITS = 300  # of an integer; a float holds up to 309
SURROGATES = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")  # escaped in JSON, or as characters


def check_regular_file(path: Path) -> None:
    """Raise BadInput if a path is not a regular file. Pipes could block forever, and devices never end."""
    try:
        mode = path.stat().st_mode
    except ValueError:  # the name contains NUL
        raise BadInput(f"{str(path)!r} is not a file name.") from None
    if stat.S_ISDIR(mode):
        raise BadInput(f"'{path}' is a folder, not a file. Name a file in it.")
    if not stat.S_ISREG(mode):
        raise BadInput(f"'{path}' is not a regular file (a pipe or a device). Save its content to a file first.")


def read_text(path: Path, *, maximum: int = MAX_TEXT_BYTES) -> str:
    """Read a UTF-8 file of at most `maximum` bytes, without its byte order mark."""
    check_regular_file(path)
    with path.open("rb") as file:
        data = file.read(maximum + 1)
    if len(data) > maximum:
        raise BadInput(f"{path} is larger than {maximum:,} bytes, the largest file that is read. Split it.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text: byte {error.start} is invalid. Save it as UTF-8.") from None


def read_json(path: Path) -> Any:
    """Read a JSON file; see `parse_json`."""
    return parse_json(read_text(path), str(path))


def parse_json(text: str, where: str, *, allow_surrogates: bool = False) -> Any:
    """Parse JSON strictly: no NaN, no numbers beyond a float, no lone surrogates, limited nesting.

    Args:
        text: The JSON text.
        where: How an error names the source.
        allow_surrogates: Accept lone surrogates, for callers that replace them.
    """
    try:
        value = _make_decoder().decode(text)
    except json.JSONDecodeError as error:
        line = f" of line {error.lineno}" if error.lineno > 1 else ""
        raise BadInput(f"{where} is not valid JSON: {error.msg} at character {error.colno}{line}.") from None
    except RecursionError:
        raise _make_depth_error(where) from None
    except ValueError as error:
        raise BadInput(f"{where} is not valid JSON: {error}.") from None
    # Most texts are short and plain: they need no walk through the value.
    if _may_have_surrogates(text) or text.count("[") + text.count("{") > MAX_DEPTH:
        check_parsed_value(value, where, allow_surrogates=allow_surrogates)
    return value


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Parse TOML, with limited nesting."""
    try:
        value = tomllib.loads(text)
    except RecursionError:
        raise _make_depth_error(where) from None
    except ValueError as error:
        raise BadInput(f"{where} is not valid TOML: {error}.") from None
    check_parsed_value(value, where)
    return value


def check_parsed_value(value: Any, where: str, *, allow_surrogates: bool = False) -> None:
    """Raise BadInput for lone surrogates and for nesting that would break recursive code."""
    level = [value]
    for _ in range(MAX_DEPTH):
        if not allow_surrogates:
            for text in (item for item in level if isinstance(item, str)):
                check_encodable(text, where)
        level = list(_iter_children(level))
        if not level:
            return
    raise _make_depth_error(where)


def format_value(value: object, maximum: int = 80) -> str:
    """Format a value for a message, cut to `maximum` characters."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= maximum else f"{text[:maximum]}..."


def check_encodable(text: str, where: str) -> None:
    """Raise BadInput if a text contains a lone surrogate, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = f"\\u{ord(text[error.start]):04x}"
        raise BadInput(f"{where} contains half a character (the lone surrogate {code}). Repair or remove it.") from None


def check_integer(value: Any, name: str, *, minimum: int = 1, maximum: int = MAX_COUNT) -> int:
    """Return an integer within bounds; raise BadSetting for anything else, also for 2.5, NaN and True."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise BadSetting(f"{_format_setting(name, value)}: it must be a whole number.")
    if not minimum <= int(value) <= maximum:
        raise BadSetting(f"{_format_setting(name, value)}: it must be at least {minimum} and at most {maximum:,}.")
    return int(value)


def check_seed(value: Any) -> int:
    """Return a seed that every random generator accepts."""
    return check_integer(value, "the seed", minimum=0, maximum=2**32 - 1)


def check_number(value: Any, name: str, *, minimum: float = 0, maximum: float = 1) -> float:
    """Return a number within bounds, by default from 0 to 1; raise BadSetting for anything else."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not minimum <= value <= maximum:  # not as a float, which a huge integer would overflow
        raise BadSetting(f"{_format_setting(name, value)}: it must be between {minimum:g} and {maximum:g}.")
    return float(value)


def _format_setting(name: str, value: Any) -> str:
    """Name a wrong setting: as 'samples=0' if it is an argument, so that the command line can show its flag."""
    return f"{name}={format_value(value)} is not allowed" if name.isidentifier() else f"{name} is {format_value(value)}"


def expand_path(text: str | Path) -> Path:
    """Convert what a user wrote to a path, with '~' for the home folder."""
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        raise BadSetting(f"{format_value(str(text))}: there is no such home folder. Write the full path.") from None
    if "\0" in str(path):
        raise BadSetting(f"{format_value(str(path))} is not a path: it contains NUL. Remove the character.")
    return path


def _iter_children(values: list[Any]) -> Iterator[Any]:
    """Yield keys, values and items of all dicts and lists."""
    for value in values:
        if isinstance(value, dict):
            yield from value
            yield from value.values()
        elif isinstance(value, list):
            yield from value


def _make_depth_error(where: str) -> BadInput:
    return BadInput(f"{where} is nested more than {MAX_DEPTH} levels deep, the deepest that is read.")


@functools.cache
def _make_decoder() -> json.JSONDecoder:
    """Return the shared decoder: `json.loads` would make one per call."""
    return json.JSONDecoder(parse_constant=_reject_constant, parse_int=_parse_int, parse_float=_parse_float)


def _may_have_surrogates(text: str) -> bool:
    """Return whether JSON text may contain lone surrogates; a quick check."""
    return not (text.isascii() and "\\u" not in text) and SURROGATES.search(text) is not None


def _reject_constant(name: str) -> NoReturn:
    """Reject NaN and Infinity, which JSON does not allow."""
    raise ValueError(f"{name} is not a JSON number")


def _parse_int(digits: str) -> int:
    """Parse an integer of bounded length."""
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits is too long")
    return int(digits)


def _parse_float(digits: str) -> float:
    """Parse a float and reject infinities."""
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits[:40]} is too large for a float")
    return value
