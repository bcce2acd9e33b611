"""Gates on a model at hand: what they need is read from it. Knows models by their protocol only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from knowgate.gates import FittedGate, check_offers
from knowgate.gates.fitted.agreement import check_agreement
from knowgate.gates.offers import check_want
from knowgate.gates.outside import blamed
from knowgate.gates.reading import gather_readings
from knowgate.prompts import AnswerPrompts
from knowgate.types import Gate, ListingModel, Model, Question, Reading, Vector, Want


@dataclass(frozen=True)
class ModelSource:
    """Readings from a model: one pass over the bare questions, another over what a gate asks."""

    model: Model
    prompts: AnswerPrompts

    def bind(self, gate: Gate) -> Gate:
        check_offers(gate, self.model)
        with blamed(gate):
            bound = self._bound(gate)
        check_want(bound, self.model)
        return bound

    def _bound(self, gate: Gate) -> Gate:
        """A gate fitted on the states of weights that a server now serves is held against the server's own."""
        model, wording = self.model, self.prompts.fingerprint
        if not (isinstance(gate, FittedGate) and isinstance(model, ListingModel)) or gate.plug_in:
            return gate.bind(model, wording)
        made = gate.artefact.manifest
        is_other = made["model"]["fingerprint"] != model.fingerprint and made["prompts"] == wording
        if not (is_other and gate.want.layers):
            return gate.bind(model, wording)
        served = replace(gate, llm=model)
        check_want(served, model)
        return replace(served, note=check_agreement(gate.artefact, model, self.prompts, served.want))

    def read(self, questions: Sequence[Question], want: Want) -> list[Reading]:
        if want.is_nothing:
            return [Reading() for _ in questions]
        return self.model.read([self.prompts.closed(question) for question in questions], want)

    def ask(self, gate: Gate, questions: Sequence[Question], readings: Sequence[Reading]) -> list[Vector]:
        with blamed(gate):
            prompts = gate.ask(questions, readings)
        return self.model.label_logits(prompts, gate.labels)


def bind_gate(gate: Gate, model: Model, prompts: AnswerPrompts) -> Gate:
    """The gate, found to work with this model and wording."""
    return ModelSource(model, prompts).bind(gate)


def read_questions(
    model: Model, gates: Sequence[Gate], questions: Sequence[Question], prompts: AnswerPrompts
) -> list[Reading]:
    """What the gates need, from one pass over the bare questions and each asking gate's own prompt."""
    return gather_readings(ModelSource(model, prompts), gates, questions)
