"""Learning from traffic: audits, loss, alarm, shadow mode, A/B tests, labels and feedback."""

import asyncio
import gc
import json
import sqlite3
import threading
import time
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from aiohttp import web
from starlette.responses import Response

import knowgate as kg
from knowgate import AdaptiveRAG, load_gate
from knowgate.core.text import MAX_ANSWER_CHARS, cut_answer
from knowgate.data.history import open_history
from knowgate.data.history.entries import KnowledgeLabel, LabelSource
from knowgate.gates import DEFAULT_GATE
from knowgate.gates.arbiters.abstention import answers_differ
from knowgate.models.fake import FakeModel
from knowgate.pipeline.traffic_log import TrafficLog
from knowgate.server.app import build_gate_service, create_app
from knowgate.server.chat.request_options import RequestOptions
from knowgate.server.learning import answer_text, answers, audit, audit_store
from knowgate.server.learning.answer_text import StreamText, capture_answer
from knowgate.server.learning.answers import label_by_feedback
from knowgate.server.learning.arms import ExperimentArm
from knowgate.server.learning.audit import MAX_PENDING_AUDITS, POLL_SECONDS, Auditor, _update_monitor
from knowgate.server.learning.audit_store import AuditRecord, AuditStore
from knowgate.server.learning.learner import _compute_scope
from knowgate.server.learning.loss_monitor import LossMonitor
from knowgate.server.load_limits import CallBudget
from knowgate.server.options import ServeOptions
from knowgate.server.telemetry.decision_log import DecisionLog
from knowgate.server.telemetry.trace import RequestTrace
from tests.server.conftest import KNOWN, UNKNOWN
from tests.server.test_arbitration import FixedArbiter, use_arbiter
from tests.server.test_chat import ask
from tests.support.hash_embedder import HashEmbedder
from tests.support.processes import PATIENCE

SAME = "The answer is 42."


class RecordingHistory:
    """A history that only records its entries."""

    def __init__(self):
        self.entries = []

    def embed(self, questions):
        return np.zeros((len(questions), 1))

    def add(self, entries, vectors=None):
        self.entries += entries
        return len(entries)

    def list_labels(self):
        return [(entry.question, entry.label, entry.source) for entry in self.entries]


def audit_options(tmp_path, **options):
    return {"decisions": str(tmp_path / "d.db"), "audit": 1.0, "audit_budget": 1000, **options}


def get_arms(address):
    return httpx.get(f"{address}/v1/learning").json()["arms"]


def wait_until(holds, seconds=20.0):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to that in time"
        time.sleep(0.02)


def wait_for_audits(address, count, arm="a"):
    wait_until(lambda: get_arms(address)[arm]["loss"]["drawn"] >= count)
    return get_arms(address)[arm]


def count_finished_audits(address):
    """How many were drawn, once no audit is under way: a look half a second later finds no more."""
    counts = [-1, get_arms(address)["a"]["loss"]["drawn"]]
    while counts[-1] != counts[-2]:
        time.sleep(0.5)
        counts.append(get_arms(address)["a"]["loss"]["drawn"])
    return counts[-1]


def use_history(app):
    store = RecordingHistory()
    app.state.service.learner.labeler.history = TrafficLog(store)
    return store


# --- audits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_an_audited_skip_is_lost_if_the_answer_with_passages_differs(serve, stub, tmp_path, stream):
    address, _ = serve(gate="never", options=audit_options(tmp_path))
    assert ask(address, stream=stream).status_code == 200
    loss = wait_for_audits(address, 1)["loss"]
    assert (loss["drawn"], loss["lost"], loss["mean"]) == (1, 1.0, 1.0)
    assert ["<passages>" in str(body) for body in stub.bodies] == [False, True]
    assert "stream" not in stub.bodies[1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "field"), [("completions", "prompt"), ("responses", "input")])
def test_completions_and_responses_are_audited(serve, stub, tmp_path, path, field, stream):
    stub.speaks = True
    address, _ = serve(gate="never", options=audit_options(tmp_path))
    body = {"model": "m", field: UNKNOWN, "stream": stream, "store": True, "metadata": {"case": "7"}}
    assert httpx.post(f"{address}/v1/{path}", json=body, timeout=30).status_code == 200
    loss = wait_for_audits(address, 1)["loss"]
    assert (stub.bodies[1].get("store", False), stub.bodies[1].get("metadata")) == (False, None)
    assert (loss["drawn"], loss["lost"]) == (1, 1.0)
    assert ["<passages>" in str(sent[field]) for sent in stub.bodies] == [False, True]
    assert "stream" not in stub.bodies[1]
    assert httpx.get(f"{address}/v1/dashboard").json()["figures"]["arms"]["a"]["skipped"] == 1


@pytest.mark.parametrize(("path", "field"), [("completions", "prompt"), ("responses", "input")])
def test_an_equal_completion_or_response_loses_nothing(serve, stub, tmp_path, monkeypatch, path, field):
    stub.speaks = True
    monkeypatch.setattr(stub, "answer", lambda body: SAME)
    address, _ = serve(gate="never", options=audit_options(tmp_path))
    httpx.post(f"{address}/v1/{path}", json={"model": "m", field: UNKNOWN}, timeout=30)
    assert wait_for_audits(address, 1)["loss"]["lost"] == 0.0


def test_requests_are_sampled_with_the_probability_of_the_option(serve, tmp_path):
    address, app = serve(gate="never", options=audit_options(tmp_path, audit=0.1))
    numbers = iter([0.05, 0.1, 0.15, 0.099])
    app.state.service.learner.random = SimpleNamespace(random=lambda: next(numbers))
    assert [ask(address).status_code for _ in range(4)] == [200] * 4
    wait_for_audits(address, 2)
    assert count_finished_audits(address) == 2


def test_a_completion_that_echoes_its_prompt_is_not_audited(serve, stub, tmp_path):
    stub.speaks = True
    address, _ = serve(gate="never", options=audit_options(tmp_path))
    httpx.post(f"{address}/v1/completions", json={"model": "m", "prompt": UNKNOWN, "echo": True}, timeout=30)
    assert count_finished_audits(address) == 0


@pytest.mark.parametrize("stream", [False, True])
def test_requests_for_several_answers_are_not_audited(serve, stub, tmp_path, monkeypatch, stream):
    async def stream_twice(reply, body, delta, finish=None):
        for index in range(2):
            await stub._write_chunk(
                reply, body, {"choices": [{"index": index, "delta": delta, "finish_reason": finish}]}
            )

    async def answer_twice(body):
        choice = json.loads((await answer(body)).text)["choices"][0]
        return web.json_response(
            {**stub._common_fields(body, "chat.completion"), "choices": [choice] * body.get("n", 1)}
        )

    answer = stub._plain
    monkeypatch.setattr(stub, "_send", stream_twice)
    monkeypatch.setattr(stub, "_plain", answer_twice)
    address, app = serve(gate="never", options=audit_options(tmp_path))
    budget = app.state.service.learner.auditor.budget.remaining
    assert ask(address, stream=stream, n=2).status_code == 200
    assert count_finished_audits(address) == 0
    assert app.state.service.learner.auditor.budget.remaining >= budget


def test_an_audited_skip_with_equal_answers_loses_nothing(serve, stub, tmp_path, monkeypatch):
    monkeypatch.setattr(stub, "answer", lambda body: SAME)
    address, _ = serve(gate="never", options=audit_options(tmp_path))
    ask(address)
    loss = wait_for_audits(address, 1)["loss"]
    assert (loss["lost"], loss["low"], 0 < loss["high"] <= 1) == (0.0, 0.0, True)


def test_two_answers_that_abstain_lose_nothing_and_label_the_question_as_unknown(serve, stub, tmp_path, monkeypatch):
    answers = iter(["I don't know.", "The passages do not mention it."])
    monkeypatch.setattr(stub, "answer", lambda body: next(answers))
    address, app = serve(gate="never", options=audit_options(tmp_path))
    store = use_history(app)
    ask(address)
    assert wait_for_audits(address, 1)["loss"]["lost"] == 0
    wait_until(store.list_labels)
    assert store.list_labels() == [(UNKNOWN, KnowledgeLabel.UNKNOWN, LabelSource.AGREEMENT)]


def test_an_audited_retrieval_loses_nothing_and_costs_no_call(serve, stub, tmp_path):
    address, _ = serve(gate="always", options=audit_options(tmp_path))
    ask(address)
    assert wait_for_audits(address, 1)["loss"]["lost"] == 0.0
    assert len(stub.bodies) == 1


