"""Adaptive-RAG: how complex is the question? No retrieval, one round, or several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from knowgate.core.schema import read_record
from knowgate.errors import BadInput
from knowgate.gates.artifacts.gate_folder import Tensors
from knowgate.gates.artifacts.networks import Floats, TensorValidator, check_feature_width
from knowgate.gates.fitted_gate import EmbedderOptions, FittedGate, load_fitted_embedder
from knowgate.retrieval.embeddings import check_vectors
from knowgate.retrieval.ranking import MAX_ROUNDS
from knowgate.types import Embedder, Question, Reading, Vector

COMPLEXITY_CLASSES = ("no", "one", "multi")


@dataclass(frozen=True)
class AdaptiveGate(FittedGate):
    """need = 1 - P(no retrieval) of a classifier over the question's sentence embedding.

    `steps` tells one round of retrieval from several, which the pipeline then takes.

    Needs: nothing. Cost per question: one sentence embedding; works with any LLM, served or local.
    Reference: Jeong et al. 2024 (Adaptive-RAG); there the classifier is a fine-tuned T5.
    Example:
        >>> gate = AdaptiveGate.load("my-adaptive")  # doctest: +SKIP
    """

    embedder: Embedder | None = None

    def check(self, tensors: TensorValidator) -> None:
        read_record(EmbedderOptions, self.artifact.options, "options", ignore_unknown=True)
        tensors.claim("weight", len(COMPLEXITY_CLASSES), None)
        tensors.claim("bias", len(COMPLEXITY_CLASSES))
        seen = tensors.claim("seen", len(COMPLEXITY_CLASSES))
        if set(seen.tolist()) - {0.0, 1.0} or not seen.any():
            raise BadInput("the tensor 'seen' does not say which classes were seen in training.")
        tensors.finish()

    @cached_property
    def encoder(self) -> Embedder:
        return load_fitted_embedder(self.artifact, self.embedder)

    def classes(self, questions: Sequence[Question]) -> Floats:
        """Probabilities of no, one and several rounds, one row per question."""
        vectors = self.encoder.embed([question.text for question in questions])
        return predict_complexity(self.artifact.tensors, check_vectors(vectors, len(questions)))

    def raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> Floats:
        need: Floats = 1 - self.classes(questions)[:, 0]
        return need

    def count_rounds(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[int]:
        if not questions:
            return []
        return [MAX_ROUNDS if multi > one else 1 for _, one, multi in self.classes(questions)]

    def explain(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[str]:
        if not questions:
            return []
        return [f"no retrieval {p:.2f}, one round {q:.2f}, several {r:.2f}" for p, q, r in self.classes(questions)]


def predict_complexity(tensors: Tensors, vectors: Vector) -> Floats:
    """Softmax over the classes seen in training; the others have probability 0."""
    check_feature_width(vectors, tensors["weight"].shape[1])
    logits = vectors.astype(np.float64) @ tensors["weight"].T.astype(np.float64) + tensors["bias"]
    shares = np.exp(logits - logits.max(axis=1, keepdims=True)) * tensors["seen"]
    probabilities: Floats = shares / shares.sum(axis=1, keepdims=True)
    return probabilities
