"""What a gate is: one method, `score`. All else has a default here.

Knows readings and what they are made of; not where they come from, nor what is done with a need.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from knowgate.types.protocols import ModelIdentity, PassageFilter
from knowgate.types.records import LabelPrompt, Neighbor, Question, Reading, Signal, SignalRequest

DEFAULT_DRAFT_TOKENS = 32  # as long as answers are by default: a gate that reads a draft reads all of it
DEFAULT_SAMPLES = 10

if TYPE_CHECKING:
    default_property = property
else:

    class default_property:  # noqa: N801 - reads like `property`, which it is to type checkers
        """A property whose place a plain attribute or a dataclass field of a subclass may take."""

        def __init__(self, value: Callable[[Gate], Any]):
            self.value, self.__doc__ = value, value.__doc__

        def __get__(self, gate: Gate | None, kind: type[Gate]) -> Any:
            if gate is None:
                raise AttributeError("known of gates, not of their classes")  # so no dataclass takes it for a default
            return self.value(gate)


@dataclass(frozen=True)
class GateScores:
    """What a gate said of some questions. raw: the scores before calibration, None where there is none."""

    needs: list[float]
    raw: list[float] | None = None


@dataclass(frozen=True)
class Gate(ABC):
    """Turns readings into need. A subclass with options is a frozen dataclass; they are its fields.

    Example:
        >>> class ShortGate(Gate):
        ...     needs = frozenset({Signal.DRAFT})
        ...
        ...     def score(self, questions, readings):
        ...         return [float(len(reading.draft.text) < 5) for reading in readings]
        >>> ShortGate().name, ShortGate().request.draft_tokens, ShortGate().threshold
        ('short', 32, 0.5)
    """

    @abstractmethod
    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        """Need in [0, 1] for each question: 0 = the LLM knows, 1 = it must look up."""

    def score_with_raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> GateScores:
        """Needs, and beside them the scores they were made of, from one reading. Only fitted gates have both."""
        return GateScores(self.score(questions, readings))

    # --- what it is -------------------------------------------------------------------------------

    @default_property
    def name(self) -> str:
        """What decisions and tables call it: that of the class, without 'Gate'."""
        return type(self).__name__.removesuffix("Gate").lower()

    @default_property
    def needs(self) -> frozenset[Signal]:
        """What the model must give. Nothing: the question alone decides."""
        return frozenset()

    @default_property
    def request(self) -> SignalRequest:
        """How much of it is read. By default a whole draft and ten samples, where those are needed; which hidden
        states are wanted a gate must say itself."""
        drafts, samples = self.needs & {Signal.DRAFT, Signal.LOGPROBS}, Signal.SAMPLES in self.needs
        return SignalRequest(
            draft_tokens=DEFAULT_DRAFT_TOKENS if drafts else 0, samples=DEFAULT_SAMPLES if samples else 0
        )

    @default_property
    def threshold(self) -> float:
        """Retrieve above this need, unless the user gives another."""
        return 0.5

    @default_property
    def obeys_rules(self) -> bool:
        """Whether rules come before its score; not of gates that are a wish themselves: always, never."""
        return True

    @default_property
    def is_pure(self) -> bool:
        """Whether it only does sums over what was read: no model, file or network of its own, nothing it keeps. Such a
        gate may decide on an event loop, and in several threads at once."""
        return False

    @default_property
    def note(self) -> str:
        """What should be said beside all that this gate decides: that it was fitted on another LLM, say."""
        return ""

    def bind(self, model: ModelIdentity, prompts: str) -> Self:
        """The gate ready for this model and this fingerprint of the prompts; raises if it was made for others."""
        return self

    # --- what it looks up or asks before it scores -------------------------------------------------

    def find_neighbors(self, questions: Sequence[Question]) -> list[tuple[Neighbor, ...]]:
        """Logged questions near each of these; they come back in `Reading.neighbours[name]`."""
        return [() for _ in questions]

    @default_property
    def labels(self) -> tuple[str, ...]:
        """The words between which the LLM chooses when the gate asks it something."""
        return ()

    def build_label_prompts(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[LabelPrompt]:
        """What a gate that needs `Signal.LABELS` asks the LLM; the logits come back in `Reading.labels[name]`."""
        return []

    @default_property
    def recorded_signal(self) -> str:
        """The recorded number (in `Reading.signals`) that stands for the LLM's answer: where every reading has it,
        nobody is asked. '' if the answer is never on record."""
        return ""

    # --- what else it can say ----------------------------------------------------------------------

    def explain(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[str]:
        """Why it scored as it did, in words; '' where it has none."""
        return ["" for _ in questions]

    def distances(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float | None]:
        """How far each question lies from those the gate was fitted on, above 1 for far; None where it cannot say."""
        return [None for _ in questions]

    def steps(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[int]:
        """How many rounds of retrieval each question takes if it is looked up at all."""
        return [1 for _ in questions]

    @default_property
    def second_look(self) -> PassageFilter | None:
        """Who judges, after retrieval, whether passages are of use: the gate itself, if it can."""
        return None
