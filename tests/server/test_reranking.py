"""POST /v1/rerank with a rerank server: slow requests of one API key delay neither searches nor other keys."""

import asyncio
import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest

from knowgate.core.http_client import JsonClient
from knowgate.errors import ServerError
from knowgate.models.fair_executor import CLIENT
from knowgate.retrieval.rerankers.remote import RemoteReranker
from knowgate.server.auth.api_keys import add_key
from knowgate.server.chat.gate_service import MAX_ABANDONED_SEARCHES
from knowgate.server.load_limits import MAX_REMOTE_RERANKS, RerankQueue, limit_time, run_in_thread
from tests.server.conftest import UNKNOWN
from tests.server.test_circuit_breaker import use_parts
from tests.support.hostile_server import HostileServer, dripping, http
from tests.support.processes import until

SLOW_REQUESTS = MAX_ABANDONED_SEARCHES + 4  # more than there are threads for searches


class SlowServer:
    """A rerank server that answers queries with the word slow only after `release` is set."""

    def __init__(self):
        self.release = threading.Event()
        self.slow_count = 0

    def answer(self, request):
        body = json.loads(request.content)
        if "slow" in body["query"]:
            self.slow_count += 1
            self.release.wait(60)
        scores = [{"index": index, "relevance_score": 0.5} for index in range(len(body["documents"]))]
        return httpx.Response(200, json={"results": scores})


@pytest.fixture
def slow_server():
    server = SlowServer()
    yield server
    server.release.set()


@pytest.fixture
def tenants(serve, slow_server, tmp_path):
    """Start a server with the keys of Alice and Carol, and return two functions: rerank(name, query) and search()."""
    file = tmp_path / "keys.json"
    headers = {name: {"Authorization": f"Bearer {add_key(file, name)}"} for name in ("alice", "carol")}
    reranker = RemoteReranker("big@http://rerank.example", transport=httpx.MockTransport(slow_server.answer))
    address, _ = serve(gate="always", options={"keys": str(file)}, change=use_parts(reranker=reranker))

    def rerank(name, query):
        body = {"query": query, "documents": ["a"]}
        return httpx.post(f"{address}/v1/rerank", json=body, headers=headers[name], timeout=60).status_code

    def search():
        body = {"model": "m", "messages": [{"role": "user", "content": UNKNOWN}]}
        reply = httpx.post(f"{address}/v1/chat/completions", json=body, headers=headers["carol"], timeout=60)
        return reply.json()["knowgate"]["degraded"]

    return rerank, search


def test_slow_rerank_requests_of_a_key_delay_neither_searches_nor_other_keys(tenants, slow_server):
    rerank, search = tenants
    with ThreadPoolExecutor(SLOW_REQUESTS) as pool:
        slow = [pool.submit(rerank, "alice", f"slow {number}") for number in range(SLOW_REQUESTS)]
        until(lambda: slow_server.slow_count == 1)
        assert search() == []
        assert rerank("carol", "fast") == 200
        assert slow_server.slow_count == 1  # one request of a key at a time
        slow_server.release.set()
        assert {future.result() for future in slow} == {200}


def test_canceled_rerank_requests_of_a_key_leave_places_for_others():
    running, peak, release = Counter(), Counter(), threading.Event()

    def rerank(owner):
        running[owner] += 1
        peak[owner] = max(peak[owner], running[owner])
        release.wait(60)
        running[owner] -= 1

    async def send(queue, owner):
        CLIENT.set(owner)
        async with limit_time(60) as time_limit, queue.hold(owner):
            await queue.run_remote(partial(rerank, owner), time_limit)

    async def send_and_cancel():
        queue = RerankQueue()
        for _ in range(3 * MAX_REMOTE_RERANKS):
            task = asyncio.create_task(send(queue, "alice"))
            await asyncio.sleep(0.02)
            task.cancel()
        other = asyncio.create_task(send(queue, "carol"))
        while not running["carol"]:
            await asyncio.sleep(0.01)
        release.set()
        await other

    asyncio.run(asyncio.wait_for(send_and_cancel(), 60))
    assert peak == {"alice": MAX_REMOTE_RERANKS // 2, "carol": 1}


def test_network_calls_in_a_thread_end_soon_after_the_timeout_of_their_caller(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    errors = []

    def call(client):
        try:
            client.request_json("GET")
        except ServerError as error:
            errors.append(error)

    async def run(client, threads):
        with pytest.raises(TimeoutError):
            async with limit_time(0.1):
                await run_in_thread(threads, lambda: call(client))

    with HostileServer() as server, ThreadPoolExecutor(1) as threads:
        server.reply = dripping(http({"text": "x" * 500}))  # the whole reply takes seconds, but would arrive
        asyncio.run(run(JsonClient(server.url, "the server", pause=0.0), threads))
        threads.shutdown(wait=True)
    assert len(errors) == 1
