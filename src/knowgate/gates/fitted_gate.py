"""What all fitted gates share: an artifact, the model it belongs to, and calibration of the raw score."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from knowgate.core.chart import embed_svg
from knowgate.core.display import TextTable
from knowgate.core.files import sha256_text
from knowgate.errors import ArtifactError, BadInput, ModelError
from knowgate.gates.artifacts.drift import claim_distance_tensors, compute_distances, read_distance_features
from knowgate.gates.artifacts.gate_folder import Artifact, Verdict, check_binding, read_artifact
from knowgate.gates.artifacts.networks import Floats, TensorValidator, apply_calibration
from knowgate.retrieval.embeddings import SentenceEmbedder
from knowgate.stats.bootstrap import Estimate
from knowgate.types import Embedder, Gate, GateScores, ModelIdentity, Question, Reading, Sampling, Signal, SignalRequest

CURVE_FILE = "curve.svg"
THRESHOLD_SOURCES = {
    "guarantee": "guarantee",
    "budget": "retrieval rate",
    "accuracy": "accuracy",
}  # what a calibration leaves


def summarize_gate(path: Path, manifest: Mapping[str, Any]) -> str:
    """Folder, LLM, how well it ranks, when it retrieves."""
    parts = [f"{path.name}: for {manifest['model']['name']}"]
    parts += [f"fitted on '{manifest['target']}'"] if "target" in manifest else []
    parts += [f"AUROC {format_auroc(manifest)}"] if "metrics" in manifest else []
    return ", ".join([*parts, f"retrieves {describe_threshold_rule(manifest)}"])


def render_gate_html(path: Path, manifest: Mapping[str, Any], note: str = "") -> str:
    """The facts of the card and the ROC curve on the test split."""
    file = path / CURVE_FILE
    drawn = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    curve = embed_svg(drawn, "ROC curve on the test split") if drawn else ""
    return build_gate_table(path, manifest, note).html() + curve


def build_gate_table(path: Path, manifest: Mapping[str, Any], note: str = "") -> TextTable:
    sizes = ", ".join(f"{name} {count}" for name, count in manifest.get("split", {}).items())
    facts = (
        ("LLM", str(manifest["model"]["name"])),
        ("fitted on", str(manifest.get("target", ""))),
        ("questions", sizes),
        ("label runs", ", ".join(str(item["run"]) for item in manifest.get("data", ()))),
        ("needs", ", ".join(manifest["needs"]) or "nothing of the LLM"),
        ("AUROC on the test split", format_auroc(manifest) if "metrics" in manifest else ""),
        ("retrieves", describe_threshold_rule(manifest)),
        ("note", note),
        ("folder", str(path)),
    )
    title = f"Gate {manifest['gate']}: {path.name}"
    return TextTable(title, ("", ""), tuple(fact for fact in facts if fact[1]))


def format_auroc(manifest: Mapping[str, Any]) -> str:
    measured = manifest["metrics"].get("auroc") or {}
    return Estimate(measured.get("value"), measured.get("low"), measured.get("high")).shown()


def describe_threshold_rule(manifest: Mapping[str, Any]) -> str:
    """When it retrieves, and what that threshold was chosen by."""
    chosen = next((word for kind, word in THRESHOLD_SOURCES.items() if kind in manifest), "")
    rule = describe_retrieval_rule(float(manifest["threshold"]))
    return f"{rule} (chosen by {chosen})" if chosen else rule


def describe_retrieval_rule(threshold: float) -> str:
    """When a gate with this threshold retrieves."""
    if threshold < 0:
        return "always"
    return f"when need is above {threshold:g}" if threshold < 1 else "never"


SCORING_FIELDS = ("gate", "options", "want", "needs", "calibration", "distance", "weights_sha256", "model", "prompts")
RAW_THRESHOLD = 0.5  # between the two classes: what a classifier decides by if nobody calibrates it


@dataclass(frozen=True, repr=False)
class FittedGate(Gate):
    """A gate loaded from a folder. Subclasses give `raw`: the uncalibrated need in [0, 1] of each question.

    verdict: 'need' decides by the calibrated probability; 'own' by what the classifier itself says, the raw score at
    0.5, as papers do that do not calibrate (KBM 4.1: P(True) against P(False); CBDR 4.3: softmax above beta).
    llm: the model it is bound to, whose weights a judge may share.
    """

    artifact: Artifact
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
        return f"<{type(self).__name__} {summarize_gate(self.artifact.path, self.artifact.manifest)}>"

    def _repr_html_(self) -> str:
        """For notebooks: the facts of its card, and the ROC curve."""
        return render_gate_html(self.artifact.path, self.artifact.manifest, self.note)

    @classmethod
    def load(cls, folder: str, plug_in: bool = False) -> Self:
        return cls.opened(read_artifact(folder), plug_in)

    @classmethod
    def opened(cls, artifact: Artifact, plug_in: bool = False, *, verdict: Verdict = "need") -> Self:
        """The gate of an artifact, if that holds what such a gate needs."""
        gate, tensors = cls(artifact, plug_in, verdict=verdict), TensorValidator(artifact.tensors)
        try:
            claim_distance_tensors(tensors, artifact.manifest.get("distance"))
            gate.check(tensors)
        except BadInput as error:
            raise artifact.refusal(str(error)) from None
        return gate

    def check(self, tensors: TensorValidator) -> None:
        """Refuse (BadInput) options that are not this gate's, and tensors it cannot use. A gate that does not say what
        it expects takes all."""

    @property
    def name(self) -> str:
        return str(self.artifact.manifest["gate"])

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset(Signal(word) for word in self.artifact.manifest["needs"])

    @property
    def request(self) -> SignalRequest:
        wanted: dict[str, Any] = dict(self.artifact.manifest["want"])
        drawn = Sampling(**{key: wanted.pop(key) for key in ("temperature", "top_p", "top_k") if key in wanted})
        return SignalRequest(**{**wanted, "layers": tuple(wanted.get("layers", ())), "sampling": drawn})

    @property
    def threshold(self) -> float:
        return RAW_THRESHOLD if self.verdict == "own" else float(self.artifact.manifest["threshold"])

    @property
    def scoring(self) -> str:
        """Identity of the needs it gives: that of a gate which differs in its threshold alone is the same."""
        manifest = self.artifact.manifest
        parts = {key: manifest.get(key) for key in SCORING_FIELDS}
        return sha256_text(type(self).__qualname__, self.verdict, json.dumps(parts, sort_keys=True))

    def bind(self, model: ModelIdentity, prompts: str) -> Self:
        note = check_binding(self.artifact, model.fingerprint, prompts, plug_in=self.plug_in)
        return replace(self, note=note, llm=model)

    def distances(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float | None]:
        source = self.artifact.manifest.get("distance")
        if source is None or not questions or any(not question.text for question in questions):
            return [None for _ in questions]  # an older gate, or rows packed without their texts
        return [
            float(found)
            for found in compute_distances(self.artifact.tensors, read_distance_features(source, questions, readings))
        ]

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
        return self.score_with_raw(questions, readings).needs

    def score_with_raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> GateScores:
        raw = self.raw_scores(questions, readings)
        return GateScores(raw if self.verdict == "own" else self.calibrated(raw), raw)

    def calibrated(self, raw: Sequence[float]) -> list[float]:
        """The needs that raw scores stand for."""
        needs = apply_calibration(np.array(raw, dtype=np.float64), self.artifact.manifest["calibration"])
        return [float(need) for need in np.clip(needs, 0.0, 1.0)]


@dataclass(frozen=True)
class EmbedderOptions:
    """The embedding model of a gate, and its identity."""

    embedder: str
    embedder_fingerprint: str


def load_fitted_embedder(artifact: Artifact, given: Embedder | None = None) -> Embedder:
    """The embedding model a gate was fitted with; another one is refused."""
    options = artifact.options
    encoder = given or SentenceEmbedder(options["embedder"])
    if encoder.fingerprint != options["embedder_fingerprint"]:
        raise ArtifactError(
            f"the gate '{artifact.path.name}' was fitted with the embedding model {options['embedder']} "
            f"({options['embedder_fingerprint'][:12]}), not this one ({encoder.fingerprint[:12]}). "
            "Fit it again, or give that model back."
        )
    return encoder
