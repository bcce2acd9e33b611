"""The base class of gates, which decide whether a question needs retrieval.

A subclass must implement `score`. Everything else has a default.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from knowgate.types.protocols import ModelIdentity, PassageFilter
from knowgate.types.records import LabelPrompt, Neighbor, Question, Reading, Signal, SignalRequest

DEFAULT_DRAFT_TOKENS = 32  # as long as answers by default, so that a gate reads complete drafts
DEFAULT_SAMPLES = 10

if TYPE_CHECKING:
    default_property = property
else:

    class default_property:  # noqa: N801 - used like `property`
        """Property that a subclass may override with a plain attribute.

        The usual `property` breaks dataclass fields.
        """

        def __init__(self, getter: Callable[[Gate], Any]):
            self.getter = getter
            self.__doc__ = getter.__doc__

        def __get__(self, gate: Gate | None, owner: type[Gate]) -> Any:
            if gate is None:  # accessed on the class: dataclasses would use the result as the default of a field
                raise AttributeError("this property can be read only from an instance of a gate, not from its class")
            return self.getter(gate)


@dataclass(frozen=True)
class GateScores:
    """Scores of a gate for a batch of questions.

    Attributes:
        needs: Need for retrieval of each question, from 0 (the LLM knows the answer) to 1 (retrieve).
        raw: The gate's scores before they were calibrated to needs; None for gates without calibration.
    """

    needs: list[float]
    raw: list[float] | None = None


# New names of members of `Gate`, by their names in version 0.1.
RENAMED_MEMBERS = {
    "want": "request",
    "recall": "find_neighbors",
    "ask": "build_label_prompts",
    "score_both": "score_with_raw",
    "may_be_overruled": "obeys_rules",
    "is_quick": "is_pure",
    "answered_by": "recorded_signal",
    "steps": "count_rounds",
    "second_look": "passage_filter",
}


@dataclass(frozen=True)
class Gate(ABC):
    """Scores how much each question needs retrieval.

    A gate reads signals of the LLM, such as a draft answer or log-probabilities. A gate with options is a frozen
    dataclass.

    Example:
        >>> class ShortGate(Gate):
        ...     needs = frozenset({Signal.DRAFT})
        ...
        ...     def score(self, questions, readings):
        ...         return [float(len(reading.draft.text) < 5) for reading in readings]
        >>> ShortGate().name, ShortGate().request.draft_tokens, ShortGate().threshold
        ('short', 32, 0.5)
    """

    def __init_subclass__(cls) -> None:
        """Raise TypeError for names of version 0.1. Such a method would silently have no effect."""
        super().__init_subclass__()
        for name in RENAMED_MEMBERS.keys() & vars(cls).keys():
            raise TypeError(
                f"{cls.__name__}.{name} has no effect: it is now called `{RENAMED_MEMBERS[name]}`. Rename it."
            )

    @abstractmethod
    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        """Score the need for retrieval of each question.

        Args:
            questions: The questions.
            readings: Signals that were read from the LLM for each question.

        Returns:
            Need for retrieval of each question, from 0 (the LLM knows the answer) to 1 (retrieve).
        """

    def score_with_raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> GateScores:
        """Score the need for retrieval of each question like `score`; fitted gates also return uncalibrated scores."""
        return GateScores(self.score(questions, readings))

    # --- properties -------------------------------------------------------------------------------

    @default_property
    def name(self) -> str:
        """Name of the gate in decisions and tables. Default: the class name in lower case without 'Gate'."""
        return type(self).__name__.removesuffix("Gate").lower()

    @default_property
    def needs(self) -> frozenset[Signal]:
        """Signals that the gate needs from the LLM. Default: none, so it scores the question text alone."""
        return frozenset()

    @default_property
    def request(self) -> SignalRequest:
        """How much of each signal to read, such as the number of samples. Override this for hidden states."""
        needs_draft = bool(self.needs & {Signal.DRAFT, Signal.LOGPROBS})
        draft_tokens = DEFAULT_DRAFT_TOKENS if needs_draft else 0
        samples = DEFAULT_SAMPLES if Signal.SAMPLES in self.needs else 0
        return SignalRequest(draft_tokens=draft_tokens, samples=samples)

    @default_property
    def threshold(self) -> float:
        """Need for retrieval (0 to 1) above which passages are retrieved, unless the user sets another threshold."""
        return 0.5

    @default_property
    def obeys_rules(self) -> bool:
        """Whether rules, such as the one for small talk, may decide instead of this gate. Default: True."""
        return True

    @default_property
    def is_pure(self) -> bool:
        """Whether `score` is a short computation without side effects.

        Several threads may then call `score` at once.
        """
        return False

    @default_property
    def note(self) -> str:
        """Remark that is shown with every decision, for instance that the gate was fitted on another LLM."""
        return ""

    def bind(self, model: ModelIdentity, prompts: str) -> Self:
        """Return a gate that is ready to decide for an LLM and its prompts. Default: the gate itself.

        Args:
            model: The LLM.
            prompts: Fingerprint of the answer prompts.

        Raises:
            KnowgateError: The gate was fitted for another model or other prompts.
        """
        return self

    # --- input besides the signals ----------------------------------------------------------------

    def find_neighbors(self, questions: Sequence[Question]) -> list[tuple[Neighbor, ...]]:
        """Return for each question similar questions from the log. `score` gets them in `Reading.neighbors`."""
        return [() for _ in questions]

    @default_property
    def labels(self) -> tuple[str, ...]:
        """Answer words between which the LLM chooses in the prompts of `build_label_prompts`, such as yes and no."""
        return ()

    def build_label_prompts(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[LabelPrompt]:
        """Return prompts with fixed answer words (labels), such as yes and no.

        `score` gets the logits of the labels in `Reading.labels`.
        """
        return []

    @default_property
    def recorded_signal(self) -> str:
        """Name under which label runs record the LLM's answer to the gate's prompts; '' if they do not record it."""
        return ""

    # --- output besides the score -----------------------------------------------------------------

    def explain(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[str]:
        """Explain each score in words; an empty string means no explanation."""
        return ["" for _ in questions]

    def distances(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float | None]:
        """Return the distance of each question from the training questions. Above 1 is farther than 99 % of them."""
        return [None for _ in questions]

    def count_rounds(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[int]:
        """Return how many rounds of retrieval each question should get if passages are retrieved. Default: 1."""
        return [1 for _ in questions]

    @default_property
    def passage_filter(self) -> PassageFilter | None:
        """Filter that drops useless passages after retrieval; None (the default) keeps all passages."""
        return None