@pytest.mark.parametrize(
    ("said", "lost"),
    [("Yes.", 0.0), ("No", 1.0), ("否", 1.0), ("<think>There is no difference.</think>\nYes", 0.0)],
)
def test_the_llm_compares_answers_in_prose_on_request(serve, stub, tmp_path, said, lost):
    answer = stub.answer
    stub.answer = lambda body: said if "Answer A" in str(body) else answer(body)
    address, _ = serve(gate="never", options=audit_options(tmp_path, audit_compare="llm"))
    ask(address)
    assert wait_for_audits(address, 1)["loss"]["lost"] == lost
    assert len(stub.bodies) == 3


def test_the_verdict_of_an_llm_that_rejects_max_tokens_counts(serve, stub, tmp_path):
    answer = stub.answer
    stub.answer = lambda body: "Yes." if "Answer A" in str(body) else answer(body)
    stub.refuses = ("max_tokens", "temperature")
    address, _ = serve(gate="never", options=audit_options(tmp_path, audit_compare="llm"))
    ask(address)
    assert wait_for_audits(address, 1)["loss"]["lost"] == 0.0


@pytest.mark.parametrize("said", ["The answer is 42.", "<think>There is no end."])
def test_an_unclear_comparison_of_the_llm_is_a_failed_audit(serve, stub, tmp_path, said):
    answer = stub.answer
    stub.answer = lambda body: said if "Answer A" in str(body) else answer(body)
    address, _ = serve(gate="never", options=audit_options(tmp_path, audit_compare="llm"))
    ask(address)
    wait_until(lambda: get_arms(address)["a"]["audits"].get("failed"))
    assert get_arms(address)["a"]["loss"]["drawn"] == 0


def test_a_skip_without_search_results_loses_nothing_and_costs_no_call(serve, stub, tmp_path):
    address, _ = serve(gate="never", options=audit_options(tmp_path))
    ask(address, "Zyzzyva?")
    assert wait_for_audits(address, 1)["loss"]["lost"] == 0.0
    assert len(stub.bodies) == 1


def test_a_model_in_this_process_is_audited(serve, tmp_path):
    address, _ = serve(upstream=False, gate="never", options=audit_options(tmp_path))
    ask(address, KNOWN, model="knowgate")
    assert wait_for_audits(address, 1)["loss"]["lost"] == 0.0
    ask(address, UNKNOWN, model="knowgate")
    assert wait_for_audits(address, 2)["loss"]["lost"] == 1.0


def test_an_audit_in_this_process_has_the_length_of_the_request(serve, tmp_path, monkeypatch):
    address, app = serve(upstream=False, gate="never", options=audit_options(tmp_path, most_tokens=48))
    lengths, answer = [], AdaptiveRAG.aanswer
    monkeypatch.setattr(
        AdaptiveRAG, "aanswer", lambda rag, question: lengths.append(rag.max_tokens) or answer(rag, question)
    )
    for count, tokens in enumerate(({}, {"max_tokens": 7}, {"max_completion_tokens": 1_000}), 1):
        ask(address, KNOWN, model="knowgate", **tokens)
        wait_for_audits(address, count)
    assert lengths == [app.state.service.gate_service.rag.max_tokens, 7, 48]


def test_an_audit_compares_with_passages_even_if_the_arbiter_prefers_drafts(serve, tmp_path):
    options = audit_options(tmp_path)
    address, _ = serve(upstream=False, gate="never", options=options, change=use_arbiter(FixedArbiter(0.9)))
    ask(address, UNKNOWN, model="knowgate")
    assert wait_for_audits(address, 1)["loss"]["lost"] == 1.0


COMPLETE = {"index": 0, "finish_reason": "stop"}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("choice", "result"),
    [
        ({"message": {"content": None}, "finish_reason": "length"}, "lost"),  # a reasoning LLM that was cut
        ({"message": {"content": "It is 42."}, "finish_reason": "eos_token"}, "lost"),
        ({"message": {"content": ""}, "finish_reason": "content_filter"}, "lost"),
        ({"message": {"tool_calls": [{"id": "1"}]}, "finish_reason": "tool_calls"}, "failed"),
    ],
)
def test_no_skip_escapes_its_audit_by_its_answer(serve, stub, tmp_path, monkeypatch, choice, result, stream):
    plain, streamed = stub._plain, stub._write_chunk

    async def answer(body):
        response = await plain(body)
        changed = {} if "<passages>" in str(body) else {"choices": [{**COMPLETE, **choice}]}
        return web.json_response({**json.loads(response.body), **changed})

    async def write_chunk(reply, body, fields):
        delta = {**COMPLETE, **choice, "delta": choice["message"]}
        await streamed(reply, body, {"choices": [delta]} if fields.get("choices") else fields)

    monkeypatch.setattr(stub, "_plain", answer)
    monkeypatch.setattr(stub, "_write_chunk", write_chunk)
    stub.answer = lambda body: "It is Lyon." if "<passages>" in str(body) else "x"
    address, _ = serve(gate="never", options=audit_options(tmp_path))
    ask(address, stream=stream)
    wait_until(lambda: get_arms(address)["a"]["loss"][result] == 1)
    calls = 1 if result == "failed" else 2  # a tool call is not compared, so no second answer is made
    assert len(stub.bodies) == calls


def test_requests_whose_arbiter_fails_are_audited(serve, stub, tmp_path, monkeypatch):
    stub.sure, stub.answer = -9.0, lambda body: "I don't know." if "<passages>" in str(body) else SAME
    monkeypatch.setattr("knowgate.server.upstream.forwarding.choose_answers", lambda *_: 1 / 0)
    address, _ = serve(gate="logprob:first", options=audit_options(tmp_path))
    assert ask(address).json()["knowgate"]["degraded"] == ["arbiter"]
    assert wait_for_audits(address, 1)["loss"]["lost"] == 0.0


def test_waiting_audits_keep_no_more_than_a_part_of_large_requests(serve, stub, tmp_path, monkeypatch):
    address, app = serve(gate="never", options=audit_options(tmp_path))
    auditor, finish, requests = app.state.service.learner.auditor, threading.Event(), []
    auditor.bodies.max_bytes = 1_500_000  # half of it for each key

    async def wait_for_test(request, *_):
        requests.append(weakref.ref(request))
        while not finish.is_set():
            await asyncio.sleep(0.01)

    monkeypatch.setattr(auditor.answerer, "answer_with_passages", wait_for_test)
    large = [{"role": "system", "content": "x" * 100_000}, {"role": "user", "content": KNOWN}]
    for _ in range(4):
        httpx.post(f"{address}/v1/chat/completions", json={"model": "m", "messages": large}, timeout=30)
    wait_until(lambda: auditor.pending_count == 2)
    assert 500_000 < auditor.bodies.bytes_by_client.total() <= 750_000
    assert get_arms(address)["a"]["audits"]["dropped"] == 2
    finish.set()
    wait_until(lambda: not auditor.bodies.bytes_by_client)
    wait_until(lambda: all(request() is None for request in requests))  # also the last one


def test_large_responses_are_audited_and_too_large_streams_are_failed_audits(serve, stub, tmp_path, monkeypatch):
    stub.sure, stub.answer = -0.01, lambda body: SAME + " x" * 600_000 * ("large" in str(body))
    monkeypatch.setattr(answer_text, "MAX_STREAM_BYTES", 100_000)
    address, _ = serve(gate="never", options=audit_options(tmp_path))
    ask(address, f"{KNOWN} Is it large?")
    assert wait_for_audits(address, 1)["loss"]["drawn"] == 1
    ask(address, f"{KNOWN} Is it large?", stream=True)
    wait_until(lambda: get_arms(address)["a"]["loss"]["failed"] == 1)


@pytest.mark.parametrize("stream", [True, False])
def test_long_answers_are_compared_in_a_thread(serve, stub, tmp_path, monkeypatch, stream):
    threads, cut = [], answers.cut_optional_answer
    monkeypatch.setattr(
        answers, "cut_optional_answer", lambda text: threads.append(threading.current_thread().name) or cut(text)
    )
    stub.sure, stub.answer = -9.0, lambda body: SAME * (200 if "long" in str(body) else 1)
    address, app = serve(gate="logprob:first", options=audit_options(tmp_path))
    store = use_history(app)
    for count, question in enumerate((KNOWN, f"{KNOWN} A long story?"), 1):
        ask(address, question, stream=stream)
        wait_until(lambda count=count: len(store.list_labels()) == count)
    assert len(set(threads[:2])) == 1
    assert threads[2] != threads[0]


def test_requests_that_select_a_gate_are_not_audited(serve, stub, tmp_path):
    address, _ = serve(gate="always", options=audit_options(tmp_path))
    ask(address, knowgate={"retrieve": "never"})
    ask(address)
    assert wait_for_audits(address, 1)["loss"]["drawn"] == 1
    assert len(stub.bodies) == 2


