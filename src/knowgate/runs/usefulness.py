"""What a second look said of the passages of a run, kept beside its rows in `useful.jsonl`: one line per judge.

As with needs, a judge's verdicts can so be evaluated again by anyone, without the judge.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from knowgate.errors import ArtefactError, BadInput
from knowgate.files import read_jsonl, write_text
from knowgate.runs.run_folder import RunFolder
from knowgate.typed import read_record

FILE = "useful.jsonl"


@dataclass(frozen=True)
class RecordedUse:
    """Whether passages are of use, by question id. fingerprint: of the judge, so that one fitted anew is asked anew."""

    judge: str
    fingerprint: str
    useful: Mapping[str, bool] = field(repr=False)


def read_use(run: Path) -> list[RecordedUse]:
    """Every judge recorded in this run."""
    file = RunFolder(run).file(FILE)
    if not file.is_file():
        return []
    return [_parsed(record, f"{file} line {number}") for number, record in read_jsonl(file)]


def _parsed(record: Mapping[str, Any], where: str) -> RecordedUse:
    try:
        return read_record(RecordedUse, record, where)
    except BadInput as error:
        raise ArtefactError(f"{str(error).rstrip('.')}: these are no verdicts that a judge gave.") from None


def write_use(run: Path, recorded: RecordedUse) -> None:
    """Keep this beside the rows; what was recorded before of a judge of that name is replaced."""
    with RunFolder(run).exclusive():
        kept = [item for item in read_use(run) if item.judge != recorded.judge]
        lines = [
            json.dumps({"judge": item.judge, "fingerprint": item.fingerprint, "useful": dict(item.useful)}) + "\n"
            for item in [*kept, recorded]
        ]
        write_text(run / FILE, "".join(lines))
