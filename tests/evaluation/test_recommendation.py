from dataclasses import replace

import numpy as np
import pytest

from knowgate.data.runs.records import RecordedNeeds, write_needs
from knowgate.errors import BadSetting
from knowgate.evaluation.cost import CostAssumptions, estimate_gated_cost, format_money, format_price
from knowgate.evaluation.gate_choice import choose_gate
from knowgate.evaluation.gate_comparison import GateGuarantee, build_answer_table
from knowgate.evaluation.gate_evaluation import evaluate
from knowgate.evaluation.recommendation import (
    Z_CERTAIN,
    Recommendation,
    SliceChange,
    _is_above_zero,
    recommend,
)
from knowgate.evaluation.report.evaluation_page import write_evaluation_page
from knowgate.evaluation.report.evaluation_tables import build_full_table
from knowgate.evaluation.report.evaluation_verdict import _describe_losing_slices, build_verdict
from knowgate.gates.calibration.threshold_calibration import calibrate
from knowgate.gates.calibration.threshold_choice import GateOutcomes
from knowgate.stats.bootstrap import Estimate
from tests.support.hand_gate import varied_rows, write_gate, write_rows
from tests.support.pairs_by_hand import Prefers
from tests.support.runs_by_hand import row, side, write_run
from tests.support.trials_by_hand import SETTINGS, trial_run

N = 400


def planted(path, *, known, helped=1.0, n=N, needs=None):
    """A run whose LLM knows every `known`-th question; passages help with a share of the others, and never hurt."""
    rows = [
        row(f"q{i}", side(i % known == 0), side(i % known == 0 or i % 10 < 10 * helped), question=f"what is {i}?")
        for i in range(n)
    ]
    run = write_run(path, rows, **SETTINGS)
    good = {item.id: 0.1 if item.closed.correct else 0.9 for item in rows} if needs is None else needs(rows)
    write_needs(run, [RecordedNeeds("good", 0.5, good)])
    return run


def evaluated(run):
    return evaluate(runs=run, resamples=200)


def test_a_gate_that_recognizes_known_questions_is_worth_using(tmp_path):
    recommendation = recommend(evaluated(planted(tmp_path / "run", known=4)))
    assert (recommendation.level, recommendation.gate, recommendation.agreeing_folds) == ("use", "good", 5)
    assert recommendation.threshold == pytest.approx(0.5)
    assert (recommendation.skipped.value, recommendation.difference.value) == (0.25, 0.0)
    assert recommendation.gain.value == pytest.approx(0.25 * 0.75)  # a skip at random loses three answers of four


def test_a_gate_that_ranks_at_random_is_not_recommended(tmp_path):
    run = planted(tmp_path / "run", known=4, needs=lambda rows: {item.id: hash_share(item.id) for item in rows})
    assert recommend(evaluated(run)).level == "leave"


def hash_share(text):
    return sum(map(ord, text)) % 97 / 97


def test_a_gain_that_might_be_luck_does_not_beat_chance():
    """One gain among 100: mean 1/100, less one loss 0. Twenty: 0.19 against 2.576 standard errors of about 0.042."""
    gains = np.zeros(100)
    gains[0] = 1
    assert not _is_above_zero(gains, Z_CERTAIN)
    gains[:20] = 1
    assert _is_above_zero(gains, Z_CERTAIN)


def test_no_retrieval_is_recommended_if_passages_never_help(tmp_path):
    recommendation = recommend(evaluated(planted(tmp_path / "run", known=2, helped=0.0)))
    assert (recommendation.level, recommendation.gate, recommendation.skipped.value) == ("use", "never", 1.0)
    assert recommendation.gain.value is None
    assert build_verdict(
        evaluated(planted(tmp_path / "other", known=2, helped=0.0)), CostAssumptions(), 0.02
    ).headline.startswith("Do without retrieval here.")


def test_few_questions_give_no_recommendation(tmp_path):
    assert recommend(evaluated(planted(tmp_path / "run", known=4, n=60))).level == "unknown"


def test_repeated_questions_count_once(tmp_path):
    rows = [row(f"q{i}", side(i % 4 == 0), side(True), question=f"what is {i % 8}?") for i in range(N)]
    assert recommend(evaluated(trial_run(tmp_path / "run", rows))).level == "unknown"


