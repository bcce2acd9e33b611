"""Measure the latency that the server adds: requests through it, compared with requests sent directly to a stub upstream.

    python -m benchmarks.serving                        # 1, 16 and 64 clients, plain and streamed; memory
    python -m benchmarks.serving --litellm BIN/litellm  # also LiteLLM's proxy (litellm[proxy]) before the same stub
    python -m benchmarks.serving --batching             # the embedded model with and without batching

Stub, server and clients are three processes on loopback. Prints one JSON object.
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
from knowgate.server.entrypoint import tune_memory
from knowgate.server.options import ServeOptions
from tools.local_server import run_server
from tools.stub_upstream import running_stub

BODY = {"model": "stub-llm", "messages": [{"role": "user", "content": "Who wrote Emma?"}]}
SHORT_QUESTIONS = [
    f"What is the capital of {name}?" for name in ("France", "Peru", "Kenya", "Japan", "Norway", "Chad", "Cuba")
]


def serve_stub(connection: Connection) -> None:
    """Run the stub upstream, send its URL, and stop at the next message."""
    with running_stub() as stub:
        stub.forgets = True  # Otherwise the stub stores every request, and its memory grows.
        connection.send(stub.url)
        connection.recv()


def serve_knowgate(connection: Connection, settings: PipelineOptions, options: ServeOptions) -> None:
    """Run the server and send its URL. Each message gets the CPU seconds and megabytes so far; "end" stops it."""
    tune_memory()  # as `knowgate serve` does
    with run_server(create_app(settings, options)) as address:
        connection.send(f"{address}/v1")
        while connection.recv() != "end":
            usage = resource.getrusage(resource.RUSAGE_SELF)
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            connection.send((usage.ru_utime + usage.ru_stime, pages * os.sysconf("SC_PAGE_SIZE") / 1e6))


async def send_request(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> float:
    """Send a request, and return the seconds to the complete response, or to the first byte of a stream."""
    start = time.perf_counter()
    async with session.post(f"{url}/chat/completions", json=body) as response:
        await response.content.readany()
        first_byte = time.perf_counter() - start
        await response.read()
        response.raise_for_status()
    return first_byte if body.get("stream") else time.perf_counter() - start


async def send_load(url: str, clients: int, requests: int, bodies: list[dict[str, Any]]) -> dict[str, float]:
    """Send requests from concurrent clients, and return latency percentiles and throughput.

    Args:
        url: Base URL of the server.
        clients: Number of concurrent clients.
        requests: Number of requests of all clients together.
        bodies: Request bodies, used in turn.
    """
    latencies: list[float] = []
    numbers = iter(range(requests))

    async def run_client(session: aiohttp.ClientSession) -> None:
        for number in numbers:
            latencies.append(await send_request(session, url, bodies[number % len(bodies)]))

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await send_request(session, url, bodies[0])
        start = time.perf_counter()
        await asyncio.gather(*(run_client(session) for _ in range(clients)))
        seconds = time.perf_counter() - start
    percentiles = statistics.quantiles(latencies, n=100)
    return {
        "p50_ms": 1000 * percentiles[49],
        "p99_ms": 1000 * percentiles[98],
        "per_second": len(latencies) / seconds,
    }


@contextmanager
def start_process(target: Any, *args: Any) -> Iterator[Connection]:
    """Run a function in a new process. Yields the connection to it; sends "end" when the block is left."""
    context = get_context("spawn")
    parent_end, child_end = context.Pipe()
    process = context.Process(target=target, args=(child_end, *args), daemon=True)
    process.start()
    try:
        yield parent_end
    finally:
        parent_end.send("end")
        process.join(30)


@contextmanager
def start_litellm(program: str, upstream: str, folder: Path) -> Iterator[str]:
    """Run LiteLLM's proxy in front of the upstream. Yields its URL."""
    parameters = {"model": "openai/stub-llm", "api_base": upstream, "api_key": "none"}
    config = folder / "litellm.json"
    config.write_text(json.dumps({"model_list": [{"model_name": "stub-llm", "litellm_params": parameters}]}))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    allow_no_key = "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"
    use_local_prices = "LITELLM_LOCAL_MODEL_COST_MAP"  # otherwise it downloads a price list at the start
    environment = {**os.environ, "PYTHONPATH": "", allow_no_key: "true", use_local_prices: "true"}
    log = folder / "litellm.log"
    with log.open("w") as output:
        proxy = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        asyncio.run(wait_for_server(f"http://127.0.0.1:{port}/v1"))
        yield f"http://127.0.0.1:{port}/v1"
    except aiohttp.ClientError as error:
        last_lines = "\n".join(log.read_text().splitlines()[-3:])
        raise SystemExit(
            f"LiteLLM did not start (`pip install 'litellm[proxy]'` installs it):\n{last_lines}"
        ) from error
    finally:
        proxy.terminate()
        proxy.wait(30)


