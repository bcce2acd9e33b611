"""Thresholds are chosen in one place: by accuracy or, of a fit, by a loss not to be exceeded. Where nothing may be
gained by losing, the same rows get the same threshold from everybody."""

import numpy as np
import pytest

from knowgate.data.runs.table import LabelTable
from knowgate.data.splits import Split, mark_dev_rows
from knowgate.evaluation.gate_results import tune_threshold
from knowgate.gates.artifacts.gate_folder import ALWAYS_RETRIEVE, CARD_FILE
from knowgate.gates.calibration.threshold_choice import NEVER_RETRIEVE, GateOutcomes, choose_for_accuracy
from knowgate.gates.fitted_gate import describe_retrieval_rule
from knowgate.training.examples import Examples
from knowgate.training.fit_function import FitResult
from knowgate.training.gate_artifact import NEVER_RETRIEVES_NOTE, save_fitted
from knowgate.types import Reading, SignalRequest
from tests.support.runs_by_hand import row, side

# need, closed right, open right: retrieving pays above .6, and does nothing at or below .5
FOUR = ((0.2, 1, 1), (0.5, 1, 1), (0.7, 0, 1), (0.9, 0, 1))
NO_GAIN = ((0.2, 1, 1), (0.8, 0, 0))
ALL_GAIN = ((0.2, 0, 1), (0.8, 0, 1))
IDS = [f"q{i}" for i in range(40)]
DEV = [name for name, is_dev in zip(IDS, mark_dev_rows(IDS), strict=True) if is_dev]
REST = [name for name in IDS if name not in DEV]
SETTINGS = {"model": "m", "model_fingerprint": "m", "prompts_fingerprint": "p", "grader": "g", "data_fingerprint": "d"}
NONE = np.array([], dtype=np.int64)


def needs(table):
    return np.array([need for need, _, _ in table])


def trial(table, ids):
    rows = [row(name, side(bool(c)), side(bool(o))) for name, (_, c, o) in zip(ids, table, strict=False)]
    return LabelTable(rows, [Reading()] * len(rows), SETTINGS)


def by_calibration(table, tmp_path):
    _, closed, opened = zip(*table, strict=True)
    return choose_for_accuracy(GateOutcomes(needs(table), np.array(closed, dtype=bool), np.array(opened, dtype=bool)))


def by_evaluation(table, tmp_path):
    """The table on the dev rows, and one row more to realise the threshold on."""
    whole = trial([*table, (0.5, 1, 1)], [*DEV[: len(table)], REST[0]])
    return tune_threshold(whole, np.append(needs(table), 0.5)).threshold


def fitted(table, tmp_path):
    """A fit on fifty copies of the table: on fewer rows, no threshold is shown to be safe."""
    table = table * 50
    rows = trial(table, [f"q{i}" for i in range(len(table))])
    split = Split(train=NONE, dev=np.arange(len(table)), calibration=NONE, test=NONE)
    examples = Examples(rows, rows.open_book_right & ~rows.closed_book_right, "benefit", split)
    scores = FitResult(
        "probe", {}, frozenset(), SignalRequest(), {"x": np.zeros(1)}, lambda places: needs(table)[list(places)]
    )
    return save_fitted(scores, examples, tmp_path / "gate")


def by_fit(table, tmp_path):
    return fitted(table, tmp_path)["threshold"]


@pytest.mark.parametrize("chooser", [by_calibration, by_evaluation, by_fit])
@pytest.mark.parametrize(("table", "threshold"), [(FOUR, 0.6), (NO_GAIN, NEVER_RETRIEVE), (ALL_GAIN, ALWAYS_RETRIEVE)])
def test_fit_calibrate_and_evaluate_choose_the_same_threshold(chooser, table, threshold, tmp_path):
    assert chooser(table, tmp_path) == threshold


@pytest.mark.parametrize(
    ("table", "rule"), [(FOUR, "when need is above 0.6"), (NO_GAIN, "never"), (ALL_GAIN, "always")]
)
def test_the_card_says_when_the_gate_retrieves(table, rule, tmp_path):
    report = fitted(table, tmp_path)
    text = (tmp_path / "gate" / CARD_FILE).read_text(encoding="utf-8")
    assert describe_retrieval_rule(report["threshold"]) == rule
    assert f"| retrieves, as fitted | {rule} |" in text
    assert (NEVER_RETRIEVES_NOTE in text) == (rule == "never")
