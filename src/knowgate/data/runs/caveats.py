"""What whoever reads figures must know about the questions behind them: who wrote them, and what "right" means.

Counts and words only; where they are shown is up to the tables, pages and cards.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from knowgate.stats.metrics import BoolArray

log = logging.getLogger(__name__)
AGREEMENT_GRADER = "agreement"  # the grader of runs without gold answers


class CaveatRow(Protocol):
    """What is looked at of a row."""

    @property
    def grader(self) -> str: ...
    @property
    def is_synthetic(self) -> bool: ...


class CaveatColumns(Protocol):
    """The same of many rows: agreed where there was no gold answer."""

    @property
    def synthetic(self) -> BoolArray: ...
    @property
    def agreed(self) -> BoolArray: ...


def count_synthetic(rows: Sequence[CaveatRow]) -> int:
    return sum(row.is_synthetic for row in rows)


def list_caveats(rows: Sequence[CaveatRow]) -> list[str]:
    """One sentence or two each; none for real questions with gold answers."""
    return _cautions(count_synthetic(rows), sum(row.grader == AGREEMENT_GRADER for row in rows), len(rows))


def list_column_caveats(columns: CaveatColumns) -> list[str]:
    """The same of rows that are in columns."""
    return _cautions(int(columns.synthetic.sum()), int(columns.agreed.sum()), len(columns.synthetic))


def _cautions(synthetic: int, agreed: int, total: int) -> list[str]:
    found = [describe_synthetic(synthetic, total)]
    if agreed:
        found.append(
            f"No gold answers: for {_of(agreed, total)} an answer counts as right where it says the same as "
            "the one with passages. Accuracy is agreement here, and always retrieving is right by definition."
        )
    return [words for words in found if words]


def describe_synthetic(count: int, total: int) -> str:
    """'' where people asked all of them."""
    if not count:
        return ""
    mixed = "" if count == total else f", mixed with {total - count} real ones: no figure is of one kind"
    return (
        f"Synthetic: an LLM wrote {_of(count, total)} from the documents{mixed}. People ask otherwise; prove it on "
        "real questions before you rely on it."
    )


def _of(count: int, total: int) -> str:
    if count < total:
        return f"{count} of the {total} questions"
    return f"all {total} questions" if total > 1 else "the one question"


def warn_if_mixed(synthetic: int, total: int) -> None:
    """Synthetic questions are never taken together with real ones in silence."""
    if 0 < synthetic < total:
        log.warning(describe_synthetic(synthetic, total))
