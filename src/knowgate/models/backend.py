"""Base classes for LLM backends, and the sampling rules that all of them share."""

from __future__ import annotations

import hashlib
import math
import re
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeGuard, TypeVar

import numpy as np
from numpy.typing import NDArray

from knowgate.core.stop_flag import pause_at_checks
from knowgate.errors import BadSetting
from knowgate.types import Completion, Prompt, Reading, Sampling, SignalRequest, TextStream

Handle = TypeVar("Handle")
Item = TypeVar("Item")
Value = TypeVar("Value")
MAX_NESTED_CALLS = 8  # calls that run inside each other, each of another client
UNNAMED_FINGERPRINT = "openai-unnamed"  # of an upstream whose model is not named, so it could be any LLM
# A word with the space before it. Chinese, Japanese and Korean characters count as words.
WORD_PATTERN = re.compile(r"\s*(?:[぀-ヿ㐀-鿿가-힣]|[^\s぀-ヿ㐀-鿿가-힣]+)|\s+")


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

    def find_client(self, skipped: Collection[str] = ()) -> str | None:
        """Return the client whose turn it is, or None. `skipped` clients have no turn."""
        clients = [client for client in self._items if client not in skipped]
        # The client that was served last comes again only if nobody else waits.
        others = [client for client in clients if client != self._last_client]
        return next(iter(others or clients), None)

    def popleft(self, client: str) -> Item:
        """Remove and return the oldest item of a client."""
        items = self._items.pop(client)
        item = items.popleft()
        if items:
            self._items[client] = items  # behind all other clients
        self._last_client = client
        return item


@dataclass
class RunningCall:
    """A call that runs in a thread of a `FairExecutor`.

    At certain points, the call pauses, and a waiting call of another client runs inside of it, in the same thread.

    Attributes:
        executor: The executor.
        clients: The client of this call and, before it, the clients of the paused calls that this call runs inside of.
        blocked_until: Client -> time (as in `time.monotonic`) until which no further call of the client runs inside of
            this call.
    """

    executor: FairExecutor
    clients: tuple[str, ...]
    blocked_until: dict[str, float] = field(default_factory=dict)

    def list_blocked_clients(self) -> set[str]:
        """Return the clients whose waiting calls must not run inside of this call now."""
        now = time.monotonic()
        return {*self.clients, *(client for client, end in self.blocked_until.items() if end > now)}


_THREAD = threading.local()  # `call` is the RunningCall of a thread


