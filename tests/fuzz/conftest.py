"""The table of what was tried (`make fuzz`), gathered from all processes that tried it."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from tests.support.fuzz import MANY, TALLY
from tests.support.mortal import mortal
from tests.support.workshop import IMPORTED, prepare, prepare_runs

TABLE = Path(__file__).parents[2] / "docs" / "reliability-inputs.md"
HEAD = """| door | kind of input | tried | refused with a sentence | used, with a right result |
|---|---|---:|---:|---:|
"""
gathered: Counter[tuple[str, str, str]] = Counter()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """One process of several has ended."""
    for key, count in json.loads(node.workeroutput.get("fuzz", "[]") if hasattr(node, "workeroutput") else "[]"):
        gathered[tuple(key)] += count


def pytest_sessionfinish(session, exitstatus):
    own = [[list(key), count] for key, count in TALLY.items()]
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["fuzz"] = json.dumps(own)
        return
    for key, count in own:
        gathered[tuple(key)] += count
    if MANY and exitstatus == 0 and not os.environ.get("KNOWGATE_FUZZ_PART"):
        TABLE.write_text(table(), encoding="utf-8")


def pytest_terminal_summary(terminalreporter):
    if MANY and gathered:
        terminalreporter.write_line(f"{sum(gathered.values()):,} inputs tried")


def table():
    """One row per door and kind, and the sum."""
    kinds = sorted({key[:2] for key in gathered})
    rows = [(*kind, gathered[*kind, "refused"], gathered[*kind, "used"]) for kind in kinds]
    total = ("all", "", sum(row[2] for row in rows), sum(row[3] for row in rows))
    lines = (f"| {door} | {kind} | {no + yes:,} | {no:,} | {yes:,} |\n" for door, kind, no, yes in [*rows, total])
    return HEAD + "".join(lines)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with what every command needs."""
    folder = tmp_path_factory.mktemp("commands")
    prepare(folder)
    return folder


@pytest.fixture(scope="module")
def runner(place):
    """Runs commands there that may be killed, or meet a full disk."""
    with mortal(*IMPORTED, KNOWGATE_CACHE=str(place / "cache")) as running:
        prepare_runs(running, place)
        yield running
