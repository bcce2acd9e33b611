"""Code that runs on the machines of a Ray cluster: workers that hold the LLM, and one shared index per machine.

`ray_runner` turns these classes into Ray actors. Errors are sent as text, because the other side may not be able to
unpickle them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from knowgate import errors
from knowgate.errors import KnowgateError
from knowgate.retrieval import as_retriever
from knowgate.types import Passage, Question, Result, Retriever

JobResult = TypeVar("JobResult", covariant=True)


class Job(Protocol[JobResult]):
    """Work on batches of questions; `identity` has the fingerprints of its model and index."""

    @property
    def identity(self) -> dict[str, str]: ...

    def __call__(self, questions: Sequence[Question]) -> JobResult: ...


class JobSpec(Protocol[JobResult]):
    """A job by the names of what it needs, so that it can be sent to other machines and created there."""

    @property
    def index(self) -> str | None: ...

    def create(self, retriever: Retriever | None) -> Job[JobResult]:
        """Create the job; `retriever` searches the index if the spec names one."""
        ...


@dataclass(frozen=True)
class WorkerEnvironment:
    """Working directory of a worker, and the GPUs that it may use."""

    folder: str
    gpus: float

    def activate(self) -> None:
        """Change to the folder of the caller, so that relative paths work, and hide GPUs that are not shared."""
        if Path(self.folder).is_dir():
            os.chdir(self.folder)
        if not self.gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""


@dataclass(frozen=True)
class WorkerError:
    """An error as text.

    Attributes:
        message: Message of the error.
        kind: Name of its class.
        is_knowgate_error: Whether it is one of knowgate's own errors, whose messages are meant for users.
    """

    message: str
    kind: str = ""
    is_knowgate_error: bool = False

    def to_exception(self) -> KnowgateError:
        """Recreate the error on this side."""
        kind = getattr(errors, self.kind, KnowgateError)
        error: KnowgateError = kind.__new__(kind)
        KnowgateError.__init__(error, self.message)
        return error


@dataclass(frozen=True)
class WorkerResult(Generic[Result]):
    """The result of a call, or the error that it raised."""

    value: Result | None = None
    error: WorkerError | None = None


def run_safely(work: Callable[[], Result]) -> WorkerResult[Result]:
    """Call a function and return its result or its error."""
    try:
        return WorkerResult(work())
    except KnowgateError as error:
        return WorkerResult(error=WorkerError(str(error), type(error).__name__, is_knowgate_error=True))
    except Exception as error:  # noqa: BLE001 - any error becomes a failed row
        return WorkerResult(error=WorkerError(f"{type(error).__name__}: {error}".rstrip(": "), type(error).__name__))


class RayWorker:
    """Holds a job with its LLM and runs one batch after another."""

    def __init__(self) -> None:
        self._job: Job[Any] | None = None

    def get_node(self) -> WorkerResult[str]:
        """Return the id of the machine that Ray placed the worker on."""
        import ray

        return run_safely(lambda: str(ray.get_runtime_context().get_node_id()))

    def create_job(
        self, spec: JobSpec[Any], environment: WorkerEnvironment, index: Any
    ) -> WorkerResult[dict[str, str]]:
        """Create the job and return its identity; `index` is the `SharedIndex` actor of the machine, or None."""
        return run_safely(lambda: self._create_job(spec, environment, index))

    def _create_job(self, spec: JobSpec[Any], environment: WorkerEnvironment, index: Any) -> dict[str, str]:
        environment.activate()
        self._job = spec.create(None if index is None else SharedIndexRetriever(index))
        return self._job.identity

    def run(self, questions: Sequence[Question]) -> WorkerResult[Any]:
        """Run the job on a batch."""
        assert self._job is not None
        job = self._job
        return run_safely(lambda: job(questions))


class SharedIndex:
    """The index of one machine, opened once for all of its workers."""

    def __init__(self, index: str, environment: WorkerEnvironment) -> None:
        self._index, self._environment = index, environment
        self._retriever: Retriever | None = None

    def describe(self) -> WorkerResult[tuple[str, str]]:
        """Return the name and fingerprint of the index."""
        return run_safely(lambda: (self._open().name, self._open().fingerprint))

    def search(self, queries: Sequence[str], k: int) -> WorkerResult[list[list[Passage]]]:
        """Search the index."""
        return run_safely(lambda: self._open().search(queries, k))

    def _open(self) -> Retriever:
        if self._retriever is None:
            self._environment.activate()
            self._retriever = as_retriever(self._index)
        return self._retriever


class SharedIndexRetriever:
    """Retriever that calls the `SharedIndex` actor of its machine."""

    def __init__(self, index: Any) -> None:
        self._index = index
        self.name, self.fingerprint = self._call(index.describe)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Search the index."""
        passages: list[list[Passage]] = self._call(self._index.search, list(queries), k)
        return passages

    def _call(self, method: Any, *arguments: Any) -> Any:
        import ray

        result = ray.get(method.remote(*arguments))
        if result.error is not None:
            raise result.error.to_exception()
        return result.value
