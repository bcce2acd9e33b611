import json

import pytest
import typer
from typer.testing import CliRunner

from knowgate.cli.option_flags import expand_options
from knowgate.cli.report import report
from knowgate.errors import BadInput
from knowgate.training.topics import TopicOptions
from tests.support.runs_by_hand import varied_rows, write_run

app = typer.Typer()
app.command()(expand_options(report))


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_tables_go_to_stdout_and_the_page_is_named_on_stderr(tmp_path):
    path, out = write_run(tmp_path / "a", varied_rows(12)), tmp_path / "sub" / "r.html"
    result = run(path, "--out", out)
    assert result.exit_code == 0
    assert "closed book" in result.stdout
    assert str(out) in result.stderr
    assert out.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_the_page_is_in_the_first_run_by_default(tmp_path, monkeypatch):
    paths = [write_run(tmp_path / name, varied_rows(3)) for name in ("a", "b")]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    result = run(*paths)
    assert result.exit_code == 0
    assert f"Page: {paths[0] / 'report.html'}" in result.stderr
    assert [page.parent for page in tmp_path.rglob("report.html")] == [paths[0]]


def test_stdout_holds_only_json(tmp_path):
    paths = [write_run(tmp_path / name, varied_rows(12)) for name in ("a", "b")]
    result = run(*paths, "--json", "--no-html")
    record = json.loads(result.stdout)
    assert [item["name"] for item in record["runs"]] == ["a", "b"]
    assert result.stderr == ""


def test_a_run_without_rows_is_rejected(tmp_path):
    with pytest.raises(BadInput, match=r"has no answers yet\. Continue it with `knowgate label`"):
        report([write_run(tmp_path / "run", [])], TopicOptions(), html=False)


def test_the_summary_and_the_next_command_are_printed_last(tmp_path):
    path = write_run(tmp_path / "a", varied_rows(12))
    result = run(path, "--no-html")
    assert result.stdout.splitlines()[-1].startswith("fake knows 50.0 % of these questions by itself.")
    assert result.stderr.endswith(f"knowgate eval --labels {path} --out DIR\n")
