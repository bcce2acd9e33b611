"""Frozen records that all packages share: questions, prompts, readings, decisions, answers and stream events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knowgate.types.markup import format_count, format_verdict, render_facts_html, shorten

Vector = NDArray[np.float32]
SYNTHETIC_KEY = "synthetic"  # key of `Question.meta` that marks a question written by an LLM


class Signal(StrEnum):
    """Kind of information that a model can offer and a gate can need."""

    DRAFT = "draft"  # beginning of the closed-book answer
    LOGPROBS = "logprobs"  # log-probability, entropy and margin of the draft's tokens; implies a draft
    SAMPLES = "samples"  # several sampled answers
    HIDDEN = "hidden"  # hidden states before and after the draft
    LABELS = "labels"  # logits of given label tokens at marked positions of a prompt


@dataclass(frozen=True)
class Passage:
    """Piece of a document. `score` comes from the retriever or the reranker."""

    id: str
    text: str
    title: str = ""
    score: float | None = None


@dataclass(frozen=True)
class Question:
    """A question and what the data set knows about it.

    Attributes:
        text: The question.
        id: Identifier in the data set.
        answers: Gold answers, if known.
        lang: Language code; None to detect it.
        choices: Options of a multiple-choice question.
        contexts: Passages that come with the question.
        meta: Any other fields of the data set.
    """

    text: str
    id: str = ""
    answers: tuple[str, ...] = ()
    lang: str | None = None
    choices: tuple[str, ...] = ()
    contexts: tuple[Passage, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_synthetic(self) -> bool:
        """Whether an LLM wrote the question."""
        return bool(self.meta.get(SYNTHETIC_KEY))


@dataclass(frozen=True)
class Prompt:
    """Input of a model: a user turn of a chat or, if `raw`, text that is continued without a chat template."""

    text: str
    raw: bool = False


@dataclass(frozen=True)
class LabelPrompt:
    """Prompt with marked positions at which the logits of labels are read.

    Attributes:
        parts: Text pieces; a label is read after each of them. Every piece but the first begins with the label that
            stands at the previous position.
        raw: If False, the only piece is a user turn and the label is read at the start of the answer.
        prefix: Text before the first piece that many prompts share, so that a backend can cache its computation.
    """

    parts: tuple[str, ...]
    raw: bool = True
    prefix: str = ""


@dataclass(frozen=True)
class Token:
    """Generated token.

    Attributes:
        text: Text of the token.
        logprob: Its log-probability.
        entropy: Entropy over the vocabulary in nats; None if the server returns only the top tokens.
        margin: Probability of the most probable token minus that of the second.
    """

    text: str
    logprob: float
    entropy: float | None = None
    margin: float | None = None


@dataclass(frozen=True)
class Completion:
    """Generated text.

    Attributes:
        text: The text.
        tokens: Its tokens; None if the backend gives no log-probabilities.
        finished: False if the token limit stopped the generation.
        n_tokens: Number of generated tokens.
    """

    text: str
    tokens: tuple[Token, ...] | None = None
    finished: bool = True
    n_tokens: int = 0


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. By default tokens are drawn from the whole distribution.

    Attributes:
        temperature: Applied first.
        top_p: Keep the fewest most probable tokens whose probabilities reach this sum; 1 keeps all.
        top_k: Keep this many of the most probable tokens; 0 keeps all.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether all tokens can be drawn."""
        return self.top_p >= 1 and self.top_k == 0


