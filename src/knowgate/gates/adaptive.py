"""The gate of Adaptive-RAG: classifies how complex a question is and chooses no retrieval, one round or several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from knowgate.core.schema import read_record
from knowgate.errors import BadInput
from knowgate.gates.artifacts.gate_folder import Tensors
from knowgate.gates.artifacts.networks import TensorValidator, check_feature_width
from knowgate.gates.fitted_gate import EmbedderOptions, FittedGate
from knowgate.retrieval.embeddings import check_vectors
from knowgate.retrieval.passages import MAX_ROUNDS
from knowgate.stats.metrics import FloatArray
from knowgate.types import Question, Reading, Vector

COMPLEXITY_CLASSES = ("no", "one", "multi")  # rounds of retrieval


@dataclass(frozen=True)
class AdaptiveGate(FittedGate):
    """Predicts from the question whether to retrieve never, once or in several rounds.

    A linear classifier reads the sentence embedding of the question. The need for retrieval is 1 - P(no retrieval).

    Needs: nothing. Cost per question: one sentence embedding. Works with any LLM, served or local.
    Reference: Jeong et al. 2024 (Adaptive-RAG), with a fine-tuned T5 as classifier.

    Example:
        >>> gate = AdaptiveGate.load("my-adaptive")  # doctest: +SKIP
    """

    def check(self, tensors: TensorValidator) -> None:
        """Raise BadInput if the options or tensors of the gate are wrong.

        The tensor 'seen' has a 1 for each class that occurred in training, else a 0.
        """
        read_record(EmbedderOptions, self.artifact.options, "options", ignore_unknown=True)
        tensors.require("weight", len(COMPLEXITY_CLASSES), None)
        tensors.require("bias", len(COMPLEXITY_CLASSES))
        seen = tensors.require("seen", len(COMPLEXITY_CLASSES))
        if not (set(seen.tolist()) <= {0.0, 1.0} and seen.any()):
            raise BadInput(f"the tensor 'seen' is {seen.tolist()}, but must contain only 0 and 1, at least one 1.")
        tensors.reject_unknown()

    def predict_classes(self, questions: Sequence[Question]) -> FloatArray:
        """Return the probabilities of no, one and several rounds, one row per question."""
        if not questions:
            return np.zeros((0, len(COMPLEXITY_CLASSES)))
        vectors = self.encoder.embed([question.text for question in questions])
        return predict_complexity(self.artifact.tensors, check_vectors(vectors, len(questions)))

    def raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> FloatArray:
        """Compute the uncalibrated need for retrieval of each question as 1 - P(no retrieval)."""
        return 1 - self.predict_classes(questions)[:, 0]  # column 0 is P(no retrieval)

    def count_rounds(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[int]:
        """Return for each question how many rounds of retrieval to run. This is `MAX_ROUNDS` or 1."""
        return [MAX_ROUNDS if several > one else 1 for _, one, several in self.predict_classes(questions)]

    def explain(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[str]:
        """List the probabilities of the three classes."""
        rows = self.predict_classes(questions)
        return [f"no retrieval {no:.2f}, one round {one:.2f}, several {several:.2f}" for no, one, several in rows]


def predict_complexity(tensors: Tensors, vectors: Vector) -> FloatArray:
    """Compute the probabilities of three complexity classes from sentence embeddings.

    A class that did not occur in training gets probability 0.

    Returns:
        One row per question: P(no retrieval), P(one round), P(several rounds).
    """
    check_feature_width(vectors, tensors["weight"].shape[1])
    logits = vectors.astype(np.float64) @ tensors["weight"].T.astype(np.float64) + tensors["bias"]
    # A softmax over the classes that occurred in training ('seen' is 1). Subtracting the maximum avoids overflow.
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True)) * tensors["seen"]
    return np.asarray(exponentials / exponentials.sum(axis=1, keepdims=True))
