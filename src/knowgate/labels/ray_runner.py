"""A runner on a Ray cluster: workers hold the LLM, batches go to whoever is free, results come back in any order.

A worker that dies, whether killed or out of memory, is replaced and its batch is done again in smaller ones; a question
that takes its worker along when it is alone is a failed row. So every question has one result, and none is lost.
Knows Ray and recipes; nothing of what they make. Ray Data is not used: it retries a whole block without telling whose
fault it was, and our folders already know what is done.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic

from knowgate.errors import BadSetting, DeviceError, KnowgateError, ModelError
from knowgate.labels.local_runner import LocalRunner
from knowgate.labels.ray_cluster import RayCluster, WorkerPool, check_versions, list_nodes, plan_workers
from knowgate.labels.ray_worker import JobSpec, RayWorker, SharedIndex, WorkerEnvironment, WorkerError, WorkerResult
from knowgate.types import Question, Result, Runner

log = logging.getLogger(__name__)
MAX_STARTUP_DEATHS = 3  # workers in a row that may die while they make themselves ready
MAX_DEATHS = 10  # and over their questions, beside one for each worker
MAX_TRIES = 2  # times a question may take its worker along before it is a failed row
BATCH_SIZES = LocalRunner(first=4, largest=1_024)


@dataclass(frozen=True)
class RayRunner(Generic[Result]):
    """Does work by a recipe on a cluster. failed: the result of a question that could not be done, with why.

    expected: which LLM and index the run is made with; a machine that has others is refused.
    """

    cluster: RayCluster
    recipe: JobSpec[Result]
    failed: Callable[[Question, str], Result]
    expected: dict[str, str] = field(default_factory=dict)
    sizes: LocalRunner = BATCH_SIZES

    def run(self, questions: Sequence[Question], work: Callable[[Sequence[Question]], Any]) -> Iterator[Any]:
        """`work` is what the recipe makes on the other side; here, nothing is done."""
        if not questions:
            return
        with self.joined() as (ray, crew):
            yield from RayScheduler(
                self, ray, crew, deque(QuestionBatch((question,)) for question in questions)
            ).results()

    @contextlib.contextmanager
    def joined(self) -> Iterator[tuple[Any, WorkerPool]]:
        """Ray, connected, and the workers it has room for; says what keeps them from being had."""
        with self.cluster.connected() as ray:
            nodes = list_nodes(ray)
            check_versions(ray, nodes)
            yield ray, plan_workers(self.cluster.share, nodes)


@dataclass(frozen=True)
class QuestionBatch:
    """Questions that go out together. deaths: workers that died over them; again: as they are, not with others."""

    questions: tuple[Question, ...]
    deaths: int = 0
    again: bool = False


@dataclass
class WorkerHandle:
    """A worker as seen from here, and what it was given last; nothing while it makes itself ready."""

    actor: Any
    size: int
    batch: QuestionBatch | None = None
    since: float = 0.0


@dataclass
class RayScheduler(Generic[Result]):
    """Keeps all workers busy. `waiting`: questions that never went out, each by itself, and batches to be repeated."""

    runner: RayRunner[Result]
    ray: Any
    crew: WorkerPool
    waiting: deque[QuestionBatch]
    shelves: dict[str, Any] = field(default_factory=dict)
    busy: dict[Any, WorkerHandle] = field(default_factory=dict)  # by the reference of what they are doing
    idle: list[WorkerHandle] = field(default_factory=list)
    deaths: int = 0  # since the last batch that was done

    def results(self) -> Iterator[Result]:
        try:
            for _ in range(min(self.crew.size, len(self.waiting))):
                self._hire()
            while self.busy:
                [reference], _ = self.ray.wait(list(self.busy), num_returns=1)
                yield from self._heard(self.busy.pop(reference), reference)
                self._employ()
        finally:
            for actor in [hand.actor for hand in (*self.busy.values(), *self.idle)] + list(self.shelves.values()):
                self.ray.kill(actor)

    def _heard(self, hand: WorkerHandle, reference: Any) -> Iterator[Result]:
        from ray.exceptions import RayError

        try:
            outcome: WorkerResult[Any] = self.ray.get(reference)
        except RayError as error:
            yield from self._died(hand, error)
            return
        if outcome.fault is None:
            yield from self._done(hand, outcome.value)
        elif hand.batch is not None and outcome.fault.kind == DeviceError.__name__:  # another process can go on
            self.ray.kill(hand.actor)
            yield from self._died(hand, outcome.fault.error)
        else:
            yield from self._failed(hand, outcome.fault)

    # --- workers come and go ----------------------------------------------------------------------

    def _hire(self) -> None:
        actor = self.ray.remote(RayWorker).options(
            num_cpus=self.crew.cpus, num_gpus=self.crew.gpus, max_restarts=0, scheduling_strategy="SPREAD"
        )
        hand = WorkerHandle(actor.remote(), self.runner.sizes.first)
        self.busy[hand.actor.node.remote()] = hand

    def _open(self, hand: WorkerHandle, node: str) -> None:
        shelf = self._shelf(node) if self.runner.recipe.index else None
        self.busy[hand.actor.open.remote(self.runner.recipe, self._place, shelf)] = hand

    @property
    def _place(self) -> WorkerEnvironment:
        return WorkerEnvironment(str(Path.cwd()), self.crew.gpus)

    def _shelf(self, node: str) -> Any:
        """The index of a machine. It is made anew where its process dies, and what it was asked is asked again."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if node not in self.shelves:
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": there}
            self.shelves[node] = (
                self.ray.remote(SharedIndex).options(**options).remote(self.runner.recipe.index, self._place)
            )
        return self.shelves[node]

    def _died(self, hand: WorkerHandle, error: Exception) -> Iterator[Result]:
        why = " ".join(str(error).split())
        self.deaths += 1
        if self.deaths >= (MAX_STARTUP_DEATHS if hand.batch is None else MAX_DEATHS + self.crew.size):
            raise ModelError(
                f"{self.deaths} workers in a row died on the Ray cluster and none has done anything: {why[:300]}. "
                "Most often memory runs out: ask for fewer workers (--runner 'ray:...?workers=1')."
            )
        log.warning("a worker died; another one takes its place and does its questions again")
        if hand.batch is not None:
            yield from self._again(hand.batch, why)
        if self.waiting:
            self._hire()

    def _again(self, batch: QuestionBatch, why: str) -> Iterator[Result]:
        """A batch whose worker died: in two halves, so that the question whose fault it is comes to be alone."""
        if len(batch.questions) == 1 and batch.deaths + 1 >= MAX_TRIES:
            yield self.runner.failed(batch.questions[0], f"{MAX_TRIES} workers died over this question: {why[:200]}")
            return
        middle = (len(batch.questions) + 1) // 2
        deaths = batch.deaths + 1 if len(batch.questions) == 1 else 0
        halves = (batch.questions[:middle], batch.questions[middle:])
        self.waiting.extendleft(QuestionBatch(half, deaths, again=True) for half in reversed(halves) if half)

    # --- what they bring --------------------------------------------------------------------------

    def _done(self, hand: WorkerHandle, value: Any) -> Iterator[Result]:
        if isinstance(value, str) and hand.batch is None:
            self._open(hand, value)
            return
        if hand.batch is None:
            self._check_identity(value)
        else:
            self.deaths = 0
            hand.size = self.runner.sizes.next_size(len(hand.batch.questions), time.perf_counter() - hand.since)
            yield value
        self.idle.append(hand)

    def _check_identity(self, told: Mapping[str, str]) -> None:
        other = [
            f"its {name} is {told.get(name)}, not {wanted}"
            for name, wanted in self.runner.expected.items()
            if told.get(name) != wanted
        ]
        if other:
            raise BadSetting(
                f"a machine of the Ray cluster has other files than this one: {'; '.join(other)}. "
                "Put the same model and index in the same place on all of them."
            )

    def _failed(self, hand: WorkerHandle, fault: WorkerError) -> Iterator[Result]:
        if hand.batch is None or fault.foreseen:  # it cannot begin, or everything else would fail, too
            raise fault.error if fault.foreseen else KnowgateError(f"a Ray worker cannot begin: {fault.message}")
        if len(hand.batch.questions) == 1:
            yield self.runner.failed(hand.batch.questions[0], fault.message)
        else:
            self.waiting.extendleft(
                QuestionBatch((question,), again=True) for question in reversed(hand.batch.questions)
            )
        self.idle.append(hand)

    def _employ(self) -> None:
        """Whoever is free gets what waits; the others stay, as a batch may come back."""
        while self.waiting and self.idle:
            hand = self.idle.pop()
            hand.batch, hand.since = self._next(hand.size), time.perf_counter()
            self.busy[hand.actor.do.remote(hand.batch.questions)] = hand

    def _next(self, size: int) -> QuestionBatch:
        """A batch to be repeated as it is; else fresh questions, towards the end only a worker's share of them."""
        first = self.waiting.popleft()
        if first.again:
            return first
        size = min(size, -(-(len(self.waiting) + 1) // self.crew.size))
        taken = [*first.questions]
        while len(taken) < size and self.waiting and not self.waiting[0].again:
            taken += self.waiting.popleft().questions
        return QuestionBatch(tuple(taken))


LOCAL_RUNNER = "local"


def is_remote_runner(runner: str | Runner | None) -> bool:
    """Whether work is sent away by name; a wrong word is refused here, before anything is loaded."""
    if not isinstance(runner, str) or runner == LOCAL_RUNNER:
        return False
    RayCluster.from_spec(runner)
    return True


def create_ray_runner(
    spec: str,
    recipe: JobSpec[Result],
    failed: Callable[[Question, str], Result],
    expected: Mapping[str, str],
) -> RayRunner[Result]:
    """The runner that sends this recipe away. failed: what becomes of a question that nobody could do."""
    return RayRunner(RayCluster.from_spec(spec), recipe, failed, dict(expected))


def connect_early(runner: Runner | None, folder: Path) -> AbstractContextManager[Any]:
    """For a new folder: a cluster that cannot be had is noticed before the folder is there; an old one may be done."""
    return runner.joined() if isinstance(runner, RayRunner) and not folder.exists() else nullcontext()


def get_local_runner(runner: str | Runner | None) -> Runner | None:
    """The runner itself; None for the usual one of this process."""
    return None if isinstance(runner, str) else runner


def require_name(what: str, given: Any) -> str | None:
    """A thing by its name; what lives in this process cannot be sent to another machine."""
    if given is None:
        return None
    if isinstance(given, str) or hasattr(given, "__fspath__"):
        return str(given)
    raise BadSetting(
        f"with --runner ray the {what} must be given by its name, not as a {type(given).__name__}: it is made on other "
        "machines."
    )