class FairExecutor(Executor):
    """A thread pool that serves several clients in turn.

    The context variable `CLIENT` names the client of a call. Where `allow_interruption` permits it, a running call pauses,
    and a call of another client runs inside of it, in the same thread. Afterwards, the paused call runs at least as long
    before that client can interrupt it again.

    Args:
        threads: Number of threads.
    """

    def __init__(self, threads: int):
        self._threads = ThreadPoolExecutor(threads, "knowgate-model")
        self._lock = threading.Lock()
        self._calls: TurnQueue[tuple[Future[Any], Callable[[], Any]]] = TurnQueue()

    def submit(self, work: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        """Queue a call of `work`, and return a future for its result."""
        future: Future[Any] = Future()
        with self._lock:
            self._calls.append((future, partial(work, *args, **options)))
        self._threads.submit(self.run_next)
        return future

    def has_other_clients(self, call: RunningCall) -> bool:
        """Return whether another client has a waiting call that may run inside of `call`."""
        with self._lock:
            client = self._calls.find_client(call.list_blocked_clients())
        return client is not None and len(call.clients) <= MAX_NESTED_CALLS

    def run_next(self, outer: RunningCall | None = None) -> None:
        """Run the waiting call whose turn it is, if there is one.

        Args:
            outer: The running call to interrupt: the waiting call runs inside of it. None in an idle thread.
        """
        interrupted = outer or RunningCall(self, ())  # a call of no client stands for an idle thread
        with self._lock:
            client = self._calls.find_client(interrupted.list_blocked_clients())
            if client is None:  # all calls were run inside others
                return
            future, work = self._calls.popleft(client)
        start = time.monotonic()
        _THREAD.call = RunningCall(self, (*interrupted.clients, client))
        try:
            Context().run(self._run, future, work)  # without the context variables of the interrupted call
        finally:
            _THREAD.call = outer
            end = time.monotonic()
            # The interrupted call now gets as much time as the client has just had.
            interrupted.blocked_until[client] = end + (end - start)

    def _run(self, future: Future[Any], work: Callable[[], Any]) -> None:
        """Run a call, and set the result or error of its future."""
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the caller gets it from the future
            future.set_exception(error)
        finally:
            del future  # otherwise the error, its traceback and this frame would refer to each other

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads. With `cancel_futures`, waiting calls are canceled instead of run."""
        if cancel_futures:
            with self._lock:
                waiting = [future for future, _ in self._calls]
            for future in waiting:
                future.cancel()
        self._threads.shutdown(wait)


@contextmanager
def allow_interruption(model: object) -> Iterator[None]:
    """Let waiting calls of other clients run while the model works in the `with` body.

    The body must hold no lock that such a call needs. Models that cannot be interrupted finish their call first.
    """
    call: RunningCall | None = getattr(_THREAD, "call", None)
    if call is None or not can_interrupt(model):
        yield
        return

    def pause() -> None:
        if call.executor.has_other_clients(call):
            with model.pause_inference():
                call.executor.run_next(call)

    with pause_at_checks(pause):
        yield


def can_interrupt(model: object) -> TypeGuard[Backend]:
    """Return whether calls of other clients can interrupt a call of this model."""
    return isinstance(model, Backend) and model.is_interruptible


class Backend(ABC):
    """Base class for LLM backends, with simple defaults for optional methods.

    Subclasses must implement all other methods of `knowgate.types.Model`.
    """

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        n: int = 1,
        seed: int | None = None,
        resume: Sequence[object] | None = None,
    ) -> list[list[Completion]]:
        """Return `n` completions per prompt.

        With `resume`, each completion continues a draft: the beginning of an answer, generated by the method `read`.

        Args:
            prompts: The prompts.
            max_tokens: Maximum number of tokens per completion, including those of a continued draft.
            temperature: 0 for greedy completions.
            n: Number of completions per prompt.
            seed: Seed for sampling; None for random samples.
            resume: For each prompt, the handle of the draft to continue (`Reading.resume`); None for new completions.
        """

    def stream(self, prompt: Prompt, *, max_tokens: int, resume: object | None = None) -> TextStream:
        """Yield the greedy answer word by word, then return a `Completion`.

        With `resume`, the answer continues a draft.
        """
        handles = None if resume is None else [resume]
        completion = self.generate([prompt], max_tokens=max_tokens, resume=handles)[0][0]
        yield from WORD_PATTERN.findall(completion.text)
        return completion

    def fits(self, prompts: Sequence[Prompt], max_tokens: int) -> list[bool]:
        """Return True for every prompt, because the size of the context window is unknown."""
        return [True for _ in prompts]

    @property
    def concurrency(self) -> int:
        """Number of threads that may use the model at once."""
        return 1

    @property
    def is_interruptible(self) -> bool:
        """Whether a running call may pause when it checks its stop flag, so that another call runs inside of it."""
        return False

    def pause_inference(self) -> AbstractContextManager[None]:
        """Return a context manager for a call that interrupts this model."""
        return nullcontext()

    @property
    def workers(self) -> Executor:
        """The model's thread pool, created on first use. It serves clients in turn."""
        # Stored in `__dict__` directly, because subclasses may be frozen dataclasses, whose attributes cannot be set.
        executor: Executor | None = self.__dict__.get("_workers")
        if executor is None:
            # setdefault is atomic, so two threads that come here at once get the same pool.
            executor = self.__dict__.setdefault("_workers", FairExecutor(self.concurrency))
        return executor

    def _map(self, work: Callable[[Item], Value], items: Sequence[Item]) -> list[Value]:
        """Call `work` with each item, in up to `concurrency` threads, and return the results in order."""
        n_threads = min(self.concurrency, len(items))
        if n_threads < 2:
            return [work(item) for item in items]
        with ThreadPoolExecutor(n_threads) as pool:
            return list(pool.map(work, items))


@dataclass(frozen=True)
class RemoteDraft:
    """A prompt and the draft of its answer, kept for continuing the draft later.

    Args:
        prompt: The prompt.
        completion: The draft, or None if no draft was requested.
    """

    prompt: Prompt
    completion: Completion | None

    def get_answer(self, max_tokens: int) -> Completion | None:
        """Return the draft if it is complete, else None.

        A draft of `max_tokens` tokens counts as complete.
        """
        draft = self.completion
        is_complete = draft is not None and (draft.finished or draft.n_tokens >= max_tokens)
        return draft if is_complete else None


class GeneratingBackend(Backend):
    """Base class for backends that generate new answers, greedy or sampled, and continue drafts."""

    @abstractmethod
    def _answer_greedily(self, prompts: Sequence[Prompt], max_tokens: int, seed: int | None) -> list[Completion]:
        """Return the greedy answer to each prompt."""

    @abstractmethod
    def read(self, prompts: Sequence[Prompt], request: SignalRequest, /) -> list[Reading]:
        """Return the requested signals of each prompt, such as a draft, samples and hidden states."""

    @abstractmethod
    def _continue_drafts(self, handles: Sequence[object], max_tokens: int) -> list[Completion]:
        """Continue drafts (beginnings of answers) greedily, and return the whole answers.

        Args:
            handles: The handle of each draft (`Reading.resume`), which holds its prompt.
            max_tokens: Maximum number of tokens per answer, including those of the draft.
        """

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        n: int = 1,
        seed: int | None = None,
        resume: Sequence[object] | None = None,
    ) -> list[list[Completion]]:
        """Return `n` completions per prompt, sampled if temperature > 0.

        With `resume`, each completion continues a draft.
        """
        if resume is not None:
            if temperature > 0 or n != 1:
                raise BadSetting(f"`resume` continues one greedy draft. Leave out temperature={temperature} and n={n}.")
            # `strict` raises an error unless there are as many handles as prompts.
            handles = [handle for _prompt, handle in zip(prompts, resume, strict=True)]
            return [[answer] for answer in self._continue_drafts(handles, max_tokens)]
        if temperature != 0:
            sampling = Sampling(temperature)
            request = SignalRequest(samples=n, sample_tokens=max_tokens, sampling=sampling, seed=seed, resumable=False)
            return [list(reading.samples) for reading in self.read(prompts, request)]
        if n == 0:
            return [[] for _ in prompts]
        answers = self._answer_greedily(prompts, max_tokens, seed)
        return [[answer] * n for answer in answers]  # all greedy answers to a prompt are equal


