"""Limits on requests, on threads and on the LLM calls of audits."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import math
import mmap
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from starlette.requests import Request

from knowgate.core.network_deadline import request_deadline
from knowgate.core.stop_flag import open_stoppable_context
from knowgate.errors import get_brief
from knowgate.models.backend import can_interrupt
from knowgate.models.fair_executor import CLIENT, FairExecutor, TurnQueue
from knowgate.server.auth.api_keys import ApiKey
from knowgate.server.json_api import MAX_JSON_VALUES, ApiError

Result = TypeVar("Result")


MAX_UNFINISHED_BYTES = 256 << 20  # bytes of all large request bodies that have not arrived completely
# Maximum size of a JSON text that is read in the event loop. With MAX_JSON_VALUES, this takes 0.3 s at most.
MAX_TURN_BYTES = 4 << 20
MAX_PARSED_BYTES = 512 << 20  # memory of all large request bodies in progress
UPLOAD_FACTOR = 8  # unfinished bodies of all clients, as a multiple of those of one client


class RequestSlots:
    """Counts requests in progress, and rejects further ones above a limit.

    Args:
        total: Maximum number for all clients together.
        per_client: Maximum number for one client. If it is less than the total, one client can have half of the places that
            others leave, too, so that no few clients can take all of them.
    """

    def __init__(self, total: int, per_client: int):
        self.total = total
        self.per_client = per_client
        self.count_by_client: Counter[str] = Counter()
        self.count = 0

    def acquire(self, client: str) -> None:
        """Count a request. Call `release` when it has ended.

        Raises:
            ApiError: 429 if the client, or all clients together, have too many requests in progress.
        """
        limit = self.per_client
        if limit < self.total:
            others = self.count - self.count_by_client[client]
            limit = min(limit, (self.total - others + 1) // 2)
        if self.count >= self.total or self.count_by_client[client] >= limit:
            message = "too many requests are in progress. Try again in a second."
            raise ApiError(429, message, "busy", {"retry-after": "1"})
        self.count += 1
        self.count_by_client[client] += 1

    def release(self, client: str) -> None:
        """Stop counting a request."""
        self.count -= 1
        self.count_by_client[client] -= 1
        if not self.count_by_client[client]:
            del self.count_by_client[client]

    @contextmanager
    def hold(self, client: str) -> Iterator[None]:
        """Count a request while the body of this context manager runs."""
        self.acquire(client)
        try:
            yield
        finally:
            self.release(client)


class BodyBudget:
    """Limit on the memory for large request bodies. One client can use half of it.

    Args:
        max_bytes: The limit, in bytes.
        largest_body: Maximum size of a body. Half of the budget has room for at least one such body.
    """

    def __init__(self, max_bytes: int, largest_body: int):
        self.max_bytes = max(max_bytes, 2 * largest_body)
        self.bytes_by_client: Counter[str] = Counter()

    def has_room(self, client: str, size: int) -> bool:
        """Return whether a client can reserve this memory."""
        largest = max(self.max_bytes // 2, size)  # a single body always fits
        is_client_full = self.bytes_by_client[client] + size > largest
        reserved = self.bytes_by_client.total()
        is_full = reserved > 0 and reserved + size > self.max_bytes
        return size <= 0 or not (is_client_full or is_full)

    def reserve(self, client: str, size: int) -> None:
        """Reserve memory for a part of a client's body. Pass a negative size to free it.

        Raises:
            ApiError: 429 if the budget, or the client's half of it, is used up.
        """
        if not self.has_room(client, size):
            raise ApiError(429, "too many large requests at once. Try again in a second.", "busy", {"retry-after": "1"})
        self.bytes_by_client[client] += size
        if not self.bytes_by_client[client]:
            del self.bytes_by_client[client]

    @contextmanager
    def hold(self, client: str, size: int) -> Iterator[None]:
        """Reserve memory during the `with` body."""
        self.reserve(client, size)
        try:
            yield
        finally:
            self.reserve(client, -size)


def identify_client(request: Request, key: ApiKey | None) -> str:
    """Return the sender of a request: the hash of the API key, or the network address."""
    if key is not None:
        return key.hash
    return request.client.host if request.client is not None else ""


GARBAGE_SECONDS, GARBAGE_BYTES = 1.0, 256 << 20
REST_SECONDS, MAX_REST_SECONDS = 0.02, 0.1


async def collect_large_garbage() -> None:
    """Collect garbage each time that the memory of this process has grown by GARBAGE_BYTES.

    Python collects garbage by the number of objects, and an error in a cycle can hold a response of many megabytes.
    """
    lowest = _measure_memory()
    while True:
        await asyncio.sleep(GARBAGE_SECONDS)
        if _measure_memory() > lowest + GARBAGE_BYTES:
            gc.collect()
            lowest = _measure_memory()
        lowest = min(lowest, _measure_memory())


async def share_processor(get_model: Callable[[], object]) -> None:
    """While an LLM on a CPU works, stop the event loop every REST_SECONDS for as long as it has worked since.

    Otherwise many small requests make the LLM several times as slow: it needs the interpreter lock (GIL) for each of its
    short operations, and waits for it behind the event loop.

    Args:
        get_model: Returns the LLM of the server.
    """
    while True:
        start = time.thread_time()
        await asyncio.sleep(REST_SECONDS)
        if _is_busy(get_model()):
            time.sleep(min(time.thread_time() - start, MAX_REST_SECONDS))


def _is_busy(model: object) -> bool:
    """Return whether a model on a CPU has calls."""
    return can_interrupt(model) and isinstance(model.workers, FairExecutor) and model.workers.has_calls


def _measure_memory() -> int:
    """Return the memory of this process in bytes; 0 on systems other than Linux."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


