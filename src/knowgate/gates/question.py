"""The question gate: predicts from the text of the question alone whether the LLM knows the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from knowgate.core.schema import read_record
from knowgate.data.signals import question_text
from knowgate.gates.artifacts.networks import TensorValidator, apply_network, require_network
from knowgate.gates.fitted_gate import FittedGate
from knowgate.stats.metrics import FloatArray
from knowgate.types import Question, Reading, Vector

FREQUENCY_TENSOR = "frequencies"


@dataclass(frozen=True)
class QuestionOptions:
    """Options of a `question` gate, which decides by the question alone.

    Attributes:
        frequencies: Whether the gate also reads how frequent the words of the question are in an index.
    """

    frequencies: bool


@dataclass(frozen=True)
class QuestionGate(FittedGate):
    """Predicts from the text of the question whether to retrieve, without any LLM call.

    A logistic regression reads features such as question type, length, names and numbers. It also reads the popularity
    of the question (`meta.popularity`), where given. Fitted with an index, it also reads how frequent the words are
    there. The word counts are stored with the gate.

    Needs: nothing. Cost per question: no LLM call and no model, about 0.05 ms.
    Reference: Marina et al. 2025 (LLM-independent adaptive RAG, arXiv 2505.04253).

    Example:
        >>> gate = QuestionGate.load("my-question")  # doctest: +SKIP
    """

    is_pure = True  # `score` is a short computation that uses no model, file or network

    def check(self, tensors: TensorValidator) -> None:
        """Raise BadInput if the options or tensors of the gate are wrong."""
        options = read_record(QuestionOptions, self.artifact.options, "options", ignore_unknown=True)
        width = len(question_text.QUESTION_FEATURES) + len(question_text.POPULARITY_FEATURES)
        if options.frequencies:
            tensors.require(FREQUENCY_TENSOR, question_text.BUCKETS)
            width += len(question_text.FREQUENCY_FEATURES)
        require_network(tensors, width=width)
        tensors.reject_unknown()

    def raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> FloatArray:
        """Compute the uncalibrated need for retrieval from the text of the questions."""
        frequencies = self.artifact.tensors.get(FREQUENCY_TENSOR)
        return apply_network(self.artifact.tensors, describe_questions(questions, frequencies))

    def explain(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[str]:
        """Name the type of each question."""
        types = [question_text.classify_question(question.text) for question in questions]
        return [f"question type: {name.replace('_', ' ')}" for name in types]


def describe_questions(questions: Sequence[Question], frequencies: Vector | None) -> Vector:
    """Compute features of questions, such as type and length, one row per question.

    Args:
        questions: The questions.
        frequencies: How often words occur in an index of documents; None if the gate was fitted without an index.
    """
    blocks = [question_text.question_features(questions), question_text.popularity_features(questions)]
    if frequencies is not None:
        blocks.append(question_text.frequency_features(questions, frequencies))
    return np.hstack(blocks)
