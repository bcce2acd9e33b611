"""Starts the server: uvicorn with one or several worker processes."""

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

log = logging.getLogger(__name__)

STARTUP_FAILURE = 3  # exit status after which uvicorn does not restart a worker


def run_server(
    settings: PipelineOptions, options: ServeOptions, read_settings: Callable[[], PipelineOptions] | None = None
) -> None:
    """Run the server until it is stopped with Ctrl-C or SIGTERM; streams in progress are finished first.

    Args:
        settings: PipelineOptions of the pipeline.
        options: Options of the server.
        read_settings: Returns the current settings when the process receives SIGHUP.
    """
    if not options.is_local and options.keys is None:
        raise BadSetting(
            f"host='{options.host}' can be reached from other machines, which needs API keys. "
            "Create one with `knowgate keys add NAME`, then set `keys`."
        )
    try:
        import uvicorn

        from knowgate.server.app import create_app
    except ImportError:
        raise MissingExtra("knowgate serve", "serve") from None
    uvicorn_options = {"host": options.host, "port": options.port, **build_uvicorn_options(options)}
    if options.workers == 1:
        uvicorn.Server(uvicorn.Config(create_app(settings, options, read_settings), **uvicorn_options)).run()
        return
    from uvicorn.supervisors import Multiprocess

    from knowgate.server.telemetry.snapshot import COUNTS_FILE_VARIABLE, SERVER_ID_VARIABLE

    with tempfile.TemporaryDirectory(prefix="knowgate-") as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        os.environ[SERVER_ID_VARIABLE], os.environ[COUNTS_FILE_VARIABLE] = uuid.uuid4().hex, f"{folder}/counts.db"
        create_worker_app = partial(_create_worker_app, settings, options, read_settings)
        config = uvicorn.Config(create_worker_app, factory=True, workers=options.workers, **uvicorn_options)
        Multiprocess(config, sockets=[config.bind_socket()]).run()


def _create_worker_app(
    settings: PipelineOptions, options: ServeOptions, read_settings: Callable[[], PipelineOptions] | None
) -> Any:
    """Create the application of a worker process; after SIGHUP, uvicorn starts new workers with new settings."""
    from knowgate.server.app import create_app

    try:
        return create_app(settings if read_settings is None else read_settings(), options)
    except KnowgateError as error:
        log.error("%s", error)
        sys.exit(STARTUP_FAILURE)


def build_uvicorn_options(options: ServeOptions) -> dict[str, Any]:
    """Return options that disable the layers of uvicorn that the server does not use.

    Proxy headers are not trusted: nothing depends on the address of a client.
    """
    return {
        "log_level": "warning",
        "access_log": False,
        "proxy_headers": False,
        "server_header": False,
        "ws": "none",
        "timeout_graceful_shutdown": max(1, round(options.deadline)),
    }
