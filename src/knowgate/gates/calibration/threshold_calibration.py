"""`calibrate`: choose the threshold of a gate on label runs and record how it was chosen. No LLM runs."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.core.display import TextTable
from knowgate.core.options import Options, Seed, UserPath, option, with_options
from knowgate.data.runs.folder import RunFolder, RunsLike, resolve_run_paths
from knowgate.data.runs.table import LabelTable, load_label_table
from knowgate.data.splits import mark_held_out
from knowgate.errors import ArtifactError, BadInput, BadSetting
from knowgate.gates import check_gate_spec, load_gate
from knowgate.gates.arbiters import NO_ARBITER, get_policy_arbiter
from knowgate.gates.arbiters.offline_arbitration import (
    ArbiterChoices,
    ProgressCallback,
    arbitrate,
    get_arbiter_folder,
)
from knowgate.gates.artifacts.gate_folder import SEEN_FILE, Artifact, read_artifact
from knowgate.gates.artifacts.gate_manifest import LossForm, check_reading_lengths
from knowgate.gates.calibration import threshold_choice
from knowgate.gates.calibration.evidence import (
    TargetKind,
    bound_changed_answers,
    build_calibration_table,
    describe_setup,
    save_threshold,
    summarize_threshold,
)
from knowgate.gates.calibration.guarantee import compute_required_rows, learn_then_test
from knowgate.gates.calibration.threshold_choice import GateOutcomes, ThresholdResult
from knowgate.gates.fitted_gate import get_fitted_spec, get_gate_folder, get_gate_name
from knowgate.gates.offline_scoring import mark_seen_rows, score_gate
from knowgate.labels.options import count_shown_passages
from knowgate.stats.metrics import BoolArray
from knowgate.types import Arbiter, Gate
from knowgate.types.markup import escape_html

REQUIRED_EQUAL = dict.fromkeys(
    ("model_fingerprint", "prompts_fingerprint", "retriever_fingerprint", "reranker_fingerprint", "max_tokens"),
    "A threshold is valid for only one of them, so calibrate on runs of one kind",
)
MIN_QUESTIONS = 40  # with fewer questions, a measured retrieval rate or accuracy means nothing
DEFAULT_CONFIDENCE = 0.95


class CalibrationOptions(Options):
    """Options of `calibrate`, for choosing the threshold of a gate.

    Set exactly one of `max_loss`, `retrieval_rate` and `best_accuracy`.
    """

    max_loss: float | None = option(
        None,
        "Guaranteed maximum share of right answers that are lost by skipping retrieval. Example: 0.02. With `net`, wrong "
        "answers that skipping turns right are subtracted.",
    )
    confidence: float | None = option(
        None, f"Confidence of the guarantee that `max_loss` asks for. Default: {DEFAULT_CONFIDENCE}."
    )
    retrieval_rate: float | None = option(None, "Maximum share of questions to retrieve for, for example 0.5.")
    best_accuracy: bool = option(
        False, "Choose the threshold with the most right answers. If several tie, take the one that skips most."
    )
    net: bool = option(
        False,
        "With `max_loss`: limit the net loss, which is lost minus gained right answers. Default: count only lost "
        "answers, which is stricter.",
    )
    held_out: float = option(0.5, "Share of the questions that are kept back to test the threshold.", ge=0, lt=1)
    out: UserPath | None = option(
        None, "Folder for a copy of the gate with the new threshold. Default: change the gate itself.", metavar="DIR"
    )
    seed: Seed = option(
        0, "Seed of the random split of the questions. One part chooses the threshold, the other part tests it."
    )

    @property
    def kind(self) -> TargetKind:
        """Aim of the threshold: a guarantee, a budget of searches, or the best accuracy.

        Raises:
            BadSetting: Not exactly one target is set, or `confidence` or `net` is set without `max_loss`.
        """
        is_set: dict[TargetKind, bool] = {
            "guarantee": self.max_loss is not None,
            "budget": self.retrieval_rate is not None,
            "accuracy": self.best_accuracy,
        }
        targets = [target for target in is_set if is_set[target]]
        if len(targets) != 1:
            raise BadSetting(
                f"{len(targets)} of `max_loss`, `retrieval_rate` and `best_accuracy` are set. Set exactly one of them as the "
                "goal of the threshold."
            )
        self._check_guarantee_options()
        return targets[0]

    def _check_guarantee_options(self) -> None:
        """Raise BadSetting if `net` or `confidence` is set without `max_loss`."""
        if self.max_loss is None and (self.net or self.confidence is not None):
            raise BadSetting(
                "`net` and `confidence` have an effect only with `max_loss`, the accepted loss of accuracy. Set `max_loss`, "
                "or leave `net` and `confidence` out."
            )

    @property
    def delta(self) -> float:
        """Maximum probability that a guarantee is wrong."""
        confidence = DEFAULT_CONFIDENCE if self.confidence is None else self.confidence
        return round(1 - confidence, 12)  # without rounding, 1 - 0.95 is 0.050000000000000044

    @property
    def form(self) -> LossForm:
        """How a guarantee counts losses: 'harm' counts lost right answers, 'net' also subtracts gained right answers."""
        return "net" if self.net else "harm"

    @property
    def min_questions(self) -> int:
        """Minimum number of questions that the threshold must be chosen on."""
        return MIN_QUESTIONS if self.max_loss is None else compute_required_rows(self.max_loss, self.delta, self.form)


@dataclass(frozen=True, repr=False)
class Calibration:
    """A threshold that was chosen for a gate, with its evidence.

    Attributes:
        kind: What the threshold was chosen for: 'guarantee', 'budget' or 'accuracy'.
        threshold: The threshold.
        chosen: Results on the questions that it was chosen on.
        held_out: Results on the held-out questions; None if there are none.
        evidence: The record of the choice that is stored in `gate.json`.
        keys: Keys (fingerprints) of the questions that it was chosen on.
        source: The gate, its spec or its folder. If the threshold was saved, the folder that stores it.
    """

    kind: TargetKind
    threshold: float
    chosen: ThresholdResult
    held_out: ThresholdResult | None
    evidence: dict[str, Any]
    keys: list[str]
    source: str | Gate

    @property
    def left_out(self) -> dict[str, int]:
        """Number of rows of the label runs that were not used, by reason."""
        return dict(self.evidence["left_out"])

    @functools.cached_property
    def gate(self) -> Gate:
        """The gate with its new threshold. Only fitted gates store a threshold. For other gates, use `threshold`."""
        return load_gate(self.source) if isinstance(self.source, str) else self.source

    @property
    def sentence(self) -> str:
        """A sentence that says what the threshold achieves."""
        return summarize_threshold(self.threshold, self.kind, self.evidence)

    @property
    def table(self) -> TextTable:
        """Results on the questions that the threshold was chosen on, and on those held out."""
        return build_calibration_table(self.threshold, self.chosen, self.held_out)

    def __repr__(self) -> str:
        return f"<Calibration of {get_gate_name(self.source)}: {self.sentence}>\n{self.table.text()}"

    def _repr_html_(self) -> str:
        """Render the result for notebooks."""
        return f"<p>{escape_html(get_gate_name(self.source))}: {escape_html(self.sentence)}</p>{self.table.html()}"


@dataclass(frozen=True)
class _CalibrationRows:
    """Rows of label runs that choose or test a threshold.

    Attributes:
        table: The rows.
        is_held_out: Whether each row is held out to test the threshold.
        left_out: Number of rows that cannot be used, by reason.
    """

    table: LabelTable
    is_held_out: BoolArray
    left_out: dict[str, int]

    @property
    def chosen_keys(self) -> list[str]:
        """Fingerprints of the questions that the threshold is chosen on."""
        return [str(key) for key in self.table.question_fingerprints[~self.is_held_out]]


@with_options(CalibrationOptions)
def calibrate(
    gate: str | Path | Gate,
    runs: RunsLike,
    *,
    arbiter: str | Path | Arbiter | None = None,
    on_progress: ProgressCallback = lambda done, total: None,
    options: CalibrationOptions,
) -> Calibration:
    """Choose the threshold of a gate for a guaranteed accuracy, a retrieval budget or the best accuracy.

    The gate retrieves if the need of a question is above the threshold. Training questions are left out. The threshold
    is written into the folder of a fitted gate, or into a copy at `out`. A gate object stays as it is.
    `Calibration.gate` has the new threshold.

    Args:
        gate: Folder of a fitted gate, a gate object, or a spec such as 'logprob:mean'.
        runs: Label runs of the gate's LLM with open-book answers.
        arbiter: Arbiter that chooses the answer after retrieval: a folder, 'rules' or an object. The threshold and its
            guarantee are then for gate and arbiter together. The loss is still measured against always retrieving
            without an arbiter. Default: the arbiter of the policy, if the gate is one. 'none' leaves it out.
        on_progress: Called with the number of questions that the arbiter has judged, and the total.

    Raises:
        BadSetting: The options contradict each other, or the label runs do not fit together.
        BadInput: There are too few questions.

    Example:
        >>> calibrate("my-gate", "runs/calibration", max_loss=0.02)  # doctest: +SKIP
    """
    gate = str(gate) if isinstance(gate, Path) else gate
    _check_gate_and_options(gate, options)
    arbiter = _normalize_arbiter(arbiter or get_policy_arbiter(gate))
    calibration = find_threshold(gate, resolve_run_paths(runs), options, arbiter, on_progress)
    folder = get_gate_folder(gate)
    if folder is None:  # the gate is not fitted, so it stores no threshold
        return calibration
    return replace(calibration, source=save_calibration(calibration, folder, options.out))


def _check_gate_and_options(gate: str | Gate, options: CalibrationOptions) -> None:
    """Raise BadSetting if the threshold of a gate cannot be chosen with these options."""
    if isinstance(gate, str):
        check_gate_spec(gate)
    spec = get_fitted_spec(gate)
    if options.out is not None and spec is None:
        raise BadSetting(
            f"gate '{get_gate_name(gate)}' is not fitted, so it has no folder that could be copied to `out`. Remove `out`."
        )
    if spec is not None and spec.verdict == "own":
        raise BadSetting(
            "the option verdict=own selects the uncalibrated score. A threshold can only be chosen for the calibrated score. "
            f"Pass the gate as '{spec.folder}'."
        )


def _normalize_arbiter(arbiter: str | Path | Arbiter | None) -> str | Arbiter | None:
    """Convert a path to text, and 'none' to None."""
    arbiter = str(arbiter) if isinstance(arbiter, Path) else arbiter
    return None if arbiter == NO_ARBITER else arbiter


def find_threshold(
    gate: str | Gate,
    runs: Sequence[Path],
    options: CalibrationOptions,
    arbiter: str | Arbiter | None = None,
    on_progress: ProgressCallback = lambda done, total: None,
) -> Calibration:
    """Choose a gate's threshold on some questions, and test it on the held-out questions. Nothing is written."""
    kind = options.kind  # raises BadSetting if the options contradict each other
    rows = _load_rows(runs, options, get_gate_folder(gate), get_arbiter_folder(arbiter))
    choices = None if arbiter is None else arbitrate(rows.table, arbiter, on_progress=on_progress)
    outcomes = _score_outcomes(rows.table, gate, choices)
    if kind != "budget":  # a budget determines the threshold even if retrieval does not help
        threshold_choice.check_retrieval_helps(outcomes)
    choice_outcomes = outcomes.select(~rows.is_held_out)
    threshold, facts = _choose_threshold(choice_outcomes, options)
    choice_result = threshold_choice.evaluate_threshold(choice_outcomes, threshold)
    test_outcomes = outcomes.select(rows.is_held_out)
    test_result = threshold_choice.evaluate_threshold(test_outcomes, threshold) if rows.is_held_out.any() else None
    is_skipped = outcomes.needs <= threshold
    evidence = {
        **facts,
        "chosen_on": choice_result.to_record(),
        "held_out": test_result.to_record() if test_result else None,
        "changed": bound_changed_answers(rows.table, is_skipped, choices, rows.is_held_out, options.delta),
        **_describe_rows(rows, choice_outcomes, choices),
        "seed": options.seed,
    }
    return Calibration(kind, threshold, choice_result, test_result, evidence, rows.chosen_keys, gate)


