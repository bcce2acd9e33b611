"""What all fitted gates share: an artefact, the model it belongs to, and calibration of the raw score."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from knowgate.errors import BadInput, ModelError
from knowgate.files import sha256_text
from knowgate.gates.fitted.artefact import Artefact, check_bound, read_artefact
from knowgate.gates.fitted.distance import distances, expect_ground, read_off
from knowgate.gates.fitted.overview import gate_html, gate_line
from knowgate.gates.fitted.probability import Floats, to_probability
from knowgate.gates.fitted.spec import Verdict
from knowgate.gates.fitted.tensors import ExpectedTensors
from knowgate.types import Gate, ModelIdentity, Question, Reading, Sampling, Scored, Signal, Want

SCORED_BY = ("gate", "options", "want", "needs", "calibration", "distance", "weights_sha256", "model", "prompts")
MIDDLE = 0.5  # between the two classes: what a classifier decides by if nobody calibrates it


@dataclass(frozen=True, repr=False)
class FittedGate(Gate):
    """A gate loaded from a folder. Subclasses give `raw`: the uncalibrated need in [0, 1] of each question.

    verdict: 'need' decides by the calibrated probability; 'own' by what the classifier itself says, the raw score at
    0.5, as papers do that do not calibrate (KBM 4.1: P(True) against P(False); CBDR 4.3: softmax above beta).
    llm: the model it is bound to, whose weights a judge may share.
    """

    artefact: Artefact
    plug_in: bool = False
    note: str = ""
    verdict: Verdict = "need"
    llm: ModelIdentity | None = field(default=None, compare=False)

    def __init_subclass__(cls) -> None:
        """A gate that is a dataclass would print all it holds; it prints itself as every fitted gate does."""
        super().__init_subclass__()
        if "__repr__" not in vars(cls):
            cls.__repr__ = FittedGate.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {gate_line(self.artefact.path, self.artefact.manifest)}>"

    def _repr_html_(self) -> str:
        """For notebooks: the facts of its card, and the ROC curve."""
        return gate_html(self.artefact.path, self.artefact.manifest, self.note)

    @classmethod
    def load(cls, folder: str, plug_in: bool = False) -> Self:
        return cls.opened(read_artefact(folder), plug_in)

    @classmethod
    def opened(cls, artefact: Artefact, plug_in: bool = False, *, verdict: Verdict = "need") -> Self:
        """The gate of an artefact, if that holds what such a gate needs."""
        gate, tensors = cls(artefact, plug_in, verdict=verdict), ExpectedTensors(artefact.tensors)
        try:
            expect_ground(tensors, artefact.manifest.get("distance"))
            gate.check(tensors)
        except BadInput as error:
            raise artefact.refusal(str(error)) from None
        return gate

    def check(self, tensors: ExpectedTensors) -> None:
        """Refuse (BadInput) options that are not this gate's, and tensors it cannot use. A gate that does not say what
        it expects takes all."""

    @property
    def name(self) -> str:
        return str(self.artefact.manifest["gate"])

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset(Signal(word) for word in self.artefact.manifest["needs"])

    @property
    def want(self) -> Want:
        wanted: dict[str, Any] = dict(self.artefact.manifest["want"])
        drawn = Sampling(**{key: wanted.pop(key) for key in ("temperature", "top_p", "top_k") if key in wanted})
        return Want(**{**wanted, "layers": tuple(wanted.get("layers", ())), "sampling": drawn})

    @property
    def threshold(self) -> float:
        return MIDDLE if self.verdict == "own" else float(self.artefact.manifest["threshold"])

    @property
    def scoring(self) -> str:
        """Identity of the needs it gives: that of a gate which differs in its threshold alone is the same."""
        manifest = self.artefact.manifest
        parts = {key: manifest.get(key) for key in SCORED_BY}
        return sha256_text(type(self).__qualname__, self.verdict, json.dumps(parts, sort_keys=True))

    def bind(self, model: ModelIdentity, prompts: str) -> Self:
        note = check_bound(self.artefact, model.fingerprint, prompts, plug_in=self.plug_in)
        return replace(self, note=note, llm=model)

    def distances(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float | None]:
        source = self.artefact.manifest.get("distance")
        if source is None or not questions or any(not question.text for question in questions):
            return [None for _ in questions]  # an older gate, or rows packed without their texts
        return [float(found) for found in distances(self.artefact.tensors, read_off(source, questions, readings))]

    @abstractmethod
    def raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> Floats:
        """Need in [0, 1] before it is turned into a probability."""

    def raw_scores(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        """The classifier's own probability that retrieval is needed, before calibration; a number each."""
        if not questions:
            return []
        raw = self.raw(questions, readings)
        if not np.isfinite(raw).all():
            raise ModelError(f"the fitted gate '{self.name}' gave NaN: its features are out of order.")
        return [float(score) for score in np.clip(raw, 0.0, 1.0)]

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        return self.score_both(questions, readings).needs

    def score_both(self, questions: Sequence[Question], readings: Sequence[Reading]) -> Scored:
        raw = self.raw_scores(questions, readings)
        return Scored(raw if self.verdict == "own" else self.calibrated(raw), raw)

    def calibrated(self, raw: Sequence[float]) -> list[float]:
        """The needs that raw scores stand for."""
        needs = to_probability(np.array(raw, dtype=np.float64), self.artefact.manifest["calibration"])
        return [float(need) for need in np.clip(needs, 0.0, 1.0)]
