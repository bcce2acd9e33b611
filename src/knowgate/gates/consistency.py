"""The consistency gate: if the LLM does not know an answer, its sampled answers disagree. Works with text alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from statistics import fmean

from knowgate.core.text import normalize
from knowgate.data.signals.samples import canonical_answer
from knowgate.errors import BadSetting, UnsupportedSignal
from knowgate.retrieval.embeddings import check_vectors, load_embedder
from knowgate.types import Embedder, Gate, Question, Reading, Signal, SignalRequest

NO_EMBEDDER = "none"  # compares normalized answers only
MAX_PARTIAL_AGREEMENT = 0.5  # answers that differ after normalization agree at most this much, however similar they are


@dataclass(frozen=True)
class ConsistencyGate(Gate):
    """Retrieves if sampled answers disagree.

    The need for retrieval is 1 minus the mean agreement of all pairs of answers. Answers that are equal after
    normalization agree by 1. Other answers agree by half the cosine similarity of their embeddings, or by 0 with
    `embedder='none'`.

    The gate reads only text, so it works with every LLM. A question costs `n` + 1 LLM calls, whether it retrieves or
    not.

    Needs: samples. Cost per question: `n` sampled answers (3 LLM calls by default), up to `n` embeddings.
    Reference: black-box uncertainty of uqlm (Bouchard & Chauhan 2025) and LM-Polygraph (Fadeeva et al. 2023).

    Example:
        >>> from knowgate.types import Completion
        >>> reading = Reading(samples=(Completion("Paris"), Completion("paris."), Completion("Rome")))
        >>> round(ConsistencyGate(embedder="none").score([Question("?")], [reading])[0], 2)
        0.67
    """

    n: int = 3  # number of sampled answers
    embedder: str | Embedder = "minilm"
    max_tokens: int = 32  # of a sampled answer
    seed: int = 0  # of the sampling
    needs = frozenset({Signal.SAMPLES})

    def __post_init__(self) -> None:
        """Raise BadSetting if an option is out of range."""
        if self.n < 2 or self.max_tokens < 1:
            raise BadSetting(
                f"gate 'consistency': n is {self.n} and max_tokens is {self.max_tokens}. Set n to at least 2, and max_tokens "
                "to at least 1."
            )

    @property
    def request(self) -> SignalRequest:
        """Request `n` sampled answers."""
        return SignalRequest(samples=self.n, sample_tokens=self.max_tokens, seed=self.seed)

    @functools.cached_property
    def encoder(self) -> Embedder | None:
        """The embedding model, or None if only normalized answers are compared."""
        if not isinstance(self.embedder, str):
            return self.embedder
        return None if self.embedder == NO_EMBEDDER else load_embedder(self.embedder)

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        """Compute the need for retrieval: 1 - the mean agreement of sampled answers."""
        answers_by_question = []
        for question, reading in zip(questions, readings, strict=True):
            answers = [canonical_answer(text, question) for text in self._list_answers(reading)]
            answers_by_question.append(answers)
        # Equal answers agree fully, whatever their embeddings are.
        differing = [answers for answers in answers_by_question if len(set(answers)) > 1]
        vectors = self._embed(set(chain.from_iterable(differing)))
        return [1 - _mean_agreement(answers, vectors) for answers in answers_by_question]

    def explain(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[str]:
        """Say how many different answers were sampled."""
        explanations = []
        for reading in readings:
            distinct = {normalize(text) for text in self._list_answers(reading)}
            explanations.append(f"{self.n} sampled answers, {len(distinct)} different")
        return explanations

    def _list_answers(self, reading: Reading) -> list[str]:
        """Return the first `n` sampled answers. Raise UnsupportedSignal if there are fewer."""
        texts = [sample.text for sample in reading.samples[: self.n]]
        if len(texts) < self.n:
            raise UnsupportedSignal(
                f"gate 'consistency' needs {self.n} sampled answers per question, but got {len(texts)}. Run `knowgate label` "
                f"with samples={self.n}.",
                brief=f"fewer than {self.n} sampled answers",
            )
        return texts

    def _embed(self, answers: set[str]) -> dict[str, list[float]]:
        """Return the embedding of each answer, or {} without an embedding model."""
        if self.encoder is None or not answers:
            return {}
        texts = sorted(answers)
        vectors = check_vectors(self.encoder.embed(texts), len(texts))
        return dict(zip(texts, vectors.tolist(), strict=True))


def _mean_agreement(answers: Sequence[str], vectors: dict[str, list[float]]) -> float:
    """Return the mean agreement of all pairs of normalized answers, from 0 to 1."""
    return fmean(_agree(first, second, vectors) for first, second in combinations(answers, 2))


def _agree(first: str, second: str, vectors: dict[str, list[float]]) -> float:
    """Return how much two normalized answers agree, from 0 to 1. `vectors` has the embedding of each answer."""
    if first == second:
        return 1.0
    if not vectors:
        return 0.0
    cosine = sum(a * b for a, b in zip(vectors[first], vectors[second], strict=True))
    return MAX_PARTIAL_AGREEMENT * min(1.0, max(0.0, cosine))