HOUR_SECONDS = 3600.0
START_SHARE = 0.1  # share of an hour's calls with which a budget starts
MAX_CALLS_PER_AUDIT = 2  # one for the missing answer, one to compare the two


@dataclass
class CallBudget:
    """Limit on the LLM calls for audits per hour. Unused calls of up to one hour are saved up.

    Attributes:
        calls_per_hour: Maximum number of calls per hour.
        clock: Returns a time in seconds.
        shares: Whether API keys share the budget, so that each one must leave calls for the others.
        earlier_calls: How many seconds ago earlier processes made each of their calls of the last hour.
        remaining: Number of calls that can be reserved now.
    """

    calls_per_hour: int
    clock: Callable[[], float] = time.monotonic
    shares: bool = False
    earlier_calls: Sequence[float] = ()

    def __post_init__(self) -> None:
        """Compute the number of calls at the start. Calls of earlier processes count, so a restart adds no calls."""
        start_calls = max(MAX_CALLS_PER_AUDIT, START_SHARE * self.calls_per_hour)
        unspent_calls = max(0.0, float(self.calls_per_hour - len(self.earlier_calls)))  # of the last hour
        self.remaining = min(start_calls, unspent_calls, self._replay_earlier_calls(start_calls))
        self._used: dict[str, float] = {}  # name of a key -> used calls of its share
        self._last_refill = self.clock()

    def _replay_earlier_calls(self, start_calls: float) -> float:
        """Return how many calls would remain if this process had run all the time and made the earlier calls.

        The budget starts with `start_calls`. Each call takes one, and time refills the budget between two calls.
        """
        calls_per_second = self.calls_per_hour / HOUR_SECONDS
        remaining = start_calls
        ages = sorted(self.earlier_calls, reverse=True)
        for age, next_age in pairwise([*ages, 0.0]):  # the 0 stands for now
            remaining = max(0.0, remaining - 1)
            remaining += (age - next_age) * calls_per_second
        return remaining

    def reserve(self, owner: str, count: int) -> bool:
        """Reserve calls for an API key, and return whether this succeeded."""
        if not self.allows(owner, count):
            return False
        self.remaining -= count
        self._used[owner] = self._used.get(owner, 0.0) + count
        return True

    def release(self, owner: str, count: int) -> None:
        """Give back calls that were reserved and not made."""
        self.remaining = min(float(self.calls_per_hour), self.remaining + count)
        self._used[owner] = max(0.0, self._used.get(owner, 0.0) - count)

    def allows(self, owner: str, count: int) -> bool:
        """Return whether `count` LLM calls can be reserved now.

        With `shares`, there is a second rule for an API key that has used calls before: all its calls may be at most half
        of the hourly calls, and at most as many as remain for other keys.

        Args:
            owner: Name of the API key.
            count: Number of calls.
        """
        self._refill()
        used_before = self._used.get(owner, 0.0)
        if not self.shares or not used_before:
            return self.remaining >= count
        used = used_before + count
        left_for_others = self.remaining - count
        return used <= self.calls_per_hour / 2 and used <= left_for_others

    def describe_pause(self, count: int) -> str:
        """Return why some or all audits pause, or "" if none does.

        Args:
            count: Number of calls of an audit.
        """
        self._refill()
        if self.remaining < count:
            return f"audits are paused: the budget of {self.calls_per_hour} calls per hour is used up"
        paused_keys = [owner for owner in self._used if not self.allows(owner, count)]
        if paused_keys:
            return f"audits of {len(paused_keys)} API keys are paused: their shares of the budget are used up"
        return ""

    def _refill(self) -> None:
        """Add the LLM calls that became available since the last refill.

        One API key may use half of the hourly calls, so its used calls decrease by half of the refill.
        """
        now = self.clock()
        refill = (now - self._last_refill) * self.calls_per_hour / HOUR_SECONDS
        self.remaining = min(float(self.calls_per_hour), self.remaining + refill)
        self._used = {owner: used - refill / 2 for owner, used in self._used.items() if used > refill / 2}
        self._last_refill = now


