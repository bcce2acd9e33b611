"""The page "How much would I save?": its table and its calculator show the recorded predictions."""

from __future__ import annotations

import pytest

from benchmarks.policy_predictions import load_predictions
from tools.docs import savings

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
    assert "@" not in page
    assert "\n\n" not in page  # Markdown would end the block of HTML there
