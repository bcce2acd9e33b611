"""Code that runs on the machines of a Ray cluster: workers that hold the LLM, and one shared index per machine.

`ray_runner` turns these classes into Ray actors. Errors are sent back as text, because exceptions of other libraries
may not be importable on the machine that receives them.
"""

from __future__ import annotations

import functools
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
    """Work on a batch of questions, such as labeling. `identity` has the fingerprints of its model and index."""

    @property
    def identity(self) -> dict[str, str]: ...

    def __call__(self, questions: Sequence[Question]) -> JobResult: ...


class JobSpec(Protocol[JobResult]):
    """Description of a job that can be sent to another machine.

    `index` is the path or spec of the searched index, or None.
    """

    @property
    def index(self) -> str | None: ...

    def create(self, retriever: Retriever | None) -> Job[JobResult]:
        """Create the job on this machine; `retriever` searches the index and is None if the job has none."""
        ...


@dataclass(frozen=True)
class WorkerEnvironment:
    """Working directory of a worker, and whether it may use a GPU."""

    folder: str
    has_gpu: bool

    def activate(self) -> None:
        """Apply the environment to this process.

        Sets the caller's working directory, and hides GPUs from workers without one.
        """
        if Path(self.folder).is_dir():
            os.chdir(self.folder)
        if not self.has_gpu:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""


@dataclass(frozen=True)
class WorkerResult(Generic[Result]):
    """The result of a call to a worker, or its error.

    Attributes:
        value: Return value of the call.
        error: Message of the error; None if the call succeeded.
        error_class: Name of the error's class if it is one of knowgate's; "" for other errors.
    """

    value: Result | None = None
    error: str | None = None
    error_class: str = ""

    def to_exception(self) -> KnowgateError:
        """Return the error as an exception of its class, with its message."""
        error_class = getattr(errors, self.error_class, KnowgateError)
        # The constructor of the class may need arguments other than a message, so it is not called.
        error: KnowgateError = error_class.__new__(error_class)
        KnowgateError.__init__(error, str(self.error))
        return error


def return_errors(method: Callable[..., Any]) -> Callable[..., WorkerResult[Any]]:
    """Decorate a method of a worker to return errors instead of raising them."""

    @functools.wraps(method)
    def call(*arguments: Any) -> WorkerResult[Any]:
        """Call the method, and return its result, or its error as text."""
        try:
            return WorkerResult(method(*arguments))
        except KnowgateError as error:
            return WorkerResult(error=str(error), error_class=type(error).__name__)
        except Exception as error:  # noqa: BLE001 - any error becomes a failed row
            return WorkerResult(error=f"{type(error).__name__}: {error}".rstrip(": "))

    return call


class RayWorker:
    """Holds a job with its loaded LLM, and runs one batch after another."""

    def __init__(self) -> None:
        self._job: Job[Any] | None = None

    @return_errors
    def get_node(self) -> str:
        """Return the id of the worker's machine."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    @return_errors
    def create_job(self, spec: JobSpec[Any], environment: WorkerEnvironment, index: Any) -> dict[str, str]:
        """Create the job and return the fingerprints of its model and index.

        Args:
            spec: Description of the job.
            environment: Working directory and GPUs of the worker.
            index: `SharedIndex` actor of this machine; None if the job searches no index.
        """
        environment.activate()
        self._job = spec.create(None if index is None else SharedIndexRetriever(index))
        return self._job.identity

    @return_errors
    def run(self, questions: Sequence[Question]) -> Any:
        """Run the job on a batch of questions. Call `create_job` first."""
        assert self._job is not None
        return self._job(questions)


class SharedIndex:
    """The index of one machine, shared by all its workers. The first use loads it."""

    def __init__(self, index: str, environment: WorkerEnvironment) -> None:
        self._index = index
        self._environment = environment

    @return_errors
    def describe(self) -> tuple[str, str]:
        """Return the name and fingerprint of the index."""
        return self._retriever.name, self._retriever.fingerprint

    @return_errors
    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Search the index."""
        return self._retriever.search(queries, k)

    @functools.cached_property
    def _retriever(self) -> Retriever:
        self._environment.activate()
        return as_retriever(self._index)


class SharedIndexRetriever:
    """Retriever that searches in the `SharedIndex` of the same machine."""

    def __init__(self, index: Any) -> None:
        self._index = index
        self.name, self.fingerprint = self._call(index.describe)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Search the index."""
        return list(self._call(self._index.search, list(queries), k))

    def _call(self, method: Any, *arguments: Any) -> Any:
        """Call a method of the index actor, and raise any reported error."""
        import ray

        result = ray.get(method.remote(*arguments))
        if result.error is not None:
            raise result.to_exception()
        return result.value
