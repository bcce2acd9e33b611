"""What runs on the machines of a Ray cluster: workers that hold the LLM, and one shelf per machine with the index.

Nothing here is a Ray class by itself: `runner` makes actors of them. Errors travel as words, not as objects, since the
other side may not be able to read them.
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
from knowgate.retrieval.passages import find_texts_containing
from knowgate.types import Passage, Question, Result, Retriever

JobResult = TypeVar("JobResult", covariant=True)


class Job(Protocol[JobResult]):
    """Work that can begin. identity: which LLM and which index it is done with."""

    @property
    def identity(self) -> dict[str, str]: ...

    def __call__(self, questions: Sequence[Question]) -> JobResult: ...


class JobSpec(Protocol[JobResult]):
    """Work by the names of what it needs: it is sent to other machines, and made there."""

    @property
    def index(self) -> str | None: ...

    def make(self, retriever: Retriever | None) -> Job[JobResult]:
        """retriever: the index, where the recipe names one."""
        ...


@dataclass(frozen=True)
class WorkerEnvironment:
    """Where a worker is, and what it may use."""

    folder: str
    gpus: float

    def enter(self) -> None:
        """Paths in the recipe are those of whoever started the run; without a share, a GPU is not touched."""
        if Path(self.folder).is_dir():
            os.chdir(self.folder)
        if not self.gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""


@dataclass(frozen=True)
class WorkerError:
    """An error in words. foreseen: one of knowgate's own, whose words are meant for people; kind: its class."""

    message: str
    kind: str = ""
    foreseen: bool = False

    @property
    def error(self) -> KnowgateError:
        """As an error of its class, on this side."""
        kind = getattr(errors, self.kind, KnowgateError)
        made: KnowgateError = kind.__new__(kind)
        KnowgateError.__init__(made, self.message)
        return made


@dataclass(frozen=True)
class WorkerResult(Generic[Result]):
    """What came of a piece of work, or why nothing did."""

    value: Result | None = None
    fault: WorkerError | None = None


def run_safely(work: Callable[[], Result]) -> WorkerResult[Result]:
    try:
        return WorkerResult(work())
    except KnowgateError as error:
        return WorkerResult(fault=WorkerError(str(error), type(error).__name__, foreseen=True))
    except Exception as error:  # noqa: BLE001 - a failed row, whatever it was
        return WorkerResult(fault=WorkerError(f"{type(error).__name__}: {error}".rstrip(": "), type(error).__name__))


class RayWorker:
    """Holds the LLM and does one batch after another."""

    def __init__(self) -> None:
        self._work: Job[Any] | None = None

    def node(self) -> WorkerResult[str]:
        """The machine it was put on."""
        import ray

        return run_safely(lambda: str(ray.get_runtime_context().get_node_id()))

    def open(self, recipe: JobSpec[Any], place: WorkerEnvironment, shelf: Any) -> WorkerResult[dict[str, str]]:
        """Make ready; tells with which LLM and index."""
        return run_safely(lambda: self._open(recipe, place, shelf))

    def _open(self, recipe: JobSpec[Any], place: WorkerEnvironment, shelf: Any) -> dict[str, str]:
        place.enter()
        self._work = recipe.make(None if shelf is None else connect_retriever(SharedIndexRetriever(shelf)))
        return self._work.identity

    def do(self, questions: Sequence[Question]) -> WorkerResult[Any]:
        assert self._work is not None
        work = self._work
        return run_safely(lambda: work(questions))


class SharedIndex:
    """The index of one machine: opened once, however many workers search it."""

    def __init__(self, index: str, place: WorkerEnvironment) -> None:
        self._index, self._place = index, place
        self._retriever: Retriever | None = None

    def about(self) -> WorkerResult[tuple[str, str]]:
        return run_safely(lambda: (self._open().name, self._open().fingerprint))

    def search(self, queries: Sequence[str], k: int) -> WorkerResult[list[list[Passage]]]:
        return run_safely(lambda: self._open().search(queries, k))

    def find_texts(self, query: str, k: int, words: Sequence[str]) -> WorkerResult[list[str]]:
        return run_safely(lambda: find_texts_containing(self._open(), query, k, words))

    def _open(self) -> Retriever:
        if self._retriever is None:
            self._place.enter()
            self._retriever = as_retriever(self._index)
        return self._retriever


class SharedIndexRetriever:
    """The shelf of this machine, as a retriever."""

    name = fingerprint = ""

    def __init__(self, shelf: Any) -> None:
        self._shelf = shelf

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        found: list[list[Passage]] = self._ask(self._shelf.search, list(queries), k)
        return found

    def find_texts(self, query: str, k: int, words: Sequence[str]) -> list[str]:
        texts: list[str] = self._ask(self._shelf.find_texts, query, k, list(words))
        return texts

    def about(self) -> tuple[str, str]:
        told: tuple[str, str] = self._ask(self._shelf.about)
        return told

    def _ask(self, method: Any, *arguments: Any) -> Any:
        import ray

        outcome = ray.get(method.remote(*arguments))
        if outcome.fault is not None:
            raise outcome.fault.error
        return outcome.value


def connect_retriever(retriever: SharedIndexRetriever) -> SharedIndexRetriever:
    """With its name and fingerprint: those of the index that the machine has."""
    retriever.name, retriever.fingerprint = retriever.about()
    return retriever
