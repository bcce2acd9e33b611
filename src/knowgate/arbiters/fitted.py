"""What all fitted arbiters share: an artefact, the model it belongs to, and calibration of both raw scores."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from knowgate.arbiters.artefact import ArbiterArtefact
from knowgate.arbiters.choosing import probable
from knowgate.errors import ArtefactError, BadInput, ModelError
from knowgate.gates import ExpectedTensors, to_probability
from knowgate.runs import use_with_its_own
from knowgate.statistics import Floats
from knowgate.types import Arbiter, Belief, BothAnswers, ModelIdentity, Signal


@dataclass(frozen=True, repr=False)
class FittedArbiter(Arbiter):
    """An arbiter loaded from a folder. Subclasses give `raw`: for each pair of answers how probably the one from
    memory and the one with passages are right, before calibration (two columns in [0, 1])."""

    artefact: ArbiterArtefact
    plug_in: bool = False
    note: str = ""
    llm: ModelIdentity | None = field(default=None, compare=False)  # it is bound to; a judge may share its weights

    def __repr__(self) -> str:
        made = self.artefact.manifest
        return f"<{type(self).__name__} {self.artefact.path.name}: for {made['model']['name']}>"

    @classmethod
    def opened(cls, artefact: ArbiterArtefact, plug_in: bool = False) -> Self:
        """The arbiter of an artefact, if that holds what such an arbiter needs."""
        arbiter, tensors = cls(artefact, plug_in), ExpectedTensors(artefact.tensors)
        try:
            arbiter.check(tensors)
            tensors.finish()
        except BadInput as error:
            raise artefact.refusal(str(error)) from None
        return arbiter

    def check(self, tensors: ExpectedTensors) -> None:
        """Refuse (BadInput) options that are not this arbiter's, and tensors it cannot use."""

    @property
    def name(self) -> str:
        return self.artefact.path.name

    @property
    def fingerprint(self) -> str:
        return str(self.artefact.manifest["checksum"])

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset(Signal(word) for word in self.artefact.manifest["needs"])

    @property
    def wants_passages(self) -> bool:
        return bool(self.artefact.manifest["wants_passages"])

    def bind(self, model: ModelIdentity, prompts: str) -> Self:
        """Refuse another model or wording than it was fitted on, unless as a plug-in; then say so."""
        made = self.artefact.manifest
        if (made["model"]["fingerprint"], made["prompts"]) == (model.fingerprint, prompts):
            return replace(self, llm=model)
        if not self.plug_in:
            raise ArtefactError(
                f"the arbiter '{self.name}' was fitted on answers of {made['model']['name']} (model "
                f"{made['model']['fingerprint']}, prompts {made['prompts']}), not of this model ({model.fingerprint}, "
                f"prompts {prompts}). {use_with_its_own(made['model']['name'])}"
            )
        return replace(self, note=f"plug-in, fitted on {made['model']['name']}", llm=model)

    @abstractmethod
    def raw(self, answers: Sequence[BothAnswers]) -> Floats:
        """One row per pair: P(right) of the answer from memory and of the one with passages, before calibration."""

    def believe(self, answers: Sequence[BothAnswers]) -> list[Belief]:
        if not answers:
            return []
        raw = self.raw(answers)
        if raw.shape != (len(answers), 2) or not np.isfinite(raw).all():
            raise ModelError(f"the fitted arbiter '{self.name}' gave no two numbers for each pair of answers.")
        sides = self.artefact.manifest["calibration"]
        closed, opened = (
            np.clip(to_probability(np.clip(raw[:, place], 0.0, 1.0), sides[side]), 0.0, 1.0)
            for place, side in enumerate(("closed", "open"))
        )
        pairs = zip(closed.tolist(), opened.tolist(), strict=True)
        return [Belief(first, second, probable(first, second, self.note)) for first, second in pairs]
