"""Summary of an evaluation, used to compare it with another one.

It is read from a report folder, computed from a label run, or taken from an evaluation in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.core.schema import read_record
from knowgate.core.validation import read_json
from knowgate.data.runs.folder import RunFolder
from knowgate.errors import BadInput
from knowgate.evaluation.gate_comparison import Evaluation
from knowgate.evaluation.gate_evaluation import GateLike, evaluate
from knowgate.evaluation.gate_results import GateResult, compute_majority_share
from knowgate.evaluation.post_retrieval import Cascade
from knowgate.evaluation.recommendation import Recommendation, recommend, recommendation_to_dict
from knowgate.stats.bootstrap import DEFAULT_RESAMPLES, Estimate, estimate_means
from knowgate.stats.metrics import BoolArray
from knowgate.training.topics import topics_to_dict

SUMMARY_FILE, DECISIONS_FILE = "summary.json", "decisions.json"
SUMMARY_MEASURES = ("accuracy", "rate", "auroc")
RECOMMENDED = "recommended"  # name of the recommended policy among the gates
ARBITER_SUFFIX = " + arbiter"  # ends the name of a gate that is followed by the arbiter


@dataclass(frozen=True)
class GateSummary:
    """Measures of one gate, and its decisions if the report contains them.

    Attributes:
        measures: Estimates by name: accuracy, rate (of retrieval) and auroc.
        right: Whether the final answer to each question is correct.
        searched: Whether the gate retrieved for each question.
    """

    measures: dict[str, Estimate]
    right: BoolArray | None = field(default=None, repr=False)
    searched: BoolArray | None = field(default=None, repr=False)


@dataclass(frozen=True)
class EvaluationSummary:
    """Results of an evaluation, as needed to compare two evaluations.

    Attributes:
        name: Folder it was read from.
        model: Name of the LLM.
        n: Number of questions.
        gates: Gates by name, including the baselines and the recommended policy.
        question_keys: Fingerprints of the questions; equal questions have equal keys.
        recommendation: The recommended gate and threshold in words, or 'no gate'.
        arbiter: Name of the arbiter, which chooses the answers of the gates whose names end in `ARBITER_SUFFIX`.
    """

    name: str
    model: str
    n: int
    gates: dict[str, GateSummary]
    question_keys: list[str] = field(default_factory=list, repr=False)
    recommendation: str = ""
    arbiter: str = ""


def load_evaluation_summary(
    path: Path, gates: Sequence[GateLike], resamples: int = DEFAULT_RESAMPLES
) -> EvaluationSummary:
    """Read the summary of a report folder, or evaluate a label run and summarize it.

    Args:
        path: Folder that `knowgate eval --out` wrote, or a label run (folder of recorded and graded answers).
        gates: Gates to evaluate on a label run. Not used for a report folder.
        resamples: Number of bootstrap resamples. Not used for a report folder.

    Raises:
        BadInput: The path is neither a report folder nor a label run.
    """
    folder = path.parent if path.name == SUMMARY_FILE else path
    if (folder / SUMMARY_FILE).is_file():
        return _read_summary(folder)
    manifest = RunFolder.manifest_name
    if not (folder / manifest).is_file():
        raise BadInput(
            f"'{path}' is neither a report nor a label run (recorded answers). It contains no {SUMMARY_FILE} and no {manifest}. "
            "Give a folder made by `knowgate eval` or `knowgate label`."
        )
    evaluation = evaluate(list(gates), folder, resamples=resamples)
    return summarize_evaluation(evaluation, recommend(evaluation), str(path))


def summarize_evaluation(evaluation: Evaluation, recommendation: Recommendation, name: str) -> EvaluationSummary:
    """Summarize an evaluation, as needed to compare it with another one.

    With an arbiter, each gate has two entries: alone, and followed by the arbiter.

    Args:
        evaluation: The evaluation.
        recommendation: Its recommendation.
        name: Name of the summary in reports.
    """
    record = {"recommendation": recommendation_to_dict(recommendation), **evaluation_to_dict(evaluation)}
    decisions = _StoredDecisions(**decisions_to_dict(evaluation, recommendation))
    return _parse_summary(record, decisions, name)


def _describe_recommendation(level: str, gate: str | None, threshold: float | None) -> str:
    """Name the recommended gate and threshold, or return 'no gate'."""
    return f"{gate} at {threshold or 0.0:.3g}" if gate and level in ("use", "try") else "no gate"


# --- as plain data --------------------------------------------------------------------------------


def evaluation_to_dict(evaluation: Evaluation) -> dict[str, Any]:
    """Convert an evaluation to plain data for summary.json. Results of single questions are left out."""
    table = evaluation.table
    optional = {  # left out if they were not evaluated
        "second_look": [asdict(result) for result in evaluation.second_looks],
        "actions": [asdict(result) for result in evaluation.actions],
        "cascade": _cascade_to_dict(evaluation.cascade) if evaluation.cascade else None,
        "topics": topics_to_dict(evaluation.topics),
    }
    return {
        "model": table.settings["model"],
        "runs": table.runs,
        "questions": len(table.rows),
        "synthetic": int(table.is_synthetic.sum()),
        "left_out": table.left_out,
        "answered closed-book for want of passages": table.n_without_passages,
        "grader": table.settings["grader"],
        "resamples": evaluation.resamples,
        "majority": compute_majority_share(table),
        "gates": [_gate_to_dict(gate) for gate in evaluation.gates],
        "comparisons": [asdict(comparison) for comparison in evaluation.comparisons],
        "slices": [asdict(part) for part in evaluation.slices],
        **{name: value for name, value in optional.items() if value},
    }


def _cascade_to_dict(cascade: Cascade) -> dict[str, Any]:
    """Convert the results with an arbiter to plain data, without the grade of each answer."""
    values = asdict(cascade)
    values["lines"] = values.pop("results")
    for result in values["lines"]:
        del result["right"]
    return values


def _gate_to_dict(gate: GateResult) -> dict[str, Any]:
    """Convert a gate's measures to plain data. 'far' is the share of questions unlike the gate's training questions."""
    frontier = gate.frontier
    return {
        "gate": gate.gate,
        "threshold": gate.threshold,
        "note": gate.scores.about,
        "far": gate.scores.far,
        **{name: asdict(value) for name, value in gate.measures.items()},
        "cost": {
            "calls": gate.cost.calls,
            "retrievals": gate.cost.searches,
            "tokens": gate.cost.completion,
            "seconds": gate.cost.decision_seconds,
        },
        "accuracy_at_rate": {f"{rate:.2f}": accuracy for rate, accuracy in gate.at_rate.items()},
        "area": frontier.area if frontier else None,
        "random_area": frontier.random_area if frontier else None,
        "tuned": asdict(gate.tuned) if gate.tuned else None,
    }


# --- files ----------------------------------------------------------------------------------------


def decisions_to_dict(evaluation: Evaluation, recommendation: Recommendation) -> dict[str, Any]:
    """Build the content of decisions.json.

    For each gate, the texts 'right' and 'searched' have a digit per question: 1 if the answer is right or a search was
    made, else 0.
    """
    gates = {result.gate: _encode_decisions(result.right, result.retrieve) for result in evaluation.gates}
    for result in evaluation.cascade.results if evaluation.cascade else []:
        searched = evaluation.gate(result.gate).retrieve
        gates[result.gate + ARBITER_SUFFIX] = _encode_decisions(result.right, searched)
    if recommendation.is_positive:
        gates[RECOMMENDED] = _encode_decisions(recommendation.right, searched=~recommendation.skips)
    elif evaluation.has_open_answers:
        gates[RECOMMENDED] = gates["always"]
    return {"questions": tuple(evaluation.table.question_fingerprints.tolist()), "gates": gates}


def _encode_decisions(right: BoolArray, searched: BoolArray) -> dict[str, str]:
    """Write the flags of all questions as two texts such as '0110'."""
    flags = {"right": right, "searched": searched}
    return {name: "".join("1" if flag else "0" for flag in values) for name, values in flags.items()}


@dataclass(frozen=True)
class _StoredDecisions:
    """Content of decisions.json.

    Attributes:
        questions: Fingerprints of the questions.
        gates: For each gate, two texts such as '0110' with a digit per question. 'right' has a 1 if the answer is right,
            'searched' has a 1 if a search was made.
    """

    questions: tuple[str, ...] = ()
    gates: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def get(self, gate: str, kind: str) -> BoolArray | None:
        """Return the flags 'right' or 'searched' of a gate; None unless there is one per question."""
        bits = self.gates.get(gate, {}).get(kind, "")
        if not bits or len(bits) != len(self.questions):
            return None
        return np.array([bit == "1" for bit in bits])

    def summarize(self, gate: str, measures: dict[str, Estimate]) -> GateSummary:
        """Combine a gate's measures with its decisions."""
        return GateSummary(measures, self.get(gate, "right"), self.get(gate, "searched"))


