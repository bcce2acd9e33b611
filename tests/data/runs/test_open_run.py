from pathlib import Path

import pytest

from knowgate.data.runs.folder import RunFolder, open_run, resolve_run_paths
from knowgate.errors import ArtifactError, BadSetting
from tests.support.runs_by_hand import row, side, write_run


def test_a_folder_that_is_not_a_run_is_rejected(tmp_path):
    with pytest.raises(ArtifactError, match="not a label run"):
        open_run(tmp_path)


def test_a_run_is_opened_by_its_path(tmp_path):
    path = write_run(tmp_path / "a", [row("q", side(True))])
    assert [one.id for one in open_run(str(path)).rows()] == ["q"]


def test_runs_are_accepted_as_folder_text_and_path():
    a, b = Path("a"), Path("b")
    assert resolve_run_paths("a") == resolve_run_paths(a) == resolve_run_paths(RunFolder(a)) == [a]
    assert resolve_run_paths([RunFolder(a), "b"]) == [a, b]


def test_an_empty_list_of_runs_is_rejected():
    with pytest.raises(BadSetting, match=r"no label run .* is given"):
        resolve_run_paths([])


# --- what a run shows of itself -------------------------------------------------------------------


def test_the_repr_shows_model_and_data(tmp_path):
    run = RunFolder(write_run(tmp_path / "a", []))
    run.update(totals={"questions": 12, "failed": 2})
    assert repr(run) == f"<RunFolder {tmp_path / 'a'}: fake on jsonl:q.jsonl, 12 questions, 2 failed>"


def test_the_repr_of_a_new_folder_says_not_started(tmp_path):
    assert repr(RunFolder(tmp_path / "none")).endswith("none: not started>")
    assert "not started" in RunFolder(tmp_path / "none")._repr_html_()


def test_the_repr_of_a_damaged_run_shows_the_error(tmp_path):
    run = RunFolder(write_run(tmp_path / "a", []))
    (run.path / "run.json").write_text("{")
    assert "is not valid JSON" in repr(run)
    assert "is not valid JSON" in run._repr_html_()


def test_the_notebook_table_counts_right_answers(tmp_path):
    rows = [row("a", side(True), side(True)), row("b", side(False), side(True)), row("c", error="timeout")]
    shown = RunFolder(write_run(tmp_path / "a", rows, model="<b>"))._repr_html_()
    cells = dict(zip(*[iter(_cells(shown))] * 2, strict=True))
    assert cells["rows"] == "3"
    assert cells["failed"] == "1"
    assert cells["closed-book right"].startswith("50.0 % [")
    assert cells["open-book right"].startswith("100.0 % [")
    assert cells["model"] == "&lt;b&gt;"


def _cells(html: str) -> list[str]:
    body = html.partition("<tbody>")[2]
    return [piece.partition(">")[2].partition("<")[0] for piece in body.split("<t")[1:] if piece[0] in "hd"]
