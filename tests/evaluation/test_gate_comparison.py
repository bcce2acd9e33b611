import json
import shutil
from dataclasses import replace

import pytest

from knowgate.cli.main import run as knowgate
from knowgate.cli.options import split_gate_specs
from knowgate.data.runs.records import NEEDS_FILE, RecordedNeeds, read_needs, write_needs
from knowgate.data.runs.table import load_label_table
from knowgate.errors import ArtifactError, BadInput, BadSetting, UnsupportedSignal
from knowgate.evaluation.evaluation_summary import evaluation_to_dict
from knowgate.evaluation.gate_comparison import compare_gates
from knowgate.evaluation.report import evaluation_tables as eval_sheets
from knowgate.evaluation.report.evaluation_page import write_evaluation_page
from knowgate.evaluation.report.evaluation_verdict import LEVEL_LABELS
from knowgate.gates.offline_scoring import drop_seen_rows, score_gate, score_gates
from knowgate.models.fake import FakeModel
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.training.examples import load_examples
from knowgate.training.gate_artifact import save_fitted
from knowgate.training.probe import fit_probe
from knowgate.types import Question
from tests.support.chromium import needs_browser, open_page
from tests.support.planted_run import planted_rows
from tests.support.planted_run import write_run as planted_run
from tests.support.runs_by_hand import row, side, write_run
from tests.support.trials_by_hand import SETTINGS, four_rows, trial_run, varied_run


def evaluated(*runs, gates=("auto",), resamples=50):
    labels = load_label_table(runs)
    return compare_gates(labels, score_gates(labels, gates), resamples=resamples)


# --- numbers --------------------------------------------------------------------------------------


def test_the_main_numbers_by_hand(tmp_path):
    comparison = evaluated(trial_run(tmp_path / "run"))
    good = {name: value.value for name, value in comparison.gate("good").measures.items()}
    # skips q0 (right) and q2 (right closed-book), retrieves q1 (helped) and q3 (hopeless)
    assert good["accuracy"] == 0.75
    assert good["rate"] == 0.5
    assert good["random"] == pytest.approx(0.5)
    assert good["gain"] == pytest.approx(0.25)
    assert good["loss"] == pytest.approx(-0.25)
    assert (good["harm"], good["waste"]) == (0.0, 0.0)
    assert good["recovered"] == pytest.approx(1.0)
    assert good["auroc"] == 1.0
    assert good["closed_if_known"] == 1.0
    assert good["closed_if_unknown"] == 0.0


def test_never_always_and_oracle_are_always_included(tmp_path):
    comparison = evaluated(trial_run(tmp_path / "run"), gates=["good"])
    assert [gate.gate for gate in comparison.gates] == ["never", "always", "good", "oracle"]
    values = {gate.gate: gate.measures["accuracy"].value for gate in comparison.gates}
    assert values == {"never": 0.5, "always": 0.5, "good": 0.75, "oracle": 0.75}
    assert comparison.gate("never").measures["harm"].value == 0.25
    assert comparison.gate("always").measures["waste"].value == 0.5
    assert "auroc" not in comparison.gate("always").measures


def test_questions_without_passages_count_with_their_closed_book_answer(tmp_path):
    rows = [*four_rows(), row("q4", side(True), None)]
    labels = load_label_table([trial_run(tmp_path / "run", rows)])
    assert labels.n_without_passages == 1
    assert labels.open_book_right is not None
    assert bool(labels.open_book_right[-1]) is True


def test_failed_and_ungraded_rows_are_counted_not_scored(tmp_path):
    rows = [*four_rows(), row("bad", error="timeout"), row("free", side(None), side(None))]
    labels = load_label_table([trial_run(tmp_path / "run", rows)])
    assert len(labels.rows) == 4
    assert labels.left_out == {"failed": 1, "not graded": 1}