# --- threads ----------------------------------------------------------------------------------------

# Network calls end this long after the caller's timeout, so the caller sees its own timeout.
NETWORK_GRACE_SECONDS = 0.5
MAX_REMOTE_RERANKS = 4  # batches of documents that a rerank server gets at once, over all API keys


@asynccontextmanager
async def limit_time(timeout: float) -> AsyncIterator[asyncio.Timeout]:
    """Raise TimeoutError if the `with` body takes too long. Network calls of its threads end soon afterwards."""
    with request_deadline(time.monotonic() + timeout + NETWORK_GRACE_SECONDS):
        async with asyncio.timeout(timeout) as time_limit:
            yield time_limit


def get_reason(error: BaseException, timeout: float) -> str:
    """Describe an error for a response or the log."""
    return f"timeout after {timeout:g} seconds" if isinstance(error, TimeoutError) else get_brief(error)


class FairLock:
    """An asyncio lock for which API keys take turns. The context variable `CLIENT` names the key of a task.

    Args:
        places: Number of tasks that can hold the lock at once. If there are several places, one key gets at most half.
            Without keys, one client can have all of them.
    """

    def __init__(self, places: int = 1):
        self._free_places = places
        self._places_per_key = places // 2 or math.inf  # a single place needs no limit
        self._held_places: Counter[str] = Counter()  # by key
        self._waiters: TurnQueue[asyncio.Future[None]] = TurnQueue()

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(self, *error: object) -> None:
        self.release()

    async def acquire(self) -> None:
        """Wait for a place."""
        turn = asyncio.get_running_loop().create_future()
        self._waiters.append(turn)
        if self._free_places:
            self._free_places -= 1
            self._hand_over_place()  # to the key whose turn it is, which may be another one
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was this task's turn already
                self.release()
            raise

    def release(self) -> None:
        """Give up a place of the current key."""
        self._held_places -= Counter([CLIENT.get()])  # this also removes a key that holds no more places
        self._hand_over_place()

    def _hand_over_place(self) -> None:
        """Give a place to a waiting task of the API key whose turn it is. Cancelled tasks are left out."""
        keys_at_limit = [key for key, count in self._held_places.items() if key and count >= self._places_per_key]
        while (key := self._waiters.find_client(keys_at_limit)) is not None:
            turn = self._waiters.popleft(key)
            if not turn.done():
                self._held_places[key] += 1
                turn.set_result(None)
                return
        self._free_places += 1  # no task can take the place