def _read_summary(folder: Path) -> EvaluationSummary:
    """Read the summary of an evaluation from a report folder: summary.json and, if it exists, decisions.json.

    Raises:
        BadInput: The files do not describe an evaluation.
    """
    decisions = _StoredDecisions()  # empty, if the folder has no decisions.json
    file = folder / DECISIONS_FILE
    if file.is_file():
        decisions = read_record(_StoredDecisions, read_json(file), str(file))
    record = read_json(folder / SUMMARY_FILE)
    try:
        return _parse_summary(record, decisions, str(folder))
    except (KeyError, TypeError, AttributeError):
        raise BadInput(
            f"{folder / SUMMARY_FILE} does not contain an evaluation summary. Give a report folder made by `knowgate eval`."
        ) from None


def _parse_summary(record: Any, decisions: _StoredDecisions, name: str) -> EvaluationSummary:
    """Make a summary from the content of summary.json and the stored decisions."""
    cascade = record.get("cascade") or {"arbiter": "", "lines": []}
    recommended = record.get("recommendation") or {"light": "unknown", "gate": None, "threshold": None}
    return EvaluationSummary(
        name=name,
        model=record["model"],
        n=len(decisions.questions) or record["questions"],
        gates=_parse_gates(record["gates"], cascade["lines"], decisions),
        question_keys=list(decisions.questions),
        recommendation=_describe_recommendation(recommended["light"], recommended["gate"], recommended["threshold"]),
        arbiter=cascade["arbiter"],
    )


def _parse_gates(
    gate_records: list[Any], cascade_records: list[Any], decisions: _StoredDecisions
) -> dict[str, GateSummary]:
    """Make the summaries of all gates, with and without the arbiter, and of the recommendation."""
    gates = {}
    for gate in gate_records:
        measures = {key: Estimate(**gate[key]) for key in SUMMARY_MEASURES if key in gate}
        gates[gate["gate"]] = decisions.summarize(gate["gate"], measures)
    for line in cascade_records:
        gate_name = line["gate"] + ARBITER_SUFFIX
        measures = {"accuracy": Estimate(**line["accuracy"]), "rate": Estimate(line["rate"])}
        gates[gate_name] = decisions.summarize(gate_name, measures)
    right, searched = decisions.get(RECOMMENDED, "right"), decisions.get(RECOMMENDED, "searched")
    if right is not None and searched is not None:
        accuracy, rate = estimate_means([right.astype(float), searched.astype(float)])
        gates[RECOMMENDED] = GateSummary({"accuracy": accuracy, "rate": rate}, right, searched)
    return gates
