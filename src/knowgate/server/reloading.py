"""Settings read again while the server runs (SIGHUP): gate, threshold, rules, documents; all at once or not at all.

Requests that are under way keep what they began with. The LLM stays loaded unless another one is named. What [serve]
says needs a new start.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable

from knowgate.errors import KnowgateError
from knowgate.pipeline import Settings
from knowgate.server.building import build_keeper
from knowgate.server.service import Service

SIGNAL = getattr(signal, "SIGHUP", None)  # Windows has none
log = logging.getLogger(__name__)


class Reloading:
    """read: gives the settings as they are now."""

    def __init__(self, service: Service, settings: Settings, read: Callable[[], Settings] | None):
        self.service = service
        self.settings = settings
        self._read = read
        self.loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()
        self._running: set[asyncio.Task[bool]] = set()

    def listen(self) -> None:
        """From now on, if this is a process's main thread: others hear no signals."""
        if self._read is None or SIGNAL is None or threading.current_thread() is not threading.main_thread():
            return
        self.loop.add_signal_handler(SIGNAL, self._begin)

    def _begin(self) -> None:
        task = asyncio.ensure_future(self.reload())
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def reload(self) -> bool:
        """Whether the new settings hold now; where they cannot, the old ones do."""
        if self._read is None:
            return False
        async with self._turn:
            try:
                settings = await asyncio.to_thread(self._read)
                same = settings.model == self.settings.model or self.service.forwarding is not None
                model = self.service.keeper.rag.model if same else None
                keeper = await asyncio.to_thread(build_keeper, settings, self.service.options, model)
                self._retire(self.service.take(keeper, settings))
            except KnowgateError as error:
                log.error("The settings cannot be used, so the old ones hold: %s", error)
                return False
            self.settings = settings
            log.warning("Settings were read again: gate %s.", keeper.rag.gate.name)
            return True

    def _retire(self, close: Callable[[], None]) -> None:
        """When the last request that uses it must be over."""
        self.loop.call_later(self.service.options.deadline, close)
