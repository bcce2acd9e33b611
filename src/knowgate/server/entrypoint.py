"""Entry point of the server, which runs uvicorn with one or several worker processes."""

from __future__ import annotations

import ctypes
import gc
import logging
import math
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from knowgate.errors import BadSetting, KnowgateError, require_extra
from knowgate.pipeline.settings import PipelineOptions
from knowgate.server.options import ServeOptions

log = logging.getLogger(__name__)

MEMORY_FOLDER = "/dev/shm"  # nosec B108
OPEN_FILES = 16_384  # a process asks for no more
GC_THRESHOLD = 20_000  # new objects between two collections of garbage; each one delays the requests in progress
M_ARENA_MAX, M_MMAP_THRESHOLD = -8, -3  # in glibc's malloc.h
MAX_HEAPS, LARGE_BLOCK_BYTES = 2, 4 << 20  # larger blocks of memory are given back as soon as they are free
MIN_OPEN_FILES = 4_096  # connections of several client addresses, which can have 512 each, and of the upstream
STARTUP_FAILURE = 3  # exit status of a worker that cannot start, as in uvicorn


def run_server(
    settings: PipelineOptions,
    options: ServeOptions,
    read_settings: Callable[[], PipelineOptions] | None = None,
    on_start: Callable[[], None] = lambda: None,
) -> None:
    """Run the server until it is stopped with Ctrl-C or SIGTERM. Streams in progress are finished first.

    Args:
        settings: Options of the pipeline: LLM, gate, documents and rules.
        options: Options of the server.
        read_settings: Function that reads the settings again, called when the process receives SIGHUP.
        on_start: Called when the server accepts requests. With several workers, it is called when the port is open and
            the workers start.

    Raises:
        BadSetting: The host can be reached from other machines, but there are no API keys. Or the port is in use, or
            the workers cannot start.
        MissingExtra: The packages of the extra `serve` are not installed.
    """
    if not options.is_local and options.keys is None:
        raise BadSetting(
            f"with host='{options.host}', other machines can reach the server, so it needs API keys. Create a key with "
            "`knowgate keys add NAME`. Then set `keys` to the key file."
        )
    with require_extra("knowgate serve", "serve"):
        import uvicorn

        from knowgate.server.app import create_app
        from knowgate.server.worker_supervisor import AnnouncedServer
    _check_port(options)
    raise_open_file_limit()
    tune_memory()
    uvicorn_options = {"host": options.host, "port": options.port, **build_uvicorn_options(options)}
    if options.workers == 1:
        config = uvicorn.Config(create_app(settings, options, read_settings), **uvicorn_options)
        AnnouncedServer(config, on_start).run()
        return
    _run_workers(
        partial(_create_worker_app, settings, options, read_settings), options.workers, uvicorn_options, on_start
    )


def _run_workers(
    create_worker_app: Callable[[], Any], count: int, uvicorn_options: dict[str, Any], on_start: Callable[[], None]
) -> None:
    """Run several worker processes until the server is stopped. They share a temporary folder.

    Raises:
        BadSetting: No worker can start.
    """
    import uvicorn

    from knowgate.server.telemetry.snapshot import PROBLEM_FILE_VARIABLE
    from knowgate.server.telemetry.snapshot_exchange import COUNTS_FILE_VARIABLE, SERVER_ID_VARIABLE
    from knowgate.server.worker_supervisor import WorkerSupervisor

    # A worker that writes its metrics to a full disk is killed by the system, so they are in memory where possible.
    parent = MEMORY_FOLDER if os.access(MEMORY_FOLDER, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="knowgate-", dir=parent) as folder:
        metrics_folder = Path(folder, "metrics")  # of its own, because Prometheus reads every .db file there
        metrics_folder.mkdir()
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(metrics_folder)
        os.environ[SERVER_ID_VARIABLE], os.environ[COUNTS_FILE_VARIABLE] = uuid.uuid4().hex, f"{folder}/counts.db"
        problem_file = Path(folder, "problem.txt")
        os.environ[PROBLEM_FILE_VARIABLE] = str(problem_file)
        config = uvicorn.Config(create_worker_app, factory=True, workers=count, **uvicorn_options)
        sockets = [config.bind_socket()]
        sockets[0].listen(config.backlog)
        supervisor = WorkerSupervisor(config, sockets, problem_file)
        on_start()
        supervisor.run()
        if supervisor.has_failed:
            raise BadSetting("the worker processes of the server could not start. The messages above say why.")


