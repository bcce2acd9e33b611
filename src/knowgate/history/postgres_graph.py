"""The graph over the vectors of a log in PostgreSQL (HNSW): built beside the searches once one is large enough.

Not before: while a log is small, or is being filled, a graph would only cost. One process builds it, readers and
writers go on meanwhile; one that was cut off is begun again.
"""

from __future__ import annotations

import logging
import threading

from knowgate.errors import KnowgateError
from knowgate.postgres import Postgres

WIDEST = 2_000  # pgvector's limit for HNSW over 32-bit numbers; wider vectors are searched exactly
VALID = "SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(?)"
BUILD = (
    "SET maintenance_work_mem = '256MB'",
    "DROP INDEX CONCURRENTLY IF EXISTS by_vector",  # what is left of one that was cut off
    "CREATE INDEX CONCURRENTLY by_vector ON entries USING hnsw (vector vector_ip_ops)",
    "ANALYZE entries",  # else the planner takes every scope for a small one and sorts it
)
log = logging.getLogger(__name__)


class Graph:
    """Of one log, as this process knows it."""

    def __init__(self, db: Postgres):
        self._db = db
        self._ready = False
        self._builder: threading.Thread | None = None
        self._gave_up = False

    @property
    def is_there(self) -> bool:
        """Whether it can be used. Asked for the first time it is begun."""
        if self._ready or self._gave_up:
            return self._ready
        self._ready = self._is_valid
        if not self._ready and self._builder is None:
            self._builder = threading.Thread(target=self._build, name="knowgate-graph", daemon=True)
            self._builder.start()
        return self._ready

    def wait(self) -> None:
        """Until the one that is being built, if any, is ready."""
        builder = self._builder
        if builder is not None:
            builder.join()

    @property
    def _is_valid(self) -> bool:
        rows = self._db.read(VALID, [f"{self._db.address.schema}.by_vector"])
        return bool(rows and rows[0][0])

    def _build(self) -> None:
        try:
            width = self._db.read("SELECT value FROM meta WHERE key = 'width'")
            self._gave_up = not width or int(width[0][0]) > WIDEST
            if not self._gave_up and not self._is_valid:
                self._db.alone(BUILD, log.info, turn="graph")
        except KnowgateError as error:
            self._gave_up = True
            log.warning("There is no graph over the log, so it is searched exactly, which takes longer: %s", error)
        self._builder = None
