"""The server of uvicorn, and the supervisor of its worker processes."""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn
from uvicorn.supervisors import Multiprocess
from uvicorn.supervisors.multiprocess import Process

from knowgate.core.files import write_text
from knowgate.errors import KnowgateError
from knowgate.server.telemetry.metrics import merge_worker

log = logging.getLogger(__name__)

RELOAD_SIGNAL = getattr(signal, "SIGHUP", None)  # Windows has no SIGHUP
START_SECONDS = 600  # maximum time in which a new worker must be ready; uvicorn's default of 5 is too short for models
# Time after which a worker that does not respond is killed with its requests. On a busy or paused machine, a healthy worker
# may not run for many seconds, so uvicorn's default of 5 is too short.
HANG_SECONDS = 60
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 60.0  # pauses between attempts to start a worker; each one doubles


class AnnouncedServer(uvicorn.Server):
    """A server of uvicorn that calls a function when it accepts requests. SIGTERM ends it with exit status 0.

    Args:
        config: Options of uvicorn.
        on_start: The function.
    """

    def __init__(self, config: uvicorn.Config, on_start: Callable[[], None]):
        super().__init__(config)
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the server. After a successful start, call `_on_start`."""
        await super().startup(sockets)
        if self.started:
            self._on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop the server after a signal. Uvicorn would raise SIGTERM again at the end, which kills the process."""
        if sig == signal.SIGTERM:
            self.should_exit = True
        else:
            super().handle_exit(sig, frame)


