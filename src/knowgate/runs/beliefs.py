"""What an arbiter believed of the two answers of a run, kept beside its rows in `beliefs.jsonl`: one line per arbiter.

As with needs, an arbiter's choices can so be evaluated again by anyone, without the arbiter and without the texts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from knowgate.errors import ArtefactError, BadInput
from knowgate.files import read_jsonl, write_text
from knowgate.runs.run_folder import RunFolder
from knowgate.typed import Share, read_record

FILE = "beliefs.jsonl"
DIGITS = 7


@dataclass(frozen=True)
class RecordedBeliefs:
    """How probably each answer is right, by question id. agreed: ids whose two answers are the same.

    fingerprint: of the arbiter, so that one fitted anew is asked anew.
    """

    arbiter: str
    fingerprint: str
    closed: Mapping[str, Share] = field(repr=False)
    open: Mapping[str, Share] = field(repr=False)
    agreed: tuple[str, ...] = field(default=(), repr=False)

    @property
    def judged(self) -> frozenset[str]:
        """Questions that need not be asked about again."""
        return frozenset({*self.closed, *self.agreed})

    @property
    def from_memory(self) -> frozenset[str]:
        """Questions to which the answer from memory is given."""
        return frozenset(key for key, value in self.closed.items() if value > self.open[key])


def read_beliefs(run: Path) -> list[RecordedBeliefs]:
    """Every arbiter recorded in this run."""
    file = RunFolder(run).file(FILE)
    if not file.is_file():
        return []
    return [_parsed(record, f"{file} line {number}") for number, record in read_jsonl(file)]


def _parsed(record: Mapping[str, Any], where: str) -> RecordedBeliefs:
    try:
        found = read_record(RecordedBeliefs, record, where)
    except BadInput as error:
        raise ArtefactError(f"{str(error).rstrip('.')}: these are no beliefs that an arbiter had.") from None
    if found.closed.keys() != found.open.keys():
        raise ArtefactError(f"{where}: the arbiter '{found.arbiter}' has beliefs on one of two answers only.")
    return found


def write_beliefs(run: Path, recorded: RecordedBeliefs) -> None:
    """Keep this beside the rows; what was recorded before of an arbiter of that name is replaced."""
    with RunFolder(run).exclusive():
        kept = [item for item in read_beliefs(run) if item.arbiter != recorded.arbiter]
        write_text(run / FILE, "".join(_line(item) for item in [*kept, recorded]))


def _line(item: RecordedBeliefs) -> str:
    sides = {side: _rounded(values) for side, values in (("closed", item.closed), ("open", item.open))}
    return json.dumps({**asdict(item), **sides, "agreed": list(item.agreed)}, ensure_ascii=False) + "\n"


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {key: round(value, DIGITS) for key, value in values.items()}