async def wait_for_server(url: str) -> None:
    """Wait until the server answers a request, for two minutes at most."""
    deadline = time.monotonic() + 120
    while True:
        try:
            async with aiohttp.ClientSession() as session:
                await send_request(session, url, BODY)
            return
        except aiohttp.ClientError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.5)


def compare(urls: dict[str, str], clients: int, requests: int, streamed: bool) -> dict[str, Any]:
    """Measure each server in turn, and return the latency that it adds to that of "direct".

    Args:
        urls: URL by name; "direct" is the upstream itself.
        clients: Number of concurrent clients.
        requests: Number of requests to each server.
        streamed: Whether the responses are streams.
    """
    body = {**BODY, "stream": streamed}
    results = {name: asyncio.run(send_load(url, clients, requests, [body])) for name, url in urls.items()}
    added = {
        name: {f"added_{cut}": result[f"{cut}_ms"] - results["direct"][f"{cut}_ms"] for cut in ("p50", "p99")}
        for name, result in results.items()
        if name != "direct"
    }
    return {
        "clients": clients,
        "streamed": streamed,
        **{name: result | added.get(name, {}) for name, result in results.items()},
    }


def measure_overhead(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure the latency that the server adds, and its memory over many requests."""
    docs = folder / "docs.jsonl"
    docs.write_text('{"id": "d1", "text": "Jane Austen wrote Emma."}\n')
    with ExitStack() as stack:
        stub = stack.enter_context(start_process(serve_stub))
        direct = stub.recv()
        settings, options = PipelineOptions(gate="never", docs=docs), ServeOptions(upstream=direct, waiting=1000)
        server = stack.enter_context(start_process(serve_knowgate, settings, options))
        urls = {"direct": direct, "knowgate": server.recv()}
        if arguments.litellm:
            urls["litellm"] = stack.enter_context(start_litellm(arguments.litellm, direct, folder))
        rows = [
            compare(urls, clients, arguments.requests, streamed)
            for clients in (1, 16, 64)
            for streamed in (False, True)
        ]
        return {"rows": rows, "many": measure_usage(urls["knowgate"], server, arguments.many)}


def measure_usage(url: str, connection: Connection, requests: int) -> dict[str, float]:
    """Send many requests, and return the server's CPU time per request and its memory before and after."""
    before = read_usage(connection)
    asyncio.run(send_load(url, 16, requests, [BODY]))
    after = read_usage(connection)
    return {
        "requests": requests,
        "cpu_ms_each": 1000 * (after[0] - before[0]) / requests,
        "megabytes_before": before[1],
        "megabytes_after": after[1],
    }


def read_usage(connection: Connection) -> tuple[float, float]:
    """Return the CPU seconds and the megabytes of the server so far."""
    connection.send("usage")
    usage: tuple[float, float] = connection.recv()
    return usage


def measure_batching(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure the embedded model with 16 clients, with batches of up to 16 requests and of one."""
    bodies = [{"model": "knowgate", "messages": [{"role": "user", "content": text}]} for text in SHORT_QUESTIONS]
    results = {}
    for batch in (16, 1):
        settings, options = PipelineOptions(model=arguments.model, gate="never"), ServeOptions(batch=batch)
        with start_process(serve_knowgate, settings, options) as connection:
            results[f"batch_{batch}"] = asyncio.run(send_load(connection.recv(), 16, arguments.asked, bodies))
    return {**results, "gain": results["batch_16"]["per_second"] / results["batch_1"]["per_second"]}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=400, help="requests of each measurement")
    parser.add_argument("--many", type=int, default=10_000, help="requests of the measurement of memory")
    parser.add_argument("--litellm", help="path of LiteLLM's proxy; also measures it")
    parser.add_argument("--batching", action="store_true", help="measure the embedded model instead")
    parser.add_argument("--model", default="smollm", help="model spec for --batching")
    parser.add_argument("--asked", type=int, default=64, help="requests of each measurement with --batching")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure = measure_batching if arguments.batching else measure_overhead
        sys.stdout.write(json.dumps(measure(arguments, Path(folder)), indent=1) + "\n")


if __name__ == "__main__":
    main()
