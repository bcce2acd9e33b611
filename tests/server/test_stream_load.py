"""A stream of the upstream whose data is always available holds up neither other requests nor its own deadline."""

import asyncio
import itertools
import json
import threading
import time

import httpx
import pytest

from knowgate.core.validation import parse_json
from knowgate.server import streaming
from knowgate.server.client_connection import ABORT_EXTENSION, EventStreamResponse
from knowgate.server.json_api import LARGE_BODY_BYTES, dump_json, load_json
from knowgate.server.streaming import SLICE_LINES, InvalidResponse, WorkSlice, chain_lines, split_lines
from tests.server.test_chat import ask
from tests.server.test_upstream_responses import STREAM_HEAD, chunk
from tests.support.hostile_server import HostileServer, http
from tests.support.processes import PATIENCE

WORD = b"data: " + chunk("word ") + b"\n\n"
END = b"data: " + chunk("", "stop") + b"\n\ndata: [DONE]\n\n"


def make_response(token_count):
    choice = {"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}
    tokens = [{"token": "a", "logprob": -1.0}] * token_count
    return json.dumps({"choices": [{**choice, "logprobs": {"content": tokens}}]}, separators=(",", ":")).encode()


SHAPES = {
    "blank lines": [WORD, *[b"\n" * 65_536] * 32, END],
    "comments": [WORD, *[b": x\n\n" * 13_000] * 16, END],
    "short lines": [WORD, *[b"a\n" * 16_384] * 4, END],
    "words": [*[WORD * 100] * 60, END],
}


@pytest.fixture
def serve_hostile(serve):
    with HostileServer() as hostile:

        def start(gate="never", **options):
            options = {"upstream": f"{hostile.url}/v1", **options}
            return serve(upstream=False, gate=gate, options=options)[0], hostile

        yield start


def collect(chunks):
    """Return the lines of a stream that arrives in these chunks."""

    async def send():
        for piece in chunks:
            yield piece

    async def read():
        return [line async for line in split_lines(send())]

    return asyncio.run(read())


class HealthWatch:
    """Asks for /health again and again in a thread, and keeps the waits.

    They are measured as the processor time of this process, in which the server runs, too: on a busy machine, any
    request may take long.
    """

    def __init__(self, address):
        self.address = address
        self.waits = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        with httpx.Client(timeout=30) as client:
            while not self._stop.is_set():
                start = time.process_time()
                client.get(f"{self.address}/health")
                self.waits.append(time.process_time() - start)
                time.sleep(0.02)

    def __enter__(self):
        self._thread.start()
        while not self.waits:
            time.sleep(0.01)
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


# --- what is dropped ------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_blank_lines_after_blank_lines_are_dropped(end):
    lines = [b"data: 1\n", b"\n"]
    assert collect([end * 5 + b"data: 1" + end * 50, end * 50, b"data: 1" + end + end]) == [*lines, *lines]


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_the_last_of_several_comments_is_kept(end):
    comments = b"".join(b": %d" % number + end + end for number in range(9))
    expected = [b"data: 1\n", b"\n", b": 8\n", b"\n", b"data: 2\n", b"\n"]
    assert collect([b"data: 1" + end + end + comments + b"data: 2" + end + end]) == expected


def test_a_comment_in_an_event_does_not_join_it_with_the_next_event():
    text = b"data: 1\n: a\n\n: b\n\ndata: 2\n\n"
    assert b"".join(collect([text])) == b"data: 1\n: b\n\ndata: 2\n\n"


def test_a_line_that_is_split_at_a_colon_is_no_comment():
    assert collect([b'data: {"a"', b": 1}\n\n", b": x\n\n"]) == [b'data: {"a": 1}\n', b"\n", b": x\n", b"\n"]


def test_a_stream_has_a_maximum_number_of_lines(monkeypatch):
    monkeypatch.setattr(streaming, "MAX_STREAM_LINES", 100)
    assert len(collect([b"a\n" * 100])) == 100
    with pytest.raises(InvalidResponse, match="more than 100 lines"):
        collect([b"a\n" * 101])


# --- fair shares ----------------------------------------------------------------------------------


async def count_turns(work):
    """Return how often another task ran while `work` ran."""
    turns = 0

    async def tick():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.ensure_future(tick())
    await work
    task.cancel()
    return turns


def test_other_tasks_run_while_lines_are_read():
    async def read(lines):
        async for _ in lines:
            pass

    async def send_lines():
        yield b"a\n" * 100 * SLICE_LINES

    async def send_nothing():
        return
        yield b""

    assert asyncio.run(count_turns(read(split_lines(send_lines())))) >= 100
    assert asyncio.run(count_turns(read(chain_lines([b"a\n"] * 100 * SLICE_LINES, send_nothing())))) >= 100


def test_one_stream_gets_a_slice_in_each_turn():
    async def run_many():
        await asyncio.gather(*(use_slices() for _ in range(20)))

    async def use_slices():
        share = WorkSlice()
        for _ in range(10 * SLICE_LINES):
            await share.add(0)

    assert asyncio.run(count_turns(run_many())) >= 20 * 10


def test_the_event_loop_does_not_parse_long_lines_to_find_an_error(monkeypatch):
    line = b'data: {"error": "' + b"a" * LARGE_BODY_BYTES + b'"}\n'
    monkeypatch.delattr(streaming, "parse_event_data")
    streaming.StreamEnd().add(line)


# --- the server -----------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", ["never", "logprob:first"])
@pytest.mark.parametrize("shape", SHAPES)
def test_other_clients_are_answered_during_a_fast_stream(serve_hostile, gate, shape):
    address, hostile = serve_hostile(gate)
    hostile.reply = lambda: iter([STREAM_HEAD, *SHAPES[shape]])
    with HealthWatch(address) as watch:
        reply = ask(address, stream=True)
    assert reply.text.endswith("data: [DONE]\n\n")
    assert max(watch.waits) < 0.5


def test_a_stream_to_a_client_that_does_not_read_ends_soon_after_its_deadline(monkeypatch):
    monkeypatch.setattr("knowgate.server.client_connection.LAST_EVENTS_SECONDS", 0.01)
    calls = []

    async def never_end():
        yield await asyncio.Event().wait()

    async def send(message):
        calls.append(message["type"])
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()  # as uvicorn does while the client does not read

    async def run():
        response = EventStreamResponse(never_end(), {}, asyncio.get_running_loop().time())
        response.on_close = lambda: calls.append("closed")
        scope = {"extensions": {ABORT_EXTENSION: {"abort": lambda: calls.append("aborted")}}}
        await asyncio.wait_for(response(scope, asyncio.Event().wait, send), PATIENCE)

    asyncio.run(run())
    assert calls == ["http.response.start", "http.response.body", "aborted", "closed"]


def test_a_stream_of_short_lines_ends_at_the_deadline(serve_hostile):
    def send_forever():
        yield STREAM_HEAD + WORD
        while True:
            time.sleep(0.001)  # stay below the largest size of a stream
            yield b"\n" * 65_536

    address, hostile = serve_hostile(deadline=1.0)
    hostile.reply = send_forever
    start = time.perf_counter()
    reply = ask(address, stream=True)
    assert '"code":"deadline"' in reply.text
    assert time.perf_counter() - start < 20


@pytest.mark.parametrize(("gate", "token_count"), [("never", 300_000), ("logprob:first", 50_000)])
def test_other_clients_are_answered_while_a_large_response_is_parsed(serve_hostile, gate, token_count):
    address, hostile = serve_hostile(gate)
    hostile.reply = http(make_response(token_count), content_type="application/json")
    with HealthWatch(address) as watch:
        reply = ask(address)
    assert reply.status_code == 200
    assert max(watch.waits) < 2  # it took more than eight seconds


def measure_longest_block(work):
    """Return the longest time for which no other thread could run, as a share of the time of `work`."""
    ticks, stop = [], threading.Event()

    def run():
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0)

    thread = threading.Thread(target=run)
    thread.start()
    start = time.perf_counter()
    work()
    end = time.perf_counter()
    stop.set()
    thread.join()
    ticks = [start, *(tick for tick in ticks if start < tick < end), end]
    return max(after - before for before, after in itertools.pairwise(ticks)) / (end - start)


def test_other_threads_run_while_large_json_is_read_and_written():
    content = make_response(100_000)
    value = load_json(content)
    for work in (
        lambda: load_json(content),
        lambda: parse_json(content.decode(), "the text"),
        lambda: dump_json(value, is_large=True),
    ):
        assert any(measure_longest_block(work) < 0.5 for _ in range(3))  # about 0.9 without turns for other threads
    assert dump_json(value, is_large=True) == dump_json(value) == content