def test_without_open_book_answers_only_ranking_is_measured(tmp_path):
    rows = [row(f"q{i}", side(i % 2 == 0), None) for i in range(6)]
    comparison = evaluated(trial_run(tmp_path / "run", rows))
    assert [gate.gate for gate in comparison.gates] == ["good", "poor"]
    assert "accuracy" not in comparison.gate("good").measures
    assert comparison.gate("good").measures["auroc"].value == 1.0


def test_runs_of_several_data_sets_are_one_table_with_slices(tmp_path):
    comparison = evaluated(varied_run(tmp_path / "a"), varied_run(tmp_path / "b"))
    parts = {(one.dimension, one.value): one.n for one in comparison.slices}
    assert parts["data set", "nq"] + parts["data set", "webqa"] == len(comparison.table.rows)
    assert {"rare", "middle", "frequent"} <= {value for dimension, value in parts if dimension == "answer frequency"}


def test_each_gate_is_compared_with_always_and_the_best_with_the_others(tmp_path):
    comparison = evaluated(varied_run(tmp_path / "a"))
    pairs = {(one.gate, one.against) for one in comparison.comparisons}
    assert pairs == {("good", "always"), ("poor", "always"), ("good", "poor")}
    assert all(one.p_holm >= one.p_mcnemar for one in comparison.comparisons)


def test_a_threshold_is_chosen_on_dev_rows_and_measured_on_the_others(tmp_path):
    tuned = evaluated(varied_run(tmp_path / "a")).gate("good").tuned
    assert tuned is not None
    assert 0 < tuned.n < 58
    assert tuned.accuracy >= tuned.always - 0.5


def test_the_summary_is_plain_json(tmp_path):
    comparison = json.loads(json.dumps(evaluation_to_dict(evaluated(varied_run(tmp_path / "a")))))
    assert [gate["gate"] for gate in comparison["gates"]] == ["never", "always", "good", "poor", "oracle"]


# --- needs on record ------------------------------------------------------------------------------


def test_recorded_needs_come_back_and_replace_earlier_ones(tmp_path):
    run = trial_run(tmp_path / "run")
    write_needs(run, [RecordedNeeds("good", 0.4, {"q0": 0.25}, "anew", 0.5)])
    assert [item.gate for item in read_needs(run)] == ["poor", "good"]
    assert read_needs(run)[-1] == RecordedNeeds("good", 0.4, {"q0": 0.25}, "anew", 0.5)


def test_a_recorded_gate_that_lacks_questions_is_rejected(tmp_path):
    run = trial_run(tmp_path / "run")
    write_needs(run, [RecordedNeeds("good", 0.5, {"q0": 0.5})])
    with pytest.raises(BadSetting, match="for 3 of 4 questions"):
        score_gate(load_label_table([run]), "good")


@pytest.mark.parametrize("line", ['{"gate": "x"}', '{"gate": "x", "threshold": 0.5, "needs": {"a": 2}}', "[]"])
def test_broken_needs_raise_an_error_with_their_location(tmp_path, line):
    run = trial_run(tmp_path / "run")
    (run / NEEDS_FILE).write_text(line + "\n")
    with pytest.raises((ArtifactError, BadInput), match=NEEDS_FILE):
        load_label_table([run])


# --- bad input ------------------------------------------------------------------------------------


def test_runs_of_different_models_are_not_mixed(tmp_path):
    runs = [trial_run(tmp_path / "a"), trial_run(tmp_path / "b", model_fingerprint="other")]
    with pytest.raises(BadSetting, match="differ in their model fingerprint"):
        load_label_table(runs)


def test_runs_of_different_rerankers_are_not_mixed(tmp_path):
    chosen = {"reranker": "aligned", "reranker_fingerprint": "r1", "candidates": 20}
    runs = [trial_run(tmp_path / "a"), trial_run(tmp_path / "b", **chosen)]
    with pytest.raises(BadSetting, match=r"differ in their reranker fingerprint .*side by side: knowgate sweep beta"):
        load_label_table(runs)


