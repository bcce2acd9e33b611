"""What `gate.json` says, as a record: names, types and ranges. Knows no gate's options; each gate declares its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from knowgate.errors import BadInput
from knowgate.statistics import SMALLEST
from knowgate.typed import AtLeastZero, Between, Share, read_record
from knowgate.types import Signal

MOST_TOKENS = 1_000_000  # of a draft; a gate that asks for more was not fitted, it was made up
MOST_SAMPLES = 10_000
Position = Literal["pre", "post"]  # of a hidden state: before the answer, after the draft


@dataclass(frozen=True)
class ModelName:
    """The LLM a gate was fitted on."""

    name: str
    fingerprint: str


@dataclass(frozen=True)
class RunName:
    run: str


@dataclass(frozen=True)
class Measured:
    """An estimate with its interval; nothing where it could not be measured."""

    value: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Wanted:
    """What is read for the gate: a `Want` with the ranges that one may have."""

    draft_tokens: Annotated[int, Between(0, MOST_TOKENS)] = 0
    layers: tuple[Annotated[int, Between(-100_000, 100_000)], ...] = ()
    after_draft: bool = False
    samples: Annotated[int, Between(0, MOST_SAMPLES)] = 0
    sample_tokens: Annotated[int, Between(1, MOST_TOKENS)] = 32
    temperature: Annotated[float, Between(0, 100)] = 1.0
    top_p: Annotated[float, Between(1e-6, 1)] = 1.0
    top_k: Annotated[int, Between(0, MOST_TOKENS)] = 0
    seed: int | None = None
    sample_layer: int | None = None
    resumable: bool = True
    sample_end: bool = False


@dataclass(frozen=True)
class SetRecord:
    """How a gate does on its part of one of several label runs."""

    n: AtLeastZero
    base_rate: Share | None
    auroc: Measured


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
    y: tuple[Share, ...] = ()
    a: Annotated[float, Between(0, 1e9)] = 1.0
    b: Annotated[float, Between(-1e9, 1e9)] = 0.0
    floor: Annotated[float, Between(1e-15, 0.5)] = SMALLEST


@dataclass(frozen=True)
class GateRecord:
    """`files` are the digests of all other files but the card; gates fitted by earlier versions have none."""

    gate: str
    options: Mapping[str, Any]
    needs: tuple[Signal, ...]
    want: Wanted
    model: ModelName
    prompts: str
    calibration: CalibrationRecord
    threshold: Annotated[float, Between(-1, 2)]
    weights_sha256: str = ""
    checksum: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    target: str = ""
    retriever: str | None = None
    grader: str = ""
    data: tuple[RunName, ...] = ()
    data_hash: str = ""
    split: Mapping[str, AtLeastZero] = field(default_factory=dict)
    base_rate: Share | None = None
    test_rate: Share | None = None  # of the test split alone
    created: str = ""
    metrics: Mapping[str, Measured] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    sets: Mapping[str, SetRecord] = field(default_factory=dict)
    balanced: bool = False
    synthetic: AtLeastZero = 0  # questions of the fit that an LLM wrote
    distance: DistanceRecord | None = None
    reference: bool = False  # ten questions of the fit lie beside it, with their states
    guarantee: GuaranteeRecord | None = None
    budget: BudgetRecord | None = None
    accuracy: EvidenceRecord | None = None


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What was counted with a threshold on some questions; what the card does not show may be missing."""

    n: Annotated[int, Between(1)]
    retrieved: AtLeastZero = 0
    right: AtLeastZero = 0
    right_always: AtLeastZero
    right_never: AtLeastZero
    harmed: AtLeastZero
    gained: AtLeastZero = 0
    right_chosen: AtLeastZero | None = None
    rate: float
    accuracy: float
    loss: float
    risk: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RetrieverName:
    name: str | None
    fingerprint: str | None


@dataclass(frozen=True, kw_only=True)
class RerankerName:
    """Which reranker chose the passages, from how many."""

    name: str
    fingerprint: str
    candidates: int | None = None


@dataclass(frozen=True, kw_only=True)
class EvidenceRecord:
    """What speaks for a threshold, as `knowgate calibrate` leaves it."""

    takes_others: ClassVar[bool] = True
    model: ModelName
    prompts: str
    retriever: RetrieverName
    k: int | None
    grader: str
    runs: tuple[str, ...]
    created: str
    chosen_on: Counts
    held_out: Counts | None = None
    n: AtLeastZero = 0
    data_hash: str = ""
    max_tokens: Annotated[int, Between(1)] | None = None
    open_prompts: str | None = None
    reranker: RerankerName | None = None
    left_out: Mapping[str, int] = field(default_factory=dict)
    seed: int = 0
    arbiter: ModelName | None = None  # who chooses after retrieval


@dataclass(frozen=True, kw_only=True)
class GuaranteeRecord(EvidenceRecord):
    epsilon: Share
    delta: Share
    harmed: AtLeastZero
    p_value: Share
    form: Literal["harm", "net"] = "harm"
    gained: AtLeastZero = 0
    proven: bool = True


@dataclass(frozen=True, kw_only=True)
class BudgetRecord(EvidenceRecord):
    wanted: Share


def read_manifest(value: Mapping[str, Any], where: str) -> GateRecord:
    """The record of a manifest; fields that a later version added are let be."""
    record = read_record(GateRecord, dict(value), where, others=True)
    check_calibration(record.calibration, where)
    check_distance(record, where)
    return record


def check_distance(record: GateRecord, where: str) -> None:
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