@pytest.mark.parametrize("is_named", [True, False])
def test_requests_to_another_llm_are_not_audited_and_logged_with_its_name(serve, stub, tmp_path, caplog, is_named):
    names = {"upstream_model": "stub-llm"} if is_named else {}
    address, _ = serve(gate="always", options={**audit_options(tmp_path), **names})
    assert ("The upstream's LLM has no name here" in caplog.text) != is_named
    ask(address, model="knowgate")
    identity = ask(address, model="other-llm").json()["knowgate"]["id"]
    assert count_finished_audits(address) == 1
    record = httpx.get(f"{address}/v1/decisions/{identity}").json()
    assert (record["model"], record["own_options"]) == ("openai:other-llm", True)


def test_a_failed_audit_is_stored_and_is_not_counted_as_a_result(serve, stub, tmp_path, monkeypatch):
    address, app = serve(gate="never", options=audit_options(tmp_path))
    monkeypatch.setattr(app.state.service.learner.auditor.answerer, "answer_with_passages", _failing)
    assert ask(address).status_code == 200
    wait_until(lambda: get_arms(address)["a"]["loss"]["failed"])
    assert get_arms(address)["a"]["loss"]["drawn"] == 0
    address, _ = serve(gate="never", options=audit_options(tmp_path))
    assert get_arms(address)["a"]["loss"]["failed"] == 1


def test_an_audited_retrieval_is_lost_if_the_arbiter_sent_a_different_draft(serve, stub, tmp_path):
    stub.sure, stub.answer = -9.0, lambda body: "I don't know." if "<passages>" in str(body) else SAME
    address, _ = serve(gate="logprob:first", options=audit_options(tmp_path))
    assert ask(address).json()["knowgate"]["choice"]["given"] == "draft"
    loss = wait_for_audits(address, 1)["loss"]
    assert (loss["drawn"], loss["lost"]) == (1, 1.0)
    assert len(stub.bodies) == 2  # the draft and the answer


async def _failing(*_, **__):
    raise RuntimeError("no")


def test_no_request_is_audited_while_the_budget_is_spent(serve, stub, tmp_path):
    address, _ = serve(gate="never", options=audit_options(tmp_path, audit_budget=1))
    ask(address)
    wait_for_audits(address, 1)
    for _ in range(3):
        ask(address)
    assert len(stub.bodies) == 5  # four answers, one of them audit_options
    assert get_arms(address)["a"]["loss"]["drawn"] == 1


def test_a_budget_refills_up_to_one_hour_of_calls():
    now = [0.0]
    budget = CallBudget(2, clock=lambda: now[0])
    assert [budget.reserve("", 1) for _ in range(3)] == [True, True, False]
    assert "used up" in budget.describe_pause(1)
    now[0] = 1800.0
    assert (budget.reserve("", 1), budget.reserve("", 1)) == (True, False)
    now[0] = 1e6
    assert (budget.allows("", 1), budget.remaining) == (True, 2.0)
    assert budget.describe_pause(1) == ""


@pytest.mark.parametrize(
    ("ages", "remaining"),
    [
        ([], 6.0),
        ([3599.0] * 57, 3.0),
        ([3599.0] * 500, 0.0),
        ([0.0] * 6, 0.0),  # the tenth of the first start
        ([120.0] * 6, 2.0),  # one call a minute is added
        ([180.0, 120.0, 120.0, 60.0, 0.0], 4.0),  # 6 - 1 + 1 - 2 + 1 - 1 + 1 - 1
    ],
)
def test_a_new_budget_holds_a_tenth_of_an_hour_minus_what_was_spent(ages, remaining):
    assert CallBudget(60, clock=lambda: 0.0, earlier_calls=ages).remaining == pytest.approx(remaining)


def test_a_restart_or_reload_does_not_refill_the_budget(serve, stub, tmp_path, invented):
    options = audit_options(tmp_path, audit_budget=2)
    address, app = serve(gate="never", options=options)
    for count in (1, 2, 2):
        ask(address)
        wait_for_audits(address, count)
    service, settings = app.state.service, kg.PipelineOptions(model=invented.model, docs=invented.docs, gate="never")
    reload = service.replace_gate_service(build_gate_service(settings, service.options), settings)
    asyncio.run_coroutine_threadsafe(reload, app.state.reloader.loop).result(PATIENCE)
    assert service.learner.auditor.budget.remaining < 1
    _, restarted = serve(gate="never", options=options)
    assert restarted.state.service.learner.auditor.budget.remaining < 1


def test_requests_are_answered_while_a_reload_reads_many_audits(serve, tmp_path, invented, monkeypatch):
    address, app = serve(gate="never", options=audit_options(tmp_path))
    is_reading, may_end = threading.Event(), threading.Event()
    monkeypatch.setattr(AuditStore, "read_all", lambda self: (is_reading.set(), may_end.wait(PATIENCE), [])[2])
    service, settings = app.state.service, kg.PipelineOptions(model=invented.model, docs=invented.docs, gate="never")
    reload = service.replace_gate_service(build_gate_service(settings, service.options), settings)
    future = asyncio.run_coroutine_threadsafe(reload, app.state.reloader.loop)
    assert is_reading.wait(PATIENCE)
    assert ask(address).status_code == 200
    may_end.set()
    future.result(PATIENCE)


def test_a_request_that_runs_during_a_reload_is_not_audited_for_the_new_gate(serve, stub, tmp_path, invented):
    address, app = serve(gate="always", options=audit_options(tmp_path))
    is_answering, may_end, answer = threading.Event(), threading.Event(), stub.answer
    stub.answer = lambda body: (is_answering.set(), may_end.wait(PATIENCE), answer(body))[2]
    service, settings = app.state.service, kg.PipelineOptions(model=invented.model, docs=invented.docs, gate="never")
    with ThreadPoolExecutor(1) as threads:
        reply = threads.submit(ask, address)
        assert is_answering.wait(PATIENCE)
        reload = service.replace_gate_service(build_gate_service(settings, service.options), settings)
        asyncio.run_coroutine_threadsafe(reload, app.state.reloader.loop).result(PATIENCE)
        may_end.set()
        assert reply.result().status_code == 200
    ask(address)
    assert count_finished_audits(address) == 1


def test_calls_that_were_not_made_return_to_the_budget():
    budget = CallBudget(2, clock=lambda: 0.0)
    assert (budget.reserve("", 2), budget.allows("", 1)) == (True, False)
    budget.release("", 1)
    assert (budget.reserve("", 1), budget.allows("", 1)) == (True, False)


def test_no_key_can_use_more_than_half_of_what_is_left_of_the_budget():
    now = [0.0]
    budget = CallBudget(60, clock=lambda: now[0], shares=True)
    now[0] = 3600.0
    counts = [sum(budget.reserve(key, 1) for _ in range(100)) for key in ("alice", "bob", "carol")]
    assert counts == [30, 15, 7]
    assert "audits of 3 API keys are paused" in budget.describe_pause(1)
    now[0] = 7200.0
    assert sum(budget.reserve("alice", 1) for _ in range(100)) == 30


def test_a_burst_does_not_exceed_the_budget(serve, stub, tmp_path):
    address, _ = serve(gate="never", options=audit_options(tmp_path, audit_budget=3))
    with ThreadPoolExecutor(16) as pool:
        assert {reply.status_code for reply in pool.map(lambda _: ask(address), range(32))} == {200}
    count_finished_audits(address)
    assert len(stub.bodies) == 32 + 2  # a started server has calls for one audit at once
    assert any("audits are paused" in problem for problem in httpx.get(f"{address}/ready").json()["degraded"])


def test_a_comparison_by_the_llm_needs_two_calls(invented, stub, tmp_path):
    options = audit_options(tmp_path, audit_budget=1, audit_compare="llm", upstream=stub.url)
    with pytest.raises(kg.KnowgateError, match="audit_budget"):
        create_app(kg.PipelineOptions(model=invented.model, docs=invented.docs), ServeOptions(**options))


# --- the alarm ------------------------------------------------------------------------------------


def store_losses(app, tmp_path, count=40):
    """Write audits of lost answers, as another server process with the same settings would."""
    scope = app.state.service.learner.auditor.experiment.arms["a"].scope
    with closing(sqlite3.connect(tmp_path / "d.db")) as database, database:
        rows = [("kg-1", time.time(), "a", scope, "loss", 1.0)] * count
        database.executemany(
            "INSERT INTO audits (decision, at, arm, scope, kind, lost) VALUES (?, ?, ?, ?, ?, ?)", rows
        )


