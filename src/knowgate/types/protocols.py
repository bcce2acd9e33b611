"""Protocols: what a model, retriever, reranker, arbiter and so on must implement.

Methods that take a batch return one result per item, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

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
    """Name and fingerprint of an LLM.

    They show whether a gate was fitted on this LLM. Label runs (recorded answers) have them, too.
    """

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str:
        """Hash that identifies the weights. A fitted gate works only with the LLM of its fingerprint."""

    @property
    def depth(self) -> int:
        """Number of hidden states per token: the embedding and one per layer; 0 if the model offers none."""


class Model(ModelIdentity, Protocol):
    """An LLM. Derive from `knowgate.models.backend.Backend`, with defaults for most methods."""

    @property
    def offers(self) -> frozenset[Signal]:
        """Signals that `read` can return."""

    def read(self, prompts: Sequence[Prompt], request: SignalRequest, /) -> list[Reading]:
        """Return the requested signals for each prompt, such as a draft answer or hidden states."""

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
            max_tokens: Maximum length of a completion, in tokens.
            temperature: 0 for greedy decoding; above 0, tokens are sampled from the whole vocabulary.
            n: Completions per prompt.
            seed: Seed of the sampling.
            resume: `Reading.resume` of each prompt, to continue the draft that `read` generated without computing it
                again. The completion includes the draft.
        """

    def stream(self, prompt: Prompt, *, max_tokens: int, resume: object | None = None) -> TextStream:
        """Stream the greedy completion of one prompt. Closing the stream stops the generation."""

    @property
    def concurrency(self) -> int:
        """Maximum number of threads that may call the model at once; 1 for a model on this machine."""

    @property
    def workers(self) -> Executor:
        """Thread pool of the model, with `concurrency` threads. Concurrent calls must run in it."""

    def fits(self, prompts: Sequence[Prompt], max_tokens: int) -> list[bool]:
        """Return whether each prompt fits into the context window with its answer. Unknown sizes count as fitting."""

    def label_logits(self, prompts: Sequence[LabelPrompt], labels: Sequence[str]) -> list[Vector]:
        """Return how probably the LLM answers with each label (answer word) at the end of each piece of a prompt.

        Args:
            prompts: Prompts of one or more pieces. Each piece ends where the LLM answers with a label.
            labels: Answer words, such as yes and no.

        Returns:
            For each prompt, an array (pieces x labels) of logits or log-probabilities.
        """


class Embedder(Protocol):
    """Converts texts to vectors of length 1, whose inner product measures similarity."""

    @property
    def fingerprint(self) -> str: ...

    def embed(self, texts: Sequence[str]) -> Vector:
        """Return a float32 array with one row per text."""


class Retriever(Protocol):
    """Searches for passages. A retriever of your own is called from different threads, but never concurrently."""

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str:
        """Hash that identifies the documents and the search method."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return up to `k` passages with scores for each query, best first."""


