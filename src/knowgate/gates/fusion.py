"""Ours: all signals of the one pass, weighed together."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from knowgate.core.schema import read_record
from knowgate.data.signals.confidence import ASSESSMENT_LABELS, SELF_ASSESSMENT, self_assessment_logit
from knowgate.data.signals.features import FEATURES, describe_feature, feature_matrix
from knowgate.data.signals.vectors import draft_texts, stack_hidden_states, text_features
from knowgate.errors import BadInput
from knowgate.gates.artifacts.gate_manifest import StatePosition
from knowgate.gates.artifacts.networks import (
    Floats,
    TensorValidator,
    apply_network,
    claim_network,
    compute_contributions,
)
from knowgate.gates.fitted_gate import FittedGate, load_fitted_embedder
from knowgate.models.prompts.judges import build_self_assessment_prompt
from knowgate.stats.logistic import logit
from knowgate.types import Embedder, LabelPrompt, Question, Reading, ServedModel, SignalRequest, Vector

TEXT_SIGNAL = "text"  # the signal: a linear head over embeddings
MAX_DRAFT_TOKENS = 32
MAX_NAMED_SIGNALS, MIN_CONTRIBUTION = 2, 0.1  # signals named on each side; logits below which one hardly counts


@dataclass(frozen=True)
class FusionProbe:
    """A probe inside the fusion; its tensors' names begin with its own."""

    name: str
    layer: int
    position: StatePosition


@dataclass(frozen=True)
class FusionOptions:
    """embedder: '' where no text is embedded."""

    features: tuple[str, ...]
    probes: tuple[FusionProbe, ...]
    embedder: str = ""
    embedder_fingerprint: str = ""

    @property
    def width(self) -> int:
        """Of the features that are weighed together."""
        return len(self.features) + len(self.probes) + bool(self.embedder)


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

    labels = ASSESSMENT_LABELS
    recorded_signal = SELF_ASSESSMENT

    def check(self, tensors: TensorValidator) -> None:
        options = read_record(FusionOptions, self.artifact.options, "options", ignore_unknown=True)
        if unknown := [name for name in options.features if name not in FEATURES]:
            raise BadInput(f"'{unknown[0][:80]}' is no feature; known: {', '.join(FEATURES)}.")
        for part in [*(probe.name for probe in options.probes), *([TEXT_SIGNAL] if options.embedder else [])]:
            claim_network(tensors, f"{part}.")
        claim_network(tensors, "fusion.", options.width)
        tensors.finish()

    @property
    def request(self) -> SignalRequest:
        """Servers give entropies only when asked."""
        asks = isinstance(self.llm, ServedModel) and "entropy" in self.artifact.options["features"]
        return replace(super().request, entropies=True) if asks else super().request

    def build_label_prompts(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[LabelPrompt]:
        return [build_self_assessment_prompt(question, *self.labels) for question in questions]

    def raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> Floats:
        told = [_with_assessment(reading, self.name) for reading in readings]
        return apply_network(self.artifact.tensors, self.signals(questions, told), "fusion.")

    def signals(self, questions: Sequence[Question], readings: Sequence[Reading]) -> Vector:
        """Named features and the logits of the probes, in the order the weights expect."""
        options = self.artifact.options
        columns = [feature_matrix(options["features"], questions, readings)]
        for probe in options["probes"]:
            features = stack_hidden_states(readings, probe["layer"], probe["position"])
            need = apply_network(self.artifact.tensors, features, f"{probe['name']}.")
            columns.append(logit(need)[:, None].astype(np.float32))
        if "embedder" in options:
            features = embed_drafts(self.encoder, questions, readings)
            need = apply_network(self.artifact.tensors, features, f"{TEXT_SIGNAL}.")
            columns.append(logit(need)[:, None].astype(np.float32))
        return np.hstack(columns)

    def explain(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[str]:
        """The signals that spoke loudest for looking it up, and against."""
        if not questions or "embedder" in self.artifact.options:  # not embedded twice for the sake of words
            return ["" for _ in questions]
        found = self.signals(questions, [_with_assessment(reading, self.name) for reading in readings])
        parts = compute_contributions(self.artifact.tensors, found, "fusion.")
        if parts is None:
            return ["" for _ in questions]
        options = self.artifact.options
        names = [*options["features"], *(probe["name"] for probe in options["probes"])]
        return [_spoken(names, values, weights) for values, weights in zip(found, parts, strict=True)]

    @functools.cached_property
    def encoder(self) -> Embedder:
        return load_fitted_embedder(self.artifact, self.embedder)


def embed_drafts(encoder: Embedder, questions: Sequence[Question], readings: Sequence[Reading]) -> Vector:
    """Sentence embeddings of the question and of question + draft, side by side."""
    return text_features(encoder, questions, draft_texts(readings), MAX_DRAFT_TOKENS)


def _spoken(names: Sequence[str], values: Vector, weights: Floats) -> str:
    """For and against, two each, the loudest first; what hardly counts is left out."""
    order = sorted(range(len(names)), key=lambda place: -abs(weights[place]))
    loud = [place for place in order if abs(weights[place]) >= MIN_CONTRIBUTION]
    said = {place: describe_feature(names[place], float(values[place])) for place in loud}
    sides = {
        "for looking it up": [said[place] for place in loud if weights[place] > 0][:MAX_NAMED_SIGNALS],
        "against, compared with other questions": [said[place] for place in loud if weights[place] < 0][
            :MAX_NAMED_SIGNALS
        ],
    }
    return "; ".join(f"{side}: {', '.join(words)}" for side, words in sides.items() if words)


def _with_assessment(reading: Reading, name: str) -> Reading:
    """The reading with what the LLM said when the gate of this name asked it; as it is where nobody was asked."""
    if name not in reading.labels:
        return reading
    said = self_assessment_logit(reading.labels[name])
    return replace(reading, signals={**reading.signals, SELF_ASSESSMENT: said})
