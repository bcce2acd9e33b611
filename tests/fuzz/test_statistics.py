"""Thin and odd statistics: few rows, one kind of them, ties, constants, needs that are no numbers.

A result is right where it equals what a few lines of plain Python count; the rest is refused in a sentence.
"""

import itertools
import math
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from knowgate.data.preferences import select_passages
from knowgate.evaluation.gate_evaluation import evaluate
from knowgate.gates.calibration.guarantee import MIN_LOSS, learn_then_test
from knowgate.gates.calibration.threshold_calibration import calibrate
from knowgate.gates.calibration.threshold_choice import (
    GateOutcomes,
    choose_for_accuracy,
    choose_for_rate,
    evaluate_threshold,
)
from knowgate.stats import metrics as measures
from knowgate.training.gate import fit
from knowgate.types import Gate
from tests.support.fuzz import attempt, trying
from tests.support.planted_run import planted_rows
from tests.support.planted_run import write_run as write_planted
from tests.support.runs_by_hand import row, side, write_run
from tests.support.trials_by_hand import SETTINGS

TIED = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.5000001, 0.9, 1.0])
NEEDS = st.floats(0, 1) | TIED
VERDICTS = st.tuples(NEEDS, st.booleans(), st.booleans())
TABLES = st.lists(VERDICTS, min_size=1, max_size=30) | st.integers(1, 30).flatmap(
    lambda n: VERDICTS.map(lambda one: [one] * n)
)
BAD = st.sampled_from([math.nan, math.inf, -math.inf, -1e-9, 1.0000001, 1e308, "high", None, [0.5], True, "0.5"])


class Told(Gate):
    """Gives the needs it is told, in the order of the questions' numbers."""

    name = "told"

    def __init__(self, needs, threshold=0.5):
        self.needs_of = {f"q {place}": need for place, need in enumerate(needs)}
        self.threshold = threshold

    def score(self, questions, readings):
        return [self.needs_of[question.text] for question in questions]


@contextmanager
def run_of(table):
    """A label run of so many graded questions. Each is (need, closed-book right, open-book right or None)."""
    rows = [
        row(str(place), side(closed), None if opened is None else side(opened))
        for place, (_, closed, opened) in enumerate(table)
    ]
    with tempfile.TemporaryDirectory() as folder:
        yield write_run(Path(folder) / "run", rows, **SETTINGS)


def columns(table):
    needs, closed, opened = zip(*table, strict=True)
    return np.array(needs, dtype=float), np.array(closed, dtype=bool), np.array(opened, dtype=bool)


@pytest.fixture(scope="module", autouse=True)
def imported():
    """What the verbs import when they are first called may take longer than ten seconds on a busy machine."""
    table = [(0.5, place % 2 == 0, place % 3 == 0) for place in range(40)]
    with run_of(table) as run:
        evaluate(Told([0.5] * 40), run, resamples=2)
        calibrate(Told([0.5] * 40), run, max_loss=0.5)
    with tempfile.TemporaryDirectory() as folder:
        made = write_planted(Path(folder) / "run", *planted_rows(60))
        fit("probe", made, out=Path(folder) / "gate", target="known", kind="linear")


# --- measures -------------------------------------------------------------------------------------


@trying(30, 250)
@given(TABLES)
def test_measures_are_what_plain_counting_gives(table):
    needs, needed, _ = columns(table)
    kind = "needs with ties and constants, one class"
    weights = measures.unit_weights(len(needs))
    found = attempt("statistics", kind, lambda: measures.auroc(needed, needs)).value
    assert found == approx(plain_auroc(needed, needs))
    assert measures.weighted_brier(weights, needed, needs)[0] == approx(np.mean((needs - needed) ** 2))
    assert measures.accuracy(needed, needs) == approx(
        np.mean([(n > 0.5) == y for n, y in zip(needs, needed, strict=True)])
    )
    assert measures.weighted_ece(weights, needed, needs)[0] == approx(plain_ece(needed, needs))


def approx(value):
    return None if value is None else pytest.approx(value, abs=1e-9)