def serve_with_alarm(serve, tmp_path):
    """Start a server whose decision log contains enough lost answers for an alarm."""
    options = audit_options(tmp_path, max_changed=0.1)
    store_losses(serve(gate="never", options=options)[1], tmp_path)
    return serve(gate="never", options=options)[0]


def test_an_idle_server_shows_and_obeys_the_alarm_of_another_server(serve, stub, tmp_path, monkeypatch):
    monkeypatch.setattr("knowgate.server.learning.audit.MAX_POLL_WAIT_SECONDS", 10.0)
    address, app = serve(gate="never", options=audit_options(tmp_path, max_changed=0.1))

    def read_metrics():
        return httpx.get(f"{address}/metrics").text

    assert 'knowgate_alarm{arm="a"} 0.0' in read_metrics()
    store_losses(app, tmp_path)
    wait_until(lambda: 'knowgate_alarm{arm="a"} 1.0' in read_metrics())
    assert httpx.post(f"{address}/v1/learning/clear", json={"arm": "a"}).status_code == 200
    time.sleep(POLL_SECONDS)
    store_losses(app, tmp_path)
    reply = ask(address)  # the first request after the alarm
    assert (reply.headers["x-knowgate-retrieve"], reply.headers["x-knowgate-degraded"]) == ("true", "alarm")
    time.sleep(POLL_SECONDS)
    store_losses(app, tmp_path, 3)
    dashboard = httpx.get(f"{address}/v1/dashboard").json()
    assert dashboard["learning"]["arms"]["a"]["loss"]["drawn"] >= 43


def test_a_hanging_decision_log_does_not_block_requests(serve, stub, tmp_path):
    address, app = serve(gate="never", options=audit_options(tmp_path, max_changed=0.1))
    ends = threading.Event()
    blocked = app.state.service.decision_log._thread.submit(ends.wait, 20)
    times = []
    for _ in range(3):
        start = time.monotonic()
        assert ask(address).status_code == 200
        times.append(time.monotonic() - start)
    is_blocked = not blocked.done()
    ends.set()
    assert is_blocked
    assert max(times) < 10


def test_changed_documents_trigger_the_alarm_and_then_every_request_retrieves(serve, stub, tmp_path):
    address, _ = serve(gate="never", options=audit_options(tmp_path, max_changed=0.1))
    answer, stub.answer = stub.answer, lambda body: SAME
    for _ in range(5):
        ask(address)
    wait_for_audits(address, 5)
    assert not get_arms(address)["a"]["loss"]["alarm"]
    stub.answer = answer

    def has_alarm():
        ask(address)
        return get_arms(address)["a"]["loss"]["alarm"]

    wait_until(has_alarm)
    reply = ask(address)
    assert reply.headers["x-knowgate-degraded"] == "alarm"
    assert reply.headers["x-knowgate-mode"] == "alarm"
    assert reply.headers["x-knowgate-retrieve"] == "true"
    assert "From the passages" in reply.text
    assert (
        "the alarm is on (skipping changes more than 10 % of the answers, with 95 % confidence"
        in reply.json()["knowgate"]["reason"]
    )
    text = httpx.get(f"{address}/metrics").text
    assert 'knowgate_alarm{arm="a"} 1.0' in text
    assert 'knowgate_degraded_total{part="alarm"}' in text


def test_an_alarm_survives_a_restart_until_it_is_cleared(serve, stub, tmp_path):
    address = serve_with_alarm(serve, tmp_path)
    assert get_arms(address)["a"]["loss"]["alarm"]
    readiness = httpx.get(f"{address}/ready")
    assert (readiness.status_code, "alarm for gate never: all requests retrieve" in readiness.text) == (200, True)
    assert httpx.post(f"{address}/v1/learning/clear", json={"arm": "a"}).status_code == 200
    assert httpx.get(f"{address}/ready").json()["degraded"] == []
    assert ask(address).headers["x-knowgate-retrieve"] == "false"
    assert get_arms(address)["a"]["loss"]["drawn"] <= 1
    assert httpx.post(f"{address}/v1/learning/clear", json={"arm": "z"}).status_code == 404


def test_a_canceled_request_to_clear_the_alarm_is_applied_once_it_is_stored(serve, stub, tmp_path, monkeypatch):
    app = {}
    address = serve_with_alarm(lambda **settings: app.setdefault("served", serve(**settings)), tmp_path)
    auditor = app["served"][1].state.service.learner.auditor
    add, has_started = auditor.store.add, threading.Event()

    async def add_later(record):
        has_started.set()
        await asyncio.sleep(0.3)
        return await add(record)

    monkeypatch.setattr(auditor.store, "add", add_later)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{address}/v1/learning/clear", json={"arm": "a"}, timeout=0.1)
    assert has_started.is_set()
    wait_until(lambda: not get_arms(address)["a"]["loss"]["alarm"])


def list_alarm_messages(caplog):
    return [record.message for record in caplog.records if record.message.startswith("Alarm")]


def test_a_start_logs_the_alarm_only_until_it_is_cleared(serve, stub, tmp_path, caplog):
    address = serve_with_alarm(serve, tmp_path)
    assert len(list_alarm_messages(caplog)) == 1
    assert httpx.post(f"{address}/v1/learning/clear", json={"arm": "a"}).status_code == 200
    caplog.clear()
    serve(gate="never", options=audit_options(tmp_path, max_changed=0.1))
    assert list_alarm_messages(caplog) == []


def test_an_alarm_of_one_key_is_logged_once(caplog):
    arm = ExperimentArm("a", None, LossMonitor(0.1), "scope", "never")
    losses = [AuditRecord("kg-1", "a", "scope", "loss", 1.0, owner=name) for name in ["anna"] * 40 + ["bob"]]
    _update_monitor(arm, losses)
    _update_monitor(arm, losses[:1])
    assert [("key 'anna'" in message) for message in list_alarm_messages(caplog)] == [True]


def test_clearing_an_alarm_fails_soon_if_the_log_does_not_respond(serve, stub, tmp_path, monkeypatch):
    monkeypatch.setattr(audit_store, "READ_SECONDS", 0.1)
    address, app = serve(gate="never", options=audit_options(tmp_path, max_changed=0.1))
    ends = threading.Event()
    app.state.service.decision_log._thread.submit(ends.wait, PATIENCE)
    reply = httpx.post(f"{address}/v1/learning/clear", json={"arm": "a"}, timeout=PATIENCE)
    ends.set()
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "log_down")


def test_an_alarm_of_one_worker_reaches_the_others(serve, stub, tmp_path):
    options = audit_options(tmp_path, max_changed=0.1)
    other, app = serve(gate="never", options={**options, "audit": 1e-9})
    ask(other)
    store_losses(app, tmp_path)

    def sees_alarm():
        ask(other)
        return get_arms(other)["a"]["loss"]["alarm"]

    wait_until(sees_alarm)
    assert ask(other).headers["x-knowgate-mode"] == "alarm"


def test_audits_of_one_threshold_do_not_count_for_another(serve, stub, tmp_path):
    first, _ = serve(gate="logprob:first", threshold=0.9, options=audit_options(tmp_path))
    ask(first)
    wait_for_audits(first, 1)
    second, _ = serve(gate="logprob:first", threshold=0.8, options=audit_options(tmp_path))
    assert get_arms(second)["a"]["loss"]["drawn"] == 0


def test_audits_with_one_arbiter_do_not_count_with_another(serve, stub, tmp_path):
    options = {"gate": "logprob:first", "options": audit_options(tmp_path)}
    first, _ = serve(arbiter="rules", **options)
    ask(first)
    wait_for_audits(first, 1)
    same, other = serve(arbiter="rules", **options)[0], serve(arbiter="none", **options)[0]
    assert get_arms(same)["a"]["loss"]["drawn"] == 1
    assert get_arms(other)["a"]["loss"]["drawn"] == 0


# --- shadow, canary, two gates --------------------------------------------------------------------


@pytest.mark.parametrize("upstream", [True, False])
def test_shadow_mode_decides_and_always_retrieves(serve, tmp_path, upstream):
    gate = "logprob:first" if upstream else "prompt"
    address, _ = serve(upstream=upstream, gate=gate, options={"shadow": True})
    record = ask(address, KNOWN, model="knowgate").json()["knowgate"]
    assert (record["retrieve"], record["mode"], record["notes"]) == (True, "shadow", ["would skip"])
    assert record["need"] <= record["threshold"]
    assert len(record["passages"]) == 1


@pytest.mark.parametrize("gate", ["logprob:first", "logprob", DEFAULT_GATE])
def test_shadow_mode_applies_to_the_gate_of_the_server_even_if_a_request_names_it(serve, gate):
    address, _ = serve(gate=gate, options={"shadow": True})
    assert ask(address, model="knowgate/logprob:first").json()["knowgate"]["mode"] == "shadow"
    assert "mode" not in ask(address, model="knowgate/logprob:mean").json()["knowgate"]