def test_an_edited_manifest_is_rejected_with_its_missing_settings(tmp_path):
    run = trial_run(tmp_path / "run")
    manifest = json.loads((run / "run.json").read_text())
    del manifest["settings"]["prompts_fingerprint"]
    (run / "run.json").write_text(json.dumps(manifest))
    with pytest.raises(
        ArtifactError, match=r"the settings in run\.json: the object has no field 'prompts_fingerprint'"
    ):
        load_label_table([run])


def test_one_kind_of_question_without_open_book_answers_cannot_be_evaluated(tmp_path):
    with pytest.raises(BadInput, match="every answer without passages is wrong"):
        evaluated(trial_run(tmp_path / "run", [row(f"q{i}", side(False), None) for i in range(3)]))


def test_equal_grades_with_open_book_answers_have_all_measures_except_ranking(tmp_path):
    comparison = evaluated(trial_run(tmp_path / "run", [row(f"q{i}", side(False), side(True)) for i in range(3)]))
    assert comparison.gate("good").measures["accuracy"].value == 1.0
    assert comparison.gate("good").measures["auroc"].value is None
    assert {row[0]: row[1] for row in eval_sheets.build_ranking_table(comparison).rows} == {
        "good": "–",
        "poor": "–",
        "majority": "–",
    }


def test_a_run_without_graded_rows_is_rejected(tmp_path):
    run = write_run(tmp_path / "run", [row("a", error="timeout")], **SETTINGS)
    with pytest.raises(BadInput, match="is graded: 1 failed"):
        load_label_table([run])


def test_a_gate_that_needs_the_llm_is_rejected_with_advice(tmp_path):
    advice = "Label the questions again with an LLM that provides them: `knowgate label` with"
    with pytest.raises(UnsupportedSignal, match=advice):
        score_gate(load_label_table([trial_run(tmp_path / "run")]), "prompt")


@pytest.fixture
def fitted(tmp_path):
    """A run with a rule in it, and a gate fitted on it."""
    rows, states = planted_rows(120)
    run, out = planted_run(tmp_path / "run", rows, states), tmp_path / "gate"
    examples = load_examples([run])
    save_fitted(fit_probe(examples, kind="linear"), examples, out)
    return run, str(out), len(examples.split.test)


def test_a_gate_is_rejected_on_questions_it_was_fitted_on(fitted):
    run, gate, tested = fitted
    with pytest.raises(BadSetting, match=f"was fitted on {120 - tested} of these 120 questions.*drop_seen"):
        score_gate(load_label_table([run]), gate)


def test_rows_without_texts_are_recognized_by_id(fitted):
    run, gate, tested = fitted
    labels = load_label_table([run])
    packed = replace(labels, rows=[replace(row, question="") for row in labels.rows])
    with pytest.raises(BadSetting, match=f"was fitted on {120 - tested} of these"):
        score_gate(packed, gate)


def test_seen_questions_can_be_left_out_and_are_counted(fitted):
    run, gate, tested = fitted
    labels = drop_seen_rows(load_label_table([run]), [gate, "never"])
    assert len(labels.rows) == len(labels.closed_book_right) == tested
    assert labels.left_out["seen by a gate"] == 120 - tested
    assert len(score_gate(labels, gate).needs) == tested


# --- the command ----------------------------------------------------------------------------------


def test_the_command_writes_page_summary_and_table(tmp_path, capsys):
    out = tmp_path / "report"
    run = varied_run(tmp_path / "a")
    assert knowgate(["eval", "--labels", str(run), "--out", str(out), "--resamples", "50"]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0].partition(":")[0] in LEVEL_LABELS.values()
    assert max(map(len, lines[1:])) <= 100
    assert "against always" in printed.out
    assert "matched" not in printed.out
    assert "--full" in printed.err
    assert (out / "report.html").stat().st_size < 5e5
    assert json.loads((out / "summary.json").read_text())["questions"] == 58
    assert "| good |" in (out / "table.md").read_text()


