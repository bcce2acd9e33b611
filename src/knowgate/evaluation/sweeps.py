"""One thing varied, the rest kept: thresholds, beta, variants on record, the data or the LLM a gate was fitted on."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.display import NOTHING, Sheet, percent, points
from knowgate.errors import BadInput, BadSetting, KnowgateError
from knowgate.fitting import FitOption, options_of
from knowgate.gates import GateScores, score_gate, without_seen
from knowgate.registry import split_spec
from knowgate.runs import Trial, load_trial
from knowgate.statistics import auroc

THRESHOLDS = tuple(round(0.1 * step, 1) for step in range(1, 10))  # the IK paper's sweep
BETAS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)  # CBDR's: answer directly where confidence is above beta
USUAL: dict[str, dict[str, Any]] = {"probe": {"kind": "linear"}, "fusion": {"cheap": True}}  # quick ones, to sweep over


def sweep_thresholds(trial: Trial, gate: GateScores, tried: Sequence[float] = THRESHOLDS) -> Sheet:
    """What each threshold on need comes to."""
    columns = ("retrieve if need >", "retrieval", "accuracy", "random", "gain", "harm", "waste", "judged right")
    rows = (*(line_at(trial, gate, t, f"{t:g}") for t in tried), majority_line(trial))
    return Sheet(f"{gate.name}: threshold", columns, rows)


def sweep_betas(trial: Trial, gate: GateScores, tried: Sequence[float] = BETAS) -> Sheet:
    """The same for confidence, as CBDR has it: 1 - the raw score of a fitted gate (eq. 2, the probe's softmax), and
    1 - need of a gate that has none."""
    columns = ("answer if confidence >", "retrieval", "accuracy", "random", "gain", "harm", "waste", "judged right")
    own = gate if gate.raw is None else replace(gate, needs=gate.raw)
    rows = (*(line_at(trial, own, 1 - beta, f"{beta:g}", strict=True) for beta in tried), majority_line(trial))
    return Sheet(f"{gate.name}: beta on {'1 - need' if gate.raw is None else 'the raw confidence'}", columns, rows)


def line_at(trial: Trial, gate: GateScores, threshold: float, name: str, *, strict: bool = False) -> tuple[str, ...]:
    """One line. strict: a need equal to the threshold is retrieved for (confidence must be above beta)."""
    retrieve = gate.needs >= threshold - 1e-12 if strict else gate.needs > threshold
    judged = float((retrieve == ~trial.closed_right).mean())  # of the task 'does it know?'
    rate = float(retrieve.mean())
    if trial.open_right is None:
        return (name, percent(rate), *[NOTHING] * 5, percent(judged))
    closed_right, open_right = trial.closed_right, trial.open_right
    accuracy = float(np.where(retrieve, open_right, closed_right).mean())
    random = rate * open_right.mean() + (1 - rate) * closed_right.mean()
    harm, waste = (~retrieve & open_right & ~closed_right).mean(), (retrieve & closed_right).mean()
    return (name, percent(rate), percent(accuracy), percent(random), points(accuracy - random), percent(harm),
            percent(waste), percent(judged))  # fmt: skip


def majority_line(trial: Trial) -> tuple[str, ...]:
    """The commoner verdict for every question: what 'judged right' must beat."""
    unknown = float((~trial.closed_right).mean()) > 0.5
    return line_at(trial, GateScores("majority", np.full(len(trial.rows), float(unknown)), 0.5), 0.5, "majority")


def sweep_variants(trial: Trial, start: str) -> Sheet:
    """Gates on record whose name begins alike: how many examples, which label words, which sign."""
    names = [name for name in trial.recorded if name.startswith(start)]
    if not names:
        raise BadInput(
            f"no gate on record begins with '{start}'. On record: {', '.join(trial.recorded) or 'none'}. "
            "Record some: knowgate eval --data SPEC --gates dhicl:LOG,dhicl:LOG,k=5"
        )
    scored = [score_gate(trial, name) for name in names]
    rows = [(one.name, auroc_shown(trial, one), *line_at(trial, one, one.threshold, "")[1:5]) for one in scored]
    return Sheet(f"Variants of {start}", ("gate", "AUROC", "retrieval", "accuracy", "random", "gain"), tuple(rows))


def auroc_of(trial: Trial, gate: GateScores) -> float | None:
    """Of 'does not know'; None where the questions are of one kind."""
    return auroc(~trial.closed_right, gate.needs)


def auroc_shown(trial: Trial, gate: GateScores) -> str:
    value = auroc_of(trial, gate)
    return NOTHING if value is None else f"{value:.3f}"


def sweep_plug_in(gates: Sequence[str], runs: Sequence[Path]) -> Sheet:
    """AUROC of fitted gates on runs they were not fitted on, of their own LLM or of others (as plug-ins)."""
    trials = [load_trial([run]) for run in runs]
    rows = tuple((Path(gate).name, *(_cell(trial, gate) for trial in trials)) for gate in gates)
    return Sheet(
        "AUROC of gates (rows) on label runs (columns); *: fitted on another LLM",
        ("gate", *(run.name for run in runs)),
        rows,
    )


def _cell(trial: Trial, gate: str) -> str:
    try:
        trial = without_seen(trial, [gate])
        scored = score_gate(trial, gate, plug_in=True)
    except KnowgateError as error:
        return f"({error.brief})"
    note = " *" if scored.note else ""  # fitted on another LLM
    return auroc_shown(trial, scored) + note


def sweep_transfer(name: str, train: Sequence[Path], runs: Sequence[Path], say: Callable[[str], None]) -> Sheet:
    """Fit any gate that can be fitted on each train run (on 'known'), measure on each of the others.

    name: a gate, with options of its fit where wanted: 'ik:mode=text,tokens=8'.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folders = [_fitted(name, run, Path(scratch), say) for run in train]
        sheet = sweep_plug_in([str(folder) for folder in folders], runs)
    return Sheet(f"AUROC of {name} fitted on (rows), tested on (columns)", sheet.columns, sheet.rows)


def _fitted(spec: str, run: Path, scratch: Path, say: Callable[[str], None]) -> Path:
    """The gate of a spec such as 'probe' or 'ik:mode=text,tokens=8', fitted on what one run knows."""
    from knowgate.fitting import fit, fit_function

    name, text = split_spec(spec)
    options = USUAL.get(name, {}) | given_options(name, text, options_of(fit_function(name)))
    say(f"fitting {name} on {run.name}")
    fit(name, run, out=scratch / run.name, target="known", **options)
    return scratch / run.name


def given_options(name: str, text: str, known: Mapping[str, FitOption]) -> dict[str, Any]:
    """Options of a fit written as 'key=value,key=value'; whether a value is allowed the fit says."""
    given = {}
    for part in (part for part in text.split(",") if part.strip()):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in known:
            raise BadSetting(f"fit {name} has no option '{part.strip()}'. Known: {', '.join(known) or 'none'}.")
        try:
            given[key] = value.lower() == "true" if known[key].kind is bool else known[key].kind(value)
        except ValueError:
            raise BadSetting(f"fit {name}: {key} is '{value}'; it must be a number.") from None
    return given
