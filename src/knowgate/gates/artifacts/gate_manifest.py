"""The content of `gate.json` as records with types and ranges. Each gate declares its own `options` in its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from knowgate.core.schema import NonNegativeInt, NumberRange, UnitInterval, read_record
from knowgate.errors import BadInput, BadSetting
from knowgate.stats.bootstrap import Estimate
from knowgate.stats.metrics import PROBABILITY_FLOOR
from knowgate.types import Signal

MAX_TOKENS = 1_000_000  # larger numbers in a manifest are rejected as errors
MAX_SAMPLES = 10_000
StatePosition = Literal["pre", "post"]  # "pre": hidden state before the answer; "post": after the draft
# How to count the loss of a gate: "harm" counts the lost right answers, "net" also subtracts the gained right answers.
LossForm = Literal["harm", "net"]


@dataclass(frozen=True)
class ModelRecord:
    """Name and fingerprint of an LLM or an arbiter."""

    name: str
    fingerprint: str


@dataclass(frozen=True)
class RunRecord:
    """The name of a label run that was used for fitting."""

    run: str


@dataclass(frozen=True)
class ReadRequestRecord:
    """How much of each signal a gate reads from the LLM before deciding.

    Attributes:
        draft_tokens: Maximum length of the draft in tokens; 0 for no draft.
        layers: Layers whose hidden states are read; negative numbers count from the last layer.
        after_draft: Whether hidden states are also read at the end of the draft.
        samples: Number of sampled answers.
        sample_tokens: Maximum length of a sampled answer in tokens.
        temperature: Sampling temperature.
        top_p: Share of the probability mass to sample from.
        top_k: Number of tokens to sample from; 0 for all.
        seed: Seed of the sampled answers.
        sample_layer: Layer whose hidden state is read at the end of each sampled answer; None for none.
        resumable: Whether the draft may be continued later, as the start of the answer.
        sample_end: Whether `sample_layer` is read at the end-of-sequence token instead of the last text token.
    """

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
    """Quality of a gate on the test questions of one label run.

    Attributes:
        n: Number of test questions.
        base_rate: Share of test questions that need retrieval.
        auroc: Area under the ROC curve.
    """

    n: NonNegativeInt
    base_rate: UnitInterval | None
    auroc: Estimate


@dataclass(frozen=True)
class DistanceRecord:
    """Which features measure how far a question is from the training questions.

    Attributes:
        of: 'state' is a hidden state, 'look' are surface features of the text, such as its length.
        layer: Layer of the hidden state.
    """

    of: Literal["state", "look"]
    layer: int | None = None


@dataclass(frozen=True)
class CalibrationRecord:
    """Parameters of the function that maps a raw score to a probability.

    Attributes:
        kind: 'platt' is a logistic function of the score's logit, 'isotonic' a piecewise linear function.
        x: Scores at the knots of the piecewise linear function.
        y: Probabilities at its knots.
        a: Slope of the logistic function.
        b: Offset of the logistic function.
        floor: Scores closer than this to 0 or 1 are clipped before the logit is taken.
    """

    kind: Literal["isotonic", "platt", "none"]
    x: tuple[float, ...] = ()
    y: tuple[UnitInterval, ...] = ()
    a: Annotated[float, NumberRange(0, 1e9)] | None = None
    b: Annotated[float, NumberRange(-1e9, 1e9)] | None = None
    floor: Annotated[float, NumberRange(1e-15, 0.5)] = PROBABILITY_FLOOR


@dataclass(frozen=True, kw_only=True)
class FittedManifest:
    """Fields that `gate.json` and `arbiter.json` share.

    Attributes:
        options: Options of this kind of gate or arbiter.
        needs: Signals that it needs from the LLM, such as log-probabilities.
        model: The LLM that it was fitted on.
        prompts: Fingerprint of the answer prompts of that LLM.
        checksum: Checksum of all other fields.
        files: Digests of the other files in the folder by name, except for the model card.
        retriever: Fingerprint of the retriever of the training answers; None without passages.
        grader: Name of the grader of the training answers.
        data: The label runs (folders of graded answers) that it was fitted on.
        data_hash: Digest of the training data.
        split: Number of questions in each split, such as 'train' and 'test'.
        created: Date of the fit.
        metrics: Quality on the test split by metric.
        notes: Remarks for the model card.
    """

    options: Mapping[str, Any]
    needs: tuple[Signal, ...]
    model: ModelRecord
    prompts: str
    checksum: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    retriever: str | None = None
    grader: str = ""
    data: tuple[RunRecord, ...] = ()
    data_hash: str = ""
    split: Mapping[str, NonNegativeInt] = field(default_factory=dict)
    created: str = ""
    metrics: Mapping[str, Estimate] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GateManifest(FittedManifest):
    """Content of `gate.json`.

    At most one of `guarantee`, `budget` and `accuracy` is set.
    """

    gate: str  # kind of gate, such as 'probe'
    want: ReadRequestRecord  # what the gate reads from the LLM
    calibration: CalibrationRecord  # maps raw scores to probabilities
    threshold: Annotated[float, NumberRange(-1, 2)]  # the gate retrieves above it
    weights_sha256: str = ""  # digest of the weights
    target: str = ""  # what the gate was trained to predict
    base_rate: UnitInterval | None = None  # share of training questions that need retrieval
    test_rate: UnitInterval | None = None  # base rate of the test split
    sets: Mapping[str, RunMetricsRecord] = field(default_factory=dict)  # quality on each label run, by its name
    synthetic: NonNegativeInt = 0  # training questions that an LLM wrote
    distance: DistanceRecord | None = None  # how to detect unusual questions; None in gates of older versions
    reference: bool = False  # whether training questions and their hidden states are stored in the folder
    guarantee: GuaranteeRecord | None = None  # the threshold was chosen for a guaranteed maximum loss of accuracy
    budget: BudgetRecord | None = None  # the threshold was chosen for a maximum share of retrieved questions
    accuracy: EvidenceRecord | None = None  # the threshold was chosen for the most right answers
    calibrated: bool = True  # False if there were no answers with passages to choose the threshold by
    test_counts: CountsRecord | None = None  # results with this threshold on the test split
    policy: PolicyRecord | None = None  # set if gate, arbiter and threshold were chosen together


@dataclass(frozen=True)
class PolicyRecord:
    """The arbiter chosen together with a gate. An arbiter picks the answer with or without passages.

    Attributes:
        arbiter: 'none', a name such as 'rules', or 'arbiter' for a fitted arbiter in the folder of the gate.
    """

    ignore_unknown: ClassVar[bool] = True
    arbiter: str


@dataclass(frozen=True, kw_only=True)
class ThresholdCounts:
    """Counts of retrieved questions and right answers for one threshold.

    Attributes:
        n: Number of questions.
        retrieved: Number of questions that the gate retrieves for.
        right: Number of right answers with the gate, and the arbiter if there is one.
        right_always: Number of right answers if always retrieving.
        right_never: Number of right answers if never retrieving.
        harmed: Number of questions that are answered right with always retrieving, but wrong with the gate.
        gained: Number of questions that are answered wrong with always retrieving, but right with the gate.
        right_chosen: Number of right answers if always retrieving, and then using the arbiter, which chooses between
            the answers without and with passages; None without an arbiter.
    """

    n: Annotated[int, NumberRange(1)]
    retrieved: NonNegativeInt = 0
    right: NonNegativeInt = 0
    right_always: NonNegativeInt
    right_never: NonNegativeInt
    harmed: NonNegativeInt
    gained: NonNegativeInt = 0
    right_chosen: NonNegativeInt | None = None


@dataclass(frozen=True, kw_only=True)
class CountsRecord(ThresholdCounts):
    """Counts and rates of a gate with its threshold.

    Attributes:
        rate: Share of questions that the gate retrieves for.
        accuracy: Share of right answers with the gate.
        loss: Accuracy lost against always retrieving.
        risk: Share of harmed questions.
    """

    rate: float
    accuracy: float
    loss: float
    risk: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RetrieverRecord:
    """Name and fingerprint of a retriever or reranker; None if unknown.

    Attributes:
        name: Name of the retriever or reranker.
        fingerprint: Fingerprint of the retriever or reranker.
        candidates: Number of passages that the reranker chooses from; None for a retriever.
    """

    name: str | None
    fingerprint: str | None
    candidates: int | None = None


@dataclass(frozen=True, kw_only=True)
class ChangedAnswersRecord:
    """Upper bound on the share of answers that differ between a gate and always retrieving.

    Attributes:
        n: Number of held-out questions.
        changed: Number of questions for which the answer with the gate differs from the answer with passages.
        bound: Upper confidence limit of the share of such questions.
        delta: Probability that the bound is too low.
    """

    n: Annotated[int, NumberRange(1)]
    changed: NonNegativeInt
    bound: UnitInterval
    delta: UnitInterval


@dataclass(frozen=True, kw_only=True)
class EvidenceRecord:
    """How a threshold was chosen, and its setup (LLM, prompts, retriever)."""

    ignore_unknown: ClassVar[bool] = True
    model: ModelRecord  # the LLM that answered
    prompts: str  # fingerprint of the prompts without passages
    retriever: RetrieverRecord
    k: int | None  # number of passages per question
    grader: str  # who graded the answers
    runs: tuple[str, ...]  # label runs: folders of graded answers
    created: str  # date
    chosen_on: CountsRecord  # results with the threshold on the questions that it was chosen on
    held_out: CountsRecord | None = None  # results on held-out questions
    n: NonNegativeInt = 0  # number of questions that the threshold was chosen on
    data_hash: str = ""  # digest of the grades of these questions
    max_tokens: Annotated[int, NumberRange(1)] | None = None  # maximum length of an answer
    open_prompts: str | None = None  # fingerprint of the prompts with passages
    reranker: RetrieverRecord | None = None  # None without a reranker
    left_out: Mapping[str, int] = field(default_factory=dict)  # number of unused questions, by reason
    seed: int = 0  # of the split into chosen_on and held_out
    arbiter: ModelRecord | None = None  # None without an arbiter
    changed: ChangedAnswersRecord | None = None  # how many answers the gate changes; None if not measured
    test_only: bool = False  # whether `chosen_on` only tests a threshold that was chosen on other questions


@dataclass(frozen=True, kw_only=True)
class LossTest:
    """A statistical test that a threshold loses at most `epsilon` accuracy against always retrieving.

    Attributes:
        epsilon: Maximum loss of accuracy.
        delta: Maximum probability that the guarantee is wrong.
        harmed: Number of questions that are answered right with always retrieving, but wrong with the gate.
        p_value: p-value of the test at the threshold.
        form: 'harm' counts the harmed questions as the loss, 'net' the harmed minus the gained questions.
        gained: Number of questions that are answered wrong with always retrieving, but right with the gate.
        proven: Whether the guarantee holds. Without an arbiter, it always does, because some threshold always retrieves
            and loses nothing. An arbiter (chooses between two answers) may lose too much even then.
    """

    epsilon: UnitInterval
    delta: UnitInterval
    harmed: NonNegativeInt
    p_value: UnitInterval
    form: LossForm = "harm"
    gained: NonNegativeInt = 0
    proven: bool = True


@dataclass(frozen=True, kw_only=True)
class GuaranteeRecord(LossTest, EvidenceRecord):
    """Evidence for a threshold that is proven to lose little accuracy: the test, and the setup that it is valid for."""


@dataclass(frozen=True, kw_only=True)
class BudgetRecord(EvidenceRecord):
    """Evidence for a threshold that was chosen for a maximum share of retrieved questions, which is `wanted`."""

    wanted: UnitInterval


def read_gate_manifest(value: Mapping[str, Any], where: str) -> GateManifest:
    """Validate the content of `gate.json`. Unknown fields are ignored.

    Args:
        value: The parsed JSON.
        where: What error messages call the file.

    Raises:
        BadInput: A field is missing or wrong.
    """
    manifest = read_record(GateManifest, dict(value), where, ignore_unknown=True)
    check_calibration(manifest.calibration, where)
    distance = manifest.distance  # a distance of hidden states needs a layer that the gate reads
    if distance is not None and distance.of == "state" and distance.layer not in manifest.want.layers:
        raise BadInput(f"{where}: `distance` uses layer {distance.layer}, which is missing in `want.layers`.")
    return manifest


def check_calibration(calibration: CalibrationRecord, where: str) -> None:
    """Raise BadInput if the parameters of a calibration are wrong. A calibration maps scores to probabilities.

    Args:
        calibration: The calibration.
        where: What error messages call the file.
    """
    if calibration.kind == "platt" and (calibration.a is None or calibration.b is None):
        raise BadInput(f"{where}: `calibration` lacks its slope `a` or its offset `b`.")
    x, y = calibration.x, calibration.y
    is_increasing = sorted(x) == list(x) and sorted(y) == list(y)
    if calibration.kind == "isotonic" and not (x and len(x) == len(y) and is_increasing):
        raise BadInput(f"{where}: `calibration` must have as many x values as y values, both in increasing order.")


def check_reading_lengths(manifest: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise BadSetting if label runs and gate differ in draft length or samples.

    Args:
        manifest: Content of `gate.json`; `want` says how much the gate reads from the LLM.
        settings: Settings of the label runs, which are folders of recorded answers.
    """
    for setting, expected in _list_reading_lengths(manifest).items():
        recorded = settings.get(setting)
        if recorded not in (None, expected):  # None: the label runs do not record this setting
            raise BadSetting(
                f"the gate was fitted with {setting}={expected}, but the answers were recorded with {setting}={recorded}. Run "
                f"`knowgate label` with {setting}={expected}."
            )


def _list_reading_lengths(manifest: Mapping[str, Any]) -> dict[str, int]:
    """Return the draft length and number of samples that a gate depends on, by setting."""
    request = manifest["want"]
    features = manifest["options"].get("features", ())
    lengths = {}
    if request.get("draft_tokens", 0) > 1 and manifest["gate"] != "ik":  # ik truncates the draft itself
        lengths["max_tokens"] = request["draft_tokens"]
    if "certainty" in features or "agreement" in features:
        lengths["samples"] = request.get("samples", 0)
    return lengths