class SinglePromptBackend(GeneratingBackend):
    """Base class for backends that answer one prompt per request."""

    @abstractmethod
    def _complete_draft(self, draft: RemoteDraft, max_tokens: int, seed: int | None = None) -> Completion:
        """Return the whole greedy answer that begins with a draft; it is a new answer if there is no draft yet."""

    def _answer_greedily(self, prompts: Sequence[Prompt], max_tokens: int, seed: int | None) -> list[Completion]:
        """Return the greedy answer to each prompt, by completing an empty draft."""
        empty_drafts = [RemoteDraft(prompt, None) for prompt in prompts]
        return self._map(lambda draft: self._complete_draft(draft, max_tokens, seed), empty_drafts)

    def _continue_drafts(self, handles: Sequence[object], max_tokens: int) -> list[Completion]:
        """Return the whole greedy answer that begins with each draft."""
        drafts = [check_resume_handle(handle, RemoteDraft) for handle in handles]
        return self._map(lambda draft: self._complete_draft(draft, max_tokens), drafts)


def check_resume_handle(handle: object, kind: type[Handle]) -> Handle:
    """Return a draft handle (`Reading.resume`) after checking that this backend made it.

    Args:
        handle: The handle.
        kind: Type of the handles that this backend makes.

    Raises:
        BadSetting: Another backend made the handle.
    """
    if not isinstance(handle, kind):
        raise BadSetting(f"`resume` cannot continue a {type(handle).__name__}. Pass `Reading.resume` of this model.")
    return handle


def check_sampling(sampling: Sampling) -> None:
    """Raise BadSetting unless temperature, top_p and top_k are in their valid ranges."""
    if not 0 < sampling.temperature < math.inf:
        raise BadSetting(f"temperature={sampling.temperature} must be above 0 for sampling.")
    if not 0 < sampling.top_p <= 1:
        raise BadSetting(f"top_p={sampling.top_p} must be above 0 and at most 1 (1 keeps every token).")
    if sampling.top_k < 0:
        raise BadSetting(f"top_k={sampling.top_k} must be at least 0 (0 keeps every token).")


def apply_sampling(probabilities: NDArray[np.float64], sampling: Sampling) -> NDArray[np.float64]:
    """Apply temperature, top_k and top_p to the token probabilities of one position.

    Example: with top_k=2, [0.3, 0.1, 0.6] becomes [0.33, 0, 0.67].

    Returns:
        The new probabilities, in the order of the input. Excluded tokens have probability 0.
    """
    scaled = probabilities ** (1 / sampling.temperature)
    n_kept = sampling.top_k or len(scaled)  # top_k=0 means no limit
    most_probable = np.argsort(-scaled, kind="stable")[:n_kept]
    top = scaled[most_probable] / scaled[most_probable].sum()
    sum_before = np.cumsum(top) - top  # the probability of all tokens before each one
    top[sum_before >= sampling.top_p] = 0
    result = np.zeros_like(scaled)
    result[most_probable] = top / top.sum()
    return result


def draw_uniforms(prompt: Prompt, request: SignalRequest) -> NDArray[np.float64]:
    """Draw the random numbers for the tokens of sampled answers.

    With a seed, a prompt always gets the same numbers.

    Returns:
        Numbers in [0, 1), one row per sample and one column per token.
    """
    shape = (request.samples, request.sample_tokens)
    if request.seed is None:
        return np.random.default_rng().random(shape)
    key = hashlib.sha256(f"{request.seed}\0{prompt.text}".encode()).digest()
    return np.random.default_rng(np.frombuffer(key, dtype=np.uint32)).random(shape)
