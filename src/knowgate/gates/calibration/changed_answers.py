"""How many answers change if retrieval is skipped, by a comparison of their words, with an upper bound.

The server's audits and `calibrate` use the same comparison, so that the measured share of changed answers can be
compared with the bound that `calibrate` records.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from knowgate.core.text import contains_tokens, tokenize
from knowgate.data.runs.table import LabelTable
from knowgate.gates.arbiters.abstention import COMPARED_CHARACTERS, RULES_ARBITER
from knowgate.gates.arbiters.offline_arbitration import ArbiterChoices
from knowgate.stats.metrics import BoolArray
from knowgate.stats.proportions import upper_confidence_limit


def answers_agree(first: str, second: str) -> bool:
    """Return whether one answer contains the words of the other, in the same order."""
    first_tokens = tokenize(first[:COMPARED_CHARACTERS])
    second_tokens = tokenize(second[:COMPARED_CHARACTERS])
    return contains_tokens(first_tokens, second_tokens) or contains_tokens(second_tokens, first_tokens)


def answers_differ(closed_book_answer: str, open_book_answer: str) -> bool:
    """Return whether the answers without and with passages differ.

    A closed-book answer such as "I don't know" always differs.
    """
    return RULES_ARBITER.abstains(closed_book_answer) or not answers_agree(closed_book_answer, open_book_answer)


def bound_changed_answers(
    table: LabelTable, is_skipped: BoolArray, choices: ArbiterChoices | None, is_held: BoolArray, delta: float
) -> dict[str, Any] | None:
    """Compute an upper bound on the share of answers changed by a gate. The comparison is with always retrieving.

    Args:
        table: The label table.
        is_skipped: Whether the gate skips retrieval for each question.
        choices: For each question, which answer an arbiter picks after retrieval; None without an arbiter.
        is_held: Whether each question is held out.
        delta: Probability of a false warning. Half of it is spent here: the probability that the bound is too low.

    Returns:
        The fields of `ChangedAnswersRecord`. None if no question is held out, or if the label runs contain no texts of
        answers.
    """
    gives_closed_book = is_skipped if choices is None else is_skipped | choices.from_memory
    rows = [table.rows[index] for index in np.flatnonzero(gives_closed_book & is_held).tolist()]
    # Texts of both answers, where the closed-book answer is given.
    pairs = [(row.closed.text, row.open.text) for row in rows if row.closed is not None and row.open is not None]
    has_texts = any(closed_book or open_book for closed_book, open_book in pairs)
    n = int(is_held.sum())
    if not n or (pairs and not has_texts):
        return None
    n_changed = sum(answers_differ(closed_book, open_book) for closed_book, open_book in pairs)
    bound = upper_confidence_limit(n_changed, n, delta / 2)
    return {"n": n, "changed": n_changed, "bound": bound, "delta": delta / 2}
