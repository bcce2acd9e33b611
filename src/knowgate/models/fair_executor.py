"""A thread pool for a model, whose calls of several clients take turns."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
MAX_PAUSED_CALLS = 4  # calls that pause at once, each of another client; each one keeps its memory
SLICE_SECONDS = 0.1  # a call runs at least so much longer than those of another client before it pauses for them
CREDIT_SECONDS = 1.0  # by how much a client that had no calls is ahead of the others
LINGER_SECONDS = 0.01  # maximum time until the next call of a client, such as the next token of a stream
CLIENT: ContextVar[str] = ContextVar("client on whose behalf the model is used", default="")


class TurnQueue(Generic[Item]):
    """A queue in which several clients take turns.

    The context variable `CLIENT` names the client of an item.
    """

    def __init__(self) -> None:
        self._items: dict[str, deque[Item]] = {}  # by client; the next client is first
        self._last_client: str | None = None

    def __iter__(self) -> Iterator[Item]:
        return (item for items in self._items.values() for item in items)

    def append(self, item: Item) -> None:
        """Add an item of the current client."""
        self._items.setdefault(CLIENT.get(), deque()).append(item)

    def count_own(self) -> int:
        """Return the number of items of the current client."""
        return len(self._items.get(CLIENT.get(), ()))

    def find_client(self, skipped: Collection[str] = ()) -> str | None:
        """Return the client whose turn it is, or None. `skipped` clients have no turn."""
        clients = [client for client in self._items if client not in skipped]
        # The client that was served last comes again only if nobody else waits.
        others = [client for client in clients if client != self._last_client]
        return next(iter(others or clients), None)

    def peek(self, client: str) -> Item:
        """Return the oldest item of a client."""
        return self._items[client][0]

    def popleft(self, client: str) -> Item:
        """Remove and return the oldest item of a client."""
        items = self._items.pop(client)
        item = items.popleft()
        if items:
            self._items[client] = items  # behind all other clients
        self._last_client = client
        return item


@dataclass(eq=False)
class Call:
    """A call of a `FairExecutor`, which waits, runs or is paused.

    Attributes:
        executor: The executor.
        client: The client on whose behalf the call runs.
        future: Future for the result.
        work: Function to call.
        may_continue: Event that ends a pause.
        since: When the call last started or continued, as in `time.monotonic`.
    """

    executor: FairExecutor
    client: str
    future: Future[Any]
    work: Callable[[], Any]
    may_continue: threading.Event = field(default_factory=threading.Event)
    since: float = 0.0

    def run(self) -> None:
        """Run the call in this thread, and set the result or error of its future."""
        if not self.future.set_running_or_notify_cancel():
            return
        _THREAD.call = self
        try:
            self.future.set_result(self.work())
        except BaseException as error:  # noqa: BLE001 - the caller gets it from the future
            self.future.set_exception(error)
        finally:
            # Without the future, its error, the traceback and this frame do not refer to each other.
            del _THREAD.call, self.future, self.work


def _free_canceled_work(call: Callable[[], Call | None], future: Future[Any]) -> None:
    """Free the memory of the work of a call that was canceled while it waited. `call` is a weak reference."""
    waiting_call = call()
    if waiting_call is not None and future.cancelled():
        del waiting_call.work


_THREAD = threading.local()  # `call` is the Call that runs in a thread


def get_running_call() -> Call | None:
    """Return the call of a `FairExecutor` that runs in this thread, or None."""
    return getattr(_THREAD, "call", None)


class FairExecutor(Executor):
    """A thread pool that serves several clients in turn.

    The context variable `CLIENT` names the client of a call. Where `allow_interruption` permits it, a running call pauses
    for a call of a client whose calls have run for less time. So two clients get equal shares of the time, and a short
    call does not wait for the end of a long one. A client that used less than its share has a credit of some time.

    Args:
        threads: Number of calls that run at once. Paused calls have threads of their own.
    """

    def __init__(self, threads: int):
        self._threads = ThreadPoolExecutor(threads + MAX_PAUSED_CALLS, "knowgate-model")
        self._lock = threading.Lock()
        self._has_new_call = threading.Condition(self._lock)
        self._n_free = threads
        self._is_shut_down = False
        self._waiting: TurnQueue[Call] = TurnQueue()
        self._paused: list[Call] = []
        self._n_calls: Counter[str] = Counter()  # waiting, running and paused calls of each client
        self._seconds: dict[str, float] = {}  # client -> for how long its calls have run
        self._level = 0.0  # the least of these times among clients with calls; it never decreases

    @property
    def has_calls(self) -> bool:
        """Whether calls wait, run or pause."""
        return bool(self._n_calls)

    def submit(self, work: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        """Queue a call of `work`, and return a future for its result."""
        future: Future[Any] = Future()
        call = Call(self, CLIENT.get(), future, partial(work, *args, **options))
        future.add_done_callback(partial(_free_canceled_work, weakref.ref(call)))
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError("the executor was shut down")
            self._waiting.append(call)
            if not self._n_calls[call.client]:
                self._admit(call.client)
            self._n_calls[call.client] += 1
            self._has_new_call.notify_all()
            if self._n_free:
                self._threads.submit(self._run_calls)  # may fail, if the machine has no more threads
                self._n_free -= 1
        return future

    def _admit(self, client: str) -> None:
        """Set the time of a client that had no calls. It gets a credit, but keeps what it has used of an earlier one."""
        lowest = self._level - CREDIT_SECONDS
        self._seconds = {name: time for name, time in self._seconds.items() if name in self._n_calls or time > lowest}
        self._seconds.setdefault(client, lowest)

    def _run_calls(self, call: Call | None = None) -> None:
        """Run one call after another in this thread, until a paused call takes its place or no call waits."""
        call = call or self._take_next()
        while call is not None:
            call.since = time.monotonic()
            call.run()
            with self._lock:
                self._count_time(call)
                self._n_calls[call.client] -= 1
                if not self._n_calls[call.client]:
                    del self._n_calls[call.client]
            call = self._take_next(call.client)

    def _take_next(self, last_client: str | None = None) -> Call | None:
        """Remove and return the next waiting call. If it is the turn of a paused call instead, let that one continue.

        A paused call may run for long before it pauses again, so first wait for another call of the last client.
        """
        with self._lock:
            if last_client is not None and self._paused:
                self._has_new_call.wait_for(lambda: last_client in self._n_calls, LINGER_SECONDS)
            call = self._choose()
            if call is None:
                self._n_free += 1
            elif self._start(call):
                return call
        return None

    def pause(self, call: Call, in_pause: Callable[[], AbstractContextManager[None]]) -> None:
        """Pause the running call, if it is the turn of another client, until it is the turn of its own client again.

        Args:
            call: The running call.
            in_pause: Returns a context manager that is held during the pause.
        """
        with self._lock:
            self._count_time(call)
            other = self._choose(call)
            if other is None:
                return
            call.may_continue.clear()
            self._paused.append(call)
            if self._start(other):
                self._threads.submit(self._run_calls, other)
        with in_pause():
            call.may_continue.wait()

    def _choose(self, running: Call | None = None) -> Call | None:
        """Return the call that runs next, or None. It is that of the client whose calls have run least.

        Args:
            running: A running call, which pauses only for a client whose calls have run for less time.
        """
        calls = [call for call in self._paused if running is None or call.client != running.client]
        served = {call.client for call in self._paused} | ({running.client} if running else set())
        client = self._waiting.find_client(served)
        can_start = running is None or (len(self._paused) < MAX_PAUSED_CALLS and not self._is_shut_down)
        if client is not None and can_start:
            calls.append(self._waiting.peek(client))
        first = min(calls, key=lambda call: self._seconds[call.client], default=None)
        if first is None or running is None:
            return first
        lead = self._seconds[running.client] - self._seconds[first.client]
        return first if lead >= SLICE_SECONDS else None

    def _start(self, call: Call) -> bool:
        """Let a paused call continue, or remove a waiting one from the queue. Return whether the call is new."""
        if call in self._paused:
            self._paused.remove(call)
            call.since = time.monotonic()
            call.may_continue.set()
            return False
        self._waiting.popleft(call.client)
        return True

    def _count_time(self, call: Call) -> None:
        """Add the time for which a call has run since it started or continued to that of its client."""
        now = time.monotonic()
        self._seconds[call.client] += now - call.since
        call.since = now
        self._level = max(self._level, min(self._seconds[client] for client in self._n_calls))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads. With `cancel_futures`, waiting calls are canceled instead of run."""
        with self._lock:
            self._is_shut_down = True  # from now on, no call needs a new thread
            waiting = [call.future for call in self._waiting] if cancel_futures else []
        for future in waiting:
            future.cancel()
        self._threads.shutdown(wait)