def _check_port(options: ServeOptions) -> None:
    """Check that the server can listen on its port, before it loads models.

    Raises:
        BadSetting: It cannot.
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        socket.create_server((options.host, options.port), family=family).close()
    except OSError as error:
        address = f"{options.host}:{options.port}"
        message = f"cannot listen on {address}: {error.strerror}. Free the port, or set another `port`."
        raise BadSetting(message) from None


def raise_open_file_limit() -> None:
    """Let this process and its workers open as many files as the system allows. Each connection is one."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows has no such limit
        return
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = OPEN_FILES if hard_limit == resource.RLIM_INFINITY else min(OPEN_FILES, hard_limit)
    if soft_limit != resource.RLIM_INFINITY and soft_limit < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard_limit))
    if limit < MIN_OPEN_FILES:
        message = (
            "This process can open only %d files, so a few clients can use up its connections. Allow it %d (ulimit -n)."
        )
        log.warning(message, limit, MIN_OPEN_FILES)


def tune_memory() -> None:
    """Let Python collect garbage less often in this process, and let the C library give freed memory back.

    With its default, Python's collection takes 4 % of a server's time. glibc keeps the memory of large responses in a
    separate heap of each thread: beside many responses of 16 MB, a process took twice as much memory as with these limits.
    """
    gc.set_threshold(GC_THRESHOLD, *gc.get_threshold()[1:])
    with suppress(AttributeError, OSError, TypeError):  # other C libraries have no mallopt
        c_library = ctypes.CDLL(None)
        c_library.mallopt(M_ARENA_MAX, MAX_HEAPS)
        c_library.mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


def _create_worker_app(
    settings: PipelineOptions, options: ServeOptions, read_settings: Callable[[], PipelineOptions] | None
) -> Any:
    """Create the application of a worker process. Each worker reads the settings again, for reloads by SIGHUP."""
    from knowgate.server.app import create_app

    threading.Thread(target=_stop_with_parent, daemon=True).start()
    tune_memory()
    _use_thread_lock_for_progress_bars()
    try:
        return create_app(settings if read_settings is None else read_settings(), options)
    except KnowgateError as error:
        log.error("%s", error)
        sys.exit(STARTUP_FAILURE)


def _use_thread_lock_for_progress_bars() -> None:
    """Let tqdm, which sentence-transformers uses, do without a semaphore. Python would warn of it when the server stops."""
    with suppress(ImportError):
        from tqdm import tqdm

        tqdm.set_lock(threading.RLock())


def _stop_with_parent() -> None:
    """Wait for the end of the parent process, then stop this worker. A killed parent cannot stop its workers."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def build_uvicorn_options(options: ServeOptions) -> dict[str, Any]:
    """Return the options of uvicorn. Proxy headers are ignored, because clients could forge them."""
    from knowgate.server.connection_limits import LimitedHttpProtocol
    from knowgate.server.worker_supervisor import HANG_SECONDS

    return {
        "http": LimitedHttpProtocol,
        "loop": "asyncio",  # uvloop accepts one connection per iteration, so a busy client would keep out others
        "log_level": "warning",
        "access_log": False,
        "proxy_headers": False,
        "server_header": False,
        "ws": "none",
        "timeout_graceful_shutdown": math.ceil(options.deadline) + 1,
        "timeout_worker_healthcheck": HANG_SECONDS,
    }
