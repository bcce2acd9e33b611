import io

from rich.console import Console

from knowgate.evaluation.boundary import read_run_reports
from knowgate.evaluation.report import boundary_tables as sheets
from knowgate.evaluation.report.boundary_page import describe_boundary
from knowgate.evaluation.report.terminal import render_tables
from tests.support.runs_by_hand import row, side, varied_rows, write_run


def shown(*paths):
    console = Console(file=io.StringIO(), width=200)
    console.print(render_tables(sheets.build_boundary_tables(read_run_reports(paths))))
    return console.file.getvalue()


def line(text, start):
    return next(text_line for text_line in text.splitlines() if text_line.startswith(start))


def test_accuracy_is_shown_with_its_interval_and_n(tmp_path):
    rows = [row(str(i), side(i % 2 == 0), side(True)) for i in range(10)]
    text = shown(write_run(tmp_path / "a", rows))
    assert "50.0 % [23.7, 76.3], n = 10" in line(text, "closed book")
    assert line(text, "retrieval helps").split()[-1] == "5"


def test_closed_and_open_book_are_compared_on_the_same_questions(tmp_path):
    both = [row(str(i), side(i % 2 == 0), side(True)) for i in range(10)]
    alone = [row(f"alone {i}", side(True)) for i in range(10)]
    path = write_run(tmp_path / "a", [*both, *alone])
    text = shown(path)
    assert "50.0 % [23.7, 76.3], n = 10" in line(text, "closed book ")
    assert "n = 10" in line(text, "open book")
    assert "75.0 % [53.1, 88.8], n = 20" in line(text, "closed book, also where no passage was found")
    description = " ".join(describe_boundary(read_run_reports([path])[0]))
    assert "of the 10 questions that found passages, without them on 50.0 %" in description


def test_the_grader_is_always_named(tmp_path):
    assert line(shown(write_run(tmp_path / "a", [row("a", side())])), "grader").split() == ["grader", "contains"]


def test_a_closed_book_run_is_shown_as_such(tmp_path):
    text = shown(write_run(tmp_path / "a", varied_rows(10, opened=False)))
    assert sheets.NO_OPEN_ANSWERS in line(text, "open book")
    assert "MASK" not in text


def test_an_undefined_correlation_is_shown_as_such(tmp_path):
    assert "not defined" in line(shown(write_run(tmp_path / "a", [row("a", side())])), "Pearson")


def test_sections_without_values_are_left_out(tmp_path):
    imported = row("a", side(True, None, None), side(False, None, None))
    text = shown(write_run(tmp_path / "a", [imported]))
    for word in ("mastery", "certainty", "Pearson", "MASK", "not recorded", "empty"):
        assert word not in text


def test_empty_intervals_are_shown_as_such(tmp_path):
    (run,) = read_run_reports([write_run(tmp_path / "a", [row("a", side(True, 1.0), side(True, 1.0))])])
    lines = sheets.build_effect_table([run], "mastery").rows
    assert [cells[1:] for cells in lines[:1]] == [("[0.0, 0.2)", "0", "empty")]
    assert lines[-1][1:] == ("[0.8, 1.0]", "1", "0.0 %", "100.0 %", "0.0 %")


def test_failures_and_missing_gold_answers_are_counted(tmp_path):
    rows = [row("a", side(None, None), answers=()), row("b", error="timeout")]
    text = shown(write_run(tmp_path / "a", rows))
    assert "1 (their mastery is unknown)" in line(text, "without gold answers")
    assert "1: 1 × timeout" in line(text, "failed")


def test_markup_and_control_characters_stay_text(tmp_path):
    rows = [row("a", side(True, 1.0), side(False, 0.0), question="[red]who?[/red]\x1b[2J")]
    text = shown(write_run(tmp_path / "a", rows))
    assert "[red]who?[/red]\\x1b[2J" in text


def test_differences_have_no_negative_zero():
    assert [sheets.format_points(value) for value in (-0.0001, 0.0, 0.0123, -0.02)] == ["0.0", "0.0", "+1.2", "-2.0"]
    assert sheets.format_number(-0.001) == "0.00"
