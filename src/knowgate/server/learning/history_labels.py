"""What traffic says about the LLM, as labels for the history that dhicl and skr learn from.

Two answers that agree are a weak sign that it knows, two that do not that it does not. What people say outranks them. A
skipped question with one answer only gets no label: a skip never labels itself.
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


def answers_differ(closed: str, opened: str) -> bool:
    """Whether skipping gives another answer. No answer, or that the LLM cannot tell, is none to agree on."""
    return RULES_ARBITER.abstains(closed) or not answers_agree(closed, opened)


def label_by_agreement(closed: str, opened: str) -> KnowledgeLabel:
    return KnowledgeLabel.UNKNOWN if answers_differ(closed, opened) else KnowledgeLabel.KNOWN


def label_by_feedback(rating: str, correction: str | None, found: Mapping[str, Any]) -> KnowledgeLabel | None:
    """What a thumb or a correction says about the LLM; None where it says nothing.

    found: `closed` and `opened`, the answers as far as they are known, and `retrieved`. A thumb is about the answer
    that was given: one with passages tells of the LLM only if the other answer is known, too.
    """
    closed, opened, retrieved = found.get("closed"), found.get("opened"), found.get("retrieved")
    if correction and closed is not None:
        return label_by_agreement(closed, correction)
    if not retrieved:
        return KnowledgeLabel.KNOWN if rating == "up" else KnowledgeLabel.UNKNOWN
    if rating == "up" and closed is not None and opened is not None:
        return label_by_agreement(closed, opened)
    return None


log = logging.getLogger(__name__)


@dataclass
class HistoryLabeler:
    """history: None where none is kept; then nothing happens."""

    rag: AdaptiveRAG
    history: TrafficLog | None = None

    def put(self, question: str, label: KnowledgeLabel, source: LabelSource) -> Future[bool] | None:
        """Returns at once. True, later: it is on disk. None where nothing is kept."""
        if self.history is None:
            return None
        scope = HistoryScope(self.rag.model.fingerprint, self.rag.prompts.fingerprint, self.history.tenant)
        try:
            return self.history.log_entries([LogEntry(question, label, scope, source)])
        except KnowgateError as error:
            log.warning("A label could not be logged: %s", error)
            return None
