"""Label runs read for an evaluation: one question a row, answered both ways, with everything gates saw then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.errors import BadInput, BadSetting
from knowgate.files import sha256_text
from knowgate.runs.needs import RecordedNeeds, read_needs
from knowgate.runs.readings import question_of, recorded, recorded_layers
from knowgate.runs.rows import GradedAnswer, LabelRow
from knowgate.runs.run_folder import RunFolder
from knowgate.runs.slices import slice_values
from knowgate.statistics import Bools, Floats
from knowgate.types import Question, Reading

DEV_SHARE = 0.3  # questions a threshold may be chosen on when no other run is given for it


@dataclass(frozen=True)
class Trial:
    """Questions of one model under one wording. opened is None where no row has an open-book answer.

    keys: a name for each row over all runs. left_out: how many rows are not used, by reason. unopened: rows whose
    retrieval found nothing; they are answered closed-book either way.
    """

    rows: list[LabelRow]
    keys: list[str]
    questions: list[Question]
    readings: list[Reading]
    closed: Bools
    opened: Bools | None
    settings: dict[str, Any]
    runs: list[str]
    recorded: dict[str, RecordedNeeds]
    left_out: dict[str, int]
    unopened: int = 0

    @property
    def dev(self) -> Bools:
        """Rows a threshold may be chosen on; which ones depends on the question's id alone."""
        places = [int(sha256_text("dev", row.id)[:8], 16) / 16**8 for row in self.rows]
        return np.array(places) < DEV_SHARE

    def subset(self, places: Sequence[int]) -> Trial:
        """Some of the rows."""
        if not places:
            raise BadInput("no question is left to evaluate.", brief="no question is left")
        names = ("rows", "keys", "questions", "readings")
        lists: dict[str, Any] = {name: [getattr(self, name)[place] for place in places] for name in names}
        opened = self.opened[places] if self.opened is not None else None
        return replace(self, closed=self.closed[places], opened=opened, **lists)

    def open_tokens(self) -> Floats:
        return np.array([_length(row.open) for row in self.rows])

    def closed_tokens(self) -> Floats:
        return np.array([_length(row.closed) for row in self.rows])

    def slices(self) -> list[dict[str, str]]:
        return [slice_values(row) for row in self.rows]


def load_trial(runs: Sequence[Path], *, states: bool = True) -> Trial:
    """All graded rows of these runs. states: with the hidden states that probes need."""
    folders = [RunFolder(run) for run in runs]
    settings = [folder.settings() for folder in folders]
    _check_same(settings, runs)
    rows: list[LabelRow] = []
    keys: list[str] = []
    readings: list[Reading] = []
    left_out = {"failed": 0, "not graded": 0}
    for folder in folders:
        every = list(folder.rows())
        kept = [row for row in every if row.error is None and row.closed and row.closed.correct is not None]
        left_out["failed"] += sum(row.error is not None for row in every)
        left_out["not graded"] += len(every) - len(kept) - sum(row.error is not None for row in every)
        layers = recorded_layers(folder) if states else []
        readings += recorded(folder, kept, layers)
        keys += [f"{folder.path.name}/{row.id}" for row in kept]
        rows += kept
    if not rows:
        raise BadInput(f"there is nothing to evaluate: no graded row in {', '.join(map(str, runs))}.")
    has_open = any(row.open is not None for row in rows)
    closed = np.array([bool(row.closed and row.closed.correct) for row in rows])
    opened = np.array([_opened(row) for row in rows]) if has_open else None
    unopened = sum(row.open is None for row in rows) if has_open else 0
    questions = [question_of(row) for row in rows]
    found = _recorded_needs(runs)
    return Trial(
        rows, keys, questions, readings, closed, opened, settings[0], list(map(str, runs)), found, left_out, unopened
    )


def _opened(row: LabelRow) -> bool:
    """Where nothing was found the pipeline answers closed-book."""
    side = row.open if row.open is not None and row.open.correct is not None else row.closed
    return bool(side and side.correct)


def _length(side: GradedAnswer | None) -> float:
    """Tokens of the greedy answer; words where the backend gave no tokens."""
    if side is None:
        return 0.0
    return float(len(side.tokens) if side.tokens is not None else len(side.text.split()))


def _recorded_needs(runs: Sequence[Path]) -> dict[str, RecordedNeeds]:
    """Gates on record in every one of the runs, with their needs under the rows' keys."""
    parts = [{item.gate: item for item in read_needs(run)} for run in runs]
    shared = [name for name in parts[0] if all(name in part for part in parts)]
    return {name: _joined([part[name] for part in parts], runs) for name in shared}


def _joined(items: Sequence[RecordedNeeds], runs: Sequence[Path]) -> RecordedNeeds:
    needs = {
        f"{run.name}/{key}": need for run, item in zip(runs, items, strict=True) for key, need in item.needs.items()
    }
    timed = [item.seconds for item in items if item.seconds is not None]
    seconds = float(np.mean(timed)) if len(timed) == len(items) else None
    return RecordedNeeds(items[0].gate, items[0].threshold, needs, items[0].about, seconds)


def _check_same(settings: Sequence[dict[str, Any]], runs: Sequence[Path]) -> None:
    for key in ("model_fingerprint", "prompts_fingerprint"):
        if len({str(item[key]) for item in settings}) > 1:
            listed = "; ".join(f"{run}: {item[key]}" for run, item in zip(runs, settings, strict=True))
            raise BadSetting(
                f"the label runs are of different {key.split('_')[0]}s ({listed}); evaluate one model at a time."
            )
    names = [run.resolve().name for run in runs]
    if len(set(names)) < len(names):
        raise BadSetting(f"two label runs have the same folder name ({', '.join(names)}); give each its own.")
