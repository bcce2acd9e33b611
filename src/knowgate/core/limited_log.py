"""Log with a limited number of lines per second."""

from __future__ import annotations

import logging
import time

LOG_SECONDS = 1.0  # minimum time between two log lines of the same kind


class LimitedLog:
    """Log for warnings that clients could repeat endlessly. Of equal messages, it writes one per LOG_SECONDS.

    Args:
        log: The log that gets the lines.
    """

    def __init__(self, log: logging.Logger):
        self._log = log
        self._last_lines: dict[str, tuple[float, int]] = {}  # message -> time of its last line, lines since then

    def write(self, message: str, *values: object, level: int = logging.WARNING) -> None:
        """Write a line, unless there was one with the same message less than LOG_SECONDS ago.

        Args:
            message: The message, with %s for the values. Messages are equal even if their values differ.
            values: The values.
            level: Level of the line.
        """
        last_time, skipped = self._last_lines.get(message, (float("-inf"), 0))
        now = time.monotonic()
        if now < last_time + LOG_SECONDS:
            self._last_lines[message] = (last_time, skipped + 1)
            return
        self._last_lines[message] = (now, 0)
        note = f" ({skipped} more since the last line)" if skipped else ""
        self._log.log(level, message + note, *values)