def test_shadow_mode_applies_to_completions(serve):
    address, _ = serve(gate="logprob:first", options={"shadow": True})
    body = {"model": "stub-llm", "prompt": KNOWN}
    record = httpx.post(f"{address}/v1/completions", json=body, timeout=30).json()["knowgate"]
    assert (record["retrieve"], record["mode"]) == (True, "shadow")


@pytest.mark.parametrize(("path", "field"), [("completions", "prompt"), ("responses", "input")])
def test_the_draft_of_the_question_alone_is_not_compared(serve, stub, tmp_path, path, field):
    stub.speaks = True
    stub.answer = lambda body: "The draft says 7." if "messages" in body else SAME
    address, app = serve(gate="logprob:first", options=audit_options(tmp_path, shadow=True))
    store = use_history(app)
    reply = httpx.post(f"{address}/v1/{path}", json={"model": "m", field: KNOWN}, timeout=30)
    assert reply.json()["knowgate"]["notes"] == ["would skip"]
    assert wait_for_audits(address, 1)["loss"]["lost"] == 0.0
    assert [list(body)[1] for body in stub.bodies] == ["messages", field, field]
    wait_until(store.list_labels)
    assert store.list_labels() == [(KNOWN, KnowledgeLabel.KNOWN, LabelSource.AGREEMENT)]


def test_shadow_mode_measures_the_loss_without_extra_calls(serve, stub, tmp_path):
    address, _ = serve(gate="logprob:first", options=audit_options(tmp_path, shadow=True))
    assert "From the passages" in ask(address).text
    assert wait_for_audits(address, 1)["loss"]["lost"] == 1.0
    assert len(stub.bodies) == 2  # the draft and the answer


def test_shadow_mode_collects_both_answers_of_requests_that_the_gate_retrieves_for(serve, stub, tmp_path):
    options = audit_options(tmp_path, shadow=True, keep_questions=True)
    address, _ = serve(gate="logprob:mean", threshold=0.0, arbiter="none", options=options)
    assert ask(address).json()["knowgate"]["notes"] == []  # the gate itself retrieves
    wait_until(lambda: get_arms(address)["a"]["audits"].get("label"))
    assert len(stub.bodies) == 2  # the draft and the answer

    def read_audits():
        with sqlite3.connect(tmp_path / "d.db") as database:
            return database.execute("SELECT kind, lost, closed IS NOT NULL, opened IS NOT NULL FROM audits").fetchall()

    wait_until(lambda: len(read_audits()) == 2)  # they are written a moment after they are counted
    assert read_audits() == [("loss", 0.0, 0, 0), ("label", 1.0, 1, 1)]


def test_only_the_beginnings_of_very_long_answers_are_kept(serve, tmp_path, monkeypatch):
    monkeypatch.setattr("tools.stub_upstream.WORDS", ("long " * MAX_ANSWER_CHARS,))
    options = audit_options(tmp_path, shadow=True, keep_questions=True)
    address, app = serve(gate="logprob:first", options=options)
    id = ask(address).headers["x-knowgate-id"]
    wait_for_audits(address, 1)
    assert len(app.state.service.recent.find(id)["closed"]) == MAX_ANSWER_CHARS
    with sqlite3.connect(tmp_path / "d.db") as database:
        assert database.execute("SELECT max(length(closed)) FROM audits").fetchone() == (MAX_ANSWER_CHARS,)


def test_shadow_mode_retrieves_even_if_a_rule_would_skip(serve, tmp_path):
    address, _ = serve(gate="logprob:first", options={"shadow": True})
    record = ask(address, "Hello!").json()["knowgate"]
    assert (record["retrieve"], "would skip" in record["notes"]) == (True, True)


def test_a_canary_follows_the_gate_for_a_fixed_share_of_users(serve):
    address, app = serve(gate="never", options={"canary": 0.5})
    experiment = app.state.service.learner.auditor.experiment
    users = [f"u{number}" for number in range(200)]
    modes = [RequestTrace() for _ in users]
    for user, trace in zip(users, modes, strict=True):
        experiment.assign(RequestOptions(), {"user": user}, trace)
    assert 70 < sum(trace.mode == "" for trace in modes) < 130
    for user, trace in list(zip(users, modes, strict=True))[:6]:
        assert ask(address, user=user).headers["x-knowgate-retrieve"] == ("true" if trace.mode else "false")


def test_two_gates_have_separate_statistics(serve, stub, tmp_path):
    address, _ = serve(gate="always", options=audit_options(tmp_path, gate_b="never"))
    arms = [ask(address, user=f"u{n}").headers["x-knowgate-arm"] for n in range(12)]
    a, b = wait_for_audits(address, arms.count("a")), wait_for_audits(address, arms.count("b"), "b")
    assert (a["gate"], a["loss"]["lost"]) == ("always", 0.0)
    assert (b["gate"], b["loss"]["lost"]) == ("never", float(arms.count("b")))
    assert {"a", "b"} == set(arms)


@pytest.mark.parametrize(("share_b", "arm"), [(1.0, "b"), (0.0, "a")])
def test_requests_that_name_the_gate_of_the_server_get_it_and_are_not_counted_in_a_comparison(serve, share_b, arm):
    address, _ = serve(gate="logprob:first", options={"gate_b": "always", "share_b": share_b, "canary": 0.0})
    named = ask(address, model="knowgate/logprob:first").json()["knowgate"]
    assert (named["gate"], named.get("arm"), named["mode"]) == ("logprob", None, "shadow")
    assert ask(address, model="knowgate").json()["knowgate"]["arm"] == arm
    both = ask(address, model="knowgate/logprob:first", knowgate={"retrieve": "never"}).json()["knowgate"]
    assert (both["gate"], both["retrieve"]) == ("never", False)


def test_the_same_gate_twice_counts_each_request_once(serve, stub, tmp_path):
    address, _ = serve(gate="never", options=audit_options(tmp_path, gate_b="never"))
    arms = [ask(address, user=f"u{n}").headers["x-knowgate-arm"] for n in range(12)]
    for name in ("a", "b"):
        wait_for_audits(address, arms.count(name), name)
    assert {name: arm["loss"]["drawn"] for name, arm in get_arms(address).items()} == Counter(arms)
    alone, _ = serve(gate="never", options=audit_options(tmp_path))  # the gate keeps what it did as "b"
    assert get_arms(alone)["a"]["loss"]["drawn"] == 12


def test_a_variant_of_a_gate_does_not_inherit_the_audits_of_another_one(serve, stub, tmp_path):
    options = audit_options(tmp_path)
    address, _ = serve(gate="logprob:first", options=options)
    ask(address)
    wait_for_audits(address, 1)
    same, _ = serve(gate="logprob:first", options=options)
    other, _ = serve(gate="logprob:min", options=options)
    moved, _ = serve(gate="logprob:first", options={**options, "place": "system"})
    assert [get_arms(url)["a"]["loss"]["drawn"] for url in (same, other, moved)] == [1, 0, 0]
    assert httpx.get(f"{same}/v1/dashboard").json()["recent"] == []  # in memory
    decision = httpx.get(f"{address}/v1/dashboard").json()["recent"][0]
    assert httpx.get(f"{same}/v1/decisions/{decision['id']}").json()["gate_spec"] == "logprob:first"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"audit": 0.1}, "`audit` needs a decision log"),
        ({"audit": 0.1, "decisions": "d.db", "audit_budget": 3, "workers": 4}, "Set `audit_budget` to 4 or more"),
        ({"durable": True}, "`durable` writes to the decision log"),
        ({"max_changed": 0.1}, "Set `audit` to the share of requests"),
        ({"max_loss": 0.1}, "Set `audit` to the share of requests"),
        ({"shadow": True, "canary": 0.1}, "mutually exclusive"),
        ({"threshold_b": 0.5}, "`threshold_b` is the threshold of `gate_b`"),
        ({"gate_b": "prompt"}, "prompt"),
    ],
)
def test_conflicting_options_are_rejected(invented, stub, options, words):
    with pytest.raises(kg.KnowgateError, match=words):
        create_app(kg.PipelineOptions(gate="always", docs=invented.docs), ServeOptions(upstream=stub.url, **options))


def test_learning_is_off_by_default(serve, stub, tmp_path):
    address, app = serve(gate="never", options={"decisions": str(tmp_path / "d.db")})
    assert app.state.service.learner is None
    assert httpx.get(f"{address}/v1/learning").json()["error"]["code"] == "off"


# --- labels and feedback --------------------------------------------------------------------------


