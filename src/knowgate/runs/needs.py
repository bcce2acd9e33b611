"""Needs that gates gave for the questions of a run, kept beside its rows in `needs.jsonl`: one line per gate.

What an LLM had to be asked for (a judge's verdict, a pass with similar questions) is so on record and can be evaluated
again by anyone, without the LLM.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from knowgate.errors import ArtefactError, BadInput
from knowgate.files import read_jsonl, write_text
from knowgate.runs.run_folder import RunFolder
from knowgate.typed import Between, Share, read_record

FILE = "needs.jsonl"
DIGITS = 7  # so that scores which differ stay different


@dataclass(frozen=True)
class RecordedNeeds:
    """What one gate said: need by question id. seconds: per question, None if it was not timed.

    raw: the scores of a fitted gate before calibration, by question id; empty of other gates.
    far: share of the questions that lie far from those the gate was fitted on, None if it does not know.
    scoring: identity of the fitted gate that gave them, whatever its threshold; '' where that is not known.
    """

    gate: str
    threshold: float
    needs: Mapping[str, Share] = field(repr=False)
    about: str = ""
    seconds: Annotated[float, Between(0)] | None = None
    raw: Mapping[str, Share] = field(default_factory=dict, repr=False)
    far: Share | None = None
    scoring: str = ""


def read_needs(run: Path) -> list[RecordedNeeds]:
    """Every gate recorded in this run, in the order it was recorded."""
    return list(each_needs(run))


def each_needs(run: Path) -> Iterator[RecordedNeeds]:
    """The same, one after another: of many rows, one gate takes some 100 MB."""
    file = RunFolder(run).file(FILE)
    if file.is_file():
        for number, record in read_jsonl(file):
            yield _parsed(record, f"{file} line {number}")


def _parsed(record: Mapping[str, Any], where: str) -> RecordedNeeds:
    try:
        recorded = read_record(RecordedNeeds, record, where)
    except BadInput as error:
        raise ArtefactError(f"{str(error).rstrip('.')}: these are no needs that a gate gave.") from None
    if recorded.raw and recorded.raw.keys() != recorded.needs.keys():
        raise ArtefactError(f"{where}: gate '{recorded.gate}' has raw scores of other questions than its needs.")
    return recorded


def shared_needs(runs: Sequence[Path], names: Sequence[str]) -> dict[str, RecordedNeeds]:
    """Gates on record in every one of the runs, with their needs under the rows' keys."""
    parts = [{item.gate: item for item in read_needs(run)} for run in runs]
    shared = [gate for gate in parts[0] if all(gate in part for part in parts)]
    return {gate: join_needs([part[gate] for part in parts], names) for gate in shared}


def join_needs(items: Sequence[RecordedNeeds], names: Sequence[str]) -> RecordedNeeds:
    """What a gate said of each run, under the names of the runs."""
    needs = _under_keys([item.needs for item in items], names)
    raw = _under_keys([item.raw for item in items], names) if all(item.raw for item in items) else {}
    timed = [item.seconds for item in items if item.seconds is not None]
    seconds = float(np.mean(timed)) if len(timed) == len(items) else None
    first = items[0]
    scoring = first.scoring if all(item.scoring == first.scoring for item in items) else ""
    return RecordedNeeds(first.gate, first.threshold, needs, first.about, seconds, raw, _far(items), scoring)


def _under_keys(parts: Sequence[Mapping[str, float]], names: Sequence[str]) -> dict[str, float]:
    return {f"{name}/{key}": score for name, part in zip(names, parts, strict=True) for key, score in part.items()}


def _far(items: Sequence[RecordedNeeds]) -> float | None:
    """Over all questions of the runs; None where one of them does not say."""
    shares = [(item.far, len(item.needs)) for item in items if item.far is not None]
    if len(shares) < len(items):
        return None
    return sum(share * n for share, n in shares) / max(1, sum(n for _, n in shares))


def write_needs(run: Path, recorded: Sequence[RecordedNeeds]) -> None:
    """Keep these beside the rows; a gate recorded before under the same name is replaced."""
    names = {item.gate for item in recorded}
    with RunFolder(run).exclusive():
        kept = [item for item in read_needs(run) if item.gate not in names]
        write_text(run / FILE, "".join(_line(item) for item in [*kept, *recorded]))


def _line(item: RecordedNeeds) -> str:
    record: dict[str, Any] = {"gate": item.gate, "threshold": item.threshold, "needs": _rounded(item.needs)}
    record |= {"raw": _rounded(item.raw)} if item.raw else {}
    record |= {"about": item.about} if item.about else {}
    record |= {"seconds": round(item.seconds, 5)} if item.seconds is not None else {}
    record |= {"far": round(item.far, 5)} if item.far is not None else {}
    record |= {"scoring": item.scoring} if item.scoring else {}
    return json.dumps(record, ensure_ascii=False) + "\n"


def _rounded(scores: Mapping[str, float]) -> dict[str, float]:
    return {name: round(float(score), DIGITS) for name, score in scores.items()}
