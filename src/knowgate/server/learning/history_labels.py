"""Labels for the history of questions, from which the gates dhicl and skr learn.

Two answers that agree, one with and one without passages, weakly indicate that the LLM knows the answer; two that
differ indicate that it does not. Feedback of people outranks them. A skipped question with only one answer gets no
label: otherwise a skip would confirm itself.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from knowgate.data.history.entries import HistoryScope, KnowledgeLabel, LabelSource, LogEntry
from knowgate.errors import KnowgateError
from knowgate.evaluation.traffic_log import answers_agree
from knowgate.gates.arbiters.abstention import RULES_ARBITER
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.traffic_log import TrafficLog

log = logging.getLogger(__name__)


def answers_differ(closed_answer: str, open_answer: str) -> bool:
    """Whether retrieval changes the answer. A closed-book answer that says "I don't know" always differs."""
    return RULES_ARBITER.abstains(closed_answer) or not answers_agree(closed_answer, open_answer)


def label_by_agreement(closed_answer: str, open_answer: str) -> KnowledgeLabel:
    """Label a question by whether the answers without and with passages agree."""
    return KnowledgeLabel.UNKNOWN if answers_differ(closed_answer, open_answer) else KnowledgeLabel.KNOWN


def label_by_feedback(rating: str, correction: str | None, answers: Mapping[str, Any]) -> KnowledgeLabel | None:
    """Label a question by a person's feedback; None if the feedback says nothing about the LLM's own knowledge.

    A rating refers to the answer that was sent. If that one was given with passages, the rating is informative only if
    the closed-book answer is known, too.

    Args:
        rating: "up" or "down".
        correction: The right answer, if the person gave it.
        answers: The answers that are known (`closed` without passages, `opened` with passages), and whether passages
            were used (`retrieved`).
    """
    closed_answer, open_answer = answers.get("closed"), answers.get("opened")
    if correction and closed_answer is not None:
        return label_by_agreement(closed_answer, correction)
    if not answers.get("retrieved"):
        return KnowledgeLabel.KNOWN if rating == "up" else KnowledgeLabel.UNKNOWN
    if rating == "up" and closed_answer is not None and open_answer is not None:
        return label_by_agreement(closed_answer, open_answer)
    return None


@dataclass
class HistoryLabeler:
    """Adds labels to the history, for the LLM and prompts of a pipeline. Does nothing without a history."""

    rag: AdaptiveRAG
    history: TrafficLog | None = None

    def add(self, question: str, label: KnowledgeLabel, source: LabelSource) -> Future[bool] | None:
        """Queue a label and return at once.

        Returns:
            A future that becomes true when the label is stored durably; None if there is no history.
        """
        if self.history is None:
            return None
        scope = HistoryScope(self.rag.model.fingerprint, self.rag.prompts.fingerprint, self.history.tenant)
        try:
            return self.history.log_entries([LogEntry(question, label, scope, source)])
        except KnowgateError as error:
            log.warning("A label could not be stored: %s", error)
            return None
