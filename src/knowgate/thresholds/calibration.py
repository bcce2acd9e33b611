"""A gate's threshold from label runs, with the evidence for it. No LLM is run, nothing is written."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.arbiters import ArbiterChoices, arbiter_folder, arbitrate
from knowgate.display import Sheet
from knowgate.doors import check_seed
from knowgate.errors import ArtefactError, BadInput, BadSetting
from knowgate.files import sha256_text
from knowgate.gates import SEEN, Artefact, folder_of, gate_name, load_gate, read_artefact, score_gate, seen_by
from knowgate.labels import passages_shown
from knowgate.markup import escape
from knowgate.runs import RunFolder, Trial, held_out, load_trial, question_key
from knowgate.thresholds.choice import for_accuracy, for_rate
from knowgate.thresholds.evidence import Kind, save_threshold, sentence
from knowgate.thresholds.guarantee import Form, learn_then_test, rows_needed
from knowgate.thresholds.outcomes import Outcomes, ThresholdResult, try_threshold
from knowgate.thresholds.overview import calibration_sheet
from knowgate.types import Arbiter, Gate

ONE_PLACE = "a threshold holds for one"
BOUND = ("model_fingerprint", "prompts_fingerprint", "retriever_fingerprint", "reranker_fingerprint", "max_tokens")
TO_CALIBRATE = dict.fromkeys(BOUND, ONE_PLACE)
FEWEST = 40  # questions to choose a threshold on; below, a rate or an accuracy means nothing


@dataclass(frozen=True)
class Target:
    """What the threshold is for. guarantee: at most `value` lost, wrong with probability `delta`, by harm or net (see
    `guarantee`); budget: `value` is the retrieval rate; accuracy: as many right answers as can be had."""

    kind: Kind
    value: float = 0.0
    delta: float = 0.05
    form: Form = "harm"

    @property
    def fewest(self) -> int:
        """Questions needed to choose on."""
        return rows_needed(self.value, self.delta, self.form) if self.kind == "guarantee" else FEWEST


@dataclass(frozen=True, repr=False)
class Calibration:
    """The threshold, what it does on the questions it was chosen on and on those held out, and the whole record.

    left_out: rows not used, by reason. keys: of the questions chosen on. source: the gate, or the spec or folder it is
    loaded from; where the threshold was written, the folder that has it.
    """

    kind: Kind
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
        return sentence(self.threshold, self.kind, self.evidence)

    @property
    def sheet(self) -> Sheet:
        """What it does on the questions it was chosen on, and on those held out."""
        return calibration_sheet(self.threshold, self.chosen, self.held)

    def __repr__(self) -> str:
        return f"<Calibration of {gate_name(self.source)}: {self.sentence}>\n{self.sheet.text()}"

    def _repr_html_(self) -> str:
        """For notebooks."""
        return f"<p>{escape(gate_name(self.source))}: {escape(self.sentence)}</p>{self.sheet.html()}"


def find_threshold(
    gate: str | Gate,
    runs: Sequence[Path],
    target: Target,
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
    folder = folder_of(gate)
    artefact = read_artefact(folder) if folder is not None else None
    trial, left_out = usable(load_runs(runs), artefact, arbiter_folder(arbiter))
    keys = [question_key(question) for question in trial.questions]
    back = held_out(keys, share, seed)
    check_enough(int((~back).sum()), len(keys), target, left_out)
    choices = None if arbiter is None else arbitrate(trial, arbiter, watch=on_weighed)
    outcomes = outcomes_of(trial, gate, choices)
    check_harm(outcomes, target)
    threshold, facts = choose(outcomes.at(~back), target)
    chosen = try_threshold(outcomes.at(~back), threshold)
    held = try_threshold(outcomes.at(back), threshold) if back.any() else None
    used = [key for key, kept in zip(keys, back, strict=True) if not kept]
    evidence = {
        **facts,
        "chosen_on": chosen.record(),
        "held_out": held.record() if held else None,
        **describe(trial, outcomes.at(~back), used),
        "arbiter": None if choices is None else {"name": choices.name, "fingerprint": choices.fingerprint},
        "left_out": left_out,
        "seed": seed,
    }
    return Calibration(target.kind, threshold, chosen, held, evidence, left_out, used, gate)


def store(calibration: Calibration, gate: str, out: Path | None = None) -> Path:
    """Write the threshold into the fitted gate, or into a copy of it."""
    artefact = read_artefact(gate)
    folder = out or artefact.path
    save_threshold(artefact, calibration.threshold, calibration.kind, calibration.evidence, calibration.keys, folder)
    return folder


def choose(outcomes: Outcomes, target: Target) -> tuple[float, dict[str, Any]]:
    """The threshold and what speaks for it."""
    if target.kind == "guarantee":
        guarantee = learn_then_test(outcomes, target.value, target.delta, form=target.form)
        return guarantee.threshold, {key: value for key, value in asdict(guarantee).items() if key != "threshold"}
    if target.kind == "budget":
        return for_rate(outcomes.needs, target.value), {"wanted": target.value, "n": len(outcomes)}
    return for_accuracy(outcomes), {"n": len(outcomes)}


# --- the questions --------------------------------------------------------------------------------


def load_runs(runs: Sequence[Path]) -> Trial:
    """Rows of one model, wording and retriever, answered both ways."""
    trial = load_trial(runs, same=TO_CALIBRATE)
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
    shown = [passages_shown(one.get("k"), one.get("retriever_fingerprint")) for one in made]
    wordings = {one["open_prompts"] for one in made if one.get("open_prompts")}
    if len(set(shown)) > 1 or len(wordings) > 1:
        listed = "; ".join(f"{run}: {'all' if k is None else k}" for run, k in zip(runs, shown, strict=True))
        what = f"different numbers of passages ({listed})" if len(set(shown)) > 1 else "passages in different words"
        raise BadSetting(f"the label runs show the LLM {what}; {ONE_PLACE}.")


def usable(trial: Trial, artefact: Artefact | None, arbiter: str | None = None) -> tuple[Trial, dict[str, int]]:
    """Each question once, and none that the gate or the arbiter (its folder) was fitted on; with what was left out."""
    if artefact:
        check_own_rows(artefact, trial)
    keys = [question_key(question) for question in trial.questions]
    first = {key: number for number, key in reversed(list(enumerate(keys)))}
    folders = [folder for folder in (artefact.path if artefact else None, arbiter) if folder is not None]
    fitted = np.zeros(len(keys), dtype=bool)
    for folder in folders:
        fitted |= np.array(seen_by(trial, folder), dtype=bool)
    again = np.array([first[key] != number for number, key in enumerate(keys)]) & ~fitted
    left_out = {**trial.left_out, "fitted on": int(fitted.sum()), "asked twice": int(again.sum())}
    kept = trial.subset(np.flatnonzero(~fitted & ~again))
    return kept, {reason: count for reason, count in left_out.items() if count}


def outcomes_of(trial: Trial, gate: str | Gate, choices: ArbiterChoices | None = None) -> Outcomes:
    """Needs and answers; with what an arbiter gives after retrieval."""
    given = None if choices is None else choices.right
    return Outcomes(score_gate(trial, gate).needs, trial.closed_right, trial.always_right, given)


# --- checks and record ----------------------------------------------------------------------------


def check_enough(n: int, total: int, target: Target, left_out: dict[str, int]) -> None:
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


def check_harm(outcomes: Outcomes, target: Target) -> None:
    """Where retrieval never helps, every threshold is as safe as any other, and a proof would prove nothing."""
    if target.kind != "budget" and not outcomes.harmed.any():
        raise BadInput(
            f"retrieval turned no wrong answer right in any of the {len(outcomes)} rows: there is nothing to lose by "
            "skipping. See that the passages are of use (knowgate report RUN), or do without: --gate never."
        )


def check_own_rows(artefact: Artefact, trial: Trial) -> None:
    """Refuse rows of another model or wording than the gate's, and a gate that does not say what it was fitted on."""
    made, settings = artefact.manifest, trial.settings
    if (made["model"]["fingerprint"], made["prompts"]) != (
        settings["model_fingerprint"],
        settings["prompts_fingerprint"],
    ):
        raise BadSetting(
            f"the gate '{artefact.path.name}' was fitted on {made['model']['name']} ({made['model']['fingerprint']}, "
            f"prompts {made['prompts']}), the label runs are of {settings['model']} ({settings['model_fingerprint']}, "
            f"prompts {settings['prompts_fingerprint']}). Calibrate on labels of the gate's own model."
        )
    check_reading(made, settings)
    if not (artefact.path / SEEN).is_file():
        raise ArtefactError(
            f"the gate '{artefact.path}' has no {SEEN}: what it was fitted on is unknown. Fit it again."
        )


def check_reading(made: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
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


def describe(trial: Trial, outcomes: Outcomes, keys: Sequence[str]) -> dict[str, Any]:
    """What the threshold is bound to."""
    settings = trial.settings
    lines = zip(keys, outcomes.closed_right.tolist(), outcomes.open_right.tolist(), strict=True)
    return {
        "model": {"name": settings["model"], "fingerprint": settings["model_fingerprint"]},
        "prompts": settings["prompts_fingerprint"],
        "retriever": {"name": settings.get("retriever"), "fingerprint": settings.get("retriever_fingerprint")},
        "k": passages_shown(settings.get("k"), settings.get("retriever_fingerprint")),
        "max_tokens": settings.get("max_tokens"),
        "open_prompts": settings.get("open_prompts"),
        "reranker": _reranker(settings),
        "grader": ", ".join(sorted({row.grader for row in trial.rows})),
        "runs": [Path(run).name for run in trial.runs],
        "synthetic": int(trial.synthetic.sum()),
        "data_hash": sha256_text(*(f"{key} {closed} {opened}" for key, closed, opened in sorted(lines)))[:16],
        "created": time.strftime("%Y-%m-%d", time.gmtime()),
    }
