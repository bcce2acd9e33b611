"""`calibrate`: a gate and label runs in, a threshold with its evidence out. What `knowgate calibrate` calls."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.core.display import TextTable
from knowgate.core.files import sha256_text
from knowgate.core.validation import check_seed
from knowgate.data.runs.folder import RunFolder, RunsLike, resolve_run_paths
from knowgate.data.runs.table import LabelTable, load_label_table
from knowgate.data.splits import fingerprint_question, mark_held_out
from knowgate.errors import ArtifactError, BadInput, BadSetting
from knowgate.gates import check_gate_spec, load_gate
from knowgate.gates.arbiters.offline_arbitration import ArbiterChoices, arbitrate, get_arbiter_folder
from knowgate.gates.artifacts.gate_folder import SEEN_FILE, Artifact, read_artifact
from knowgate.gates.calibration.evidence import TargetKind, build_calibration_table, save_threshold, summarize_threshold
from knowgate.gates.calibration.guarantee import LossForm, compute_required_rows, learn_then_test
from knowgate.gates.calibration.threshold_choice import (
    GateOutcomes,
    ThresholdResult,
    choose_for_accuracy,
    choose_for_rate,
    evaluate_threshold,
)
from knowgate.gates.offline_scoring import get_gate_folder, get_gate_name, get_verdict, mark_seen_rows, score_gate
from knowgate.labels.options import count_shown_passages
from knowgate.types import Arbiter, Gate
from knowgate.types.markup import escape_html

SINGLE_SETUP_REASON = "a threshold holds for one"
BOUND_SETTINGS = (
    "model_fingerprint",
    "prompts_fingerprint",
    "retriever_fingerprint",
    "reranker_fingerprint",
    "max_tokens",
)
REQUIRED_EQUAL = dict.fromkeys(BOUND_SETTINGS, SINGLE_SETUP_REASON)
MIN_QUESTIONS = 40  # questions to choose a threshold on; below, a rate or an accuracy means nothing


@dataclass(frozen=True)
class CalibrationTarget:
    """What the threshold is for. guarantee: at most `value` lost, wrong with probability `delta`, by harm or net (see
    `guarantee`); budget: `value` is the retrieval rate; accuracy: as many right answers as can be had."""

    kind: TargetKind
    value: float = 0.0
    delta: float = 0.05
    form: LossForm = "harm"

    @property
    def fewest(self) -> int:
        """Questions needed to choose on."""
        return compute_required_rows(self.value, self.delta, self.form) if self.kind == "guarantee" else MIN_QUESTIONS


@dataclass(frozen=True, repr=False)
class Calibration:
    """The threshold, what it does on the questions it was chosen on and on those held out, and the whole record.

    left_out: rows not used, by reason. keys: of the questions chosen on. source: the gate, or the spec or folder it is
    loaded from; where the threshold was written, the folder that has it.
    """

    kind: TargetKind
    threshold: float
    chosen: ThresholdResult
    held: ThresholdResult | None
    evidence: dict[str, Any]
    left_out: dict[str, int]
    keys: list[str]
    source: str | Gate

    @functools.cached_property
    def gate(self) -> Gate:
        """The gate as it now is. A plain gate keeps no threshold of its own: use `threshold` beside it."""
        return load_gate(self.source) if isinstance(self.source, str) else self.source

    @property
    def sentence(self) -> str:
        """What the threshold is good for, in words."""
        return summarize_threshold(self.threshold, self.kind, self.evidence)

    @property
    def sheet(self) -> TextTable:
        """What it does on the questions it was chosen on, and on those held out."""
        return build_calibration_table(self.threshold, self.chosen, self.held)

    def __repr__(self) -> str:
        return f"<Calibration of {get_gate_name(self.source)}: {self.sentence}>\n{self.sheet.text()}"

    def _repr_html_(self) -> str:
        """For notebooks."""
        return f"<p>{escape_html(get_gate_name(self.source))}: {escape_html(self.sentence)}</p>{self.sheet.html()}"


def find_threshold(
    gate: str | Gate,
    runs: Sequence[Path],
    target: CalibrationTarget,
    *,
    share: float = 0.5,
    seed: int = 0,
    arbiter: str | Arbiter | None = None,
    on_weighed: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:
    """Choose a threshold on one part of the runs' questions and try it on the other, `share` of them.

    arbiter: who chooses after retrieval; the threshold is then that of the cascade. on_weighed: is told how many of so
    many questions it has weighed.
    """
    check_seed(seed)
    if not 0 <= share < 1:
        raise BadSetting(f"the share held out is {share}; it must be at least 0 and below 1.")
    folder = get_gate_folder(gate)
    artifact = read_artifact(folder) if folder is not None else None
    trial, left_out = select_usable_rows(load_calibration_rows(runs), artifact, get_arbiter_folder(arbiter))
    keys = [fingerprint_question(question) for question in trial.questions]
    back = mark_held_out(keys, share, seed)
    check_enough_questions(int((~back).sum()), len(keys), target, left_out)
    choices = None if arbiter is None else arbitrate(trial, arbiter, watch=on_weighed)
    outcomes = compute_outcomes(trial, gate, choices)
    check_any_harm(outcomes, target)
    threshold, facts = choose_threshold(outcomes.at(~back), target)
    chosen = evaluate_threshold(outcomes.at(~back), threshold)
    held = evaluate_threshold(outcomes.at(back), threshold) if back.any() else None
    used = [key for key, kept in zip(keys, back, strict=True) if not kept]
    evidence = {
        **facts,
        "chosen_on": chosen.record(),
        "held_out": held.record() if held else None,
        **describe_setup(trial, outcomes.at(~back), used),
        "arbiter": None if choices is None else {"name": choices.name, "fingerprint": choices.fingerprint},
        "left_out": left_out,
        "seed": seed,
    }
    return Calibration(target.kind, threshold, chosen, held, evidence, left_out, used, gate)


def save_calibration(calibration: Calibration, gate: str, out: Path | None = None) -> Path:
    """Write the threshold into the fitted gate, or into a copy of it."""
    artifact = read_artifact(gate)
    folder = out or artifact.path
    save_threshold(artifact, calibration.threshold, calibration.kind, calibration.evidence, calibration.keys, folder)
    return folder


def choose_threshold(outcomes: GateOutcomes, target: CalibrationTarget) -> tuple[float, dict[str, Any]]:
    """The threshold and what speaks for it."""
    if target.kind == "guarantee":
        guarantee = learn_then_test(outcomes, target.value, target.delta, form=target.form)
        return guarantee.threshold, {key: value for key, value in asdict(guarantee).items() if key != "threshold"}
    if target.kind == "budget":
        return choose_for_rate(outcomes.needs, target.value), {"wanted": target.value, "n": len(outcomes)}
    return choose_for_accuracy(outcomes), {"n": len(outcomes)}


# --- the questions --------------------------------------------------------------------------------


def load_calibration_rows(runs: Sequence[Path]) -> LabelTable:
    """Rows of one model, wording and retriever, answered both ways."""
    trial = load_label_table(runs, required_equal=REQUIRED_EQUAL)
    if trial.open_right is None:
        raise BadInput(
            f"no row of {', '.join(map(str, runs))} has an open-book answer, so what skipping loses cannot be seen. "
            "Label with passages: knowgate label --index DIR ..."
        )
    check_same_passages(runs)
    return trial


def check_same_passages(runs: Sequence[Path]) -> None:
    """As many passages, put to the LLM in the same words; older runs keep neither as it was used."""
    made = [RunFolder(run).settings() for run in runs]
    shown = [count_shown_passages(one.get("k"), one.get("retriever_fingerprint")) for one in made]
    wordings = {one["open_prompts"] for one in made if one.get("open_prompts")}
    if len(set(shown)) > 1 or len(wordings) > 1:
        listed = "; ".join(f"{run}: {'all' if k is None else k}" for run, k in zip(runs, shown, strict=True))
        what = f"different numbers of passages ({listed})" if len(set(shown)) > 1 else "passages in different words"
        raise BadSetting(f"the label runs show the LLM {what}; {SINGLE_SETUP_REASON}.")


def select_usable_rows(
    trial: LabelTable, artifact: Artifact | None, arbiter: str | None = None
) -> tuple[LabelTable, dict[str, int]]:
    """Each question once, and none that the gate or the arbiter (its folder) was fitted on; with what was left out."""
    if artifact:
        check_gate_matches_runs(artifact, trial)
    keys = [fingerprint_question(question) for question in trial.questions]
    first = {key: number for number, key in reversed(list(enumerate(keys)))}
    folders = [folder for folder in (artifact.path if artifact else None, arbiter) if folder is not None]
    fitted = np.zeros(len(keys), dtype=bool)
    for folder in folders:
        fitted |= np.array(mark_seen_rows(trial, folder), dtype=bool)
    again = np.array([first[key] != number for number, key in enumerate(keys)]) & ~fitted
    left_out = {**trial.left_out, "fitted on": int(fitted.sum()), "asked twice": int(again.sum())}
    kept = trial.subset(np.flatnonzero(~fitted & ~again))
    return kept, {reason: count for reason, count in left_out.items() if count}


def compute_outcomes(trial: LabelTable, gate: str | Gate, choices: ArbiterChoices | None = None) -> GateOutcomes:
    """Needs and answers; with what an arbiter gives after retrieval."""
    given = None if choices is None else choices.right
    return GateOutcomes(score_gate(trial, gate).needs, trial.closed_right, trial.always_right, given)


# --- checks and record ----------------------------------------------------------------------------


def check_enough_questions(n: int, total: int, target: CalibrationTarget, left_out: dict[str, int]) -> None:
    if n >= target.fewest:
        return
    lost = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
    goal = f"loss {target.value:g} at confidence {1 - target.delta:g}" if target.kind == "guarantee" else "a threshold"
    raise BadInput(
        f"{goal} needs at least {target.fewest} questions to choose on; there are {n} of {total} usable ones"
        + (f" (left out: {lost})" if lost else "")
        + ". Label more questions"
        + (", or use all of them: --held-out 0." if total >= target.fewest else ".")
    )


def check_any_harm(outcomes: GateOutcomes, target: CalibrationTarget) -> None:
    """Where retrieval never helps, every threshold is as safe as any other, and a proof would prove nothing."""
    if target.kind != "budget" and not outcomes.harmed.any():
        raise BadInput(
            f"retrieval turned no wrong answer right in any of the {len(outcomes)} rows: there is nothing to lose by "
            "skipping. See that the passages are of use (knowgate report RUN), or do without: --gate never."
        )


def check_gate_matches_runs(artifact: Artifact, trial: LabelTable) -> None:
    """Refuse rows of another model or wording than the gate's, and a gate that does not say what it was fitted on."""
    made, settings = artifact.manifest, trial.settings
    if (made["model"]["fingerprint"], made["prompts"]) != (
        settings["model_fingerprint"],
        settings["prompts_fingerprint"],
    ):
        raise BadSetting(
            f"the gate '{artifact.path.name}' was fitted on {made['model']['name']} ({made['model']['fingerprint']}, "
            f"prompts {made['prompts']}), the label runs are of {settings['model']} ({settings['model_fingerprint']}, "
            f"prompts {settings['prompts_fingerprint']}). Calibrate on labels of the gate's own model."
        )
    check_reading_lengths(made, settings)
    if not (artifact.path / SEEN_FILE).is_file():
        raise ArtifactError(
            f"the gate '{artifact.path}' has no {SEEN_FILE}: what it was fitted on is unknown. Fit it again."
        )


