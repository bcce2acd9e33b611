"""The base class of gates. A subclass must implement `score`; everything else has a default."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from knowgate.types.protocols import ModelIdentity, PassageFilter
from knowgate.types.records import LabelPrompt, Neighbor, Question, Reading, Signal, SignalRequest

DEFAULT_DRAFT_TOKENS = 32  # the default length of answers, so that a gate reads whole drafts
DEFAULT_SAMPLES = 10

if TYPE_CHECKING:
    default_property = property
else:

    class default_property:  # noqa: N801 - used like `property`
        """A property that a subclass may override with a plain attribute or a dataclass field."""

        def __init__(self, getter: Callable[[Gate], Any]):
            self.getter, self.__doc__ = getter, getter.__doc__

        def __get__(self, gate: Gate | None, owner: type[Gate]) -> Any:
            if gate is None:  # otherwise dataclasses would take the property for the default of a field
                raise AttributeError("only gates have this property, not their classes")
            return self.getter(gate)


@dataclass(frozen=True)
class GateScores:
    """Scores of a gate for a batch of questions.

    Attributes:
        needs: Need for retrieval of each question, in [0, 1].
        raw: Scores before calibration; None for gates without calibration.
    """

    needs: list[float]
    raw: list[float] | None = None


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
    """Scores how much each question needs retrieval, from what was read of the LLM.

    Options of a gate are fields of a frozen dataclass that derives from this class.

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
        """Reject members of version 0.1 that were renamed, which would silently have no effect."""
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
            readings: What was read of the LLM for each of them.

        Returns:
            Needs in [0, 1]: 0 means that the LLM knows the answer, 1 that it must retrieve.
        """

    def score_with_raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> GateScores:
        """Score the questions, and also return the scores before calibration if the gate is calibrated."""
        return GateScores(self.score(questions, readings))

    # --- properties -------------------------------------------------------------------------------

    @default_property
    def name(self) -> str:
        """Name in decisions and tables. Default: the name of the class without 'Gate'."""
        return type(self).__name__.removesuffix("Gate").lower()

    @default_property
    def needs(self) -> frozenset[Signal]:
        """Signals that the model must offer. Default: none, the question alone decides."""
        return frozenset()

    @default_property
    def request(self) -> SignalRequest:
        """How much of each signal to read. Default: a whole draft and ten samples, if the gate needs those.

        A gate that needs hidden states must say which layers.
        """
        needs_draft, needs_samples = self.needs & {Signal.DRAFT, Signal.LOGPROBS}, Signal.SAMPLES in self.needs
        return SignalRequest(
            draft_tokens=DEFAULT_DRAFT_TOKENS if needs_draft else 0, samples=DEFAULT_SAMPLES if needs_samples else 0
        )

    @default_property
    def threshold(self) -> float:
        """Retrieve if the need is above this, unless the user chooses another threshold."""
        return 0.5

    @default_property
    def obeys_rules(self) -> bool:
        """Whether rules may decide before this gate. False for the gates `always` and `never`."""
        return True

    @default_property
    def is_pure(self) -> bool:
        """Whether scoring is a short computation that is safe on an event loop and in several threads at once.

        Such a gate uses no model, file or network of its own and has no mutable state.
        """
        return False

    @default_property
    def note(self) -> str:
        """Remark shown with every decision, for instance that the gate was fitted on another LLM."""
        return ""

    def bind(self, model: ModelIdentity, prompts: str) -> Self:
        """Return the gate prepared for a model and the fingerprint of the prompts.

        Raises:
            KnowgateError: The gate was fitted for another model or other prompts.
        """
        return self

    # --- input beside the reading -----------------------------------------------------------------

    def find_neighbors(self, questions: Sequence[Question]) -> list[tuple[Neighbor, ...]]:
        """Find logged questions similar to each question. `score` gets them in `Reading.neighbors[name]`."""
        return [() for _ in questions]

    @default_property
    def labels(self) -> tuple[str, ...]:
        """Words among which the LLM chooses in the prompts of `build_label_prompts`."""
        return ()

    def build_label_prompts(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[LabelPrompt]:
        """Make the prompts of a gate that needs `Signal.LABELS`. `score` gets the logits in `Reading.labels[name]`."""
        return []

    @default_property
    def recorded_signal(self) -> str:
        """Key of `Reading.signals` under which the LLM's answer to the label prompt may be recorded.

        If every reading has it, the LLM is not called. Empty if the answer is never recorded.
        """
        return ""

    # --- output beside the score ------------------------------------------------------------------

    def explain(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[str]:
        """Explain each score in words; an empty string means no explanation."""
        return ["" for _ in questions]

    def distances(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float | None]:
        """Measure how far each question is from the training questions: above 1 is far, None is unknown."""
        return [None for _ in questions]

    def count_rounds(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[int]:
        """Return how many rounds of retrieval each question should get if it is retrieved for."""
        return [1 for _ in questions]

    @default_property
    def passage_filter(self) -> PassageFilter | None:
        """Filter that drops useless passages after retrieval, if the gate can judge them."""
        return None
