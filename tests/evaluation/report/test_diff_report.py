import json
from pathlib import Path

import pytest

from knowgate.cli.main import run as knowgate
from knowgate.errors import BadInput, UnknownName
from knowgate.evaluation.evaluation_diff import diff_evaluations
from knowgate.evaluation.evaluation_summary import EvaluationSummary, GateSummary, load_evaluation_summary
from knowgate.evaluation.gate_evaluation import evaluate
from knowgate.evaluation.report.diff_report import build_diff_verdict, describe_pairing, write_diff_page
from knowgate.evaluation.report.report_folder import write_report
from knowgate.stats.bootstrap import Estimate
from tests.support.chromium import needs_browser, open_page
from tests.support.hand_gate import write_rows
from tests.support.pairs_by_hand import Prefers, pair_row
from tests.support.runs_by_hand import row, side
from tests.support.trials_by_hand import trial_run

N = 100


def run(path, right_with_passages, *, start=0):
    """Every fourth question is known closed-book; the first so many are right with passages."""
    rows = [
        row(f"q{i}", side(i % 4 == 0), side(i - start < right_with_passages), question=f"what is {i}?")
        for i in range(start, start + N)
    ]
    return trial_run(path, rows)


def report(folder, evaluated_run):
    return write_report(evaluate(["good"], evaluated_run, resamples=200), folder, html=False)


@pytest.fixture
def both(tmp_path):
    """Always retrieving is right for 80 of 100 on the first side, for 60 on the second."""
    return [report(tmp_path / f"report{n}", run(tmp_path / f"run{n}", n)) for n in (80, 60)]


def changes(diff, gate):
    return next(one for one in diff.gates if one.gate == gate).changes


def test_the_same_questions_are_compared_in_pairs(both):
    diff = diff_evaluations(*(load_evaluation_summary(one, []) for one in both))
    accuracy = changes(diff, "always")["accuracy"]
    assert diff.paired == N
    assert (accuracy.first.value, accuracy.second.value) == (0.8, 0.6)
    assert accuracy.difference.value == pytest.approx(-0.2)
    width = accuracy.difference.high - accuracy.difference.low
    assert width < 2 * 1.96 * (0.8 * 0.2 / N + 0.6 * 0.4 / N) ** 0.5  # closer than independent questions would be
    assert changes(diff, "never")["accuracy"].difference.value == 0.0


def test_other_questions_are_compared_as_independent_samples(tmp_path):
    sides = [
        load_evaluation_summary(report(tmp_path / f"r{n}", run(tmp_path / f"run{n}", 80, start=n)), [])
        for n in (0, 5000)
    ]
    diff = diff_evaluations(*sides)
    difference = changes(diff, "always")["accuracy"].difference
    half = [
        (one.gates["always"].measures["accuracy"].high - one.gates["always"].measures["accuracy"].low) / 2
        for one in sides
    ]
    assert diff.paired == 0
    assert difference.value == pytest.approx(0.0)
    assert difference.high == pytest.approx((half[0] ** 2 + half[1] ** 2) ** 0.5)


def test_the_number_of_shared_and_needed_questions_is_shown(tmp_path):
    """The second side shares 20 of its 100 questions; half of a side are needed."""
    sides = [
        load_evaluation_summary(report(tmp_path / f"r{n}", run(tmp_path / f"run{n}", 80, start=n)), []) for n in (0, 80)
    ]
    diff = diff_evaluations(*sides)
    assert (diff.paired, diff.shared, diff.needed) == (0, 20, 50)
    assert describe_pairing(diff).startswith("A and B share 20 questions, and 50 are needed to compare them")


def test_gates_of_one_side_only_are_listed(tmp_path, both, capsys):
    other = write_report(evaluate(["good", "poor"], tmp_path / "run60", resamples=50), tmp_path / "o", html=False)
    page = tmp_path / "c.html"
    assert knowgate(["compare", str(both[0]), str(other), "--out", str(page)]) == 0
    assert "Not compared: only B has poor." in capsys.readouterr().out
    assert "Not compared: only B has poor." in page.read_text(encoding="utf-8")
    assert knowgate(["compare", *map(str, both), "--no-html"]) == 0
    assert "Not compared" not in capsys.readouterr().out


