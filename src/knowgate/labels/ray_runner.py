"""Runs jobs on a Ray cluster: workers hold the LLM, and batches go to the next free worker.

If a worker dies, it is replaced and its batch is run again in halves. A question that kills its worker when it is alone
becomes a failed row, so every question has one result. Ray Data is not used: it retries whole blocks without telling
which question failed, and run folders already know what is done.
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
LOCAL_RUNNER = "local"
MAX_STARTUP_DEATHS = 3  # workers that may die in a row while they start
MAX_DEATHS = 10  # workers that may die in a row over their questions, in addition to one per worker
MAX_TRIES = 2  # workers that a single question may kill before it becomes a failed row
BATCH_SIZES = LocalRunner(first=4, largest=1_024)


# --- runners by spec ------------------------------------------------------------------------------


def is_remote_runner(runner: str | Runner | None) -> bool:
    """Return whether a runner spec names a Ray cluster; raise BadSetting for an unknown one."""
    if not isinstance(runner, str) or runner == LOCAL_RUNNER:
        return False
    RayCluster.from_spec(runner)
    return True


def create_ray_runner(
    spec: str,
    job: JobSpec[Result],
    make_failed: Callable[[Question, str], Result],
    identity: Mapping[str, str],
) -> RayRunner[Result]:
    """Create the runner of a job on the cluster that `spec` names; see `RayRunner`."""
    return RayRunner(RayCluster.from_spec(spec), job, make_failed, dict(identity))


def connect_early(runner: Runner | None, folder: Path) -> AbstractContextManager[Any]:
    """Connect to the cluster before a new run folder is created, so that failures leave no empty folder."""
    return runner.connect() if isinstance(runner, RayRunner) and not folder.exists() else nullcontext()


def require_name(what: str, value: Any) -> str | None:
    """Return a spec or path as text; objects of this process cannot be sent to another machine."""
    if value is None:
        return None
    if isinstance(value, str) or hasattr(value, "__fspath__"):
        return str(value)
    raise BadSetting(
        f"the Ray runner needs the {what} by name, got a {type(value).__name__}: it is created on other machines."
    )


# --- the runner -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RayRunner(Generic[Result]):
    """Runs a job on a Ray cluster.

    Attributes:
        cluster: The cluster.
        job: The job, by the names of what it needs.
        make_failed: Makes the result of a question that could not be done, from the question and the reason.
        identity: Fingerprints of model and index; a machine with others is rejected.
        sizes: How batch sizes grow.
    """

    cluster: RayCluster
    job: JobSpec[Result]
    make_failed: Callable[[Question, str], Result]
    identity: dict[str, str] = field(default_factory=dict)
    sizes: LocalRunner = BATCH_SIZES

    def run(self, questions: Sequence[Question], work: Callable[[Sequence[Question]], Any]) -> Iterator[Any]:
        """Yield results as they arrive; `work` is not called, since the workers create the job themselves."""
        if not questions:
            return
        with self.connect() as (ray, pool):
            waiting = deque(QuestionBatch((question,)) for question in questions)
            yield from RayScheduler(self, ray, pool, waiting).run()

    @contextlib.contextmanager
    def connect(self) -> Iterator[tuple[Any, WorkerPool]]:
        """Connect to the cluster and plan the workers; raises if that is not possible."""
        with self.cluster.connect() as ray:
            nodes = list_nodes(ray)
            check_versions(ray, nodes)
            yield ray, plan_workers(self.cluster.resources, nodes)


@dataclass(frozen=True)
class QuestionBatch:
    """Questions that are sent together.

    Attributes:
        questions: The questions.
        deaths: Workers that died over them.
        is_retry: Send the batch as it is, without other questions.
    """

    questions: tuple[Question, ...]
    deaths: int = 0
    is_retry: bool = False


@dataclass
class WorkerHandle:
    """A worker, its next batch size, and its current batch; None while it starts."""

    actor: Any
    size: int
    batch: QuestionBatch | None = None
    started: float = 0.0


@dataclass
class RayScheduler(Generic[Result]):
    """Keeps all workers busy and replaces those that die.

    Attributes:
        waiting: New questions, one by one, and batches to be repeated.
        busy: Workers by the Ray reference of their current call.
        deaths: Workers that died since the last finished batch.
    """

    runner: RayRunner[Result]
    ray: Any
    pool: WorkerPool
    waiting: deque[QuestionBatch]
    indexes: dict[str, Any] = field(default_factory=dict)
    busy: dict[Any, WorkerHandle] = field(default_factory=dict)
    idle: list[WorkerHandle] = field(default_factory=list)
    deaths: int = 0

    def run(self) -> Iterator[Result]:
        """Yield results in the order in which they arrive."""
        try:
            for _ in range(min(self.pool.size, len(self.waiting))):
                self._start_worker()
            while self.busy:
                [reference], _ = self.ray.wait(list(self.busy), num_returns=1)
                yield from self._receive(self.busy.pop(reference), reference)
                self._send_batches()
        finally:
            workers = [worker.actor for worker in (*self.busy.values(), *self.idle)]
            for actor in [*workers, *self.indexes.values()]:
                self.ray.kill(actor)

    def _receive(self, worker: WorkerHandle, reference: Any) -> Iterator[Result]:
        """Handle the result of a call: a value, an error, or the death of the worker."""
        from ray.exceptions import RayError

        try:
            result: WorkerResult[Any] = self.ray.get(reference)
        except RayError as error:
            yield from self._handle_death(worker, error)
            return
        if result.error is None:
            yield from self._handle_result(worker, result.value)
        elif worker.batch is not None and result.error.kind == DeviceError.__name__:  # a new process can continue
            self.ray.kill(worker.actor)
            yield from self._handle_death(worker, result.error.to_exception())
        else:
            yield from self._handle_error(worker, result.error)

    # --- workers ----------------------------------------------------------------------------------

    @property
    def _environment(self) -> WorkerEnvironment:
        return WorkerEnvironment(str(Path.cwd()), self.pool.gpus)

    def _start_worker(self) -> None:
        actor_class = self.ray.remote(RayWorker).options(
            num_cpus=self.pool.cpus, num_gpus=self.pool.gpus, max_restarts=0, scheduling_strategy="SPREAD"
        )
        worker = WorkerHandle(actor_class.remote(), self.runner.sizes.first)
        self.busy[worker.actor.get_node.remote()] = worker

    def _create_job(self, worker: WorkerHandle, node: str) -> None:
        index = self._get_index(node) if self.runner.job.index else None
        self.busy[worker.actor.create_job.remote(self.runner.job, self._environment, index)] = worker

    def _get_index(self, node: str) -> Any:
        """Return the index actor of a machine; Ray restarts it if it dies, and repeats its calls."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if node not in self.indexes:
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            actor_class = self.ray.remote(SharedIndex).options(
                num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=strategy
            )
            self.indexes[node] = actor_class.remote(self.runner.job.index, self._environment)
        return self.indexes[node]

    def _handle_death(self, worker: WorkerHandle, error: Exception) -> Iterator[Result]:
        """Replace a dead worker and run its batch again; raise after too many deaths in a row."""
        reason = " ".join(str(error).split())
        self.deaths += 1
        if self.deaths >= (MAX_STARTUP_DEATHS if worker.batch is None else MAX_DEATHS + self.pool.size):
            raise ModelError(
                f"{self.deaths} workers died in a row on the Ray cluster without finishing a batch: {reason[:300]}. "
                "The usual cause is too little memory: use fewer workers (runner='ray:...?workers=1')."
            )
        log.warning("a worker died; a new one takes over its questions")
        if worker.batch is not None:
            yield from self._retry(worker.batch, reason)
        if self.waiting:
            self._start_worker()

    def _retry(self, batch: QuestionBatch, reason: str) -> Iterator[Result]:
        """Run a batch again in halves, until the question that kills workers is alone and fails."""
        if len(batch.questions) == 1 and batch.deaths + 1 >= MAX_TRIES:
            message = f"{MAX_TRIES} workers died over this question: {reason[:200]}"
            yield self.runner.make_failed(batch.questions[0], message)
            return
        middle = (len(batch.questions) + 1) // 2
        deaths = batch.deaths + 1 if len(batch.questions) == 1 else 0
        halves = (batch.questions[:middle], batch.questions[middle:])
        self.waiting.extendleft(QuestionBatch(half, deaths, is_retry=True) for half in reversed(halves) if half)

    # --- results ----------------------------------------------------------------------------------

    def _handle_result(self, worker: WorkerHandle, value: Any) -> Iterator[Result]:
        """Handle what a worker returned: its machine, the identity of its job, or the result of a batch."""
        if isinstance(value, str) and worker.batch is None:
            self._create_job(worker, value)
            return
        if worker.batch is None:
            self._check_identity(value)
        else:
            self.deaths = 0
            seconds = time.perf_counter() - worker.started
            worker.size = self.runner.sizes.next_size(len(worker.batch.questions), seconds)
            yield value
        self.idle.append(worker)

    def _check_identity(self, identity: Mapping[str, str]) -> None:
        """Raise BadSetting if a worker has another model or index than this machine."""
        differences = [
            f"its {name} is {identity.get(name)}, not {expected}"
            for name, expected in self.runner.identity.items()
            if identity.get(name) != expected
        ]
        if differences:
            raise BadSetting(
                f"a machine of the Ray cluster has other files than this one: {'; '.join(differences)}. "
                "Put the same model and index in the same place on all of them."
            )

    def _handle_error(self, worker: WorkerHandle, error: WorkerError) -> Iterator[Result]:
        """Handle an error of a worker: stop the run, or narrow it down to single questions."""
        if worker.batch is None or error.is_knowgate_error:  # the job cannot start, or every question would fail
            if error.is_knowgate_error:
                raise error.to_exception()
            raise KnowgateError(f"a Ray worker cannot start: {error.message}")
        if len(worker.batch.questions) == 1:
            yield self.runner.make_failed(worker.batch.questions[0], error.message)
        else:
            questions = reversed(worker.batch.questions)
            self.waiting.extendleft(QuestionBatch((question,), is_retry=True) for question in questions)
        self.idle.append(worker)

    def _send_batches(self) -> None:
        """Send waiting batches to idle workers; other workers stay, since a batch may come back."""
        while self.waiting and self.idle:
            worker = self.idle.pop()
            worker.batch, worker.started = self._take_batch(worker.size), time.perf_counter()
            self.busy[worker.actor.run.remote(worker.batch.questions)] = worker

    def _take_batch(self, size: int) -> QuestionBatch:
        """Take a batch to be repeated, or new questions; near the end, only this worker's share of them."""
        first = self.waiting.popleft()
        if first.is_retry:
            return first
        size = min(size, -(-(len(self.waiting) + 1) // self.pool.size))
        questions = [*first.questions]
        while len(questions) < size and self.waiting and not self.waiting[0].is_retry:
            questions += self.waiting.popleft().questions
        return QuestionBatch(tuple(questions))