def _describe_rows(rows: _CalibrationRows, outcomes: GateOutcomes, choices: ArbiterChoices | None) -> dict[str, Any]:
    """Describe for `gate.json` the rows that a threshold was chosen on, and their arbiter."""
    return {
        **describe_setup(rows.table, outcomes, rows.chosen_keys),
        "arbiter": None if choices is None else {"name": choices.name, "fingerprint": choices.fingerprint},
        "left_out": rows.left_out,
    }


def _load_rows(
    runs: Sequence[Path], options: CalibrationOptions, gate_folder: str | None, arbiter_folder: str | None
) -> _CalibrationRows:
    """Load the usable rows of label runs, and choose which are held out. A folder is None if there is none."""
    artifact = None if gate_folder is None else read_artifact(gate_folder)
    table, left_out = select_usable_rows(load_calibration_rows(runs), artifact, arbiter_folder)
    is_held_out = mark_held_out(table.question_fingerprints.tolist(), options.held_out, options.seed)
    _check_enough_questions(int((~is_held_out).sum()), len(table), options, left_out)
    return _CalibrationRows(table, is_held_out, left_out)


def _score_outcomes(table: LabelTable, gate: str | Gate, choices: ArbiterChoices | None) -> GateOutcomes:
    """Score a gate on a table, and add the grades of all answers."""
    needs = score_gate(table, gate).needs
    arbitrated_right = None if choices is None else choices.right
    return GateOutcomes(needs, table.closed_book_right, table.retrieved_right, arbitrated_right)


