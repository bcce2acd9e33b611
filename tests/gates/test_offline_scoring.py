"""Copies of a fitted gate that differ in their threshold are asked once; what differs otherwise is asked anew."""

import shutil

import pytest

from knowgate.data.runs.folder import RunFolder
from knowgate.data.runs.records import RecordedNeeds, write_needs
from knowgate.data.runs.table import load_label_table
from knowgate.errors import BadSetting, UnknownName
from knowgate.gates.fusion import FusionGate
from knowgate.gates.offline_scoring import save_scores, score_gates
from tests.support.hand_gate import varied_rows, write_gate, write_rows


@pytest.fixture
def trial(tmp_path):
    return load_label_table([write_rows(tmp_path / "run", varied_rows(30))], layers=())


@pytest.fixture
def asked(monkeypatch):
    """The folders whose gates were asked."""
    names, raw = [], FusionGate.raw

    def counted(self, questions, readings):
        names.append(self.artifact.path.name)
        return raw(self, questions, readings)

    monkeypatch.setattr(FusionGate, "raw", counted)
    return names


def test_a_gate_with_another_threshold_is_not_scored_again(tmp_path, trial, asked):
    gates = [write_gate(tmp_path / f"at-{at}", threshold=at) for at in (0.2, 0.8)]
    low, high = score_gates(trial, [str(gate) for gate in gates])
    assert asked == ["at-0.2"]
    assert (low.gate, low.threshold, high.gate, high.threshold) == ("at-0.2", 0.2, "at-0.8", 0.8)
    assert low.needs.tolist() == high.needs.tolist()


def test_another_calibration_is_scored_again(tmp_path, trial, asked):
    plain = write_gate(tmp_path / "plain")
    mapped = write_gate(tmp_path / "mapped", calibration={"kind": "platt", "a": 2.0, "b": 0.1})
    first, second = score_gates(trial, [str(plain), str(mapped)])
    assert asked == ["plain", "mapped"]
    assert first.needs.tolist() != second.needs.tolist()


def test_training_questions_of_a_copy_are_still_rejected(tmp_path, trial):
    plain = write_gate(tmp_path / "plain")
    learnt = write_gate(tmp_path / "learnt", seen=[trial.questions[0].text], threshold=0.7)
    with pytest.raises(BadSetting, match="was fitted on"):
        score_gates(trial, [str(plain), str(learnt)])


def recorded(folder, gate):
    """The trial with what the gate says on record."""
    run = write_rows(folder / "run", varied_rows(30))
    fresh = load_label_table([run], layers=())
    save_scores(fresh, score_gates(fresh, [str(gate)]))
    return load_label_table([run], layers=())


def test_recorded_needs_are_not_computed_again(tmp_path, monkeypatch, asked):
    monkeypatch.chdir(tmp_path)
    write_gate(tmp_path / "mine")
    trial = recorded(tmp_path, "mine")
    asked.clear()
    write_gate(tmp_path / "mine", threshold=0.9)  # calibrated since: the same needs
    [found] = score_gates(trial, ["mine"])
    assert (asked, found.threshold) == ([], 0.9)


def test_another_gate_in_a_folder_of_the_recorded_name_is_scored_again(tmp_path, monkeypatch, asked):
    monkeypatch.chdir(tmp_path)
    write_gate(tmp_path / "mine")
    trial = recorded(tmp_path, "mine")
    asked.clear()
    write_gate(tmp_path / "mine", calibration={"kind": "platt", "a": 2.0, "b": 0.1})
    [found] = score_gates(trial, ["mine"])
    assert asked == ["mine"]
    assert found.needs.tolist() != trial.recorded_needs["mine"].needs.tolist()


def test_without_a_folder_the_recorded_needs_are_used(tmp_path, monkeypatch, asked):
    monkeypatch.chdir(tmp_path)
    trial = recorded(tmp_path, write_gate(tmp_path / "mine"))
    shutil.rmtree(tmp_path / "mine")
    asked.clear()
    [found] = score_gates(trial, ["mine"])
    assert (asked, found.gate) == ([], "mine")


def test_a_recorded_gate_can_decide_by_its_raw_scores(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_gate(tmp_path / "mine", threshold=0.3, calibration={"kind": "platt", "a": 2.0, "b": 0.1})
    trial = recorded(tmp_path, "mine")
    [live] = score_gates(trial, ["mine,verdict=own"])
    shutil.rmtree(tmp_path / "mine")
    [own] = score_gates(trial, ["mine,verdict=own"])
    assert (own.gate, own.threshold) == ("mine,verdict=own", 0.5)
    assert own.needs.tolist() == pytest.approx(live.needs.tolist(), abs=1e-6)
    assert own.needs.tolist() != score_gates(trial, ["mine"])[0].needs.tolist()


def test_the_error_about_an_unknown_gate_lists_the_recorded_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_gate(tmp_path / "recorded-gate")
    trial = recorded(tmp_path, "recorded-gate")
    shutil.rmtree(tmp_path / "recorded-gate")
    with pytest.raises(UnknownName, match=r"Did you mean 'recorded-gate'.*Known: always.*, recorded-gate, "):
        score_gates(trial, ["recorded-gates"])


@pytest.mark.parametrize(
    ("gate", "calls", "drafts"), [("kbm", 0, False), ("dhicl:k=5", 1, False), ("ik", 0, True), ("unheard-of", 0, True)]
)
def test_a_recorded_gate_costs_what_its_table_entry_needs(tmp_path, gate, calls, drafts):
    run = write_rows(tmp_path / "run", varied_rows(4))
    write_needs(run, [RecordedNeeds(gate, 0.5, {row.id: 0.9 for row in RunFolder(run).rows()})])
    (scores,) = score_gates(load_label_table([run], layers=()), [gate])
    assert (scores.calls, scores.drafts) == (calls, drafts)
