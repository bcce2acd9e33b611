"""The verb `evaluate`: gates and runs in every form, and fresh questions."""

from pathlib import Path

import pytest

from knowgate.data.runs.folder import RunFolder
from knowgate.data.runs.records import read_needs
from knowgate.data.signals.confidence import ASSESSMENT_LABELS
from knowgate.errors import BadSetting, UnknownName, UnsupportedSignal
from knowgate.evaluation.gate_evaluation import evaluate
from knowgate.gates import load_gate
from knowgate.models import load_model
from knowgate.models.prompts.answers import load_answer_prompts
from knowgate.models.prompts.questions import build_self_assessment_prompt
from knowgate.types import Gate, Signal, SignalRequest
from tests.support.hand_gate import varied_rows, write_gate, write_rows
from tests.support.invented import write_invented
from tests.support.trials_by_hand import trial_run, varied_run


class Numbered(Gate):
    """A gate of the user's own: retrieves for questions with an even number."""

    name = "numbered"
    needs = frozenset()
    request = SignalRequest()
    threshold = 0.5

    def __init__(self, high=1.0):
        self.high, self.asked = high, 0

    def score(self, questions, readings):
        self.asked += len(questions)
        return [self.high if int(question.id.lstrip("q")) % 2 == 0 else 0.0 for question in questions]


def names(evaluation):
    return [gate.gate for gate in evaluation.gates if gate.gate not in ("never", "always", "oracle")]


# --- recorded rows --------------------------------------------------------------------------------


def test_stored_gates_are_evaluated_by_name_or_with_auto(tmp_path):
    run = trial_run(tmp_path / "run")
    assert names(evaluate(["good"], run, resamples=10)) == ["good"]
    assert names(evaluate("good", RunFolder(run), resamples=10)) == ["good"]
    assert names(evaluate(runs=[str(run)], resamples=10)) == ["good", "poor"]


def test_a_custom_gate_is_evaluated(tmp_path):
    evaluation = evaluate([Numbered(), "good"], trial_run(tmp_path / "run"), resamples=10)
    # retrieves for q0 (kept) and q2 (hurt), skips q1 (closed-book wrong) and q3 (hopeless): one right of four
    assert evaluation.gate("numbered").measures["accuracy"].value == 0.25
    assert evaluation.gate("numbered").measures["rate"].value == 0.5


def test_gates_with_the_same_name_are_numbered(tmp_path):
    evaluation = evaluate([Numbered(), Numbered(0.4)], trial_run(tmp_path / "run"), resamples=10)
    assert names(evaluation) == ["numbered", "numbered (2)"]
    assert evaluation.gate("numbered (2)").measures["rate"].value == 0.0


def test_a_loaded_gate_gives_the_same_evaluation_as_its_folder(tmp_path):
    folder = write_gate(tmp_path / "mine")
    run = write_rows(tmp_path / "run", varied_rows(50))
    in_hand, by_path = (evaluate([one], run, resamples=10).gate("mine") for one in (load_gate(str(folder)), folder))
    assert in_hand.measures == by_path.measures


def test_training_questions_of_a_loaded_gate_are_rejected_or_left_out(tmp_path):
    rows = varied_rows(50)
    gate = load_gate(str(write_gate(tmp_path / "mine", seen=[row.question for row in rows[:10]])))
    run = write_rows(tmp_path / "run", rows)
    with pytest.raises(BadSetting, match="was fitted on 10 of these 50 questions"):
        evaluate([gate], run)
    assert len(evaluate([gate], run, drop_seen=True, resamples=10).table.rows) == 40


def test_an_unknown_gate_raises_an_error_that_lists_the_evaluated_ones(tmp_path):
    evaluation = evaluate("good", trial_run(tmp_path / "run"), resamples=0)
    with pytest.raises(UnknownName, match="Did you mean 'good'"):
        evaluation.gate("goot")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either `runs` "),
        ({"runs": "a", "data": "jsonl:q.jsonl"}, "either `runs` "),
        ({"data": "jsonl:q.jsonl"}, "the answers to `data` need a folder"),
        ({"gates": [], "runs": "a"}, "no gate is given"),
        ({"data": " , ", "out": "x"}, "names no questions"),
    ],
)
def test_invalid_calls_are_explained(options, message):
    with pytest.raises(BadSetting, match=message):
        evaluate(**options)


# --- fresh questions ------------------------------------------------------------------------------


@pytest.fixture
def setup(tmp_path):
    return write_invented(tmp_path / "in", 12)


def test_new_questions_are_answered_and_stored(setup, tmp_path):
    asked = {"data": setup.questions, "model": load_model(setup.model), "out": tmp_path / "out", "resamples": 10}
    evaluation = evaluate(["prompt", "logprob:mean"], **asked)
    assert len(evaluation.table.rows) == 12
    assert evaluation.gate("prompt").measures["auroc"].value == 1.0
    assert {item.gate for item in read_needs(tmp_path / "out" / "runs" / "questions")} == {"prompt", "logprob:mean"}


def test_a_gate_object_decides_again_and_a_spec_does_not(setup, tmp_path):
    own = Numbered()
    asked = {"data": setup.data, "model": setup.model, "out": tmp_path / "out", "resamples": 10}
    first = evaluate([own, "prompt"], **asked)
    timed = first.gate("prompt").cost.decision_seconds
    second = evaluate([own, "prompt"], **asked)
    assert own.asked == 24
    assert second.gate("prompt").cost.decision_seconds == timed


