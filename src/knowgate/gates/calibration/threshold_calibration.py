"""`calibrate`: choose the threshold of a gate on label runs and record how it was chosen. No LLM runs."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.core.display import TextTable
from knowgate.core.files import sha256_text
from knowgate.core.options import Options, Seed, UserPath, option, with_options
from knowgate.data.runs.folder import RunFolder, RunsLike, resolve_run_paths
from knowgate.data.runs.table import LabelTable, load_label_table
from knowgate.data.splits import fingerprint_question, mark_held_out
from knowgate.errors import ArtifactError, BadInput, BadSetting
from knowgate.gates import check_gate_spec, load_gate
from knowgate.gates.arbiters.offline_arbitration import ProgressCallback, arbitrate, get_arbiter_folder
from knowgate.gates.arbiters.policy_arbiter import NO_ARBITER, get_policy_arbiter
from knowgate.gates.artifacts.gate_folder import SEEN_FILE, Artifact, read_artifact
from knowgate.gates.artifacts.gate_manifest import LossForm
from knowgate.gates.calibration import threshold_choice
from knowgate.gates.calibration.changed_answers import bound_changed_answers
from knowgate.gates.calibration.evidence import TargetKind, build_calibration_table, save_threshold, summarize_threshold
from knowgate.gates.calibration.guarantee import compute_required_rows, learn_then_test
from knowgate.gates.calibration.threshold_choice import GateOutcomes, ThresholdResult, evaluate_threshold
from knowgate.gates.fitted_gate import get_gate_folder, get_gate_name, get_verdict
from knowgate.gates.offline_scoring import mark_seen_rows, score_gate
from knowgate.labels.options import count_shown_passages
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
        None, "Maximum share of lost answers, for example 0.02, as a guarantee. Gained ones count only with `net`."
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
        "With `max_loss`: subtract answers that skipping retrieval gains from the loss. Default: count only lost "
        "answers, which is stricter.",
    )
    held_out: float = option(0.5, "Share of the questions that are kept back to test the threshold.", ge=0, lt=1)
    out: UserPath | None = option(
        None, "Folder for a copy of the gate with the new threshold. Default: change the gate itself.", metavar="DIR"
    )
    seed: Seed = option(0, "Seed of the random split into questions that choose the threshold and that test it.")

    @property
    def kind(self) -> TargetKind:
        """Aim of the threshold: a guarantee, a budget of searches, or the best accuracy.

        Raises:
            BadSetting: Not exactly one target is set, or `confidence` or `net` is set without `max_loss`.
        """
        is_chosen: dict[TargetKind, bool] = {
            "guarantee": self.max_loss is not None,
            "budget": self.retrieval_rate is not None,
            "accuracy": self.best_accuracy,
        }
        kinds = [kind for kind in is_chosen if is_chosen[kind]]
        if len(kinds) != 1:
            raise BadSetting(
                "set exactly one of `max_loss`, `retrieval_rate` and `best_accuracy`, the possible goals of the "
                f"threshold. Now {len(kinds)} of them are set."
            )
        if self.max_loss is None and (self.net or self.confidence is not None):
            raise BadSetting(
                "`net` and `confidence` have an effect only with `max_loss`, the limit on lost right answers. Set "
                "`max_loss`, or leave them out."
            )
        return kinds[0]

    @property
    def delta(self) -> float:
        """Maximum probability that a guarantee is wrong."""
        confidence = DEFAULT_CONFIDENCE if self.confidence is None else self.confidence
        return round(1 - confidence, 12)  # without rounding, 1 - 0.95 is 0.050000000000000044

    @property
    def form(self) -> LossForm:
        """How a guarantee counts losses: 'net' subtracts the answers that skipping gains, 'harm' ignores them."""
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
        keys: Fingerprints of the questions that it was chosen on.
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
    if isinstance(gate, str):
        check_gate_spec(gate)
    folder = get_gate_folder(gate)
    if options.out is not None and folder is None:
        raise BadSetting(
            f"`out` stores the threshold in the folder of a fitted gate, but '{get_gate_name(gate)}' is not fitted. "
            "Remove `out`."
        )
    if get_verdict(gate) == "own":
        raise BadSetting(
            "',verdict=own' selects the uncalibrated score, but a threshold is chosen for the calibrated score. Use "
            f"'{folder}'."
        )
    arbiter = arbiter or get_policy_arbiter(gate)
    arbiter = str(arbiter) if isinstance(arbiter, Path) else arbiter
    arbiter = None if arbiter == NO_ARBITER else arbiter
    calibration = find_threshold(gate, resolve_run_paths(runs), options, arbiter, on_progress)
    if folder is None:
        return calibration
    return replace(calibration, source=save_calibration(calibration, folder, options.out))


def find_threshold(
    gate: str | Gate,
    runs: Sequence[Path],
    options: CalibrationOptions,
    arbiter: str | Arbiter | None = None,
    on_progress: ProgressCallback = lambda done, total: None,
) -> Calibration:
    """Choose a gate's threshold on some questions, and test it on the others. Nothing is written."""
    folder = get_gate_folder(gate)
    artifact = read_artifact(folder) if folder is not None else None
    kind = options.kind
    table, left_out = select_usable_rows(load_calibration_rows(runs), artifact, get_arbiter_folder(arbiter))
    keys = np.array([fingerprint_question(question) for question in table.questions])
    is_held = mark_held_out(keys.tolist(), options.held_out, options.seed)
    _check_enough_questions(int((~is_held).sum()), len(keys), options, left_out)
    choices = None if arbiter is None else arbitrate(table, arbiter, on_progress=on_progress)
    arbitrated_right = None if choices is None else choices.right
    outcomes = GateOutcomes(score_gate(table, gate).needs, table.closed_right, table.always_right, arbitrated_right)
    if kind != "budget":
        _check_any_harm(outcomes)
    chosen_outcomes = outcomes.select(~is_held)
    threshold, facts = _choose_threshold(chosen_outcomes, options)
    chosen = evaluate_threshold(chosen_outcomes, threshold)
    held_result = evaluate_threshold(outcomes.select(is_held), threshold) if is_held.any() else None
    chosen_keys = keys[~is_held].tolist()
    evidence = {
        **facts,
        "chosen_on": chosen.to_record(),
        "held_out": held_result.to_record() if held_result else None,
        "changed": bound_changed_answers(table, outcomes.needs <= threshold, choices, is_held, options.delta),
        **describe_setup(table, chosen_outcomes, chosen_keys),
        "arbiter": None if choices is None else {"name": choices.name, "fingerprint": choices.fingerprint},
        "left_out": left_out,
        "seed": options.seed,
    }
    return Calibration(kind, threshold, chosen, held_result, evidence, chosen_keys, gate)


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


