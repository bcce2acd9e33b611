"""Gates decide on questions with the LLM at hand, batch by batch: here, or on the machines of a cluster."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from knowgate.errors import ModelError
from knowgate.gates import bind_gate, folder_of, load_gate, measure_distances, read_questions, score_both
from knowgate.models import load_model
from knowgate.prompts import AnswerPrompts
from knowgate.types import Gate, Model, Question, Retriever


@dataclass(frozen=True)
class LiveGate:
    """A gate bound to the LLM, under the name its needs are recorded by.

    lasting: the name says all about the gate, so that needs on record under it are its own. A folder may have been
    fitted or calibrated again since, and so may an object; a log may have grown. They decide anew.
    """

    name: str
    gate: Gate
    lasting: bool


def bound(name: str, gate: str | Gate, model: Model, prompts: AnswerPrompts, *, plug_in: bool) -> LiveGate:
    loaded = load_gate(gate, plug_in=plug_in) if isinstance(gate, str) else gate
    reads_log = type(loaded).recall is not Gate.recall  # which may have grown since
    lasting = isinstance(gate, str) and folder_of(gate) is None and not reads_log
    return LiveGate(name, bind_gate(loaded, model, prompts), lasting)


@dataclass
class Decided:
    """What one gate says about some questions, by their ids. seconds: spent on all of them."""

    needs: dict[str, float] = field(default_factory=dict)
    raw: dict[str, float] = field(default_factory=dict)
    distances: list[float | None] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, other: Decided) -> None:
        self.needs |= other.needs
        self.raw |= other.raw
        self.distances += other.distances
        self.seconds += other.seconds


@dataclass(frozen=True)
class Decider:
    """Gates on one LLM; each reads what it needs, as the pipeline would with this gate alone."""

    model: Model
    prompts: AnswerPrompts
    gates: Sequence[Gate]

    def decide(self, questions: Sequence[Question]) -> list[Decided]:
        """For each gate."""
        return [self._one(gate, questions) for gate in self.gates]

    def _one(self, gate: Gate, questions: Sequence[Question]) -> Decided:
        start = time.perf_counter()
        ids = [question.id for question in questions]
        readings = read_questions(self.model, [gate], questions, self.prompts)
        scored = score_both(gate, questions, readings)
        distances = measure_distances(gate, questions, readings)
        needs, raw = dict(zip(ids, scored.needs, strict=True)), dict(zip(ids, scored.raw or [], strict=False))
        return Decided(needs, raw, list(distances), time.perf_counter() - start)

    @property
    def identity(self) -> dict[str, str]:
        return {"model": self.model.fingerprint, "wording": self.prompts.fingerprint}

    def __call__(self, questions: Sequence[Question]) -> list[Decided]:
        return self.decide(questions)


@dataclass(frozen=True)
class DecideRecipe:
    """The names of the LLM and the gates: what is sent to other machines and made there."""

    model: str
    gates: tuple[str, ...]
    prompts: AnswerPrompts
    plug_in: bool = False
    index: str | None = None

    def make(self, retriever: Retriever | None) -> Decider:
        llm = load_model(self.model)
        gates = [bound(spec, spec, llm, self.prompts, plug_in=self.plug_in).gate for spec in self.gates]
        return Decider(llm, self.prompts, gates)


def cannot_decide(question: Question, why: str) -> list[Decided]:
    """A need that cannot be had is an error, never a number."""
    raise ModelError(f"no gate could decide on question '{question.id}': {why}. Its answers are kept; try again.")
