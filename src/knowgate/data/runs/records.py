"""Needs on record as columns: what gates said of very many rows, a number for each row instead of a name and a number.

Gates are read one after another, so that the names of one are in memory at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from knowgate.core.files import read_jsonl, write_text
from knowgate.core.schema import NumberRange, UnitInterval, read_record
from knowgate.data.runs.folder import RunFolder
from knowgate.data.runs.storage import PackedTexts
from knowgate.errors import ArtifactError, BadInput
from knowgate.stats.metrics import FloatArray

NEEDS_FILE = "needs.jsonl"
NEED_DIGITS = 7  # so that scores which differ stay different


@dataclass(frozen=True)
class RecordedNeeds:
    """What one gate said: need by question id. seconds: per question, None if it was not timed.

    raw: the scores of a fitted gate before calibration, by question id; empty of other gates.
    far: share of the questions that lie far from those the gate was fitted on, None if it does not know.
    scoring: identity of the fitted gate that gave them, whatever its threshold; '' where that is not known.
    """

    gate: str
    threshold: float
    needs: Mapping[str, UnitInterval] = field(repr=False)
    about: str = ""
    seconds: Annotated[float, NumberRange(0)] | None = None
    raw: Mapping[str, UnitInterval] = field(default_factory=dict, repr=False)
    far: UnitInterval | None = None
    scoring: str = ""


def read_needs(run: Path) -> list[RecordedNeeds]:
    """Every gate recorded in this run, in the order it was recorded."""
    return list(iterate_needs(run))


def iterate_needs(run: Path) -> Iterator[RecordedNeeds]:
    """The same, one after another: of many rows, one gate takes some 100 MB."""
    file = RunFolder(run).file(NEEDS_FILE)
    if file.is_file():
        for number, record in read_jsonl(file):
            yield _parsed(record, f"{file} line {number}")


def _parsed(record: Mapping[str, Any], where: str) -> RecordedNeeds:
    try:
        recorded = read_record(RecordedNeeds, record, where)
    except BadInput as error:
        raise ArtifactError(f"{str(error).rstrip('.')}: these are no needs that a gate gave.") from None
    if recorded.raw and recorded.raw.keys() != recorded.needs.keys():
        raise ArtifactError(f"{where}: gate '{recorded.gate}' has raw scores of other questions than its needs.")
    return recorded


def load_shared_needs(runs: Sequence[Path], names: Sequence[str]) -> dict[str, RecordedNeeds]:
    """Gates on record in every one of the runs, with their needs under the rows' keys."""
    parts = [{item.gate: item for item in read_needs(run)} for run in runs]
    shared = [gate for gate in parts[0] if all(gate in part for part in parts)]
    return {gate: merge_needs([part[gate] for part in parts], names) for gate in shared}


def merge_needs(items: Sequence[RecordedNeeds], names: Sequence[str]) -> RecordedNeeds:
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
        write_text(run / NEEDS_FILE, "".join(_line(item) for item in [*kept, *recorded]))


def _line(item: RecordedNeeds) -> str:
    record: dict[str, Any] = {"gate": item.gate, "threshold": item.threshold, "needs": _rounded(item.needs)}
    record |= {"raw": _rounded(item.raw)} if item.raw else {}
    record |= {"about": item.about} if item.about else {}
    record |= {"seconds": round(item.seconds, 5)} if item.seconds is not None else {}
    record |= {"far": round(item.far, 5)} if item.far is not None else {}
    record |= {"scoring": item.scoring} if item.scoring else {}
    return json.dumps(record, ensure_ascii=False) + "\n"


def _rounded(scores: Mapping[str, float]) -> dict[str, float]:
    return {name: round(float(score), NEED_DIGITS) for name, score in scores.items()}


@dataclass(frozen=True, eq=False)
class AlignedScores(Mapping[str, float]):
    """Scores by key, in the order of the rows; NaN: none of that row."""

    keys_in_order: Sequence[str] = field(repr=False)
    scores: FloatArray = field(repr=False)

    def __len__(self) -> int:
        return int((~np.isnan(self.scores)).sum())

    def __iter__(self) -> Iterator[str]:
        return (key for key, score in zip(self.keys_in_order, self.scores, strict=True) if not np.isnan(score))

    def __getitem__(self, key: str) -> float:
        return float(self.scores[self._place[key]])

    @cached_property
    def _place(self) -> dict[str, int]:
        known = set(self)
        return {key: place for place, key in enumerate(self.keys_in_order) if key in known}


def align_scores(scores: Mapping[str, float], keys: Sequence[str]) -> FloatArray:
    """The score of each key; NaN where there is none."""
    if isinstance(scores, AlignedScores) and scores.keys_in_order is keys:
        return scores.scores
    return np.array([scores.get(key, np.nan) for key in keys], dtype=np.float64)


def select_needs(item: RecordedNeeds, chosen: NDArray[np.int64], keys: Sequence[str]) -> RecordedNeeds:
    """Of some of the rows, which have these keys."""
    needs, raw = (
        AlignedScores(keys, scores.scores[chosen]) if isinstance(scores, AlignedScores) else scores
        for scores in (item.needs, item.raw)
    )
    return replace(item, needs=needs, raw=raw)


