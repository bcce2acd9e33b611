"""Fitted arbiters: folders that choose between the answer from memory and the one with passages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.core.schema import UnitInterval, read_record
from knowgate.gates.arbiters.abstention import RULES_ARBITER
from knowgate.gates.arbiters.arbitration import format_probabilities
from knowgate.gates.artifacts import gate_manifest
from knowgate.gates.artifacts.gate_folder import ArtifactFormat, is_artifact
from knowgate.gates.artifacts.networks import TensorValidator, apply_calibration
from knowgate.gates.fitted_gate import FittedComponent
from knowgate.stats.metrics import FloatArray
from knowgate.types import AnswerPair, Arbiter, Belief

ARBITER_MANIFEST = "arbiter.json"
ARBITER_KIND = "a fitted arbiter"


@dataclass(frozen=True)
class SideCalibrations:
    """Functions from raw scores to probabilities, for answers without (`closed`) and with passages (`open`)."""

    closed: gate_manifest.CalibrationRecord
    open: gate_manifest.CalibrationRecord


@dataclass(frozen=True, kw_only=True)
class ArbiterManifest(gate_manifest.FittedManifest):
    """Content of `arbiter.json`.

    Attributes:
        arbiter: Kind of arbiter, such as 'features'.
        wants_passages: Whether the arbiter reads the passages.
        calibration: Calibrations of its two outputs: P(closed-book answer is right), P(open-book answer is right).
        files: Digests of the other files in the folder by name.
        base_rates: Share of right closed-book and open-book answers in training.
    """

    arbiter: str
    wants_passages: bool
    calibration: SideCalibrations
    files: Mapping[str, str]
    base_rates: Mapping[str, UnitInterval] = field(default_factory=dict)


def read_arbiter_manifest(value: Mapping[str, Any], where: str) -> ArbiterManifest:
    """Validate the content of `arbiter.json`. Unknown fields are ignored.

    Args:
        value: The parsed JSON.
        where: What error messages call the file.

    Raises:
        BadInput: A field is missing or wrong.
    """
    manifest = read_record(ArbiterManifest, dict(value), where, ignore_unknown=True)
    for calibration in (manifest.calibration.closed, manifest.calibration.open):
        gate_manifest.check_calibration(calibration, where)
    return manifest


ARBITER_FORMAT = ArtifactFormat("arbiter", ARBITER_MANIFEST, "knowgate fit arbiter", read_arbiter_manifest)


def is_arbiter_folder(path: str | Path) -> bool:
    """Return whether a path is the folder of a fitted arbiter."""
    return is_artifact(path, ARBITER_MANIFEST)


@dataclass(frozen=True, repr=False)
class FittedArbiter(FittedComponent, Arbiter):
    """An arbiter trained on label runs (recorded answers) and loaded from a folder. Subclasses implement `raw`.

    Attributes:
        artifact: Manifest and weights of the folder.
        plug_in: Whether to accept answers of a different LLM than the one it was fitted on.
        note: Text that is added to every decision, for example that the arbiter was fitted on a different LLM.
        llm: The LLM whose answers it judges. A judge model can share its weights. None before `bind`.
    """

    def __repr__(self) -> str:
        model = self.artifact.manifest["model"]["name"]
        return f"<{type(self).__name__} {self.artifact.path.name}: for {model}>"

    def check_artifact(self, tensors: TensorValidator) -> None:
        """Check the options and all tensors of the arbiter. Raise BadInput if something is wrong or unknown."""
        self.check(tensors)
        tensors.reject_unknown()

    @property
    def name(self) -> str:
        """Name of the arbiter's folder. Inside the folder of a gate, it is the arbiter's kind, such as 'features'."""
        folder = self.artifact.path
        is_in_gate_folder = is_artifact(folder.parent)
        return str(self.artifact.manifest["arbiter"]) if is_in_gate_folder else folder.name

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the arbiter, which is the checksum of its manifest."""
        return str(self.artifact.manifest["checksum"])

    @property
    def needs_passages(self) -> bool:
        """Whether the arbiter reads the passages."""
        return bool(self.artifact.manifest["wants_passages"])

    @abstractmethod
    def raw(self, answers: Sequence[AnswerPair]) -> FloatArray:
        """Compute the uncalibrated probability that each answer is right.

        Returns:
            One row per pair of answers with two columns: closed-book, open-book.
        """

    def estimate(self, answers: Sequence[AnswerPair]) -> list[Belief]:
        """Return how probably the closed-book and the open-book answer to each question are right."""
        if not answers:
            return []
        calibrations = self.artifact.manifest["calibration"]
        raw_closed_book, raw_open_book = np.clip(self.raw(answers), 0, 1).T
        closed_book = apply_calibration(raw_closed_book, calibrations["closed"]).tolist()
        open_book = apply_calibration(raw_open_book, calibrations["open"]).tolist()
        pairs = zip(closed_book, open_book, strict=True)
        return [Belief(*pair, format_probabilities(*pair, self.note)) for pair in pairs]


class FittedRulesArbiter(FittedArbiter):
    """Chooses the answer with passages, unless it alone says "I don't know" or the like.

    Needs: the texts of both answers. Cost: nothing beyond the closed-book answer.
    """

    def raw(self, answers: Sequence[AnswerPair]) -> FloatArray:
        """Return the probability that each answer is right. The columns are: without passages, with passages."""
        return estimate_by_rules(answers)


def estimate_by_rules(answers: Sequence[AnswerPair]) -> FloatArray:
    """Return how probably each answer is right, as the arbiter `rules` sees it.

    Returns:
        One row per pair of answers with two columns: closed-book (without passages), open-book (with passages).
    """
    beliefs = RULES_ARBITER.estimate(answers)
    return np.array([[belief.closed, belief.open] for belief in beliefs]).reshape(len(answers), 2)