class WorkerSupervisor(Multiprocess):
    """Supervisor of the worker processes of uvicorn.

    SIGHUP reloads all workers. The signal is blocked and polled, because it would end a starting worker. A worker that
    has ended is replaced. If the new one cannot start, there are further attempts, while other workers serve.

    Args:
        config: Options of uvicorn.
        sockets: The listening sockets.
        problem_file: File in which the workers read that some of them cannot start. It exists only meanwhile.
    """

    def __init__(self, config: uvicorn.Config, sockets: list[socket.socket], problem_file: Path):
        super().__init__(config, sockets)
        self.has_failed = False  # whether the server stops because no worker could start
        self._problem_file = problem_file
        self._serving: set[Process] = set()  # workers that have accepted requests
        # Index of a worker that cannot start -> seconds before the next attempt.
        self._restart_pauses: dict[int, float] = {}
        self._restart_times: dict[int, float] = {}  # index of a worker that has ended -> when to start a new one
        if RELOAD_SIGNAL is not None:
            signal.pthread_sigmask(signal.SIG_BLOCK, {RELOAD_SIGNAL})
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)

    def _stop(self, *_: object) -> None:
        """Stop the server, and a reload that runs."""
        # In a thread, because the code that the signal interrupted may hold the lock of the event.
        threading.Thread(target=self.should_exit.set).start()

    def handle_signals(self) -> None:
        """Replace all workers if SIGHUP has arrived, and handle the other signals."""
        super().handle_signals()
        # SIGHUP is blocked, so it stays pending until it is fetched here.
        if RELOAD_SIGNAL is not None and RELOAD_SIGNAL in signal.sigpending():
            signal.sigwait({RELOAD_SIGNAL})
            self.restart_all()

    def restart_all(self) -> None:
        """Replace all workers, as after SIGHUP. An old worker serves until the new one is ready."""
        for index, old in enumerate(self.processes):
            new = Process(self.config, self.sockets)
            new.start()
            if not new.wait_until_ready(START_SECONDS, self.should_exit):
                new.kill()
                if not self.should_exit.is_set():
                    log.error("A new worker could not start, so the reload ends. Other workers keep their settings.")
                return
            old.terminate()
            self._serving.discard(old)
            self.processes[index] = new
            self._count_as_serving(index)
            latest_end = time.monotonic() + (self.config.timeout_graceful_shutdown or 0) + HANG_SECONDS
            while old.process.is_alive() and not self.should_exit.is_set():
                old.process.join(timeout=0.1)
                if time.monotonic() > latest_end:  # it hangs
                    old.kill()
            merge_worker(old.pid)
        log.warning("The settings were reloaded: %d new workers serve.", len(self.processes))

    def keep_subprocess_alive(self) -> None:
        """Replace workers that have ended or hang. A worker that cannot start is tried again after a pause."""
        ended = [index for index, process in enumerate(self.processes) if not self._check_worker(index, process)]
        for index in ended:
            if index not in self._restart_times:
                self._schedule_restart(index)
            if self.should_exit.is_set():
                return
            if time.monotonic() >= self._restart_times[index]:
                self._start_worker(index)

    def _check_worker(self, index: int, process: Process) -> bool:
        """Return whether a worker responds, and record when it begins to serve."""
        # Close this process's copy of the worker's end of their pipe. Otherwise, the pipe outlives the worker.
        process.child_conn.close()
        is_alive = process.is_alive(timeout=HANG_SECONDS)
        if is_alive and process not in self._serving and process.is_ready():
            self._count_as_serving(index)
        return is_alive

    def _count_as_serving(self, index: int) -> None:
        """Record that a worker accepts requests, and forget its failed starts."""
        self._serving.add(self.processes[index])
        self._restart_pauses.pop(index, None)
        self._restart_times.pop(index, None)
        self._report_problem()

    def _schedule_restart(self, index: int) -> None:
        """Decide when to replace a worker that has ended: at once if it has served, otherwise after a pause.

        If a worker reports that it cannot start and no other worker serves, stop the server instead.
        """
        process = self.processes[index]
        process.kill()  # it may hang
        process.join()
        merge_worker(process.pid)
        self._restart_times[index] = time.monotonic()
        if process in self._serving:
            self._serving.remove(process)
            log.warning(
                "Worker process %s ended unexpectedly, or was killed because it did not respond for %d seconds. A new "
                "process replaces it.",
                process.pid,
                HANG_SECONDS,
            )
        elif (process.exitcode or 0) > 0 and not any(other.process.is_alive() for other in self._serving):
            self.has_failed = True
            self.should_exit.set()
        else:
            self._postpone_restart(index)

    def _postpone_restart(self, index: int) -> None:
        """Pause before the next attempt to start a worker. The pause doubles after each attempt."""
        pause = min(MAX_PAUSE_SECONDS, 2 * self._restart_pauses.get(index, FIRST_PAUSE_SECONDS / 2))
        self._restart_pauses[index] = pause
        self._restart_times[index] += pause
        log.error(
            "Worker process %s ended unexpectedly while it started. The next attempt to start it is in %g seconds.",
            self.processes[index].pid,
            pause,
        )
        self._report_problem()

    def _start_worker(self, index: int) -> None:
        """Start a worker in the place of one that has ended."""
        del self._restart_times[index]
        self.processes[index] = Process(self.config, self.sockets)
        self.processes[index].start()

    def _report_problem(self) -> None:
        """Write a file with the number of workers that cannot start. The others read it to answer GET /ready."""
        if self._restart_pauses:
            message = (
                f"{len(self._restart_pauses)} of {len(self.processes)} workers cannot start; the server's log says why"
            )
            try:
                write_text(self._problem_file, message)
            except (OSError, KnowgateError) as error:  # such as a full disk, with which the server must go on
                log.error("%s. So GET /ready does not say that %s.", str(error).rstrip("."), message)
        else:
            self._problem_file.unlink(missing_ok=True)

    def terminate_all(self) -> None:
        """Close the port, so that new connections are refused, and end all workers. Workers finish their requests."""
        for listener in self.sockets:
            listener.close()  # the workers close their own copies of it
        for process in self.processes:
            if process in self._serving or process.is_ready(timeout=1):
                process.terminate()
            else:
                process.kill()  # it still loads its models, so it has no requests to finish
