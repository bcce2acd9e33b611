"""Our own server on a free port of loopback, in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from knowgate.server.entrypoint import build_uvicorn_options


@contextmanager
def running(app: Any) -> Iterator[str]:
    """Its address, without /v1."""
    tuned = {**build_uvicorn_options(app.state.service.options), "log_level": "error", "timeout_graceful_shutdown": 1}
    config = uvicorn.Config(app, host="127.0.0.1", port=0, **tuned)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
