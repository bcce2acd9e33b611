"""A model never has more requests in flight than its concurrency, however many threads use it."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from knowgate.models.openai.model import OpenAIModel
from knowgate.types import Prompt
from tests.support.processes import PATIENCE

AT_ONCE = 3


class Watched(BaseHTTPRequestHandler):
    """Answers when the allowed number of requests is in flight, or after waiting for one more."""

    protocol_version = "HTTP/1.1"
    lock, running, peak = threading.Lock(), 0, 0
    full = threading.Event()

    def do_GET(self):
        self._reply({"data": [{"id": "m", "owned_by": "library"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind = type(self)
        with kind.lock:
            kind.running += 1
            kind.peak = max(kind.peak, kind.running)
            if kind.running == AT_ONCE:
                kind.full.set()
        if body["messages"][0]["content"] != "Hi":  # the probe is alone
            kind.full.wait(PATIENCE)
            threading.Event().wait(0.02)  # room for one too many to show itself
        with kind.lock:
            kind.running -= 1
        self._reply({"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]})

    def _reply(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def address():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Watched)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def test_four_threads_share_the_concurrency_of_the_model(address):
    model = OpenAIModel("m", address, concurrency=AT_ONCE)
    prompts = [Prompt(f"q{number}") for number in range(8)]
    with ThreadPoolExecutor(4) as callers:
        rows = list(callers.map(lambda _: model.generate(prompts, max_tokens=3), range(4)))
    model.close()
    assert [len(row) for row in rows] == [8, 8, 8, 8]
    assert Watched.peak == AT_ONCE
