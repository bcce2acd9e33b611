import re
from dataclasses import replace
from importlib import metadata

import pytest

import knowgate
from knowgate.core.chart import Axis, ChartPoint
from knowgate.errors import ArtifactError
from knowgate.evaluation.boundary import read_run_reports
from knowgate.evaluation.report import boundary_page as charts
from knowgate.evaluation.report.boundary_page import describe_boundary, render_boundary_page, write_boundary_page
from knowgate.evaluation.report.boundary_tables import NO_OPEN_ANSWERS
from knowgate.evaluation.report.charts import PlotArea, PlotLine, draw_line_plot
from knowgate.evaluation.report.html import MAX_TEXT_LENGTH
from knowgate.types import Passage
from knowgate.types.markup import escape_html
from tests.support.chromium import needs_browser, open_page
from tests.support.runs_by_hand import row, side, varied_rows, write_run

HOSTILE = "</script><script>document.title='taken'; console.error('taken')</script><img src=x onerror=alert(1)>"


def hostile_run(path):
    """Every text of the run is an attack."""
    bad = row(
        HOSTILE,
        side(True, 1.0, text=HOSTILE),
        side(False, 0.0, text=HOSTILE),
        question=HOSTILE,
        answers=(HOSTILE,),
        choices=(HOSTILE, "b"),
        grader=HOSTILE,
        meta={"dataset": HOSTILE},
        passages=(Passage(HOSTILE, HOSTILE, HOSTILE),),
        mask=side(False, None, None, HOSTILE),
    )
    return write_run(path, [bad, row("b", error=HOSTILE), row("c", side(), lang=HOSTILE)], model=HOSTILE, data=HOSTILE)


def text_of(page_html):
    """The page without its scripts and styles."""
    return re.sub(r"<(script|style)\b.*?</\1>", "", page_html, flags=re.DOTALL)


def test_the_page_is_one_small_file_that_fetches_nothing(tmp_path):
    out = tmp_path / "report.html"
    write_boundary_page(read_run_reports([write_run(tmp_path / "a", varied_rows())]), out)
    assert out.stat().st_size < 3e5
    assert not re.search(r"<(link|script|img)[^>]*(src|href)=", text_of(out.read_text(encoding="utf-8")))
    assert out.read_text(encoding="utf-8").count("<script>") == 1


def test_definitions_are_those_of_charts_and_tables_that_the_page_shows(tmp_path):
    sampled, imported = (
        varied_rows(),
        [row(str(i), side(i % 2 == 0, None, None), side(True, None, None)) for i in range(10)],
    )
    pages = [
        render_boundary_page(read_run_reports([write_run(tmp_path / str(len(rows)), rows)]))
        for rows in (sampled, imported)
    ]
    shown = [set(re.findall(r'id="how-(\w+)"', page)) for page in pages]
    assert {"accuracy", "effects", "savings", "copying"} <= shown[0]
    assert shown[1] == {"accuracy", "agreement"}


def test_a_packed_run_says_why_questions_are_shown_by_their_ids(tmp_path):
    rows = [row(f"nq_{i}", side(False, 0.0), side(True, 1.0)) for i in range(3)]
    packed = [replace(item, question="", answers=()) for item in rows]
    with_texts, without = (
        render_boundary_page(read_run_reports([write_run(tmp_path / name, items)]))
        for name, items in (("full", rows), ("packed", packed))
    )
    assert "This run is packed" not in with_texts
    assert "This run is packed" in without
    assert "nq_0" in without


def test_a_page_is_rendered_without_an_installed_package(tmp_path, monkeypatch):
    def missing(package):
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", missing)
    text = render_boundary_page(read_run_reports([write_run(tmp_path / "a", varied_rows(3))]))
    assert f"Made by knowgate {knowgate.__version__}." in text


def test_hostile_text_stays_text(tmp_path):
    page_html = render_boundary_page(read_run_reports([hostile_run(tmp_path / "a")]))
    assert page_html.count("<script>") == 1
    assert "<img" not in text_of(page_html)
    assert escape_html(HOSTILE) in page_html


def test_hostile_names_of_lines_stay_text():
    field = PlotArea(Axis("x"), Axis("y"))
    page_html = draw_line_plot(field, [PlotLine(HOSTILE, [ChartPoint(0, 0), ChartPoint(1, 1)], "k0")], HOSTILE, HOSTILE)
    assert "<img" not in page_html
    assert "<script" not in page_html


def test_a_closed_book_run_shows_a_remark_instead_of_empty_charts(tmp_path):
    page_html = text_of(
        render_boundary_page(read_run_reports([write_run(tmp_path / "a", varied_rows(10, opened=False))]))
    )
    assert page_html.count('class="chart"') == 2  # what it knows, and accuracy
    assert f"fake: {NO_OPEN_ANSWERS}." in page_html


