"""What the server adds: latency and throughput through it and straight to a stub upstream, in the same run.

    python -m benchmarks.serving

Bounded and on loopback: stub, server and clients are three processes. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import sys
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
from tests.support.running_server import running
from tests.support.stub_upstream import running_stub

from knowgate.pipeline import Settings
from knowgate.server import ServeOptions, create_app

BODY = {"model": "stub-llm", "messages": [{"role": "user", "content": "Who wrote Emma?"}]}


def serve_stub(wire: Connection) -> None:
    with running_stub() as stub:
        wire.send(stub.url)
        wire.recv()


def serve_ours(wire: Connection, upstream: str, docs: str) -> None:
    """Decides by the question alone (gate never): what is measured is the server, not a gate."""
    settings = Settings(gate="never", docs=Path(docs))
    with running(create_app(settings, ServeOptions(upstream=upstream, waiting=1000))) as address:
        wire.send(f"{address}/v1")
        wire.recv()
        wire.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


async def ask(session: aiohttp.ClientSession, url: str, streamed: bool) -> float:
    """Seconds to the whole reply; of a stream to its first byte."""
    start = time.perf_counter()
    async with session.post(f"{url}/chat/completions", json={**BODY, "stream": streamed}) as reply:
        await reply.content.readany()
        first = time.perf_counter() - start
        await reply.read()
    return first if streamed else time.perf_counter() - start


async def load(url: str, clients: int, requests: int, streamed: bool) -> dict[str, float]:
    taken: list[float] = []

    async def client(session: aiohttp.ClientSession) -> None:
        for _ in range(requests // clients):
            taken.append(await ask(session, url, streamed))

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await ask(session, url, streamed)
        start = time.perf_counter()
        await asyncio.gather(*(client(session) for _ in range(clients)))
        seconds = time.perf_counter() - start
    cuts = statistics.quantiles(taken, n=100)
    return {"p50_ms": 1000 * cuts[49], "p99_ms": 1000 * cuts[98], "per_second": len(taken) / seconds}


def measure(direct: str, ours: str, requests: int) -> list[dict[str, Any]]:
    rows = []
    for clients in (1, 16):
        for streamed in (False, True):
            bare, through = (asyncio.run(load(url, clients, requests, streamed)) for url in (direct, ours))
            added = {f"added_{name}": through[f"{name}_ms"] - bare[f"{name}_ms"] for name in ("p50", "p99")}
            ratio = {"throughput_ratio": through["per_second"] / bare["per_second"]}
            rows.append(
                {"clients": clients, "streamed": streamed, "direct": bare, "through": through, **added, **ratio}
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=400, help="of each row")
    given, context = parser.parse_args(), get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        docs = Path(folder) / "docs.jsonl"
        docs.write_text('{"id": "d1", "text": "Jane Austen wrote Emma."}\n')
        (here, there), (mine, theirs) = context.Pipe(), context.Pipe()
        stub = context.Process(target=serve_stub, args=(there,), daemon=True)
        stub.start()
        direct = here.recv()
        server = context.Process(target=serve_ours, args=(theirs, direct, str(docs)), daemon=True)
        server.start()
        ours = mine.recv()
        rows = measure(direct, ours, given.requests)
        mine.send("end")
        found = {"rows": rows, "server_megabytes": mine.recv()}
        here.send("end")
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
