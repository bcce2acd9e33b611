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
from knowgate.runs import LabelRow, RunFolder, Split, question_of, recorded, recorded_layers, seen_key, split_questions
from knowgate.types import Question, Reading

Target = Literal["known", "benefit"]
FEWEST = 40  # graded rows, below which splits are too small to mean anything
FEWEST_OF_A_KIND = 8
OPENED = 0.9  # share of rows with an open-book answer from which on the effect of retrieval can be learnt
FEWEST_TRAINED = 2  # different questions of each kind in the training split


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
        asked = [self.questions[place] for place in used]
        # by text, and by id for rows that were packed without their texts
        return sorted({seen_key(text) for question in asked for text in (question.text, f"id:{question.id}")})


def load_examples(
    runs: Sequence[Path], *, target: Target | None = None, layers: Sequence[int] | None = None, seed: int = 0
) -> Examples:
    """Everything a fit needs from label runs. `target` is benefit where open-book answers exist, unless given."""
    folders = [RunFolder(run) for run in runs]
    settings = [folder.settings() for folder in folders]
    _check_same(settings, runs)
    kept = [[row for row in folder.rows() if _is_graded(row)] for folder in folders]
    rows = [row for part in kept for row in part]
    if any(not row.question for row in rows):
        raise BadInput("the label runs are packed without their questions; fit on the runs they were made from.")
    chosen = target or _usual_target(rows)
    if chosen == "benefit" and _usual_target(rows) != "benefit":
        without = sum(row.benefit is None for row in rows)
        raise BadSetting(
            f"{without} of {len(rows)} rows have no open-book answer: label with passages, or use --target known."
        )
    needed = np.array([_needed(row, chosen) for row in rows], dtype=bool)
    _check_enough(needed, chosen)
    readings = [
        reading
        for folder, part in zip(folders, kept, strict=True)
        if part  # a run of failed or ungraded rows has nothing to add
        for reading in recorded(folder, part, recorded_layers(folder) if layers is None else layers)
    ]
    questions = [question_of(row) for row in rows]
    texts = [question.text for question in questions]
    split = split_questions(texts, seed)
    _check_train([texts[place] for place in split.train], needed[split.train])
    shared = {**settings[0], "data_fingerprint": sha256_text(*(str(one["data_fingerprint"]) for one in settings))[:16]}
    return Examples(rows, questions, readings, needed, chosen, split, shared, [str(run) for run in runs])


def verdicts(texts: Sequence[str], needed: NDArray[np.bool_]) -> dict[str, bool]:
    """Each different question by its fingerprint, with whether it needs retrieval the first time it is there."""
    found: dict[str, bool] = {}
    for text, need in zip(texts, needed.tolist(), strict=True):
        found.setdefault(seen_key(text), need)
    return found


def _usual_target(rows: Sequence[LabelRow]) -> Target:
    """Benefit where nearly every question has an open-book answer; the others found nothing to read."""
    opened = sum(row.benefit is not None for row in rows)
    return "benefit" if rows and opened >= OPENED * len(rows) else "known"


def _is_graded(row: LabelRow) -> bool:
    return row.error is None and row.closed is not None and row.closed.correct is not None


def _needed(row: LabelRow, target: Target) -> bool:
    if target == "known":
        return not (row.closed and row.closed.correct)
    return row.benefit is not None and row.benefit > 0  # where nothing was found retrieving does not help


def _check_same(settings: Sequence[dict[str, Any]], runs: Sequence[Path]) -> None:
    for key in ("model_fingerprint", "prompts_fingerprint"):
        found = {str(item[key]) for item in settings}
        if len(found) > 1:
            listed = "; ".join(f"{run}: {item[key]}" for run, item in zip(runs, settings, strict=True))
            raise BadSetting(f"the label runs are of different {key.split('_')[0]}s ({listed}); fit one gate for each.")
    if len({str(item.get("max_tokens")) for item in settings}) > 1:
        listed = "; ".join(f"{run}: {item.get('max_tokens')}" for run, item in zip(runs, settings, strict=True))
        raise BadSetting(f"the label runs drafted answers of different length ({listed}); label with one --max-tokens.")


def _check_enough(needed: NDArray[np.bool_], target: Target) -> None:
    if len(needed) < FEWEST:
        raise BadInput(f"fitting needs at least {FEWEST} graded rows; the label runs have {len(needed)}. Label more.")
    yes, no = int(needed.sum()), int((~needed).sum())
    if min(yes, no) < FEWEST_OF_A_KIND:
        raise BadInput(
            f"fitting on '{target}' needs {FEWEST_OF_A_KIND} questions of each kind; the label runs have {yes} "
            f"that need retrieval and {no} that do not. Label more questions, or use the other --target."
        )


def _check_train(texts: Sequence[str], needed: NDArray[np.bool_]) -> None:
    """Two questions of each kind: one may be put aside and there is still something to tell apart."""
    kinds = list(verdicts(texts, needed).values())
    yes, no = kinds.count(True), kinds.count(False)
    if min(yes, no) < FEWEST_TRAINED:
        raise BadInput(
            f"the training split has {yes} different questions that need retrieval and {no} that do not; fitting takes "
            f"{FEWEST_TRAINED} of each. Label more different questions, or try another --seed."
        )
