"""Validation of external input: files, JSON, TOML and numbers.

In all functions, `where` is how an error names the source of a value, such as a file, a line or a server's response.
"""

from __future__ import annotations

import email.utils
import functools
import json
import math
import numbers
import re
import stat
import tomllib
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from knowgate.core import split_batches
from knowgate.core.redaction import redact_secrets
from knowgate.errors import BadInput, BadSetting

Item = TypeVar("Item")
MAX_TEXT_BYTES = 256 << 20  # maximum size of a file that is read into memory at once
MAX_COUNT = 1_000_000_000  # maximum of options that count something
MAX_DEPTH = 64  # maximum nesting of lists and objects
MAX_DIGITS = 300  # maximum length of an integer; a float holds up to 309 digits
MAX_SHOWN_CHARS = 80  # a value is cut to this length in an error message
JSON_SEPARATORS = (b",", b"[", b"{")
LIST_BRACKETS = bytes.maketrans(b"{}", b"[]")
NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))  # all other bytes
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
MAX_ENCODED_VALUES = 100_000  # values of JSON that are written at once
SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")  # in JSON, also of a pair, which stands for one character


def check_regular_file(path: Path) -> None:
    """Raise an error if a path is not a regular file. Reading a pipe could block forever."""
    try:
        mode = path.stat().st_mode
    except ValueError:  # the name contains NUL
        raise BadInput(f"the file name {str(path)!r} contains a NUL character. Remove it.") from None
    if stat.S_ISDIR(mode):
        raise BadInput(f"'{path}' is a folder, not a file. Name a file in the folder.")
    if not stat.S_ISREG(mode):
        raise BadInput(f"'{path}' is a pipe or a device, not a regular file. Save its content to a file first.")


def read_text(path: Path, *, maximum: int = MAX_TEXT_BYTES) -> str:
    """Read a UTF-8 file of at most `maximum` bytes, without its byte order mark."""
    check_regular_file(path)
    with path.open("rb") as file:
        data = file.read(maximum + 1)
    if len(data) > maximum:
        raise BadInput(f"{path} is too large: the maximum is {maximum:,} bytes. Split the file.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text: byte {error.start} is invalid. Save the file as UTF-8.") from None


def read_json(path: Path) -> Any:
    """Read a JSON file as strictly as `parse_json` parses a text."""
    return parse_json(read_text(path), str(path))


