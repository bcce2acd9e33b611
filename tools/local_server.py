"""Our own server on a free port of loopback, in a thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from knowgate.server.entrypoint import build_uvicorn_options


class QuickServer(uvicorn.Server):
    """Server that ends as soon as it is told to: uvicorn's own looks ten times a second whether it should."""

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            await asyncio.sleep(0.01)


@contextmanager
def running(app: Any) -> Iterator[str]:
    """Its address, without /v1."""
    tuned = {**build_uvicorn_options(app.state.service.options), "log_level": "error", "timeout_graceful_shutdown": 1}
    config = uvicorn.Config(app, host="127.0.0.1", port=0, **tuned)
    server = QuickServer(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
