"""Characters that steer a terminal or hide text, made visible. Knows nothing of where a text is shown.

A model's answer, a passage or a server's error may hold escape sequences that colour, overwrite or link, and signs
that turn the direction of writing: each such character is shown as the escape it is written with in a program
(`\\x1b`, `\\u202e`). Character by character, so a sequence that comes in two pieces is as harmless as a whole one.
"""

from __future__ import annotations

import re

# Cc, Cf, Zl, Zp and halves of characters; but for what joins letters and emoji (U+200C, U+200D) and the soft hyphen
STEERING = re.compile(
    "[\x00-\x1f\x7f-\x9f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b\u200e\u200f\u2028-\u202e"
    "\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f]"
)


def harmless(text: str, keep: str = "\n\t") -> str:
    """The text with every character that could steer a terminal shown as an escape, but for those to keep."""
    return STEERING.sub(lambda found: found[0] if found[0] in keep else _escaped(found[0]), text)


def one_harmless_line(text: str) -> str:
    """The same on one line, its white space single."""
    return harmless(" ".join(text.split()), keep="")


def harmless_json(text: str) -> str:
    """JSON that means the same and can be shown on a terminal: such characters stand in its strings only."""
    return STEERING.sub(lambda found: _units(found[0]), text)


def markdown_text(text: str) -> str:
    """One line of Markdown that shows the text: it ends no cell of a table, is no HTML, no link and no picture."""
    line = one_harmless_line(text).replace("|", "/").replace("](", "]\\(")
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", line)


def markdown_code(text: str) -> str:
    """One line for a block of code, which it cannot end."""
    return re.sub("`{3,}", "``", one_harmless_line(text))


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def _units(char: str) -> str:
    """As JSON writes a character: beyond U+FFFF in two halves."""
    data = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{data[place : place + 2].hex()}" for place in range(0, len(data), 2))
