"""Parser of the flag `--gates`: gate specs, folders of gates and names of recorded gates, separated by commas."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from knowgate.data.runs.records import read_needs
from knowgate.errors import BadSetting


def split_gate_specs(values: Sequence[str] | None, runs: Sequence[Path] = ()) -> list[str]:
    """Split the values of `--gates` at commas into gates.

    A comma inside the name of a recorded gate ('fusion, cheap') or before another option of a gate
    ('dhicl:k=5,words=1/2') does not separate two gates.

    Args:
        values: Values of the flag; None means 'auto'.
        runs: Label runs, in which scores of gates may be recorded under the names of the gates.
    """
    values = values or ["auto"]
    has_comma = any("," in value for value in values)
    recorded = {record.gate for run in runs for record in read_needs(run)} if has_comma else set()
    specs: list[str] = []
    for part in (part for value in values for part in _join_recorded_names(value.split(","), recorded)):
        if specs and "=" in part and ":" not in part and part not in recorded:  # an option of the gate before it
            specs[-1] += f",{part}"
        elif part.strip():
            specs.append(part.strip())
    if not specs:
        raise BadSetting("--gates names no gate. Leave --gates out to use every possible gate, or see: knowgate gates")
    return specs


def _join_recorded_names(pieces: Sequence[str], recorded: Collection[str]) -> Iterator[str]:
    """Yield the pieces, with adjacent pieces joined if they form the name of a recorded gate.

    If several names are possible, the longest one is used.
    """
    start = 0
    while start < len(pieces):
        ends = range(len(pieces), start, -1)
        end = next((end for end in ends if ",".join(pieces[start:end]).strip() in recorded), start + 1)
        yield ",".join(pieces[start:end])
        start = end