def check_reading_lengths(made: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """What the gate reads of a question must be as long in the runs as where it decides."""
    want, features = made["want"], set(made["options"].get("features", ()))
    drafted = int(want.get("draft_tokens", 0))
    if drafted > 1 and made["gate"] != "ik":  # ik cuts off the beginning it reads
        _check_length("drafts of {} tokens", "max-tokens", drafted, settings.get("max_tokens"))
    if features & {"certainty", "agreement"}:
        _check_length("{} samples", "samples", int(want.get("samples", 0)), settings.get("samples"))


def _check_length(words: str, option: str, wanted: int, there: int | None) -> None:
    if there is not None and there != wanted:
        raise BadSetting(
            f"the gate reads {words.format(wanted)}, the label runs hold {words.format(there)}: its needs would not be "
            f"those it gives when it decides. Label with --{option} {wanted}."
        )


def _reranker(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Which one chose the passages, from how many; None where they came as they were found."""
    if not settings.get("reranker_fingerprint"):
        return None
    named = {"name": settings["reranker"], "fingerprint": settings["reranker_fingerprint"]}
    return {**named, "candidates": settings.get("candidates")}


def describe_setup(trial: LabelTable, outcomes: GateOutcomes, keys: Sequence[str]) -> dict[str, Any]:
    """What the threshold is bound to."""
    settings = trial.settings
    lines = zip(keys, outcomes.closed_right.tolist(), outcomes.open_right.tolist(), strict=True)
    return {
        "model": {"name": settings["model"], "fingerprint": settings["model_fingerprint"]},
        "prompts": settings["prompts_fingerprint"],
        "retriever": {"name": settings.get("retriever"), "fingerprint": settings.get("retriever_fingerprint")},
        "k": count_shown_passages(settings.get("k"), settings.get("retriever_fingerprint")),
        "max_tokens": settings.get("max_tokens"),
        "open_prompts": settings.get("open_prompts"),
        "reranker": _reranker(settings),
        "grader": ", ".join(sorted({row.grader for row in trial.rows})),
        "runs": [Path(run).name for run in trial.runs],
        "synthetic": int(trial.is_synthetic.sum()),
        "data_hash": sha256_text(*(f"{key} {closed} {opened}" for key, closed, opened in sorted(lines)))[:16],
        "created": time.strftime("%Y-%m-%d", time.gmtime()),
    }


DEFAULT_CONFIDENCE = 0.95  # of a guarantee, unless given


def calibrate(
    gate: str | Path | Gate,
    runs: RunsLike,
    *,
    max_loss: float | None = None,
    confidence: float | None = None,
    retrieval_rate: float | None = None,
    best_accuracy: bool = False,
    net: bool = False,
    arbiter: str | Path | Arbiter | None = None,
    held_out: float = 0.5,
    out: str | Path | None = None,
    seed: int = 0,
    on_weighed: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:
    """Choose a gate's threshold by guarantee, by budget or by accuracy; questions it was fitted on are left out.

    gate: folder of a fitted gate, the gate itself, or a plain one such as 'logprob:mean'. A fitted gate's threshold is
    written into its folder with the evidence, or into a copy of it at `out`. A gate in hand keeps the threshold it has,
    for using a thing does not change it: go on with the `gate` of what comes back.
    runs: label runs of the gate's own LLM, with open-book answers; no LLM is run.
    Exactly one of: max_loss, accuracy lost against always retrieving, at most, with `confidence` (0.95);
    retrieval_rate, the share of questions to retrieve for, never above it; best_accuracy, most right answers.
    net: of max_loss, count answers gained against those lost; without it only harm counts, which is stricter.
    arbiter: chooses after retrieval (a folder, 'rules', or itself); the threshold is then that of the cascade, the loss
    still against always giving the open-book answer, and the guarantee holds with this arbiter alone.
    on_weighed: is told how many of so many questions the arbiter has weighed.
    held_out: share of the questions kept back to try the threshold on. seed: of that split.

    Example:
        >>> calibrate("my-gate", "runs/calibration", max_loss=0.02)  # doctest: +SKIP
    """
    target = build_target(max_loss, confidence, retrieval_rate, best_accuracy, net)
    weighing = str(arbiter) if isinstance(arbiter, Path) else arbiter
    given = str(gate) if isinstance(gate, Path) else gate
    if isinstance(given, str):
        check_gate_spec(given)
    folder = get_gate_folder(given)
    if out is not None and folder is None:
        raise BadSetting(
            f"'{get_gate_name(given)}' is not a fitted gate, so there is nothing to write to --out; leave it away."
        )
    if get_verdict(given) == "own":
        raise BadSetting(
            "a threshold is chosen for the calibrated need, not for a gate's own verdict. Leave ',verdict=own' away: "
            f"knowgate calibrate {folder}"
        )
    found = find_threshold(
        given, resolve_run_paths(runs), target, share=held_out, seed=seed, arbiter=weighing, on_weighed=on_weighed
    )
    if folder is None:
        return found
    return replace(found, source=str(save_calibration(found, folder, Path(out) if out is not None else None)))


def build_target(
    loss: float | None, confidence: float | None, rate: float | None, best: bool, net: bool = False
) -> CalibrationTarget:
    """What the threshold is for; exactly one thing."""
    given = (loss is not None) + (rate is not None) + best
    if given != 1:
        raise BadSetting(
            f"say what the threshold is for: exactly one of --max-loss 0.02, --retrieval-rate 0.5, --best-accuracy "
            f"({given} were given)."
        )
    if loss is not None:
        delta = round(1 - (DEFAULT_CONFIDENCE if confidence is None else confidence), 12)
        return CalibrationTarget("guarantee", loss, delta, "net" if net else "harm")
    if confidence is not None or net:
        option = "--net" if net else "--confidence"
        raise BadSetting(f"{option} belongs to --max-loss; the other targets give no guarantee.")
    return CalibrationTarget("accuracy") if rate is None else CalibrationTarget("budget", rate)