# --- rows -----------------------------------------------------------------------------------------


def load_calibration_rows(runs: Sequence[Path]) -> LabelTable:
    """Load the rows of label runs. All runs must fit one threshold.

    Raises:
        BadInput: No row has an open-book answer.
        BadSetting: The runs differ in model, prompts, retriever or passages.
    """
    table = load_label_table(runs, required_equal=REQUIRED_EQUAL)
    if table.open_right is None:
        raise BadInput(
            f"no question in {', '.join(map(str, runs))} was answered with passages, so the loss from skipping "
            "retrieval is unknown. Label the questions again with `index`."
        )
    _check_same_passages(runs)
    return table


def _check_same_passages(runs: Sequence[Path]) -> None:
    """Raise BadSetting if label runs differ in passages per question or in prompts."""
    settings = [RunFolder(run).settings() for run in runs]
    counts = [count_shown_passages(item.get("k"), item.get("retriever_fingerprint")) for item in settings]
    prompts = {item["open_prompts"] for item in settings if item.get("open_prompts")}  # older runs do not record them
    if len(set(counts)) > 1:
        run_counts = "; ".join(f"{run}: {'all' if k is None else k}" for run, k in zip(runs, counts, strict=True))
        raise BadSetting(
            f"the label runs use different numbers of passages ({run_counts}), but a threshold is valid for only one "
            "number. Calibrate on runs with the same `k`."
        )
    if len(prompts) > 1:
        raise BadSetting(
            "the label runs use different prompts for passages, but a threshold is valid for only one prompt. Calibrate "
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
    keys = [fingerprint_question(question) for question in table.questions]
    _, first_rows = np.unique(keys, return_index=True)  # the first row of each question
    is_first = np.isin(np.arange(len(keys)), first_rows)
    n_repeated = int((~is_first & ~is_seen).sum())
    left_out = {**table.left_out, "fitted on": int(is_seen.sum()), "asked twice": n_repeated}
    usable = table.subset(np.flatnonzero(is_first & ~is_seen))
    return usable, {reason: count for reason, count in left_out.items() if count}


# --- checks and record ----------------------------------------------------------------------------


def _check_enough_questions(n: int, n_usable: int, options: CalibrationOptions, left_out: Mapping[str, int]) -> None:
    """Raise BadInput if there are too few questions to choose a threshold on.

    Args:
        n: Number of questions to choose the threshold on.
        n_usable: The same, plus the questions that are held out to test the threshold.
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
        f"the threshold needs at least {required} questions, but there are only {n}. The others are held out for the "
        f"test{unusable}. Label more questions{advice}"
    )


def _check_any_harm(outcomes: GateOutcomes) -> None:
    """Raise BadInput if passages correct no wrong answer. Every threshold would then be equally safe."""
    if not outcomes.harmed.any():
        raise BadInput(
            f"retrieval corrected none of the {len(outcomes)} answers, so skipping it loses nothing. Check the "
            "passages with `knowgate report`, or use the gate 'never'."
        )


def _check_gate_matches_runs(artifact: Artifact, table: LabelTable) -> None:
    """Raise an error if the gate and the label runs do not fit together."""
    manifest, settings = artifact.manifest, table.settings
    model, prompts = manifest["model"], manifest["prompts"]
    if (model["fingerprint"], prompts) != (settings["model_fingerprint"], settings["prompts_fingerprint"]):
        raise BadSetting(
            f"the gate '{artifact.path.name}' and the label runs differ in LLM or prompts. Calibrate on label runs with the "
            f"gate's LLM and prompts. Gate: {model['name']} ({model['fingerprint']}), prompts {prompts}. Label runs: "
            f"{settings['model']} ({settings['model_fingerprint']}), prompts {settings['prompts_fingerprint']}."
        )
    _check_reading_lengths(manifest, settings)
    if not (artifact.path / SEEN_FILE).is_file():
        raise ArtifactError(f"the gate '{artifact.path}' has no list of training questions, {SEEN_FILE}. Fit it again.")


def _check_reading_lengths(manifest: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise BadSetting if label runs and gate differ in draft length or samples.

    Args:
        manifest: Content of `gate.json`; `want` says how much the gate reads from the LLM.
        settings: Settings of the label runs, which are folders of recorded answers.
    """
    request, features = manifest["want"], manifest["options"].get("features", ())
    expected = {}
    if request.get("draft_tokens", 0) > 1 and manifest["gate"] != "ik":  # ik truncates the draft itself
        expected["max_tokens"] = request["draft_tokens"]
    if "certainty" in features or "agreement" in features:
        expected["samples"] = request.get("samples", 0)
    for setting, value in expected.items():
        recorded = settings.get(setting)
        if recorded not in (None, value):
            raise BadSetting(
                f"the gate was fitted with {setting}={value}, but the label runs have {setting}={recorded}. Label the "
                f"questions with {setting}={value}."
            )


def describe_setup(table: LabelTable, outcomes: GateOutcomes, keys: Sequence[str]) -> dict[str, Any]:
    """Return the setup of a threshold (LLM, prompts, retriever) for `gate.json`.

    Args:
        table: Recorded answers, with the settings with which they were generated.
        outcomes: Grades of the questions that the threshold was chosen on.
        keys: Fingerprints of these questions.
    """
    settings = table.settings
    reranker = None
    if settings.get("reranker_fingerprint"):
        reranker = {
            "name": settings["reranker"],
            "fingerprint": settings["reranker_fingerprint"],
            "candidates": settings.get("candidates"),
        }
    grades = sorted(zip(keys, outcomes.closed_right.tolist(), outcomes.open_right.tolist(), strict=True))
    return {
        "model": {"name": settings["model"], "fingerprint": settings["model_fingerprint"]},
        "prompts": settings["prompts_fingerprint"],
        "retriever": {"name": settings.get("retriever"), "fingerprint": settings.get("retriever_fingerprint")},
        "k": count_shown_passages(settings.get("k"), settings.get("retriever_fingerprint")),
        "max_tokens": settings.get("max_tokens"),
        "open_prompts": settings.get("open_prompts"),
        "reranker": reranker,
        "grader": ", ".join(sorted({row.grader for row in table.rows})),
        "runs": [Path(run).name for run in table.runs],
        "synthetic": int(table.is_synthetic.sum()),
        "data_hash": sha256_text(*(f"{key} {closed} {opened}" for key, closed, opened in grades))[:16],
        "created": time.strftime("%Y-%m-%d", time.gmtime()),
    }
