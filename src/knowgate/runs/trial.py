"""Label runs read back: graded questions of one model, answered both ways, with everything gates saw then.

This is the one reader of label runs for whoever measures, fits or calibrates. Reports over rows as they are, failed
ones included, go through `RunFolder.rows`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.errors import BadInput
from knowgate.files import sha256_text
from knowgate.runs.caveats import tell_mixed
from knowgate.runs.needs import RecordedNeeds, read_needs
from knowgate.runs.readings import question_of, recorded, recorded_layers
from knowgate.runs.rows import GradedAnswer, LabelRow
from knowgate.runs.run_folder import RunFolder
from knowgate.runs.slices import FREQUENCY, frequency_thirds, slice_values
from knowgate.runs.split import dev_part
from knowgate.runs.together import check_together, names_of
from knowgate.statistics import Bools, Floats
from knowgate.types import Question, Reading

log = logging.getLogger(__name__)
USUAL_ROUNDS = 3.0
ONE_MODEL = "evaluate one model at a time"
TO_EVALUATE = {
    "model_fingerprint": ONE_MODEL,
    "prompts_fingerprint": ONE_MODEL,
    "reranker_fingerprint": "evaluate them one at a time, or side by side: knowgate sweep beta",
}


@dataclass(frozen=True)
class Trial:
    """Graded questions of one model under one wording.

    keys: a name for each row over all runs. settings: what the runs share. recorded: needs on record, by gate.
    left_out: how many rows are not used, by reason.
    """

    rows: list[LabelRow]
    keys: list[str]
    readings: list[Reading]
    settings: dict[str, Any]
    runs: list[str] = field(default_factory=list)
    recorded: dict[str, RecordedNeeds] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)

    @cached_property
    def questions(self) -> list[Question]:
        return [question_of(row) for row in self.rows]

    @cached_property
    def closed_right(self) -> Bools:
        """Whether the closed-book answer is right."""
        return np.array([_is_right(row.closed) for row in self.rows], dtype=bool)

    @cached_property
    def open_right(self) -> Bools | None:
        """Whether the answer with passages is right; None where no row has one.

        Where nothing was found, the pipeline answers closed-book.
        """
        if all(row.open is None for row in self.rows):
            return None
        return np.array([_is_right(_opened(row)) for row in self.rows], dtype=bool)

    @property
    def always_right(self) -> Bools:
        """What always retrieving comes to: without any open-book answer, the closed-book ones."""
        return self.closed_right if self.open_right is None else self.open_right

    @cached_property
    def iterative_right(self) -> Bools | None:
        """Whether the answer after several rounds of retrieval is right; None where not every opened row has one."""
        opened = [row for row in self.rows if row.open is not None]
        if not opened or any(row.iterative is None for row in opened):
            return None
        return np.array([_is_right(row.iterative or row.closed) for row in self.rows], dtype=bool)

    @property
    def rounds(self) -> float:
        """Rounds of retrieval an iterative answer took, on average; 3 where that is not on record."""
        counted = [row.rounds for row in self.rows if row.rounds]
        return float(np.mean(counted)) if counted else USUAL_ROUNDS

    @property
    def unopened(self) -> int:
        """Rows whose retrieval found nothing, among others: they are answered closed-book either way."""
        return 0 if self.open_right is None else sum(row.open is None for row in self.rows)

    @property
    def dev(self) -> Bools:
        """Rows a threshold may be chosen on; which ones depends on the question's id alone."""
        return dev_part([row.id for row in self.rows])

    def subset(self, numbers: Iterable[int]) -> Trial:
        """The rows of these numbers, in their order."""
        chosen = [int(number) for number in numbers]
        return replace(
            self,
            rows=[self.rows[number] for number in chosen],
            keys=[self.keys[number] for number in chosen],
            readings=[self.readings[number] for number in chosen],
        )

    @property
    def has_lengths(self) -> bool:
        """Whether the rows tell how long answers were; grades without texts do not."""
        return bool(self.closed_tokens().any() or self.open_tokens().any())

    def open_tokens(self) -> Floats:
        return np.array([_length(row.open) for row in self.rows])

    def closed_tokens(self) -> Floats:
        return np.array([_length(row.closed) for row in self.rows])

    def slices(self) -> list[dict[str, str]]:
        """The parts each row belongs to, by dimension."""
        thirds = frequency_thirds([row.answer_frequency for row in self.rows])
        return [
            slice_values(row) | ({} if third is None else {FREQUENCY: third})
            for row, third in zip(self.rows, thirds, strict=True)
        ]


