"""The pipeline beside an event loop. Nothing here depends on how fast things are: threads wait for each other."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from types import SimpleNamespace

import pytest

from knowgate.errors import BadInput, ModelError, ServerError
from knowgate.gates import load_gate
from knowgate.models.backend import Backend
from knowgate.models.fake import FakeModel
from knowgate.models.openai.model import OpenAIModel
from knowgate.pipeline import execution
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.execution import batch_async, run_in_model_thread
from knowgate.types import AnswerEvent, Completion, Passage, TextEvent
from tests.support.retrieval_fakes import build_bm25

KNOWN, UNKNOWN = "What is the capital of France?", "What is the badge colour of Anna?"
TABLE = {
    "capital of France": {"closed": "it is Paris of course", "logprob": math.log(0.9)},
    "badge colour of Anna": {"closed": "red", "open": "green", "logprob": math.log(0.2)},
}
PASSAGES = [Passage("badge", "The badge colour of Anna is green."), Passage("lunch", "Anna eats lunch at noon.")]
LONG = 60  # seconds after which a thread that nobody woke gives up


class Threaded(Backend):
    """Echoes the prompt's last word. Remembers how many threads were inside at once; `inside` runs in each of them."""

    name = fingerprint = "threaded"
    offers, depth = frozenset(), 0

    def __init__(self, concurrency=1, inside=lambda: None):
        self._concurrency, self._inside = concurrency, inside
        self._lock, self._active, self.most = threading.Lock(), 0, 0

    @property
    def concurrency(self):
        return self._concurrency

    def fits(self, prompts, max_tokens):
        return [True for _ in prompts]

    def generate(self, prompts, *, max_tokens, temperature=0.0, n=1, seed=None, resume=None):
        with self.busy():
            return [[Completion(prompt.text.split("?")[0].split()[-1])] for prompt in prompts]

    @contextlib.contextmanager
    def busy(self):
        with self._lock:
            self._active += 1
            self.most = max(self.most, self._active)
        self._inside()
        yield
        with self._lock:
            self._active -= 1


def linger():
    """Long enough for others to come in, were they let in."""
    time.sleep(0.02)


class Endless(Backend):
    """Streams until it is closed."""

    name = fingerprint = "endless"
    offers, depth = frozenset(), 0

    def __init__(self):
        self.closed = threading.Event()

    def generate(self, prompts, **settings):
        raise AssertionError("a stream is not generated")

    def stream(self, prompt, *, max_tokens, resume=None):
        try:
            while True:
                yield "more "
        finally:
            self.closed.set()
        return Completion("")


def build(model=None, gate="logprob:first", **settings):
    settings.setdefault("retriever", build_bm25(PASSAGES, stem=False))
    return AdaptiveRAG(model or FakeModel(TABLE), load_gate(gate), **settings)


def untimed(answer):
    return replace(answer, seconds={})


# --- the same -------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", [KNOWN, UNKNOWN])
def test_an_awaited_answer_is_the_answer(question):
    rag = build()
    assert untimed(asyncio.run(rag.aanswer(question))) == untimed(rag.answer(question))
    assert asyncio.run(rag.adecide(question)) == rag.decide(question)


def test_awaited_answers_come_in_order():
    asked = [KNOWN, UNKNOWN] * 40  # more than a batch
    answers = asyncio.run(build().aanswer_many(asked))
    assert [answer.text for answer in answers] == ["it is Paris of course", "green"] * 40


@pytest.mark.parametrize("question", [KNOWN, UNKNOWN])
def test_the_awaited_events_are_the_events(question):
    async def listen():
        return [event async for event in build().aanswer_stream(question)]

    def shown(events):
        return [event if not isinstance(event, AnswerEvent) else untimed(event.answer) for event in events]

    assert shown(asyncio.run(listen())) == shown(build().answer_stream(question))


def test_a_tiny_llama_streams_from_another_thread(tmp_path):
    from knowgate.models.hf.model import HFModel
    from tests.support.byte_llama import save_byte_llama

    rag = build(HFModel(str(save_byte_llama(tmp_path))), "never", max_tokens=12)

    async def both():
        async def listen(question):
            return "".join([e.text async for e in rag.aanswer_stream(question) if isinstance(e, TextEvent)])

        return await asyncio.gather(listen("Who?"), listen("Why is it?"))

    assert asyncio.run(both()) == [rag.answer("Who?").text, rag.answer("Why is it?").text]


# --- many questions -------------------------------------------------------------------------------


async def slowly(items):
    for item in items:
        await asyncio.sleep(0)
        yield item


@pytest.mark.parametrize("source", [list, iter, slowly])
def test_questions_may_come_from_anything(source):
    async def run():
        return [answer.text async for answer in build().astream(source([KNOWN, UNKNOWN, KNOWN]), batch=2)]

    assert asyncio.run(run()) == ["it is Paris of course", "green", "it is Paris of course"]


@pytest.mark.parametrize("wrap", [iter, slowly])
def test_no_more_questions_are_taken_than_a_batch(wrap):
    taken = []

    def source():
        for number in range(100):
            taken.append(number)
            yield KNOWN

    async def run():
        async with aclosing(build().astream(wrap(source()), batch=3)) as answers:
            await anext(answers)
            return len(taken)

    assert asyncio.run(run()) == 3


def test_no_questions_give_no_answers():
    async def run():
        return [batch async for batch in batch_async([], 4)], await build().aanswer_many([])

    assert asyncio.run(run()) == ([], [])


# --- the loop and the threads ---------------------------------------------------------------------


