"""One of two evaluations: read from the folder of a report, or made from a label run. Knows nothing of the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.core.schema import read_record
from knowgate.core.validation import read_json
from knowgate.data.runs.folder import RunFolder, suggest_runs
from knowgate.errors import BadInput
from knowgate.evaluation.gate_comparison import Evaluation
from knowgate.evaluation.gate_evaluation import GateLike, evaluate
from knowgate.evaluation.recommendation import Recommendation, recommend
from knowgate.stats.bootstrap import DEFAULT_RESAMPLES, Estimate, estimate_means
from knowgate.stats.metrics import BoolArray

SUMMARY_FILE, DECISIONS_FILE = "summary.json", "decisions.json"
SUMMARY_MEASURES = ("accuracy", "rate", "auroc")
BITS = "01"
RECOMMENDED = "recommended"  # stands among the gates for what was recommended, at its threshold
ARBITER_SUFFIX = " + arbiter"  # ends the name of a gate that has the arbiter behind it; two sides may have two arbiters


@dataclass(frozen=True)
class GateSummary:
    """What one gate came to. right, searched: of each question, None where the report does not hold them."""

    measures: dict[str, Estimate]
    right: BoolArray | None = field(default=None, repr=False)
    searched: BoolArray | None = field(default=None, repr=False)


@dataclass(frozen=True)
class EvaluationSummary:
    """keys: of the questions, by which those of two sides are told to be the same. recommended: in words.

    arbiter: that behind the gates whose names say so.
    """

    name: str
    model: str
    n: int
    gates: dict[str, GateSummary]
    keys: list[str] = field(default_factory=list, repr=False)
    recommended: str = ""
    arbiter: str = ""


def decisions_to_dict(evaluation: Evaluation, advice: Recommendation) -> dict[str, Any]:
    """What every gate decided and whether its answer is right, in signs: no texts, so it can be kept anywhere."""
    found = summarize_evaluation(evaluation, advice, "")
    kinds = {name: {"right": gate.right, "searched": gate.searched} for name, gate in found.gates.items()}
    signs = {
        name: {kind: _signs(values) for kind, values in own.items() if values is not None}
        for name, own in kinds.items()
    }
    return {"questions": found.keys, "gates": signs}


def load_evaluation_summary(
    path: Path, gates: Sequence[GateLike], resamples: int = DEFAULT_RESAMPLES
) -> EvaluationSummary:
    """A folder that `knowgate eval --out` wrote, or a label run, on which gates are evaluated now."""
    folder = path.parent if path.name == SUMMARY_FILE else path
    if (folder / SUMMARY_FILE).is_file():
        return _read(folder)
    if not folder.is_dir():
        raise BadInput(f"'{path}' is no folder. Give what `knowgate eval --out DIR` wrote, or a label run.")
    if not (folder / RunFolder.manifest_name).is_file() and not suggest_runs(folder, RunFolder.manifest_name):
        raise BadInput(
            f"'{path}' is no report (it has no {SUMMARY_FILE}) and no label run (no {RunFolder.manifest_name}). Give what "
            "`knowgate eval --out DIR` wrote, or a label run."
        )
    evaluation = evaluate(list(gates), folder, resamples=resamples)
    return summarize_evaluation(evaluation, recommend(evaluation), str(path))


def summarize_evaluation(evaluation: Evaluation, advice: Recommendation, name: str) -> EvaluationSummary:
    """An evaluation in hand."""
    gates = {
        gate.gate: GateSummary(
            {measure: gate.measures[measure] for measure in SUMMARY_MEASURES if measure in gate.measures},
            gate.right,
            gate.needs > gate.threshold,
        )
        for gate in evaluation.gates
    }
    gates |= _behind(evaluation)
    if evaluation.trial.open_right is not None:
        gates[RECOMMENDED] = _as_recommended(evaluation, advice)
    keys = evaluation.trial.question_fingerprints.tolist()
    arbiter = evaluation.cascade.arbiter if evaluation.cascade else ""
    model = str(evaluation.trial.settings["model"])
    return EvaluationSummary(name, model, len(keys), gates, keys, _words(asdict(advice)), arbiter)


def _behind(evaluation: Evaluation) -> dict[str, GateSummary]:
    """Every gate with the arbiter behind it, where there is one."""
    lines = evaluation.cascade.lines if evaluation.cascade else []
    searched = {line.gate: evaluation.gate(line.gate) for line in lines}
    return {
        line.gate + ARBITER_SUFFIX: GateSummary(
            {"accuracy": line.accuracy, "rate": Estimate(line.rate)},
            line.right,
            searched[line.gate].needs > searched[line.gate].threshold,
        )
        for line in lines
    }


def _as_recommended(evaluation: Evaluation, advice: Recommendation) -> GateSummary:
    """Where no gate is worth using, retrieving every time is what is recommended."""
    if not advice.is_worth_it:
        always = evaluation.gate("always")
        return _from_signs(always.right, always.needs > always.threshold)
    return _from_signs(advice.right, ~advice.skips)


def _from_signs(right: BoolArray, searched: BoolArray) -> GateSummary:
    accuracy, rate = estimate_means([right.astype(float), searched.astype(float)])
    return GateSummary({"accuracy": accuracy, "rate": rate}, right, searched)


def _words(advice: Mapping[str, Any]) -> str:
    if advice.get("light") not in ("use", "try") or not advice.get("gate"):
        return "no gate"
    return f"{advice['gate']} at {float(advice['threshold'] or 0.0):.3g}"


# --- from files -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Advice:
    """Of what a summary recommends, what is of use here."""

    light: str = "unknown"
    gate: str | None = None
    threshold: float | None = None


@dataclass(frozen=True)
class _Line:
    """Of a gate with the arbiter behind it."""

    gate: str
    rate: float
    accuracy: Estimate


@dataclass(frozen=True)
class _Cascade:
    """Of what a summary says of an arbiter."""

    arbiter: str = ""
    lines: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class _Decisions:
    """Of all questions, gate by gate, in signs."""

    questions: tuple[str, ...] = ()
    gates: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def _read(folder: Path) -> EvaluationSummary:
    where = str(folder / SUMMARY_FILE)
    summary = read_json(folder / SUMMARY_FILE)
    if not isinstance(summary, dict) or not isinstance(summary.get("gates"), list):
        raise BadInput(f"{where} is not that of an evaluation. Give a folder that `knowgate eval --out DIR` wrote.")
    file = folder / DECISIONS_FILE
    decided = read_record(_Decisions, read_json(file), str(file)) if file.is_file() else _Decisions()
    gates = {str(gate.get("gate")): _gate(gate, decided, where) for gate in summary["gates"]}
    cascade = read_record(_Cascade, summary.get("cascade") or {}, f"{where}: cascade", ignore_unknown=True)
    lines = [read_record(_Line, line, f"{where}: line of cascade", ignore_unknown=True) for line in cascade.lines]
    gates |= {line.gate + ARBITER_SUFFIX: _gate_behind(line, decided) for line in lines}
    right, searched = (_bools(decided, RECOMMENDED, kind) for kind in ("right", "searched"))
    if right is not None and searched is not None:
        gates[RECOMMENDED] = _from_signs(right, searched)
    advice = read_record(_Advice, summary.get("recommendation") or {}, f"{where}: recommendation", ignore_unknown=True)
    n = len(decided.questions) or int(summary.get("questions", 0))
    keys, words = list(decided.questions), _words(asdict(advice))
    return EvaluationSummary(str(folder), str(summary.get("model")), n, gates, keys, words, cascade.arbiter)


def _gate(record: Mapping[str, Any], decided: _Decisions, where: str) -> GateSummary:
    name = str(record.get("gate"))
    measures = {
        measure: read_record(Estimate, record[measure], f"{where}: {measure} of {name}")
        for measure in SUMMARY_MEASURES
        if measure in record
    }
    return GateSummary(measures, *(_bools(decided, name, kind) for kind in ("right", "searched")))


def _gate_behind(line: _Line, decided: _Decisions) -> GateSummary:
    measures = {"accuracy": line.accuracy, "rate": Estimate(line.rate)}
    return GateSummary(measures, *(_bools(decided, line.gate + ARBITER_SUFFIX, kind) for kind in ("right", "searched")))


def _signs(values: BoolArray) -> str:
    return "".join(BITS[int(value)] for value in values)


def _bools(decided: _Decisions, gate: str, kind: str) -> BoolArray | None:
    """None for what is missing or not of these questions."""
    signs = decided.gates.get(gate, {}).get(kind, "")
    return np.array([sign == BITS[1] for sign in signs]) if signs and len(signs) == len(decided.questions) else None
