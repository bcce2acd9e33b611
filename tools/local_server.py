"""Run the knowgate server in a thread, on a free port of the loopback interface."""

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
    """Server that stops within 10 ms. uvicorn checks only ten times a second whether it should stop."""

    async def main_loop(self) -> None:
        """Check every 10 ms whether to stop."""
        while not await self.on_tick(0):
            await asyncio.sleep(0.01)


@contextmanager
def run_server(app: Any) -> Iterator[str]:
    """Run an app and yield its address, without /v1."""
    options = {**build_uvicorn_options(app.state.service.options), "log_level": "error", "timeout_graceful_shutdown": 1}
    config = uvicorn.Config(app, host="127.0.0.1", port=0, **options)
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