def test_the_loop_continues_while_an_answer_is_made():
    ticked = threading.Event()
    model = Threaded(inside=lambda: ticked.wait(LONG))

    async def tick():
        for _ in range(10):
            await asyncio.sleep(0)
        ticked.set()  # only now can the model go on

    async def run():
        answer, _ = await asyncio.gather(build(model, "never").aanswer("one?"), tick())
        return answer.text, ticked.is_set()

    assert asyncio.run(run()) == ("one", True)


def test_the_loop_continues_while_questions_are_waited_for():
    ticked = threading.Event()

    def source():
        ticked.wait(LONG)
        yield KNOWN

    async def run():
        async def tick():
            ticked.set()

        answers, _ = await asyncio.gather(build().aanswer_many(source()), tick())
        return len(answers)

    assert asyncio.run(run()) == 1


def test_a_local_model_is_used_by_one_thread_at_a_time_whoever_asks():
    model = Threaded(inside=linger)
    pipelines = [build(model, "never"), build(model, "never")]
    asked = [f"{word}?" for word in ("one", "two", "three", "four", "five", "six")]

    async def run():
        answers = await asyncio.gather(*(pipelines[i % 2].aanswer(question) for i, question in enumerate(asked)))
        return [answer.text for answer in answers]

    assert asyncio.run(run()) == ["one", "two", "three", "four", "five", "six"]
    assert model.most == 1


def test_a_remote_model_is_used_by_as_many_threads_as_it_allows():
    together = threading.Barrier(3, timeout=LONG)
    model = Threaded(concurrency=3, inside=together.wait)  # none goes on before three are there

    async def run():
        return await asyncio.gather(*(build(model, "never").aanswer(f"{word}?") for word in ("one", "two", "three")))

    assert [answer.text for answer in asyncio.run(run())] == ["one", "two", "three"]
    assert model.most == 3


def test_a_server_may_be_asked_by_as_many_threads_as_it_has_connections():
    assert OpenAIModel("m", "http://server.test/v1", concurrency=5).concurrency == 5
    assert FakeModel().concurrency == 1


def test_the_other_parts_are_used_by_one_thread_at_a_time_even_so():
    parts = Threaded(inside=linger)

    class Searching:
        name = fingerprint = "searching"

        def search(self, queries, k):
            with parts.busy():
                return [PASSAGES[:k] for _ in queries]

    together = threading.Barrier(4, timeout=LONG)
    rag = build(Threaded(concurrency=4, inside=together.wait), "always", retriever=Searching())

    async def run():
        await asyncio.gather(*(rag.aanswer(f"{number}?") for number in range(4)))

    asyncio.run(run())
    assert parts.most == 1


def test_what_the_caller_set_in_its_context_is_seen():
    language = contextvars.ContextVar("language", default="none")

    async def run():
        language.set("zh")
        return await run_in_model_thread(FakeModel(), language.get)

    assert asyncio.run(run()) == "zh"


# --- errors and cancelling ------------------------------------------------------------------------


def test_an_error_comes_through_as_it_is():
    error = ServerError("the server is away.")

    def fail():
        raise error

    rag = build(Threaded(inside=fail), "never")
    with pytest.raises(ServerError) as caught:
        asyncio.run(rag.aanswer("one?"))
    assert caught.value is error


def test_an_error_in_the_middle_of_a_stream_comes_through_after_the_events_before_it():
    async def run():
        events = build(gate="always", retriever=None).aanswer_stream(UNKNOWN)
        first = await anext(events)
        with pytest.raises(Exception, match="no documents to retrieve from"):
            await anext(events)
        return first.decision.retrieve

    assert asyncio.run(run())


def test_an_empty_question_is_refused():
    with pytest.raises(BadInput, match="the question is empty"):
        asyncio.run(build().aanswer(" "))


def test_cancelling_stops_a_stream():
    model = Endless()

    async def listen(heard):
        async for event in build(model, "never").aanswer_stream(KNOWN):
            if isinstance(event, TextEvent):
                heard.set()

    async def run():
        heard = asyncio.Event()
        task = asyncio.create_task(listen(heard))
        await heard.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert model.closed.wait(LONG)


def test_closing_a_stream_stops_it_before_closing_returns():
    model = Endless()

    async def run():
        async with aclosing(build(model, "never").aanswer_stream(KNOWN)) as events:
            async for event in events:
                if isinstance(event, TextEvent):
                    break
        return model.closed.is_set()

    assert asyncio.run(run())


def test_an_answer_cancelled_before_its_turn_is_never_begun():
    go, begun = threading.Event(), threading.Event()

    def inside():
        begun.set()
        go.wait(LONG)

    model = Threaded(inside=inside)
    asked = []
    generate = model.generate
    model.generate = lambda prompts, **settings: asked.append(prompts) or generate(prompts, **settings)

    async def run():
        rag = build(model, "never")
        first = asyncio.create_task(rag.aanswer("one?"))
        await asyncio.to_thread(begun.wait, LONG)
        second = asyncio.create_task(rag.aanswer("two?"))
        await asyncio.sleep(0)
        second.cancel()
        outcome = (await asyncio.gather(second, return_exceptions=True))[0]
        go.set()
        return (await first).text, outcome

    text, outcome = asyncio.run(run())
    assert text == "one"
    assert isinstance(outcome, asyncio.CancelledError)
    assert len(asked) == 1


def test_an_answer_that_is_read_too_slowly_ends_with_an_error(monkeypatch):
    monkeypatch.setattr(execution, "MAX_UNREAD_ITEMS", 5)

    async def read():
        with ThreadPoolExecutor(1) as workers:
            stream = execution._iterate_in_one_call(SimpleNamespace(workers=workers), (n for n in range(1_000)))
            async with aclosing(stream) as items:
                async for _ in items:
                    await asyncio.sleep(0.05)

    with pytest.raises(ModelError, match="read too slowly"):
        asyncio.run(read())
