"""Features of draft answers in the benchmark of judges for any LLM."""

import numpy as np
import pytest

from benchmarks.draft_text import ANSWER_FEATURES, answer_features
from knowgate.types import Question


def feature(name, question="Who?", draft=""):
    return answer_features([Question(question)], [draft])[0][ANSWER_FEATURES.index(name)]


def test_a_hedge_at_the_start_is_noticed_and_one_far_behind_is_only_counted():
    assert feature("hedge_at_start", draft="It may be Rome.") == 1
    assert feature("hedge_at_start", draft="Rome. " + "x" * 90 + " maybe") == 0
    assert feature("hedges", draft="Rome. " + "x" * 90 + " maybe") == pytest.approx(np.log(2))


def test_overlap_is_the_share_of_draft_words_from_the_question():
    assert feature("overlap", "Who wrote Hamlet?", "Shakespeare wrote Hamlet") == pytest.approx(2 / 3)


def test_years_numbers_and_names_in_the_draft():
    assert (feature("draft_years", draft="in 1969"), feature("draft_numbers", draft="12 men")) == (1, 1)
    assert feature("draft_years", draft="12 men") == 0
    assert feature("draft_names", draft="Ada met Bob") == pytest.approx(np.log(3))


def test_the_shape_also_holds_for_no_questions():
    assert answer_features([], []).shape == (0, len(ANSWER_FEATURES))
