"""The gates `fusion` and `stack`: a logistic regression over all signals of one LLM pass, and scores of judges."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from knowgate.core.schema import NumberRange, read_record
from knowgate.data.signals.confidence import ASSESSMENT_LABELS, SELF_ASSESSMENT, self_assessment_logit
from knowgate.data.signals.features import FEATURES, describe_feature, feature_matrix
from knowgate.data.signals.vectors import draft_texts, hash_wording, stack_hidden_states, text_features, truncate_words
from knowgate.errors import BadInput
from knowgate.gates import load_fitted_gate
from knowgate.gates.artifacts.gate_manifest import StatePosition
from knowgate.gates.artifacts.networks import TensorValidator, apply_network, compute_contributions, require_network
from knowgate.gates.fitted_gate import FittedGate
from knowgate.gates.judges import compute_gain_needs
from knowgate.models.prompts.questions import build_self_assessment_prompt
from knowgate.stats.metrics import FloatArray, logit
from knowgate.types import Embedder, LabelPrompt, Question, Reading, ServedModel, SignalRequest, Vector

GAIN_HEADS = ("closed", "open")  # P(right from memory), P(right with passages)
TEXT_SIGNAL = "text"  # name of the linear classifier on embeddings of question and draft
WORDING_SIGNAL = "wording"  # name of the linear classifier on the character n-grams of the draft
MAX_DRAFT_TOKENS = 32  # how much of the draft is read as text
MAX_NAMED_SIGNALS = 2  # of an explanation
# Probabilities of judges are clipped this far from 0 and 1. So a judge that is very sure does not outvote all signals.
JUDGE_FLOOR = 1e-4
MIN_CONTRIBUTION = 0.1  # explanations name signals that change the logit by at least this much


@dataclass(frozen=True)
class FusionProbe:
    """A classifier of one hidden state. The output of the classifier is an input of the fusion.

    Attributes:
        name: Name of the probe; the names of its tensors start with it.
        layer: Layer of the hidden state.
        position: 'pre' reads the state before the answer, 'post' the state after the draft.
    """

    name: str
    layer: int
    position: StatePosition


@dataclass(frozen=True)
class FusionOptions:
    """The signals that a fusion gate was fitted with.

    Attributes:
        features: Names of the features, such as token statistics.
        probes: Classifiers of hidden states.
        embedder: Name of the embedding model; empty if no text is embedded.
        embedder_fingerprint: Fingerprint of the embedding model.
        wording: Whether the wording of the draft is a signal, as counts of its character n-grams. Gates of version 0.1
            do not have this field.
        heads: Names of the logistic regressions; empty if the gate has only one. A gate that predicts the gain of
            retrieval has two: "closed" for the answer without passages, "open" for the answer with passages.
        judges: Number of judges whose scores are further signals (gate `stack`).
    """

    features: tuple[str, ...]
    probes: tuple[FusionProbe, ...]
    embedder: str = ""
    embedder_fingerprint: str = ""
    wording: bool = False
    heads: tuple[str, ...] = ()
    judges: Annotated[int, NumberRange(0, 4)] = 0

    @property
    def classifiers(self) -> list[str]:
        """Names of the linear classifiers that feed the logistic regression."""
        names = [probe.name for probe in self.probes]
        if self.embedder:
            names.append(TEXT_SIGNAL)
        if self.wording:
            names.append(WORDING_SIGNAL)
        return names

    @property
    def width(self) -> int:
        """Number of inputs of the logistic regression."""
        return len(self.features) + len(self.classifiers) + self.judges


def combine_heads(predictions: Sequence[FloatArray]) -> FloatArray:
    """Compute needs from the predictions of one or two regressions.

    Args:
        predictions: One array: the need of each question. Two arrays: how probably each closed-book answer is wrong, and
            how probably each open-book answer is wrong.
    """
    if len(predictions) == 1:
        return predictions[0]
    closed_book_wrong, open_book_wrong = predictions
    return compute_gain_needs(known=1 - closed_book_wrong, document_right=1 - open_book_wrong)


@dataclass(frozen=True)
class FusionGate(FittedGate):
    """Combines many signals of the LLM in a logistic regression.

    The signals are token statistics, hidden states, samples and self-assessment. `gate.json` lists the signals in use.
    With the target `gain`, there are two regressions: P(right with passages) and P(right from memory). The need is
    their difference, mapped from [-1, 1] to [0, 1].

    Needs: the signals that were recorded in the label run it was fitted on. Cost per question: the cost of its most
    expensive signal.
    Reference: ours.

    Example:
        >>> gate = FusionGate.load("my-fusion")  # doctest: +SKIP
    """

    labels = ASSESSMENT_LABELS
    recorded_signal = SELF_ASSESSMENT  # label runs may record the answer to the prompt of this gate

    def check(self, tensors: TensorValidator) -> None:
        """Raise BadInput if a feature is unknown or the tensors of a classifier are wrong."""
        options = read_record(FusionOptions, self.artifact.options, "options", ignore_unknown=True)
        if unknown := [name for name in options.features if name not in FEATURES]:
            raise BadInput(f"unknown feature '{unknown[0][:80]}'. Known features: {', '.join(FEATURES)}.")
        if options.heads and options.heads != GAIN_HEADS:
            raise BadInput(
                f"unknown outputs of the classifier: {', '.join(options.heads)[:80]}. Known: {', '.join(GAIN_HEADS)}."
            )
        for prefix in self._head_prefixes:
            for name in options.classifiers:
                require_network(tensors, f"{prefix}{name}.")
            require_network(tensors, f"{prefix}fusion.", options.width)
        tensors.reject_unknown()

    @property
    def request(self) -> SignalRequest:
        """The signals read by the gate. Servers return token entropies only on request."""
        needs_entropies = isinstance(self.llm, ServedModel) and "entropy" in self.artifact.options["features"]
        return replace(super().request, entropies=True) if needs_entropies else super().request

    def build_label_prompts(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[LabelPrompt]:
        """Build the prompt that asks the LLM whether it can answer each question."""
        return [build_self_assessment_prompt(question, *self.labels) for question in questions]

    @property
    def _head_prefixes(self) -> list[str]:
        """Start of the tensor names of each logistic regression.

        This is '' for one regression, else 'closed.' and 'open.'.
        """
        return [f"{name}." for name in self.artifact.options.get("heads", ())] or [""]

    def raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> FloatArray:
        """Compute the uncalibrated need for retrieval of each question."""
        return combine_heads(self._predict(questions, readings))

    def _predict(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[FloatArray]:
        """Return the predictions of each logistic regression, one per question.

        A gate with one regression predicts whether retrieval is needed. A gate with two regressions predicts whether
        the answers without passages and with passages are wrong.
        """
        heads = zip(self._head_prefixes, self.compute_signals(questions, readings), strict=True)
        return [apply_network(self.artifact.tensors, signals, f"{prefix}fusion.") for prefix, signals in heads]

    def compute_signals(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[Vector]:
        """Compute the inputs of each logistic regression, one row per question.

        Probes and text classifiers add their logits as columns.
        """
        readings = [add_self_assessment(reading, self.name) for reading in readings]
        features = feature_matrix(self.artifact.options["features"], questions, readings)
        classifier_inputs = self._read_classifier_inputs(questions, readings)
        signals = []
        for prefix in self._head_prefixes:  # each regression has its own classifiers
            columns = [features]
            for classifier, inputs in classifier_inputs.items():
                probabilities = apply_network(self.artifact.tensors, inputs, f"{prefix}{classifier}.")
                columns.append(logit(probabilities)[:, None].astype(np.float32))
            signals.append(np.hstack(columns))
        return signals

    def _read_classifier_inputs(self, questions: Sequence[Question], readings: Sequence[Reading]) -> dict[str, Vector]:
        """Return the inputs of each probe and text classifier, by its name."""
        options = self.artifact.options
        probes = options["probes"]
        inputs = {probe["name"]: stack_hidden_states(readings, probe["layer"], probe["position"]) for probe in probes}
        if "embedder" in options:
            inputs[TEXT_SIGNAL] = embed_drafts(self.encoder, questions, readings)
        if options.get("wording"):
            inputs[WORDING_SIGNAL] = hash_drafts(readings)
        return inputs

    def explain(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[str]:
        """Explain each score by the strongest signals for and against retrieval. '' means no explanation."""
        options = self.artifact.options
        if not questions or "embedder" in options:  # embedding the texts a second time would be too slow
            return ["" for _ in questions]
        if options.get("heads"):
            return self._explain_heads(questions, readings)
        (signals,) = self.compute_signals(questions, readings)
        contributions = compute_contributions(self.artifact.tensors, signals, "fusion.")
        if contributions is None:  # the classifier is not linear
            return ["" for _ in questions]
        names = [*options["features"], *(probe["name"] for probe in options["probes"])]
        return [describe_signals(names, *row) for row in zip(signals, contributions, strict=True)]

    def _explain_heads(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[str]:
        """Say how probably each question is answered right without and with passages."""
        probabilities = [1 - wrong for wrong in self._predict(questions, readings)]
        return [
            f"expected to be right: {closed_book:.0%} from memory, {open_book:.0%} with passages"
            for closed_book, open_book in zip(*probabilities, strict=True)
        ]


@dataclass(frozen=True)
class StackGate(FusionGate):
    """Combines all signals of one LLM pass and the scores of judges in a logistic regression.

    A judge is a small fine-tuned model that reads the question and the draft. It makes other mistakes than classifiers
    of hidden states, which is why both are combined. Each judge is stored in a sub-folder of the gate.

    Needs: the signals that were recorded in the label run it was fitted on, and a draft. Cost per question: the most
    expensive signal, plus 70 tokens read by each judge.
    Reference: ours.

    Example:
        >>> gate = StackGate.load("my-stack")  # doctest: +SKIP
    """

    @functools.cached_property
    def judges(self) -> list[FittedGate]:
        """The judges of the gate, loaded on first use."""
        judges = []
        for number in range(int(self.artifact.options["judges"])):
            judge = load_fitted_gate(str(self.artifact.path / name_judge(number)), plug_in=self.plug_in)
            if self.llm is not None:
                judge = judge.bind(self.llm, self.artifact.manifest["prompts"])
            judges.append(judge)
        return judges

    @property
    def request(self) -> SignalRequest:
        """All signals to read from the LLM, for the logistic regression and for the judges."""
        request = super().request
        for judge in self.judges:
            request |= judge.request
        return request

    def compute_signals(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[Vector]:
        """Compute the inputs of the logistic regressions, one row per question.

        The last columns are the log-odds of the judges.
        """
        readings = [add_self_assessment(reading, self.name) for reading in readings]
        scores = [np.array(judge.raw_scores(questions, readings)) for judge in self.judges]
        log_odds = np.column_stack([compute_log_odds(judge_scores) for judge_scores in scores])
        return [np.hstack([signals, log_odds]) for signals in super().compute_signals(questions, readings)]

    def explain(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[str]:
        """Return no explanations: the judges would have to read every question a second time."""
        return ["" for _ in questions]


def name_judge(number: int) -> str:
    """Return the name of the sub-folder of a judge."""
    return f"judge-{number}"


def compute_log_odds(scores: FloatArray) -> Vector:
    """Return the log-odds of a judge's uncalibrated scores, which are probabilities that retrieval is needed."""
    return logit(scores, JUDGE_FLOOR).astype(np.float32)


