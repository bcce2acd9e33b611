"""The records of the project: frozen, plain numpy; nothing here knows torch, HTTP or files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knowgate.types.markup import format_count, format_verdict, render_facts_html, shorten

Vector = NDArray[np.float32]
SYNTHETIC_KEY = "synthetic"  # the key of `meta` that marks a question which an LLM wrote


class Signal(StrEnum):
    """Something a model backend can give and a gate can need."""

    DRAFT = "draft"  # the start of the closed-book answer
    LOGPROBS = "logprobs"  # log-probability, entropy and margin of the draft's tokens; implies a draft
    SAMPLES = "samples"  # several sampled answers
    HIDDEN = "hidden"  # hidden states before and after the draft
    LABELS = "labels"  # logits of given label tokens at marked positions of a prompt


@dataclass(frozen=True)
class Passage:
    """A piece of a document; `score` is the retriever's or reranker's."""

    id: str
    text: str
    title: str = ""
    score: float | None = None


@dataclass(frozen=True)
class Question:
    """What is asked, with whatever the data set knows about it. `answers` are gold answers, if any."""

    text: str
    id: str = ""
    answers: tuple[str, ...] = ()
    lang: str | None = None
    choices: tuple[str, ...] = ()
    contexts: tuple[Passage, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_synthetic(self) -> bool:
        """An LLM wrote it."""
        return bool(self.meta.get(SYNTHETIC_KEY))


@dataclass(frozen=True)
class Prompt:
    """One input of a model: a user turn, or, if `raw`, text to be continued just as it stands."""

    text: str
    raw: bool = False


@dataclass(frozen=True)
class LabelPrompt:
    """A prompt cut at the places where a label is read: a label is expected after each part.

    Parts after the first begin with the label that stands there. If not `raw`, the one part is a user turn and
    the label is read where the answer would begin. `prefix` stands before the first part and is the same in many
    prompts (an instruction, say): a backend may keep what it computed for it.
    """

    parts: tuple[str, ...]
    raw: bool = True
    prefix: str = ""


@dataclass(frozen=True)
class Token:
    """A generated token. Entropy is in nats over the whole vocabulary; margin is p(first) - p(second).

    A server that shows only the top tokens leaves entropy None and gives the margin among those.
    """

    text: str
    logprob: float
    entropy: float | None = None
    margin: float | None = None


@dataclass(frozen=True)
class Completion:
    """Generated text. `tokens` is None when the backend gives no log-probabilities."""

    text: str
    tokens: tuple[Token, ...] | None = None
    finished: bool = True  # False: stopped by the token limit
    n_tokens: int = 0


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn: first the temperature, then the top_k most probable tokens (0: all), then the fewest of
    those whose probabilities reach top_p. By default nothing is cut off.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @property
    def is_whole(self) -> bool:
        """Nothing is cut off."""
        return self.top_p >= 1 and self.top_k == 0


@dataclass(frozen=True)
class SignalRequest:
    """What to read, so that nothing is computed that no gate asked for.

    layers: indices into the hidden-state tuple (0 = embeddings); negative ones count from the end.
    sample_layer: the layer whose state at the end of each sample is wanted.
    sample_end: there at the token that ends it, where one does; else at the last token of its text.
    resumable: whether somebody may go on from the reading; if not, nothing of the pass is held in memory.
    entropies: of the draft's tokens, from backends that give them only when asked.
    """

    draft_tokens: int = 0
    layers: tuple[int, ...] = ()
    after_draft: bool = False  # also the states at the last drafted token
    samples: int = 0
    sample_tokens: int = 32
    sampling: Sampling = Sampling()
    seed: int | None = None
    sample_layer: int | None = None
    resumable: bool = True
    sample_end: bool = False
    entropies: bool = False

    @property
    def is_nothing(self) -> bool:
        """No pass over the question is needed."""
        return not (self.draft_tokens or self.layers or self.samples)

    def __or__(self, other: SignalRequest) -> SignalRequest:
        """Both wants in one pass."""
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
    """A logged question near the one asked. `label` is known, unknown or time-sensitive; `outcome` what retrieving
    did to its answer (better, worse, same), where that is known."""

    question: str
    label: str
    similarity: float
    outcome: str | None = None
    source: str = ""
    weight: float = 1.0


@dataclass(frozen=True)
class Reading:
    """What one forward pass over the bare question gave.

    hidden[layer] is the state at the last prompt token, hidden_after[layer] at the last drafted token.
    sample_states are those at the end of each sample: at the token that ends it, or at the last token of its text (the
    prompt's where it is empty), as it was wanted.
    labels[gate name] are logits, one row per marked position, one column per label.
    neighbours[gate name] are the logged questions the gate recalled, most similar first.
    signals are numbers that were worked out before and kept in the place of what they were read off.
    resume goes back into `Model.generate` to continue the draft without a second prefill.
    """

    draft: Completion | None = None
    hidden: Mapping[int, Vector] = field(default_factory=dict)
    hidden_after: Mapping[int, Vector] = field(default_factory=dict)
    samples: tuple[Completion, ...] = ()
    labels: Mapping[str, Vector] = field(default_factory=dict)
    neighbours: Mapping[str, tuple[Neighbor, ...]] = field(default_factory=dict)
    signals: Mapping[str, float] = field(default_factory=dict)
    resume: object | None = field(default=None, repr=False, compare=False)
    sample_states: Vector | None = field(default=None, repr=False, compare=False)


class DecisionNote(StrEnum):
    """A fact about how a decision was carried out."""

    NOTHING_FOUND = "nothing found"
    PASSAGES_USELESS = "passages useless"  # so the second look judged
    NO_PASSAGE_FITS = "no passage fits"  # into the context window
    NOT_RERANKED = "not reranked"  # the retriever was sure
    RETRIEVED_AGAIN = "retrieved again"  # once for each round of retrieval after the first
    DRAFT_GIVEN = "draft given"  # after retrieval the arbiter took the answer from memory
    LABELS_UNLISTED = "labels unlisted"  # a server that lists few tokens lists none of the gate's labels
    WOULD_SKIP = "would skip"  # the gate, or a rule; but everything is looked up at the moment


@dataclass(frozen=True, repr=False)
class Decision:
    """Retrieve or not, and why. `need` is in [0, 1]: 0 = the LLM knows, 1 = it must look up.

    reason: all of it in words, for people. notes: what became of the decision, for programs; kinds in `Note`.
    raw: what a fitted gate read before its calibration made a need of it, in the same direction; None of other gates.
    distance: of the question from those the gate was fitted on; above 1, it lies farther than 99 % of them.
    rule: name of the rule that decided, whatever the need; '' where none did.
    """

    retrieve: bool
    need: float
    threshold: float
    gate: str
    reason: str
    neighbours: tuple[Neighbor, ...] = ()
    notes: tuple[str, ...] = ()
    raw: float | None = None
    distance: float | None = None
    rule: str = ""

    def __repr__(self) -> str:
        return f"<Decision: {format_verdict(self.retrieve)}, {shorten(self.reason)}; gate {self.gate}>"

    def _repr_html_(self) -> str:
        """For notebooks."""
        return render_facts_html(self._facts)

    @property
    def _facts(self) -> list[tuple[str, str]]:
        near = [(f"similar, {one.label}", f"{one.question} ({one.similarity:.2f})") for one in self.neighbours]
        said = [("decision", format_verdict(self.retrieve)), ("because", self.reason), ("gate", self.gate)]
        return [*said, *near]


@dataclass(frozen=True)
class ArbiterChoice:
    """Two answers of a question that was retrieved for, and which of them was given. `closed` is the one from memory.

    believed_closed, believed_open: how probably each is right; None where they agree, so that nobody was asked.
    """

    from_memory: bool
    arbiter: str
    reason: str
    closed: str
    open: str
    believed_closed: float | None = None
    believed_open: float | None = None

    @property
    def was_weighed(self) -> bool:
        """One answer was believed more than the other."""
        return self.believed_closed != self.believed_open


@dataclass(frozen=True, repr=False)
class Answer:
    """The answer with the way it came about. `passages` are those the LLM was shown.

    draft: what the gate read of the closed-book answer. n_tokens: generated for `text`, its draft included.
    choice: of an answer that was chosen among two by an arbiter.
    finished: False where the answer was stopped by the token limit.
    together: questions that were answered in the same passes; the seconds of several are shared evenly among them.
    """

    question: Question
    text: str
    decision: Decision
    passages: tuple[Passage, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    draft: Completion | None = None
    n_tokens: int = 0
    choice: ArbiterChoice | None = None
    together: int = 1
    finished: bool = True

    @property
    def open_text(self) -> str:
        """What the LLM answered with passages, whether or not that was given."""
        return self.text if self.choice is None else self.choice.open

    def __repr__(self) -> str:
        way = f"{format_verdict(self.decision.retrieve)}, {format_count(len(self.passages), 'passage')}"
        return f"<Answer {shorten(self.text)!r} to {shorten(self.question.text)!r}: {way}; {shorten(self.decision.reason)}>"

    def _repr_html_(self) -> str:
        """For notebooks: question, answer, decision, and the passages shown."""
        passages = [
            (f"passage {one.id}", f"{one.title}: {one.text}" if one.title else one.text) for one in self.passages
        ]
        return render_facts_html(
            [("question", self.question.text), ("answer", self.text), *self.decision._facts, *passages]
        )


@dataclass(frozen=True)
class DecisionEvent:
    """The gate has decided. The decision of the whole answer may say more: what retrieval found, say."""

    decision: Decision


@dataclass(frozen=True)
class PassagesEvent:
    """What was looked up and the LLM will be shown; none where nothing was found or all of it was useless.

    Each round of retrieval that changes them has an event of its own; the last one holds those of the answer.
    """

    passages: tuple[Passage, ...]


@dataclass(frozen=True)
class TextEvent:
    """The next piece of the answer's text; never empty. Answers of earlier rounds of retrieval are not shown."""

    text: str


@dataclass(frozen=True)
class AnswerEvent:
    """The whole answer; nothing comes after it."""

    answer: Answer


StreamEvent = DecisionEvent | PassagesEvent | TextEvent | AnswerEvent