def plain_auroc(needed, needs):
    pairs = list(itertools.product(needs[needed], needs[~needed]))
    return sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs) if pairs else None


def plain_ece(needed, needs):
    bins = {}
    for need, yes in zip(needs, needed, strict=True):
        bins.setdefault(min(int(need * 15), 14), []).append(need - yes)
    return sum(abs(sum(gaps)) for gaps in bins.values()) / len(needs)


# --- thresholds -----------------------------------------------------------------------------------


def tried(needs, closed, opened, threshold):
    """(right answers, retrievals) under a threshold."""
    verdicts = [o if n > threshold else c for n, c, o in zip(needs, closed, opened, strict=True)]
    return sum(verdicts), sum(need > threshold for need in needs)


def every_choice(needs):
    return [-1.0, *sorted(set(needs)), 1.0]


@trying(30, 250)
@given(TABLES, st.floats(0, 1))
def test_a_budget_is_used_as_far_as_ties_allow_and_never_exceeded(table, rate):
    needs, closed, opened = columns(table)
    threshold = attempt("thresholds", "budget", lambda: choose_for_rate(needs, rate)).value
    reached = tried(needs, closed, opened, threshold)[1]
    allowed = [tried(needs, closed, opened, one)[1] for one in every_choice(needs)]
    assert reached == max(count for count in allowed if count <= rate * len(needs) + 1e-9)


@trying(30, 250)
@given(TABLES)
def test_no_threshold_answers_more_questions_right_than_the_chosen_one(table):
    needs, closed, opened = columns(table)
    threshold = attempt(
        "thresholds", "accuracy", lambda: choose_for_accuracy(GateOutcomes(needs, closed, opened))
    ).value
    right, retrieved = tried(needs, closed, opened, threshold)
    others = [tried(needs, closed, opened, one) for one in every_choice(needs)]
    assert right == max(count for count, _ in others)
    assert retrieved == min(rate for count, rate in others if count == right)


@trying(15, 100)
@given(TABLES, st.floats(), st.floats())
def test_a_guarantee_is_refused_outside_its_range_and_never_more_than_was_proven(table, epsilon, delta):
    outcomes = GateOutcomes(*columns(table))
    found = attempt("thresholds", "guarantee", lambda: learn_then_test(outcomes, epsilon, delta))
    assert bool(found.refusal) == (not (MIN_LOSS <= epsilon < 1 and 0 < delta < 1))
    if not found.refusal and found.value.threshold >= 0:
        harmed, n = evaluate_threshold(outcomes, found.value.threshold).harmed, len(outcomes)
        chance = sum(math.comb(n, k) * epsilon**k * (1 - epsilon) ** (n - k) for k in range(harmed + 1))
        assert chance <= delta + 1e-9


# --- verbs ----------------------------------------------------------------------------------------


@trying(6, 60)
@given(st.lists(VERDICTS, min_size=1, max_size=25), st.sampled_from([0.0, 0.5, 1.0]))
def test_an_evaluation_of_few_or_equal_rows_counts_right(table, threshold):
    needs, closed, opened = columns(table)
    with run_of(table) as run:
        found = attempt(
            "eval", "few rows, ties, one class", lambda: evaluate(Told(needs, threshold), run, resamples=10)
        )
    assert not found.refusal
    result = found.value.gate("told").measures
    right, retrieved = tried(needs, closed, opened, threshold)
    assert result["accuracy"].value == pytest.approx(right / len(table))
    assert result["rate"].value == pytest.approx(retrieved / len(table))
    assert result["auroc"].value == approx(plain_auroc(~closed, needs))
    for estimate in result.values():
        assert estimate.value is None or math.isfinite(estimate.value)
        assert estimate.low is None or estimate.low <= estimate.high


@trying(6, 60)
@given(st.lists(VERDICTS, min_size=1, max_size=6), BAD, st.integers(0, 5))
def test_needs_that_are_no_numbers_between_0_and_1_are_refused(table, bad, place):
    needs = [need for need, _, _ in table]
    needs[place % len(needs)] = bad
    with run_of(table) as run:
        found = attempt("eval", "needs that are no numbers", lambda: evaluate(Told(needs), run, resamples=0))
    assert bool(found.refusal) == (bad not in (True, "0.5"))  # these two read as numbers, as float() has it


