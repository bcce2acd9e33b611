"""The papers' systems on recorded answers: no row is scored by itself, by its fold or by a test row."""

import json

import numpy as np
import pytest

from benchmarks import graders, text_systems
from benchmarks.text_systems import SYSTEMS, learn_cut, score_out_of_fold, score_systems

FOLDS = np.array([0, 0, 1, 1, 2, 2, -1, -1, -2])


def test_rows_are_scored_by_other_folds_and_test_rows_by_all_train_rows():
    learned = {}

    def score(train, scored):
        learned.update({number: set(train.tolist()) for number in scored.tolist()})
        return np.zeros(len(scored))

    needs = score_out_of_fold(FOLDS, score)
    assert learned[0] == {2, 3, 4, 5}
    assert learned[6] == learned[7] == {0, 1, 2, 3, 4, 5}
    assert 8 not in learned
    assert needs[8] == 0.5


def test_every_system_finds_what_is_planted_in_the_questions():
    rng = np.random.default_rng(0)
    closed = rng.random(200) < 0.5
    vectors = rng.standard_normal((200, 8)) * 0.2 + np.where(closed, 1.0, -1.0)[:, None]
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    folds = np.where(np.arange(200) < 150, np.arange(200) % 4, -1)
    needs = score_systems(vectors, closed, ~closed, folds)
    assert set(needs) == set(SYSTEMS) - {"KBM", "IK"}
    for values in needs.values():
        assert ((values > 0.5) == ~closed)[folds == -1].mean() > 0.95


@pytest.mark.parametrize(
    ("closed", "opened", "searched"),
    [([1, 1, 0, 0], [0, 0, 1, 1], 2), ([1, 1, 1, 1], [0, 0, 0, 0], 0), ([0, 0, 0, 0], [1, 1, 1, 1], 4)],
)
def test_the_learned_cut_has_the_most_right_answers(closed, opened, searched):
    needs = np.array([0.1, 0.2, 0.3, 0.4])
    assert (needs > learn_cut(needs, np.array(closed, dtype=bool), np.array(opened, dtype=bool))).sum() == searched


@pytest.mark.records
def test_the_records_have_a_line_for_every_row_and_no_text():
    for name in (path.name.partition(".")[0] for path in text_systems.HOME.glob("*.jsonl.gz")):
        needs = text_systems.load_needs(name)
        rows = text_systems.load_predictions(name)
        assert {len(values) for values in needs.values()} == {len(rows.folds)}
        assert all(((values >= 0) & (values <= 1)).all() for values in needs.values())


def test_graders_are_compared_with_people_first():
    line = graders.summarize("x", "y", {"people": [True, True, False], "contains": [True, False, False]})
    assert line["right"] == {"people": pytest.approx(2 / 3), "contains": pytest.approx(1 / 3)}
    assert line["agreement"]["people / contains"]["agree"] == pytest.approx(2 / 3)


@pytest.mark.records
def test_the_record_of_graders_holds_numbers_only():
    for line in json.loads(graders.RECORD.read_text(encoding="utf-8")):
        assert set(line) == {"llm", "data", "n", "right", "agreement"}
