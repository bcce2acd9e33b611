"""Before the slow steps, a first run says what its questions can prove."""

from __future__ import annotations

import pytest

from knowgate.evaluation.first_run.plan import Provability, format_duration, report_plan


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
    assert "Training a gate takes 80" in warning


def test_enough_questions_are_no_warning():
    reporter = Reporter()
    report_plan(100, 0.05, reporter)
    assert not reporter.warnings
    assert "240 could prove a gate that is trained on them; 500, a policy." in reporter.messages[0]
    assert Provability(500, 0.05).describe().endswith("if few are lost.")


def test_a_strict_limit_proposes_more_questions():
    assert Provability(240, 0.01).is_enough is False
    assert Provability(240, 0.01).proposed == Provability(240, 0.01).required > 400


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(20, "less than a minute"), (60, "a minute"), (200, "4 minutes"), (7200, "2.0 hours")],
)
def test_durations_are_in_words(seconds, text):
    assert format_duration(seconds) == text
