"""DH-ICL: the LLM sees similar logged questions with whether it knew them, then assesses the new question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from knowgate.data.history.entries import HistoryScope, HistoryStore, KnowledgeLabel, question_key
from knowgate.errors import BadSetting, UnsupportedSignal
from knowgate.gates.history_scope import bind_scope, open_history_store
from knowgate.gates.prompt import parse_label_pair
from knowgate.models.prompts.templates import detect_question_language, load_packaged_templates
from knowgate.stats.logistic import sigmoid
from knowgate.types import Gate, LabelPrompt, ModelIdentity, Neighbor, Question, Reading, ServedModel, Signal, Vector

CalibrationSign = Literal["paper", "code", "none"]


@dataclass(frozen=True)
class DhiclGate(Gate):
    """Shows the LLM k similar logged questions with their labels and reads the label of the new question.

    need = sigmoid(z_unknown - z_known), where the logits are corrected for the bias of the LLM on the examples.

    `history` is the log, `words` are the label tokens as known/unknown. `sign` is the direction of the correction:
    'paper' subtracts the mean deficit as printed, 'code' adds it as the released code does, 'none' applies none.
    `cold` uses fixed random examples instead of similar ones (section 4.8). `time_sensitive` also shows logged
    questions whose answers change with time, as unknown (Table 4 is without them). `embedder` computes the similarity,
    if not with that of the log ('mpnet', 'm3e', any sentence-transformers name); a log of another embedder is rejected.

    Needs: labels. Cost per question: one prefill of about 600 tokens (k = 20); the instruction is cached.
    Reference: Lv et al. (DH-ICL), section 3.

    Example:
        >>> DhiclGate("log.db", words="1/2").labels
        ('1', '2')
    """

    history: str | HistoryStore = "history.db"
    k: int = 20
    words: str = "true/false"
    sign: CalibrationSign = "paper"
    cold: bool = False
    time_sensitive: bool = True
    embedder: str | None = None
    tenant: str = ""
    scope: HistoryScope | None = None
    needs = frozenset({Signal.LABELS})

    def __post_init__(self) -> None:
        parse_label_pair(self.words, self.name)
        if self.k < 1:
            raise BadSetting(f"dhicl: k is {self.k}; it must be at least 1.")

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels for known and unknown."""
        return parse_label_pair(self.words, self.name)

    def bind(self, model: ModelIdentity, prompts: str) -> Self:
        """Bind the gate to the labels of this LLM in the log."""
        if isinstance(model, ServedModel) and not model.reads_inner_labels:
            raise UnsupportedSignal(
                f"gate 'dhicl' reads label probabilities inside a prompt, which the server of {model.name} does not "
                "return; vLLM, SGLang and llama.cpp do. Use prompt, logprob:min or skr with this server."
            )
        return replace(self, scope=bind_scope(self.history, model.fingerprint, prompts, self.tenant, self.embedder))

    def find_neighbors(self, questions: Sequence[Question]) -> list[tuple[Neighbor, ...]]:
        """Find the examples for each question: similar or, with `cold`, fixed random ones."""
        if self.scope is None:
            raise BadSetting("dhicl: bind the gate to its model first (AdaptiveRAG does).")
        store = open_history_store(self.history, self.embedder)
        excluded = () if self.time_sensitive else (KnowledgeLabel.TIME_SENSITIVE,)
        if not self.cold:
            return store.search([question.text for question in questions], self.k, self.scope, excluded)
        examples = store.sample(self.k + 1, self.scope, exclude=excluded)
        return [_exclude_question(question, examples)[: self.k] for question in questions]

    def build_label_prompts(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[LabelPrompt]:
        """Build one prompt with examples per question."""
        return [
            self._build_prompt(question, reading.neighbors[self.name])
            for question, reading in zip(questions, readings, strict=True)
        ]

    def _build_prompt(self, question: Question, neighbors: Sequence[Neighbor]) -> LabelPrompt:
        """Put the least similar example first and the question itself last."""
        known, unknown = self.labels
        language, templates = detect_question_language(question), load_packaged_templates("history")
        labels = [known if is_known else unknown for is_known in get_known_flags(neighbors)]
        texts = [*(neighbor.question for neighbor in reversed(neighbors)), question.text]
        prefixes = ["", *(f"{label}\n\n" for label in labels)]
        parts = tuple(
            prefix + templates.fill("example", language, query=text)
            for prefix, text in zip(prefixes, texts, strict=True)
        )
        return LabelPrompt(parts, prefix=templates.fill("instruction", language, known=known, unknown=unknown))

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        """Compute needs from the label logits."""
        return [
            score_logits(reading.labels[self.name], get_known_flags(reading.neighbors[self.name]), self.sign)
            for reading in readings
        ]

    def explain(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[str]:
        """Say how many examples were known and what the LLM expects."""
        needs = self.score(questions, readings)
        examples = [get_known_flags(reading.neighbors[self.name]) for reading in readings]
        return [
            f"shown {len(known)} similar logged questions, {sum(known)} of them known, the LLM expects "
            f"{'not ' if need > 0.5 else ''}to know this one"
            for known, need in zip(examples, needs, strict=True)
        ]


def _exclude_question(question: Question, neighbors: Sequence[Neighbor]) -> tuple[Neighbor, ...]:
    """Remove the question itself, whatever its spelling."""
    key = question_key(question.text)
    return tuple(neighbor for neighbor in neighbors if question_key(neighbor.question) != key)


def get_known_flags(neighbors: Sequence[Neighbor]) -> list[bool]:
    """Return whether each example was known, in prompt order. Time-sensitive questions count as unknown."""
    return [neighbor.label == KnowledgeLabel.KNOWN for neighbor in reversed(neighbors)]


def score_logits(logits: Vector, known: Sequence[bool], sign: CalibrationSign) -> float:
    """Compute the need of a question from the label logits of the examples and, in the last row, its own."""
    z_known, z_unknown = calibrate_logits(logits, known, sign)
    return sigmoid(float(z_unknown - z_known))


def calibrate_logits(logits: Vector, known: Sequence[bool], sign: CalibrationSign) -> tuple[float, float]:
    """Correct the last row (z_known, z_unknown) by the mean deficits of the examples before it.

    The deficit of an example is the amount by which its true label lost against the other, or 0 if it won (equations
    1-6 of DH-ICL).
    """
    examples = logits[:-1]
    known_deficits = [max(0.0, float(z[1] - z[0])) for z, is_known in zip(examples, known, strict=True) if is_known]
    unknown_deficits = [
        max(0.0, float(z[0] - z[1])) for z, is_known in zip(examples, known, strict=True) if not is_known
    ]
    factor = {"paper": -1.0, "code": 1.0, "none": 0.0}[sign]
    return (
        float(logits[-1][0]) + factor * _mean(known_deficits),
        float(logits[-1][1]) + factor * _mean(unknown_deficits),
    )


def _mean(values: Sequence[float]) -> float:
    """Return the mean, 0 without values."""
    return sum(values) / len(values) if values else 0.0
