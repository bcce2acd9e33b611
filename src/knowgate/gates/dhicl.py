"""DH-ICL: show the LLM what it knew of similar questions, and read off what it expects of this one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from knowgate.data.history.entries import HistoryScope, HistoryStore, KnowledgeLabel, question_key
from knowgate.errors import BadSetting, NotOffered
from knowgate.gates.history_scope import bind_scope, open_history_store
from knowgate.gates.prompt import parse_label_pair
from knowgate.models.prompts.templates import detect_question_language, load_packaged_templates
from knowgate.stats.logistic import sigmoid
from knowgate.types import Gate, LabelPrompt, ModelIdentity, Neighbor, Question, Reading, ServedModel, Signal, Vector

CalibrationSign = Literal["paper", "code", "none"]


@dataclass(frozen=True)
class DhiclGate(Gate):
    """need = sigmoid(z_unknown - z_known) after k similar logged questions with their labels, bias-calibrated.

    history: the log (`knowgate history`). words: label tokens as known/unknown. sign: how calibration corrects the
    logits; 'paper' subtracts the mean deficit as printed, 'code' adds it as the released code does, 'none' leaves them.
    cold: fixed random examples instead of similar ones (section 4.8). time_sensitive: whether logged questions whose
    answers change with time are shown, too (as unknown; without them: Table 4). embedder: what questions are compared
    by, if not the log's own (`mpnet`, `m3e`, any sentence-transformers name); a log filled with another is refused.

    Needs: labels. Cost per question: one prefill of some 600 tokens (k = 20); the instruction's part is kept.
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
        return parse_label_pair(self.words, self.name)

    def bind(self, model: ModelIdentity, prompts: str) -> Self:
        if isinstance(model, ServedModel) and not model.reads_inner_labels:
            raise NotOffered(
                f"gate 'dhicl' reads labels inside a prompt, which the server of {model.name} does not give; vLLM, "
                "SGLang and llama.cpp do. Use prompt, logprob:min or skr with this one."
            )
        return replace(self, scope=bind_scope(self.history, model.fingerprint, prompts, self.tenant, self.embedder))

    def find_neighbors(self, questions: Sequence[Question]) -> list[tuple[Neighbor, ...]]:
        if self.scope is None:
            raise BadSetting("dhicl: bind the gate to its model first (AdaptiveRAG does).")
        store = open_history_store(self.history, self.embedder)
        leave_out = () if self.time_sensitive else (KnowledgeLabel.TIME_SENSITIVE,)
        if not self.cold:
            return store.search([question.text for question in questions], self.k, self.scope, leave_out)
        drawn = store.sample(self.k + 1, self.scope, leave_out=leave_out)
        return [_others(question, drawn)[: self.k] for question in questions]

    def build_label_prompts(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[LabelPrompt]:
        return [
            self._prompt(question, reading.neighbors[self.name])
            for question, reading in zip(questions, readings, strict=True)
        ]

    def _prompt(self, question: Question, neighbors: Sequence[Neighbor]) -> LabelPrompt:
        """Least similar example first, the question itself last."""
        known, unknown = self.labels
        lang, template = detect_question_language(question), load_packaged_templates("history")
        words = [known if neighbor.label == KnowledgeLabel.KNOWN else unknown for neighbor in reversed(neighbors)]
        asked = [*(neighbor.question for neighbor in reversed(neighbors)), question.text]
        starts = ["", *(f"{word}\n\n" for word in words)]
        parts = [start + template.fill("example", lang, query=text) for start, text in zip(starts, asked, strict=True)]
        return LabelPrompt(tuple(parts), prefix=template.fill("instruction", lang, known=known, unknown=unknown))

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        return [
            score_logits(reading.labels[self.name], get_known_flags(reading.neighbors[self.name]), self.sign)
            for reading in readings
        ]

    def explain(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[str]:
        """What the LLM was shown and what it made of it; the two may well point in different directions."""
        needs = self.score(questions, readings)
        shown = [get_known_flags(reading.neighbors[self.name]) for reading in readings]
        return [
            f"shown {len(known)} similar logged questions, {sum(known)} of them known, the LLM expects "
            f"{'not ' if need > 0.5 else ''}to know this one"
            for known, need in zip(shown, needs, strict=True)
        ]


def _others(question: Question, drawn: Sequence[Neighbor]) -> tuple[Neighbor, ...]:
    """Without the question itself, however it is written."""
    own = question_key(question.text)
    return tuple(neighbor for neighbor in drawn if question_key(neighbor.question) != own)


def get_known_flags(neighbors: Sequence[Neighbor]) -> list[bool]:
    """Labels in the order of the prompt: least similar first. What is time-sensitive counts as unknown."""
    return [neighbor.label == KnowledgeLabel.KNOWN for neighbor in reversed(neighbors)]


def score_logits(logits: Vector, known: Sequence[bool], sign: CalibrationSign) -> float:
    z_known, z_unknown = calibrate_logits(logits, known, sign)
    return sigmoid(float(z_unknown - z_known))


def calibrate_logits(logits: Vector, known: Sequence[bool], sign: CalibrationSign) -> tuple[float, float]:
    """The last row's (z_known, z_unknown), corrected by the mean deficits of the examples before it.

    deficit of an example: by how much its own label lost against the other, 0 if it won (equations 1-6).
    """
    examples = logits[:-1]
    losses_known = [max(0.0, float(z[1] - z[0])) for z, truth in zip(examples, known, strict=True) if truth]
    losses_unknown = [max(0.0, float(z[0] - z[1])) for z, truth in zip(examples, known, strict=True) if not truth]
    factor = {"paper": -1.0, "code": 1.0, "none": 0.0}[sign]
    return (
        float(logits[-1][0]) + factor * _mean(losses_known),
        float(logits[-1][1]) + factor * _mean(losses_unknown),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
