"""The words of the project: frozen records and the protocols that backends, retrievers and gates fulfil.

Plain numpy only: nothing here knows torch, HTTP or files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]
Result = TypeVar("Result")


class Signal(StrEnum):
    """Something a model backend can give and a gate can need."""

    DRAFT = "draft"  # the start of the closed-book answer
    LOGPROBS = "logprobs"  # log-probability, entropy and margin of the draft's tokens; implies a draft
    SAMPLES = "samples"  # several sampled answers
    HIDDEN = "hidden"  # hidden states before and after the draft
    LABELS = "labels"  # logits of given label tokens at marked positions of a prompt


# --- records -------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class Prompt:
    """One input of a model: a user turn, or, if `raw`, text to be continued just as it stands."""

    text: str
    raw: bool = False


@dataclass(frozen=True)
class LabelPrompt:
    """A prompt cut at the places where a label is read: a label is expected after each part.

    Parts after the first begin with the label that stands there. If not `raw`, the one part is a user turn and
    the label is read where the answer would begin.
    """

    parts: tuple[str, ...]
    raw: bool = True


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
class Want:
    """What to read, so that nothing is computed that no gate asked for.

    layers: indices into the hidden-state tuple (0 = embeddings); negative ones count from the end.
    """

    draft_tokens: int = 0
    layers: tuple[int, ...] = ()
    after_draft: bool = False  # also the states at the last drafted token
    samples: int = 0
    sample_tokens: int = 32
    temperature: float = 1.0
    seed: int | None = None

    @property
    def is_nothing(self) -> bool:
        """No pass over the question is needed."""
        return not (self.draft_tokens or self.layers or self.samples)

    def __or__(self, other: Want) -> Want:
        """Both wants in one pass."""
        return Want(
            draft_tokens=max(self.draft_tokens, other.draft_tokens),
            layers=tuple(sorted({*self.layers, *other.layers})),
            after_draft=self.after_draft or other.after_draft,
            samples=max(self.samples, other.samples),
            sample_tokens=max(self.sample_tokens, other.sample_tokens),
            temperature=self.temperature,
            seed=self.seed if self.seed is not None else other.seed,
        )


@dataclass(frozen=True)
class Reading:
    """What one forward pass over the bare question gave.

    hidden[layer] is the state at the last prompt token, hidden_after[layer] at the last drafted token.
    labels[gate name] are logits, one row per marked position, one column per label.
    resume goes back into `Model.generate` to continue the draft without a second prefill.
    """

    draft: Completion | None = None
    hidden: Mapping[int, Vector] = field(default_factory=dict)
    hidden_after: Mapping[int, Vector] = field(default_factory=dict)
    samples: tuple[Completion, ...] = ()
    labels: Mapping[str, Vector] = field(default_factory=dict)
    resume: object | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Decision:
    """Retrieve or not, and why. `need` is in [0, 1]: 0 = the LLM knows, 1 = it must look up."""

    retrieve: bool
    need: float
    threshold: float
    gate: str
    reason: str


@dataclass(frozen=True)
class Answer:
    """The answer with the way it came about. `passages` are those the LLM was shown."""

    question: Question
    text: str
    decision: Decision
    passages: tuple[Passage, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)


# --- roles: batch in, batch out, same order, same length ----------------------------------------


class Model(Protocol):
    """An LLM. `fingerprint` is the identity that fitted artefacts are bound to."""

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def offers(self) -> frozenset[Signal]: ...
    @property
    def depth(self) -> int:
        """Entries of the hidden-state tuple: the embeddings and each layer's output; 0 when not offered."""
        ...

    def read(self, prompts: Sequence[Prompt], want: Want) -> list[Reading]:
        """The one pass: everything `want` asks for, and a handle to go on from there."""
        ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        n: int = 1,
        seed: int | None = None,
        resume: Sequence[object] | None = None,
    ) -> list[list[Completion]]:
        """`n` completions per prompt. With `resume`, the draft goes on and is part of the text given back."""
        ...

    def fits(self, prompts: Sequence[Prompt], max_tokens: int) -> list[bool]:
        """Whether each prompt and its answer fit the context window; True where a backend cannot tell."""
        ...

    def label_logits(self, prompts: Sequence[LabelPrompt], labels: Sequence[str]) -> list[Vector]:
        """For each prompt an array (marked positions x labels) of logits or log-probabilities."""
        ...


class Retriever(Protocol):
    """Finds passages. `fingerprint` names the corpus and the way of searching."""

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """For each query up to k passages, best first, with scores."""
        ...


class Reranker(Protocol):
    """Scores passages for a question; higher is better."""

    @property
    def name(self) -> str: ...

    def score(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[list[float]]: ...


class Gate(Protocol):
    """Turns readings into need. `want` says what must be read; `threshold` is used unless the user gives one."""

    @property
    def name(self) -> str: ...
    @property
    def needs(self) -> frozenset[Signal]: ...
    @property
    def want(self) -> Want: ...
    @property
    def threshold(self) -> float: ...

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        """Need in [0, 1] for each question."""
        ...


@runtime_checkable
class AskingGate(Protocol):
    """A gate that asks the LLM something of its own and reads label tokens (needs `Signal.LABELS`)."""

    @property
    def labels(self) -> tuple[str, ...]: ...

    def ask(self, questions: Sequence[Question]) -> list[LabelPrompt]: ...


@runtime_checkable
class ExplainingGate(Protocol):
    """A gate that can say in words why it scored as it did."""

    def explain(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[str]: ...


class Runner(Protocol):
    """Does per-question work in batches: here, or on many machines. Work must be idempotent: it may be repeated."""

    def run(self, questions: Sequence[Question], work: Callable[[Sequence[Question]], Result]) -> Iterator[Result]: ...


class SecondLook(Protocol):
    """Judges after retrieval whether the passages are of use; False drops them (KBM section 5.4)."""

    def useful(self, questions: Sequence[Question], passages: Sequence[Sequence[Passage]]) -> list[bool]: ...