def save_calibration(calibration: Calibration, gate: str, out: Path | None = None) -> str:
    """Write a threshold into a gate's folder, or into a copy at `out`. Return the folder."""
    artifact = read_artifact(gate)
    folder = out or artifact.path
    save_threshold(artifact, calibration.threshold, calibration.kind, calibration.evidence, calibration.keys, folder)
    return str(folder)


def _choose_threshold(outcomes: GateOutcomes, options: CalibrationOptions) -> tuple[float, dict[str, Any]]:
    """Choose a threshold for a guaranteed accuracy, a retrieval rate, or the best accuracy.

    Returns:
        The threshold, and the facts about the choice that `gate.json` records, such as the p-value.
    """
    if options.max_loss is not None:
        facts = asdict(learn_then_test(outcomes, options.max_loss, options.delta, form=options.form))
        return facts.pop("threshold"), facts
    if options.retrieval_rate is not None:
        threshold = threshold_choice.choose_for_rate(outcomes.needs, options.retrieval_rate)
        return threshold, {"wanted": options.retrieval_rate, "n": len(outcomes)}
    return threshold_choice.choose_for_accuracy(outcomes), {"n": len(outcomes)}


def load_calibration_rows(runs: Sequence[Path]) -> LabelTable:
    """Load the rows of label runs. All runs must have the same setup, because they get one threshold.

    Raises:
        BadInput: No row has an open-book answer.
        BadSetting: The runs differ in model, prompts, retriever or passages.
    """
    table = load_label_table(runs, required_equal=REQUIRED_EQUAL)
    if table.open_book_right is None:
        raise BadInput(
            f"no question in {', '.join(map(str, runs))} was answered with passages. The loss from skipping retrieval is "
            "therefore unknown. Run `knowgate label` again with `index`."
        )
    _check_same_passages(runs)
    return table


