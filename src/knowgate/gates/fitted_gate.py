"""Base class of gates that are fitted on label runs and loaded from a folder."""

from __future__ import annotations

import functools
import json
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from knowgate.core.chart import embed_svg
from knowgate.core.display import TextTable
from knowgate.core.files import sha256_text
from knowgate.core.validation import expand_path, read_json
from knowgate.data.runs.records import OWN_VERDICT
from knowgate.errors import ArtifactError, BadInput, ModelError
from knowgate.gates.artifacts import gate_folder
from knowgate.gates.artifacts.drift import compute_distances, read_distance_features, require_distance_tensors
from knowgate.gates.artifacts.networks import TensorValidator, apply_calibration
from knowgate.retrieval.embeddings import SentenceEmbedder
from knowgate.stats.bootstrap import Estimate
from knowgate.stats.metrics import FloatArray
from knowgate.types import Embedder, Gate, GateScores, ModelIdentity, Question, Reading, Sampling, Signal, SignalRequest

# Fields of the manifest that determine the need for retrieval of a question. The threshold is not one of them.
SCORING_FIELDS = ("gate", "options", "want", "needs", "calibration", "distance", "weights_sha256", "model", "prompts")
RAW_THRESHOLD = 0.5  # retrieve above this score if the gate decides by the uncalibrated score of its classifier
CURVE_FILE = "curve.svg"
JUDGE_KINDS = frozenset({"gain", "ik", "judge", "kbm", "stack", "lora"})  # gates, and the arbiter `lora`
THRESHOLD_SOURCES = {"guarantee": "guarantee", "budget": "retrieval rate", "accuracy": "accuracy"}


@dataclass(frozen=True, repr=False)
class FittedComponent:
    """A gate or arbiter trained on label runs (recorded answers) and loaded from a folder.

    Attributes:
        artifact: Manifest and weights of the folder.
        plug_in: Whether to accept a different LLM than the one it was fitted on.
        note: Text that is added to every decision, for example that it was fitted on a different LLM.
        llm: The LLM that it is used with. A judge model can share its weights. None before `bind`.
    """

    artifact: gate_folder.Artifact
    plug_in: bool = False
    note: str = ""
    llm: ModelIdentity | None = field(default=None, compare=False)

    @classmethod
    def from_artifact(cls, artifact: gate_folder.Artifact, plug_in: bool = False) -> Self:
        """Create the gate or arbiter from a loaded folder.

        Raises:
            ArtifactError: Options or tensors that this kind of gate or arbiter needs are missing or wrong.
        """
        component = cls(artifact, plug_in)
        try:
            component.check_artifact(TensorValidator(artifact.tensors))
        except BadInput as error:
            raise artifact.make_error(str(error)) from None
        return component

    def check_artifact(self, tensors: TensorValidator) -> None:
        """Check the options and all tensors. Raise BadInput if one is wrong."""
        self.check(tensors)

    def check(self, tensors: TensorValidator) -> None:
        """Raise BadInput if options or tensors are wrong for this kind of gate or arbiter.

        Subclasses call `tensors.require` for each tensor. Gates then call `tensors.reject_unknown`.
        """

    @property
    def needs(self) -> frozenset[Signal]:
        """Signals that are read from the LLM."""
        return frozenset(Signal(name) for name in self.artifact.manifest["needs"])

    def bind(self, model: ModelIdentity, prompts: str) -> Self:
        """Return a copy that is bound to an LLM and its answer prompts.

        Raises:
            ArtifactError: It was fitted on a different LLM or different prompts, and `plug_in` is False.
        """
        note = gate_folder.check_binding(self.artifact, model, prompts, plug_in=self.plug_in)
        return replace(self, note=note, llm=model)


