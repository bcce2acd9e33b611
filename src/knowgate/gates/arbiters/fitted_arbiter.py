"""What all fitted arbiters share: an artifact, the model it belongs to, and calibration of both raw scores."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from knowgate.core.artifacts import check_artifact_folder, check_digests, compute_digests
from knowgate.core.files import atomic_folder, check_replaceable, sha256_text, write_json, write_text
from knowgate.core.schema import NonNegativeInt, UnitInterval, read_record
from knowgate.core.validation import expand_path, read_json
from knowgate.data.runs.folder import explain_model_mismatch
from knowgate.errors import ArtifactError, BadInput, ModelError
from knowgate.gates.arbiters.arbitration import format_probabilities
from knowgate.gates.artifacts.gate_folder import CARD_FILE, Artifact, Tensors, build_artifact_error, is_artifact
from knowgate.gates.artifacts.gate_manifest import (
    CalibrationRecord,
    EstimateRecord,
    ModelRecord,
    RunRecord,
    check_calibration,
)
from knowgate.gates.artifacts.networks import TensorValidator, apply_calibration
from knowgate.stats.metrics import FloatArray
from knowgate.types import AnswerPair, Arbiter, Belief, ModelIdentity, Signal


@dataclass(frozen=True)
class SideCalibrations:
    """From raw score to probability, of each answer."""

    closed: CalibrationRecord
    open: CalibrationRecord


@dataclass(frozen=True)
class ArbiterManifest:
    """`files` are the digests of all other files but the card. prompts: fingerprint of the answer prompts."""

    arbiter: str
    options: Mapping[str, Any]
    needs: tuple[Signal, ...]
    wants_passages: bool
    model: ModelRecord
    prompts: str
    calibration: SideCalibrations
    checksum: str
    files: Mapping[str, str]
    retriever: str | None = None
    grader: str = ""
    data: tuple[RunRecord, ...] = ()
    data_hash: str = ""
    split: Mapping[str, NonNegativeInt] = field(default_factory=dict)
    base_rates: Mapping[str, UnitInterval] = field(default_factory=dict)
    created: str = ""
    metrics: Mapping[str, EstimateRecord] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_arbiter_manifest(value: Mapping[str, Any], where: str) -> ArbiterManifest:
    """The record of a manifest; fields that a later version added are let be."""
    record = read_record(ArbiterManifest, dict(value), where, ignore_unknown=True)
    for side in (record.calibration.closed, record.calibration.open):
        check_calibration(side, where)
    return record


ARBITER_FORMAT_VERSION = 1
ARBITER_MANIFEST, ARBITER_WEIGHTS_FILE = "arbiter.json", "weights.safetensors"
ARBITER_KIND = "a fitted arbiter"


@dataclass(frozen=True)
class ArbiterArtifact(Artifact):
    """A fitted arbiter's manifest and weights, kept as a gate's are."""

    kind: ClassVar[str] = "arbiter"


def _refusal(folder: Path, problem: str) -> ArtifactError:
    return build_artifact_error(ArbiterArtifact.kind, folder, problem)


def is_arbiter_folder(path: str | Path) -> bool:
    return is_artifact(path, ARBITER_MANIFEST)


def read_arbiter_artifact(path: str | Path) -> ArbiterArtifact:
    """Load and check a fitted arbiter."""
    if not is_arbiter_folder(path):
        raise ArtifactError(
            f"'{path}' is not a fitted arbiter: it has no {ARBITER_MANIFEST}. Make one: knowgate fit arbiter"
        )
    folder = expand_path(path)
    check_artifact_folder(folder, lambda problem: _refusal(folder, problem))
    manifest = _manifest(folder)
    check_digests(folder, manifest["files"], lambda problem: _refusal(folder, problem))
    return ArbiterArtifact(folder, manifest, _tensors(folder))


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = read_json(folder / ARBITER_MANIFEST)
        if manifest["version"] != ARBITER_FORMAT_VERSION:
            raise _refusal(
                folder, f"it has format {str(manifest['version'])[:40]}, this knowgate reads {ARBITER_FORMAT_VERSION}"
            )
        if manifest["checksum"] != compute_arbiter_checksum(manifest):
            raise _refusal(folder, f"{ARBITER_MANIFEST} was edited by hand")
        read_arbiter_manifest(manifest, ARBITER_MANIFEST)
    except (BadInput, KeyError, TypeError) as error:
        raise _refusal(folder, f"{ARBITER_MANIFEST} is broken ({error})") from None
    return dict(manifest)


def _tensors(folder: Path) -> Tensors:
    file = folder / ARBITER_WEIGHTS_FILE
    try:
        tensors: Tensors = load(file.read_bytes()) if file.is_file() else {}
    except (SafetensorError, KeyError, ValueError, TypeError) as error:  # the latter for number types that numpy lacks
        raise _refusal(folder, f"its weights cannot be read: {error}") from None
    if any(not np.isfinite(block).all() for block in tensors.values()):
        raise _refusal(folder, "its weights hold NaN")
    return tensors


def write_arbiter_artifact(
    path: Path, manifest: Mapping[str, Any], tensors: Tensors, card: str, files: Mapping[str, bytes] | None = None
) -> None:
    """Save a fitted arbiter; an earlier one in the same place is replaced as a whole, anything else is left alone."""
    check_replaceable(path, ARBITER_MANIFEST, ARBITER_KIND)
    with atomic_folder(path) as folder:
        if tensors:
            (folder / ARBITER_WEIGHTS_FILE).write_bytes(
                save({name: np.ascontiguousarray(block) for name, block in tensors.items()})
            )
        for name, content in (files or {}).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        write_text(folder / CARD_FILE, card)
        full = {
            **manifest,
            "version": ARBITER_FORMAT_VERSION,
            "files": compute_digests(folder, exclude=(ARBITER_MANIFEST, CARD_FILE)),
        }
        write_json(folder / ARBITER_MANIFEST, {**full, "checksum": compute_arbiter_checksum(full)})


def compute_arbiter_checksum(manifest: Mapping[str, Any]) -> str:
    """Of everything that decides how the arbiter behaves; it is its fingerprint."""
    parts = [f"{key}={json.dumps(manifest[key])}" for key in sorted(manifest) if key != "checksum"]
    return sha256_text(*parts)[:16]


@dataclass(frozen=True, repr=False)
class FittedArbiter(Arbiter):
    """An arbiter loaded from a folder. Subclasses give `raw`: for each pair of answers how probably the one from
    memory and the one with passages are right, before calibration (two columns in [0, 1])."""

    artifact: ArbiterArtifact
    plug_in: bool = False
    note: str = ""
    llm: ModelIdentity | None = field(default=None, compare=False)  # it is bound to; a judge may share its weights

    def __repr__(self) -> str:
        made = self.artifact.manifest
        return f"<{type(self).__name__} {self.artifact.path.name}: for {made['model']['name']}>"

    @classmethod
    def opened(cls, artifact: ArbiterArtifact, plug_in: bool = False) -> Self:
        """The arbiter of an artifact, if that holds what such an arbiter needs."""
        arbiter, tensors = cls(artifact, plug_in), TensorValidator(artifact.tensors)
        try:
            arbiter.check(tensors)
            tensors.finish()
        except BadInput as error:
            raise artifact.refusal(str(error)) from None
        return arbiter

    def check(self, tensors: TensorValidator) -> None:
        """Refuse (BadInput) options that are not this arbiter's, and tensors it cannot use."""

    @property
    def name(self) -> str:
        return self.artifact.path.name

    @property
    def fingerprint(self) -> str:
        return str(self.artifact.manifest["checksum"])

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset(Signal(word) for word in self.artifact.manifest["needs"])

    @property
    def needs_passages(self) -> bool:
        return bool(self.artifact.manifest["wants_passages"])

    def bind(self, model: ModelIdentity, prompts: str) -> Self:
        """Refuse another model or wording than it was fitted on, unless as a plug-in; then say so."""
        made = self.artifact.manifest
        if (made["model"]["fingerprint"], made["prompts"]) == (model.fingerprint, prompts):
            return replace(self, llm=model)
        if not self.plug_in:
            raise ArtifactError(
                f"the arbiter '{self.name}' was fitted on answers of {made['model']['name']} (model "
                f"{made['model']['fingerprint']}, prompts {made['prompts']}), not of this model ({model.fingerprint}, "
                f"prompts {prompts}). {explain_model_mismatch(made['model']['name'])}"
            )
        return replace(self, note=f"plug-in, fitted on {made['model']['name']}", llm=model)

    @abstractmethod
    def raw(self, answers: Sequence[AnswerPair]) -> FloatArray:
        """One row per pair: P(right) of the answer from memory and of the one with passages, before calibration."""

    def estimate(self, answers: Sequence[AnswerPair]) -> list[Belief]:
        if not answers:
            return []
        raw = self.raw(answers)
        if raw.shape != (len(answers), 2) or not np.isfinite(raw).all():
            raise ModelError(f"the fitted arbiter '{self.name}' gave no two numbers for each pair of answers.")
        sides = self.artifact.manifest["calibration"]
        closed, opened = (
            np.clip(apply_calibration(np.clip(raw[:, place], 0.0, 1.0), sides[side]), 0.0, 1.0)
            for place, side in enumerate(("closed", "open"))
        )
        pairs = zip(closed.tolist(), opened.tolist(), strict=True)
        return [Belief(first, second, format_probabilities(first, second, self.note)) for first, second in pairs]