def _check_same_passages(runs: Sequence[Path]) -> None:
    """Raise BadSetting if label runs differ in passages per question or in prompts."""
    settings = [RunFolder(run).settings() for run in runs]
    counts = [count_shown_passages(item.get("k"), item.get("retriever_fingerprint")) for item in settings]
    if len(set(counts)) > 1:
        run_counts = "; ".join(f"{run}: {'all' if k is None else k}" for run, k in zip(runs, counts, strict=True))
        raise BadSetting(
            f"the label runs use different numbers of passages ({run_counts}), but a threshold is valid for only one "
            "number. Calibrate on runs with the same `k`."
        )
    prompts = {item["open_prompts"] for item in settings if item.get("open_prompts")}  # older runs do not record them
    if len(prompts) > 1:
        raise BadSetting(
            "the label runs (recorded answers) use different prompts for answers with passages. Calibrate the threshold "
            "on runs with the same `prompts`."
        )


def select_usable_rows(
    table: LabelTable, artifact: Artifact | None, arbiter_folder: str | None = None
) -> tuple[LabelTable, dict[str, int]]:
    """Remove repeated questions, and the training questions of the gate and the arbiter.

    Args:
        table: Graded answers to the questions.
        artifact: The fitted gate; None if the gate is not fitted.
        arbiter_folder: Folder of the fitted arbiter, if there is one.

    Returns:
        The remaining rows, and for each reason the number of rows that were left out.
    """
    if artifact:
        _check_gate_matches_runs(artifact, table)
    is_seen = mark_seen_rows(table, artifact.path if artifact else None, arbiter_folder)
    _, first_rows = np.unique(table.question_fingerprints, return_index=True)  # the first row of each question
    is_first = np.isin(np.arange(len(table)), first_rows)
    n_repeated = int((~is_first & ~is_seen).sum())
    left_out = {**table.left_out, "fitted on": int(is_seen.sum()), "asked twice": n_repeated}
    usable = table.subset(np.flatnonzero(is_first & ~is_seen))
    return usable, {reason: count for reason, count in left_out.items() if count}


