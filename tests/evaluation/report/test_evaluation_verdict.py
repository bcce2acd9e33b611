"""The verdict of an evaluation in words."""

from knowgate.evaluation.recommendation import Recommendation
from knowgate.evaluation.report.evaluation_verdict import _describe_doubt
from knowgate.stats.bootstrap import Estimate


def test_a_gain_whose_interval_is_above_zero_names_the_stricter_test_that_it_fails():
    recommendation = Recommendation(
        "try",
        500,
        0.02,
        "judge",
        0.5,
        difference=Estimate(0.002, -0.01, 0.012),
        gain=Estimate(0.011, 0.004, 0.019),
        beats_chance=False,
    )
    text = _describe_doubt(recommendation)
    assert "gains +1.1 points (95 % interval +0.4 to +1.9)" in text
    assert "must gain more than 2.6 standard errors" in text