def test_compare_writes_no_page_unless_a_file_is_named(tmp_path, both, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert knowgate(["compare", *map(str, both)]) == 0
    assert not list(Path.cwd().iterdir())


def test_a_report_without_decisions_is_compared_by_its_intervals(both):
    for folder in both:
        (folder / "decisions.json").unlink()
    diff = diff_evaluations(*(load_evaluation_summary(one, []) for one in both))
    assert diff.paired == 0
    assert changes(diff, "always")["accuracy"].difference.value == pytest.approx(-0.2)


def test_the_recommended_policies_are_compared_at_their_thresholds(both):
    diff = diff_evaluations(*(load_evaluation_summary(one, []) for one in both))
    assert diff.watched == ["never", "always", "recommended"]
    assert changes(diff, "recommended")["accuracy"].first.value == pytest.approx(0.85)  # 20 to 80 right, and 5 known


def test_a_label_run_is_evaluated_and_compared_like_its_report(tmp_path, both):
    by_report, by_run = load_evaluation_summary(both[0], []), load_evaluation_summary(tmp_path / "run80", ["good"])
    assert by_run.question_keys == by_report.question_keys
    assert by_run.recommendation == by_report.recommendation
    assert (by_run.gates["recommended"].right == by_report.gates["recommended"].right).all()


@pytest.fixture
def arbitrated(tmp_path):
    """Each answer from memory is right; the first side's arbiter always takes it, the second's for 40 of 100."""
    folders = []
    for name, kept in (("first", N), ("second", 40)):
        texts = [("keep" if i < kept else "memory", "drop" if i < kept else "keep") for i in range(N)]
        rows = [pair_row(f"q{i}", (i + 1) / (N + 1), True, i % 2 == 0, texts=pair) for i, pair in enumerate(texts)]
        evaluated_run = evaluate(
            "logprob:first", write_rows(tmp_path / name, rows), arbiter=Prefers("keep"), resamples=200
        )
        folders.append(write_report(evaluated_run, tmp_path / f"report-{name}", html=False))
    return folders


def test_gates_with_an_arbiter_are_compared_in_pairs_and_watched(arbitrated):
    diff = diff_evaluations(*(load_evaluation_summary(one, []) for one in arbitrated))
    accuracy = changes(diff, "always + arbiter")["accuracy"]
    assert (accuracy.first.value, accuracy.second.value) == (1.0, 0.7)
    assert accuracy.difference.high < 0
    assert changes(diff, "always")["accuracy"].difference.value == 0.0
    assert "always + arbiter" in diff.find_worse(0.01)
    assert "always" not in diff.find_worse(0.01)


def test_a_worse_arbiter_exits_with_3_even_without_decisions(arbitrated, capsys):
    given = ["compare", *map(str, arbitrated), "--no-html", "--gate", "always", "--fail-if-worse", "0.01"]
    assert knowgate(given) == 3
    assert "'always + arbiter'" in capsys.readouterr().err
    for folder in arbitrated:
        (folder / "decisions.json").unlink()
    assert knowgate(given) == 3


def test_an_arbiter_of_one_side_only_is_listed(arbitrated, tmp_path, capsys):
    plain = write_report(evaluate("logprob:first", tmp_path / "first", resamples=50), tmp_path / "plain", html=False)
    assert knowgate(["compare", str(arbitrated[0]), str(plain), "--no-html"]) == 0
    assert "only A has always + arbiter" in capsys.readouterr().out


def test_only_a_certain_drop_beyond_the_tolerance_counts(both):
    diff = diff_evaluations(*(load_evaluation_summary(one, []) for one in both))
    assert diff.find_worse(0.01) == ["always", "recommended"]
    assert diff.find_worse(0.25) == []


def test_a_drop_that_may_be_chance_does_not_count():
    sides = [
        EvaluationSummary(
            name, "m", 50, {"always": GateSummary({"accuracy": Estimate(value, value - 0.1, value + 0.1)})}
        )
        for name, value in (("a", 0.6), ("b", 0.55))
    ]
    diff = diff_evaluations(*sides)
    assert diff.find_worse(0.01) == []
    assert build_diff_verdict(diff).headline == "No significant difference between A and B."


def test_sides_without_a_gate_in_common_are_rejected():
    with pytest.raises(BadInput, match="have no common gate"):
        diff_evaluations(
            EvaluationSummary("a", "m", 1, {"x": GateSummary({})}),
            EvaluationSummary("b", "m", 1, {"y": GateSummary({})}),
        )


def test_a_gate_to_watch_must_be_on_both_sides(both):
    with pytest.raises(UnknownName, match="bad"):
        diff_evaluations(*(load_evaluation_summary(one, []) for one in both), ["bad"])


def test_a_summary_of_something_else_is_rejected(tmp_path):
    (tmp_path / "summary.json").write_text('{"runs": []}')
    with pytest.raises(BadInput, match="does not contain an evaluation summary"):
        load_evaluation_summary(tmp_path, [])


def test_the_command_exits_with_3_if_accuracy_dropped(both, tmp_path, capsys):
    page = tmp_path / "c.html"
    command = ["compare", *map(str, both), "--out", str(page), "--fail-if-worse", "0.01"]
    assert knowgate(command) == 3
    output = capsys.readouterr()
    assert "B is worse than A. Points of accuracy, with 95 % intervals: 'always' -20.0" in output.out
    assert "Accuracy fell by more than 1 point: 'always', 'recommended'." in output.err
    assert page.is_file()
    assert knowgate(["compare", *map(str, reversed(both)), "--no-html", "--fail-if-worse", "0.01"]) == 0


def test_the_command_prints_every_difference_as_json(both, capsys):
    assert knowgate(["compare", *map(str, both), "--no-html", "--json"]) == 0
    diff = json.loads(capsys.readouterr().out)
    assert diff["paired"] == N
    assert diff["worse"] == []
    assert [one["gate"] for one in diff["gates"]] == ["never", "always", "good", "oracle", "recommended"]


def test_runs_without_passages_are_compared_by_their_ranking(tmp_path):
    runs = [trial_run(tmp_path / name, [row(f"q{i}", side(i % 3 == 0)) for i in range(40)]) for name in ("a", "b")]
    diff = diff_evaluations(*(load_evaluation_summary(one, ["good"], 50) for one in runs))
    assert changes(diff, "good")["auroc"].difference.value == 0.0
    assert build_diff_verdict(diff).level == "unknown"


@needs_browser
def test_the_page_is_drawn_in_a_browser_without_console_lines(both, tmp_path):
    page = tmp_path / "c.html"
    write_diff_page(diff_evaluations(*(load_evaluation_summary(one, []) for one in both)), page)
    opened = open_page(page, tmp_path / "profile")
    assert opened.console == []
    assert "Differences with 95 % intervals, in points" in opened.dom
    assert page.stat().st_size < 1e5
