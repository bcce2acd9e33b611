"""Skip, one retrieval or several, by expected gain against the price of a search."""

from dataclasses import replace

import numpy as np
import pytest

from knowgate.cli.main import run as knowgate
from knowgate.data.runs.rows import GradedAnswer
from knowgate.data.runs.table import load_label_table
from knowgate.errors import BadSetting
from knowgate.evaluation.evaluation_summary import evaluation_to_dict
from knowgate.evaluation.gate_evaluation import evaluate
from knowgate.evaluation.report.evaluation_tables import COLUMN_DEFINITIONS, build_evaluation_tables
from knowgate.evaluation.retrieval_actions import ActionOutcomes, choose_actions, predict_action_success
from tests.support.hand_gate import write_rows
from tests.support.pairs_by_hand import pair_rows
from tests.support.processes import python


@pytest.fixture
def run(tmp_path):
    """After several rounds everything is right."""
    rows = [replace(row, iterative=GradedAnswer("all", correct=True), rounds=2) for row in pair_rows(200)]
    return write_rows(tmp_path / "run", rows)


def test_the_action_of_highest_expected_gain_is_taken():
    chances = np.array([[0.9, 0.9, 0.95], [0.2, 0.6, 0.65], [0.1, 0.2, 0.9]])
    assert choose_actions(chances, (0, 1, 3), 0.05).tolist() == [0, 1, 2]
    assert choose_actions(chances, (0, 1, 3), 0.0).tolist() == [2, 2, 2]
    assert choose_actions(chances, (0, 1, 3), 1.0).tolist() == [0, 0, 0]


def test_success_probabilities_follow_need():
    rng = np.random.default_rng(0)
    needs = rng.uniform(size=4000)
    right = np.stack([rng.uniform(size=4000) < 1 - needs, rng.uniform(size=4000) < 0.6, np.ones(4000, dtype=bool)], 1)
    result = predict_action_success(ActionOutcomes(needs, right, right[:, 1]), np.array([0.2, 0.8]))
    assert result[0, 0] == pytest.approx(0.8, abs=0.04)
    assert result[1, 0] == pytest.approx(0.2, abs=0.04)
    assert result[:, 1] == pytest.approx([0.6, 0.6], abs=0.04)
    assert result[:, 2].tolist() == [1.0, 1.0]  # all were right


def test_free_searches_are_made_and_expensive_ones_are_not(run):
    free, dear = (
        evaluate("logprob:first", run, price_retrieval=price, resamples=20).actions[0] for price in (0.0, 5.0)
    )
    assert free.shares[2] == pytest.approx(1.0)
    assert (free.accuracy.value, free.searches) == (1.0, pytest.approx(2.0))  # as many rounds as the rows say
    assert dear.shares == (1.0, 0.0, 0.0)
    assert dear.searches == 0


def test_a_wrong_answer_that_costs_more_pays_for_more_searches(run):
    cheap, dear = (
        evaluate("logprob:first", run, price_retrieval=0.1, price_wrong=wrong, resamples=20).actions[0].searches
        for wrong in (0.2, 2.0)
    )
    assert cheap < dear


def test_actions_are_in_the_table_and_the_json(run):
    result = evaluate("logprob:first", run, price_search=0.05, arbiter="rules", resamples=20)
    text_table = next(one for one in build_evaluation_tables(result) if one.title.startswith("Skip"))
    assert set(text_table.columns) - {"gate"} <= set(COLUMN_DEFINITIONS)
    assert evaluation_to_dict(result)["actions"][0]["price"] == 0.05


def test_rows_without_iterative_answers_are_rejected(tmp_path):
    with pytest.raises(BadSetting, match="needs answers after several searches"):
        evaluate("logprob:first", write_rows(tmp_path / "run", pair_rows(60)), price_retrieval=0.1)


def test_the_command_names_no_flag_that_was_not_typed(tmp_path, capsys):
    run = write_rows(tmp_path / "run", pair_rows(60))
    command = ["eval", "--labels", str(run), "--gates", "logprob:first", "--price-wrong", "0.5"]
    assert knowgate(command) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "needs answers after several searches" in error
    assert "price_" not in error
    assert "--price-search" not in error


@pytest.mark.parametrize(("prices", "message"), [((-1, 1), "price_search=-1"), ((0.1, 0), "price_wrong=0")])
def test_invalid_prices_are_rejected(run, prices, message):
    with pytest.raises(BadSetting, match=message):
        evaluate("logprob:first", run, price_retrieval=prices[0], price_wrong=prices[1])


def test_a_row_without_passages_counts_with_its_closed_book_answer(tmp_path):
    rows = [replace(row, iterative=GradedAnswer("all", correct=True)) for row in pair_rows(20)]
    rows[0] = replace(rows[0], open=None, iterative=None, benefit=None)
    trial = load_label_table([write_rows(tmp_path / "run", rows)])
    assert trial.iterative_right[0] == trial.closed_book_right[0]
    assert trial.mean_rounds == 3.0


@pytest.mark.process
def test_evaluating_loads_no_scikit_learn_unless_actions_are_priced():
    assert (
        "sklearn"
        not in python(
            "import sys; from knowgate.evaluation.gate_evaluation import evaluate; print(*sys.modules)"
        ).split()
    )
