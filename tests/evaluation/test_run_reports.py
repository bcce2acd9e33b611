import json

import pytest

from knowgate.errors import ArtifactError, BadSetting
from knowgate.evaluation.boundary import read_run_reports, run_report_to_dict
from knowgate.types import Passage
from tests.support.runs_by_hand import row, side, write_run


def test_runs_are_named_by_model_if_that_is_unique(tmp_path):
    first, second = write_run(tmp_path / "a", [], model="small"), write_run(tmp_path / "b", [], model="large")
    assert [run.name for run in read_run_reports([first, second])] == ["small", "large"]


def test_the_server_address_is_not_part_of_the_name(tmp_path):
    (run,) = read_run_reports([write_run(tmp_path / "a", [], model="openai:qwen@http://localhost:8000/v1")])
    assert (run.name, run.settings["model"]) == ("openai:qwen", "openai:qwen@http://localhost:8000/v1")


def test_runs_of_one_model_are_named_by_folder(tmp_path):
    paths = [write_run(tmp_path / name, []) for name in ("a", "b")]
    assert [run.name for run in read_run_reports(paths)] == ["a", "b"]


def test_runs_in_folders_of_the_same_name_are_named_by_path(tmp_path):
    paths = [write_run(tmp_path / name / "run", []) for name in ("a", "b")]
    assert [run.name for run in read_run_reports(paths)] == [str(path) for path in paths]


def test_a_run_named_twice_is_rejected(tmp_path):
    path = write_run(tmp_path / "a", [])
    with pytest.raises(BadSetting, match="given twice"):
        read_run_reports([path, tmp_path / "b" / ".." / "a"])


def test_a_folder_without_a_run_is_rejected(tmp_path):
    with pytest.raises(ArtifactError, match="not a label run"):
        read_run_reports([tmp_path])


def test_the_graders_are_those_of_the_rows(tmp_path):
    path = write_run(tmp_path / "a", [row("a", side()), row("b", side()), row("c", side(), grader="choice")])
    (run,) = read_run_reports([path])
    assert run.settings["grader"] == "contains (2), choice (1)"


def test_the_grader_of_a_run_without_rows_is_its_setting(tmp_path):
    (run,) = read_run_reports([write_run(tmp_path / "a", [], grade="exact")])
    assert run.settings["grader"] == "exact"


def test_json_holds_the_numbers_and_shortened_extreme_questions(tmp_path):
    harmed = row("a", side(True, 1.0), side(False, 0.25, text="Lyon"), passages=(Passage("p1", "long text"),))
    (run,) = read_run_reports([write_run(tmp_path / "a", [harmed])])
    record = json.loads(json.dumps(run_report_to_dict(run), allow_nan=False))
    assert record["accuracy"]["closed"]["value"] == 1.0
    assert record["correlation"] == {"n": 1, "r": None}
    assert record["savings"]["mastery"]["points"][1]["saved"] == 1.0
    assert record["harmed"] == [
        {
            "id": "a",
            "question": "q a",
            "answers": ["Paris"],
            "closed": "x",
            "open": "Lyon",
            "mastery_change": -0.75,
            "benefit": -1,
            "passages": ["p1"],
        }
    ]
