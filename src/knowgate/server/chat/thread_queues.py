"""Runs slow functions in threads: with a deadline for network calls, and in a queue that API keys share fairly."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from knowgate.core.http_client import request_deadline
from knowgate.core.stop_flag import open_stoppable_context

Result = TypeVar("Result")
NETWORK_GRACE_SECONDS = (
    0.5  # network calls end this long after the caller's timeout, so the caller sees its own timeout
)
MAX_REMOTE_RERANKS = 4  # batches of documents that a rerank server gets at once, over all API keys


@asynccontextmanager
async def limit_time(timeout: float) -> AsyncIterator[None]:
    """Raise TimeoutError if the body of this context manager takes longer than `timeout` seconds.

    A thread that the body has started cannot be stopped. But its calls to other servers end shortly after the timeout,
    so that they do not occupy the thread any longer.
    """
    with request_deadline(time.monotonic() + timeout + NETWORK_GRACE_SECONDS):
        async with asyncio.timeout(timeout):
            yield


async def run_in_thread(threads: ThreadPoolExecutor, work: Callable[[], Result]) -> Result:
    """Run a function in a thread, with a copy of the caller's context variables.

    If cancelled, a function that runs an LLM in this process stops before the next token or layer.
    """
    with open_stoppable_context() as context:
        return await asyncio.get_running_loop().run_in_executor(threads, lambda: context.run(work))


class RerankQueue:
    """Queue of the requests to POST /v1/rerank.

    One request of each API key is reranked at a time. Its documents are split into batches. Keys take turns after each
    batch, so a key with many or large requests delays only itself.

    A rerank server gets up to `MAX_REMOTE_RERANKS` batches at once, from threads that searches do not use.
    """

    def __init__(self) -> None:
        # After a timeout, a thread is occupied for a moment longer than its slot.
        self.threads = ThreadPoolExecutor(2 * MAX_REMOTE_RERANKS, "knowgate-rerank")
        self.local_turn = asyncio.Lock()  # for a reranker in this process, which is used by one thread at a time
        self._remote_slots = asyncio.Semaphore(MAX_REMOTE_RERANKS)
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def hold(self, owner: str) -> asyncio.Lock:
        """Return the lock that a request holds while it is reranked. `owner` is the name of its API key."""
        return self._locks[owner]

    async def run_remote(self, work: Callable[[], Result]) -> Result:
        """Run a function that calls a rerank server, and return its result."""
        async with self._remote_slots:
            return await run_in_thread(self.threads, work)