def test_a_recalibrated_folder_decides_again(setup, tmp_path):
    asked = {"data": setup.data, "model": setup.model, "out": tmp_path / "out", "resamples": 10}
    own = load_model(setup.model)
    folder = tmp_path / "mine"
    for threshold in (0.25, 0.75):
        write_gate(folder, threshold=threshold, model={"name": own.name, "fingerprint": own.fingerprint})
        assert evaluate([folder], **asked).gate(str(folder)).threshold == threshold


def test_gates_with_the_same_name_are_stored_separately(setup, tmp_path):
    evaluation = evaluate(
        [Numbered(), Numbered(0.4)], data=setup.data, model=setup.model, out=tmp_path / "out", resamples=10
    )
    assert names(evaluation) == ["numbered", "numbered (2)"]


def test_new_questions_are_answered_with_the_named_prompts(setup, tmp_path):
    asked = {"data": setup.data, "model": setup.model, "out": tmp_path / "out", "resamples": 10}
    settings = evaluate("prompt", prompts="free", **asked).table.settings
    assert settings["prompts_fingerprint"] == load_answer_prompts(Path("free")).fingerprint


def test_several_data_specs_are_one_evaluation(setup, tmp_path):
    other = write_invented(tmp_path / "more", 4)
    both = f"{setup.data}, {other.data}"
    assert len(evaluate("prompt", data=both, model=setup.model, out=tmp_path / "out", resamples=10).table.rows) == 16


# --- what it shows of itself ----------------------------------------------------------------------


def test_it_prints_a_table_of_its_gates(tmp_path):
    first, head, *rows = repr(evaluate(["good"], trial_run(tmp_path / "run"), resamples=0)).splitlines()
    assert first == "<Evaluation on 4 questions of fake (run)>"
    assert head.split() == ["gate", "threshold", "accuracy", "retrieval", "LLM", "calls", "against", "always", "AUROC"]
    assert rows[2].split() == ["good", "0.5", "75.0", "%", "50.0", "%", "1.50", "+25.0", "1.000"]


def test_in_a_notebook_it_shows_the_table_and_a_curve_for_each_gate(tmp_path):
    shown = evaluate(runs=varied_run(tmp_path / "run"), resamples=10)._repr_html_()
    assert "matched random" in shown
    assert shown.count("<polyline") == 4  # good, poor, random, oracle
    assert shown.count("<circle") == 2


def test_without_open_book_answers_it_shows_how_the_gates_rank(tmp_path):
    from tests.support.runs_by_hand import row, side

    evaluation = evaluate(["good"], trial_run(tmp_path / "run", [row(f"q{i}", side(i < 2)) for i in range(4)]))
    assert repr(evaluation).splitlines()[1].split() == ["gate", "AUROC"]
    assert "<svg" not in evaluation._repr_html_()


def test_names_from_data_are_escaped(tmp_path):
    run = trial_run(tmp_path / "run", model="<script>")
    assert "<script>" not in evaluate(["good"], run, resamples=0)._repr_html_()


# --- recorded rows, with their LLM at hand --------------------------------------------------------


class Asking(Gate):
    """Asks the LLM in words of its own, which no row holds."""

    name = "asking"
    needs = frozenset({Signal.LABELS})
    labels = ASSESSMENT_LABELS

    def __init__(self):
        self.asked = 0

    def build_label_prompts(self, questions, readings):
        self.asked += len(questions)
        return [build_self_assessment_prompt(question, *self.labels) for question in questions]

    def score(self, questions, readings):
        return [float(reading.labels[self.name][-1][0] < reading.labels[self.name][-1][1]) for reading in readings]


@pytest.fixture
def answered(setup, tmp_path):
    """A run of answers without any gate's decision."""
    evaluate("logprob:mean", data=setup.data, model=setup.model, out=tmp_path / "out", resamples=0)
    (run,) = (tmp_path / "out" / "runs").iterdir()
    return run


def test_a_gate_that_needs_the_llm_decides_if_the_model_is_named(setup, answered):
    with pytest.raises(UnsupportedSignal, match="sends the LLM a prompt of its own"):
        evaluate(Asking(), answered)
    gate = Asking()
    assert evaluate(gate, answered, model=setup.model, resamples=0).gate("asking").measures["auroc"].value == 1.0
    assert gate.asked == 12
    assert "asking" in {item.gate for item in read_needs(answered)}


def test_the_llm_is_not_called_if_the_rows_are_enough(setup, answered):
    evaluate("prompt", answered, model=setup.model, resamples=0)
    assert "prompt" not in {item.gate for item in read_needs(answered)}


def test_a_different_llm_than_that_of_the_rows_is_rejected(answered, tmp_path):
    other = write_invented(tmp_path / "other", 4)
    with pytest.raises(BadSetting, match="Use model='fake'"):
        evaluate(Asking(), answered, model=other.model)


def test_decisions_are_stored_in_each_run_with_record(tmp_path):
    runs = [trial_run(tmp_path / name) for name in ("a", "b")]
    evaluate([Numbered()], runs, record=True, resamples=0)
    for run in runs:
        (kept,) = [item for item in read_needs(run) if item.gate == "numbered"]
        assert kept.needs == {"q0": 1.0, "q1": 0.0, "q2": 1.0, "q3": 0.0}
