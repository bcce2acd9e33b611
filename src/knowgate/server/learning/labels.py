"""Labels for the history of questions, which follow from audits and from feedback of users.

A label says whether the LLM knows the answer to a question. If its answers with and without passages agree, it probably
knows; if they differ, it probably does not. Labels from feedback of users take precedence. A question that was only
answered without passages gets no label, because otherwise every skip would confirm itself.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from knowgate.data.history.entries import HistoryScope, KnowledgeLabel, LabelSource, LogEntry
from knowgate.errors import KnowgateError
from knowgate.gates.calibration.changed_answers import answers_differ
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.traffic_log import TrafficLog

log = logging.getLogger(__name__)


def label_by_agreement(closed_answer: str, open_answer: str) -> KnowledgeLabel:
    """Label a question as known if the answers without and with passages agree, otherwise as unknown."""
    return KnowledgeLabel.UNKNOWN if answers_differ(closed_answer, open_answer) else KnowledgeLabel.KNOWN


def label_by_feedback(rating: str, correction: str | None, answers: Mapping[str, Any]) -> KnowledgeLabel | None:
    """Label a question by the feedback of a user.

    A rating refers to the answer that was sent. If that answer used passages, the rating says something about the LLM's
    own knowledge only if the answer without passages exists, too.

    Args:
        rating: "up" or "down".
        correction: The right answer, if the user gave it.
        answers: The answers that exist (`closed` without passages, `opened` with passages), and whether the answer that
            was sent used passages (`retrieved`).

    Returns:
        The label, or None if the feedback does not show whether the LLM knows the answer.
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
    """Stores in a history of questions whether the LLM of a pipeline knows their answers.

    Attributes:
        rag: The pipeline. The labels are valid only for its LLM and prompts.
        history: The history, or None if labels are not stored.
    """

    rag: AdaptiveRAG
    history: TrafficLog | None = None

    def add(self, question: str, label: KnowledgeLabel, source: LabelSource) -> Future[bool] | None:
        """Queue a label for storing, and return at once. Errors are logged.

        Returns:
            A future that becomes true when the label is stored, or None if there is no history or an error occurred.
        """
        if self.history is None:
            return None
        scope = HistoryScope(self.rag.model.fingerprint, self.rag.prompts.fingerprint, self.history.tenant)
        try:
            return self.history.log_entries([LogEntry(question, label, scope, source)])
        except KnowgateError as error:
            log.warning("A label could not be stored: %s", error)
            return None