def test_a_guarantee_that_holds_comes_first_at_its_own_threshold(tmp_path):
    evaluation = evaluated(planted(tmp_path / "run", known=4))
    evaluation.guarantees["good"] = GateGuarantee("It loses at most 2 %.", holds=True, max_loss=0.02)
    recommendation = recommend(evaluation)
    assert (
        recommendation.level,
        recommendation.threshold,
        recommendation.guarantee,
        recommendation.agreeing_folds,
    ) == (
        "use",
        0.5,
        "It loses at most 2 %.",
        0,
    )


def test_a_guarantee_that_the_measurements_contradict_gives_a_negative_verdict_at_its_threshold(tmp_path):
    run = planted(tmp_path / "run", known=4, needs=lambda rows: {item.id: hash_share(item.id) for item in rows})
    evaluation = evaluated(run)
    evaluation.guarantees["good"] = GateGuarantee("It loses at most 2 %.", holds=True, max_loss=0.02)
    recommendation = recommend(evaluation)
    assert (recommendation.level, recommendation.threshold, recommendation.at_own_threshold) == ("leave", 0.5, True)
    assert "At its own threshold, 'good' at 0.5, skips" in build_verdict(evaluation, CostAssumptions(), 0.02).text


def test_a_calibrated_threshold_is_judged_even_if_its_guarantee_does_not_hold(tmp_path):
    """All thresholds from 0.1 are equally good for the planted gate; its own is 0.5 however few questions are lost."""
    evaluation = evaluated(planted(tmp_path / "run", known=4))
    evaluation.guarantees["good"] = GateGuarantee("", holds=False)
    verdict = build_verdict(evaluation, CostAssumptions(price_llm_call=0.0), 0.02)
    assert verdict.headline == "Use 'good' at its own threshold 0.5."
    assert verdict.recommendation.agreeing_folds == 0


def test_a_guarantee_with_an_arbiter_is_measured_with_it(tmp_path):
    run = planted(tmp_path / "run", known=4, helped=0.5)
    evaluation = evaluate(runs=run, arbiter=Prefers("pick"), resamples=50)
    evaluation.guarantees["good"] = GateGuarantee("Proven.", holds=True, max_loss=0.9, has_arbiter=True)
    recommendation = recommend(evaluation)
    cascade = next(line for line in evaluation.cascade.results if line.gate == "good")
    assert recommendation.arbiter == evaluation.cascade.arbiter
    assert (recommendation.right == cascade.right).all()


def test_a_policy_that_always_retrieves_is_worth_what_its_arbiter_gains(tmp_path):
    """Passages spoil every fourth answer, which the arbiter repairs by preferring the draft."""
    rows = [
        row(f"q{i}", side(i % 4 == 0, text="pick"), side(i % 4 != 0, text="other"), question=f"what is {i}?")
        for i in range(N)
    ]
    run = write_run(tmp_path / "run", rows, **SETTINGS)
    write_needs(run, [RecordedNeeds("good", -1.0, {item.id: 0.5 for item in rows})])
    evaluation = evaluate(runs=run, arbiter=Prefers("pick"), resamples=50)
    always = next(line for line in evaluation.cascade.results if line.gate == "always")
    right = np.ones(N, dtype=bool)  # of the arbiter
    cascade = replace(evaluation.cascade, results=[replace(always, right=right)])
    evaluation = replace(evaluation, cascade=cascade)
    evaluation.guarantees["good"] = GateGuarantee("Proven.", holds=True, max_loss=0.01, has_arbiter=True)
    verdict = build_verdict(evaluation, CostAssumptions(), 0.02)
    assert (verdict.level, verdict.label, verdict.costs.gated.calls) == ("gains", "More right answers", 2.0)
    assert verdict.headline.startswith("'good' always retrieves with the arbiter")


def test_without_gates_there_is_no_verdict(tmp_path):
    rows = [row(f"q{i}", side(False), side(True), question=f"what is {i}?") for i in range(N)]
    evaluation = evaluate(["always"], write_run(tmp_path / "run", rows, **SETTINGS), resamples=50)
    verdict = build_verdict(evaluation, CostAssumptions(), 0.02)
    assert (verdict.label, verdict.headline) == ("Cannot be said", "No gate could be evaluated on these rows.")
    assert "`knowgate fit`" in verdict.text
    write_evaluation_page(evaluation, tmp_path / "p.html")
    assert "0 gates" not in (tmp_path / "p.html").read_text(encoding="utf-8")