async def run_in_thread(threads: Executor, work: Callable[[], Result], timeout: float | None = None) -> Result:
    """Run a function in a thread, with the caller's context variables. A cancelled local LLM stops early.

    Raises:
        TimeoutError: The function took longer than the timeout, if there is one.
    """
    async with nullcontext() if timeout is None else limit_time(timeout):
        with open_stoppable_context() as context:
            return await asyncio.get_running_loop().run_in_executor(threads, lambda: context.run(work))


_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, FairLock] = WeakKeyDictionary()


async def run_in_turn(work: Callable[[], Result]) -> Result:
    """Run a function that takes some milliseconds, in the event loop. Other requests run between two of them; keys take turns.

    A thread would delay other requests more: the event loop would wait for Python's global lock at each of its operations.
    """
    async with _turns.setdefault(asyncio.get_running_loop(), FairLock()):
        await asyncio.sleep(0)
        return work()


def choose_runner(
    threads: Executor, byte_count: int, max_values: int
) -> Callable[[Callable[[], Result]], Coroutine[Any, Any, Result]]:
    """Return how to run functions that read a JSON text: in turn in the event loop, or in a thread if they may take long."""
    is_short = byte_count <= MAX_TURN_BYTES and max_values <= MAX_JSON_VALUES
    return run_in_turn if is_short else partial(run_in_thread, threads)


async def run_in_place(
    lock: FairLock, threads: Executor, work: Callable[[], Result], time_limit: asyncio.Timeout
) -> Result:
    """Run a function in a thread, and release the lock, which the caller has acquired.

    After the time limit, the lock is released at once. If the caller is canceled earlier, because its client has
    disconnected, the lock is released when the function ends. Otherwise, clients could fill all threads in this way.
    """
    with open_stoppable_context() as context:
        try:
            job = threads.submit(context.run, work)
        except RuntimeError:  # the machine has no more threads
            lock.release()
            raise
        try:
            return await asyncio.wrap_future(job)
        finally:
            if job.cancel() or job.done() or time_limit.expired():
                lock.release()
            else:
                release_later = partial(_call_in_loop, asyncio.get_running_loop(), lock.release)
                job.add_done_callback(partial(contextvars.copy_context().run, release_later))
            del job  # its error refers to this frame, so the memory of the request could not be freed at once


def _call_in_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], None], job: Future[Any]) -> None:
    """Call a function in an event loop, after a job in a thread has ended. Do nothing if the loop is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function)


class RerankQueue:
    """Queue of the requests to POST /v1/rerank.

    One request of each API key is reranked at a time, and keys take turns after each batch of documents. So a key with
    large requests delays only itself.
    """

    def __init__(self) -> None:
        # There are more threads than places, because a timeout frees the place at once, but its thread a moment later.
        self.threads = ThreadPoolExecutor(2 * MAX_REMOTE_RERANKS, "knowgate-rerank")
        self.local_turn = asyncio.Lock()  # for a reranker in this process, which is used by one thread at a time
        self._remote_places = FairLock(MAX_REMOTE_RERANKS)
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def hold(self, owner: str) -> asyncio.Lock:
        """Return the lock that a request holds while it is reranked. `owner` is the name of its API key."""
        return self._locks[owner]

    async def run_remote(self, work: Callable[[], Result], time_limit: asyncio.Timeout) -> Result:
        """Run a function that calls a rerank server, and return its result."""
        await self._remote_places.acquire()
        return await run_in_place(self._remote_places, self.threads, work, time_limit)