class Reranker(Protocol):
    """Scores how relevant passages are to a question, to sort them after retrieval."""

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str:
        """Hash that identifies the weights."""

    def score(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[list[float]]:
        """Return the relevance of each passage to its question; higher is better."""


@runtime_checkable
class TokenizingModel(Protocol):
    """Model with access to its tokenizer. Some gates check that a label is one token."""

    def tokenize(self, text: str) -> list[int]: ...


@runtime_checkable
class ScoringModel(Protocol):
    """A model that can compute the probability of a given answer."""

    def answer_logprobs(self, prompts: Sequence[Prompt], answers: Sequence[str]) -> list[float]:
        """Return the mean log-probability per token of each answer after its prompt."""


@runtime_checkable
class ToolCallingModel(Protocol):
    """A model that can be offered tools in a chat."""

    def tool_call_probabilities(self, prompts: Sequence[Prompt], tool: Mapping[str, Any]) -> list[float]:
        """Return how probably the LLM calls a tool in reply to each prompt.

        Args:
            prompts: User messages.
            tool: The tool in the format of OpenAI's `tools`.

        Returns:
            Probabilities; 0 or 1 if only the fact of the call is known.

        Raises:
            UnsupportedSignal: The chat template or the server does not support tools.
        """


@runtime_checkable
class ServedModel(Protocol):
    """Model behind a server. Only tokens and log-probabilities from the server are available."""

    @property
    def reads_inner_labels(self) -> bool:
        """Whether the probability of a label (answer word) can also be read inside a prompt, not only at its end.

        `label_logits` needs this for a `LabelPrompt` with several `parts`.
        """

    def check_request(self, request: SignalRequest, /) -> None:
        """Raise UnsupportedSignal if the request needs something that the server does not return."""

    def count_tokens(self, text: str) -> int | None:
        """Return the number of tokens of a text; None if the server cannot count them."""


class Runner(Protocol):
    """Splits questions into batches and processes them, on this machine or on a cluster."""

    def run(self, questions: Sequence[Question], work: Callable[[Sequence[Question]], Result]) -> Iterator[Result]:
        """Call `work` with each batch of questions, and yield its results. A failed batch may run twice."""


class PassageFilter(Protocol):
    """Decides after retrieval whether the passages are useful or should be dropped (KBM paper, section 5.4)."""

    def are_useful(self, questions: Sequence[Question], passages: Sequence[Sequence[Passage]]) -> list[bool]:
        """Return for each question whether to keep its passages."""


@dataclass(frozen=True)
class AnswerPair:
    """Two answers of the LLM to the same question: without passages (closed-book) and with passages (open-book).

    Attributes:
        question: The question.
        closed: Answer without passages.
        open: Answer with passages.
        passages: The passages that the LLM was shown for `open`.
    """

    question: Question
    closed: Completion
    open: Completion
    passages: tuple[Passage, ...] = ()


@dataclass(frozen=True)
class Belief:
    """Probabilities that the answers without passages (closed) and with passages (open) are correct.

    With equal values, the open answer is chosen.

    Attributes:
        closed: Probability that the closed-book answer is correct.
        open: Probability that the open-book answer is correct.
        reason: Explanation in words; may be empty.
    """

    closed: float
    open: float
    reason: str = ""

    @property
    def prefers_closed(self) -> bool:
        """Whether the closed-book answer is more probably correct than the open-book answer."""
        return self.closed > self.open


class Arbiter(Protocol):
    """Chooses between the answers without passages (closed-book) and with passages (open-book).

    Subclasses implement `name`, `fingerprint` and `estimate`. `estimate` is called only if the two answers differ.
    """

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str:
        """Hash of the arbiter's behavior. A guarantee of a gate holds only for the same hash."""

    def estimate(self, answers: Sequence[AnswerPair]) -> list[Belief]:
        """Estimate for each pair how probably each of the two answers is correct."""

    @property
    def needs(self) -> frozenset[Signal]:
        """Signals of the two answers that the arbiter needs besides their text: `Signal.LOGPROBS`, or none."""
        return frozenset()

    @property
    def needs_passages(self) -> bool:
        """Whether the arbiter reads the passages. If so, it cannot use recorded answers without passages."""
        return False

    @property
    def makes_drafts(self) -> bool:
        """Whether to generate a closed-book answer for the arbiter if the gate has not read a complete one."""
        return True

    def bind(self, model: ModelIdentity, prompts: str) -> Self:
        """Return an arbiter that is ready to choose between answers of an LLM. Default: the arbiter itself.

        Args:
            model: The LLM.
            prompts: Fingerprint of the answer prompts.

        Raises:
            KnowgateError: The arbiter was fitted for another model or other prompts.
        """
        return self

    def accepts_beginning(self, beginning: str) -> bool:
        """Return whether an answer with passages that begins like this is sure to be chosen, so it can be streamed."""
        return False