def test_a_guarantee_that_does_not_hold_here_is_ignored(tmp_path):
    evaluation = evaluated(planted(tmp_path / "run", known=4))
    evaluation.guarantees["good"] = GateGuarantee("It loses at most 2 %. This does not hold here: …", holds=False)
    assert recommend(evaluation).guarantee == ""


def test_the_note_lists_stored_guarantees(tmp_path):
    evaluation = evaluated(planted(tmp_path / "run", known=4))
    assert build_verdict(evaluation, CostAssumptions(), 0.02).note.endswith(
        " This choice has no guarantee. To get one, fit the gate and run `knowgate calibrate` on its folder."
    )
    evaluation.guarantees["good"] = GateGuarantee("It loses at most 2 %. This does not hold here: …", holds=False)
    assert build_verdict(evaluation, CostAssumptions(), 0.02).note.endswith(
        " This choice has no guarantee. One is stored with 'good': It loses at most 2 %. This does not hold here: …."
    )


def test_one_loss_is_added_to_the_bound():
    """10 skips without loss among n: the bound is -(1 + 1.645 sqrt(1 - 1/n)) / n, which must be above -0.01."""
    n = 200
    needs = np.where(np.arange(n) < 10, 0.1, 0.9)
    closed, opened = np.arange(n) < 10, np.ones(n, dtype=bool)
    every = np.ones(n, dtype=bool)
    outcomes = {"g": GateOutcomes(needs, closed, opened)}
    assert choose_gate(outcomes, every, 0.01) is None
    chosen = choose_gate(outcomes, every, 0.0133)
    assert chosen is not None
    assert chosen.skipped == 0.05


def test_no_gate_is_worth_using_if_the_llm_knows_nothing(tmp_path):
    verdict = build_verdict(evaluated(planted(tmp_path / "run", known=100)), CostAssumptions(), 0.02)
    assert verdict.headline == "No gate is worth using here: retrieve for every question."
    assert "answers only 1.0 % of these questions right without passages" in verdict.sentences[0]


@pytest.mark.parametrize(("text", "shown"), [("two words", {"2.0", "4.0"}), ("", {"unknown"})])
def test_unknown_tokens_are_not_counted_as_zero(tmp_path, text, shown):
    rows = [row(f"q{i}", side(text=text), side(text=text), question=f"what is {i}?") for i in range(4)]
    evaluation = evaluated(trial_run(tmp_path / "run", rows))
    assert {line[5] for line in build_answer_table(evaluation.gates).rows} == shown
    no_skips = np.zeros(len(evaluation.table.rows), dtype=bool)
    assert estimate_gated_cost(evaluation.table, no_skips, None).completion == (2 if text else None)


def test_savings_are_those_of_the_searches_and_tokens(tmp_path):
    evaluation, prices = (
        evaluated(planted(tmp_path / "run", known=4)),
        CostAssumptions(price_search=0.01, price_token=0),
    )
    verdict = build_verdict(evaluation, prices, 0.02)
    assert (
        "saves 25,000 searches and $250, at $0.01 a search (your price) and $0.00 a million tokens (your price)"
        in verdict.text
    )
    assert [tile.value for tile in verdict.key_figures] == ["25.0 %", "0.0", "1.75", "$250"]
    assert verdict.key_figures[0].description == "of the searches skipped on held-out questions"
    assert "Not counted" not in verdict.text + verdict.judge_note  # nothing says that the gate has a judge
    with_judge = build_verdict(replace(evaluation, with_judge=frozenset({"good"})), prices, 0.02)
    assert with_judge.text.endswith("Not counted: running the judge.")


