"""Ours: all signals of the one pass, weighed together."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from knowgate.gates.fitted.base import FittedGate
from knowgate.gates.fitted.encoder import fitted_encoder
from knowgate.gates.fitted.network import apply_network
from knowgate.gates.fitted.probability import Floats
from knowgate.prompts import self_assessment
from knowgate.signals import drafts, hidden_states, matrix, text_features
from knowgate.statistics import logit
from knowgate.types import Embedder, LabelPrompt, Question, Reading, Vector

TEXT = "text"  # the signal: a linear head over embeddings
TEXT_TOKENS = 32


@dataclass(frozen=True)
class FusionGate(FittedGate):
    """need = a logistic regression over token statistics, probes of hidden states, samples and self-assessment,
    whichever the gate was fitted with.

    Needs: what it was fitted with. Cost per question: that of its costliest signal; `gate.json` lists them.
    Reference: ours.
    Example:
        >>> gate = FusionGate.load("my-fusion")  # doctest: +SKIP
    """

    embedder: Embedder | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        return ("true", "false")

    def ask(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[LabelPrompt]:
        return [self_assessment(question, *self.labels) for question in questions]

    def raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> Floats:
        if self.name in (readings[0].labels if readings else {}):
            readings = [_with_own(reading, self.name) for reading in readings]
        return apply_network(self.artefact.tensors, self.signals(questions, readings), "fusion.")

    def signals(self, questions: Sequence[Question], readings: Sequence[Reading]) -> Vector:
        """Named features and the logits of the probes, in the order the weights expect."""
        options = self.artefact.options
        columns = [matrix(options["features"], questions, readings)]
        for probe in options["probes"]:
            features = hidden_states(readings, probe["layer"], probe["position"])
            need = apply_network(self.artefact.tensors, features, f"{probe['name']}.")
            columns.append(logit(need)[:, None].astype(np.float32))
        if "embedder" in options:
            features = embedded(self.encoder, questions, readings)
            need = apply_network(self.artefact.tensors, features, f"{TEXT}.")
            columns.append(logit(need)[:, None].astype(np.float32))
        return np.hstack(columns)

    @functools.cached_property
    def encoder(self) -> Embedder:
        return fitted_encoder(self.artefact, self.embedder)


def embedded(encoder: Embedder, questions: Sequence[Question], readings: Sequence[Reading]) -> Vector:
    """Sentence embeddings of the question and of question + draft, side by side."""
    return text_features(encoder, questions, drafts(readings), TEXT_TOKENS)


def _with_own(reading: Reading, name: str) -> Reading:
    """Self-assessment logits come under the name of the gate that asked for them."""
    return replace(reading, labels={**reading.labels, "prompt": reading.labels[name]})
