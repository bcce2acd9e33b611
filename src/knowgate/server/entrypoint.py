"""Starts the server: uvicorn around the application, on an address that only those may reach who should."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

from knowgate.errors import BadSetting, KnowgateError, MissingExtra
from knowgate.pipeline.settings import PipelineOptions
from knowgate.server.options import ServeOptions

STARTUP_FAILURE = 3  # uvicorn's: a worker that ends so is not started again
log = logging.getLogger(__name__)


def run_server(
    settings: PipelineOptions, options: ServeOptions, read: Callable[[], PipelineOptions] | None = None
) -> None:
    """Until it is told to stop (Ctrl-C, SIGTERM); streams that are under way are finished first.

    read: gives the settings as they are when it is told to read them again (SIGHUP).
    """
    if not options.is_local and options.keys is None:
        raise BadSetting(
            f"--host {options.host} can be reached from outside, which needs API keys: make one with knowgate keys add "
            "NAME, then start with --keys FILE."
        )
    try:
        import uvicorn

        from knowgate.server.app import create_app
    except ImportError:
        raise MissingExtra("knowgate serve", "serve") from None
    place = {"host": options.host, "port": options.port, **build_uvicorn_options(options)}
    if options.workers == 1:
        uvicorn.Server(uvicorn.Config(create_app(settings, options, read), **place)).run()
        return
    from uvicorn.supervisors import Multiprocess

    from knowgate.server.telemetry.snapshot import COUNTS_ENV, SERVER_ENV

    with tempfile.TemporaryDirectory(prefix="knowgate-") as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder  # workers count into files there, so that all are told of
        os.environ[SERVER_ENV], os.environ[COUNTS_ENV] = uuid.uuid4().hex, f"{folder}/counts.db"
        worker = partial(_worker, settings, options, read)
        config = uvicorn.Config(worker, factory=True, workers=options.workers, **place)
        Multiprocess(config, sockets=[config.bind_socket()]).run()


def _worker(settings: PipelineOptions, options: ServeOptions, read: Callable[[], PipelineOptions] | None) -> Any:
    """The application of one process. Its parent starts new ones to have the settings read again."""
    from knowgate.server.app import create_app

    try:
        return create_app(settings if read is None else read(), options)
    except KnowgateError as error:
        log.error("%s", error)
        sys.exit(STARTUP_FAILURE)


def build_uvicorn_options(options: ServeOptions) -> dict[str, Any]:
    """How uvicorn runs: with what is fast (uvloop and httptools where they are installed), and no layers we do not use.

    What a proxy says of a client is not believed: nothing here depends on who that is.
    """
    return {
        "log_level": "warning",
        "access_log": False,
        "proxy_headers": False,
        "server_header": False,
        "ws": "none",
        "timeout_graceful_shutdown": max(1, round(options.deadline)),
    }
