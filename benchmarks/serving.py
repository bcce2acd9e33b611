"""What the server adds: latency and throughput through it and straight to a stub upstream, in the same minute.

    python -m benchmarks.serving                        # 1, 16, 64 clients, plain and streamed; memory
    python -m benchmarks.serving --litellm BIN/litellm  # LiteLLM's proxy beside it, in front of the same stub
    python -m benchmarks.serving --batching             # the embedded model: requests together or one by one

Bounded and on loopback: stub, server and clients are three processes. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp

from knowgate.pipeline.settings import PipelineOptions
from knowgate.server.app import create_app
from knowgate.server.options import ServeOptions
from tools.local_server import run_server
from tools.stub_upstream import running_stub

BODY = {"model": "stub-llm", "messages": [{"role": "user", "content": "Who wrote Emma?"}]}
SHORT = [f"What is the capital of {name}?" for name in ("France", "Peru", "Kenya", "Japan", "Norway", "Chad", "Cuba")]


def serve_stub(wire: Connection) -> None:
    with running_stub() as stub:
        stub.forgets = True  # it would else keep every request it sees
        wire.send(stub.url)
        wire.recv()


def serve_ours(wire: Connection, settings: PipelineOptions, options: ServeOptions) -> None:
    """Says what it took when it is asked: seconds of CPU, megabytes now."""
    with run_server(create_app(settings, options)) as address:
        wire.send(f"{address}/v1")
        while wire.recv() != "end":
            used = resource.getrusage(resource.RUSAGE_SELF)
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            wire.send((used.ru_utime + used.ru_stime, pages * os.sysconf("SC_PAGE_SIZE") / 1e6))


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> float:
    """Seconds to the whole reply; of a stream to its first byte."""
    start = time.perf_counter()
    async with session.post(f"{url}/chat/completions", json=body) as reply:
        await reply.content.readany()
        first = time.perf_counter() - start
        await reply.read()
        reply.raise_for_status()
    return first if body.get("stream") else time.perf_counter() - start


async def load(url: str, clients: int, requests: int, bodies: list[dict[str, Any]]) -> dict[str, float]:
    taken: list[float] = []
    waiting = iter(range(requests))

    async def client(session: aiohttp.ClientSession) -> None:
        for number in waiting:
            taken.append(await ask(session, url, bodies[number % len(bodies)]))

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await ask(session, url, bodies[0])
        start = time.perf_counter()
        await asyncio.gather(*(client(session) for _ in range(clients)))
        seconds = time.perf_counter() - start
    cuts = statistics.quantiles(taken, n=100)
    return {"p50_ms": 1000 * cuts[49], "p99_ms": 1000 * cuts[98], "per_second": len(taken) / seconds}


@contextmanager
def process(target: Any, *given: Any) -> Iterator[Connection]:
    """A process that answers on a wire; ended by 'end'."""
    context = get_context("spawn")
    here, there = context.Pipe()
    started = context.Process(target=target, args=(there, *given), daemon=True)
    started.start()
    try:
        yield here
    finally:
        here.send("end")
        started.join(30)


@contextmanager
def litellm(program: str, upstream: str, folder: Path) -> Iterator[str]:
    """LiteLLM's proxy in front of the same stub."""
    told = {"model": "openai/stub-llm", "api_base": upstream, "api_key": "none"}
    config = folder / "litellm.json"
    config.write_text(json.dumps({"model_list": [{"model_name": "stub-llm", "litellm_params": told}]}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    quiet, local = subprocess.DEVNULL, "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"
    environment = {**os.environ, "PYTHONPATH": "", local: "true"}
    started = subprocess.Popen(words, stdout=quiet, stderr=quiet, env=environment)
    try:
        asyncio.run(until_there(f"http://127.0.0.1:{port}/v1"))
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        started.terminate()
        started.wait(30)


async def until_there(url: str) -> None:
    end = time.monotonic() + 120
    while True:
        try:
            async with aiohttp.ClientSession() as session:
                await ask(session, url, BODY)
            return
        except aiohttp.ClientError:
            if time.monotonic() > end:
                raise
            await asyncio.sleep(0.5)


def compare(urls: dict[str, str], clients: int, requests: int, streamed: bool) -> dict[str, Any]:
    """One row: the stub and what stands in front of it, one after the other."""
    body = {**BODY, "stream": streamed}
    found = {name: asyncio.run(load(url, clients, requests, [body])) for name, url in urls.items()}
    added = {
        name: {f"added_{cut}": one[f"{cut}_ms"] - found["direct"][f"{cut}_ms"] for cut in ("p50", "p99")}
        for name, one in found.items()
        if name != "direct"
    }
    return {
        "clients": clients,
        "streamed": streamed,
        **{name: one | added.get(name, {}) for name, one in found.items()},
    }


def measure_adding(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    docs = folder / "docs.jsonl"
    docs.write_text('{"id": "d1", "text": "Jane Austen wrote Emma."}\n')
    with ExitStack() as stack:
        stub = stack.enter_context(process(serve_stub))
        direct = stub.recv()
        settings, options = PipelineOptions(gate="never", docs=docs), ServeOptions(upstream=direct, waiting=1000)
        ours = stack.enter_context(process(serve_ours, settings, options))
        urls = {"direct": direct, "knowgate": ours.recv()}
        if given.litellm:
            urls["litellm"] = stack.enter_context(litellm(given.litellm, direct, folder))
        rows = [
            compare(urls, clients, given.requests, streamed) for clients in (1, 16, 64) for streamed in (False, True)
        ]
        return {"rows": rows, "many": measure_many(urls["knowgate"], ours, given.many)}


def measure_many(url: str, wire: Connection, requests: int) -> dict[str, float]:
    """What a long row of requests takes of the server: CPU for each, memory before and after."""
    before, after = ask_wire(wire), (0.0, 0.0)
    asyncio.run(load(url, 16, requests, [BODY]))
    after = ask_wire(wire)
    return {
        "requests": requests,
        "cpu_ms_each": 1000 * (after[0] - before[0]) / requests,
        "megabytes_before": before[1],
        "megabytes_after": after[1],
    }


def ask_wire(wire: Connection) -> tuple[float, float]:
    wire.send("so far?")
    found: tuple[float, float] = wire.recv()
    return found


def measure_batching(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The embedded model at 16 clients: as it is, and with batches of one."""
    bodies = [{"model": "knowgate", "messages": [{"role": "user", "content": text}]} for text in SHORT]
    found = {}
    for batch in (16, 1):
        settings, options = PipelineOptions(model=given.model, gate="never"), ServeOptions(batch=batch)
        with process(serve_ours, settings, options) as wire:
            found[f"batch_{batch}"] = asyncio.run(load(wire.recv(), 16, given.asked, bodies))
    return {**found, "gain": found["batch_16"]["per_second"] / found["batch_1"]["per_second"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=400, help="of each row")
    parser.add_argument("--many", type=int, default=10_000, help="of the row that watches memory")
    parser.add_argument("--litellm", help="program of LiteLLM's proxy")
    parser.add_argument("--batching", action="store_true", help="measure the embedded model instead")
    parser.add_argument("--model", default="smollm", help="with --batching")
    parser.add_argument("--asked", type=int, default=64, help="with --batching: questions of each row")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = measure_batching if given.batching else measure_adding
        sys.stdout.write(json.dumps(work(given, Path(folder)), indent=1) + "\n")


if __name__ == "__main__":
    main()
