"""Protocols: what a model, retriever, reranker, arbiter, ... must implement. Batches keep their order and length."""

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
TextStream = Generator[str, None, Completion]  # yields pieces of text and returns the whole completion


class ModelIdentity(Protocol):
    """Identity of an LLM. Implemented by models, and by label runs for the LLM that they were made with.

    It is a protocol and not a record because a served model may have to be asked for its fingerprint.
    """

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str:
        """Hash that identifies the weights. Fitted artifacts are bound to it."""
        ...

    @property
    def depth(self) -> int:
        """Number of hidden states: the embeddings and the output of each layer; 0 if the model offers none."""
        ...


class Model(ModelIdentity, Protocol):
    """An LLM. Derive from `knowgate.models.backend.Backend`, which has defaults for most of these methods."""

    @property
    def offers(self) -> frozenset[Signal]:
        """Signals that `read` can give."""
        ...

    def read(self, prompts: Sequence[Prompt], request: SignalRequest, /) -> list[Reading]:
        """Read the requested signals for each prompt in one forward pass."""
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
        """Generate `n` completions for each prompt.

        Args:
            prompts: The prompts.
            max_tokens: Longest completion, in tokens.
            temperature: 0 for greedy decoding; above it, tokens are sampled from the whole vocabulary.
            n: Completions per prompt.
            seed: Seed of the sampling.
            resume: `Reading.resume` of each prompt, to continue its draft. The completion includes the draft.
        """
        ...

    def stream(self, prompt: Prompt, *, max_tokens: int, resume: object | None = None) -> TextStream:
        """Stream the greedy completion of one prompt. Closing the stream stops the generation."""
        ...

    @property
    def concurrency(self) -> int:
        """Number of threads that may use the model at once; 1 for a model on this machine."""
        ...

    @property
    def workers(self) -> Executor:
        """Thread pool of the model, with `concurrency` threads. Concurrent calls must run in it."""
        ...

    def fits(self, prompts: Sequence[Prompt], max_tokens: int) -> list[bool]:
        """Check whether each prompt and its answer fit into the context window; True if that is unknown."""
        ...

    def label_logits(self, prompts: Sequence[LabelPrompt], labels: Sequence[str]) -> list[Vector]:
        """Return logits or log-probabilities of the labels: one array (marked positions x labels) per prompt."""
        ...


class Embedder(Protocol):
    """Embeds texts as unit vectors."""

    @property
    def fingerprint(self) -> str: ...

    def embed(self, texts: Sequence[str]) -> Vector:
        """Return a float32 array with one row per text."""
        ...


class Retriever(Protocol):
    """Searches passages. Calls are sequential, but may come from different threads."""

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str:
        """Hash that identifies the documents and the search method."""
        ...

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return up to `k` passages with scores for each query, best first."""
        ...


class Reranker(Protocol):
    """Scores passages for a question."""

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str:
        """Hash that identifies the weights."""
        ...

    def score(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[list[float]]:
        """Return the relevance of each passage to its question; higher is better."""
        ...


@runtime_checkable
class TokenizingModel(Protocol):
    """A model that exposes its tokenizer, for gates that need a word to be a single token."""

    def tokenize(self, text: str) -> list[int]: ...


@runtime_checkable
class ScoringModel(Protocol):
    """A model that can compute the probability of a given answer."""

    def answer_logprobs(self, prompts: Sequence[Prompt], answers: Sequence[str]) -> list[float]:
        """Return the mean log-probability per token of each answer after its prompt."""
        ...


@runtime_checkable
class ServedModel(Protocol):
    """A model behind a server, which sees only the tokens and log-probabilities that the server returns."""

    @property
    def has_entropies(self) -> bool:
        """Whether the server returns enough log-probabilities to compute entropies."""
        ...

    @property
    def reads_inner_labels(self) -> bool:
        """Whether labels can be read at positions inside a prompt, not only at its end."""
        ...

    def check_request(self, request: SignalRequest, /) -> None:
        """Raise UnsupportedSignal if the request needs something that the server does not return."""
        ...

    def count_tokens(self, text: str) -> int | None:
        """Return the number of tokens of a text; None if the server does not tell."""
        ...


class Runner(Protocol):
    """Runs work over batches of questions, on this machine or on a cluster."""

    def run(self, questions: Sequence[Question], work: Callable[[Sequence[Question]], Result]) -> Iterator[Result]:
        """Yield the result of each batch. Work must be idempotent, because a batch may be repeated."""
        ...


class PassageFilter(Protocol):
    """Judges after retrieval whether passages are useful (KBM section 5.4)."""

    def are_useful(self, questions: Sequence[Question], passages: Sequence[Sequence[Passage]]) -> list[bool]:
        """Return for each question whether to keep its passages."""
        ...


@dataclass(frozen=True)
class AnswerPair:
    """Closed-book and open-book answer to the same question.

    Attributes:
        question: The question.
        closed: Answer without passages.
        open: Answer with passages.
        passages: The passages that the open-book answer was given.
    """

    question: Question
    closed: Completion
    open: Completion
    passages: tuple[Passage, ...] = ()


@dataclass(frozen=True)
class Belief:
    """Probability that each answer of a pair is right. If they are equal, the open-book answer is chosen.

    Attributes:
        closed: Probability of the closed-book answer.
        open: Probability of the open-book answer.
        reason: Explanation in words; may be empty.
    """

    closed: float
    open: float
    reason: str = ""

    @property
    def prefers_closed(self) -> bool:
        """Whether the closed-book answer is more probable."""
        return self.closed > self.open


class Arbiter(Protocol):
    """Chooses between the closed-book and the open-book answer after retrieval.

    It is called only if the two answers differ. A subclass must implement `name`, `fingerprint` and `estimate`.
    """

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str:
        """Hash that identifies its behavior. A guarantee for a gate with an arbiter holds for one fingerprint."""
        ...

    def estimate(self, answers: Sequence[AnswerPair]) -> list[Belief]:
        """Estimate for each pair how probably each answer is right."""
        ...

    @property
    def needs(self) -> frozenset[Signal]:
        """Signals of the two answers that it reads besides their text: `Signal.LOGPROBS`, or none."""
        return frozenset()

    @property
    def needs_passages(self) -> bool:
        """Whether it reads the passages, so that recorded answers without passages cannot be used."""
        return False

    @property
    def makes_drafts(self) -> bool:
        """Whether a closed-book answer is generated for it if the gate does not read a whole one."""
        return True

    def bind(self, model: ModelIdentity, prompts: str) -> Self:
        """Return the arbiter prepared for a model and the fingerprint of the prompts.

        Raises:
            KnowgateError: The arbiter was fitted for another model or other prompts.
        """
        return self

    def accepts_beginning(self, beginning: str) -> bool:
        """Whether an open-book answer with this beginning is chosen in any case, so that it can be streamed."""
        return False
