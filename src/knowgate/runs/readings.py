"""Recorded rows back to readings: what gates saw then, without running the LLM again."""

from __future__ import annotations

from collections.abc import Sequence

from knowgate.runs.rows import GradedAnswer, LabelRow
from knowgate.runs.run_folder import RunFolder
from knowgate.types import Completion, Question, Reading


def question_of(row: LabelRow) -> Question:
    return Question(row.question, id=row.id, answers=row.answers, lang=row.lang, choices=row.choices, meta=row.meta)


def recorded(folder: RunFolder, rows: Sequence[LabelRow], layers: Sequence[int] = ()) -> list[Reading]:
    """The reading of each row's bare question, with the hidden states of these layers."""
    before = {layer: folder.vectors(rows, f"before.{layer}") for layer in layers}
    after = {layer: folder.vectors(rows, f"after.{layer}") for layer in layers}
    return [
        Reading(
            draft=_completion(row.closed),
            samples=tuple(Completion(text) for text in row.closed.samples) if row.closed else (),
            hidden={layer: block[number] for layer, block in before.items()},
            hidden_after={layer: block[number] for layer, block in after.items()},
            signals=row.signals,
        )
        for number, row in enumerate(rows)
    ]


def bare_reading(row: LabelRow) -> Reading:
    """A row's reading without hidden states and samples."""
    return Reading(draft=_completion(row.closed), signals=row.signals)


def recorded_layers(folder: RunFolder) -> list[int]:
    """Layers whose states a run has kept."""
    return sorted(int(name.removeprefix("before.")) for name in folder.vector_names() if name.startswith("before."))


def _completion(side: GradedAnswer | None) -> Completion | None:
    if side is None:
        return None
    return Completion(side.text, side.tokens, side.finished, len(side.tokens or ()))
