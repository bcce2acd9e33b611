"""Frozen records that all packages share: questions, prompts, readings, decisions, answers and stream events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knowgate.types.markup import format_count, format_verdict, render_html_table, shorten

Vector = NDArray[np.float32]
SYNTHETIC_KEY = "synthetic"  # key of `Question.meta` that marks a question written by an LLM


class Signal(StrEnum):
    """Kind of information from an LLM for a gate, such as log-probabilities."""

    DRAFT = "draft"  # beginning of the closed-book answer, which is given without passages
    LOGPROBS = "logprobs"  # log-probability, entropy and margin of the draft's tokens; implies a draft
    SAMPLES = "samples"  # several sampled answers
    HIDDEN = "hidden"  # hidden states before and after the draft
    LABELS = "labels"  # logits of given answer words (labels) at marked positions of a prompt
    TOOLS = "tools"  # whether the LLM calls a tool that it is offered


@dataclass(frozen=True)
class Passage:
    """Piece of a document.

    Attributes:
        id: Identifier in the index.
        text: Text of the passage.
        title: Title of the document; may be empty.
        score: Relevance to the question, from the retriever or the reranker; None if not scored.
    """

    id: str
    text: str
    title: str = ""
    score: float | None = None


@dataclass(frozen=True)
class Question:
    """A question and what the data set says about it.

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
    """Input of an LLM.

    Attributes:
        text: A message of the user in a chat or, if `raw`, text that the LLM continues.
        raw: Whether to pass the text to the LLM without its chat template.
    """

    text: str
    raw: bool = False


@dataclass(frozen=True)
class LabelPrompt:
    """Prompt with questions that have fixed answer words (labels), such as yes and no.

    After each piece, the logits of the labels are read.

    Attributes:
        parts: Pieces of the text, such as ("Is it true? ", "yes. Is it new? "). Every piece except the first begins with
            the answer to the piece before it.
        raw: Whether the LLM continues the text. If False, the text is a chat message of the user in one piece, and the
            logits are read at the start of the LLM's reply.
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
        logprob: Log-probability of the token.
        entropy: Entropy over the vocabulary in nats; None if the server returns only the top tokens.
        margin: Probability of the most probable token minus the probability of the second most probable token.
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
        tokens: Tokens of the text; None if the backend returns no log-probabilities.
        finished: False if the token limit stopped the generation.
        n_tokens: Number of generated tokens.
    """

    text: str
    tokens: tuple[Token, ...] | None = None
    finished: bool = True
    n_tokens: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether the text is empty or white space. Reasoning models return such answers at a low token limit."""
        return not self.text.strip()


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. By default tokens are drawn from the whole distribution.

    Attributes:
        temperature: Sampling temperature, applied before `top_p` and `top_k`.
        top_p: Draw from the smallest set of most probable tokens whose probabilities add up to this; 1 for all tokens.
        top_k: Draw from this many of the most probable tokens; 0 for all tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @property
    def keeps_all_tokens(self) -> bool:
        """Whether samples are drawn from all tokens, without a `top_p` or `top_k` limit."""
        return self.top_p >= 1 and self.top_k == 0


@dataclass(frozen=True)
class SignalRequest:
    """Signals to read from the LLM for a question. Other signals are not computed.

    Attributes:
        draft_tokens: Maximum length of the draft in tokens; 0 for no draft.
        layers: Layers whose hidden states at the last token of the prompt are returned. 0 is the embedding; negative
            numbers count from the last layer.
        after_draft: Whether the hidden states at the last token of the draft are returned, too.
        samples: Number of sampled answers.
        sample_tokens: Maximum length of a sampled answer in tokens.
        sampling: Sampling parameters of the sampled answers.
        seed: Seed of the sampled answers.
        sample_layer: Layer whose hidden state at the end of each sampled answer is returned; None for none.
        resumable: Whether the draft may be continued later. If False, its key-value cache is freed at once.
        sample_end: Take the hidden state of a sample at its end-of-sequence token instead of its last text token.
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
        """Whether nothing is requested, so that the LLM need not be called."""
        return not (self.draft_tokens or self.layers or self.samples)

    def __or__(self, other: SignalRequest) -> SignalRequest:
        """Combine two requests into one that reads all signals of both. Of two numbers, the larger one counts."""
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
    """Earlier question from the log that is similar to the current one.

    Attributes:
        question: Text of the logged question.
        label: 'known', 'unknown' or 'time-sensitive'.
        similarity: Cosine similarity to the current question.
        outcome: Effect of retrieval on the answer to the logged question ('better', 'worse' or 'same'), if known.
        source: Where the log entry comes from.
        weight: Weight of the entry when neighbors vote on the current question.
    """

    question: str
    label: str
    similarity: float
    outcome: str | None = None
    source: str = ""
    weight: float = 1.0