def test_a_label_compares_both_answers_if_the_arbiter_chose_the_draft(serve, stub, tmp_path):
    def use_everywhere(service):
        use_arbiter(FixedArbiter(0.9))(service)
        for arm in service.learner.auditor.experiment.arms.values():
            object.__setattr__(arm, "rag", service.gate_service.rag)

    stub.sure = -9.0
    address, app = serve(gate="logprob:first", options=audit_options(tmp_path), change=use_everywhere)
    store = use_history(app)
    assert ask(address).json()["choices"][0]["message"]["content"] == SAME
    wait_until(store.list_labels)
    assert store.list_labels()[0] == (UNKNOWN, KnowledgeLabel.UNKNOWN, LabelSource.AGREEMENT)


def test_an_llm_in_this_process_labels_a_question_once(serve, tmp_path):
    history = TrafficLog(RecordingHistory(), drafts=True)

    def use_log(service):
        service.gate_service.rag = service.gate_service.rag.replace(log=history)
        service.learner.labeler.history = history

    address, _ = serve(upstream=False, gate="always", options=audit_options(tmp_path), change=use_log)
    ask(address, model="knowgate")
    wait_for_audits(address, 1)
    wait_until(history.store.list_labels)
    history.flush()
    assert (len(history.store.list_labels()), history.n_labeled) == (1, 1)


def test_draft_and_answer_become_a_label_of_the_history(serve, stub, tmp_path):
    stub.sure = -9.0
    address, app = serve(gate="logprob:first", options=audit_options(tmp_path))
    store = use_history(app)
    ask(address)
    wait_until(lambda: get_arms(address)["a"]["audits"].get("label"))  # the audit compares the same two answers
    app.state.service.learner.labeler.history.flush()
    assert store.list_labels() == [(UNKNOWN, KnowledgeLabel.UNKNOWN, LabelSource.AGREEMENT)]
    assert httpx.get(f"{address}/v1/learning").json()["labelled"] == 1


def test_an_audited_retrieval_without_a_draft_gets_a_closed_book_answer_for_its_label(serve, stub, tmp_path):
    address, app = serve(gate="always", options=audit_options(tmp_path))
    store = use_history(app)
    ask(address)
    wait_until(store.list_labels)
    assert len(stub.bodies) == 2
    assert get_arms(address)["a"]["loss"]["lost"] == 0.0


@pytest.mark.parametrize(
    ("body", "label"),
    [
        ({"rating": "up"}, KnowledgeLabel.KNOWN),
        ({"rating": "down"}, KnowledgeLabel.UNKNOWN),
        ({"correction": "42"}, KnowledgeLabel.KNOWN),
    ],
)
def test_feedback_on_a_skipped_request_becomes_a_human_label(serve, stub, tmp_path, body, label):
    options = {"decisions": str(tmp_path / "d.db"), "keep_questions": True, "canary": 1.0}
    address, app = serve(gate="never", options=options)
    store = use_history(app)
    id = ask(address).headers["x-knowgate-id"]
    wait_until(lambda: app.state.service.recent.find(id).get("closed"))
    reply = httpx.post(f"{address}/v1/feedback", json={"id": id, **body}).json()
    wait_until(store.list_labels)
    assert reply["learnt"] is True
    assert store.list_labels() == [(UNKNOWN, label, LabelSource.HUMAN)]


def test_feedback_does_not_wait_for_an_embedding_model_that_hangs(serve, stub, tmp_path, monkeypatch):
    monkeypatch.setattr("knowgate.server.learning.learner.LABEL_SECONDS", 0.1)
    options = {"decisions": str(tmp_path / "d.db"), "keep_questions": True, "canary": 1.0}
    address, app = serve(gate="never", options=options)
    store, responds = use_history(app), threading.Event()
    monkeypatch.setattr(store, "embed", lambda questions, embed=store.embed: (responds.wait(60), embed(questions))[1])
    id = ask(address).headers["x-knowgate-id"]
    wait_until(lambda: app.state.service.recent.find(id).get("closed"))
    assert httpx.post(f"{address}/v1/feedback", json={"id": id, "rating": "up"}).json()["learnt"] is False
    assert httpx.post(f"{address}/v1/forget", json={"question": "Another?"}).json()["forgotten"] is True
    responds.set()
    wait_until(store.list_labels)


def test_a_rating_after_a_search_of_the_application_becomes_no_label(serve, stub, tmp_path):
    options = {"decisions": str(tmp_path / "d.db"), "keep_questions": True, "canary": 1.0}
    address, app = serve(gate="always", options=options)
    use_history(app)
    id = httpx.post(f"{address}/v1/decide", json={"question": UNKNOWN}, timeout=30).json()["id"]
    assert httpx.get(f"{address}/v1/decisions/{id}").json()["only_decided"] is True
    assert httpx.post(f"{address}/v1/feedback", json={"id": id, "rating": "up"}).json()["learnt"] is False


@pytest.mark.parametrize(("rating", "label"), [("up", KnowledgeLabel.KNOWN), ("down", KnowledgeLabel.UNKNOWN)])
def test_a_rating_of_a_draft_that_the_arbiter_sent_labels_what_the_llm_knows(serve, stub, tmp_path, rating, label):
    stub.sure, stub.answer = -9.0, lambda body: "I don't know." if "<passages>" in str(body) else SAME
    options = {"decisions": str(tmp_path / "d.db"), "keep_questions": True, "canary": 1.0}
    address, app = serve(gate="logprob:first", options=options)
    report = ask(address).json()["knowgate"]
    assert (len(report["passages"]), report["choice"]["given"]) == (1, "draft")
    wait_until(
        lambda: app.state.service.recent.find(report["id"]).get("closed")
    )  # without a history, this adds no label
    store = use_history(app)
    reply = httpx.post(f"{address}/v1/feedback", json={"id": report["id"], "rating": rating}).json()
    assert (reply["learnt"], store.list_labels()) == (True, [(UNKNOWN, label, LabelSource.HUMAN)])


@pytest.mark.parametrize("restarts", [False, True])
def test_a_rating_of_the_answer_of_another_llm_becomes_no_label(serve, stub, tmp_path, restarts):
    options = {"decisions": str(tmp_path / "d.db"), "keep_questions": True, "canary": 1.0, "upstream_model": "stub-llm"}
    address, app = serve(gate="never", options=options)
    id = ask(address, model="other-llm").json()["knowgate"]["id"]
    if restarts:  # the decision is no longer in memory
        address, app = serve(gate="never", options=options)
    store = use_history(app)
    assert httpx.post(f"{address}/v1/feedback", json={"id": id, "rating": "up"}).json()["learnt"] is False
    assert store.list_labels() == []


def test_a_rating_of_an_error_becomes_no_label(serve, stub, tmp_path):
    stub.status = 500
    options = {"decisions": str(tmp_path / "d.db"), "keep_questions": True, "canary": 1.0}
    address, app = serve(gate="never", options=options)
    store = use_history(app)
    id = ask(address).headers["x-knowgate-id"]
    assert httpx.post(f"{address}/v1/feedback", json={"id": id, "rating": "down"}).json()["learnt"] is False
    assert store.list_labels() == []


def test_a_rating_of_a_computed_answer_becomes_no_label(serve, tmp_path):
    options = {"decisions": str(tmp_path / "d.db"), "keep_questions": True, "canary": 1.0}
    address, app = serve(upstream=False, gate="prompt", options=options)
    use_history(app)
    reply = ask(address, "What is 17 * 23?", model="knowgate").json()
    assert reply["choices"][0]["message"]["content"] == "391"
    id = reply["knowgate"]["id"]
    assert httpx.post(f"{address}/v1/feedback", json={"id": id, "rating": "up"}).json()["learnt"] is False


