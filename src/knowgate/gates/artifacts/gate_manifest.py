"""What `gate.json` says, as a record: names, types and ranges. Knows no gate's options; each gate declares its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from knowgate.core.schema import NonNegativeInt, NumberRange, UnitInterval, read_record
from knowgate.errors import BadInput
from knowgate.stats.logistic import PROBABILITY_FLOOR
from knowgate.types import Signal

MAX_TOKENS = 1_000_000  # of a draft; a gate that asks for more was not fitted, it was made up
MAX_SAMPLES = 10_000
StatePosition = Literal["pre", "post"]  # of a hidden state: before the answer, after the draft


@dataclass(frozen=True)
class ModelRecord:
    """The LLM a gate was fitted on."""

    name: str
    fingerprint: str


@dataclass(frozen=True)
class RunRecord:
    run: str


@dataclass(frozen=True)
class EstimateRecord:
    """An estimate with its interval; nothing where it could not be measured."""

    value: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class ReadRequestRecord:
    """What is read for the gate: a `Want` with the ranges that one may have."""

    draft_tokens: Annotated[int, NumberRange(0, MAX_TOKENS)] = 0
    layers: tuple[Annotated[int, NumberRange(-100_000, 100_000)], ...] = ()
    after_draft: bool = False
    samples: Annotated[int, NumberRange(0, MAX_SAMPLES)] = 0
    sample_tokens: Annotated[int, NumberRange(1, MAX_TOKENS)] = 32
    temperature: Annotated[float, NumberRange(0, 100)] = 1.0
    top_p: Annotated[float, NumberRange(1e-6, 1)] = 1.0
    top_k: Annotated[int, NumberRange(0, MAX_TOKENS)] = 0
    seed: int | None = None
    sample_layer: int | None = None
    resumable: bool = True
    sample_end: bool = False


@dataclass(frozen=True)
class RunMetricsRecord:
    """How a gate does on its part of one of several label runs."""

    n: NonNegativeInt
    base_rate: UnitInterval | None
    auroc: EstimateRecord


@dataclass(frozen=True)
class DistanceRecord:
    """What the distance of a question from those of the fit is taken of; layer: of a state."""

    of: Literal["state", "look"]
    layer: int | None = None


@dataclass(frozen=True)
class CalibrationRecord:
    """From raw score to probability: isotonic (knots x, y), platt (slope a, offset b; floor: see `to_probability`), or
    none."""

    kind: Literal["isotonic", "platt", "none"]
    x: tuple[float, ...] = ()
    y: tuple[UnitInterval, ...] = ()
    a: Annotated[float, NumberRange(0, 1e9)] = 1.0
    b: Annotated[float, NumberRange(-1e9, 1e9)] = 0.0
    floor: Annotated[float, NumberRange(1e-15, 0.5)] = PROBABILITY_FLOOR


@dataclass(frozen=True)
class GateManifest:
    """`files` are the digests of all other files but the card; gates fitted by earlier versions have none."""

    gate: str
    options: Mapping[str, Any]
    needs: tuple[Signal, ...]
    want: ReadRequestRecord
    model: ModelRecord
    prompts: str
    calibration: CalibrationRecord
    threshold: Annotated[float, NumberRange(-1, 2)]
    weights_sha256: str = ""
    checksum: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    target: str = ""
    retriever: str | None = None
    grader: str = ""
    data: tuple[RunRecord, ...] = ()
    data_hash: str = ""
    split: Mapping[str, NonNegativeInt] = field(default_factory=dict)
    base_rate: UnitInterval | None = None
    test_rate: UnitInterval | None = None  # of the test split alone
    created: str = ""
    metrics: Mapping[str, EstimateRecord] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    sets: Mapping[str, RunMetricsRecord] = field(default_factory=dict)
    balanced: bool = False
    synthetic: NonNegativeInt = 0  # questions of the fit that an LLM wrote
    distance: DistanceRecord | None = None
    reference: bool = False  # ten questions of the fit lie beside it, with their states
    guarantee: GuaranteeRecord | None = None
    budget: BudgetRecord | None = None
    accuracy: EvidenceRecord | None = None


@dataclass(frozen=True, kw_only=True)
class CountsRecord:
    """What was counted with a threshold on some questions; what the card does not show may be missing."""

    n: Annotated[int, NumberRange(1)]
    retrieved: NonNegativeInt = 0
    right: NonNegativeInt = 0
    right_always: NonNegativeInt
    right_never: NonNegativeInt
    harmed: NonNegativeInt
    gained: NonNegativeInt = 0
    right_chosen: NonNegativeInt | None = None
    rate: float
    accuracy: float
    loss: float
    risk: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RetrieverRecord:
    name: str | None
    fingerprint: str | None


@dataclass(frozen=True, kw_only=True)
class RerankerRecord:
    """Which reranker chose the passages, from how many."""

    name: str
    fingerprint: str
    candidates: int | None = None


@dataclass(frozen=True, kw_only=True)
class EvidenceRecord:
    """What speaks for a threshold, as `knowgate calibrate` leaves it."""

    ignore_unknown: ClassVar[bool] = True
    model: ModelRecord
    prompts: str
    retriever: RetrieverRecord
    k: int | None
    grader: str
    runs: tuple[str, ...]
    created: str
    chosen_on: CountsRecord
    held_out: CountsRecord | None = None
    n: NonNegativeInt = 0
    data_hash: str = ""
    max_tokens: Annotated[int, NumberRange(1)] | None = None
    open_prompts: str | None = None
    reranker: RerankerRecord | None = None
    left_out: Mapping[str, int] = field(default_factory=dict)
    seed: int = 0
    arbiter: ModelRecord | None = None  # who chooses after retrieval


@dataclass(frozen=True, kw_only=True)
class GuaranteeRecord(EvidenceRecord):
    epsilon: UnitInterval
    delta: UnitInterval
    harmed: NonNegativeInt
    p_value: UnitInterval
    form: Literal["harm", "net"] = "harm"
    gained: NonNegativeInt = 0
    proven: bool = True


@dataclass(frozen=True, kw_only=True)
class BudgetRecord(EvidenceRecord):
    wanted: UnitInterval


def read_gate_manifest(value: Mapping[str, Any], where: str) -> GateManifest:
    """The record of a manifest; fields that a later version added are let be."""
    record = read_record(GateManifest, dict(value), where, ignore_unknown=True)
    check_calibration(record.calibration, where)
    check_distance_layer(record, where)
    return record


def check_distance_layer(record: GateManifest, where: str) -> None:
    """A distance of states needs a layer that is read for the gate."""
    found = record.distance
    if found is not None and found.of == "state" and found.layer not in record.want.layers:
        raise BadInput(f"{where}: distance is that of layer {found.layer}, which the gate does not read.")


def check_calibration(calibration: CalibrationRecord, where: str) -> None:
    """Knots must rise, or a higher raw score could come out as a lower need."""
    x, y = calibration.x, calibration.y
    rising = sorted(x) == list(x) and sorted(y) == list(y)
    if calibration.kind == "isotonic" and not (x and len(x) == len(y) and rising):
        raise BadInput(f"{where}: calibration has knots that do not fit each other or do not rise.")
