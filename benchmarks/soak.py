"""Soak test of the server: steady traffic with faults, memory and descriptors over time, and `kill -9` at the end.

    python -m benchmarks.soak --minutes 30 --rate 20

The server runs with `--durable` in a separate process, in front of a stub LLM. One response of the stub in ten is faulty:
errors, invalid JSON, empty streams, streams that break off or stay open, and very large responses. Some clients hang up or
send invalid requests. At the end the server is killed under load, several times. Every decision that a client received
must then be in the decision log. Everything runs on loopback. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from benchmarks.serving import start_process
from tools.stub_upstream import Stub, running_stub

FAULT_SHARE = 0.1
KILLS = 5
KILL_AFTER_SECONDS = 5.0
KILL_CLIENTS = 16
SAMPLE_SECONDS = 30.0
PATH = "/v1/chat/completions"
LARGE_LOGPROBS = {"content": [{"token": "a", "logprob": -1.0}] * 30_000}


class FaultyStub(Stub):
    """A stub LLM whose responses are faulty with the probability `FAULT_SHARE`."""

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer a chat request, or send a random fault."""
        if random.random() > FAULT_SHARE:
            return await super().chat(request)
        return await random.choice([send_error, send_garbage, send_nothing, break_off, hold_open, send_large])(request)


async def send_error(request: web.Request) -> web.StreamResponse:
    """Answer with an error status."""
    return web.json_response({"error": {"message": "overloaded"}}, status=random.choice([400, 429, 500, 503]))


async def send_garbage(request: web.Request) -> web.StreamResponse:
    """Send a stream whose event has the wrong structure."""
    return web.Response(text='data: {"choices": 5}\n\n', content_type="text/event-stream")


async def send_nothing(request: web.Request) -> web.StreamResponse:
    """Send an empty stream."""
    return web.Response(text="", content_type="text/event-stream")


async def break_off(request: web.Request) -> web.StreamResponse:
    """Abort the connection in the middle of a stream."""
    response = await start_stream(request)
    if request.transport is not None:
        request.transport.abort()
    return response


async def hold_open(request: web.Request) -> web.StreamResponse:
    """Keep the connection open for three seconds after the last event."""
    response = await start_stream(request)
    await response.write(b"data: [DONE]\n\n")
    await asyncio.sleep(3)
    return response


