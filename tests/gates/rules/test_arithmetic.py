"""Arithmetic that a rule recognizes is computed, not generated."""

from __future__ import annotations

import time

import pytest

from knowgate.gates.logprob import LogprobGate
from knowgate.gates.rules.arithmetic import compute_arithmetic
from knowgate.gates.rules.rule_set import load_rules
from knowgate.models.fake import FakeModel
from knowgate.pipeline.adaptive_rag import AdaptiveRAG


@pytest.mark.parametrize(
    ("question", "result"),
    [
        ("What is 17 x 23?", "391"),
        ("2 + 2", "4"),
        ("What is 2 plus 3 times 4?", "14"),
        ("how much is 1,350 / 4?", "337.5"),
        ("calculate (2 + 3) * 4", "20"),
        ("2 ^ 10 =", "1024"),
        ("what's 10 divided by 3?", "3.333333333"),
        ("-3 - -4", "1"),
        ("-2 ^ 2", "-4"),
        ("计算 12 乘以 12", "144"),
        ("7 加上 8 等于多少", "15"),
        ("0.1 + 0.2", "0.3"),
    ],
)
def test_expressions_are_computed(question, result):
    assert compute_arithmetic(question) == result


@pytest.mark.parametrize(
    "question",
    ["What is 1 / 0?", "10 % 3", "9 ^ 9 ^ 9", "2 ^ 0.5", "(1 + 2", "2 + 3 and 4 + 5", "How are you?", "1" * 500],
)
def test_what_cannot_be_computed_exactly_is_left_to_the_llm(question):
    assert compute_arithmetic(question) is None


def test_long_expressions_take_no_time():
    start = time.thread_time()
    assert compute_arithmetic("9^64*" * 1000 + "1") is None
    assert time.thread_time() - start < 0.1


def test_the_pipeline_computes_and_asks_nobody():
    rag = AdaptiveRAG(FakeModel(), LogprobGate(), rules=load_rules())
    answer = rag.answer("What is 17 x 23?")
    assert (answer.text, answer.decision.retrieve, answer.decision.rule) == ("391", False, "arithmetic")
    assert [event.text for event in rag.answer_stream("What is 17 x 23?") if hasattr(event, "text")] == ["391"]
