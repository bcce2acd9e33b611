"""Long jobs say how far they are: lines now and then where there is no terminal."""

from __future__ import annotations

import io
from dataclasses import dataclass, field

import pytest
from rich.console import Console

from knowgate.cli.progress import (
    ProgressLines,
    format_duration,
    show_progress,
)


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Job:
    """A job that shows where it is at given seconds."""

    clock: Clock = field(default_factory=Clock)
    written: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lines = ProgressLines("labelling", "questions", self.written.append, self.clock)

    def at(self, second: float, done: int, total: int = 1000, **more: str) -> None:
        self.clock.now = 100.0 + second
        self.lines(done, total, **more)


@pytest.fixture
def job() -> Job:
    return Job()


def test_a_line_has_count_and_time_left(job: Job):
    job.at(0, 0)
    job.at(40, 128)
    assert job.written == ["labelling: 128 of 1,000 questions, 5 min left"]


def test_a_job_of_a_moment_says_nothing(job: Job):
    for second in range(3):
        job.at(second, second)
    assert job.written == []


def test_lines_come_at_growing_intervals_up_to_a_minute(job: Job):
    times = []
    for second in range(400):
        before = len(job.written)
        job.at(second, second)
        times += [second] * (len(job.written) - before)
    assert times == [3, 9, 21, 45, 93, 153, 213, 273, 333, 393]


def test_what_an_earlier_start_did_does_not_count_for_the_time_left(job: Job):
    job.at(0, 900)
    job.at(10, 950)
    assert job.written == ["labelling: 950 of 1,000 questions, 10 s left"]


def test_the_pace_of_the_job_itself_is_shown_where_it_has_one(job: Job):
    job.at(0, 0)
    job.at(10, 500, pace="50 questions/s 900 tokens/s")
    assert job.written == ["labelling: 500 of 1,000 questions, 50 questions/s 900 tokens/s, 10 s left"]


def test_each_stage_has_its_own_start_and_unit(job: Job):
    job.at(0, 0, stage="read", unit="documents")
    job.at(5, 1000, stage="read", unit="documents")
    job.at(5, 0, 50, stage="embed", unit="passages")
    job.at(15, 20, 50, stage="embed", unit="passages")
    assert job.written == ["embed: 0 of 50 passages", "embed: 20 of 50 passages, 15 s left"]


def test_the_end_is_left_to_the_summary_of_the_command(job: Job):
    job.at(0, 0)
    job.at(50, 1000)
    assert job.written == []


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.2, "1 s"), (89, "89 s"), (91, "2 min"), (3600, "60 min"), (9000, "2.5 h")]
)
def test_durations_are_told_in_the_unit_one_thinks_in(seconds: float, said: str):
    assert format_duration(seconds) == said


def run_on(console: Console) -> str:
    with show_progress("labelling", "questions", console) as show:
        for done in range(3):
            show(done, 3)
        show.say("epoch 1 [done]")
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_on_a_terminal_there_is_a_bar_and_lasting_lines_stay():
    drawn = run_on(Console(file=io.StringIO(), force_terminal=True, width=100))
    assert "labelling" in drawn
    assert "epoch 1 [done]" in drawn


def test_elsewhere_there_is_no_bar():
    assert run_on(Console(file=io.StringIO(), width=100)) == "epoch 1 [done]\n"
