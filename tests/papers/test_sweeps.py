import re

import pytest

from knowgate.cli.main import run as knowgate
from knowgate.data.runs.records import RecordedNeeds, write_needs
from knowgate.data.runs.table import load_label_table
from knowgate.errors import BadInput, KnowgateError
from knowgate.gates.offline_scoring import score_gate
from knowgate.papers import sweeps
from knowgate.training.examples import load_examples
from knowgate.training.gate_artifact import save_fitted
from knowgate.training.probe import fit_probe
from tests.support.planted_run import planted_rows
from tests.support.planted_run import write_run as planted_run
from tests.support.runs_by_hand import row, side
from tests.support.trials_by_hand import trial_run


def cells(text_table):
    return {row[0]: dict(zip(text_table.columns[1:], row[1:], strict=True)) for row in text_table.rows}


def test_each_threshold_has_a_row_of_measures(tmp_path):
    labels = load_label_table([trial_run(tmp_path / "run")])
    result = cells(sweeps.sweep_thresholds(labels, score_gate(labels, "good")))
    assert list(result) == [*(f"0.{digit}" for digit in range(1, 10)), "majority"]
    assert result["0.1"]["retrieval"] == "100.0 %"  # needs are 0.2 and 0.8
    assert result["0.5"] == {
        "retrieval": "50.0 %", "accuracy": "75.0 %", "random": "50.0 %", "gain": "+25.0",
        "against always": "+25.0 [0.0, +75.0]", "harm": "0.0 %", "waste": "0.0 %", "judged right": "100.0 %",
    }  # fmt: skip
    assert result["0.9"]["retrieval"] == "0.0 %"


def test_the_majority_verdict_is_the_last_row(tmp_path):
    rows = [row(f"q{i}", side(i == 0), side(True)) for i in range(4)]
    labels = load_label_table([trial_run(tmp_path / "run", rows)])
    result = cells(sweeps.sweep_thresholds(labels, score_gate(labels, "good")))["majority"]
    assert (result["judged right"], result["retrieval"], result["accuracy"]) == ("75.0 %", "100.0 %", "100.0 %")


def test_confidence_must_be_above_beta_to_answer_directly(tmp_path):
    labels = load_label_table([trial_run(tmp_path / "run")])
    result = cells(sweeps.sweep_betas(labels, score_gate(labels, "good")))
    assert result["0.7"]["retrieval"] == "50.0 %"  # confidence .8 is above .7
    assert result["0.8"]["retrieval"] == "100.0 %"  # and not above .8


def test_the_loss_against_always_has_an_interval(tmp_path):
    """Skipping 200 of 400 questions, of which passages would have helped half, loses 25 points, give or take 4.2."""
    rows = [row(f"q{i}", side(i % 4 == 0), side(i % 2 == 0)) for i in range(400)]
    run = trial_run(tmp_path / "run", rows)
    write_needs(run, [RecordedNeeds("probe", 0.5, {f"q{i}": float(i % 2) for i in range(400)})])
    labels = load_label_table([run])
    table = sweeps.sweep_betas(labels, score_gate(labels, "probe"), betas=(0.95,))
    assert table.title == "probe: beta on 1 - need, 400 questions"
    value, low, high = re.findall(r"[-+]\d+\.\d", cells(table)["0.95"]["against always"])
    spread = 100 * 1.96 * (0.25 * 0.75 / 400) ** 0.5
    assert float(value) == -25.0
    assert (float(low), float(high)) == pytest.approx((-25 - spread, -25 + spread), abs=0.6)


def test_stored_variants_are_rows_of_one_table(tmp_path):
    run = trial_run(tmp_path / "run")
    needs = {f"q{i}": 0.1 * i for i in range(4)}
    write_needs(run, [RecordedNeeds(f"dhicl:k={k}", 0.15, needs) for k in (5, 20)])
    result = cells(sweeps.sweep_variants(load_label_table([run]), "dhicl"))
    assert list(result) == ["dhicl:k=5", "dhicl:k=20"]
    assert result["dhicl:k=5"]["AUROC"] == "0.750"  # wrong: q1, q3; right: q0, q2
    assert result["dhicl:k=5"]["retrieval"] == "50.0 %"


def test_without_variants_the_error_lists_the_stored_gates(tmp_path):
    with pytest.raises(BadInput, match="have decisions of good, poor, but not of"):
        sweeps.sweep_variants(load_label_table([trial_run(tmp_path / "run")]), "dhicl")


def test_a_gate_fitted_on_one_run_is_tested_on_unseen_questions_of_all_runs(tmp_path):
    runs = []
    for seed in (1, 2):
        rows, states = planted_rows(150, seed=seed)
        runs.append(planted_run(tmp_path / f"run{seed}", rows, states))
    messages: list[str] = []
    result = cells(sweeps.sweep_transfer("probe", runs[:1], runs, messages.append))
    assert messages == ["fitting probe on run1"]
    assert float(result["run1"]["run2"]) > 0.9
    assert float(result["run1"]["run1"]) > 0.9  # on the test split alone


def test_a_gate_that_cannot_be_measured_on_a_run_says_why_in_its_cell(tmp_path):
    rows, states = planted_rows(150, seed=1)
    run = planted_run(tmp_path / "with", rows, states)
    bare = planted_run(tmp_path / "without", planted_rows(20, seed=2)[0])
    examples = load_examples([run], target="known")
    save_fitted(fit_probe(examples, kind="linear"), examples, tmp_path / "probe")
    result = cells(sweeps.sweep_plug_in([str(tmp_path / "probe")], [bare]))
    assert result == {"probe": {"without": "(the label run has no hidden states)"}}


def test_any_fitted_gate_can_be_swept_over_with_options_of_its_fit(tmp_path):
    rows, states = planted_rows(150, seed=1)
    run = planted_run(tmp_path / "run", rows, states)
    result = cells(sweeps.sweep_transfer("probe:kind=linear,position=post", [run], [run], lambda line: None))
    assert float(result["run"]["run"]) > 0.9


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("logprob", "unknown fitted gate 'logprob'.*Known: .*probe"),
        ("ik:breath=3", "fit ik: unknown option 'breath'. .*Known: .*mode, rows, tokens"),
        ("ik:tokens=many", "fit ik: tokens='many' is not allowed: it must be a whole number"),
    ],
)
def test_an_unknown_gate_or_option_is_named(tmp_path, spec, message):
    with pytest.raises(KnowgateError, match=message):
        sweeps.sweep_transfer(spec, [tmp_path], [tmp_path], print)


@pytest.mark.parametrize("what", ["thresholds", "beta"])
def test_the_commands_print_tables(tmp_path, capsys, what):
    run = trial_run(tmp_path / "run")
    assert knowgate(["sweep", what, "--labels", str(run), "--gates", "good"]) == 0
    assert "good" in capsys.readouterr().out
    assert knowgate(["sweep", what, "--labels", str(run), "--gates", "good", "--markdown"]) == 0
    assert "| --- |" in capsys.readouterr().out