def test_full_prints_every_table_after_the_verdict(tmp_path, capsys):
    run = varied_run(tmp_path / "a")
    assert knowgate(["eval", "--labels", str(run), "--resamples", "20", "--full"]) == 0
    printed = capsys.readouterr().out
    assert "matched random" in printed
    assert "generated tokens" in printed


def test_labels_or_data_must_be_given(capsys):
    assert knowgate(["eval"]) == 1
    assert "either --labels or --data" in capsys.readouterr().err


def test_questions_answered_now_are_stored_for_the_next_evaluation(tmp_path, capsys):
    data = tmp_path / "q.jsonl"
    asked = [f"Question {i}?" for i in range(12)]
    output = FakeModel().generate([AnswerPrompts().closed(Question(text)) for text in asked], max_tokens=32)
    golds = [completions[0].text if i % 2 else "nobody" for i, completions in enumerate(output)]
    records = [{"question": text, "answers": [gold]} for text, gold in zip(asked, golds, strict=True)]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    command = ["eval", "--data", f"jsonl:{data}", "--model", "fake", "--gates", "prompt,logprob:mean", "--no-html"]
    assert knowgate([*command, "--out", str(tmp_path / "out"), "--resamples", "20"]) == 0
    assert "logprob:mean" in capsys.readouterr().out
    kept = list((tmp_path / "out" / "runs").iterdir())
    assert len(kept) == 1
    assert {item.gate for item in read_needs(kept[0])} == {"prompt", "logprob:mean"}
    assert all(item.seconds is not None for item in read_needs(kept[0]))
    assert knowgate(["eval", "--labels", str(kept[0]), "--resamples", "20"]) == 0


def test_gates_may_be_repeated_and_must_be_named(tmp_path, capsys):
    run = trial_run(tmp_path / "run")
    command = ["eval", "--labels", str(run), "--resamples", "10", "--json"]
    assert knowgate([*command, "--gates", "good", "--gates", "poor"]) == 0
    named = [gate["gate"] for gate in json.loads(capsys.readouterr().out)["gates"]]
    assert named == ["never", "always", "good", "poor", "oracle"]
    assert knowgate([*command, "--gates", ""]) == 1
    assert "--gates names no gate" in capsys.readouterr().err


def test_a_recorded_gate_with_commas_in_its_name_can_be_named(tmp_path):
    run = varied_run(tmp_path / "a")
    needs = {one.id: 0.5 for one in load_label_table([run]).rows}
    write_needs(run, [RecordedNeeds(name, 0.5, needs) for name in ("fusion", "fusion, cheap", "k=5, old")])
    assert split_gate_specs(["fusion, cheap,good,fusion"], [run]) == ["fusion, cheap", "good", "fusion"]
    assert split_gate_specs(["good,k=5, old"], [run]) == ["good", "k=5, old"]
    command = ["eval", "--labels", str(run), "--resamples", "0", "--gates", "fusion, cheap,fusion"]
    assert knowgate(command) == 0


def test_commas_inside_options_do_not_split_a_gate():
    assert split_gate_specs(["flare,dhicl:k=5,words=1/2, my-gate"]) == ["flare", "dhicl:k=5,words=1/2", "my-gate"]


@needs_browser
def test_every_chart_is_drawn_in_a_real_browser(tmp_path):
    page = tmp_path / "report.html"
    write_evaluation_page(evaluated(varied_run(tmp_path / "a")), page)
    opened = open_page(page, tmp_path / "profile")
    shutil.rmtree(tmp_path / "profile", ignore_errors=True)
    assert opened.console == []
    assert opened.dom.count('<svg class="') == opened.dom.count("<figcaption>")
    assert opened.dom.count('class="tip"') == opened.dom.count("<figcaption>")
