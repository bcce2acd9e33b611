"""Disagreement of sampled answers as the need for retrieval."""

import numpy as np
import pytest

from knowgate.errors import BadSetting, UnsupportedSignal
from knowgate.gates import load_gate
from knowgate.gates.consistency import ConsistencyGate
from knowgate.gates.scoring import bind_gate, read_questions
from knowgate.models.fake import FakeModel
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.types import Completion, Question, Reading, Signal


class Axes:
    """Rome and Roma are the same direction; every other text is orthogonal to all others."""

    fingerprint = "axes"

    def embed(self, texts):
        rows = np.zeros((len(texts), 8), np.float32)
        for row, text in enumerate(texts):
            rows[row, 0 if text in ("rome", "roma") else 1 + sum(map(ord, text)) % 7] = 1
        return rows


def need(*answers, choices=()):
    gate = ConsistencyGate(n=len(answers), embedder=Axes())
    return gate.score([Question("Which?", choices=choices)], [Reading(samples=tuple(map(Completion, answers)))])[0]


def test_equal_answers_need_no_retrieval_whatever_their_case_and_articles():
    assert need("The Eiffel Tower", "eiffel tower.", "Eiffel tower") == 0


def test_one_pair_of_three_agrees():
    assert need("Rome", "Rome", "Oslo") == pytest.approx(1 - 1 / 3)


def test_similar_answers_count_half():
    # one equal pair, two pairs with cosine 1
    assert need("Rome", "Rome", "Roma") == pytest.approx(1 - (1 + 0.5 + 0.5) / 3)


def test_answers_that_all_differ_need_retrieval():
    assert need("Oslo", "Bonn", "Bern", "Kiev") > 0.5


def test_choices_are_compared_by_their_letter():
    assert need("A", "A. Rome", "(A)", choices=("Rome", "Oslo")) == 0


def test_without_embedding_model_only_equal_answers_agree():
    reading = Reading(samples=tuple(map(Completion, ("Rome", "Rome", "Roma"))))
    assert load_gate("consistency:embedder=none").score([Question("?")], [reading]) == [pytest.approx(2 / 3)]


def test_it_asks_for_three_samples_and_nothing_else():
    gate = load_gate("consistency")
    assert (gate.request.samples, gate.request.draft_tokens, gate.needs) == (3, 0, {Signal.SAMPLES})


def test_it_works_with_a_model_that_returns_only_text():
    samples = {"capital of France": {"samples": ["Paris"]}, "tallest": {"samples": ["Ann", "Bob", "Cy"]}}
    model = FakeModel(samples, offers=frozenset({Signal.DRAFT, Signal.SAMPLES}))
    questions = [Question("What is the capital of France?"), Question("Who is the tallest?")]
    gate = bind_gate(load_gate("consistency:embedder=none"), model, AnswerPrompts())
    readings = read_questions(model, [gate], questions, AnswerPrompts())
    assert gate.score(questions, readings) == [0.0, 1.0]
    assert gate.explain(questions, readings) == ["3 sampled answers, 1 different", "3 sampled answers, 3 different"]


def test_too_few_recorded_samples_are_an_error():
    with pytest.raises(UnsupportedSignal, match=r"needs 3 sampled answers per question, but got 0\. .*samples=3"):
        ConsistencyGate().score([Question("?")], [Reading()])


def test_one_sample_cannot_disagree():
    with pytest.raises(BadSetting, match="Set n to at least 2"):
        ConsistencyGate(n=1)
