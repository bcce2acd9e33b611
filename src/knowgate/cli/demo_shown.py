"""The demo on a terminal of 80 columns: rows that grow while they are answered, a table, sentences. Computes nothing.

Lines are broken between words, never inside one; what is not known in advance (answers) may take several lines.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from knowgate.cli.demo_traffic import ALWAYS, GATED, NEVER, WAYS, Outcome, Outcomes, Total
from knowgate.display import one_harmless_line
from knowgate.types import Decision, Question

WIDTH, INDENT = 80, 2
MESSAGE, MARK, NAME = 40, 7, 16  # columns of a message, a mark, and of what stands before a wrapped text
MARKS = {True: ("right", "green"), False: ("wrong", "red"), None: ("-", "dim")}
BOTH_WAYS = {NEVER: "from memory", ALWAYS: "after a search"}
SLOWER = "Gated took longer than always here: a search was cheaper than the draft that decides. Try --search-seconds 1."


@dataclass(frozen=True)
class Page:
    """Where the demo is told."""

    console: Console

    @property
    def block(self) -> str:
        """What bars are made of."""
        return "#" if self.console.options.ascii_only else "█"

    def title(self, text: str) -> None:
        self.console.print()
        self.console.print(Text(text, "bold"))

    def say(self, text: str, name: str = "", style: str = "") -> None:
        """A text within the columns; name: stands before it, in a column of its own."""
        before = " " * INDENT + (f"{name:{NAME}}" if name else "")
        rest = " " * len(before)
        for line in textwrap.wrap(one_harmless_line(text), WIDTH, initial_indent=before, subsequent_indent=rest):
            self.console.print(Text(line, style))

    # --- one question, two ways ---------------------------------------------------------------------

    def say_both(self, question: Question, outcomes: Outcomes) -> None:
        self.say(question.text, style="bold")
        for way, name in BOTH_WAYS.items():
            mark, style = MARKS[outcomes[way].is_right]
            self.say(f"{outcomes[way].answer.text} ({mark})", name, style)
        decision = outcomes[GATED].answer.decision
        self.say(f"{_verdict(decision)}: {decision.reason}", "the gate says")

    # --- row by row -------------------------------------------------------------------------------

    def head(self) -> None:
        self.console.print(Text(f"{_row('message', WAYS)}the gate", "dim"))

    def begin(self, message: Question) -> None:
        *lines, last = textwrap.wrap(one_harmless_line(message.text), MESSAGE - 1) or [""]
        for line in lines:
            self.console.print(Text(f"{'':{INDENT}}{line}"))
        self.console.print(Text(f"{'':{INDENT}}{last:{MESSAGE}}"), end="")

    def mark(self, outcome: Outcome) -> None:
        words, style = MARKS[outcome.is_right]
        self.console.print(Text(f"{words:{MARK}}", style), end="")

    def finish(self, outcomes: Outcomes) -> None:
        decision, question = outcomes[GATED].answer.decision, outcomes[GATED].answer.question
        said = (
            f"{_verdict(decision)}, {decision.rule}" if decision.rule else f"{_verdict(decision)}, {decision.need:.2f}"
        )
        self.console.print(Text(said, "yellow" if decision.retrieve else "green"))
        if "asked" in question.meta:
            self.say(f"understood as: {question.text}", style="dim")

    # --- in sum -----------------------------------------------------------------------------------

    def table(self, sums: Mapping[str, Total]) -> None:
        rows = {
            f"right answers, of {sums[GATED].graded}": [f"{sums[way].right}" for way in WAYS],
            "searches": [f"{sums[way].searches}" for way in WAYS],
            "tokens of passages and answers": [f"{sums[way].tokens:,}" for way in WAYS],
            "seconds": [f"{sums[way].seconds:.1f}" for way in WAYS],
        }
        self.console.print(Text(_row("in sum", WAYS).rstrip(), "dim"))
        for name, cells in rows.items():
            self.console.print(Text(_row(name, cells).rstrip(), "bold"))


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{'':{INDENT}}{name:{MESSAGE}}" + "".join(f"{cell:{MARK}}" for cell in cells)


def _verdict(decision: Decision) -> str:
    return "search" if decision.retrieve else "skip"


def verdict(sums: Mapping[str, Total]) -> str:
    """What to conclude, whichever way it went."""
    always, gated = sums[ALWAYS], sums[GATED]
    saved, change = always.searches - gated.searches, gated.right - always.right
    answers = "as many" if not change else f"{abs(change)} {'more' if change > 0 else 'fewer'}"
    said = f"The gate saved {saved} of {always.searches} searches, with {answers} right answers"
    if gated.seconds > always.seconds:
        return f"{said}. {SLOWER}"
    return f"{said}, in {gated.seconds:.0f} s instead of {always.seconds:.0f}."