def test_the_beginning_of_a_draft_of_an_llm_in_this_process_is_not_compared(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(FakeModel, "_answer", lambda model, prompt: "It is the town of Mira.")
    options = {"decisions": str(tmp_path / "d.db"), "keep_questions": True, "canary": 1.0}
    address, app = serve(upstream=False, gate="logprob:first", threshold=0.0, arbiter="none", options=options)
    use_history(app)
    id = ask(address, model="knowgate").json()["knowgate"]["id"]
    wait_until(lambda: app.state.service.recent.find(id).get("opened"))
    assert app.state.service.recent.find(id).get("closed") is None
    assert httpx.post(f"{address}/v1/feedback", json={"id": id, "rating": "up"}).json()["learnt"] is False


def test_the_history_is_written_after_a_feedback_that_missed_the_deadline(serve, stub, tmp_path):
    options = {"decisions": str(tmp_path / "d.db"), "keep_questions": True, "canary": 1.0, "deadline": 1.0}
    address, app = serve(gate="never", options=options)
    store, gate = use_history(app), threading.Event()
    add = store.add
    store.add = lambda entries, vectors=None: (gate.wait(20), add(entries))[1]
    ids = [ask(address).json()["knowgate"]["id"] for _ in range(2)]
    url = f"{address}/v1/feedback"
    assert httpx.post(url, json={"id": ids[0], "rating": "up"}, timeout=20).status_code == 504
    gate.set()
    reply = httpx.post(url, json={"id": ids[1], "rating": "up"}, timeout=20)
    assert (reply.status_code, reply.json()["learnt"], len(store.entries)) == (200, True, 2)


def test_readiness_shows_that_the_history_is_not_written(serve, tmp_path):
    address, app = serve(gate="never", options=audit_options(tmp_path))
    use_history(app)
    history = app.state.service.learner.labeler.history
    history.n_lost = 2
    assert "2 labels could not be written to the history" in httpx.get(f"{address}/ready").json()["degraded"]


def test_feedback_without_stored_texts_becomes_no_label(serve, tmp_path):
    address, app = serve(gate="never", options={"decisions": str(tmp_path / "d.db"), "canary": 1.0})
    use_history(app)
    id = ask(address).headers["x-knowgate-id"]
    assert httpx.post(f"{address}/v1/feedback", json={"id": id, "rating": "up"}).json()["learnt"] is False


@pytest.mark.parametrize(
    ("options", "count"), [({}, 0), ({"workers": 2}, 1), ({"workers": 2, "keep_questions": True}, 0)]
)
def test_a_server_warns_if_its_processes_do_not_share_questions(serve, tmp_path, history, caplog, options, count):
    serve(gate="never", log=history, options={"decisions": str(tmp_path / "d.db"), **options})
    assert sum("Set `keep_questions`" in record.message for record in caplog.records) == count


def test_a_rating_of_an_open_answer_needs_the_closed_answer_to_become_a_label():
    retrieved = {"retrieved": True, "opened": "Paris"}
    assert label_by_feedback("up", None, retrieved) is None
    assert label_by_feedback("up", None, {**retrieved, "closed": "Paris."}) is KnowledgeLabel.KNOWN
    assert label_by_feedback("up", None, {**retrieved, "closed": "Rome"}) is KnowledgeLabel.UNKNOWN
    assert label_by_feedback("down", None, {**retrieved, "closed": "Rome"}) is None
    assert label_by_feedback("down", "Rome", {**retrieved, "closed": "Rome"}) is KnowledgeLabel.KNOWN


def test_an_abstention_differs_from_every_answer_that_does_not_abstain():
    assert not answers_differ("I don't know.", "The passages do not mention it.")
    assert answers_differ("I don't know.", "Paris")
    assert not answers_differ("Paris", "It is Paris.")


def test_only_the_beginning_of_a_streamed_answer_is_kept_in_memory():
    stream_text = StreamText()
    piece = "x" * 6_000
    for _ in range(300):
        stream_text.feed(b'data: {"choices":[{"delta":{"content":"%s"}}]}\n\n' % piece.encode())
    stream_text.feed(b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n')
    assert cut_answer(stream_text.text) == "x" * MAX_ANSWER_CHARS
    assert sum(map(len, stream_text.pieces)) < 2 * MAX_ANSWER_CHARS


@pytest.mark.parametrize("kind", ["custom_tool_call_input.delta", "function_call_arguments.delta", "refusal.delta"])
def test_a_streamed_response_without_text_is_unreadable(kind):
    stream_text = StreamText()
    for event in (b'{"type":"response.%s","delta":"x"}' % kind.encode(), b'{"type":"response.completed"}'):
        stream_text.feed(b"data: " + event + b"\n\n")
    assert (stream_text.text, stream_text.is_unreadable) == (None, True)


@pytest.mark.parametrize("unfinished", [b"null", b'""'])
def test_an_incomplete_stream_has_no_text(unfinished):
    stream_text = StreamText()
    stream_text.feed(b'data: {"choices":[{"delta":{"content":"Pa"},"finish_reason":%s}]}\n\nda' % unfinished)
    assert stream_text.text is None
    stream_text.feed(b'ta: {"choices":[{"delta":{"content":"ris"},"finish_reason":"stop"}]}\n\n')
    assert stream_text.text == "Paris"


@pytest.mark.parametrize(
    "chunks",
    [
        [b'[{"index":0,"delta":{"content":"Paris"}}]', b'[{"index":1,"delta":{"content":"Lyon"}}]'],
        [b'[{"index":0,"text":"Paris"},{"index":1,"text":"Lyon"}]'],
    ],
)
def test_a_stream_of_several_answers_has_no_text(chunks):
    stream_text = StreamText()
    for choices in (*chunks, b'[{"index":0,"delta":{},"finish_reason":"stop"}]'):
        stream_text.feed(b'data: {"choices":' + choices + b"}\n\n")
    assert stream_text.text is None


# --- drift ----------------------------------------------------------------------------------------


def test_drift_is_detected_from_the_share_of_far_questions():
    usual, strange = LossMonitor(), LossMonitor()
    for number in range(400):
        usual.add_distance(1.5 if number % 100 == 0 else 0.4)
        strange.add_distance(1.5 if number > 300 else 0.4)
    assert (usual.to_json()["drift"]["drifted"], usual.to_json()["drift"]["mean"]) == (False, 0.01)
    assert strange.to_json()["drift"]["drifted"] is True
    assert not strange.alarm  # shown, but nothing falls back


def test_drift_is_reported_for_each_gate(serve, tmp_path, monkeypatch):
    address, app = serve(upstream=False, gate="prompt", options={"canary": 1.0})
    gate = type(app.state.service.gate_service.rag.bound_gate)
    monkeypatch.setattr(gate, "distances", lambda self, questions, readings: [2.0 for _ in questions])
    reply = ask(address, KNOWN, model="knowgate").json()
    assert reply["knowgate"]["notes"] == ["far question"]
    drift = get_arms(address)["a"]["drift"]
    assert (drift["questions"], drift["mean"]) == (1, 1.0)
    assert 'knowgate_far{arm="a"} 1.0' in httpx.get(f"{address}/metrics").text


def test_gates_without_distances_report_no_drift():
    monitor = LossMonitor()
    monitor.add_distance(None)
    assert (monitor.to_json()["drift"]["questions"], monitor.to_json()["drift"]["mean"]) == (0, None)


# --- other options of requests ---------------------------------------------------------------------


def test_a_request_with_its_own_threshold_follows_the_alarm_but_is_not_counted(serve, stub, tmp_path):
    address = serve_with_alarm(serve, tmp_path)
    drawn = get_arms(address)["a"]["loss"]["drawn"]
    reply = ask(address, knowgate={"threshold": 0.9})
    assert (reply.headers["x-knowgate-retrieve"], reply.headers["x-knowgate-mode"]) == ("true", "alarm")
    assert "x-knowgate-arm" not in reply.headers
    assert get_arms(address)["a"]["loss"]["drawn"] == drawn


def test_deleting_a_question_deletes_its_audit_texts_and_corrections(serve, stub, tmp_path):
    address, app = serve(gate="never", options={**audit_options(tmp_path), "keep_questions": True})
    id = ask(address).headers["x-knowgate-id"]
    wait_for_audits(address, 1)
    httpx.post(f"{address}/v1/feedback", json={"id": id, "correction": "Babakostad, surely"})
    assert httpx.post(f"{address}/v1/forget", json={"question": UNKNOWN}).status_code == 200
    assert app.state.service.recent.find(id) is None
    assert get_arms(address)["a"]["loss"]["drawn"] == 1  # that it was lost stays counted
    stored = b"".join(file.read_bytes() for file in tmp_path.glob("d.db*"))
    assert b"Babakostad, surely" not in stored
    assert b"From the passages" not in stored


@pytest.fixture
def history(monkeypatch, tmp_path):
    """The path of a history, with which a server stores texts without the option `keep_questions`."""
    monkeypatch.setattr("knowgate.pipeline.traffic_log.open_history", lambda spec: open_history(spec, HashEmbedder()))
    return str(tmp_path / "h.db")


def test_a_question_is_forgotten_by_its_hash_if_its_text_is_not_stored(serve, stub, tmp_path, history):
    address, _ = serve(gate="never", log=history, options=audit_options(tmp_path))
    id = ask(address).headers["x-knowgate-id"]
    wait_for_audits(address, 1)
    httpx.post(f"{address}/v1/feedback", json={"id": id, "correction": "Babakostad, surely"})
    stored = b"".join(file.read_bytes() for file in tmp_path.glob("d.db*"))
    assert b"Babakostad, surely" in stored
    assert b"From the passages" in stored
    assert UNKNOWN.encode() not in stored
    reply = httpx.post(f"{address}/v1/forget", json={"question": UNKNOWN.upper()}).json()
    assert (reply["forgotten"], reply["decisions"]) == (True, 1)
    assert httpx.get(f"{address}/v1/dashboard").json()["recent"] == []
    stored = b"".join(file.read_bytes() for file in tmp_path.glob("d.db*"))
    assert b"Babakostad, surely" not in stored
    assert b"From the passages" not in stored


def test_a_question_in_memory_is_forgotten_without_a_decision_log(serve, stub, history):
    address, app = serve(gate="never", log=history)
    ask(address)
    assert httpx.post(f"{address}/v1/forget", json={"question": KNOWN}).json()["decisions"] == 0
    assert httpx.post(f"{address}/v1/forget", json={"question": UNKNOWN}).json()["decisions"] == 1
    assert app.state.service.recent.list_newest(9) == []


def test_a_question_that_is_forgotten_while_its_request_runs_is_not_in_memory_without_a_decision_log(serve, stub):
    address, _ = serve(gate="never", options={"keep_questions": True})
    stub.waits_for = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        request = thread.submit(ask, address)
        wait_until(lambda: stub.bodies)
        assert httpx.post(f"{address}/v1/forget", json={"question": UNKNOWN}).json()["forgotten"] is True
        stub.waits_for.set()
        assert request.result().status_code == 200
    assert httpx.get(f"{address}/v1/dashboard").json()["recent"] == []
    ask(address)
    assert len(httpx.get(f"{address}/v1/dashboard").json()["recent"]) == 1


def test_a_question_that_another_process_forgot_is_deleted_from_memory(serve, stub, tmp_path, monkeypatch):
    monkeypatch.setattr("knowgate.server.app.MEMORY_SECONDS", 0.05)
    location = str(tmp_path / "d.db")
    address, app = serve(gate="never", options={"decisions": location, "keep_questions": True})
    ids = [ask(address, text).headers["x-knowgate-id"] for text in (UNKNOWN, KNOWN)]
    other = DecisionLog(location, stores_questions=True, is_shared=True)
    asyncio.run(other.delete(question=UNKNOWN))
    wait_until(lambda: app.state.service.recent.find(ids[0]) is None)
    later = ask(address).headers["x-knowgate-id"]
    asyncio.run(other.delete(id=ids[1]))
    wait_until(lambda: app.state.service.recent.find(ids[1]) is None)
    assert app.state.service.recent.find(later) is not None
    other.close()


def test_forgetting_says_that_texts_of_unknown_questions_may_remain(serve, stub, tmp_path):
    address, _ = serve(gate="never", options={"decisions": str(tmp_path / "d.db")})
    id = ask(address).headers["x-knowgate-id"]

    def forget():
        return httpx.post(f"{address}/v1/forget", json={"question": UNKNOWN}).json()

    assert forget() == {"forgotten": True, "decisions": 0, "history": 0}  # a decision without any text
    httpx.post(f"{address}/v1/feedback", json={"id": id, "rating": "down", "comment": "wrong"})
    reply = forget()
    assert (reply["forgotten"], reply["decisions"]) == (False, 0)
    assert "DELETE /v1/decisions/ID" in reply["note"]
    assert httpx.delete(f"{address}/v1/decisions/{id}").status_code == 200
    assert forget()["forgotten"] is True


def test_an_audit_of_a_question_that_is_deleted_meanwhile_stores_no_texts(serve, stub, tmp_path):
    address, app = serve(gate="never", options={**audit_options(tmp_path), "keep_questions": True})
    history, audits = use_history(app), app.state.service.learner.auditor
    compare, is_deleted = audits._answers_differ, threading.Event()

    async def compare_later(*answers):
        await asyncio.to_thread(is_deleted.wait, 20)
        return await compare(*answers)

    audits._answers_differ = compare_later
    ask(address)
    assert httpx.post(f"{address}/v1/forget", json={"question": UNKNOWN}).json()["decisions"] == 1
    is_deleted.set()
    wait_for_audits(address, 1)
    assert history.list_labels() == []
    assert b"From the passages" not in b"".join(file.read_bytes() for file in tmp_path.glob("d.db*"))


def test_an_answer_that_utf8_cannot_encode_is_audited(serve, stub, tmp_path, monkeypatch):
    monkeypatch.setattr(stub, "answer", lambda body: "\ud800 new" if "<passages>" in str(body) else "\ud800 old")
    address, _ = serve(gate="never", options=audit_options(tmp_path, keep_questions=True))
    assert ask(address).status_code == 200
    loss = wait_for_audits(address, 1)["loss"]
    assert (loss["lost"], loss["failed"]) == (1.0, 0)


def test_requests_that_find_the_queue_of_audits_full_are_counted(serve, monkeypatch, tmp_path):
    async def wait(self, job):
        await asyncio.Event().wait()

    monkeypatch.setattr(Auditor, "_audit", wait)
    monkeypatch.setattr(audit, "MAX_PENDING_AUDITS", 2)
    address, app = serve(gate="never", options=audit_options(tmp_path))
    auditor = app.state.service.learner.auditor
    for pending_count in (1, 2, 3, 3, 3):  # one audit runs, and two wait
        assert ask(address).status_code == 200
        wait_until(lambda expected=pending_count: auditor.pending_count == expected)
    assert get_arms(address)["a"]["audits"] == {"dropped": 2}
    assert 'knowgate_audits_total{arm="a",result="dropped"} 2.0' in httpx.get(f"{address}/metrics").text


def test_a_server_that_ends_logs_how_many_audits_it_drops(serve, monkeypatch, tmp_path, caplog):
    async def wait(self, job):
        await asyncio.Event().wait()

    monkeypatch.setattr(Auditor, "_audit", wait)
    address, app = serve(gate="never", options=audit_options(tmp_path))
    auditor = app.state.service.learner.auditor
    calls = auditor.budget.remaining
    for _ in range(3):
        assert ask(address).status_code == 200
    wait_until(lambda: auditor.pending_count == 3)
    app.state.reloader.loop.call_soon_threadsafe(auditor.stop)
    wait_until(lambda: "3 audits had not ended and were dropped" in caplog.text)
    ask(address)  # an audit that is submitted afterwards is dropped, too
    wait_until(lambda: auditor.budget.remaining >= calls)


def test_slow_audits_of_one_key_do_not_delay_those_of_others(monkeypatch):
    done = []

    async def audit(self, job):
        if job.trace.owner == "slow":
            await asyncio.Event().wait()
        done.append(job.trace.owner)

    async def run():
        auditor = Auditor(None, None, None, None, None, CallBudget(1_000))
        for owner in ["slow"] * MAX_PENDING_AUDITS + ["other"] * 3:
            trace, arm = SimpleNamespace(owner=owner, body_memory=0), SimpleNamespace(name="a")
            auditor.submit(SimpleNamespace(trace=trace, call_count=1, arm=arm))
        async with asyncio.timeout(PATIENCE):
            while len(done) < 3:
                await asyncio.sleep(0)
        await auditor.close()

    monkeypatch.setattr(Auditor, "_audit", audit)
    asyncio.run(run())
    assert done == ["other"] * 3


def test_audits_that_the_llm_compared_do_not_count_for_those_that_compare_words():
    rag = AdaptiveRAG(FakeModel(), load_gate("never"))
    scopes = {_compute_scope(rag, "never", ServeOptions(audit_compare=name)) for name in ("words", "llm")}
    assert len(scopes) == 2


def test_an_empty_second_answer_is_compared(serve, stub, tmp_path):
    stub.answer = lambda body: "" if "<passages>" in str(body) else SAME
    address, _ = serve(gate="never", options=audit_options(tmp_path))
    ask(address)
    assert wait_for_audits(address, 1)["loss"]["lost"] == 1.0


def test_audits_with_another_reranker_do_not_count():
    class NamedReranker:
        def __init__(self, name):
            self.name = self.fingerprint = name

    rag = AdaptiveRAG(FakeModel(), load_gate("never"))
    rerankers = [None, NamedReranker("a"), NamedReranker("b")]
    scopes = [
        _compute_scope(rag.replace(reranker=reranker), "never", ServeOptions())
        for reranker in (*rerankers, NamedReranker("a"))
    ]
    assert (len(set(scopes)), scopes[1]) == (3, scopes[3])


def test_a_response_that_is_learnt_from_is_no_circular_reference():
    async def learn(text, is_unreadable):
        pass

    response = Response("{}")
    capture_answer(response, learn)
    reference = weakref.ref(response)
    gc.disable()
    try:
        del response
        assert reference() is None
    finally:
        gc.enable()