def parse_json(text: str, where: str, *, allow_surrogates: bool = False, replace_surrogates: bool = False) -> Any:
    """Parse JSON strictly. Values such as NaN, huge numbers and deep nesting raise BadInput.

    Args:
        text: The JSON text.
        where: How an error names the source.
        allow_surrogates: Accept lone surrogates. The caller must replace them, because UTF-8 cannot encode them.
        replace_surrogates: Accept lone surrogates and replace them by U+FFFD.
    """
    value = _decode(text, where)
    check_json_depth(text, where)
    surrogate = _find_lone_surrogate(text, value)
    if surrogate and not (allow_surrogates or replace_surrogates):
        raise _make_surrogate_error(surrogate, where)
    if surrogate and replace_surrogates:
        # json.dumps writes lone surrogates unescaped, so a substitution replaces those of all keys and values. It has short
        # parts, because other threads wait for each.
        parts = split_batches(json.dumps(value, ensure_ascii=False), 65_536)
        clean_text = "".join(LONE_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", part) for part in parts)
        value = _make_decoder().decode(clean_text)
    return value


def _decode(text: str, where: str) -> Any:
    """Parse JSON. Errors are raised as BadInput that names the source."""
    try:
        return _make_decoder().decode(text)
    except json.JSONDecodeError as error:
        line = f" of line {error.lineno}" if error.lineno > 1 else ""
        raise BadInput(
            f"{where} is not valid JSON: {error.msg} at character {error.colno}{line}. Correct it."
        ) from None
    except RecursionError:
        raise _make_depth_error(where) from None
    except ValueError as error:
        raise BadInput(f"{where} is not valid JSON: {error}. Correct it.") from None


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Parse TOML. Invalid or deeply nested text raises BadInput."""
    try:
        value = tomllib.loads(text)
    except RecursionError:
        raise _make_depth_error(where) from None
    except ValueError as error:
        raise BadInput(f"{where} is not valid TOML: {error}.") from None
    check_parsed_value(value, where)
    return value


def parse_retry_after(value: str) -> float | None:
    """Parse a Retry-After header into seconds, or None if invalid. The header has seconds or a date."""
    value = value.strip()
    if re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,12})?", value, re.ASCII):
        return float(value)
    try:
        date = email.utils.parsedate_to_datetime(value[:100])
        seconds = (date - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return max(0.0, seconds)


def check_json_depth(text: str, where: str) -> None:
    """Raise BadInput if valid JSON is nested too deep.

    Only the text is read, because a walk over a million values would take more than a second.
    """
    if text.count("[") + text.count("{") <= MAX_DEPTH:  # too few brackets
        return
    without_escapes = text.replace(r"\\", "").replace(r"\"", "")  # an escaped quote does not end a string
    outside_strings = "".join(without_escapes.split('"')[::2])  # every second part is between two quotes
    brackets = outside_strings.encode("ascii", "ignore").translate(LIST_BRACKETS, NO_BRACKETS)
    for _ in range(MAX_DEPTH):
        brackets = brackets.replace(b"[]", b"")  # the innermost level
    if brackets:
        raise _make_depth_error(where)


def count_json_values(text: bytes, limit: int, separators: tuple[bytes, ...] = JSON_SEPARATORS) -> int:
    """Estimate the number of values in a JSON text without parsing it, by its commas and opening brackets.

    Each item of an array and each field of an object follows one of them. If there are too many, those inside strings
    are left out.

    Args:
        text: The JSON text.
        limit: Number of values that is too many.
        separators: What is counted. Brackets alone give the number of objects and arrays.
    """
    count = sum(map(text.count, separators))
    if count <= limit:
        return count
    text = text.replace(rb"\\", b"").replace(rb"\"", b"")  # escaped quotes do not end a string
    string_count = text.count(b'"') // 2
    if string_count > 2 * limit:  # too many even if every second string is a key rather than a value
        return string_count // 2
    outside_strings = b" ".join(text.split(b'"')[::2])  # every second part is between two quotes
    return sum(map(outside_strings.count, separators))


def check_parsed_value(value: Any, where: str) -> None:
    """Raise BadInput if a parsed value is nested too deep or has lone surrogates. These are halves of characters."""
    level = [value]
    for _ in range(MAX_DEPTH):
        for item in level:
            if isinstance(item, str):
                check_encodable(item, where)
        level = list(_iter_children(level))
        if not level:
            return
    raise _make_depth_error(where)


def format_value(value: object) -> str:
    """Return a short repr of a value for an error message, without secrets."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        return "a number of thousands of digits"
    text = redact_secrets(text)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


def check_unique_ids(items: Iterable[Item], kind: str, source: object) -> Iterator[Item]:
    """Yield questions or documents unchanged. A repeated id raises BadInput.

    Args:
        items: Objects with an attribute `id`.
        kind: What an item is, for the error: "question" or "document".
        source: Where the items come from, for the error.
    """
    ids: set[str] = set()
    for item in items:
        id: str = getattr(item, "id")  # noqa: B009 - items have no common type
        if id in ids:
            raise BadInput(f"two {kind}s of {source} have the same id {format_value(id)}. Give each {kind} its own id.")
        ids.add(id)
        yield item


def check_encodable(text: str, where: str) -> None:
    """Raise BadInput if a text contains a lone surrogate. UTF-8 cannot encode it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _make_surrogate_error(f"\\u{ord(text[error.start]):04x}", where) from None


def check_integer(value: Any, name: str, *, minimum: int = 1, maximum: int = MAX_COUNT) -> int:
    """Return the value as an int if it is an integer within bounds.

    Raises:
        BadSetting: The value is out of bounds or not an integer; floats and booleans are rejected, too.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise BadSetting(f"{_format_setting(name, value)}: it must be a whole number.")
    if not minimum <= int(value) <= maximum:
        raise BadSetting(f"{_format_setting(name, value)}: it must be at least {minimum} and at most {maximum:,}.")
    return int(value)


def check_seed(value: Any) -> int:
    """Return the value if it is a seed that all random generators accept: an integer from 0 to 2^32 - 1."""
    return check_integer(value, "the seed", minimum=0, maximum=2**32 - 1)


def check_number(value: Any, name: str, *, maximum: float = 1) -> float:
    """Return the value as a float, after checking that it is between 0 and `maximum`.

    Raises:
        BadSetting: The value is out of bounds, NaN, or not a number; booleans are rejected, too.
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    # The value is compared before it is converted, because a huge integer does not fit into a float.
    if not is_number or not 0 <= value <= maximum:
        raise BadSetting(f"{_format_setting(name, value)}: it must be between 0 and {maximum:g}.")
    return float(value)


def _format_setting(name: str, value: Any) -> str:
    """Return the beginning of the error for a wrong setting.

    Example: 'samples=0 is not allowed', or 'the window is 0'.
    """
    return f"{name}={format_value(value)} is not allowed" if name.isidentifier() else f"{name} is {format_value(value)}"


def expand_path(text: str | Path) -> Path:
    """Convert a text to a path. A leading '~' becomes the home folder."""
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        raise BadSetting(f"the home folder in {format_value(str(text))} does not exist. Write the full path.") from None
    if "\0" in str(path):
        raise BadSetting(f"the path {format_value(str(path))} contains a NUL character. Remove it.")
    return path


def _iter_children(values: list[Any]) -> Iterator[Any]:
    """Yield all keys and values of dicts, and all items of lists."""
    for value in values:
        if isinstance(value, dict):
            yield from value
            yield from value.values()
        elif isinstance(value, list):
            yield from value


def _make_depth_error(where: str) -> BadInput:
    return BadInput(
        f"{where} is nested more than {MAX_DEPTH} levels deep, which is not allowed. Use fewer nested lists and objects."
    )


@functools.cache
def _make_decoder() -> json.JSONDecoder:
    """Return the strict JSON decoder. All calls share it."""
    return json.JSONDecoder(
        parse_constant=_reject_constant, parse_int=_parse_int, parse_float=_parse_float, object_hook=keep_object
    )


def keep_object(value: dict[str, Any]) -> dict[str, Any]:
    """Return a parsed JSON object unchanged. As `object_hook` of a decoder, it lets other threads run."""
    return value


def _make_surrogate_error(code: str, where: str) -> BadInput:
    return BadInput(f"{where} contains invalid Unicode (the lone surrogate {code}). Remove it.")


def _find_lone_surrogate(text: str, value: Any) -> str:
    """Return a lone surrogate in a JSON text or in the value parsed from it, such as "\\ud800", or ""."""
    parsed_text = ""
    if SURROGATE_ESCAPE.search(text):
        encoder = json.JSONEncoder(ensure_ascii=False)
        # Other threads wait for `encode`, but only once for each value that `iterencode` writes.
        is_long = text.count(",") > MAX_ENCODED_VALUES
        parsed_text = "".join(encoder.iterencode(value)) if is_long else encoder.encode(value)
    try:
        for part in (text, parsed_text):
            if not part.isascii():
                part.encode()  # faster than a search for surrogates, during which other threads wait
    except UnicodeEncodeError as error:
        return f"\\u{ord(part[error.start]):04x}"
    return ""


def _reject_constant(name: str) -> NoReturn:
    """Reject NaN and Infinity, which JSON does not allow."""
    raise ValueError(f"{name} is not a JSON number")


def _parse_int(digits: str) -> int:
    """Parse an integer; raise ValueError if it has more than MAX_DIGITS digits."""
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits, but at most {MAX_DIGITS} are allowed")
    return int(digits)


def _parse_float(digits: str) -> float:
    """Parse a float. A too large number raises ValueError."""
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits[:40]} is too large for a float")
    return value
