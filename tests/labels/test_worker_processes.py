"""Worker processes search and grade as this process does, and never outlive it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from knowgate.errors import BrokenIndex
from knowgate.labels import worker_processes
from knowgate.labels.grading import StringGrader
from knowgate.labels.labeler import Labeler
from knowgate.labels.local_runner import LabelingPipeline, LocalRunner
from knowgate.labels.options import LabelOptions
from knowgate.labels.passages import PassageFinder
from knowgate.labels.worker_processes import WorkerGrader, WorkerProcesses, count_workers
from knowgate.models.fake import FakeModel
from knowgate.retrieval import load_retriever
from knowgate.retrieval.index import build_index
from knowgate.types import Passage, Question
from tests.support.processes import child, until
from tests.support.retrieval_fakes import build_bm25

CITIES = ["Paris", "Lima", "Oslo", "Rome", "Kraków", "北京", "Quito"]
QUESTIONS = [
    Question(f"Which river flows through {CITIES[i % 7]} {i}?", id=str(i), answers=(f"River {i % 5}", CITIES[i % 7]))
    for i in range(50)
]


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for i, city in enumerate(CITIES):
        (folder / f"{i}.txt").write_text(f"The river {i} flows through {city}. \ud7ff" * 3, encoding="utf-8")
    build_index(folder, folder.parent / "index-of-cities")
    return folder.parent / "index-of-cities"


@pytest.fixture
def start_workers(index):
    started = []

    def start(finder=None, count=2):
        workers = WorkerProcesses(finder or make_finder(index), count)
        started.append(workers)
        workers.start()
        until(lambda: workers.is_ready)
        return workers

    yield start
    for workers in started:
        workers.close()


@pytest.fixture(scope="module")
def shared_workers(index):
    """Two workers for tests that leave them as they are. They find two passages."""
    workers = WorkerProcesses(make_finder(index, k=2), 2)
    workers.start()
    until(lambda: workers.is_ready)
    yield workers
    workers.close()


def make_finder(index, **plan):
    return PassageFinder(LabelOptions(**plan), load_retriever(str(index)))


def forbid(*_):
    raise AssertionError("this process must not do the work itself")


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_workers_find_the_same_passages_in_the_same_order(shared_workers, index, monkeypatch):
    sizes, finder = [1, 2, 3, 50], make_finder(index, k=2)
    expected = [finder.find(QUESTIONS[:n]) for n in sizes]
    assert shared_workers.find([]) == []
    monkeypatch.setattr(PassageFinder, "find", forbid)
    assert [shared_workers.find(QUESTIONS[:n]) for n in sizes] == expected


def test_workers_find_all_candidates_of_a_reranker(start_workers, index, monkeypatch):
    finder = replace(make_finder(index, k=1, candidates=4), reranker=object())
    expected = finder.find(QUESTIONS)
    assert {len(result.passages) for result in expected} == {4}
    workers = start_workers(finder, count=1)
    monkeypatch.setattr(PassageFinder, "find", forbid)
    assert workers.find(QUESTIONS) == expected


def test_workers_give_the_same_grades(shared_workers, monkeypatch):
    choice = Question("Which?", choices=("red", "blue"), meta={"gold_letter": "b", "other": object()})
    questions = [*QUESTIONS, Question("Who?"), choice, Question("River 1?", answers=("River 1",))]
    pairs = [(text, q) for q in questions for text in ("River 1", "It is Paris.", "B. blue", "\udc80 River 1", "")]
    answers, owners = [text for text, _ in pairs], [question for _, question in pairs]
    names = ("exact", "contains", "choice")
    expected = [StringGrader(name).grade(answers, owners) for name in names]
    assert all({grade.correct for grade in grades} == {True, False, None} for grades in expected)
    monkeypatch.setattr(StringGrader, "grade", forbid)
    assert [WorkerGrader(name, workers=shared_workers).grade(answers, owners) for name in names] == expected


@pytest.fixture
def with_workers(monkeypatch):
    monkeypatch.setattr(worker_processes, "MIN_QUESTIONS", 10)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4), raising=False)


@pytest.mark.usefixtures("with_workers")
def test_rows_of_a_run_are_the_same_with_and_without_workers(index, monkeypatch):
    labeler = Labeler(
        FakeModel(), StringGrader(), LabelOptions(samples=3, max_tokens=4), retriever=load_retriever(str(index))
    )
    expected = [replace(row, seconds=0.0) for row in labeler.label(QUESTIONS).rows]
    parts, tasks, run = [], [], WorkerProcesses.run

    def watched(self, task, items):
        results = run(self, task, items)
        tasks.append((task, results is not None))
        return results

    monkeypatch.setattr(WorkerProcesses, "run", watched)
    with LabelingPipeline(labeler, QUESTIONS, parts.append) as work:
        until(lambda: work._workers.is_ready)
        list(LocalRunner(first=7, largest=7).run(QUESTIONS, work))
        pids = [worker.pid for worker in work._workers._workers]
    assert [replace(row, seconds=0.0) for part in parts for row in part.rows] == expected
    assert ("grade", True) in tasks
    assert len(pids) == 2
    assert not any(map(is_running, pids))


@pytest.mark.usefixtures("with_workers")
def test_only_long_runs_on_several_cores_with_an_index_on_disk_have_workers(index, monkeypatch):
    finder = make_finder(index)
    assert count_workers(finder, 10) == 2
    assert count_workers(finder, 9) == 0
    assert count_workers(replace(finder, retriever=None), 10) == 0
    assert count_workers(make_finder(index, closed_book=True), 10) == 0
    assert count_workers(make_finder(index, iterative=True), 10) == 0
    assert count_workers(replace(finder, retriever=build_bm25([Passage("1", "a text")])), 10) == 0
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    assert count_workers(finder, 10) == worker_processes.MAX_WORKERS
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3), raising=False)
    assert count_workers(finder, 10) == 0


def test_this_process_does_the_work_of_a_worker_that_died(start_workers, index):
    workers = start_workers()
    workers._workers[1].kill()
    assert workers.find(QUESTIONS) == make_finder(index).find(QUESTIONS)
    assert not workers.is_ready
    assert all(worker.poll() is not None for worker in workers._workers)


def test_an_error_is_that_of_a_search_in_this_process(start_workers, monkeypatch):
    def fail(*_):
        raise BrokenIndex("passage 3 is damaged.")

    workers = start_workers(count=1)
    workers._workers[0].stdin.write('["search", [7]]\n')  # the worker fails, as it would at a damaged passage
    monkeypatch.setattr(PassageFinder, "find", fail)
    with pytest.raises(BrokenIndex, match="passage 3"):
        workers.find(QUESTIONS)


def test_replies_that_were_not_read_are_never_taken_for_those_of_another_request(start_workers, index, monkeypatch):
    def interrupt(line):
        raise KeyboardInterrupt

    workers = start_workers(count=1)
    monkeypatch.setattr(worker_processes, "json", SimpleNamespace(dumps=json.dumps, loads=interrupt))
    with pytest.raises(KeyboardInterrupt):
        workers.find(QUESTIONS[:5])
    monkeypatch.undo()
    assert workers.find(QUESTIONS[5:]) == make_finder(index).find(QUESTIONS[5:])
    assert not workers.is_ready


def test_workers_that_cannot_open_the_same_index_are_not_used(index, monkeypatch):
    finder = make_finder(index)
    finder.retriever.fingerprint = "another"
    workers = WorkerProcesses(finder, 1)
    workers._start()
    assert not workers.is_ready
    assert workers.find(QUESTIONS) == finder.find(QUESTIONS)
    monkeypatch.setattr(worker_processes, "COMMAND", ("no-such-python",))
    workers = WorkerProcesses(finder, 1)
    workers._start()
    assert not workers.is_ready


def test_closing_while_the_workers_start_leaves_none_behind(index):
    workers = WorkerProcesses(make_finder(index), 2)
    workers.start()
    workers.close()
    until(lambda: all(worker.poll() is not None for worker in workers._workers))
    assert not workers.is_ready


SCRIPT = """
import os, sys, time
from knowgate.labels.options import LabelOptions
from knowgate.labels.passages import PassageFinder
from knowgate.labels.worker_processes import WorkerProcesses
from knowgate.retrieval import load_retriever
workers = WorkerProcesses(PassageFinder(LabelOptions(), load_retriever(sys.argv[1])), 2)
workers.start()
while not workers.is_ready:
    time.sleep(0.01)
try:
    print(*(worker.pid for worker in workers._workers), flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print(all(worker.poll() is None for worker in workers._workers), flush=True)
"""


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_this_process_and_ctrl_c_does_not_reach_them(index, number):
    with child([sys.executable, "-c", SCRIPT, str(index)], stdout=subprocess.PIPE, text=True) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(is_running, pids))
        os.killpg(process.pid, number)  # as the terminal does for Ctrl-C
        if number == signal.SIGINT:
            assert process.stdout.readline() == "True\n"
        process.wait()
        until(lambda: not any(map(is_running, pids)))