def _check_enough_questions(n: int, n_usable: int, options: CalibrationOptions, left_out: Mapping[str, int]) -> None:
    """Raise BadInput if there are too few questions to choose a threshold on.

    Args:
        n: Number of questions to choose the threshold on.
        n_usable: `n` plus the number of questions that are held out to test the threshold.
        options: Options of `calibrate`, which determine how many questions are required.
        left_out: Number of questions that cannot be used, by reason.
    """
    required = options.min_questions
    if n >= required:
        return
    reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
    unusable = f" or unusable ({reasons})" if reasons else ""
    advice = ", or use all of them: held_out=0." if n_usable >= required else "."
    raise BadInput(
        f"the choice of a threshold needs at least {required} questions, but only {n} are left. The others are held out for "
        f"the test{unusable}. Label more questions with `knowgate label`{advice}"
    )


def _check_gate_matches_runs(artifact: Artifact, table: LabelTable) -> None:
    """Raise an error if the gate and the label runs do not fit together."""
    manifest, settings = artifact.manifest, table.settings
    model, prompts = manifest["model"], manifest["prompts"]
    if (model["fingerprint"], prompts) != (settings["model_fingerprint"], settings["prompts_fingerprint"]):
        raise BadSetting(
            f"gate '{artifact.path.name}' and the label runs (recorded answers) differ in LLM or prompts. Calibrate on label "
            f"runs with the gate's LLM and prompts. Gate: {model['name']} ({model['fingerprint']}), prompts {prompts}. Label "
            f"runs: {settings['model']} ({settings['model_fingerprint']}), prompts {settings['prompts_fingerprint']}."
        )
    check_reading_lengths(manifest, settings)
    if not (artifact.path / SEEN_FILE).is_file():
        raise ArtifactError(
            f"the gate '{artifact.path}' has no list of training questions ({SEEN_FILE}). Fit it again."
        )