async def start_stream(request: web.Request) -> web.StreamResponse:
    """Start a stream, and send its first event."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    choice = {"index": 0, "delta": {"content": "Emma"}, "finish_reason": None}
    await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
    return response


async def send_large(request: web.Request) -> web.StreamResponse:
    """Answer with a very large body."""
    message = {"role": "assistant", "content": "Emma"}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": LARGE_LOGPROBS}
    return web.json_response({"choices": [choice]})


def serve_stub(connection: Any) -> None:
    """Run the stub, send its URL, and stop at the next message."""
    stub = FaultyStub(forgets=True)
    with running_stub(stub):
        connection.send(stub.url)
        connection.recv()


class Traffic:
    """Client that sends requests to the server and counts the outcomes.

    Attributes:
        url: URL of the server.
        acknowledged: Ids of the decisions whose complete response arrived with status 200.
        outcomes: Number of responses by status, and of errors by type.
        slowest_health: Longest response time of `/health`, in seconds.
    """

    def __init__(self, url: str):
        self.url = url
        self.acknowledged: list[str] = []
        self.outcomes: Counter[str] = Counter()
        self.slowest_health = 0.0

    async def send(self, session: aiohttp.ClientSession) -> None:
        """Send one request of a random kind."""
        kind = random.choices([self.send_question, self.hang_up, self.send_invalid], [0.9, 0.07, 0.03])[0]
        try:
            await kind(session)
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            self.outcomes[type(error).__name__] += 1

    async def send_question(self, session: aiohttp.ClientSession) -> None:
        """Send a chat request, and wait for the complete response."""
        async with session.post(self.url + PATH, json=make_body()) as response:
            await response.read()
            self.outcomes[str(response.status)] += 1
            if response.status == 200:
                self.acknowledged.append(response.headers["x-knowgate-id"])

    async def hang_up(self, session: aiohttp.ClientSession) -> None:
        """Send a chat request, and close the connection after up to 50 ms."""
        async with asyncio.timeout(random.random() * 0.05):
            await self.send_question(session)

    async def send_invalid(self, session: aiohttp.ClientSession) -> None:
        """Send a body that is not a chat request."""
        body = random.choice([b"{", b'{"messages": 5}', b"[" * 5000, os.urandom(5000)])
        async with session.post(self.url + PATH, data=body) as response:
            self.outcomes[str(response.status)] += 1

    async def check_health(self, session: aiohttp.ClientSession) -> None:
        """Measure how long the server takes for a request that needs no LLM."""
        start = time.perf_counter()
        async with session.get(self.url + "/health"):
            self.slowest_health = max(self.slowest_health, time.perf_counter() - start)


def make_body() -> dict[str, Any]:
    """Return a chat request with a random question, streamed or not."""
    content = f"Who wrote book {random.randrange(10_000)}?"
    return {"model": "m", "messages": [{"role": "user", "content": content}], "stream": random.random() < 0.5}


@contextmanager
def start_server(upstream: str, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run the server in a separate process. Yields the process and its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    options = ["--upstream", upstream, "--docs", str(folder / "docs"), "--gate", "logprob:first", "--durable"]
    options += [
        "--decisions",
        str(folder / "decisions.db"),
        "--keep-questions",
        "--audit",
        "0.1",
        "--max-changed",
        "0.99",
    ]
    options += ["--first-byte-seconds", "2", "--port", str(port)]
    with (folder / "server.log").open("ab") as log:
        command = [sys.executable, "-m", "knowgate", "serve", *options]
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        try:
            asyncio.run(wait_for_server(f"http://127.0.0.1:{port}", server))
        except aiohttp.ClientError as error:
            raise SystemExit(f"The server did not start. Its log: {(folder / 'server.log').read_text()}") from error
        yield server, f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


async def wait_for_server(url: str, server: subprocess.Popen[bytes]) -> None:
    """Wait until the server answers, for two minutes at most."""
    deadline = time.monotonic() + 120
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(url + "/health"):
                    return
            except aiohttp.ClientError:
                if time.monotonic() > deadline or server.poll() is not None:
                    raise
                await asyncio.sleep(0.5)


def measure(server: subprocess.Popen[bytes]) -> dict[str, float]:
    """Return the resident memory in MB and the number of open descriptors of a process."""
    folder = Path(f"/proc/{server.pid}")
    pages = int((folder / "statm").read_text().split()[1])
    return {
        "megabytes": round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1),
        "descriptors": len(list((folder / "fd").iterdir())),
    }


async def send_steadily(
    traffic: Traffic, server: subprocess.Popen[bytes], seconds: float, rate: float
) -> list[dict[str, float]]:
    """Send requests at a steady rate, and return samples of the server's memory and descriptors."""
    start, tasks = time.monotonic(), set[asyncio.Future[None]]()
    samples: list[dict[str, float]] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        while (elapsed := time.monotonic() - start) < seconds:
            task = asyncio.ensure_future(traffic.send(session))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            if elapsed >= len(samples) * SAMPLE_SECONDS:
                samples.append({"seconds": round(elapsed), **measure(server)})
                await traffic.check_health(session)
            await asyncio.sleep(random.expovariate(rate))
        await asyncio.gather(*tasks)
    return samples


async def send_until_killed(traffic: Traffic, server: subprocess.Popen[bytes]) -> None:
    """Send as many requests as possible, and kill the server after `KILL_AFTER_SECONDS`."""

    async def send_until_gone(session: aiohttp.ClientSession) -> None:
        while server.poll() is None:
            await traffic.send(session)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        clients = [asyncio.ensure_future(send_until_gone(session)) for _ in range(KILL_CLIENTS)]
        await asyncio.sleep(KILL_AFTER_SECONDS)
        server.send_signal(signal.SIGKILL)
        server.wait()
        await asyncio.gather(*clients)


def run(minutes: float, rate: float, folder: Path) -> dict[str, Any]:
    """Run the soak test, and return the measurements.

    Args:
        minutes: Duration of the steady traffic.
        rate: Requests per second.
        folder: Folder for documents, decision log and server log.
    """
    (folder / "docs").mkdir()
    (folder / "docs" / "emma.txt").write_text("Jane Austen wrote Emma.")
    acknowledged: list[str] = []
    with start_process(serve_stub) as connection:
        upstream = connection.recv()
        with start_server(upstream, folder) as (server, url):
            soak = Traffic(url)
            samples = asyncio.run(send_steadily(soak, server, 60 * minutes, rate))
            acknowledged += soak.acknowledged
        kills: Counter[str] = Counter()
        for _ in range(KILLS):
            with start_server(upstream, folder) as (server, url):
                traffic = Traffic(url)
                asyncio.run(send_until_killed(traffic, server))
                acknowledged += traffic.acknowledged
                kills += traffic.outcomes
    with closing(sqlite3.connect(folder / "decisions.db")) as database:
        stored = {id for (id,) in database.execute("SELECT id FROM decisions")}
    return {
        "samples": samples,
        "outcomes": soak.outcomes,
        "slowest_health_ms": round(1000 * soak.slowest_health),
        "outcomes_until_kills": kills,
        "acknowledged": len(acknowledged),
        "lost": len(set(acknowledged) - stored),
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30, help="duration of the steady traffic")
    parser.add_argument("--rate", type=float, default=20, help="requests per second")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write(json.dumps(run(options.minutes, options.rate, Path(folder)), indent=1) + "\n")


if __name__ == "__main__":
    main()
