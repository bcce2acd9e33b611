"""Looking up ahead of the LLM: everything is found once, in whatever order it is asked for, and errors are told."""

from __future__ import annotations

import threading

import pytest

from knowgate.errors import ServerError
from knowgate.labels.local_runner import PREFETCH_BATCHES, PREFETCH_SIZE, PassagePrefetcher
from knowgate.labels.passages import PassageSearchResults
from knowgate.types import Passage, Question
from tests.support.processes import until

QUESTIONS = [Question(f"question {i}", id=str(i)) for i in range(500)]


class Shelf:
    """Finds for each question a passage of its id, and remembers who asked."""

    def __init__(self, fails_at=None):
        self.calls, self.fails_at = [], fails_at

    def look_up(self, questions):
        ids = [question.id for question in questions]
        self.calls.append((threading.current_thread().name, ids))
        if self.fails_at in ids:
            raise ServerError("the search server is away.")
        return PassageSearchResults([[Passage(name, name)] for name in ids], [int(name) for name in ids])

    @property
    def asked(self):
        return [name for _, ids in self.calls for name in ids]


@pytest.fixture
def ahead_of():
    begun = []

    def make(shelf, questions=QUESTIONS):
        begun.append(PassagePrefetcher(shelf.look_up, questions))
        begun[-1].start()
        return begun[-1]

    yield make
    for one in begun:
        one.stop()


def is_right(questions, found):
    return [(passages[0].id, count) for passages, count in zip(*found, strict=True)] == [
        (question.id, int(question.id)) for question in questions
    ]


def test_batches_of_any_size_get_what_the_library_finds_and_nothing_is_looked_up_twice(ahead_of):
    shelf = Shelf()
    ahead, place = ahead_of(shelf), 0
    for size in (4, 16, 300, 180):
        some = QUESTIONS[place : place + size]
        assert is_right(some, ahead.look_up(some))
        place += size
    assert sorted(shelf.asked, key=int) == [question.id for question in QUESTIONS]
    assert {name for name, _ in shelf.calls} == {"knowgate-ahead"}


def test_the_thread_goes_no_further_ahead_than_two_batches(ahead_of):
    shelf = Shelf()
    ahead = ahead_of(shelf)
    ahead.look_up(QUESTIONS[:4])
    until(lambda: len(shelf.asked) >= PREFETCH_SIZE)
    ahead.look_up(QUESTIONS[4:8])
    assert len(shelf.asked) <= PREFETCH_BATCHES * PREFETCH_SIZE + PREFETCH_SIZE


def test_an_unknown_question_and_one_asked_again_are_looked_up_when_asked_for(ahead_of):
    ahead = ahead_of(Shelf(), QUESTIONS[:100])
    assert is_right(QUESTIONS[:10], ahead.look_up(QUESTIONS[:10]))
    mixed = [QUESTIONS[200], QUESTIONS[3], QUESTIONS[50]]
    assert is_right(mixed, ahead.look_up(mixed))


def test_who_asks_for_what_failed_gets_the_error_and_others_their_passages(ahead_of):
    ahead = ahead_of(Shelf(fails_at="70"))
    assert is_right(QUESTIONS[:60], ahead.look_up(QUESTIONS[:60]))
    with pytest.raises(ServerError, match="away"):
        ahead.look_up(QUESTIONS[60:80])
    assert is_right(QUESTIONS[80:90], ahead.look_up(QUESTIONS[80:90]))
