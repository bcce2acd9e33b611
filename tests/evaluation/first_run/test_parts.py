"""How questions are divided, what so many of them can prove, and what a first run stores of its options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from knowgate.cli.start import format_start_command
from knowgate.errors import ArtifactError, BadSetting
from knowgate.evaluation.first_run.gate_selection import describe_required_questions
from knowgate.evaluation.first_run.labeling import LabelRounds, read_rounds, split_into_parts, write_rounds
from knowgate.evaluation.first_run.options import PROGRESS_FILE, FirstRunOptions, open_progress, read_progress
from knowgate.types import Question


def questions(n: int) -> list[Question]:
    return [Question(f"question {i}?", id=str(i)) for i in range(n)]


def test_a_hundred_questions_are_fifty_to_learn_from_thirty_to_choose_on_and_twenty_to_measure():
    assert {part: len(found) for part, found in split_into_parts(questions(100)).items()} == {
        "fit": 50,
        "calibration": 30,
        "test": 20,
    }


def test_fewer_than_twenty_are_all_measured_on():
    assert {part: len(found) for part, found in split_into_parts(questions(19)).items()} == {
        "fit": 0,
        "calibration": 0,
        "test": 19,
    }


def test_the_first_of_more_questions_fall_into_the_parts_they_fell_into_alone():
    few, many = split_into_parts(questions(30)), split_into_parts(questions(90))
    assert all(many[part][: len(few[part])] == few[part] for part in few)


def test_rounds_come_back_as_they_were_written(tmp_path: Path):
    rounds = LabelRounds().add(questions(30)).add(questions(50))
    write_rounds(tmp_path, rounds)
    assert read_rounds(tmp_path) == rounds
    assert [one.name for one in rounds.rounds] == [
        "fit-1", "calibration-1", "test-1", "fit-2", "calibration-2", "test-2",
    ]  # fmt: skip


def test_what_cannot_be_proven_is_said_with_how_many_questions_it_takes():
    assert describe_required_questions(58, 0.05).endswith("loses at most 5 % of the answers. That takes 59.")


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({}, "no documents to search are given. Set `docs`"),
        ({"docs": "a", "index": "b"}, "mutually exclusive"),
        ({"docs": "a", "max_loss": 0.0}, "max_loss=0.0 is not allowed"),
        ({"docs": "a", "count": 0}, "count=0 is not allowed"),
    ],
)
def test_options_that_cannot_be_used_are_rejected(values: dict[str, Any], problem: str):
    with pytest.raises(BadSetting, match=problem):
        FirstRunOptions(**values).check()


def test_the_start_command_lists_changed_options_and_no_password():
    options = FirstRunOptions(docs="my docs", model="openai:m@http://user:secret@host/v1", count=50)
    assert "secret" not in format_start_command(options)
    assert (
        format_start_command(options)
        == "knowgate start --docs 'my docs' --model 'openai:m@http://***@host/v1' --count 50"
    )


def test_a_folder_of_other_things_is_refused(tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ArtifactError, match="other files and is not a first run's"):
        open_progress(tmp_path, FirstRunOptions(docs="a"))


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 9, "wishes": {}}', '{"version": 1, "wishes": 3}'])
def test_a_damaged_record_is_a_sentence_that_says_what_to_do(tmp_path: Path, text: str):
    (tmp_path / PROGRESS_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"Delete .*start.json"):
        read_progress(tmp_path)