def load_trial(
    runs: Sequence[Path],
    *,
    layers: Sequence[int] | None = None,
    same: Mapping[str, str] = TO_EVALUATE,
    graded: bool = True,
) -> Trial:
    """All graded rows of these runs; with graded=False all that are answered.

    layers: those whose hidden states are read; None for all that were kept. same: the settings that the runs must
    share, with what to do where they do not.
    """
    if not runs:
        raise BadInput("there is no label run to read: name at least one.")
    settings = [RunFolder(run).settings() for run in runs]
    check_together(runs, settings, same)
    names = names_of(runs)
    rows: list[LabelRow] = []
    keys: list[str] = []
    readings: list[Reading] = []
    left_out = {"failed": 0, "not graded": 0}
    for run, name in zip(runs, names, strict=True):
        before = len(rows) + sum(left_out.values())
        kept = _usable(RunFolder(run), left_out, graded)
        n_rows = len(rows) + len(kept) + sum(left_out.values()) - before
        tell_unfinished(run, n_rows, RunFolder(run).settings().get("questions"))
        readings += _readings(RunFolder(run), kept, layers)
        keys += [f"{name}/{row.id}" for row in kept]
        rows += kept
    if not rows:
        lost = ", ".join(f"{count} {reason}" for reason, count in left_out.items() if count) or "no row at all"
        raise BadInput(
            f"there is no graded row in {', '.join(map(str, runs))}: {lost}. Label questions that have gold answers; "
            f"what is there is shown by: knowgate report {runs[0]}"
        )
    tell_mixed(rows)
    return Trial(rows, keys, readings, _shared(settings), [str(run) for run in runs], _needs(runs, names), left_out)


def tell_unfinished(run: Path, n_rows: int, wanted: object) -> None:
    """Say so where a run has rows for some of its questions only: its figures are those of a part."""
    if isinstance(wanted, int) and n_rows < wanted:
        words = "%s holds %d of %d questions: it was not finished. The same `knowgate label` goes on with it."
        log.warning(words, run, n_rows, wanted)


def _usable(folder: RunFolder, left_out: dict[str, int], graded: bool) -> list[LabelRow]:
    """The rows with an answer and, if asked, a verdict; the others are counted."""
    kept = []
    for row in folder.rows():
        if row.error is not None:
            left_out["failed"] += 1
        elif row.closed is None or (graded and row.closed.correct is None):
            left_out["not graded"] += 1
        else:
            kept.append(row)
    return kept


def _readings(folder: RunFolder, rows: Sequence[LabelRow], layers: Sequence[int] | None) -> list[Reading]:
    if not rows:
        return []  # a run of failed or ungraded rows has no states to look for
    return recorded(folder, rows, recorded_layers(folder) if layers is None else layers)


def _shared(settings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Settings of all runs; the data are those of every run, so they have a fingerprint of their own."""
    data = sha256_text(*(str(one.get("data_fingerprint")) for one in settings))[:16]
    return {**settings[0], "data_fingerprint": data}


def _opened(row: LabelRow) -> GradedAnswer | None:
    return row.open if row.open is not None and row.open.correct is not None else row.closed


def _is_right(side: GradedAnswer | None) -> bool:
    return bool(side and side.correct)


def _length(side: GradedAnswer | None) -> float:
    """Tokens of the greedy answer; words where the backend gave no tokens."""
    if side is None:
        return 0.0
    return float(len(side.tokens) if side.tokens is not None else len(side.text.split()))


def _needs(runs: Sequence[Path], names: Sequence[str]) -> dict[str, RecordedNeeds]:
    """Gates on record in every one of the runs, with their needs under the rows' keys."""
    parts = [{item.gate: item for item in read_needs(run)} for run in runs]
    shared = [gate for gate in parts[0] if all(gate in part for part in parts)]
    return {gate: _joined([part[gate] for part in parts], names) for gate in shared}


def _joined(items: Sequence[RecordedNeeds], names: Sequence[str]) -> RecordedNeeds:
    needs = _under_keys([item.needs for item in items], names)
    raw = _under_keys([item.raw for item in items], names) if all(item.raw for item in items) else {}
    timed = [item.seconds for item in items if item.seconds is not None]
    seconds = float(np.mean(timed)) if len(timed) == len(items) else None
    return RecordedNeeds(items[0].gate, items[0].threshold, needs, items[0].about, seconds, raw, _far(items))


def _under_keys(parts: Sequence[Mapping[str, float]], names: Sequence[str]) -> dict[str, float]:
    return {f"{name}/{key}": score for name, part in zip(names, parts, strict=True) for key, score in part.items()}


def _far(items: Sequence[RecordedNeeds]) -> float | None:
    """Over all questions of the runs; None where one of them does not say."""
    shares = [(item.far, len(item.needs)) for item in items if item.far is not None]
    if len(shares) < len(items):
        return None
    return sum(share * n for share, n in shares) / max(1, sum(n for _, n in shares))
