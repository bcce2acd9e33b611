"""Tables and numbers as text, and text that is safe to show on terminals and in Markdown.

Model answers, passages and server errors may contain escape sequences that color, overwrite or link text, and
characters that reverse its direction. Each such character is shown as an escape (`\\x1b`, `\\u202e`). That happens
character by character, so a sequence that arrives in two pieces is harmless too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")
NOT_DEFINED = "not defined"
MISSING_VALUE = "–"
UNKNOWN_AMOUNT = "unknown"  # shown for an amount that was not recorded
# Control, format and line-separator characters (Unicode categories Cc, Cf, Zl, Zp) and surrogates. Joiners (U+200C,
# U+200D) and the soft hyphen are allowed, because ordinary text contains them.
CONTROL_CHARACTERS = re.compile(
    "[\x00-\x1f\x7f-\x9f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b\u200e\u200f\u2028-\u202e"
    "\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f]"
)


def sanitize_text(text: str, keep: str = "\n\t") -> str:
    """Escape every character that could control a terminal, except those in `keep`."""
    return CONTROL_CHARACTERS.sub(lambda match: match[0] if match[0] in keep else _escape(match[0]), text)


def sanitize_line(text: str) -> str:
    """Put text on one line: collapse white space and escape control characters."""
    return sanitize_text(" ".join(text.split()), keep="")


def sanitize_json(text: str) -> str:
    """Escape control characters in JSON text. The result still parses to the same value."""
    return CONTROL_CHARACTERS.sub(lambda match: _escape_json(match[0]), text)


def escape_markdown(text: str) -> str:
    r"""Convert text to one safe line of Markdown.

    Example: '<b>a | b</b> [c](d)' becomes '&lt;b>a / b&lt;/b> [c]\(d)'.
    """
    line = sanitize_line(text).replace("|", "/").replace("](", "]\\(")
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", line)  # only a "<" that begins a tag


def escape_markdown_code(text: str) -> str:
    """Convert text to one line that cannot end a Markdown code block."""
    return re.sub("`{3,}", "``", sanitize_line(text))


def _escape(char: str) -> str:
    """Return the escape of a character as in Python source, such as \\x1b."""
    return char.encode("unicode_escape").decode("ascii")


def _escape_json(char: str) -> str:
    r"""Return the JSON escape of a character, such as \u202e. Characters beyond U+FFFF become two escapes."""
    digits = char.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{digits[start : start + 4]}" for start in range(0, len(digits), 4))


@dataclass(frozen=True)
class TextTable:
    """Table of text cells. The last cell of a short row spans the remaining columns."""

    title: str  # empty for none
    columns: tuple[str, ...]  # titles of the columns
    rows: tuple[tuple[str, ...], ...]  # cells of each row

    @classmethod
    def build(cls, title: str, items: Iterable[Item], columns: Mapping[str, Callable[[Item], str]]) -> TextTable:
        """Build a table with a row for each item.

        Args:
            title: The title of the table.
            items: The items.
            columns: Title of a column -> function from an item to the text of its cell.
        """
        rows = [tuple(make_cell(item) for make_cell in columns.values()) for item in items]
        return cls(title, tuple(columns), tuple(rows))

    def text(self) -> str:
        """Render the table in aligned columns, for a terminal or a log."""
        lines = [list(map(sanitize_line, line)) for line in (self.columns, *self.rows)]
        # The last cell of a shorter row spans several columns, so it must not widen one of them.
        complete = [line for line in lines if len(line) == len(self.columns)]
        widths = [max(map(len, column)) for column in zip(*complete, strict=True)]
        padded = []
        for line in lines:
            cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
            padded.append("  ".join(cells).rstrip())
        return "\n".join(padded)

    def markdown(self) -> str:
        """Render the table as Markdown with its title as a heading."""
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        table = "\n".join(f"| {' | '.join(map(escape_markdown, line))} |" for line in lines)
        return f"### {escape_markdown(self.title)}\n\n{table}\n"

    def html(self) -> str:
        """Render the table as HTML, with all cells escaped."""
        from knowgate.types.markup import render_html_table

        return render_html_table(self.columns, self.rows, self.title)


def render_markdown_tables(tables: Sequence[TextTable]) -> str:
    """Render several tables as one Markdown text."""
    return "\n".join(table.markdown() for table in tables)


def format_percent(value: float | None) -> str:
    """Format a share from 0 to 1 as '52.0 %', or as a dash if it is None."""
    return MISSING_VALUE if value is None else f"{round(100 * value, 1) or 0.0:.1f} %"  # `or` avoids a negative zero


def format_points(value: float) -> str:
    """Format a difference of two shares in percentage points, as '+1.2'. Zero has no sign."""
    rounded = round(100 * value, 1)
    return f"{rounded:+.1f}" if rounded else "0.0"


def format_number(value: float | None, missing: str = MISSING_VALUE) -> str:
    """Format a number with two decimals, or as `missing` if it is None."""
    return missing if value is None else f"{round(value, 2) or 0.0:.2f}"  # `or` avoids a negative zero