@dataclass(frozen=True)
class Reading:
    """Signals that were read from the LLM for a question without passages.

    Attributes:
        draft: Beginning of the closed-book answer; None if not requested.
        hidden: Hidden state at the last token of the prompt, keyed by layer.
        hidden_after: Hidden state at the last token of the draft, keyed by layer.
        samples: Sampled answers.
        labels: Logits (marked positions x labels), keyed by the name of the gate that asked for them.
        neighbors: Similar logged questions, most similar first, keyed by the name of the gate that searched for them.
        signals: Numbers by name that a label run (recorded answers) stores in place of larger signals, such as the
            uncertainty in place of hidden states.
        resume: Handle with which `Model.generate` continues the draft without processing the prompt again; None if the
            LLM cannot continue drafts.
        sample_states: Hidden state at the end of each sampled answer (samples x dimensions).
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

    NOTHING_FOUND = "nothing found"  # the retriever returned no passages
    PASSAGES_USELESS = "passages useless"  # the passage filter dropped the passages
    NO_PASSAGE_FITS = "no passage fits"  # no passage fits into the context window
    NOT_RERANKED = "not reranked"  # the reranker was skipped, because the retriever's scores were clear enough
    RETRIEVED_AGAIN = "retrieved again"  # once for each round of retrieval after the first
    DRAFT_GIVEN = "draft given"  # passages were retrieved, but the arbiter chose the closed-book answer
    QUOTED = "quoted"  # a small LLM's answer was not grounded in the passages; their best sentence is given instead
    LABELS_UNLISTED = "labels unlisted"  # the server returned probabilities for none of the gate's labels
    FAR_QUESTION = "far question"  # skipped, although the question is unlike those that the gate was fitted on
    WOULD_SKIP = "would skip"  # the gate or a rule decided to skip, but shadow mode retrieves everything


@dataclass(frozen=True, repr=False)
class Decision:
    """Decision whether to retrieve for a question, and why.

    Attributes:
        retrieve: True to retrieve.
        need: Need for retrieval that the gate scored, from 0 (the LLM knows the answer) to 1 (retrieve).
        threshold: Passages are retrieved if `need` is above this.
        gate: Name of the gate.
        reason: Explanation in words.
        neighbors: Similar logged questions that the gate used.
        notes: Machine-readable remarks; see `DecisionNote`.
        raw: Score of a fitted gate before calibration; None for other gates.
        distance: Distance to the questions that the gate was fitted on; above 1 is farther than 99 % of them. None if
            unknown.
        rule: Name of the rule that decided instead of the gate; empty if the gate decided.
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
        return render_html_table(("", ""), self._facts)

    @property
    def _facts(self) -> list[tuple[str, str]]:
        """The parts of the decision as (name, value) pairs for display, such as ("gate", "probe")."""
        facts = [("decision", format_verdict(self.retrieve)), ("because", self.reason), ("gate", self.gate)]
        for neighbor in self.neighbors:
            facts.append((f"similar, {neighbor.label}", f"{neighbor.question} ({neighbor.similarity:.2f})"))
        return facts


@dataclass(frozen=True)
class ArbiterChoice:
    """Which answer an arbiter chose after retrieval: closed-book (without passages) or open-book (with passages).

    Attributes:
        is_closed_book: Whether the closed-book answer was chosen.
        arbiter: Name of the arbiter.
        reason: Explanation in words.
        closed: Text of the closed-book answer.
        open: Text of the open-book answer.
        closed_probability: Probability that the closed-book answer is correct. None if the two answers agree, so that
            the arbiter is not called.
        open_probability: Probability that the open-book answer is correct. None if the two answers agree.
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
        """Whether the arbiter preferred one answer to the other. Both probabilities are None for equal answers."""
        return self.closed_probability != self.open_probability


@dataclass(frozen=True, repr=False)
class Answer:
    """Answer to a question, with the decision, the passages and the time that led to it.

    Attributes:
        question: The question.
        text: The answer.
        decision: Whether passages were retrieved, and why.
        passages: Passages that the LLM was given; empty if none were retrieved.
        seconds: Duration of each stage in seconds, keyed by its name, and 'total'.
        draft: Beginning of an answer without passages that the gate read; None if it read none.
        n_tokens: Number of tokens generated for `text`, including its draft.
        choice: Choice of the arbiter between two answers; None without an arbiter or without retrieval.
        batch_size: Number of questions that were answered together. `seconds` is an equal share of their time.
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
        """Text of the answer with passages, even if the arbiter rejected it. Without an arbiter, this is `text`."""
        return self.text if self.choice is None else self.choice.open

    def __repr__(self) -> str:
        """Show the answer, the question and the decision in one line."""
        path = f"{format_verdict(self.decision.retrieve)}, {format_count(len(self.passages), 'passage')}"
        question, reason = shorten(self.question.text), shorten(self.decision.reason)
        return f"<Answer {shorten(self.text)!r} to {question!r}: {path}; {reason}>"

    def _repr_html_(self) -> str:
        """Render question, answer, decision and passages for notebooks."""
        passages = [(f"passage {item.id}", f"{item.title}: {item.text}".removeprefix(": ")) for item in self.passages]
        facts = [("question", self.question.text), ("answer", self.text), *self.decision._facts, *passages]
        return render_html_table(("", ""), facts)


@dataclass(frozen=True)
class DecisionEvent:
    """Event: the gate has decided. The final answer may add notes to the decision."""

    decision: Decision


@dataclass(frozen=True)
class PassagesEvent:
    """Event: passages for the LLM were retrieved. Another round of retrieval gives another event."""

    passages: tuple[Passage, ...]


@dataclass(frozen=True)
class TextEvent:
    """Event: the next piece of the answer, never empty. All pieces joined are the answer."""

    text: str


@dataclass(frozen=True)
class AnswerEvent:
    """Event: the complete answer. This is the last event of a stream."""

    answer: Answer


StreamEvent = DecisionEvent | PassagesEvent | TextEvent | AnswerEvent
