"""The supervisor of worker processes: replacements, pauses and the end of the server."""

import socket
from types import SimpleNamespace
from typing import ClassVar

import pytest

from knowgate.server import worker_supervisor


class FakeWorker:
    """A worker process. `exitcode` None means that it runs."""

    waits: ClassVar[list[float]] = []
    exitcode = None
    can_start = True
    pid = 1

    def __init__(self, *args):
        self.child_conn = SimpleNamespace(close=lambda: None)
        self.process = SimpleNamespace(is_alive=lambda: self.exitcode is None)

    def start(self):
        pass

    def join(self):
        pass

    def kill(self):
        self.exitcode = self.exitcode or -9

    def terminate(self):
        self.exitcode = 0

    def is_alive(self, timeout):
        return self.exitcode is None

    def is_ready(self, timeout=5):
        return self.can_start and self.exitcode is None

    def wait_until_ready(self, timeout, should_exit):
        self.waits.append(timeout)
        return self.can_start


@pytest.fixture
def supervisor(monkeypatch, tmp_path):
    """A supervisor of two fake workers."""
    monkeypatch.setattr(FakeWorker, "waits", [])
    monkeypatch.setattr(worker_supervisor, "Process", FakeWorker)
    monkeypatch.setattr(worker_supervisor.signal, "signal", lambda *args: None)
    monkeypatch.setattr(worker_supervisor.signal, "pthread_sigmask", lambda *args: None)
    listener = socket.socket()
    supervisor = worker_supervisor.WorkerSupervisor(
        SimpleNamespace(workers=2, timeout_graceful_shutdown=1), [listener], tmp_path / "problem.txt"
    )
    supervisor.processes = [FakeWorker(), FakeWorker()]
    yield supervisor
    listener.close()


@pytest.mark.parametrize("can_start", [True, False])
def test_a_worker_that_replaces_another_one_has_time_to_load_its_models(supervisor, monkeypatch, caplog, can_start):
    monkeypatch.setattr(FakeWorker, "can_start", can_start)
    old = FakeWorker()
    supervisor.processes = [old]
    supervisor.restart_all()
    assert FakeWorker.waits == [600]
    assert (supervisor.processes[0] is old) is not can_start  # a worker that cannot start replaces none
    assert ("The settings were reloaded" in caplog.text) is can_start


def test_a_full_disk_does_not_stop_the_supervisor(supervisor, monkeypatch, caplog):
    def write_text(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(worker_supervisor, "write_text", write_text)
    supervisor.keep_subprocess_alive()
    supervisor.processes[1].kill()
    supervisor.keep_subprocess_alive()  # starts a replacement at once
    supervisor.processes[1].exitcode = 3
    supervisor.keep_subprocess_alive()
    assert "No space left on device. So GET /ready does not say that 1 of 2 workers cannot start" in caplog.text


def test_a_replacement_that_cannot_start_is_tried_again_after_growing_pauses(supervisor, monkeypatch, tmp_path, caplog):
    now = [1000.0]
    monkeypatch.setattr(worker_supervisor.time, "monotonic", lambda: now[0])
    supervisor.keep_subprocess_alive()
    supervisor.processes[1].kill()
    supervisor.keep_subprocess_alive()  # starts a replacement at once
    for pause in (1, 2, 4, 8, 16, 32, 60, 60):
        failed = supervisor.processes[1]
        failed.exitcode = 3
        supervisor.keep_subprocess_alive()
        assert f"in {pause} seconds" in caplog.messages[-1]
        now[0] += pause - 0.5
        supervisor.keep_subprocess_alive()
        assert supervisor.processes[1] is failed
        assert (tmp_path / "problem.txt").read_text().startswith("1 of 2 workers cannot start")
        now[0] += 0.5
        monkeypatch.setattr(FakeWorker, "can_start", False)
        supervisor.keep_subprocess_alive()
        assert supervisor.processes[1] is not failed
    monkeypatch.setattr(FakeWorker, "can_start", True)
    supervisor.keep_subprocess_alive()
    assert not (tmp_path / "problem.txt").exists()
    assert (supervisor.has_failed, supervisor.should_exit.is_set()) == (False, False)


@pytest.mark.parametrize("other_serves", [True, False])
def test_a_worker_that_cannot_start_stops_the_server_only_if_no_other_one_serves(supervisor, other_serves):
    supervisor.processes[0].can_start = other_serves
    supervisor.processes[1].exitcode = 3  # for example because the database hangs since the first worker has started
    supervisor.keep_subprocess_alive()
    assert supervisor.has_failed is not other_serves
    assert supervisor.should_exit.is_set() is not other_serves


def test_a_stop_closes_the_port_and_kills_only_workers_that_are_not_ready(supervisor):
    supervisor.processes[1].can_start = False
    supervisor.terminate_all()
    assert supervisor.sockets[0].fileno() == -1
    assert [process.exitcode for process in supervisor.processes] == [0, -9]
