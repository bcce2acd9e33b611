"""The page "How much would I save?": its table and its calculator show the recorded predictions."""

from __future__ import annotations

import re

import pytest

from benchmarks.policy_predictions import load_predictions
from tests.support.chromium import needs_browser, open_page
from tools.docs import decision_figure, savings, savings_figure

pytestmark = pytest.mark.records


def test_the_table_is_that_of_the_records():
    page = savings.PAGE.read_text(encoding="utf-8")
    assert savings.insert_table(page) == page
    assert page.count("| GPT-4, NQ |") == 1


def test_a_curve_begins_at_never_and_ends_at_always():
    test = load_predictions("gpt4_nq").test
    (curve,) = [curve for curve in savings.measure_curves() if curve.llm == "GPT-4, NQ"]
    assert (curve.n, len(curve.points)) == (len(test.closed), 11)
    assert curve.never == pytest.approx(test.closed.mean(), abs=1e-5)
    assert curve.always == pytest.approx(test.open.mean(), abs=1e-5)
    assert (curve.points[-1].difference, curve.points[-1].low, curve.points[-1].high) == (0, 0, 0)


def test_the_calculator_has_every_curve_and_the_default_prices():
    page = savings.markdown()
    assert all(f'"llm": "{curve.llm}"' in page for curve in savings.measure_curves())
    assert 'id="s-seconds" type="number" value="0.3"' in page
    assert re.findall(r"@\w+@", page) == []  # names that were not replaced
    assert "\n\n" not in page  # Markdown would end the block of HTML there


@needs_browser
def test_the_calculator_takes_the_nearest_llm(tmp_path):
    """60 % is nearest to text-davinci-003: half of 100,000 searches at 0.005 are saved, 50,000 calls at 0.001 added."""
    page = tmp_path / "savings.html"
    page.write_text(f"<!DOCTYPE html><meta charset='utf-8'>{savings.markdown()}", encoding="utf-8")
    opened = open_page(page, tmp_path / "profile")
    assert opened.console == []
    assert "Nearest recorded LLM: text-davinci-003, NQ." in opened.dom
    assert "<th>Price a month</th><td>$600.00</td><td>$400.00</td><td>-$200.00</td>" in opened.dom
    assert '<polyline fill="none" stroke="#0b6bab" stroke-width="2.5" points="70,' in opened.dom


def test_the_figure_is_that_of_the_records():
    assert savings_figure.FIGURE.read_text(encoding="utf-8") == savings_figure.draw()


def test_labels_that_would_overlap_are_moved_down():
    assert savings_figure.place_labels([50, 10, 14]) == [50, 10, 10 + savings_figure.LABEL_HEIGHT]


def test_the_picture_of_a_decision_is_up_to_date():
    assert decision_figure.FIGURE.read_text(encoding="utf-8") == decision_figure.draw()
