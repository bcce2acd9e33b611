"""Code that runs on the machines of a Ray cluster: workers that hold the LLM, and one shared index per machine.

`ray_runner` turns these classes into Ray actors. Errors are sent back as text, because exceptions of other libraries
may not be importable on the machine that receives them.
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
    """Work on a batch of questions, such as labeling; `identity` holds the fingerprints of its model and index."""

    @property
    def identity(self) -> dict[str, str]: ...

    def __call__(self, questions: Sequence[Question]) -> JobResult: ...


class JobSpec(Protocol[JobResult]):
    """Description of a job that can be sent to another machine, which creates the job from it.

    `index` is the path or spec of the index that the job searches; None if it searches none.
    """

    @property
    def index(self) -> str | None: ...

    def create(self, retriever: Retriever | None) -> Job[JobResult]:
        """Create the job on this machine; `retriever` searches the index and is None if the job has none."""
        ...


@dataclass(frozen=True)
class WorkerEnvironment:
    """Working directory of a worker, and the number of GPUs that it may use."""

    folder: str
    gpus: float

    def activate(self) -> None:
        """Change to the working directory of the caller, if it exists here, so that relative paths work.

        A worker without GPUs must not see any, so they are hidden.
        """
        if Path(self.folder).is_dir():
            os.chdir(self.folder)
        if not self.gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""


@dataclass(frozen=True)
class WorkerError:
    """An error of a worker, as text.

    Attributes:
        message: Message of the error.
        kind: Name of the exception class.
        is_knowgate_error: Whether the exception class is one of knowgate, whose messages are written for users.
    """

    message: str
    kind: str = ""
    is_knowgate_error: bool = False

    def to_exception(self) -> KnowgateError:
        """Return an exception of the same class, with the same message.

        The constructor of the class may need other arguments, so it is not called.
        """
        kind = getattr(errors, self.kind, KnowgateError)
        error: KnowgateError = kind.__new__(kind)
        KnowgateError.__init__(error, self.message)
        return error


@dataclass(frozen=True)
class WorkerResult(Generic[Result]):
    """The return value of a call to a worker, or the error that the call raised."""

    value: Result | None = None
    error: WorkerError | None = None


def run_safely(work: Callable[[], Result]) -> WorkerResult[Result]:
    """Call a function on a worker and return its result or its error. Never raises, so that the worker survives."""
    try:
        return WorkerResult(work())
    except KnowgateError as error:
        return WorkerResult(error=WorkerError(str(error), type(error).__name__, is_knowgate_error=True))
    except Exception as error:  # noqa: BLE001 - any error becomes a failed row
        return WorkerResult(error=WorkerError(f"{type(error).__name__}: {error}".rstrip(": "), type(error).__name__))


class RayWorker:
    """Holds a job with its loaded LLM, and runs one batch after another."""

    def __init__(self) -> None:
        self._job: Job[Any] | None = None

    def get_node(self) -> WorkerResult[str]:
        """Return the id of the machine that Ray placed the worker on."""
        import ray

        return run_safely(lambda: str(ray.get_runtime_context().get_node_id()))

    def create_job(
        self, spec: JobSpec[Any], environment: WorkerEnvironment, index: Any
    ) -> WorkerResult[dict[str, str]]:
        """Create the job and return the fingerprints of its model and index.

        Args:
            spec: Description of the job.
            environment: Working directory and GPUs of the worker.
            index: `SharedIndex` actor of this machine; None if the job searches no index.
        """
        return run_safely(lambda: self._create_job(spec, environment, index))

    def _create_job(self, spec: JobSpec[Any], environment: WorkerEnvironment, index: Any) -> dict[str, str]:
        """Create the job and return its fingerprints. `create_job` calls this, and returns errors as text."""
        environment.activate()
        self._job = spec.create(None if index is None else SharedIndexRetriever(index))
        return self._job.identity

    def run(self, questions: Sequence[Question]) -> WorkerResult[Any]:
        """Run the job on a batch of questions; `create_job` must have been called."""
        assert self._job is not None
        job = self._job
        return run_safely(lambda: job(questions))


class SharedIndex:
    """The index of one machine, loaded once (at the first search) and shared by all workers on it."""

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
        """Return the index, which is loaded on the first call."""
        if self._retriever is None:
            self._environment.activate()
            self._retriever = as_retriever(self._index)
        return self._retriever


class SharedIndexRetriever:
    """Retriever that sends its searches to the `SharedIndex` actor of the same machine."""

    def __init__(self, index: Any) -> None:
        self._index = index
        self.name, self.fingerprint = self._call(index.describe)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Search the index."""
        return list(self._call(self._index.search, list(queries), k))

    def _call(self, method: Any, *arguments: Any) -> Any:
        """Call a method of the index actor; raises the error that it reports."""
        import ray

        result = ray.get(method.remote(*arguments))
        if result.error is not None:
            raise result.error.to_exception()
        return result.value
