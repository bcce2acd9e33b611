"""The roles of the project: what a model, retriever, reranker, ... must do. Batch in, batch out, same order."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar, runtime_checkable

from knowgate.types.records import (
    Completion,
    LabelPrompt,
    Passage,
    Prompt,
    Question,
    Reading,
    Signal,
    SignalRequest,
    Vector,
)

Result = TypeVar("Result")
TextStream = Generator[str, None, Completion]  # pieces of text as they come; at the end the completion they join to


class ModelIdentity(Protocol):
    """Which LLM it is. A model tells it of itself, a run of the LLM it was made with.

    `fingerprint` is what fitted artefacts are bound to. To ask a served model for it may take time, so this is a role
    and not a record.
    """

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def depth(self) -> int:
        """Entries of the hidden-state tuple: the embeddings and each layer's output; 0 when not offered."""
        ...


class Model(ModelIdentity, Protocol):
    """An LLM.

    `knowgate.models.backend.Backend` has `stream`, `concurrency` and `workers` for backends with nothing of their own to say.
    """

    @property
    def offers(self) -> frozenset[Signal]: ...

    def read(self, prompts: Sequence[Prompt], want: SignalRequest) -> list[Reading]:
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
        """`n` completions per prompt. With `resume`, the draft goes on and is part of the text given back.

        Above temperature 0 they are drawn from all tokens; `read` also draws from the most probable ones.
        """
        ...

    def stream(self, prompt: Prompt, *, max_tokens: int, resume: object | None = None) -> TextStream:
        """What `generate` gives for one prompt at temperature 0, piece by piece. Closing the stream ends the work."""
        ...

    @property
    def concurrency(self) -> int:
        """How many threads may use the model at once: 1 where it runs on this machine."""
        ...

    @property
    def workers(self) -> Executor:
        """The model's own threads, `concurrency` of them: whoever calls it beside others does so there."""
        ...

    def fits(self, prompts: Sequence[Prompt], max_tokens: int) -> list[bool]:
        """Whether each prompt and its answer fit the context window; True where a backend cannot tell."""
        ...

    def label_logits(self, prompts: Sequence[LabelPrompt], labels: Sequence[str]) -> list[Vector]:
        """For each prompt an array (marked positions x labels) of logits or log-probabilities."""
        ...


class Embedder(Protocol):
    """Turns texts into unit vectors (float32, one row per text)."""

    @property
    def fingerprint(self) -> str: ...

    def embed(self, texts: Sequence[str]) -> Vector: ...


class Retriever(Protocol):
    """Finds passages. `fingerprint` names the corpus and the way of searching.

    One call at a time, but not always from the thread that made it: labelling looks up while the LLM answers.
    """

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """For each query up to k passages, best first, with scores."""
        ...


class Reranker(Protocol):
    """Scores passages for a question; higher is better. `fingerprint` names the weights, wherever they lie."""

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...

    def score(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[list[float]]: ...


@runtime_checkable
class TokenizingModel(Protocol):
    """A model whose tokenizer can be asked: for gates that need a word to be one token."""

    def tokenize(self, text: str) -> list[int]: ...


@runtime_checkable
class ScoringModel(Protocol):
    """A model that can say how probable a given answer is."""

    def answer_logprobs(self, prompts: Sequence[Prompt], answers: Sequence[str]) -> list[float]:
        """Mean log-probability per token of each answer after its prompt."""
        ...


@runtime_checkable
class ServedModel(Protocol):
    """A served model, that sees what its server lists: perhaps too few tokens for their entropy, or none in prompts."""

    @property
    def has_entropies(self) -> bool: ...

    @property
    def reads_inner_labels(self) -> bool:
        """Labels at marked places inside a prompt, and not only at its end."""
        ...

    def check_request(self, want: SignalRequest) -> None:
        """Raise NotOffered for what the server does not give: layers, states of samples, entropies."""
        ...

    def count_tokens(self, text: str) -> int | None:
        """Of how many tokens a text is; None where the server does not say."""
        ...


class Runner(Protocol):
    """Does per-question work in batches: here, or on many machines. Work must be idempotent: it may be repeated."""

    def run(self, questions: Sequence[Question], work: Callable[[Sequence[Question]], Result]) -> Iterator[Result]: ...


class PassageFilter(Protocol):
    """Judges after retrieval whether the passages are of use; False drops them (KBM section 5.4)."""

    def useful(self, questions: Sequence[Question], passages: Sequence[Sequence[Passage]]) -> list[bool]: ...


@dataclass(frozen=True)
class AnswerPair:
    """A question answered twice. closed: from memory, whole; open: with `passages` shown.

    The completions' tokens are None where the LLM gives no log-probabilities.
    """

    question: Question
    closed: Completion
    open: Completion
    passages: tuple[Passage, ...] = ()


@dataclass(frozen=True)
class Belief:
    """How probably each answer is right, from 0 to 1; where both are equal, the answer with passages is given.

    why: what the arbiter went by, in words; '' where it has none.
    """

    closed: float
    open: float
    why: str = ""

    @property
    def prefers_closed(self) -> bool:
        return self.closed > self.open


class Arbiter(Protocol):
    """Chooses after retrieval. Only asked where the two answers differ: what they agree on costs nothing.

    A class that inherits from this one has only to give `name`, `fingerprint` and `estimate`.
    """

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str:
        """Names what it does, wherever it lies: a proof about a cascade holds for one arbiter."""
        ...

    def estimate(self, answers: Sequence[AnswerPair]) -> list[Belief]: ...

    @property
    def needs(self) -> frozenset[Signal]:
        """What of the LLM it reads beside the two texts: `Signal.LOGPROBS`, or nothing."""
        return frozenset()

    @property
    def wants_passages(self) -> bool:
        """Whether it reads the passages, so that records without them are of no use to it."""
        return False

    @property
    def makes_drafts(self) -> bool:
        """Whether the answer from memory is made for it where the gate reads no whole one."""
        return True

    def bind(self, model: ModelIdentity, prompts: str) -> Self:
        """The arbiter ready for this model and this fingerprint of the prompts; raises if it was made for others."""
        return self

    def accepts_beginning(self, beginning: str) -> bool:
        """Whether an answer with passages that begins so will be given whatever follows: then it can be streamed."""
        return False
