"""DSPy as installed, on its dummy LLM."""

import asyncio

import pytest

dspy = pytest.importorskip("dspy", reason="needs the extra dspy")
from dspy.utils import DummyLM

from knowgate.errors import AdapterError, KnowgateError
from knowgate.integrations.dspy import KnowgateRAG
from tests.integrations.conftest import KNOWN, UNKNOWN


@pytest.fixture
def lm():
    return DummyLM([{"answer": "an answer"}] * 50)


def test_context_is_retrieved_only_if_needed(decider, retriever, lm):
    program = KnowgateRAG(decider, retriever)
    with dspy.context(lm=lm):
        known, unknown = program(question=KNOWN), program(question=UNKNOWN)
        awaited = asyncio.run(program.acall(question=UNKNOWN))
    assert [item.knowgate["retrieve"] for item in (known, unknown, awaited)] == [False, True, True]
    assert retriever.asked == [UNKNOWN, UNKNOWN]
    shown = [str(call["messages"]) for call in lm.history]
    assert ["Mira runs the canteen" in text for text in shown] == [False, True, True]
    assert known.answer == "an answer"


def test_any_callable_can_search(decider):
    assert KnowgateRAG(decider, lambda question: ["one", "two"] * 9, k=3).retrieve("?") == ["one", "two", "one"]


@pytest.mark.parametrize("search", [lambda question: None, lambda question: 1 / 0])
def test_a_failing_search_is_an_error(decider, search):
    with pytest.raises(AdapterError, match="the search"):
        KnowgateRAG(decider, search).retrieve("?")


def test_an_optimizer_tunes_its_predictors(decider, retriever):
    examples = [dspy.Example(question=text, answer="an answer").with_inputs("question") for text in (KNOWN, UNKNOWN)]
    program = KnowgateRAG(decider, retriever)
    with dspy.context(lm=DummyLM([{"answer": "an answer"}] * 50)):
        tuner = dspy.BootstrapFewShot(metric=lambda example, made, trace=None: example.answer == made.answer)
        better = tuner.compile(program, trainset=examples)
        assert better(question=KNOWN).knowgate["retrieve"] is False
    assert [name for name, _ in better.named_predictors()] == ["direct", "informed"]
    assert [len(item.demos) for item in better.predictors()] == [1, 1]
    assert better.decider is program.decider


def test_an_optimized_program_is_saved_and_loaded(decider, retriever, tmp_path):
    program = KnowgateRAG(decider, retriever)
    program.direct.demos = [dspy.Example(question="a?", answer="b")]
    program.save(tmp_path / "program.json")
    again = KnowgateRAG(decider, retriever)
    again.load(tmp_path / "program.json")
    assert again.direct.demos[0]["answer"] == "b"


def test_a_failing_gate_raises_or_falls_open(broken, retriever, lm):
    with dspy.context(lm=lm):
        with pytest.raises(KnowgateError):
            KnowgateRAG(broken(False), retriever)(question=KNOWN)
        assert KnowgateRAG(broken(True), retriever)(question=KNOWN).knowgate["notes"] == ["gate failed"]