def test_a_run_without_samples_has_no_empty_tables(tmp_path):
    rows = [row(f"q{i}", side(i % 2 == 0, None, None), side(True, None, None)) for i in range(10)]
    page_html = text_of(render_boundary_page(read_run_reports([write_run(tmp_path / "a", rows)])))
    assert not any(f'id="{section}"' in page_html for section in ("savings", "effects"))


def test_extreme_questions_come_with_answers_and_passages(tmp_path):
    harmed = row("h", side(True, 1.0, text="Paris"), side(False, 0.0, text="Lyon"), passages=(Passage("p", "Of Lyon"),))
    page_html = text_of(render_boundary_page(read_run_reports([write_run(tmp_path / "a", [harmed])])))
    section = page_html[page_html.index('id="harmed"') : page_html.index('id="helped"')]
    assert all(part in section for part in ("q h", "Paris", "Lyon", "Of Lyon", "-1.00", "1 passages"))


def test_long_passages_are_cut(tmp_path):
    harmed = row("h", side(True, 1.0), side(False, 0.0), passages=(Passage("p", "w" * 10 * MAX_TEXT_LENGTH),))
    page_html = text_of(render_boundary_page(read_run_reports([write_run(tmp_path / "a", [harmed])])))
    assert page_html.count("w" * MAX_TEXT_LENGTH + " … (cut)") == 1


def test_a_row_with_half_a_character_is_rejected_before_the_page_is_written(tmp_path):
    path = write_run(tmp_path / "a", [row("a", side(), side())], model="fake")
    (path / "labels.jsonl").write_text((path / "labels.jsonl").read_text().replace("q a", r"\ud83d"), encoding="utf-8")
    with pytest.raises(ArtifactError, match="invalid Unicode"):
        write_boundary_page(read_run_reports([path]), tmp_path / "report.html")


def test_the_knowledge_shares_follow_from_both_grades(tmp_path):
    rows = [row("a", side(True), side(True)), row("b", side(True), side(False)), row("c", side(False), side(True))]
    (run,) = read_run_reports([write_run(tmp_path / "a", [*rows, row("d", side(False), side(False))])])
    assert charts.compute_knowledge_shares(run) == {"known": 0.25, "harmed": 0.25, "helped": 0.25, "hopeless": 0.25}


def test_without_open_book_answers_the_shares_are_known_and_unknown(tmp_path):
    (run,) = read_run_reports([write_run(tmp_path / "a", [row("a", side(True)), row("b", side(False))])])
    assert charts.compute_knowledge_shares(run) == {"known": 0.5, "hopeless": 0.5}


def test_the_description_starts_with_what_the_llm_knows(tmp_path):
    rows = [row(str(number), side(number < 3), side(number < 6)) for number in range(10)]
    (run,) = read_run_reports([write_run(tmp_path / "a", rows)])
    first, sure, passages = describe_boundary(run)
    assert first == "fake knows 30.0 % of these questions by itself."
    assert sure.startswith("Of 10 questions (95 % interval 10.8 to 60.3)")
    assert passages.endswith("they turn 30.0 % of the answers right, spoil 0.0 %, and change nothing for 70.0 %.")


def test_a_run_without_gold_answers_is_described_as_ungraded(tmp_path):
    (run,) = read_run_reports([write_run(tmp_path / "a", [row("a", side(None, None), answers=())])])
    assert describe_boundary(run) == [
        "What fake knows cannot be said: none of its 1 answers is graded.",
        "1 questions are not graded, 0 failed.",
        'Give the questions gold answers, "answers": [...], and label again: knowgate label',
    ]
    assert "<svg" not in text_of(render_boundary_page([run])).split('id="accuracy"')[0]


@needs_browser
def test_every_chart_is_drawn_in_a_browser_without_console_errors(tmp_path):
    rows = [varied_rows(60, 0.1), varied_rows(60, 0.9), varied_rows(10, 0.5, opened=False)]
    names = ("small", "large", "closed only")
    runs = read_run_reports([write_run(tmp_path / n, r, model=n) for n, r in zip(names, rows, strict=True)])
    write_boundary_page(runs, tmp_path / "report.html")
    opened = open_page(tmp_path / "report.html", tmp_path / "profile")
    drawn = re.findall(r'<figure class="chart">.*?</figure>', opened.dom, flags=re.DOTALL)
    assert len(drawn) == 2 + 2 * 2 * 2 + 2  # knowledge, accuracy, effects of two runs, savings
    assert all('role="img" aria-label=' in chart and "<desc>" in chart for chart in drawn)
    assert all('class="tip"' in chart for chart in drawn)  # made by the script
    assert opened.console == []


@needs_browser
def test_hostile_text_runs_nothing_in_a_browser(tmp_path):
    write_boundary_page(read_run_reports([hostile_run(tmp_path / "a")]), tmp_path / "report.html")
    opened = open_page(tmp_path / "report.html", tmp_path / "profile")
    assert opened.console == []
    assert "<title>What your LLM knows: " in opened.dom
    assert "<img" not in text_of(opened.dom)
