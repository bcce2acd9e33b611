"""The verb `calibrate`: gates in every form, the threshold written or not, what comes back."""

from dataclasses import replace

import pytest

from knowgate.data.runs.folder import RunFolder
from knowgate.data.runs.rows import GradedAnswer
from knowgate.errors import BadSetting
from knowgate.gates import load_gate
from knowgate.gates.calibration.threshold_calibration import calibrate
from knowgate.types import Gate, SignalRequest
from tests.support.hand_gate import varied_rows, write_gate, write_rows


class Half(Gate):
    """A gate of the user's own: needs follow the number in the question's id."""

    name = "half"
    needs = frozenset()
    request = SignalRequest()
    threshold = 0.5

    def score(self, questions, readings):
        return [int(question.id.split("-")[1]) % 2 for question in questions]


@pytest.fixture
def gate(tmp_path):
    return write_gate(tmp_path / "gate")


@pytest.fixture
def run(tmp_path):
    return write_rows(tmp_path / "run", varied_rows(300))


def test_the_threshold_is_written_and_the_gate_comes_back_with_it(gate, run):
    calibration = calibrate(gate, run, max_loss=0.1, confidence=0.9)
    assert load_gate(str(gate)).threshold == calibration.threshold
    assert calibration.gate.threshold == calibration.threshold
    assert calibration.evidence["delta"] == pytest.approx(0.1)


def test_a_gate_object_keeps_its_threshold(gate, run):
    held = load_gate(str(gate))
    calibration = calibrate(held, RunFolder(run), retrieval_rate=0.2)
    assert held.threshold == 0.5
    assert calibration.gate.threshold == load_gate(str(gate)).threshold > 0.5


def test_a_gate_object_and_its_folder_calibrate_to_the_same_threshold(gate, run, tmp_path):
    by_folder = calibrate(str(gate), [run], best_accuracy=True, out=tmp_path / "a")
    in_hand = calibrate(load_gate(str(gate)), [str(run)], best_accuracy=True, out=tmp_path / "b")
    assert by_folder.evidence == in_hand.evidence
    assert by_folder.threshold == in_hand.threshold


def test_a_copy_leaves_the_gate_as_it_is(gate, run, tmp_path):
    calibration = calibrate(gate, run, retrieval_rate=0.2, out=tmp_path / "copy")
    assert load_gate(str(gate)).threshold == 0.5
    assert calibration.gate.artifact.path == tmp_path / "copy"
    assert calibration.gate.threshold == calibration.threshold


def test_a_gate_that_is_not_fitted_keeps_its_threshold(run):
    plain = load_gate("logprob:first")
    by_spec, in_hand = (calibrate(one, run, retrieval_rate=0.5) for one in ("logprob:first", plain))
    assert by_spec.threshold == in_hand.threshold
    assert by_spec.gate.threshold == 0.5
    assert in_hand.gate is plain


def test_a_gate_written_by_the_user_can_be_calibrated(run):
    calibration = calibrate(Half(), run, best_accuracy=True, held_out=0)
    assert calibration.held_out is None
    assert calibration.chosen.n == 300


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "0 of `max_loss`, "),
        ({"max_loss": 0.1, "retrieval_rate": 0.5}, "2 of `max_loss`, "),
        ({"retrieval_rate": 0.5, "confidence": 0.9}, "`confidence` have an effect only with `max_loss`"),
        ({"best_accuracy": True, "held_out": 1.0}, "held_out=1.0 is not allowed"),
    ],
)
def test_contradictory_targets_are_rejected(gate, run, options, message):
    with pytest.raises(BadSetting, match=message):
        calibrate(gate, run, **options)


def test_a_gate_that_is_not_fitted_cannot_be_copied_to_a_folder(run, tmp_path):
    with pytest.raises(BadSetting, match=r"gate 'logprob' is not fitted.* Remove `out`"):
        calibrate(load_gate("logprob"), run, best_accuracy=True, out=tmp_path / "x")


# --- what it shows of itself ----------------------------------------------------------------------


def test_a_calibration_prints_its_sentence_and_table(gate, run):
    calibration = calibrate(gate, run, retrieval_rate=0.5)
    first, second, *rows = repr(calibration).splitlines()
    assert first == f"<Calibration of gate: For a retrieval rate of 50 %: threshold {calibration.threshold:g}.>"
    assert second.split() == ["chosen", "on", "held", "out"]
    assert rows[1].split() == ["questions", str(calibration.chosen.n), str(calibration.held_out.n)]


def test_in_a_notebook_it_is_a_table(gate, run):
    shown = calibrate(gate, run, retrieval_rate=0.5)._repr_html_()
    assert shown.startswith("<p>gate: For a retrieval rate of 50 %")
    assert shown.count("<tr>") == 10


def test_the_share_of_changed_answers_is_bounded_on_held_out_questions(gate, tmp_path):
    rows = [
        replace(row, open=GradedAnswer("so it is" if row.closed.correct else "no", correct=True))
        for row in varied_rows(300)
    ]
    calibration = calibrate(gate, write_rows(tmp_path / "run", rows), retrieval_rate=0.2)
    changed = calibration.evidence["changed"]
    # Answers differ exactly where the closed-book answer is wrong, so changed answers are the harmed ones.
    assert (changed["n"], changed["changed"]) == (calibration.held_out.n, calibration.held_out.harmed)
    assert 0 < changed["changed"] / changed["n"] < changed["bound"] < 1
    assert changed["delta"] == pytest.approx(0.025)
    assert load_gate(str(gate)).artifact.manifest["budget"]["changed"] == changed


def test_answers_that_both_abstain_are_not_changed(gate, tmp_path):
    unknown = {"closed": "I don't know.", "open": "The passages do not mention it."}
    rows = [
        replace(row, **{name: replace(getattr(row, name), text=text) for name, text in unknown.items()})
        for row in varied_rows(300)
    ]
    changed = calibrate(gate, write_rows(tmp_path / "run", rows), retrieval_rate=0.2).evidence["changed"]
    assert (changed["n"] > 0, changed["changed"]) == (True, 0)


def test_without_held_out_questions_there_is_no_bound_on_changed_answers(gate, run):
    assert calibrate(gate, run, retrieval_rate=0.2, held_out=0).evidence["changed"] is None
