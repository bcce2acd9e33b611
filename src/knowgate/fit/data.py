"""Label runs to training data: one model, graded rows, disjoint splits grouped by question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from knowgate.errors import BadInput, BadSetting
from knowgate.files import sha256_text
from knowgate.gates.artefact import seen_key
from knowgate.labels.readings import question_of, recorded, recorded_layers
from knowgate.labels.rows import LabelRow
from knowgate.labels.run import RunFolder
from knowgate.types import Question, Reading

Target = Literal["known", "benefit"]
SHARES = {"train": 0.6, "dev": 0.1, "calibration": 0.15, "test": 0.15}
FEWEST = 40  # graded rows, below which splits are too small to mean anything
FEWEST_OF_A_KIND = 8


@dataclass(frozen=True)
class Split:
    """Row numbers of each part; no question is in two."""

    train: NDArray[np.int64]
    dev: NDArray[np.int64]
    calibration: NDArray[np.int64]
    test: NDArray[np.int64]

    def sizes(self) -> dict[str, int]:
        return {name: len(getattr(self, name)) for name in SHARES}


@dataclass(frozen=True)
class Examples:
    """Graded questions of one model under one wording, with what they should be told: True = needs retrieval."""

    rows: list[LabelRow]
    questions: list[Question]
    readings: list[Reading]
    needed: NDArray[np.bool_]
    target: Target
    split: Split
    settings: dict[str, Any]
    runs: list[str]

    @property
    def seen(self) -> list[str]:
        """Fingerprints of the questions that fitting looked at."""
        used = np.concatenate([self.split.train, self.split.dev, self.split.calibration])
        return sorted({seen_key(self.questions[place].text) for place in used})


def load_examples(
    runs: Sequence[Path], *, target: Target | None = None, layers: Sequence[int] | None = None, seed: int = 0
) -> Examples:
    """Everything a fit needs from label runs. `target` is benefit where open-book answers exist, unless given."""
    folders = [RunFolder(run) for run in runs]
    settings = [folder.manifest()["settings"] for folder in folders]
    _check_same(settings, runs)
    kept = [[row for row in folder.rows() if _is_graded(row)] for folder in folders]
    rows = [row for part in kept for row in part]
    chosen = target or ("benefit" if rows and all(row.benefit is not None for row in rows) else "known")
    needed = np.array([_needed(row, chosen) for row in rows], dtype=bool)
    _check_enough(needed, chosen)
    readings = [
        reading
        for folder, part in zip(folders, kept, strict=True)
        for reading in recorded(folder, part, recorded_layers(folder) if layers is None else layers)
    ]
    questions = [question_of(row) for row in rows]
    split = split_questions([question.text for question in questions], seed)
    return Examples(rows, questions, readings, needed, chosen, split, settings[0], [str(run) for run in runs])


def split_questions(texts: Sequence[str], seed: int) -> Split:
    """By a hash of the question, so equal questions go together and a row's part does not depend on the others."""
    places = np.array([int(sha256_text(str(seed), seen_key(text))[:12], 16) / 16**12 for text in texts])
    edges = np.cumsum(list(SHARES.values()))[:-1]
    part = np.searchsorted(edges, places, side="right")
    return Split(*(np.flatnonzero(part == number) for number in range(len(SHARES))))


def _is_graded(row: LabelRow) -> bool:
    return row.error is None and row.closed is not None and row.closed.correct is not None


def _needed(row: LabelRow, target: Target) -> bool:
    if target == "known":
        return not (row.closed and row.closed.correct)
    if row.benefit is None:
        raise BadSetting(f"row '{row.id}' has no open-book answer: label with passages, or use --target known.")
    return row.benefit > 0


def _check_same(settings: Sequence[dict[str, Any]], runs: Sequence[Path]) -> None:
    for key in ("model_fingerprint", "prompts_fingerprint"):
        found = {str(item[key]) for item in settings}
        if len(found) > 1:
            listed = "; ".join(f"{run}: {item[key]}" for run, item in zip(runs, settings, strict=True))
            raise BadSetting(f"the label runs are of different {key.split('_')[0]}s ({listed}); fit one gate for each.")


def _check_enough(needed: NDArray[np.bool_], target: Target) -> None:
    if len(needed) < FEWEST:
        raise BadInput(f"fitting needs at least {FEWEST} graded rows; the label runs have {len(needed)}. Label more.")
    yes, no = int(needed.sum()), int((~needed).sum())
    if min(yes, no) < FEWEST_OF_A_KIND:
        raise BadInput(
            f"fitting on '{target}' needs {FEWEST_OF_A_KIND} questions of each kind; the label runs have {yes} "
            f"that need retrieval and {no} that do not. Label more questions, or use the other --target."
        )
