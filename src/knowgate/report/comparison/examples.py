"""Decisions to look at: skips that were right and wrong, searches that saved an answer and that spoiled one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from knowgate.evaluation import Evaluation
from knowgate.markup import escape
from knowgate.report import markup
from knowgate.report.comparison.policy import Policy
from knowgate.report.question import question
from knowgate.statistics import Bools

EACH = 5  # of four kinds


@dataclass(frozen=True)
class Kind:
    """Decisions of one kind: which questions, how many, and whether those of least need are shown or of most."""

    title: str
    look: str
    rows: Bools
    by_least: bool


def kinds(evaluation: Evaluation, policy: Policy) -> list[Kind]:
    closed, opened, skips = evaluation.trial.closed_right, evaluation.trial.always_right, policy.skips
    return [
        Kind("Good skips: right without a search", "right", skips & closed, by_least=True),
        Kind("Bad skips: only a search would have been right", "wrong", skips & opened & ~closed, by_least=True),
        Kind("Saved by retrieval: wrong without it", "right", ~skips & opened & ~closed, by_least=False),
        Kind("Harmed by retrieval: right without it", "wrong", ~skips & closed & ~opened, by_least=False),
    ]


def example_parts(evaluation: Evaluation, policy: Policy) -> Iterator[str]:
    """Up to twenty questions, five of a kind, those the gate was surest of."""
    n = len(policy.skips)
    for kind in kinds(evaluation, policy):
        count = int(kind.rows.sum())
        yield f"<h3>{escape(kind.title)} ({count} of {n})</h3>"
        order = np.argsort(policy.gate.needs if kind.by_least else -policy.gate.needs, kind="stable")
        chosen = [int(row) for row in order if kind.rows[row]][:EACH]
        yield from (_example(evaluation, policy, row, kind) for row in chosen)
        if not chosen:
            yield markup.remark("None.")


def _example(evaluation: Evaluation, policy: Policy, number: int, kind: Kind) -> str:
    row, need = evaluation.trial.rows[number], float(policy.gate.needs[number])
    mark = f'<span class="change {"helped" if kind.look == "right" else "harmed"}">{need:.2f}</span>'
    return question(row, mark, f"need {need:.3f}, {'skipped' if policy.skips[number] else 'retrieved for'}")