@dataclass(frozen=True, repr=False)
class FittedGate(FittedComponent, Gate):
    """A gate trained on label runs (recorded answers) and loaded from a folder. Subclasses implement `raw` and `check`.

    Attributes:
        artifact: Manifest and weights of the folder.
        plug_in: Whether to accept a different LLM than the one it was fitted on.
        note: Text that is added to every decision, for example that the gate was fitted on a different LLM.
        llm: The LLM that the gate decides for. A judge model can share its weights. None before `bind`.
        verdict: 'need' decides by the calibrated probability that retrieval is needed. 'own' retrieves if the raw score
            exceeds 0.5, as in papers that do not calibrate (KBM 4.1: P(True) against P(False); CBDR 4.3: softmax
            above beta).
        embedder: An embedding model that is already loaded, for gates that embed text. None to load it on first use.
    """

    verdict: gate_folder.Verdict = "need"
    embedder: Embedder | None = None

    def __init_subclass__(cls) -> None:
        """Make subclasses inherit `__repr__`. @dataclass would otherwise generate a long one."""
        super().__init_subclass__()
        if "__repr__" not in vars(cls):
            cls.__repr__ = FittedGate.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {summarize_gate(self.artifact.path, self.artifact.manifest)}>"

    def _repr_html_(self) -> str:
        """Render a table of facts and the ROC curve for notebooks."""
        file = self.artifact.path / CURVE_FILE
        svg = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
        chart = embed_svg(svg, "ROC curve on the test split") if svg else ""
        return _build_gate_table(self.artifact.path, self.artifact.manifest, self.note).html() + chart

    @classmethod
    def load(cls, folder: str, plug_in: bool = False) -> Self:
        """Load a gate of this class from its folder; `plug_in` accepts another LLM than it was fitted on."""
        return cls.from_artifact(gate_folder.read_artifact(folder), plug_in)

    def check_artifact(self, tensors: TensorValidator) -> None:
        """Check the options and all tensors of the gate. Raise BadInput if one is wrong."""
        require_distance_tensors(tensors, self.artifact.manifest.get("distance"))
        self.check(tensors)

    @property
    def name(self) -> str:
        """Name of the gate, as stored in `gate.json`."""
        return str(self.artifact.manifest["gate"])

    @property
    def request(self) -> SignalRequest:
        """What the gate reads from the LLM, such as draft tokens and layers."""
        fields: dict[str, Any] = dict(self.artifact.manifest["want"])
        # The manifest stores the sampling settings next to the other fields, not as a record of their own.
        sampling = Sampling(**{key: fields.pop(key) for key in ("temperature", "top_p", "top_k") if key in fields})
        layers = tuple(fields.pop("layers", ()))
        return SignalRequest(**fields, layers=layers, sampling=sampling)

    @property
    def threshold(self) -> float:
        """The need for retrieval above which the gate retrieves; 0.5 if it decides by the raw score."""
        return RAW_THRESHOLD if self.verdict == "own" else float(self.artifact.manifest["threshold"])

    @property
    def score_fingerprint(self) -> str:
        """Fingerprint of everything that determines the scores of the gate. The threshold does not."""
        fields = {key: self.artifact.manifest.get(key) for key in SCORING_FIELDS}
        return sha256_text(type(self).__qualname__, self.verdict, json.dumps(fields, sort_keys=True))

    def distances(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float | None]:
        """Compute how far each question is from the training questions, or None if unknown. Above 1 is unusual."""
        source = self.artifact.manifest.get("distance")
        if source is None or not questions or any(not question.text for question in questions):
            return [None for _ in questions]
        features = read_distance_features(source, questions, readings)
        return [float(distance) for distance in compute_distances(self.artifact.tensors, features)]

    @abstractmethod
    def raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> FloatArray:
        """Compute the uncalibrated need for retrieval of each question, from 0 to 1."""

    def raw_scores(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        """Return the uncalibrated need for retrieval of each question, clipped to [0, 1].

        Raises:
            ModelError: A score is NaN or infinite.
        """
        if not questions:
            return []
        raw = self.raw(questions, readings)
        if not np.isfinite(raw).all():
            raise ModelError(
                f"gate '{self.name}' computed a score that is NaN or infinite. Check the LLM: its probabilities or hidden "
                "states may contain NaN."
            )
        return [float(score) for score in np.clip(raw, 0.0, 1.0)]

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        """Return the need for retrieval of each question (0 = the LLM knows, 1 = retrieve)."""
        return self.score_with_raw(questions, readings).needs

    def score_with_raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> GateScores:
        """Return the need for retrieval of each question, and its uncalibrated (raw) score.

        With the verdict 'own', the gate decides by the raw score, so that this is also the need.
        """
        raw = self.raw_scores(questions, readings)
        needs = raw if self.verdict == "own" else self.calibrate(raw)
        return GateScores(needs, raw)

    def calibrate(self, raw: Sequence[float]) -> list[float]:
        """Convert raw scores to calibrated probabilities that retrieval is needed."""
        needs = apply_calibration(np.array(raw, dtype=np.float64), self.artifact.manifest["calibration"])
        return [float(need) for need in needs]

    @functools.cached_property
    def encoder(self) -> Embedder:
        """The embedding model that the gate was fitted with.

        Raises:
            ArtifactError: `embedder`, or the model of the recorded name, is not the one that the gate was fitted with.
        """
        name, fingerprint = self.artifact.options["embedder"], self.artifact.options["embedder_fingerprint"]
        embedder = self.embedder or SentenceEmbedder(name)
        if embedder.fingerprint != fingerprint:
            raise ArtifactError(
                f"gate '{self.artifact.path.name}' was fitted with the embedding model {name} (fingerprint {fingerprint[:12]}). "
                f"The current model has fingerprint {embedder.fingerprint[:12]}. Use the original model, or fit the gate again."
            )
        return embedder


@dataclass(frozen=True)
class EmbedderOptions:
    """Name and fingerprint of a gate's embedding model in `gate.json`."""

    embedder: str
    embedder_fingerprint: str


# --- display --------------------------------------------------------------------------------------


def summarize_gate(path: Path, manifest: Mapping[str, Any]) -> str:
    """Describe a fitted gate in one line: folder, LLM, AUROC and threshold."""
    parts = [f"{path.name}: for {manifest['model']['name']}"]
    if "target" in manifest:
        parts.append(f"fitted on '{manifest['target']}'")
    if "metrics" in manifest:
        parts.append(f"AUROC {format_auroc(manifest)}")
    parts.append(f"retrieves {describe_threshold_rule(manifest)}")
    return ", ".join(parts)


def _build_gate_table(path: Path, manifest: Mapping[str, Any], note: str) -> TextTable:
    """Build a table of the main facts in `gate.json`, without empty ones."""
    facts = (
        ("LLM", str(manifest["model"]["name"])),
        ("fitted on", str(manifest.get("target", ""))),
        ("questions", ", ".join(f"{name} {count}" for name, count in manifest.get("split", {}).items())),
        ("label runs", ", ".join(str(item["run"]) for item in manifest.get("data", ()))),
        ("needs", ", ".join(manifest["needs"]) or "nothing of the LLM"),
        ("AUROC on the test split", format_auroc(manifest) if "metrics" in manifest else ""),
        ("retrieves", describe_threshold_rule(manifest)),
        ("note", note),
        ("folder", str(path)),
    )
    return TextTable(f"Gate {manifest['gate']}: {path.name}", ("", ""), tuple(fact for fact in facts if fact[1]))


def format_auroc(manifest: Mapping[str, Any]) -> str:
    """Format the AUROC on the test split with its confidence interval."""
    auroc = manifest["metrics"].get("auroc") or {}
    return Estimate(auroc.get("value"), auroc.get("low"), auroc.get("high")).format()


def describe_threshold_rule(manifest: Mapping[str, Any]) -> str:
    """Say when a gate retrieves and how its threshold was chosen."""
    source = next((name for key, name in THRESHOLD_SOURCES.items() if key in manifest), "")
    rule = describe_retrieval_rule(float(manifest["threshold"]))
    return f"{rule} (chosen by {source})" if source else rule


def describe_retrieval_rule(threshold: float) -> str:
    """Say when a gate with this threshold retrieves."""
    if threshold < 0:
        return "always"
    if threshold >= 1:
        return "never"
    return f"when need is above {threshold:g}"


# --- names and folders ----------------------------------------------------------------------------


def get_fitted_spec(gate: str | Gate) -> gate_folder.FittedGateSpec | None:
    """Return the folder of a fitted gate, and which of its scores decides; None for other gates.

    A gate decides by its calibrated score, or with the spec 'my-gate,verdict=own' by its uncalibrated score.
    """
    if isinstance(gate, str):
        return gate_folder.parse_fitted_spec(gate)
    if isinstance(gate, FittedGate):
        return gate_folder.FittedGateSpec(str(gate.artifact.path), gate.verdict)
    return None


def get_gate_name(gate: str | Gate) -> str:
    """Return the name of a gate for tables. Fitted gates are named by their folder."""
    spec = get_fitted_spec(gate)
    if spec is None:
        return gate if isinstance(gate, str) else gate.name
    return Path(spec.folder).name + (OWN_VERDICT if spec.verdict == "own" else "")


def has_judge(gate: str | Gate) -> bool:
    """Return whether a gate or arbiter runs a fine-tuned judge model."""
    name = get_gate_name(gate)
    folder = get_gate_folder(gate)
    if folder is not None:
        manifest: Any = read_json(expand_path(folder) / gate_folder.GATE_MANIFEST)
        name = str(manifest["gate"])
        if manifest.get("options", {}).get("mode") == "text":  # an `ik` gate with a classifier of text embeddings
            return False
    kind = re.split("[^a-z]", name)[0]  # 'kbm-certainty' is a variant of 'kbm'
    return kind in JUDGE_KINDS


def get_gate_folder(gate: str | Gate) -> str | None:
    """Return the folder of a fitted gate, or None for other gates."""
    spec = get_fitted_spec(gate)
    return None if spec is None else spec.folder
