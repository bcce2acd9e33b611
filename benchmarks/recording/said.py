"""What gates said where the LLM was: beside the rows of a full run, or in a file. Under the names of the tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.tables.names import of_another, recorded_name


def said_already(run: Path) -> list[Any]:
    """Needs recorded in the run. Paths of folders and logs are not kept."""
    from knowgate.data.runs.records import read_needs

    return [replace(one, gate=recorded_name(one.gate) + of_another(one.about)) for one in read_needs(run)]


def asked_needs(files: Sequence[Path], run: str) -> list[Any]:
    """Of the form {"NAME-test|gate": {id: need}}."""
    from knowgate.data.runs.records import RecordedNeeds

    found = []
    for file in files:
        for key, needs in json.loads(file.read_text()).items():
            where, gate = key.split("|")
            if where == run:
                found.append(RecordedNeeds(recorded_name(gate), 0.5, needs))
    return found
