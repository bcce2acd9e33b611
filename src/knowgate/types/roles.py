"""The roles of the project: what a model, retriever, reranker, gate, ... must do. Batch in, batch out, same order."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor
from typing import Protocol, TypeVar, runtime_checkable

from knowgate.types.records import (
    Completion,
    LabelPrompt,
    Neighbour,
    Passage,
    Prompt,
    Question,
    Reading,
    Signal,
    Vector,
    Want,
)

Result = TypeVar("Result")
TextStream = Generator[str, None, Completion]  # pieces of text as they come; at the end the completion they join to


class Model(Protocol):
    """An LLM. `fingerprint` is the identity that fitted artefacts are bound to.

    `knowgate.models.Backend` has `stream`, `concurrency` and `workers` for backends with nothing of their own to say.
    """

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

    def ask(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[LabelPrompt]: ...


@runtime_checkable
class RecallingGate(Protocol):
    """A gate that looks up logged questions; they are given back to it in `Reading.neighbours[name]`."""

    def recall(self, questions: Sequence[Question]) -> list[tuple[Neighbour, ...]]: ...


@runtime_checkable
class BindingGate(Protocol):
    """A gate that belongs to one LLM and wording: checked, once, before it is used."""

    def bind(self, model: Model, prompts: str) -> Gate:
        """The gate ready for this model and this prompt fingerprint; raises if it was made for others."""
        ...


@runtime_checkable
class ExplainingGate(Protocol):
    """A gate that can say in words why it scored as it did."""

    def explain(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[str]: ...


@runtime_checkable
class StepsGate(Protocol):
    """A gate that also says how many rounds of retrieval a question takes if it is looked up at all."""

    def steps(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[int]: ...


@runtime_checkable
class TokenisingModel(Protocol):
    """A model whose tokenizer can be asked: for gates that need a word to be one token."""

    def tokenise(self, text: str) -> list[int]: ...


@runtime_checkable
class ScoringModel(Protocol):
    """A model that can say how probable a given answer is."""

    def answer_logprobs(self, prompts: Sequence[Prompt], answers: Sequence[str]) -> list[float]:
        """Mean log-probability per token of each answer after its prompt."""
        ...


class Runner(Protocol):
    """Does per-question work in batches: here, or on many machines. Work must be idempotent: it may be repeated."""

    def run(self, questions: Sequence[Question], work: Callable[[Sequence[Question]], Result]) -> Iterator[Result]: ...


class SecondLook(Protocol):
    """Judges after retrieval whether the passages are of use; False drops them (KBM section 5.4)."""

    def useful(self, questions: Sequence[Question], passages: Sequence[Sequence[Passage]]) -> list[bool]: ...
