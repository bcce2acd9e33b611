"""Gates that read the token probabilities of the draft, the answer that the LLM starts without passages.

They are simple, and about as good as most published methods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from knowgate.data.signals import confidence
from knowgate.errors import BadSetting
from knowgate.types import Gate, Question, Reading, Signal, SignalRequest, Token

TokenStatistic = Literal["first", "mean", "min", "entropy", "margin"]
# Each statistic: the function that computes it, and the sentence that states its value.
STATISTICS: dict[str, tuple[Callable[[Sequence[Token]], float], str]] = {
    "first": (confidence.first_probability, "the first word of its draft was {} certain"),
    "mean": (confidence.geometric_mean, "the words of its draft were {} certain on average"),
    "min": (confidence.min_probability, "the least certain word of its draft was {} certain"),
    "entropy": (confidence.inverse_perplexity, "its draft was {} certain, by entropy"),
    "margin": (confidence.mean_margin, "the words of its draft led their alternatives by {}"),
}


@dataclass(frozen=True)
class LogprobGate(Gate):
    """Retrieves if the tokens of the LLM's draft answer are improbable.

    The need for retrieval is 1 - p, and `statistic` defines p. 'first' is the probability of the first token. 'mean' is
    the geometric mean of all token probabilities, and 'min' is the lowest one. 'entropy' is exp(-mean token entropy).
    'margin' is the mean of p(first choice) - p(second choice). `draft_tokens` is the maximum length of the draft.

    'first' is the default. On 300 TriviaQA questions with the embedded model, 'first' has an AUROC of .65, and 'mean'
    of .61.

    Needs: logprobs. Cost per question: nothing when skipping, because the draft is the start of the answer. When
    retrieving, the drafted tokens (one for 'first') are wasted.
    Reference: baselines of AdaRAGUE (Moskvoretskii et al. 2025).

    Example:
        >>> from knowgate.types import Completion
        >>> draft = Completion("Paris", (Token("Par", -0.1), Token("is", -0.5)))
        >>> round(LogprobGate("mean").score([Question("?")], [Reading(draft)])[0], 3)
        0.259
    """

    statistic: TokenStatistic = "first"
    draft_tokens: int = 16
    needs = frozenset({Signal.LOGPROBS})
    is_pure = True  # `score` is a short computation that uses no model, file or network

    def __post_init__(self) -> None:
        confidence.check_draft_tokens(self.name, self.draft_tokens)

    @property
    def request(self) -> SignalRequest:
        """Request the draft: one token for 'first', up to `draft_tokens` otherwise."""
        draft_tokens = 1 if self.statistic == "first" else self.draft_tokens
        return SignalRequest(draft_tokens=draft_tokens, entropies=self.statistic == "entropy")

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        """Compute the need for retrieval: 1 - a statistic of the draft's token probabilities."""
        compute, _ = STATISTICS[self.statistic]
        return [confidence.draft_need(reading.draft, compute, self.request.draft_tokens) for reading in readings]

    def explain(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[str]:
        """Explain each decision by the value of the statistic.

        The draft may be private, and explanations are logged, so they do not quote the draft.
        """
        _, sentence = STATISTICS[self.statistic]
        return [sentence.format(f"{100 * (1 - need):.0f} %") for need in self.score(questions, readings)]


@dataclass(frozen=True)
class FlareGate(Gate):
    """Retrieves if any token of the draft answer has a probability below `theta`.

    The need for retrieval is 1 - the smallest token probability. `draft_tokens` is the maximum length of the draft.

    Needs: logprobs. Cost per question: nothing when skipping, the drafted tokens when retrieving.
    Reference: Jiang et al. 2023, section 3.2. FLARE decides for every sentence. This gate reads one draft.

    Example:
        >>> FlareGate(theta=0.4).threshold
        0.6
    """

    theta: float = 0.4
    draft_tokens: int = 32
    needs = frozenset({Signal.LOGPROBS})
    is_pure = True  # `score` is a short computation that uses no model, file or network

    def __post_init__(self) -> None:
        """Raise BadSetting if an option is out of range."""
        if not 0 <= self.theta <= 1:
            raise BadSetting(f"gate 'flare': theta is {self.theta}, but it must be between 0 and 1.")
        confidence.check_draft_tokens(self.name, self.draft_tokens)

    @property
    def request(self) -> SignalRequest:
        """Request a draft of up to `draft_tokens` tokens."""
        return SignalRequest(draft_tokens=self.draft_tokens)

    @property
    def threshold(self) -> float:
        """The gate retrieves above this need. The need is 1 - the smallest token probability."""
        return 1 - self.theta

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        """Compute the need for retrieval as 1 - the smallest token probability of the draft."""
        compute = confidence.min_probability
        return [confidence.draft_need(reading.draft, compute, self.draft_tokens) for reading in readings]