@dataclass(frozen=True)
class SignalRequest:
    """What to read in one pass over a question, so that nothing unneeded is computed.

    Attributes:
        draft_tokens: Longest draft; 0 for no draft.
        layers: Indices of the hidden states to keep (0 is the embeddings, negative ones count from the end).
        after_draft: Also keep the hidden states at the last token of the draft.
        samples: Number of sampled answers.
        sample_tokens: Longest sampled answer.
        sampling: How samples are drawn.
        seed: Seed of the samples.
        sample_layer: Layer whose hidden state at the end of each sample is kept.
        resumable: Whether generation may continue from the reading. If not, its cache is freed at once.
        sample_end: Read the state of a sample at its end-of-sequence token instead of its last text token.
        entropies: Request token entropies from backends that compute them only on demand.
    """

    draft_tokens: int = 0
    layers: tuple[int, ...] = ()
    after_draft: bool = False
    samples: int = 0
    sample_tokens: int = 32
    sampling: Sampling = Sampling()
    seed: int | None = None
    sample_layer: int | None = None
    resumable: bool = True
    sample_end: bool = False
    entropies: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether no pass over the question is needed."""
        return not (self.draft_tokens or self.layers or self.samples)

    def __or__(self, other: SignalRequest) -> SignalRequest:
        """Combine two requests into one that one pass can serve."""
        return SignalRequest(
            draft_tokens=max(self.draft_tokens, other.draft_tokens),
            layers=tuple(sorted({*self.layers, *other.layers})),
            after_draft=self.after_draft or other.after_draft,
            samples=max(self.samples, other.samples),
            sample_tokens=max(self.sample_tokens, other.sample_tokens),
            sampling=self.sampling if self.samples else other.sampling,
            seed=self.seed if self.seed is not None else other.seed,
            sample_layer=self.sample_layer if self.sample_layer is not None else other.sample_layer,
            resumable=self.resumable or other.resumable,
            sample_end=self.sample_end or other.sample_end,
            entropies=self.entropies or other.entropies,
        )


@dataclass(frozen=True)
class Neighbor:
    """Logged question that is similar to the current one.

    Attributes:
        question: Text of the logged question.
        label: 'known', 'unknown' or 'time-sensitive'.
        similarity: Cosine similarity to the current question.
        outcome: Effect of retrieval on its answer ('better', 'worse' or 'same'), if known.
        source: Where the log entry comes from.
        weight: Weight of the entry in a vote.
    """

    question: str
    label: str
    similarity: float
    outcome: str | None = None
    source: str = ""
    weight: float = 1.0


@dataclass(frozen=True)
class Reading:
    """Signals from one forward pass over a question without passages.

    Attributes:
        draft: Beginning of the closed-book answer.
        hidden: Hidden state at the last prompt token, by layer.
        hidden_after: Hidden state at the last draft token, by layer.
        samples: Sampled answers.
        labels: Logits (marked positions x labels), by the name of the gate that asked for them.
        neighbors: Similar logged questions, most similar first, by the name of the gate that searched them.
        signals: Precomputed numbers that stand in for signals that were not stored.
        resume: Handle that `Model.generate` takes to continue the draft without a second prefill.
        sample_states: Hidden state at the end of each sample.
    """

    draft: Completion | None = None
    hidden: Mapping[int, Vector] = field(default_factory=dict)
    hidden_after: Mapping[int, Vector] = field(default_factory=dict)
    samples: tuple[Completion, ...] = ()
    labels: Mapping[str, Vector] = field(default_factory=dict)
    neighbors: Mapping[str, tuple[Neighbor, ...]] = field(default_factory=dict)
    signals: Mapping[str, float] = field(default_factory=dict)
    resume: object | None = field(default=None, repr=False, compare=False)
    sample_states: Vector | None = field(default=None, repr=False, compare=False)


class DecisionNote(StrEnum):
    """Machine-readable remark about how a decision was carried out."""

    NOTHING_FOUND = "nothing found"
    PASSAGES_USELESS = "passages useless"  # the passage filter dropped them
    NO_PASSAGE_FITS = "no passage fits"  # none fits into the context window
    NOT_RERANKED = "not reranked"  # the retriever was sure of its order
    RETRIEVED_AGAIN = "retrieved again"  # once for each round of retrieval after the first
    DRAFT_GIVEN = "draft given"  # the arbiter chose the closed-book answer after retrieval
    LABELS_UNLISTED = "labels unlisted"  # the server listed none of the gate's labels among its top tokens
    WOULD_SKIP = "would skip"  # the gate or a rule decided to skip, but shadow mode retrieves everything


@dataclass(frozen=True, repr=False)
class Decision:
    """Decision whether to retrieve for a question, and why.

    Attributes:
        retrieve: True to retrieve.
        need: Score of the gate in [0, 1]: 0 means that the LLM knows the answer, 1 that it must retrieve.
        threshold: Retrieve if `need` is above this.
        gate: Name of the gate.
        reason: Explanation in words.
        neighbors: Similar logged questions that the gate used.
        notes: Machine-readable remarks; see `DecisionNote`.
        raw: Score of a fitted gate before calibration; None for other gates.
        distance: Distance to the training questions of the gate; above 1 it is farther than 99 % of them.
        rule: Name of the rule that decided instead of the gate; empty if none did.
    """

    retrieve: bool
    need: float
    threshold: float
    gate: str
    reason: str
    neighbors: tuple[Neighbor, ...] = ()
    notes: tuple[str, ...] = ()
    raw: float | None = None
    distance: float | None = None
    rule: str = ""

    def __repr__(self) -> str:
        return f"<Decision: {format_verdict(self.retrieve)}, {shorten(self.reason)}; gate {self.gate}>"

    def _repr_html_(self) -> str:
        """Render the decision for notebooks."""
        return render_facts_html(self._facts)

    @property
    def _facts(self) -> list[tuple[str, str]]:
        """Name and value of each part of the decision, for display."""
        neighbors = [(f"similar, {item.label}", f"{item.question} ({item.similarity:.2f})") for item in self.neighbors]
        facts = [("decision", format_verdict(self.retrieve)), ("because", self.reason), ("gate", self.gate)]
        return [*facts, *neighbors]


@dataclass(frozen=True)
class ArbiterChoice:
    """Which of two answers an arbiter gave after retrieval.

    Attributes:
        is_closed_book: Whether the closed-book answer was given.
        arbiter: Name of the arbiter.
        reason: Explanation in words.
        closed: Text of the closed-book answer.
        open: Text of the open-book answer.
        closed_probability: Probability that the closed-book answer is right; None if the two answers agree, because
            then the arbiter is not called.
        open_probability: The same for the open-book answer.
    """

    is_closed_book: bool
    arbiter: str
    reason: str
    closed: str
    open: str
    closed_probability: float | None = None
    open_probability: float | None = None

    @property
    def was_arbitrated(self) -> bool:
        """Whether the arbiter preferred one of the answers."""
        return self.closed_probability != self.open_probability


@dataclass(frozen=True, repr=False)
class Answer:
    """Answer to a question and how it came about.

    Attributes:
        question: The question.
        text: The answer.
        decision: Whether passages were retrieved, and why.
        passages: Passages that the LLM was given.
        seconds: Duration of each stage, and 'total'.
        draft: Closed-book draft that the gate read.
        n_tokens: Tokens generated for `text`, including its draft.
        choice: What the arbiter chose; None if there was no choice.
        batch_size: Number of questions answered in the same passes. Their time is shared evenly.
        finished: False if the token limit cut the answer off.
    """

    question: Question
    text: str
    decision: Decision
    passages: tuple[Passage, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    draft: Completion | None = None
    n_tokens: int = 0
    choice: ArbiterChoice | None = None
    batch_size: int = 1
    finished: bool = True

    @property
    def open_text(self) -> str:
        """The open-book answer, even if the arbiter chose the other one."""
        return self.text if self.choice is None else self.choice.open

    def __repr__(self) -> str:
        path = f"{format_verdict(self.decision.retrieve)}, {format_count(len(self.passages), 'passage')}"
        question, reason = shorten(self.question.text), shorten(self.decision.reason)
        return f"<Answer {shorten(self.text)!r} to {question!r}: {path}; {reason}>"

    def _repr_html_(self) -> str:
        """Render question, answer, decision and passages for notebooks."""
        passages = [(f"passage {item.id}", f"{item.title}: {item.text}".removeprefix(": ")) for item in self.passages]
        facts = [("question", self.question.text), ("answer", self.text), *self.decision._facts, *passages]
        return render_facts_html(facts)


@dataclass(frozen=True)
class DecisionEvent:
    """The gate has decided. The decision of the final answer may hold more, such as notes on retrieval."""

    decision: Decision


@dataclass(frozen=True)
class PassagesEvent:
    """Passages that the LLM is given. Each round of retrieval that changes them has its own event."""

    passages: tuple[Passage, ...]


@dataclass(frozen=True)
class TextEvent:
    """Next piece of the answer; never empty. All pieces joined are the text of the answer."""

    text: str


@dataclass(frozen=True)
class AnswerEvent:
    """The complete answer. It is the last event."""

    answer: Answer


StreamEvent = DecisionEvent | PassagesEvent | TextEvent | AnswerEvent
