"""Comparison of the answers with and without passages by their words.

The server's audits and `calibrate` use the same comparison, so that the measured share of changed answers can be
compared with the bound that `calibrate` records.
"""

from __future__ import annotations

from knowgate.core.text import contains_tokens, tokenize
from knowgate.gates.arbiters.abstention import RULES_ARBITER


def answers_agree(first: str, second: str) -> bool:
    """Return whether one answer contains the words of the other, in the same order.

    Answers that agree may both be wrong.
    """
    first_tokens, second_tokens = tokenize(first), tokenize(second)
    return contains_tokens(first_tokens, second_tokens) or contains_tokens(second_tokens, first_tokens)


def answers_differ(closed_answer: str, open_answer: str) -> bool:
    """Return whether the answers without and with passages differ.

    If the answer without passages (`closed_answer`) says that the LLM does not know, they always differ.
    """
    return RULES_ARBITER.abstains(closed_answer) or not answers_agree(closed_answer, open_answer)