@trying(6, 60)
@given(st.lists(VERDICTS, min_size=1, max_size=40), st.sampled_from(["rate", "accuracy", "loss"]), st.floats(0, 1))
def test_a_calibration_holds_what_it_says_of_the_questions_it_was_chosen_on(table, target, value):
    needs, closed, opened = columns(table)
    options = {"rate": {"retrieval_rate": value}, "accuracy": {"best_accuracy": True}, "loss": {"max_loss": value}}
    with run_of(table) as run:
        found = attempt(
            "calibrate", "few rows, ties, one class", lambda: calibrate(Told(needs), run, held_out=0, **options[target])
        )
    if found.refusal:
        return
    right, retrieved = tried(needs, closed, opened, found.value.threshold)
    assert (found.value.chosen.right, found.value.chosen.retrieved) == (right, retrieved)
    assert target != "rate" or retrieved <= value * len(table) + 1e-9
    assert ("have the same need" in found.value.sentence) == (target == "rate" and value * len(table) - retrieved >= 1)


STATES = {
    "as they are": lambda block: block,
    "constant": np.zeros_like,
    "of two values": lambda block: (block > 0).astype(block.dtype),
    "huge": lambda block: block * np.float32(1e30),
    "tiny": lambda block: block * np.float32(1e-30),
    "not a number": lambda block: np.where(np.arange(len(block))[:, None] == 3, np.nan, block).astype(block.dtype),
    "infinite": lambda block: np.where(np.arange(len(block))[:, None] == 3, np.inf, block).astype(block.dtype),
}


@trying(3, 25)
@given(
    st.sampled_from([1, 2, 10, 39, 40, 60]), st.integers(0, 60), st.sampled_from(sorted(STATES)), st.sampled_from("ab")
)
def test_a_gate_fitted_on_thin_or_odd_rows_is_refused_or_gives_needs(n, known, states, wording):
    rows, blocks = planted_rows(n)
    rows = [replace(one, closed=replace(one.closed, correct=place < known)) for place, one in enumerate(rows)]
    if wording == "b":
        rows = [replace(one, question="the same question?") for one in rows]
    with tempfile.TemporaryDirectory() as folder:
        run = write_planted(Path(folder) / "run", rows, {name: STATES[states](block) for name, block in blocks.items()})

        def fitted():
            return fit("probe", run, out=Path(folder) / "gate", target="known", kind="linear")

        found = attempt("fit", "few rows, one class, odd states", fitted)
        assert found.refusal or not {"not a number", "infinite"} & {states}
        assert found.refusal or n >= 40
        assert bool(found.refusal) == (not (Path(folder) / "gate").exists())
        if not found.refusal:
            assert all(0 <= need <= 1 for need in told_needs(found.value, run))


def told_needs(gate, run):
    from knowgate.training.examples import load_examples

    examples = load_examples([run], target="known")
    return gate.score(examples.questions, examples.readings)


# --- preferences ----------------------------------------------------------------------------------


@trying(15, 150)
@given(st.lists(st.tuples(st.floats(-1, 1) | st.just(0.0), st.none() | st.booleans()), max_size=12), st.integers(1, 5))
def test_positives_rise_negatives_fall_and_no_passage_is_both(pairs, top):
    shifts, correct = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    found = attempt("prefer", "shifts with ties, graded or not", lambda: select_passages(shifts, correct, top)).value
    assert not set(found.positives) & set(found.negatives)
    assert max(len(found.positives), len(found.negatives)) <= top
    if any(verdict is not None for verdict in correct):
        assert all(correct[place] for place in found.positives)
        assert all(correct[place] is False for place in found.negatives)
    else:
        assert all(shifts[place] > 0 for place in found.positives)
        assert all(shifts[place] < 0 for place in found.negatives)
