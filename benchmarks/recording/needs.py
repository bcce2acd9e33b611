"""Read the recorded needs of gates, under the names that the tables use.

Some gates call the LLM, so their needs were recorded together with the label run, or in a file of their own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.tables.names import name_source_llm, recorded_name


def read_run_needs(run: Path) -> list[Any]:
    """Return the needs recorded in a label run. Gates are named without the paths of folders and logs."""
    from knowgate.data.runs.records import read_needs

    return [
        replace(record, gate=recorded_name(record.gate) + name_source_llm(record.about)) for record in read_needs(run)
    ]


def read_file_needs(files: Sequence[Path], run: str) -> list[Any]:
    """Return the needs of one run from JSON files of the form {"NAME-test|gate": {id: need}}."""
    from knowgate.data.runs.records import RecordedNeeds

    records = []
    for file in files:
        for key, needs in json.loads(file.read_text()).items():
            run_name, gate = key.split("|")
            if run_name == run:
                records.append(RecordedNeeds(recorded_name(gate), 0.5, needs))
    return records
