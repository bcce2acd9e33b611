"""Runs jobs on a Ray cluster: each worker process holds an LLM, and batches go to the next free worker.

If a worker process dies, it is replaced, and its batch is split in two halves that are run again. A question that kills
its worker even alone gets a failed result, so that every question has a result. Ray Data is not used, because it
retries whole blocks and does not say which question failed.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic

from knowgate.errors import BadSetting, DeviceError, KnowgateError, ModelError
from knowgate.labels.local_runner import LocalRunner
from knowgate.labels.ray_cluster import RayCluster, WorkerResources, check_versions, list_nodes, plan_workers
from knowgate.labels.ray_worker import JobSpec, RayWorker, SharedIndex, WorkerEnvironment, WorkerResult
from knowgate.types import Question, Result, Runner

log = logging.getLogger(__name__)
LOCAL_RUNNER = "local"
MAX_STARTUP_DEATHS = 3  # workers that may die in a row while they start
MAX_DEATHS = 10  # workers that may die in a row over their questions, in addition to one per worker
MAX_TRIES = 2  # workers that a single question may kill before it becomes a failed row
BATCH_SIZES = LocalRunner(first=4, largest=1_024)  # only its rule for growing batch sizes is used


# --- runners by spec ------------------------------------------------------------------------------


def is_remote_runner(runner: str | Runner | None) -> bool:
    """Return whether a runner is the spec of a Ray cluster, such as 'ray:local'."""
    if not isinstance(runner, str) or runner == LOCAL_RUNNER:
        return False
    RayCluster.from_spec(runner)  # raises BadSetting if there is no such runner
    return True


def create_ray_runner(
    spec: str, job: JobSpec[Result], make_failed: Callable[[Question, str], Result], identity: Mapping[str, str]
) -> RayRunner[Result]:
    """Create a runner for a job on a Ray cluster.

    Args:
        spec: The cluster, such as 'ray:local?workers=2' or 'ray:HOST:PORT'.
        job: Description of the job, from which each worker creates it.
        make_failed: Makes the result of a question that failed, from the question and the reason.
        identity: Expected fingerprints of the model, prompts and index. The run stops if a worker has loaded others.
    """
    return RayRunner(RayCluster.from_spec(spec), job, make_failed, dict(identity))


def connect_early(runner: Runner | None, folder: Path) -> AbstractContextManager[Any]:
    """Connect to the Ray cluster before a new run folder is created.

    A failed connection then leaves no empty folder.
    """
    return runner.connect() if isinstance(runner, RayRunner) and not folder.exists() else nullcontext()


def require_name(what: str, value: Any) -> str | None:
    """Return a spec or path as text, or None. Other objects cannot be sent to another machine."""
    if value is None:
        return None
    if isinstance(value, str) or hasattr(value, "__fspath__"):
        return str(value)
    raise BadSetting(
        f"the Ray runner cannot send a {type(value).__name__} object to other machines. Give the {what} as a name or a path."
    )


# --- the runner -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RayRunner(Generic[Result]):
    """Runs a job, such as labeling, on a Ray cluster.

    Attributes:
        cluster: The cluster.
        job: Description of the job, from which each worker creates it.
        make_failed: Makes the result of a question that failed, from the question and the reason.
        identity: Expected fingerprints of the model, prompts and index. The run stops if a worker has loaded others.
        batch_sizes: Local runner whose rule for growing batches is used here, too.
    """

    cluster: RayCluster
    job: JobSpec[Result]
    make_failed: Callable[[Question, str], Result]
    identity: dict[str, str] = field(default_factory=dict)
    batch_sizes: LocalRunner = BATCH_SIZES

    def run(self, questions: Sequence[Question], work: Callable[[Sequence[Question]], Any]) -> Iterator[Any]:
        """Yield results in the order of arrival.

        All runners take `work`. This one does not use it, because each worker makes its own from the job description.
        """
        if not questions:
            return
        with self.connect() as (ray, pool):
            yield from RayScheduler(self, ray, pool, deque(questions)).run()

    @contextlib.contextmanager
    def connect(self) -> Iterator[tuple[Any, WorkerResources]]:
        """Connect to the cluster, check its machines, and yield the `ray` module with the planned workers."""
        with self.cluster.connect() as ray:
            nodes = list_nodes(ray)
            check_versions(ray, nodes)
            yield ray, plan_workers(self.cluster.resources, nodes)


@dataclass(frozen=True)
class QuestionBatch:
    """Questions sent to a worker together.

    Attributes:
        questions: The questions.
        deaths: Number of workers that died while they ran this question, if the batch is a single question.
    """

    questions: tuple[Question, ...]
    deaths: int = 0


@dataclass
class WorkerHandle:
    """The state of one worker.

    Attributes:
        actor: Ray actor of the worker.
        size: Number of questions in its next batch.
        batch: Batch that the worker is running; None while it starts.
        started: When the batch was sent, in seconds of `time.perf_counter`.
    """

    actor: Any
    size: int
    batch: QuestionBatch | None = None
    started: float = 0.0


@dataclass
class RayScheduler(Generic[Result]):
    """Sends batches to workers, collects the results, and replaces dead workers.

    Attributes:
        runner: The runner, with the description of the job.
        ray: The `ray` module, connected to the cluster.
        pool: The number of workers to start, and the resources of each.
        waiting: Questions that were not sent to a worker yet.
        retries: Batches to run again, which are sent first, as they are.
        indexes: Index actor of each machine, by the machine's id.
        busy: Workers that are running a call, by the Ray reference of that call.
        idle: Workers that wait for a batch.
        deaths: Number of workers that died since a batch was last finished.
    """

    runner: RayRunner[Result]
    ray: Any
    pool: WorkerResources
    waiting: deque[Question]
    retries: deque[QuestionBatch] = field(default_factory=deque)
    indexes: dict[str, Any] = field(default_factory=dict)
    busy: dict[Any, WorkerHandle] = field(default_factory=dict)
    idle: list[WorkerHandle] = field(default_factory=list)
    deaths: int = 0

    def run(self) -> Iterator[Result]:
        """Yield results in the order of arrival, and stop all workers at the end."""
        try:
            for _ in range(min(self.pool.workers, len(self.waiting))):
                self._start_worker()
            while self.busy:
                [call], _ = self.ray.wait(list(self.busy), num_returns=1)  # the first call that ends
                worker = self.busy.pop(call)
                yield from self._receive(worker, call)
                self._send_batches()
        finally:
            worker_actors = [worker.actor for worker in (*self.busy.values(), *self.idle)]
            for actor in [*worker_actors, *self.indexes.values()]:
                self.ray.kill(actor)

    def _receive(self, worker: WorkerHandle, call: Any) -> Iterator[Result]:
        """Handle the end of a call: the worker returned a result, reported an error, or died.

        A worker whose GPU failed is killed, and counts as dead.
        """
        from ray.exceptions import RayError

        try:
            result: WorkerResult[Any] = self.ray.get(call)
        except RayError as error:
            yield from self._handle_death(worker, error)
            return
        if result.error is None:
            yield from self._handle_result(worker, result.value)
        elif worker.batch is not None and result.error_class == DeviceError.__name__:
            self.ray.kill(worker.actor)
            yield from self._handle_death(worker, result.to_exception())
        else:
            yield from self._handle_error(worker, result)

    # --- workers ----------------------------------------------------------------------------------

    @property
    def _environment(self) -> WorkerEnvironment:
        """The working directory of this process, which workers also use, and whether they use a GPU."""
        return WorkerEnvironment(str(Path.cwd()), has_gpu=bool(self.pool.gpus))

    def _start_worker(self) -> None:
        """Start a worker, and ask it for the id of its machine."""
        actor_class = self.ray.remote(RayWorker).options(
            num_cpus=self.pool.cpus, num_gpus=self.pool.gpus, max_restarts=0, scheduling_strategy="SPREAD"
        )
        worker = WorkerHandle(actor_class.remote(), self.runner.batch_sizes.first)
        call = worker.actor.get_node.remote()
        self.busy[call] = worker

    def _create_job(self, worker: WorkerHandle, node: str) -> None:
        """Tell a worker to create its job, which loads the model. All workers of a machine share one index."""
        index = self._get_index(node) if self.runner.job.index else None
        call = worker.actor.create_job.remote(self.runner.job, self._environment, index)
        self.busy[call] = worker

    def _get_index(self, node: str) -> Any:
        """Return the index actor of a machine. The first use starts the actor."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if node not in self.indexes:
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            actor_class = self.ray.remote(SharedIndex).options(
                num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=strategy
            )
            self.indexes[node] = actor_class.remote(self.runner.job.index, self._environment)
        return self.indexes[node]

    def _handle_death(self, worker: WorkerHandle, error: Exception) -> Iterator[Result]:
        """Replace a dead worker, and schedule the questions of its batch again.

        Raises:
            ModelError: Too many workers died in a row, without finishing a batch.
        """
        reason = " ".join(str(error).split())
        self.deaths += 1
        max_deaths = MAX_STARTUP_DEATHS if worker.batch is None else MAX_DEATHS + self.pool.workers
        if self.deaths >= max_deaths:
            raise ModelError(
                f"{self.deaths} Ray workers died in a row: {reason[:300]}. The usual cause is too little memory. Use fewer "
                "workers: runner='ray:...?workers=1'"
            )
        log.warning("a worker died; a new one takes over its questions")
        if worker.batch is not None:
            yield from self._retry(worker.batch, reason)
        if self.waiting or self.retries:
            self._start_worker()

    def _retry(self, batch: QuestionBatch, reason: str) -> Iterator[Result]:
        """Schedule the two halves of a batch again, to find the question that kills workers.

        A single question fails after `MAX_TRIES`.
        """
        if len(batch.questions) > 1:
            middle = (len(batch.questions) + 1) // 2
            self.retries += [QuestionBatch(batch.questions[:middle]), QuestionBatch(batch.questions[middle:])]
        elif batch.deaths + 1 < MAX_TRIES:
            self.retries.append(QuestionBatch(batch.questions, batch.deaths + 1))
        else:
            message = f"{MAX_TRIES} workers died over this question: {reason[:200]}"
            yield self.runner.make_failed(batch.questions[0], message)

    # --- results ----------------------------------------------------------------------------------

    def _handle_result(self, worker: WorkerHandle, value: Any) -> Iterator[Result]:
        """Handle the result of a worker: its machine id (text), then its fingerprints (dict), then results of batches."""
        if worker.batch is not None:  # `value` is the result of this batch
            self.deaths = 0
            seconds = time.perf_counter() - worker.started
            worker.size = self.runner.batch_sizes.next_size(len(worker.batch.questions), seconds)
            yield value
        elif isinstance(value, str):  # the id of its machine
            self._create_job(worker, node=value)
            return  # it is not idle yet: it loads the model
        else:
            self._check_identity(value)
        self.idle.append(worker)

    def _check_identity(self, identity: Mapping[str, str]) -> None:
        """Raise BadSetting if a worker has loaded another model, prompts or index."""
        differences = [
            f"the fingerprint of its {name} is {identity.get(name)} instead of {expected}"
            for name, expected in self.runner.identity.items()
            if identity.get(name) != expected
        ]
        if differences:
            raise BadSetting(
                f"a machine of the Ray cluster has other files than this one: {'; '.join(differences)}. Copy the same model and "
                "index to the same path on all machines."
            )

    def _handle_error(self, worker: WorkerHandle, result: WorkerResult[Any]) -> Iterator[Result]:
        """Handle an error of a living worker.

        An error of knowgate, such as BadSetting, ends the run. After another error, the questions of the batch are run one
        by one.
        """
        reason = str(result.error)
        if result.error_class:
            raise result.to_exception()
        if worker.batch is None:  # it failed before its first batch
            raise KnowgateError(
                f"a Ray worker cannot start: {reason.rstrip('.')}. Check that its machine has the same model, index "
                "and packages."
            )
        if len(worker.batch.questions) == 1:
            yield self.runner.make_failed(worker.batch.questions[0], reason)
        else:
            self.retries += [QuestionBatch((question,)) for question in worker.batch.questions]
        self.idle.append(worker)

    def _send_batches(self) -> None:
        """Send waiting batches to idle workers. Workers without a batch stay idle, in case a batch must be repeated."""
        while self.idle and (self.waiting or self.retries):
            worker = self.idle.pop()
            worker.batch = self._take_batch(worker.size)
            worker.started = time.perf_counter()
            call = worker.actor.run.remote(worker.batch.questions)
            self.busy[call] = worker

    def _take_batch(self, size: int) -> QuestionBatch:
        """Take the next batch: one to repeat, or up to `size` new questions.

        The last questions are shared among all workers.
        """
        if self.retries:
            return self.retries.popleft()
        share_of_worker = math.ceil(len(self.waiting) / self.pool.workers)
        n_questions = min(size, share_of_worker)
        return QuestionBatch(tuple(self.waiting.popleft() for _ in range(n_questions)))
