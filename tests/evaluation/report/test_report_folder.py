import json

from knowgate.evaluation.gate_evaluation import evaluate
from knowgate.evaluation.report.report_folder import write_report
from tests.support.runs_by_hand import varied_rows, write_run
from tests.support.trials_by_hand import trial_run, varied_run


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_an_evaluation_becomes_a_page_a_summary_and_tables(tmp_path):
    out = write_report(evaluate(runs=varied_run(tmp_path / "run"), resamples=10), str(tmp_path / "report"))
    assert files(out) == ["decisions.json", "report.html", "summary.json", "table.md"]
    assert "Which gate to use" in (out / "report.html").read_text(encoding="utf-8")
    assert json.loads((out / "summary.json").read_text())["questions"] == 58
    assert "| good |" in (out / "table.md").read_text()


def test_the_page_may_be_left_out(tmp_path):
    out = write_report(evaluate(runs=trial_run(tmp_path / "run"), resamples=0), tmp_path / "report", html=False)
    assert files(out) == ["decisions.json", "summary.json", "table.md"]


def test_runs_become_a_report_on_what_the_llm_knows(tmp_path):
    runs = [write_run(tmp_path / name, varied_rows(12)) for name in ("a", "b")]
    out = write_report(runs, tmp_path / "report")
    assert files(out) == ["report.html", "summary.json", "table.md"]
    assert "What your LLM knows" in (out / "report.html").read_text(encoding="utf-8")
    assert [run["name"] for run in json.loads((out / "summary.json").read_text())["runs"]] == ["a", "b"]
