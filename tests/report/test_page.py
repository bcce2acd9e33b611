import re
import sys

import pytest

from knowgate.errors import ArtefactError, MissingExtra
from knowgate.evaluation.boundary.run_report import read_runs
from knowgate.report.boundary import charts as figures
from knowgate.report.boundary.page import page, write_page
from knowgate.report.boundary.sheets import NO_OPEN
from knowgate.report.markup import chart, escape
from knowgate.report.question import LONGEST
from knowgate.types import Passage
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


def text_of(found):
    """The page without its scripts and styles."""
    return re.sub(r"<(script|style)\b.*?</\1>", "", found, flags=re.DOTALL)


def test_the_page_is_one_file_below_eight_megabytes_that_fetches_nothing(tmp_path):
    out = tmp_path / "report.html"
    write_page(read_runs([write_run(tmp_path / "a", varied_rows())]), out)
    assert out.stat().st_size < 8e6
    assert not re.search(r"<(link|script|img)[^>]*(src|href)=", text_of(out.read_text(encoding="utf-8")))
    assert out.read_text(encoding="utf-8").count("<script>") == 2


def test_hostile_text_stays_text(tmp_path):
    found = page(read_runs([hostile_run(tmp_path / "a")]))
    assert found.count("<script>") == 2
    assert "<img" not in text_of(found)
    assert escape(HOSTILE) in found


def test_no_text_ends_the_data_of_a_chart():
    found = chart({"data": [{"name": HOSTILE}], "layout": {"height": 1}}, HOSTILE)
    assert found.count("</script") == 1


def test_a_closed_book_run_says_so_instead_of_empty_plots(tmp_path):
    found = text_of(page(read_runs([write_run(tmp_path / "a", varied_rows(10, opened=False))])))
    assert found.count('class="chart"') == 1  # accuracy
    assert f"fake: {NO_OPEN}." in found


def test_extreme_questions_come_with_answers_and_passages(tmp_path):
    harmed = row("h", side(True, 1.0, text="Paris"), side(False, 0.0, text="Lyon"), passages=(Passage("p", "Of Lyon"),))
    found = text_of(page(read_runs([write_run(tmp_path / "a", [harmed])])))
    section = found[found.index('id="harmed"') : found.index('id="helped"')]
    assert all(part in section for part in ("q h", "Paris", "Lyon", "Of Lyon", "-1.00", "1 passages"))


def test_long_passages_are_cut(tmp_path):
    harmed = row("h", side(True, 1.0), side(False, 0.0), passages=(Passage("p", "w" * 10 * LONGEST),))
    found = text_of(page(read_runs([write_run(tmp_path / "a", [harmed])])))
    assert found.count("w" * LONGEST + " … (cut)") == 1


def test_a_row_with_half_a_character_is_refused_before_the_page_is_written(tmp_path):
    path = write_run(tmp_path / "a", [row("a", side(), side())], model="fake")
    (path / "labels.jsonl").write_text((path / "labels.jsonl").read_text().replace("q a", r"\ud83d"), encoding="utf-8")
    with pytest.raises(ArtefactError, match="half a character"):
        write_page(read_runs([path]), tmp_path / "report.html")


def test_a_missing_plotly_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(MissingExtra, match=r"knowgate\[report\]"):
        page([])


def test_plotly_accepts_every_figure(tmp_path):
    graph = pytest.importorskip("plotly.graph_objects")
    runs = read_runs([write_run(tmp_path / name, varied_rows(30, power)) for name, power in (("a", 0.1), ("b", 0.9))])
    found = [figures.accuracy(runs), figures.copying(runs), figures.effects(runs[0], "mastery")]
    for figure in [*found, figures.savings(runs, "certainty")]:
        graph.Figure(figure)  # raises on unknown properties


def test_the_curve_has_a_dot_per_threshold_and_a_random_line(tmp_path):
    rows = [row("a", side(True, 1.0), side(False)), row("b", side(False, 0.5), side(True))]
    curve, random = figures.savings(read_runs([write_run(tmp_path / "a", rows)]), "mastery")["data"]
    assert (curve["x"], curve["y"]) == ([0.0, 0.5, 1.0], [0.5, 1.0, 0.5])
    assert (random["x"], random["y"]) == ([0, 1], [0.5, 0.5])


@needs_browser
def test_every_chart_is_drawn_in_a_browser_without_console_errors(tmp_path):
    rows = [varied_rows(60, 0.1), varied_rows(60, 0.9), varied_rows(10, 0.5, opened=False)]
    names = ("small", "large", "closed only")
    runs = read_runs([write_run(tmp_path / n, r, model=n) for n, r in zip(names, rows, strict=True)])
    write_page(runs, tmp_path / "report.html")
    opened = open_page(tmp_path / "report.html", tmp_path / "profile")
    charts = re.findall(r'<figure class="chart">.*?</figure>', opened.dom, flags=re.DOTALL)
    assert len(charts) == 1 + 2 * 2 * 2 + 2 + 1  # accuracy, two panels of effects of two runs, savings, copy rate
    assert all('class="main-svg"' in chart for chart in charts)
    assert all(chart.count('class="point') > 1 for chart in charts)
    assert opened.console == []


@needs_browser
def test_hostile_text_runs_nothing_in_a_browser(tmp_path):
    write_page(read_runs([hostile_run(tmp_path / "a")]), tmp_path / "report.html")
    opened = open_page(tmp_path / "report.html", tmp_path / "profile")
    assert opened.console == []
    assert "<title>Knowledge boundary: " in opened.dom
    assert "<img" not in text_of(opened.dom)