def test_all_figures_of_the_verdict_are_about_the_held_out_questions(tmp_path):
    """Needs without ties: the thresholds of the folds differ a little from the threshold that all questions choose."""
    run = planted(
        tmp_path / "run",
        known=2,
        n=200,
        needs=lambda rows: {item.id: 0.6 * hash_share(item.id) + 0.4 * (not item.closed.correct) for item in rows},
    )
    verdict = build_verdict(evaluated(run), CostAssumptions(price_search=0.01, price_token=0.0), 0.05)
    recommendation = verdict.recommendation
    skipped = recommendation.held_out_skipped.value
    assert skipped == recommendation.held_out_skips.mean() != recommendation.skipped.value
    shown = [f"{skipped:.1%}".replace("%", " %"), f"{2 - skipped:.2f}", f"${100_000 * skipped * 0.01:.0f}"]
    assert [verdict.key_figures[number].value for number in (0, 2, 3)] == shown
    assert f"On held-out questions it skips {shown[0]} of the searches: " in verdict.text
    assert f"skips {100 * recommendation.skipped.value:.1f} %." in verdict.note


@pytest.mark.parametrize(("known", "n"), [(4, 60), (100, N)])
def test_prices_are_shown_even_if_nothing_is_recommended(tmp_path, known, n):
    evaluation = evaluated(planted(tmp_path / "run", known=known, n=n))
    verdict = build_verdict(evaluation, CostAssumptions(price_search=0.02, price_token=0.0), 0.02)
    assert not verdict.recommendation.is_positive
    prices = "$0.02 a search (your price) and $0.00 a million tokens (your price)"
    assert f"costs $2,000, at {prices}." in verdict.text
    assert "below" not in verdict.text  # on a terminal it is the last that is said


def test_without_open_book_answers_the_cost_of_skipping_is_not_guessed(tmp_path):
    rows = [row(f"q{i}", side(i % 2 == 0)) for i in range(10)]
    verdict = build_verdict(evaluated(trial_run(tmp_path / "run", rows)), CostAssumptions(), 0.02)
    assert (verdict.recommendation.level, verdict.label) == ("unknown", "Cannot be said")
    assert "'good' tells known from unknown questions best" in verdict.text


def test_a_negative_price_is_rejected():
    with pytest.raises(BadSetting, match="price_search=-1"):
        CostAssumptions(price_search=-1)


def test_the_guarantee_of_a_calibrated_gate_is_read_from_its_folder(tmp_path):
    gate = write_gate(tmp_path / "gate")
    rows = varied_rows(600)
    calibrate(gate, write_rows(tmp_path / "calibration", rows[::2]), max_loss=0.2, confidence=0.9)
    verdict = build_verdict(
        evaluate([gate], write_rows(tmp_path / "test", rows[1::2]), resamples=50), CostAssumptions(), 0.02
    )
    assert verdict.recommendation.gate == "gate"
    assert verdict.recommendation.n_calibrated == 0
    assert "loses at most 20 % of the answers against always retrieving, with 90 % confidence" in verdict.text
    again = recommend(evaluate([gate], tmp_path / "calibration", resamples=50))
    assert 100 < again.n_calibrated < 200  # half of the 300


def test_an_arbiter_is_described_in_the_verdict_and_on_the_page(tmp_path):
    run = write_rows(tmp_path / "run", varied_rows(40))
    evaluation = evaluate("logprob:first", run, arbiter=Prefers("pick"), resamples=20)
    assert "The arbiter 'prefers' after every search: " in build_verdict(evaluation, CostAssumptions(), 0.02).text
    write_evaluation_page(evaluation, tmp_path / "p.html")
    assert "chooses after retrieval" in (tmp_path / "p.html").read_text(encoding="utf-8")


def test_an_arbiter_is_part_of_the_chosen_policy():
    """The arbiter repairs every retrieved answer, so skipping one known question in four gains against always."""
    n = 200
    needs = np.where(np.arange(n) < 50, 0.1, 0.9)
    closed, opened = np.arange(n) < 50, np.arange(n) % 2 == 0
    every = np.ones(n, dtype=bool)
    choice = choose_gate({"g": GateOutcomes(needs, closed, opened, every)}, every, 0.01)
    assert (choice.threshold, choice.skipped) == (0.5, 0.25)
    assert choice.right.all()