def embed_drafts(encoder: Embedder, questions: Sequence[Question], readings: Sequence[Reading]) -> Vector:
    """Embed the question alone and the question with its draft, and concatenate the two vectors."""
    return text_features(encoder, questions, draft_texts(readings), MAX_DRAFT_TOKENS)


def hash_drafts(readings: Sequence[Reading]) -> Vector:
    """Represent the wording of each draft by counts of its character n-grams."""
    return hash_wording([truncate_words(text, MAX_DRAFT_TOKENS) for text in draft_texts(readings)])


def describe_signals(names: Sequence[str], values: Vector, contributions: FloatArray) -> str:
    """Describe the two strongest signals, and whether they raise or lower the need for retrieval.

    Args:
        names: Names of the signals.
        values: Values of the signals for one question.
        contributions: How much each signal adds to the logit of the need for retrieval.
    """
    strongest = sorted(range(len(names)), key=lambda column: -abs(contributions[column]))[:MAX_NAMED_SIGNALS]
    descriptions: dict[str, list[str]] = {"for retrieval": [], "against retrieval": []}
    for column in strongest:
        effect = "for retrieval" if contributions[column] > 0 else "against retrieval"
        description = describe_feature(names[column], float(values[column]))
        if abs(contributions[column]) >= MIN_CONTRIBUTION and description not in descriptions[effect]:
            descriptions[effect].append(description)
    return "; ".join(f"{', '.join(texts)} ({effect})" for effect, texts in descriptions.items() if texts)


def add_self_assessment(reading: Reading, gate: str) -> Reading:
    """Add the LLM's self-assessment (how probably it says that it knows the answer) to the signals of a reading."""
    if gate not in reading.labels:
        return reading
    assessment = self_assessment_logit(reading.labels[gate])
    return replace(reading, signals={**reading.signals, SELF_ASSESSMENT: assessment})
