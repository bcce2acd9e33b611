"""Runs of every odd kind: each becomes a page that makes sense, or is refused in a sentence."""

import re

import pytest

from knowgate.data.runs.records import RecordedNeeds, write_needs
from knowgate.errors import BadInput
from knowgate.evaluation.boundary import read_run_reports
from knowgate.evaluation.evaluation_diff import diff_evaluations
from knowgate.evaluation.evaluation_summary import summarize_evaluation
from knowgate.evaluation.gate_evaluation import evaluate
from knowgate.evaluation.recommendation import recommend
from knowgate.evaluation.report.boundary_page import write_boundary_page
from knowgate.evaluation.report.diff_report import write_diff_page
from knowgate.evaluation.report.evaluation_page import write_evaluation_page
from knowgate.types import Passage
from tests.evaluation.report.test_boundary_page import HOSTILE, text_of
from tests.support.chromium import needs_browser, open_page
from tests.support.runs_by_hand import row, side, varied_rows, write_run
from tests.support.trials_by_hand import SETTINGS, trial_run, varied_run

ARABIC, HEBREW, CHINESE = "ما هي عاصمة فرنسا؟", "מהי בירת צרפת?", "法国的首都是哪里？"


def page_of(run, out):
    write_evaluation_page(evaluate(runs=run, resamples=20), out)
    return out.read_text(encoding="utf-8")


def section(page_html, name):
    return re.search(
        rf'<(section|details) [^>]*id="{name}">.*?(?=<section|<details class="fold"|<footer)', page_html, re.S
    )


def test_without_open_book_answers_the_page_shows_only_ranking(tmp_path):
    page_html = page_of(trial_run(tmp_path / "run", varied_rows(60, opened=False)), tmp_path / "p.html")
    assert "Cannot be said" in page_html
    assert "no question was answered with passages" in page_html
    assert not any(section(page_html, name) for name in ("picture", "money", "where", "examples", "details"))
    assert "AUROC" in section(page_html, "gates")[0]


def test_without_gold_answers_the_evaluation_is_rejected_with_advice(tmp_path):
    run = write_run(tmp_path / "run", [row("a", side(None, None), side(None, None), answers=())], **SETTINGS)
    with pytest.raises(BadInput, match=r"1 not graded\. Label questions that have gold answers. .* knowgate report"):
        evaluate(runs=run)


def test_without_gold_answers_the_page_gives_advice_and_no_empty_chart(tmp_path):
    run = write_run(tmp_path / "run", [row("a", side(None, None), side(None, None), answers=())], **SETTINGS)
    write_boundary_page(read_run_reports([run]), tmp_path / "p.html")
    page_html = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert "and label again: knowgate label" in page_html
    assert "<svg" not in section(page_html, "accuracy")[0]


@pytest.mark.parametrize(("closed", "opened"), [(True, True), (False, True), (True, False), (False, False)])
def test_one_question_makes_a_page_that_claims_nothing(tmp_path, closed, opened):
    page_html = page_of(trial_run(tmp_path / "run", [row("a", side(closed), side(opened))]), tmp_path / "p.html")
    assert "Fewer than 100 different questions cannot show whether a gate pays here." in page_html
    assert not re.search(r"\bnan\b", text_of(page_html), re.IGNORECASE)


def test_two_hundred_gates_stay_a_small_page_with_five_lines(tmp_path):
    rows = varied_rows(120)
    run = write_run(tmp_path / "run", rows, **SETTINGS)
    answered = [one.id for one in rows if one.error is None]
    write_needs(
        run,
        [
            RecordedNeeds(f"gate {number}", 0.5, {key: k * (number + 7) % 101 / 101 for k, key in enumerate(answered)})
            for number in range(200)
        ],
    )
    page_html = page_of(run, tmp_path / "p.html")
    assert len(page_html) < 1e6
    picture = section(page_html, "picture")[0]
    assert picture.count('checked><i class="swatch') <= 5
    assert picture.count('<g class="') == 200 + 2  # and random and the oracle
    assert section(page_html, "gates")[0].count('<th scope="row">') == 203


def test_right_to_left_and_cjk_texts_are_isolated(tmp_path):
    rows = [
        row(f"q{i}", side(i % 2 == 0, text=text), side(True, text=text), question=text, answers=(text,))
        for i, text in enumerate([ARABIC, HEBREW, CHINESE] * 4)
    ]
    run = trial_run(tmp_path / "run", rows)
    page_html = page_of(run, tmp_path / "p.html")
    assert all(f'<bdi dir="auto">{text}</bdi>' in page_html for text in (ARABIC, HEBREW, CHINESE))


def hostile_run(path):
    rows = [
        row(
            f"{HOSTILE}{i}",
            side(i % 2 == 0, text=HOSTILE),
            side(i % 3 == 0, text=HOSTILE),
            question=HOSTILE,
            answers=(HOSTILE,),
            meta={"dataset": f"{HOSTILE}{i % 2}"},
            passages=(Passage(HOSTILE, HOSTILE, HOSTILE),),
        )
        for i in range(40)
    ]
    run = write_run(path, rows, **{**SETTINGS, "model": HOSTILE, "grader": HOSTILE})
    write_needs(run, [RecordedNeeds(f"{HOSTILE}g", 0.5, {one.id: 0.2 if one.closed.correct else 0.9 for one in rows})])
    return run


def test_hostile_texts_stay_texts_on_the_page_of_an_evaluation(tmp_path):
    page_html = page_of(hostile_run(tmp_path / "run"), tmp_path / "p.html")
    assert page_html.count("<script") == 1
    assert "<img" not in text_of(page_html)


@needs_browser
def test_hostile_texts_run_nothing_in_a_browser(tmp_path):
    evaluation = evaluate(runs=hostile_run(tmp_path / "run"), resamples=20)
    write_evaluation_page(evaluation, tmp_path / "eval.html")
    own = summarize_evaluation(evaluation, recommend(evaluation), HOSTILE)
    write_diff_page(diff_evaluations(own, own), tmp_path / "compare.html")
    for name in ("eval", "compare"):
        opened = open_page(tmp_path / f"{name}.html", tmp_path / f"profile {name}")
        assert opened.console == []
        assert "<title>taken" not in opened.dom
        assert "<img" not in text_of(opened.dom)


def test_a_gate_that_gives_every_question_the_same_need_is_drawn(tmp_path):
    page_html = page_of(trial_run(tmp_path / "run", varied_rows(120)), tmp_path / "p.html")
    assert "Calibration: poor" in page_html


def test_a_page_names_what_was_left_out(tmp_path):
    assert "2 failed" in section(page_of(varied_run(tmp_path / "run"), tmp_path / "p.html"), "about")[0]
