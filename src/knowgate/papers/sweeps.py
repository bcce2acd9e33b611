"""One thing varied, the rest kept: thresholds, beta, variants on record, the data or the LLM a gate was fitted on."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.core.display import MISSING_VALUE, TextTable, format_percent, format_points
from knowgate.core.registry import split_spec
from knowgate.data.runs.table import LabelTable, load_label_table
from knowgate.errors import BadInput, BadSetting, KnowgateError
from knowgate.gates import load_gate
from knowgate.gates.offline_scoring import TableScores, drop_seen_rows, get_gate_name, score_gate
from knowgate.gates.scoring import bind_gate, read_questions, score_questions
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.stats.metrics import auroc
from knowgate.training.fit_function import FitOption, read_fit_options
from knowgate.types import Gate, Model, Question

THRESHOLDS = tuple(round(0.1 * step, 1) for step in range(1, 10))  # the IK paper's sweep
BETAS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)  # CBDR's: answer directly where confidence is above beta
FAST_FIT_OPTIONS: dict[str, dict[str, Any]] = {
    "probe": {"kind": "linear"},
    "fusion": {"cheap": True},
}  # quick ones, to sweep over


def sweep_thresholds(trial: LabelTable, gate: TableScores, tried: Sequence[float] = THRESHOLDS) -> TextTable:
    """What each threshold on need comes to."""
    columns = ("retrieve if need >", "retrieval", "accuracy", "random", "gain", "harm", "waste", "judged right")
    rows = (*(build_threshold_row(trial, gate, t, f"{t:g}") for t in tried), build_majority_row(trial))
    return TextTable(f"{gate.name}: threshold", columns, rows)


def sweep_betas(trial: LabelTable, gate: TableScores, tried: Sequence[float] = BETAS) -> TextTable:
    """The same for confidence, as CBDR has it: 1 - the raw score of a fitted gate (eq. 2, the probe's softmax), and
    1 - need of a gate that has none."""
    columns = ("answer if confidence >", "retrieval", "accuracy", "random", "gain", "harm", "waste", "judged right")
    own = gate if gate.raw is None else replace(gate, needs=gate.raw)
    rows = (
        *(build_threshold_row(trial, own, 1 - beta, f"{beta:g}", strict=True) for beta in tried),
        build_majority_row(trial),
    )
    return TextTable(f"{gate.name}: beta on {'1 - need' if gate.raw is None else 'the raw confidence'}", columns, rows)


def build_threshold_row(
    trial: LabelTable, gate: TableScores, threshold: float, name: str, *, strict: bool = False
) -> tuple[str, ...]:
    """One line. strict: a need equal to the threshold is retrieved for (confidence must be above beta)."""
    retrieve = gate.needs >= threshold - 1e-12 if strict else gate.needs > threshold
    judged = float((retrieve == ~trial.closed_right).mean())  # of the task 'does it know?'
    rate = float(retrieve.mean())
    if trial.open_right is None:
        return (name, format_percent(rate), *[MISSING_VALUE] * 5, format_percent(judged))
    closed_right, open_right = trial.closed_right, trial.open_right
    accuracy = float(np.where(retrieve, open_right, closed_right).mean())
    random = rate * open_right.mean() + (1 - rate) * closed_right.mean()
    harm, waste = (~retrieve & open_right & ~closed_right).mean(), (retrieve & closed_right).mean()
    return (name, format_percent(rate), format_percent(accuracy), format_percent(random), format_points(accuracy - random), format_percent(harm),
            format_percent(waste), format_percent(judged))  # fmt: skip


def build_majority_row(trial: LabelTable) -> tuple[str, ...]:
    """The commoner verdict for every question: what 'judged right' must beat."""
    unknown = float((~trial.closed_right).mean()) > 0.5
    return build_threshold_row(
        trial, TableScores("majority", np.full(len(trial.rows), float(unknown)), 0.5), 0.5, "majority"
    )


def sweep_variants(trial: LabelTable, start: str) -> TextTable:
    """Gates on record whose name begins alike: how many examples, which label words, which sign."""
    names = [name for name in trial.recorded_needs if name.startswith(start)]
    if not names:
        raise BadInput(
            f"no gate on record begins with '{start}'. On record: {', '.join(trial.recorded_needs) or 'none'}. "
            "Record some: knowgate eval --data SPEC --gates dhicl:LOG,dhicl:LOG,k=5"
        )
    scored = [score_gate(trial, name) for name in names]
    rows = [
        (one.name, format_auroc(trial, one), *build_threshold_row(trial, one, one.threshold, "")[1:5]) for one in scored
    ]
    return TextTable(f"Variants of {start}", ("gate", "AUROC", "retrieval", "accuracy", "random", "gain"), tuple(rows))


def compute_auroc(trial: LabelTable, gate: TableScores) -> float | None:
    """Of 'does not know'; None where the questions are of one kind."""
    return auroc(~trial.closed_right, gate.needs)


def format_auroc(trial: LabelTable, gate: TableScores) -> str:
    value = compute_auroc(trial, gate)
    return MISSING_VALUE if value is None else f"{value:.3f}"


def sweep_plug_in(gates: Sequence[str], runs: Sequence[Path]) -> TextTable:
    """AUROC of fitted gates on runs they were not fitted on, of their own LLM or of others (as plug-ins)."""
    trials = [load_label_table([run]) for run in runs]
    rows = tuple((Path(gate).name, *(_cell(trial, gate) for trial in trials)) for gate in gates)
    return TextTable(
        "AUROC of gates (rows) on label runs (columns); *: fitted on another LLM",
        ("gate", *(run.name for run in runs)),
        rows,
    )


def _cell(trial: LabelTable, gate: str) -> str:
    try:
        trial = drop_seen_rows(trial, [gate])
        scored = score_gate(trial, gate, plug_in=True)
    except KnowgateError as error:
        return f"({error.brief})"
    note = " *" if scored.note else ""  # fitted on another LLM
    return format_auroc(trial, scored) + note


def sweep_transfer(name: str, train: Sequence[Path], runs: Sequence[Path], say: Callable[[str], None]) -> TextTable:
    """Fit any gate that can be fitted on each train run (on 'known'), measure on each of the others.

    name: a gate, with options of its fit where wanted: 'ik:mode=text,tokens=8'.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folders = [_fitted(name, run, Path(scratch), say) for run in train]
        sheet = sweep_plug_in([str(folder) for folder in folders], runs)
    return TextTable(f"AUROC of {name} fitted on (rows), tested on (columns)", sheet.columns, sheet.rows)


def _fitted(spec: str, run: Path, scratch: Path, say: Callable[[str], None]) -> Path:
    """The gate of a spec such as 'probe' or 'ik:mode=text,tokens=8', fitted on what one run knows."""
    from knowgate.training.gate import fit, load_fit_function

    name, text = split_spec(spec)
    options = FAST_FIT_OPTIONS.get(name, {}) | parse_fit_options(name, text, read_fit_options(load_fit_function(name)))
    say(f"fitting {name} on {run.name}")
    fit(name, run, out=scratch / run.name, target="known", **options)
    return scratch / run.name


def parse_fit_options(name: str, text: str, known: Mapping[str, FitOption]) -> dict[str, Any]:
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


WARMUP_QUESTIONS = 2  # questions asked before the clock counts: the first ones load weights and indexes


@dataclass(frozen=True)
class GateLatency:
    """Seconds of deciding, in the order of the questions."""

    gate: str
    seconds: tuple[float, ...]

    def at(self, share: float) -> float:
        return float(np.quantile(self.seconds, share))


def time_gates(
    gates: Sequence[str], questions: Sequence[Question], model: Model, prompts: AnswerPrompts, *, plug_in: bool = False
) -> list[GateLatency]:
    """Every gate on every question, in turns, so that whatever slows the machine down slows all of them."""
    if len(questions) <= WARMUP_QUESTIONS:
        raise BadInput(f"timing needs more than {WARMUP_QUESTIONS} questions, as the first ones are not counted.")
    bound = [bind_gate(load_gate(gate, plug_in=plug_in), model, prompts) for gate in gates]
    taken = [[_decide(gate, question, model, prompts) for gate in bound] for question in questions][WARMUP_QUESTIONS:]
    return [
        GateLatency(get_gate_name(gate), tuple(seconds))
        for gate, seconds in zip(gates, zip(*taken, strict=True), strict=True)
    ]


def _decide(gate: Gate, question: Question, model: Model, prompts: AnswerPrompts) -> float:
    start = time.perf_counter()
    score_questions(gate, [question], read_questions(model, [gate], [question], prompts))
    return time.perf_counter() - start


def build_latency_table(found: Sequence[GateLatency]) -> TextTable:
    rows = [
        (one.gate, f"{one.at(0.5):.4f}", f"{one.at(0.95):.4f}", f"{np.mean(one.seconds):.4f}", str(len(one.seconds)))
        for one in found
    ]
    columns = ("gate", "median", "95 % within", "mean", "questions")
    return TextTable(
        f"Seconds to decide, one question at a time (the first {WARMUP_QUESTIONS} are not counted)",
        columns,
        tuple(rows),
    )
