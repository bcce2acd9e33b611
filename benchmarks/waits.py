"""Measure how long small requests of one API key wait beside the requests of another, and how much memory these take.

    python -m benchmarks.waits                    # an upstream with large responses, and long questions
    python -m benchmarks.waits --model smollm     # a long question to an LLM in the server's process

Stub, server and clients are three processes on loopback. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from benchmarks.serving import read_usage, serve_knowgate, start_process
from knowgate.pipeline.settings import PipelineOptions
from knowgate.server.auth.api_keys import add_key
from knowgate.server.options import ServeOptions
from tools.stub_upstream import Stub, running_stub

INTERVAL_SECONDS = 0.05
QUIET_SECONDS = 5.0  # time for the measurement without load
REPEAT_SECONDS = 30.0  # time for which a repeated load is sent
MAX_LOAD_SECONDS = 120.0
SMALL_QUESTION = "What is the capital of Peru?"
LONG_QUESTION = "Who wrote the novel Emma, and when? " * 400


LARGE_MESSAGES = (
    {"role": "system", "content": "\N{GRINNING FACE}" + "x" * 4_100_000},
    {"role": "user", "content": SMALL_QUESTION},
)


def make_chat(content: str) -> dict[str, Any]:
    """Return the body of a chat request."""
    return {"model": "knowgate", "messages": [{"role": "user", "content": content}], "max_tokens": 20}


@dataclass(frozen=True)
class Load:
    """Requests of a key that others wait for.

    Attributes:
        count: Number of requests, which are sent at once.
        body: Their body.
        path: Their endpoint.
        gate: Gate of the server.
        repeats: Whether each request is sent again, without pause, for REPEAT_SECONDS.
    """

    count: int
    body: dict[str, Any]
    path: str = "/chat/completions"
    gate: str = "never"
    repeats: bool = False


LOADS = {
    "4 responses of 300,000 log-probabilities": Load(4, make_chat("300000 tokens?")),
    "the same, read by a gate": Load(4, make_chat("300000 tokens?"), gate="logprob:mean"),
    "60 responses of 84,000 log-probabilities, read by a gate": Load(
        60, make_chat("84000 tokens?"), gate="logprob:mean"
    ),
    "24 responses of 330,000 log-probabilities, read by a gate": Load(
        24, make_chat("330000 tokens?"), gate="logprob:mean"
    ),
    "48 chats of 4 MB, again and again": Load(
        48, {**make_chat(""), "messages": [*LARGE_MESSAGES]}, gate="logprob:mean", repeats=True
    ),
    "10 lists of 256 long questions": Load(10, {"questions": [LONG_QUESTION] * 256}, "/decide"),
}
LOCAL_LOADS = {
    "60 lists of 200 long questions": Load(60, {"questions": [LONG_QUESTION] * 200}, "/decide", gate="logprob:mean"),
    "a question of 7,800 tokens": Load(1, make_chat("Which number is this? " + "1234567890" * 780)),
    "a chat with max_tokens 1,024": Load(
        1, {**make_chat("Write a very long story."), "max_tokens": 1024}, repeats=True
    ),
    "rejected requests": Load(1, {"messages": []}, repeats=True),
}


@cache
def make_large_response(n_tokens: int) -> bytes:
    """Return a chat completion with the log-probabilities of this many tokens."""
    tokens = [{"token": "the capital is Lima", "logprob": -0.25, "bytes": None, "top_logprobs": []}] * n_tokens
    if n_tokens > 100_000:
        tokens = [{"token": "Lima", "logprob": -0.25}] * n_tokens  # within the limit of 16 MB
    message = {"role": "assistant", "content": "Lima"}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": {"content": tokens}}
    return json.dumps({"choices": [choice]}).encode()


class LargeStub(Stub):
    """A stub LLM that answers "N tokens?" with the log-probabilities of N tokens."""

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer a chat request."""
        first_word = (await request.json())["messages"][-1]["content"].split()[0]
        if not first_word.isdigit():
            return await super().chat(request)
        return web.Response(body=make_large_response(int(first_word)), content_type="application/json")


