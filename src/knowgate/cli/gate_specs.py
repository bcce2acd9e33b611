"""`--gates`: specs, folders and names of recorded gates, between commas. A comma may also be part of one of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from knowgate.data.runs.records import read_needs
from knowgate.errors import BadSetting


def split_gate_specs(given: Sequence[str] | None, runs: Sequence[Path] = ()) -> list[str]:
    """What stands between commas. In a recorded gate's name ('fusion, cheap') and in options
    (`dhicl:k=5,words=1/2`) they belong to it. runs: where names may be recorded."""
    texts = given or ["auto"]
    recorded = {one.gate for run in runs for one in read_needs(run)} if any("," in text for text in texts) else set()
    specs: list[str] = []
    for part in (part for text in texts for part in _parts(text.split(","), recorded)):
        if specs and "=" in part and ":" not in part and part not in recorded:
            specs[-1] += f",{part}"
        elif part.strip():
            specs.append(part.strip())
    if not specs:
        raise BadSetting("--gates names no gate; leave it out for all that the rows allow, or see: knowgate gates")
    return specs


def _parts(pieces: Sequence[str], recorded: Collection[str]) -> Iterator[str]:
    """Pieces between commas, those of one recorded name together: the longest that fits."""
    place = 0
    while place < len(pieces):
        ends = range(len(pieces), place, -1)
        end = next((end for end in ends if ",".join(pieces[place:end]).strip() in recorded), place + 1)
        yield ",".join(pieces[place:end])
        place = end
