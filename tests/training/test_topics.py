"""Topics of questions: clusters, their names, and rules that follow."""

import numpy as np
import pytest

from knowgate.data.runs.table import load_label_table
from knowgate.errors import BadInput, BadSetting
from knowgate.training.topics import (
    build_topic_table,
    cluster_vectors,
    describe_rules,
    measure_clusters,
    measure_topics,
    name_clusters,
    propose_rules,
)
from tests.support.runs_by_hand import row, side
from tests.support.trials_by_hand import trial_run

N = 40


def planted_table(tmp_path):
    """Geography is known from memory; holidays are answered right only with passages."""
    rows = [row(f"g{i}", side(True), side(True), question=f"Which river flows by city {i}?") for i in range(N)]
    rows += [row(f"h{i}", side(False), side(True), question=f"How many holidays in office {i}?") for i in range(N)]
    return load_label_table([trial_run(tmp_path / "run", rows)])


def planted_vectors():
    rng = np.random.default_rng(1)
    centers = np.repeat(np.eye(4, dtype=np.float32)[:2], N, axis=0)
    vectors = centers + 0.05 * rng.standard_normal(centers.shape).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_clusters_separate_distant_vectors():
    assigned, centers = cluster_vectors(planted_vectors(), 2)
    assert len(set(assigned[:N])) == len(set(assigned[N:])) == 1
    assert assigned[0] != assigned[-1]
    assert np.linalg.norm(centers, axis=1) == pytest.approx([1, 1])


def test_more_clusters_than_distinct_vectors_are_dropped():
    assigned, centers = cluster_vectors(np.eye(2, dtype=np.float32)[[0, 0, 1, 1]], 4)
    assert (len(set(assigned.tolist())), len(centers)) == (2, 2)


def test_names_are_the_words_that_only_one_cluster_has():
    texts = ["What river crosses the city?", "Which river is in the city?", "How many holidays?", "When are holidays?"]
    names = name_clusters(texts, np.array([0, 0, 1, 1]), 2)
    assert names == ["city, river", "holidays"]


def test_a_topic_that_passages_answer_gets_a_rule_to_retrieve(tmp_path):
    topics = measure_clusters(planted_table(tmp_path), planted_vectors(), 2, retrieve=np.arange(2 * N) >= N)
    by_accuracy = sorted(topics, key=lambda topic: topic.closed_book_accuracy.value)
    assert [(topic.n, topic.closed_book_accuracy.value, topic.searches) for topic in by_accuracy] == [
        (N, 0.0, 1.0),
        (N, 1.0, 0.0),
    ]
    rules = propose_rules(topics)
    assert [(rule.name, rule.action) for rule in rules] == [("holidays, office", "retrieve")]
    assert describe_rules(rules).startswith("Proposed rules: always retrieve for 'holidays, office'.")
    assert "searches of the policy" in build_topic_table(topics).columns


def test_topics_can_be_a_field_of_the_data(tmp_path):
    rows = [row(f"q{i}", side(i < 2), meta={"area": {"name": "hr" if i else "it"}}) for i in range(3)]
    table = load_label_table([trial_run(tmp_path / "run", rows)])
    topics = measure_topics(table, "meta.area.name")
    assert [(topic.name, topic.n, topic.open_book_accuracy) for topic in topics] == [("hr", 2, None), ("it", 1, None)]
    assert propose_rules(topics) == []


def test_an_unknown_field_and_an_impossible_number_are_rejected(tmp_path):
    table = planted_table(tmp_path)
    with pytest.raises(BadInput, match="no question has the field 'area'"):
        measure_topics(table, "area")
    with pytest.raises(BadSetting, match="topics=1 is not allowed"):
        measure_topics(table, "1")
