"""Caveats that readers of a result must know: who wrote the questions, and what counts as right."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

log = logging.getLogger(__name__)
AGREEMENT_GRADER = "agreement"  # grader of runs without gold answers


class CaveatRow(Protocol):
    """A row with its grader and whether an LLM wrote its question."""

    @property
    def grader(self) -> str: ...
    @property
    def is_synthetic(self) -> bool: ...


def count_synthetic(rows: Sequence[CaveatRow]) -> int:
    """Count the questions that an LLM wrote."""
    return sum(row.is_synthetic for row in rows)


def list_caveats(rows: Sequence[CaveatRow]) -> list[str]:
    """List the caveats of rows; empty for real questions with gold answers."""
    n_agreement = sum(row.grader == AGREEMENT_GRADER for row in rows)
    return describe_caveats(count_synthetic(rows), n_agreement, len(rows))


def describe_caveats(n_synthetic: int, n_agreement: int, total: int) -> list[str]:
    """List the caveats for a number of synthetic questions and of questions graded by agreement."""
    caveats = [describe_synthetic(n_synthetic, total)] if n_synthetic else []
    if n_agreement:
        caveats.append(
            f"No gold answers: for {_describe_count(n_agreement, total)} an answer counts as right if it equals the "
            "open-book answer. Accuracy means agreement here, and always retrieving is right by definition."
        )
    return caveats


def describe_synthetic(n_synthetic: int, total: int) -> str:
    """Describe how many questions are synthetic; "" if none is."""
    if not n_synthetic:
        return ""
    mixed = "" if n_synthetic == total else f", mixed with {total - n_synthetic} real ones: every result covers both"
    return (
        f"Synthetic: an LLM wrote {_describe_count(n_synthetic, total)} from the documents{mixed}. People ask other "
        "questions; check the results on real questions before you rely on them."
    )


def warn_if_mixed(n_synthetic: int, total: int) -> None:
    """Log a warning if synthetic and real questions are used together."""
    if 0 < n_synthetic < total:
        log.warning(describe_synthetic(n_synthetic, total))


def _describe_count(count: int, total: int) -> str:
    if count < total:
        return f"{count} of the {total} questions"
    return f"all {total} questions" if total > 1 else "the one question"
