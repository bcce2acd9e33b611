import asyncio
import threading

import pytest

from knowgate.core.frameworks import check_framework_version, check_result_list, run_coroutine, wrap_errors
from knowgate.errors import AdapterError, BadSetting, KnowgateError, MissingExtra
from knowgate.integrations.decider import GATE_FAILED, Decider, as_decider, open_decider
from tests.integrations.conftest import KNOWN, UNKNOWN


def test_known_questions_skip_retrieval_and_unknown_ones_do_not(decider):
    assert not decider.decide(KNOWN).retrieve
    assert decider.decide(UNKNOWN).retrieve
    assert asyncio.run(decider.adecide(UNKNOWN)).retrieve


def test_a_rule_decides_without_calling_the_llm(decider, monkeypatch):
    monkeypatch.setattr(type(decider.rag.model), "read", lambda *_: pytest.fail("the LLM was asked"))
    decision = decider.decide("Thanks!")
    assert (decision.retrieve, decision.rule) == (False, "thanks")


def test_a_follow_up_is_rewritten_before_the_decision(decider):
    message = [("user", UNKNOWN), ("assistant", "Mira"), ("user", "thanks")]
    assert not decider.decide_messages([{"role": role, "content": text} for role, text in message]).retrieve


def test_a_failing_gate_raises_or_falls_open_with_a_note(broken):
    with pytest.raises(KnowgateError, match="logprobs"):
        broken(False).decide(KNOWN)
    decision = broken(True).decide(KNOWN)
    assert decision.retrieve
    assert decision.notes == (GATE_FAILED,)
    assert decision.reason.startswith("the gate failed, retrieving: ")


def test_a_decider_is_opened_from_settings():
    assert not open_decider(model="fake", gate="never").decide(UNKNOWN).retrieve
    assert open_decider(model="fake", gate="always").decide(KNOWN).retrieve


def test_other_objects_are_not_deciders(rag):
    assert as_decider(rag) == Decider(rag)
    with pytest.raises(BadSetting, match="is not an AdaptiveRAG or a Decider"):
        as_decider("logprob")


def test_deciding_inside_a_thread_of_the_model_does_not_deadlock(decider):
    inside = decider.rag.model.workers.submit(lambda: decider.decide(KNOWN))
    assert not inside.result(timeout=30).retrieve


def test_a_missing_or_unsupported_framework_is_an_error():
    with pytest.raises(MissingExtra, match=r"pip install 'knowgate\[langchain\]'"):
        check_framework_version("no-such-framework", "langchain", majors=("1",))
    with pytest.raises(BadSetting, match=r"pytest .* supports version 0.1 or 999"):
        check_framework_version("pytest", "dev", majors=("0.1", "999"))
    check_framework_version("pytest", "dev", majors=("8", "9", "10"))


def test_an_error_of_a_wrapped_object_names_it():
    with (
        pytest.raises(AdapterError, match=r"their search failed: ValueError: no index\. Try it"),
        wrap_errors("their search"),
    ):
        raise ValueError("no index")


@pytest.mark.parametrize("found", [None, "text", {"a": 1}, 5])
def test_results_that_are_not_a_list_are_an_error(found):
    with pytest.raises(AdapterError, match="instead of a list"):
        check_result_list(found, "their search")


def test_surplus_results_are_dropped():
    assert check_result_list(range(10_000), "their search", 3) == [0, 1, 2]


def test_a_coroutine_runs_inside_a_running_event_loop():
    async def name():
        return threading.current_thread().name

    async def inside():
        return run_coroutine(name())

    assert run_coroutine(name()) == threading.current_thread().name
    assert asyncio.run(inside()) == "knowgate-await_0"
