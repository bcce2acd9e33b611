"""Before the slow steps, a first run says what its questions can prove."""

from __future__ import annotations

import pytest

from knowgate.errors import ModelError
from knowgate.evaluation.first_run.labeling import (
    count_required_questions,
    format_duration,
    report_label_time,
    report_plan,
)
from knowgate.models.fake import FakeModel
from knowgate.retrieval import load_retriever
from knowgate.retrieval.index import build_index
from knowgate.types import Question


class Reporter:
    """Records messages and warnings."""

    def __init__(self):
        self.messages, self.warnings = [], []

    def say(self, line):
        self.messages.append(line)

    def warn(self, line):
        self.warnings.append(line)


def test_too_few_questions_are_a_warning_that_names_how_many_it_takes():
    reporter = Reporter()
    report_plan(24, 0.05, reporter)
    (warning,) = reporter.warnings
    assert warning.startswith("24 questions cannot prove that skipping loses at most 5 % of the answers: that takes 90")
    assert "better 240" in warning


def test_enough_questions_are_no_warning():
    reporter = Reporter()
    report_plan(100, 0.05, reporter)
    assert not reporter.warnings
    assert "240 could prove it for a gate trained on them; 500, for a policy." in reporter.messages[0]
    report_plan(500, 0.05, reporter)
    assert reporter.messages[1].endswith("if few are lost.")


def test_a_strict_limit_proposes_more_questions():
    reporter = Reporter()
    report_plan(240, 0.01, reporter)
    required = count_required_questions(0.01)
    assert required > 400
    assert f"that takes {required} or more, better {required}." in reporter.warnings[0]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(20, "less than a minute"), (60, "about a minute"), (200, "about 4 minutes"), (7200, "about 2.0 hours")],
)
def test_durations_are_in_words(seconds, text):
    assert format_duration(seconds) == text


def test_labeled_questions_need_no_time():
    reporter = Reporter()
    report_label_time([Question("Why?")], 1, FakeModel(), None, reporter)
    assert not reporter.messages


def test_a_question_that_the_llm_fails_on_does_not_end_the_estimate(tmp_path):
    class FailingModel(FakeModel):
        def generate(self, prompts, **options):
            if "poison" in prompts[0].text:
                raise ModelError("the response is not valid JSON.")
            return super().generate(prompts, **options)

    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("Lamps are green.", encoding="utf-8")
    build_index(tmp_path / "docs", tmp_path / "index")
    reporter, retriever = Reporter(), load_retriever(str(tmp_path / "index"))
    report_label_time([Question("Which lamp?"), Question("Which poison?")], 0, FailingModel(), retriever, reporter)
    assert reporter.messages[0].startswith("Labeling 2 questions takes")
    with pytest.raises(ModelError):
        report_label_time([Question("Which poison?")], 0, FailingModel(), retriever, reporter)


def test_the_time_of_labeling_is_estimated_from_one_question(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("Lamps are green.", encoding="utf-8")
    build_index(tmp_path / "docs", tmp_path / "index")
    reporter = Reporter()
    questions = [Question(f"Which color has lamp {i}?") for i in range(5)]
    report_label_time(questions, 2, FakeModel(), load_retriever(str(tmp_path / "index")), reporter)
    assert reporter.messages[0].startswith("Labeling 3 questions takes less than a minute (")
