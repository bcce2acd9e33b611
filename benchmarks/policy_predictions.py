"""Read the recorded predictions of the policy benchmark, and turn them into candidates for a policy."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.policy_sets import RECORDED_SETS
from knowgate.stats.metrics import sigmoid
from knowgate.training.classifiers import fit_platt_scaling
from knowgate.training.policy.outcomes import ArbiterCandidate, GateCandidate

HOME = Path(__file__).parent / "runs" / "policy"
MIXED = "mixed"
MIXED_SETS = ("davinci3_nq", "gpt3_realtimeqa")
QUESTION, ANSWER, BOTH = 0, 1, 2  # what an adapter has read
CLOSED, OPEN = 0, 1  # whose answer it predicts to be right
MEMBERS = 4
POOLED = "pooled"  # adapters that learned from the rows of all recorded LLMs
UNUSED = -2
RECORDED_ARBITER = "arbiter on record"
Floats = np.ndarray[Any, np.dtype[np.float64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class Predictions:
    """Rows of one recorded set, with the logits of one judge.

    Attributes:
        sets: Name of the recorded set of each row.
        folds: Fold of each row; -1 for test rows, -2 for train rows without a choice of the arbiter on record.
        closed: Whether the closed-book answer is right.
        open: Whether the open-book answer is right.
        rules: Whether the free rules give the closed-book answer.
        arbiter: Whether the arbiter on record gives the closed-book answer; for Llama-3.1-8B only, otherwise False.
        logits: Row, what was read (question, closed-book answer, both answers), whose answer is right.
    """

    sets: np.ndarray[Any, Any]
    folds: np.ndarray[Any, np.dtype[np.int64]]
    closed: Bools
    open: Bools
    rules: Bools
    arbiter: Bools
    logits: Floats

    def select(self, rows: Bools) -> Predictions:
        """Return the rows that are marked True."""
        return Predictions(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    @property
    def train(self) -> Predictions:
        """The train rows."""
        return self.select(self.folds >= 0)

    @property
    def test(self) -> Predictions:
        """The test rows."""
        return self.select(self.folds == -1)


@cache
def load_predictions(name: str, judge: str = "") -> Predictions:
    """Load the rows of a recorded set, or of mixed traffic, with the logits of a judge (default: its own)."""
    names = MIXED_SETS if name == MIXED else (name,)
    rows: list[tuple[str, dict[str, Any]]] = []
    for each in names:
        with gzip.open(HOME / f"{each}.jsonl.gz", "rt", encoding="utf-8") as lines:
            rows += [(each, json.loads(line)) for line in lines]
    logits = [row[judge or name] for _, row in rows]
    return Predictions(
        np.array([each for each, _ in rows]),
        np.array([row["fold"] if row.get("arbiter", 0) is not None else UNUSED for _, row in rows]),
        *(np.array([bool(row.get(key)) for _, row in rows]) for key in ("closed", "open", "rules", "arbiter")),
        np.array(logits).reshape(len(rows), 3, 2),
    )


@dataclass(frozen=True)
class Calibration:
    """Platt scaling of each of a judge's logits, fitted on train rows."""

    slopes: Floats
    shifts: Floats

    def apply(self, logits: Floats) -> Floats:
        """Return probabilities."""
        return np.asarray(sigmoid(self.slopes * logits + self.shifts))


@cache
def fit_calibration(name: str, judge: str = "") -> Calibration:
    """Fit the calibration of a judge (default: the set's own) on the train rows of a recorded set."""
    train = load_predictions(name, judge).train
    slopes, shifts = np.ones((3, 2)), np.zeros((3, 2))
    for read in range(3):
        for side, right in ((CLOSED, train.closed), (OPEN, train.open)):
            platt = fit_platt_scaling(np.asarray(sigmoid(train.logits[:, read, side])), right)
            if platt["kind"] == "platt":
                slopes[read, side], shifts[read, side] = platt["a"], platt["b"]
    return Calibration(slopes, shifts)


def make_gates(rows: Predictions, calibration: Calibration) -> list[GateCandidate]:
    """Make the gates of the protocol: by expected gain and by what is known, from the question and from the answer."""
    known = calibration.apply(rows.logits)
    gates = []
    for name, read in (("question", QUESTION), ("judge", ANSWER)):
        gain = (known[:, read, OPEN] - known[:, read, CLOSED] + 1) / 2
        costs = {"reads_draft": read == ANSWER, "models": MEMBERS}
        gates.append(GateCandidate(f"{name}, gain", gain, **costs))
        gates.append(GateCandidate(f"{name}, known", 1 - known[:, read, CLOSED], **costs))
    mean_gain = (known[:, :BOTH, OPEN] - known[:, :BOTH, CLOSED]).mean(axis=1)
    gates.append(GateCandidate("judge, mean gain", (mean_gain + 1) / 2, **costs))
    return gates


def make_arbiters(rows: Predictions, calibration: Calibration) -> list[ArbiterCandidate]:
    """Make the arbiters: the free rules, and the adapters, which are those of the gate and count as no further model."""
    known = calibration.apply(rows.logits)[:, BOTH]
    adapter = known[:, CLOSED] > known[:, OPEN]
    arbiters = [ArbiterCandidate("rules", rows.rules), ArbiterCandidate("adapter", adapter)]
    if rows.arbiter.any():
        arbiters.append(ArbiterCandidate(RECORDED_ARBITER, rows.arbiter, models=MEMBERS))
    return arbiters


@cache
def has_pooled() -> bool:
    """Return whether the predictions of the pooled adapters are on record."""
    with gzip.open(HOME / "gpt4_nq.jsonl.gz", "rt", encoding="utf-8") as lines:
        return POOLED in json.loads(next(lines))


def list_trained_sets() -> list[str]:
    """List the recorded sets that have train rows."""
    return [name for name, recorded in RECORDED_SETS.items() if "train" in recorded.splits]
