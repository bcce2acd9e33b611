"""Is a recommended gate luck? On simulated runs whose gates say nothing, the verdict hardly ever recommends one."""

from pathlib import Path

import pytest

from knowgate.evaluation.gate_evaluation import evaluate
from knowgate.evaluation.recommendation import recommend
from tests.support.luck import GAINING, recommended, simulated_run


@pytest.mark.slow
def test_uninformative_gates_are_recommended_in_at_most_5_percent():
    """By a true rate of 5 %, more than 5 of 40 come up in 1.4 % of the cases; the seeds are fixed."""
    assert recommended(40, knowing=0.0) <= 5


def test_informative_gates_are_recommended():
    assert recommended(12, knowing=3.0, situations=GAINING) >= 11


def test_no_gate_is_recommended_if_passages_change_nothing(tmp_path: Path):
    run = simulated_run(tmp_path / "run", "passages do nothing", seed=1, n=300, knowing=3.0)
    advice = recommend(evaluate(runs=run, resamples=100))
    assert (advice.gate, advice.is_positive, advice.skipped.value) == ("never", True, 1.0)
