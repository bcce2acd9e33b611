"""Searches on a search server run in parallel; one key gets half of the places."""

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from knowgate.retrieval.engines.http import HttpRetriever
from knowgate.server.auth.api_keys import add_key
from knowgate.server.chat.gate_service import PARALLEL_SEARCHES
from knowgate.types import Passage
from tests.server.conftest import UNKNOWN
from tests.server.test_forwarding import use_retriever
from tests.support.processes import PATIENCE, until

PER_KEY = PARALLEL_SEARCHES // 2


class SlowSearchServer(HttpRetriever):
    """Answers a search about Alice only after `let_go`, and counts those that wait."""

    def __init__(self):
        super().__init__("http://127.0.0.1:9/search")
        self.n_waiting, self.let_go = 0, threading.Event()

    def search(self, queries, k):
        if "Alice" in queries[0]:
            self.n_waiting += 1
            self.let_go.wait(PATIENCE)
        return [[Passage("d1", "The capital is Babakostad.")] for _ in queries]


@pytest.fixture(params=[{}, {"knowgate": {"filter": {"id": "d*"}}}], ids=["all documents", "filtered"])
def ask(serve, tmp_path, request):
    """Asks with the key of alice or bob. Returns the report of the decision."""
    keys = {name: add_key(tmp_path / "k.json", name) for name in ("alice", "bob")}
    search_server = SlowSearchServer()
    options = {"keys": str(tmp_path / "k.json")}
    address, _ = serve(gate="always", options=options, change=use_retriever(search_server))

    def send(name, timeout=60):
        body = {
            "model": "knowgate",
            "messages": [{"role": "user", "content": f"{UNKNOWN} {name.title()}"}],
            **request.param,
        }
        headers = {"Authorization": f"Bearer {keys[name]}"}
        return httpx.post(f"{address}/v1/chat/completions", json=body, headers=headers, timeout=timeout).json()[
            "knowgate"
        ]

    send.server = search_server
    return send


def test_slow_searches_of_one_key_run_in_parallel_and_leave_places_for_other_keys(ask):
    with ThreadPoolExecutor(PARALLEL_SEARCHES) as pool:
        replies = [pool.submit(ask, "alice") for _ in range(PARALLEL_SEARCHES)]
        until(lambda: ask.server.n_waiting == PER_KEY)
        assert [passage["id"] for passage in ask("bob")["passages"]] == ["d1"]
        assert ask.server.n_waiting == PER_KEY
        ask.server.let_go.set()
        assert [reply.result()["degraded"] for reply in replies] == [[]] * PARALLEL_SEARCHES


def test_searches_whose_clients_have_disconnected_take_no_places_of_other_keys(ask):
    def disconnect_soon():
        with pytest.raises(httpx.ReadTimeout):
            ask("alice", timeout=0.5)

    with ThreadPoolExecutor(PARALLEL_SEARCHES) as pool:
        requests = [pool.submit(disconnect_soon) for _ in range(3 * PARALLEL_SEARCHES)]
        for request in requests:
            request.result()
    assert ask.server.n_waiting == PER_KEY
    assert [passage["id"] for passage in ask("bob")["passages"]] == ["d1"]
    ask.server.let_go.set()
    assert ask("alice")["degraded"] == []  # the places are free again
