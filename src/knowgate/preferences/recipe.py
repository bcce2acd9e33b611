"""How preferences are measured, by the names of what it takes: what is sent to other machines and made there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from knowgate.errors import BadSetting
from knowgate.gates import ProbeGate, load_gate
from knowgate.labels import load_grader
from knowgate.models import load_model
from knowgate.preferences.measure import Benefit, Confidence, Likelihood, Preferrer, Source
from knowgate.preferences.record import Preference
from knowgate.prompts import AnswerPrompts
from knowgate.types import Model, Question, Retriever


@dataclass(frozen=True)
class PreferRecipe:
    """Names of the LLM, the source, its probe and the index; how many candidates are looked at and kept."""

    model: str
    source: str
    gate: str | None
    prompts: AnswerPrompts
    index: str | None
    candidates: int
    top: int
    seed: int = 0
    split: str | None = None
    cut: int | None = None

    def make(self, retriever: Retriever | None) -> ReadyPreferrer:
        return ReadyPreferrer(self.preferrer(load_model(self.model), retriever))

    def preferrer(self, llm: Model, retriever: Retriever | None) -> Preferrer:
        measuring = source_of(self.source, llm, self.gate, self.prompts)
        return Preferrer(measuring, retriever, self.candidates, self.top, self.seed, self.split, self.cut)


@dataclass(frozen=True)
class ReadyPreferrer:
    """A preferrer on the machine where it works."""

    preferrer: Preferrer

    @property
    def identity(self) -> dict[str, str]:
        return identity(self.preferrer)

    def __call__(self, questions: Sequence[Question]) -> list[Preference]:
        return self.preferrer.prefer(questions)


def identity(preferrer: Preferrer) -> dict[str, str]:
    """Which LLM, wording, probe and index rows are made with."""
    source = preferrer.source
    told = {"model": source.model.fingerprint, "wording": source.prompts.fingerprint}
    if isinstance(source, Confidence):
        told["probe"] = str(source.gate.artefact.manifest["checksum"])
    return told | ({"index": preferrer.retriever.fingerprint} if preferrer.retriever is not None else {})


def source_of(name: str, llm: Model, gate: str | None, prompts: AnswerPrompts) -> Source:
    """The way of measuring behind a name."""
    if name == "benefit":
        return Benefit(llm, load_grader("contains", None, "implies"), prompts)
    if name == "likelihood":
        return Likelihood(llm, prompts)
    probe = load_gate(gate) if gate else None
    if not isinstance(probe, ProbeGate):
        given = f"is '{gate}'" if gate else "is missing"
        raise BadSetting(
            f"--source confidence reads a fitted probe; --gate {given}. "
            "Fit one: knowgate fit probe --target known --balanced --labels RUN --out DIR"
        )
    return Confidence(llm, probe.bind(llm, prompts.fingerprint), prompts)