def serve_stub(connection: Connection) -> None:
    """Run the stub, send its URL, and stop at the next message."""
    for load in LOADS.values():
        first_word = load.body.get("messages", [{"content": "-"}])[-1]["content"].split()[0]
        if first_word.isdigit():
            make_large_response(int(first_word))
    stub = LargeStub(forgets=True)
    with running_stub(stub):
        connection.send(stub.url)
        connection.recv()


async def send(session: aiohttp.ClientSession, url: str, key: str, body: dict[str, Any]) -> tuple[int, float]:
    """Send a request, and return its status and seconds."""
    start = time.perf_counter()
    async with session.post(url, json=body, headers={"authorization": f"Bearer {key}"}) as response:
        await response.read()
        return response.status, time.perf_counter() - start


async def send_load(session: aiohttp.ClientSession, url: str, key: str, load: Load) -> list[int]:
    """Send one of the requests of a load, once or repeatedly, and return the statuses."""
    end = time.monotonic() + REPEAT_SECONDS
    statuses = [(await send(session, url, key, load.body))[0]]
    while load.repeats and time.monotonic() < end:
        statuses.append((await send(session, url, key, load.body))[0])
    return statuses


async def measure_small_requests(
    url: str, key: str, connection: Connection, load: asyncio.Future[Any], seconds: float
) -> dict[str, Any]:
    """Send small requests while the load lasts, and return their seconds, and the largest memory of the server."""
    waits, megabytes = [], [read_usage(connection)[1]]
    end = time.monotonic() + seconds
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < end and not load.done():
            status, wait = await send(session, f"{url}/chat/completions", key, make_chat(SMALL_QUESTION))
            if status != 200:
                raise SystemExit(f"A small request got status {status}.")
            waits.append(wait)
            megabytes.append(read_usage(connection)[1])
            await asyncio.sleep(INTERVAL_SECONDS)
    return {
        "small_requests": len(waits),
        "median_seconds": round(statistics.median(waits), 3),
        "max_seconds": round(max(waits), 3),
        "more_megabytes": round(max(megabytes) - megabytes[0]),
    }


async def measure(url: str, keys: tuple[str, str], connection: Connection, load: Load) -> dict[str, Any]:
    """Measure small requests without a load and beside it."""
    quiet_load: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    quiet = await measure_small_requests(url, keys[1], connection, quiet_load, QUIET_SECONDS)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        sent = [send_load(session, url + load.path, keys[0], load) for _ in range(load.count)]
        responses = asyncio.gather(*sent)
        busy = await measure_small_requests(url, keys[1], connection, responses, MAX_LOAD_SECONDS)
        statuses = list(chain.from_iterable(await responses))
    return {"quiet": quiet, "busy": busy, "responses": {str(s): statuses.count(s) for s in sorted(set(statuses))}}


def run(model: str, folder: Path) -> dict[str, Any]:
    """Measure each load with a new server, and return the measurements by the name of the load."""
    docs, key_file = folder / "docs.jsonl", folder / "keys.json"
    docs.write_text('{"id": "d1", "text": "Lima is the capital of Peru."}\n')
    keys = add_key(key_file, "busy"), add_key(key_file, "small")
    results = {}
    with start_process(serve_stub) as stub:
        upstream = stub.recv()
        for name, load in (LOCAL_LOADS if model else LOADS).items():
            settings = PipelineOptions(gate=load.gate, docs=docs, **({"model": model} if model else {}))
            options = ServeOptions(upstream=None if model else upstream, keys=str(key_file))
            with start_process(serve_knowgate, settings, options) as connection:
                results[name] = asyncio.run(measure(connection.recv(), keys, connection, load))
    return results


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="spec of an LLM in the server's process, such as smollm")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write(json.dumps(run(arguments.model, Path(folder)), indent=1) + "\n")


if __name__ == "__main__":
    main()
