"""The passage prefetcher searches every question once, in any order of requests, and reports errors."""

from __future__ import annotations

import threading

import pytest

from knowgate.errors import ServerError
from knowgate.labels.local_runner import PREFETCH_BATCHES, PREFETCH_SIZE, PassagePrefetcher
from knowgate.labels.passages import SearchResult
from knowgate.types import Passage, Question
from tests.support.processes import until

QUESTIONS = [Question(f"question {i}", id=str(i)) for i in range(500)]


class RecordingIndex:
    """Finds a passage with the id of each question, and records the searches."""

    def __init__(self, fails_at=None):
        self.calls, self.fails_at = [], fails_at

    def find(self, questions):
        ids = [question.id for question in questions]
        self.calls.append((threading.current_thread().name, ids))
        if self.fails_at in ids:
            raise ServerError("the search server is away.")
        return [SearchResult([Passage(name, name)], int(name)) for name in ids]

    @property
    def searched(self):
        return [name for _, ids in self.calls for name in ids]


@pytest.fixture
def start_prefetcher():
    started = []

    def make(index, questions=QUESTIONS):
        started.append(PassagePrefetcher(index.find, questions))
        return started[-1]

    yield make
    for prefetcher in started:
        prefetcher.close()


def matches(questions, results):
    return [(result.passages[0].id, result.frequency) for result in results] == [
        (question.id, int(question.id)) for question in questions
    ]


def test_batches_of_any_size_get_their_passages_and_no_question_is_searched_twice(start_prefetcher):
    index = RecordingIndex()
    prefetcher, start = start_prefetcher(index), 0
    for size in (4, 16, 300, 180):
        batch = QUESTIONS[start : start + size]
        assert matches(batch, prefetcher.find(batch))
        start += size
    assert sorted(index.searched, key=int) == [question.id for question in QUESTIONS]
    assert {name for name, _ in index.calls} == {"knowgate-prefetch_0"}


def test_the_prefetcher_stays_at_most_two_batches_ahead(start_prefetcher):
    index = RecordingIndex()
    prefetcher = start_prefetcher(index)
    prefetcher.find(QUESTIONS[:4])
    until(lambda: len(index.searched) >= PREFETCH_SIZE)
    prefetcher.find(QUESTIONS[4:8])
    assert len(index.searched) <= PREFETCH_BATCHES * PREFETCH_SIZE + PREFETCH_SIZE


def test_unknown_and_repeated_questions_are_searched_on_request(start_prefetcher):
    prefetcher = start_prefetcher(RecordingIndex(), QUESTIONS[:100])
    assert matches(QUESTIONS[:10], prefetcher.find(QUESTIONS[:10]))
    mixed = [QUESTIONS[200], QUESTIONS[3], QUESTIONS[50]]
    assert matches(mixed, prefetcher.find(mixed))


def test_a_failed_search_raises_only_for_its_own_questions(start_prefetcher):
    prefetcher = start_prefetcher(RecordingIndex(fails_at="70"))
    assert matches(QUESTIONS[:60], prefetcher.find(QUESTIONS[:60]))
    with pytest.raises(ServerError, match="away"):
        prefetcher.find(QUESTIONS[60:80])
    assert matches(QUESTIONS[80:90], prefetcher.find(QUESTIONS[80:90]))