def load_aligned_needs(
    runs: Sequence[Path], names: Sequence[str], keys: Sequence[str], run: NDArray[np.int32]
) -> dict[str, RecordedNeeds]:
    """Gates on record in every one of the runs, as `shared_needs` finds them, with their scores in the rows' order.

    run: the number of each row's run.
    """
    parts: list[dict[str, _Said]] = []
    for number, path in enumerate(runs):
        places, start = np.flatnonzero(run == number), len(names[number]) + 1
        ids = PackedTexts.of(keys[place][start:] for place in places.tolist())
        parts.append({item.gate: _said(item, ids) for item in iterate_needs(path)})
    shared = [gate for gate in parts[0] if all(gate in part for part in parts)]
    return {gate: _joined([part[gate] for part in parts], names, keys, run) for gate in shared}


@dataclass(frozen=True)
class _Said:
    """What a gate said of one run, its scores as columns. about: the rest, with nothing but how many there were."""

    about: RecordedNeeds
    needs: FloatArray
    raw: FloatArray


def _said(item: RecordedNeeds, ids: Sequence[str]) -> _Said:
    counted = replace(item, needs=_Counted(item.needs), raw=_Counted(item.raw))
    return _Said(counted, align_scores(item.needs, ids), align_scores(item.raw, ids))


class _Counted(dict[str, Any]):
    """Nothing but how many there were."""

    def __init__(self, scores: Mapping[str, float]):
        super().__init__()
        self._n = len(scores)

    def __len__(self) -> int:
        return self._n


def _joined(said: Sequence[_Said], names: Sequence[str], keys: Sequence[str], run: NDArray[np.int32]) -> RecordedNeeds:
    item = merge_needs([one.about for one in said], names)
    needs, raw = np.full(len(keys), np.nan), np.full(len(keys), np.nan)
    for number, one in enumerate(said):
        needs[run == number], raw[run == number] = one.needs, one.raw
    has_raw = all(one.about.raw for one in said)
    return replace(item, needs=AlignedScores(keys, needs), raw=AlignedScores(keys, raw) if has_raw else {})


BELIEFS_FILE = "beliefs.jsonl"
BELIEF_DIGITS = 7


@dataclass(frozen=True)
class RecordedBeliefs:
    """How probably each answer is right, by question id. agreed: ids whose two answers are the same.

    fingerprint: of the arbiter, so that one fitted anew is asked anew.
    """

    arbiter: str
    fingerprint: str
    closed: Mapping[str, UnitInterval] = field(repr=False)
    open: Mapping[str, UnitInterval] = field(repr=False)
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
    file = RunFolder(run).file(BELIEFS_FILE)
    if not file.is_file():
        return []
    return [_beliefs_parsed(record, f"{file} line {number}") for number, record in read_jsonl(file)]


def _beliefs_parsed(record: Mapping[str, Any], where: str) -> RecordedBeliefs:
    try:
        found = read_record(RecordedBeliefs, record, where)
    except BadInput as error:
        raise ArtifactError(f"{str(error).rstrip('.')}: these are no beliefs that an arbiter had.") from None
    if found.closed.keys() != found.open.keys():
        raise ArtifactError(f"{where}: the arbiter '{found.arbiter}' has beliefs on one of two answers only.")
    return found


def write_beliefs(run: Path, recorded: RecordedBeliefs) -> None:
    """Keep this beside the rows; what was recorded before of an arbiter of that name is replaced."""
    with RunFolder(run).exclusive():
        kept = [item for item in read_beliefs(run) if item.arbiter != recorded.arbiter]
        write_text(run / BELIEFS_FILE, "".join(_beliefs_line(item) for item in [*kept, recorded]))


def _beliefs_line(item: RecordedBeliefs) -> str:
    sides = {side: _beliefs_rounded(values) for side, values in (("closed", item.closed), ("open", item.open))}
    return json.dumps({**asdict(item), **sides, "agreed": list(item.agreed)}, ensure_ascii=False) + "\n"


def _beliefs_rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {key: round(value, BELIEF_DIGITS) for key, value in values.items()}


USEFULNESS_FILE = "useful.jsonl"


@dataclass(frozen=True)
class RecordedUsefulness:
    """Whether passages are of use, by question id. fingerprint: of the judge, so that one fitted anew is asked anew."""

    judge: str
    fingerprint: str
    useful: Mapping[str, bool] = field(repr=False)


def read_usefulness(run: Path) -> list[RecordedUsefulness]:
    """Every judge recorded in this run."""
    file = RunFolder(run).file(USEFULNESS_FILE)
    if not file.is_file():
        return []
    return [_usefulness_parsed(record, f"{file} line {number}") for number, record in read_jsonl(file)]


def _usefulness_parsed(record: Mapping[str, Any], where: str) -> RecordedUsefulness:
    try:
        return read_record(RecordedUsefulness, record, where)
    except BadInput as error:
        raise ArtifactError(f"{str(error).rstrip('.')}: these are no verdicts that a judge gave.") from None


def write_usefulness(run: Path, recorded: RecordedUsefulness) -> None:
    """Keep this beside the rows; what was recorded before of a judge of that name is replaced."""
    with RunFolder(run).exclusive():
        kept = [item for item in read_usefulness(run) if item.judge != recorded.judge]
        lines = [
            json.dumps({"judge": item.judge, "fingerprint": item.fingerprint, "useful": dict(item.useful)}) + "\n"
            for item in [*kept, recorded]
        ]
        write_text(run / USEFULNESS_FILE, "".join(lines))
