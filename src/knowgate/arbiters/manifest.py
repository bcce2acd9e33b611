"""What `arbiter.json` says, as a record: names, types and ranges. Knows no arbiter's options; each declares its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from knowgate.gates import CalibrationRecord, Measured, ModelName, RunName, check_calibration
from knowgate.typed import AtLeastZero, Share, read_record
from knowgate.types import Signal


@dataclass(frozen=True)
class SidesRecord:
    """From raw score to probability, of each answer."""

    closed: CalibrationRecord
    open: CalibrationRecord


@dataclass(frozen=True)
class ArbiterRecord:
    """`files` are the digests of all other files but the card. prompts: fingerprint of the answer prompts."""

    arbiter: str
    options: Mapping[str, Any]
    needs: tuple[Signal, ...]
    wants_passages: bool
    model: ModelName
    prompts: str
    calibration: SidesRecord
    checksum: str
    files: Mapping[str, str]
    retriever: str | None = None
    grader: str = ""
    data: tuple[RunName, ...] = ()
    data_hash: str = ""
    split: Mapping[str, AtLeastZero] = field(default_factory=dict)
    base_rates: Mapping[str, Share] = field(default_factory=dict)
    created: str = ""
    metrics: Mapping[str, Measured] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_arbiter_manifest(value: Mapping[str, Any], where: str) -> ArbiterRecord:
    """The record of a manifest; fields that a later version added are let be."""
    record = read_record(ArbiterRecord, dict(value), where, others=True)
    for side in (record.calibration.closed, record.calibration.open):
        check_calibration(side, where)
    return record
