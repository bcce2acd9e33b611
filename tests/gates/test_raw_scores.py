"""A fitted gate keeps its raw score beside the calibrated need, and can decide by it."""

import json
import math

import numpy as np
import pytest

from knowgate.data.runs.records import RecordedNeeds, read_needs, write_needs
from knowgate.data.runs.table import load_label_table
from knowgate.errors import ArtifactError, BadSetting
from knowgate.evaluation.gate_evaluation import evaluate
from knowgate.gates import load_gate
from knowgate.gates.calibration.threshold_calibration import calibrate
from knowgate.gates.fitted_gate import FittedGate
from knowgate.gates.offline_scoring import score_gate
from knowgate.papers.sweeps import sweep_betas
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.answer_json import decision_record
from knowgate.types import Completion, Question, Reading, Token
from tests.support.hand_gate import MODEL, SHIFT, graded_row, write_gate, write_rows

HALVED = {"kind": "isotonic", "x": [0.0, 1.0], "y": [0.0, 0.5]}


def readings(*raws):
    drafts = [(Token("so", -SHIFT - math.log(raw / (1 - raw)), entropy=0.5, margin=0.5),) for raw in raws]
    return [Reading(draft=Completion("so", tokens)) for tokens in drafts]


def asked(n):
    return [Question(f"question {i}?") for i in range(n)]


def test_raw_scores_are_the_input_of_calibration(tmp_path):
    gate = load_gate(str(write_gate(tmp_path / "mine", calibration=HALVED)))
    assert gate.raw_scores(asked(2), readings(0.2, 0.8)) == pytest.approx([0.2, 0.8])
    assert gate.score(asked(2), readings(0.2, 0.8)) == pytest.approx([0.1, 0.4])


def test_needs_and_raw_scores_come_from_one_call(tmp_path):
    calls = []

    class CountedGate(type(load_gate(str(write_gate(tmp_path / "mine", calibration=HALVED))))):
        def raw(self, questions, readings):
            calls.append(len(questions))
            return super().raw(questions, readings)

    both = CountedGate.load(str(tmp_path / "mine")).score_with_raw(asked(3), readings(0.2, 0.5, 0.8))
    assert both.needs == pytest.approx([0.1, 0.25, 0.4])
    assert both.raw == pytest.approx([0.2, 0.5, 0.8])
    assert calls == [3]


def test_the_own_verdict_is_the_raw_score_at_one_half(tmp_path):
    folder = write_gate(tmp_path / "mine", calibration=HALVED, threshold=0.9)
    gate = load_gate(f"{folder},verdict=own")
    assert isinstance(gate, FittedGate)
    assert gate.score(asked(2), readings(0.2, 0.8)) == pytest.approx([0.2, 0.8])
    assert gate.threshold == 0.5
    assert load_gate(f"{folder},verdict=need").threshold == 0.9


@pytest.mark.parametrize("option", ["verdict=mine", "k=3", "own"])
def test_another_option_of_a_fitted_gate_is_rejected(tmp_path, option):
    folder = write_gate(tmp_path / "mine")
    with pytest.raises(BadSetting, match="Allowed: verdict=need or verdict=own"):
        load_gate(f"{folder},{option}")


def test_only_decisions_of_fitted_gates_have_a_raw_score(tmp_path):
    gate = load_gate(str(write_gate(tmp_path / "mine", calibration=HALVED)))
    record = decision_record(AdaptiveRAG(MODEL, gate).decide("why?"))
    assert record["need"] == pytest.approx(record["raw"] / 2, abs=1e-6)
    assert "raw" not in decision_record(AdaptiveRAG(MODEL, load_gate("logprob:mean")).decide("why?"))


def test_no_threshold_is_chosen_for_the_raw_score(tmp_path):
    folder = write_gate(tmp_path / "mine")
    run = write_rows(tmp_path / "run", [graded_row("a", 0.8, False, True)])
    for given in (f"{folder},verdict=own", load_gate(f"{folder},verdict=own")):
        with pytest.raises(BadSetting, match="the option verdict=own selects the uncalibrated score"):
            calibrate(given, run, best_accuracy=True)


def test_tables_distinguish_the_two_verdicts(tmp_path):
    folder = write_gate(tmp_path / "mine", calibration=HALVED)
    trial = load_label_table([write_rows(tmp_path / "run", [graded_row("a", 0.8, False, True)])])
    calibrated, own = score_gate(trial, str(folder)), score_gate(trial, f"{folder},verdict=own")
    assert (calibrated.gate, own.gate) == ("mine", "mine,verdict=own")
    assert calibrated.needs.tolist() == pytest.approx([0.4])
    assert own.needs.tolist() == calibrated.raw.tolist() == pytest.approx([0.8])


def test_beta_is_swept_over_the_raw_confidence(tmp_path):
    """Conf .96 is above beta .95; the calibrated need of .02 would be too, that of .5 for Conf 0 would skip at .5."""
    folder = write_gate(tmp_path / "mine", calibration=HALVED)
    rows = [graded_row("a", 0.04, True, True), graded_row("b", 0.999, False, True)]
    trial = load_label_table([write_rows(tmp_path / "run", rows)])
    table = sweep_betas(trial, score_gate(trial, str(folder)), betas=(0.5, 0.95, 0.98))
    assert "raw confidence" in table.title
    assert [row[1] for row in table.rows] == ["50.0 %", "50.0 %", "100.0 %", "0.0 %"]


# --- on record ------------------------------------------------------------------------------------


def test_raw_scores_are_recorded_with_the_needs(tmp_path):
    run = write_rows(tmp_path / "run", [graded_row(name, 0.8, False, True) for name in "ab"])
    write_needs(run, [RecordedNeeds("judge", 0.5, {"a": 0.1, "b": 0.2}, raw={"a": 0.91, "b": 0.92})])
    assert read_needs(run)[0].raw == {"a": 0.91, "b": 0.92}
    trial = load_label_table([run])
    assert np.allclose(score_gate(trial, "judge").raw, [0.91, 0.92])


def test_raw_scores_of_other_questions_than_the_needs_are_rejected(tmp_path):
    run = write_rows(tmp_path / "run", [graded_row("a", 0.8, False, True)])
    line = {"gate": "judge", "threshold": 0.5, "needs": {"a": 0.1}, "raw": {"b": 0.1}}
    (run / "needs.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ArtifactError, match="must have a calibrated and a raw score for every question"):
        read_needs(run)


def test_an_evaluation_records_raw_scores(tmp_path):
    folder = write_gate(tmp_path / "mine", calibration=HALVED)
    run = write_rows(tmp_path / "run", [graded_row("a", 0.8, False, True), graded_row("b", 0.2, True, True)])
    evaluate([str(folder), "logprob:mean"], run, record=True, resamples=0)
    kept = {item.gate: item for item in read_needs(run)}
    assert kept["mine"].raw == pytest.approx({"a": 0.8, "b": 0.2})
    assert kept["mine"].needs == pytest.approx({"a": 0.4, "b": 0.1})
    assert kept["logprob:mean"].raw == {}
