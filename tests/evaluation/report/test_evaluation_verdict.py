"""The verdict of an evaluation in words."""

from dataclasses import replace

import pytest

from knowgate.evaluation.cost import CostAssumptions, CostComparison
from knowgate.evaluation.recommendation import Recommendation, SliceChange
from knowgate.evaluation.replay import PolicyCost
from knowgate.evaluation.report.evaluation_verdict import _describe_chance, _write_headline
from knowgate.stats.bootstrap import Estimate

DOUBTFUL = Recommendation(
    "try", 500, 0.02, "judge", 0.5, skipped=Estimate(0.3), difference=Estimate(0.002, -0.01, 0.012), agreeing_folds=5
)
ALWAYS, NEVER, GATED = (PolicyCost(searches, 0.0, 0.0, calls=1.0) for searches in (1.0, 0.0, 0.7))
PAYING = CostComparison(ALWAYS, NEVER, GATED, CostAssumptions().prices)


def test_a_gain_whose_interval_is_above_zero_names_the_stricter_test_that_it_fails():
    text = _describe_chance(replace(DOUBTFUL, gain=Estimate(0.011, 0.004, 0.019), beats_chance=False))
    assert "gains +1.1 points (95 % interval +0.4 to +1.9)" in text
    assert "must gain more than 2.6 standard errors" in text


@pytest.mark.parametrize(
    ("doubt", "words"),
    [
        ({"agreeing_folds": 2}, "only 2 of 5 repeats chose the same gate"),
        ({"beats_chance": False}, "it is not certain that it chooses better than chance"),
        ({"difference": Estimate(-0.001, -0.03, 0.03)}, "a loss above 2 points is not ruled out"),
        (
            {"losing_slices": (SliceChange("data set hotpotqa", 500, Estimate(-0.05, -0.07, -0.03)),)},
            "data set hotpotqa certainly loses more than 2 points",
        ),
    ],
)
def test_a_gate_that_is_worth_a_try_names_its_doubt_in_the_first_sentence(doubt, words):
    assert _write_headline(replace(DOUBTFUL, **doubt), PAYING).startswith(f"Try 'judge' at 0.5, but {words}")
    assert _write_headline(replace(DOUBTFUL, level="use"), PAYING) == "Use 'judge' at 0.5."


def test_how_often_chance_gets_the_verdict_is_told_for_gates_that_were_chosen_here():
    chance = "Of 400 evaluations with shuffled scores, {} got this verdict, so this one {}."
    assert _describe_chance(DOUBTFUL) == chance.format(108, "may be chance, too")
    assert _describe_chance(replace(DOUBTFUL, level="use")) == chance.format(3, "is probably not chance")
    assert not _describe_chance(replace(DOUBTFUL, agreeing_folds=0))  # nothing was chosen
    assert not _describe_chance(replace(DOUBTFUL, gate="never"))
