"""A table as plain cells, and how numbers look in one. Knows nothing of what the cells mean."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from knowgate.stats.bootstrap import Estimate
from knowgate.stats.proportions import Proportion
from knowgate.types.markup import render_html_table

# Cc, Cf, Zl, Zp and halves of characters; but for what joins letters and emoji (U+200C, U+200D) and the soft hyphen
CONTROL_CHARACTERS = re.compile(
    "[\x00-\x1f\x7f-\x9f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b\u200e\u200f\u2028-\u202e"
    "\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f]"
)


def sanitize_text(text: str, keep: str = "\n\t") -> str:
    """The text with every character that could steer a terminal shown as an escape, but for those to keep."""
    return CONTROL_CHARACTERS.sub(lambda found: found[0] if found[0] in keep else _escaped(found[0]), text)


def sanitize_line(text: str) -> str:
    """The same on one line, its white space single."""
    return sanitize_text(" ".join(text.split()), keep="")


def sanitize_json(text: str) -> str:
    """JSON that means the same and can be shown on a terminal: such characters stand in its strings only."""
    return CONTROL_CHARACTERS.sub(lambda found: _units(found[0]), text)


def escape_markdown(text: str) -> str:
    """One line of Markdown that shows the text: it ends no cell of a table, is no HTML, no link and no picture."""
    line = sanitize_line(text).replace("|", "/").replace("](", "]\\(")
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", line)


def escape_markdown_code(text: str) -> str:
    """One line for a block of code, which it cannot end."""
    return re.sub("`{3,}", "``", sanitize_line(text))


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def _units(char: str) -> str:
    """As JSON writes a character: beyond U+FFFF in two halves."""
    data = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{data[place : place + 2].hex()}" for place in range(0, len(data), 2))


NOT_DEFINED = "not defined"
MISSING_VALUE = "–"


@dataclass(frozen=True)
class TextTable:
    """A table. A row shorter than the columns is a remark that fills the rest of the line."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def text(self) -> str:
        """The cells under each other, for a terminal or a log; what could steer a terminal is shown as an escape."""
        lines = [[sanitize_line(cell) for cell in line] for line in (self.columns, *self.rows)]
        whole = [line for line in lines if len(line) == len(self.columns)]
        widths = [max(len(line[place]) for line in whole) for place in range(len(self.columns))]
        padded = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)) for line in lines]
        return "\n".join(line.rstrip() for line in padded)

    def markdown(self) -> str:
        """The table for a Markdown file, with its title above."""
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        table = "\n".join(f"| {' | '.join(map(escape_markdown, line))} |" for line in lines)
        return f"### {escape_markdown(self.title)}\n\n{table}\n"

    def html(self) -> str:
        """The table for a page or a notebook; every cell is a text."""
        return render_html_table(self.columns, self.rows, self.title)


def format_percent(value: float | None) -> str:
    return MISSING_VALUE if value is None else f"{100 * value:.1f} %"


def format_points(value: float) -> str:
    """A difference of two shares, in percentage points; what rounds to nothing has no sign."""
    rounded = round(100 * value, 1)
    return f"{rounded:+.1f}" if rounded else "0.0"


def format_number(value: float | None, missing: str = MISSING_VALUE) -> str:
    return missing if value is None else f"{round(value, 2) or 0.0:.2f}"  # no negative zero


def format_proportion(found: Proportion, missing: str = MISSING_VALUE) -> str:
    if found.value is None or found.low is None or found.high is None:
        return missing
    return f"{format_percent(found.value)} [{100 * found.low:.1f}, {100 * found.high:.1f}], n = {found.n}"


def render_markdown_tables(sheets: Sequence[TextTable]) -> str:
    """Tables for a Markdown file."""
    return "\n".join(sheet.markdown() for sheet in sheets)


def format_percent_estimate(value: Estimate) -> str:
    """A share and its 95 % interval."""
    if value.value is None:
        return MISSING_VALUE
    if value.low is None or value.high is None:
        return format_percent(value.value)
    return f"{format_percent(value.value)} [{100 * value.low:.1f}, {100 * value.high:.1f}]"


def format_points_estimate(value: Estimate) -> str:
    """A difference of two shares and its 95 % interval, in percentage points."""
    if value.value is None:
        return MISSING_VALUE
    if value.low is None or value.high is None:
        return format_points(value.value)
    return f"{format_points(value.value)} [{100 * value.low:+.1f}, {100 * value.high:+.1f}]"
