"""The gate of DH-ICL: shows the LLM similar logged questions and whether it knew them, then asks about a new one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from knowgate.data.history.entries import HistoryScope, KnowledgeLabel, question_key
from knowgate.data.history.store import HistoryStore
from knowgate.errors import BadSetting, UnsupportedSignal
from knowgate.gates.history_scope import bind_scope, open_history_store
from knowgate.gates.scoring import parse_label_pair
from knowgate.models.prompts.templates import detect_question_language, load_packaged_templates
from knowgate.stats.metrics import sigmoid
from knowgate.types import Gate, LabelPrompt, ModelIdentity, Neighbor, Question, Reading, ServedModel, Signal, Vector

CalibrationSign = Literal["paper", "code", "none"]


@dataclass(frozen=True)
class DhiclGate(Gate):
    """Asks the LLM whether it knows a question, after showing k similar logged questions as examples.

    Each example says whether the LLM knew the answer. The LLM replies with a label such as true (known) or false
    (unknown). The need for retrieval is sigmoid(z_unknown - z_known), with the label logits z. The logits are corrected
    for the LLM's errors on the examples.

    Needs: labels. Cost per question: one prefill of about 600 tokens (k = 20), with a cached instruction.
    Reference: Lv et al. (DH-ICL), section 3.

    Attributes:
        history: Path or address of the log of earlier questions, or an open store.
        k: Number of examples.
        words: The labels for known and unknown, separated by a slash.
        sign: Direction of the correction. 'paper' subtracts the mean deficit as printed, 'code' adds it as the released
            code does, 'none' applies no correction.
        cold: Use fixed random examples instead of similar ones (section 4.8).
        time_sensitive: Also show logged questions whose answers change with time, as unknown (Table 4 omits them).
        balanced: Show as many known as unknown examples, the most similar of each, so that the LLM cannot copy the
            share of known questions in the log.
        embedder: Embedding model for the similarity: 'mpnet', 'm3e' or a sentence-transformers name. Default: the
            embedding model of the log. A log that was written with a different embedding model is rejected.
        tenant: Tenant (customer) whose logged questions are used.
        scope: Which entries of the log are used; set by `bind`.

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
    balanced: bool = False
    embedder: str | None = None
    tenant: str = ""
    scope: HistoryScope | None = None
    needs = frozenset({Signal.LABELS})

    def __post_init__(self) -> None:
        """Raise BadSetting if an option has a wrong value."""
        parse_label_pair(self.words, self.name)
        if self.k < 1:
            raise BadSetting(f"gate 'dhicl': k, the number of examples, is {self.k}, but it must be at least 1.")
        if self.balanced and (self.cold or self.k == 1):
            raise BadSetting("gate 'dhicl': balanced=true is possible only with k of at least 2 and cold=false.")

    @property
    def labels(self) -> tuple[str, ...]:
        """The two answer labels: known, unknown."""
        return parse_label_pair(self.words, self.name)

    def bind(self, model: ModelIdentity, prompts: str) -> Self:
        """Return a copy that uses the logged questions of this LLM and these prompts.

        Raises:
            UnsupportedSignal: The server of the LLM does not return token probabilities inside a prompt.
            BadSetting: The log is missing or has no entries for this LLM.
        """
        if isinstance(model, ServedModel) and not model.reads_inner_labels:
            raise UnsupportedSignal(
                f"gate 'dhicl' reads token probabilities inside a prompt. The server of {model.name} does not return them. "
                "Serve the model with vLLM, SGLang or llama.cpp, or use gate 'prompt', 'logprob:min' or 'skr'."
            )
        return replace(self, scope=bind_scope(self.history, model.fingerprint, prompts, self.tenant, self.embedder))

    def find_neighbors(self, questions: Sequence[Question]) -> list[tuple[Neighbor, ...]]:
        """Find k logged questions as examples for each question.

        With `cold`, all questions get the same random examples.
        """
        if self.scope is None:
            raise BadSetting("gate 'dhicl' is not bound to a model. Call `bind` first, or use the gate in AdaptiveRAG.")
        store = open_history_store(self.history, self.embedder)
        excluded = () if self.time_sensitive else (KnowledgeLabel.TIME_SENSITIVE,)
        texts = [question.text for question in questions]
        if self.balanced:
            return self._find_balanced(store, texts, self.scope, excluded)
        if not self.cold:
            return store.search(texts, self.k, self.scope, excluded)
        # One more than needed, because the question itself may be among the examples.
        examples = store.sample(self.k + 1, self.scope, exclude=excluded)
        return [_exclude_question(question, examples)[: self.k] for question in questions]

    def _find_balanced(
        self, store: HistoryStore, texts: list[str], scope: HistoryScope, excluded: tuple[KnowledgeLabel, ...]
    ) -> list[tuple[Neighbor, ...]]:
        """Find the most similar known and the most similar unknown examples for each text, half of each."""
        n_known = self.k // 2
        not_known = (KnowledgeLabel.UNKNOWN, KnowledgeLabel.TIME_SENSITIVE)
        known = store.search(texts, n_known, scope, exclude=not_known)
        unknown = store.search(texts, self.k - n_known, scope, exclude=(KnowledgeLabel.KNOWN, *excluded))
        return [_merge_by_similarity(*examples) for examples in zip(known, unknown, strict=True)]

    def build_label_prompts(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[LabelPrompt]:
        """Build one prompt per question, with similar logged questions as examples."""
        pairs = zip(questions, readings, strict=True)
        return [self._build_prompt(question, reading.neighbors[self.name]) for question, reading in pairs]

    def _build_prompt(self, question: Question, neighbors: Sequence[Neighbor]) -> LabelPrompt:
        """Build a prompt of logged questions with labels, then the new question. The most similar example comes last.

        The prompt is split into parts. Each part ends where the LLM predicts a label, and the next part begins with the
        true label.
        """
        known, unknown = self.labels
        language = detect_question_language(question)
        templates = load_packaged_templates("history")
        parts = []
        previous_label = ""
        for neighbor in reversed(neighbors):
            parts.append(previous_label + templates.fill("example", language, query=neighbor.question))
            previous_label = (known if neighbor.label == KnowledgeLabel.KNOWN else unknown) + "\n\n"
        parts.append(previous_label + templates.fill("example", language, query=question.text))
        instruction = templates.fill("instruction", language, known=known, unknown=unknown)
        return LabelPrompt(tuple(parts), prefix=instruction)

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        """Compute the need for retrieval from the LLM's prediction whether it knows the answer.

        The LLM makes this prediction also for the examples. Its errors there are known, and correct the prediction for
        the question.
        """
        needs = []
        for reading in readings:
            logits = reading.labels[self.name]
            known = get_known_flags(reading.neighbors[self.name])
            needs.append(score_logits(logits, known, self.sign))
        return needs

    def explain(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[str]:
        """Say how many examples the LLM knew, and its guess for the question."""
        needs = self.score(questions, readings)
        examples = [get_known_flags(reading.neighbors[self.name]) for reading in readings]
        return [
            f"shown {len(known)} similar logged questions, {sum(known)} of them known, the LLM expects "
            f"{'not ' if need > 0.5 else ''}to know this one"
            for known, need in zip(examples, needs, strict=True)
        ]


def _merge_by_similarity(known: Sequence[Neighbor], unknown: Sequence[Neighbor]) -> tuple[Neighbor, ...]:
    """Merge two lists of examples, the most similar first."""
    return tuple(sorted((*known, *unknown), key=lambda neighbor: -neighbor.similarity))


def _exclude_question(question: Question, neighbors: Sequence[Neighbor]) -> tuple[Neighbor, ...]:
    """Remove the question itself from its examples, also if it is spelled differently."""
    key = question_key(question.text)
    return tuple(neighbor for neighbor in neighbors if question_key(neighbor.question) != key)


def get_known_flags(neighbors: Sequence[Neighbor]) -> list[bool]:
    """Return whether the LLM knew each example, in the order of the prompt.

    The prompt shows the least similar example first.
    """
    return [neighbor.label == KnowledgeLabel.KNOWN for neighbor in reversed(neighbors)]


def score_logits(logits: Vector, known: Sequence[bool], sign: CalibrationSign) -> float:
    """Compute the need for retrieval from 0 (known) to 1 (retrieve).

    The LLM's errors on the examples are used to correct its logits for the question.

    Args:
        logits: One row (z_known, z_unknown) for each example, then one for the question.
        known: Whether the LLM really knew each example.
        sign: 'paper' subtracts the correction as the paper says, 'code' adds it as the code of the paper does, and 'none'
            leaves it out.
    """
    z_known, z_unknown = calibrate_logits(logits, known, sign)
    return sigmoid(float(z_unknown - z_known))


def calibrate_logits(logits: Vector, known: Sequence[bool], sign: CalibrationSign) -> tuple[float, float]:
    """Correct the label logits of a question by the LLM's errors on the examples. See equations 1-6 of DH-ICL.

    The deficit of an example is how far the logit of the true label is below the logit of the false label; 0 if above.
    The mean deficit of the known examples corrects z_known, the mean deficit of the unknown examples z_unknown.

    Args:
        logits: One row (z_known, z_unknown) for each example, then one for the question.
        known: Whether the LLM really knew each example.
        sign: 'paper' subtracts the mean deficits as the paper says, 'code' adds them as the code of the paper does, and
            'none' ignores them.

    Returns:
        The corrected z_known and z_unknown of the question.
    """
    *example_logits, question_logits = logits
    known_deficits = []
    unknown_deficits = []
    for (z_known, z_unknown), is_known in zip(example_logits, known, strict=True):
        if is_known:
            known_deficits.append(max(0.0, float(z_unknown - z_known)))
        else:
            unknown_deficits.append(max(0.0, float(z_known - z_unknown)))
    factor = {"paper": -1.0, "code": 1.0, "none": 0.0}[sign]
    z_known, z_unknown = question_logits
    corrected_known = float(z_known) + factor * _mean(known_deficits)
    corrected_unknown = float(z_unknown) + factor * _mean(unknown_deficits)
    return corrected_known, corrected_unknown


def _mean(values: Sequence[float]) -> float:
    """Return the mean; 0 if there are no values."""
    return sum(values) / len(values) if values else 0.0