def test_a_large_slice_that_certainly_loses_prevents_a_certain_recommendation():
    lost = SliceChange("data set hotpotqa", 500, Estimate(-0.05, -0.07, -0.03))
    slight = SliceChange("data set nq", 500, Estimate(-0.01, -0.018, -0.002))
    sure = Recommendation("use", 1000, 0.02, "g", 0.5, agreeing_folds=5)
    assert not replace(sure, losing_slices=(slight,)).is_in_doubt
    assert replace(sure, losing_slices=(lost,)).is_in_doubt
    assert [replace(sure, agreeing_folds=n).is_in_doubt for n in (0, 3, 4)] == [False, True, False]


def test_losing_slices_are_named_with_their_interval():
    slices = (SliceChange("data set hotpotqa", 500, Estimate(-0.032, -0.054, -0.012)),)
    text = _describe_losing_slices(Recommendation("try", 1000, 0.02, losing_slices=slices))
    assert text == "It loses answers on: data set hotpotqa -3.2 [-5.4, -1.2] (n = 500)."


def test_unknown_money_gives_a_neutral_verdict_with_the_price_at_which_it_pays(tmp_path):
    """Per question 0.25 searches at 0.005 are saved, and 0.75 more LLM calls made: 0.00125 / 0.75 = 0.00167."""
    verdict = build_verdict(evaluated(planted(tmp_path / "run", known=4)), CostAssumptions(), 0.02)
    assert (verdict.level, verdict.label) == ("saves", "Saves searches")
    assert verdict.headline == "'good' at 0.5 pays if an LLM call costs less than $0.00167."
    assert "makes 0.75 searches and 1.75 LLM calls (always retrieving: 1.00 and 1.00)" in verdict.text
    assert "At 0.3 s a search, searching takes 0.225 s (always retrieving: 0.3 s)" in verdict.text
    assert "What these cost is unknown: the rows hold no texts of passages." in verdict.text
    assert "Break-even: $125 / 75,000 = $0.00167 a call." in verdict.text
    assert verdict.key_figures[-1].value == "$0.00167"


@pytest.mark.parametrize(
    ("price", "label", "text"),
    [
        (
            0.001,
            "Worth using",
            "saves 25,000 searches and $50.00, at $0.005 a search (assumed) and $0.001 an LLM call (your price)",
        ),
        (
            0.002,
            "Saves searches, not money",
            "saves 25,000 searches, but costs $25.00 more at $0.005 a search (assumed)",
        ),
    ],
)
def test_the_price_of_an_llm_call_decides_whether_it_is_worth_using(tmp_path, price, label, text):
    """75,000 more calls cost 75 or 150; 25,000 searches at 0.005 save 125."""
    evaluation = evaluated(planted(tmp_path / "run", known=4))
    verdict = build_verdict(evaluation, CostAssumptions(price_llm_call=price), 0.02)
    assert (verdict.label, text in verdict.text) == (label, True)
    if price == 0.002:
        assert "it pays if a search costs more than $0.006." in verdict.text
        assert verdict.headline == "'good' at 0.5 saves no money at these prices, so it is not worth it."
        figure = verdict.key_figures[-1]
        assert (figure.value, figure.description) == ("$25.00", "extra cost on 100,000 questions")


def test_a_policy_without_more_llm_calls_is_worth_its_searches(tmp_path):
    verdict = build_verdict(evaluated(planted(tmp_path / "run", known=2, helped=0.0)), CostAssumptions(), 0.02)
    assert (verdict.label, verdict.costs.to_dict()["money"]) == ("Worth using", 500)
    assert "saves 100,000 searches, worth $500 at $0.005 a search (assumed)" in verdict.text


def test_amounts_of_money_have_one_style():
    assert [format_money(amount) for amount in (None, 0.0, -0.001, -3.2, 44.666, 1234.5)] == [
        "unknown", "$0.00", "$0.00", "-$3.20", "$44.67", "$1,234",
    ]  # fmt: skip
    assert [format_price(price) for price in (0.0, 0.3, 0.00049, 2.5e-6)] == [
        "$0.00",
        "$0.30",
        "$0.00049",
        "$0.0000025",
    ]


def test_baselines_have_no_threshold_in_the_report(tmp_path):
    table = build_full_table(evaluated(planted(tmp_path / "run", known=4)))
    assert {line[0]: line[1] for line in table.rows} == {"never": "–", "always": "–", "oracle": "–", "good": "0.5"}
