"""Rows and run folders written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from knowgate.data.runs.folder import RunFolder
from knowgate.data.runs.rows import GradedAnswer, LabelRow
from knowgate.data.signals.samples import retrieval_benefit, retrieval_effect
from knowgate.types import Passage

SETTINGS = {"model": "fake", "data": "jsonl:q.jsonl", "grade": "contains", "samples": 10, "temperature": 1.0}


def side(
    correct: bool | None = True, mastery: float | None = 1.0, certainty: float | None = 1.0, text: str = "x"
) -> GradedAnswer:
    return GradedAnswer(text, correct=correct, mastery=mastery, certainty=certainty)


def row(
    identity: str, closed: GradedAnswer | None = None, opened: GradedAnswer | None = None, **values: Any
) -> LabelRow:
    """A row with the effects its sides imply."""
    found: dict[str, Any] = {"answers": ("Paris",), "grader": "contains", "lang": "en", "question": f"q {identity}"}
    if closed and opened:
        found["effect_mastery"] = retrieval_effect(closed.mastery, opened.mastery)
        found["effect_certainty"] = retrieval_effect(closed.certainty, opened.certainty)
        found["benefit"] = retrieval_benefit(closed.correct, opened.correct)
    return LabelRow(id=identity, closed=closed, open=opened, **{**found, **values})


def write_run(path: Path, rows: Sequence[LabelRow], **settings: Any) -> Path:
    folder = RunFolder(path)
    folder.start({**SETTINGS, **settings}, {})
    folder.append(rows, {})
    return path


def varied_rows(n: int = 60, strength: float = 0.5, *, opened: bool = True, masked: bool = True) -> list[LabelRow]:
    """Many questions of every kind, the same each time; a stronger model knows more of them."""
    return [_varied(i, strength, opened=opened, masked=masked) for i in range(n)]


def _varied(i: int, strength: float, *, opened: bool, masked: bool) -> LabelRow:
    before = min(10, round(i % 11 * (0.5 + strength))) / 10
    after = min(10, max(0, round(before * 10) + (5, 0, -3, 2, 0)[i % 5])) / 10
    before_certainty, after_certainty = round(0.3 * before + 0.07 * (i % 10), 3), (1.0, 0.85, 0.6)[i % 3]
    closed = side(before >= 0.5, before, before_certainty, "Paris" if before >= 0.5 else "Rome, I think")
    passages = tuple(
        Passage(f"p{i}-{k}", f"Paris is the capital of France. Fact {k}.", f"France {k}") for k in range(3)
    )
    open_side = side(after >= 0.5, after, after_certainty, "It is Paris." if after >= 0.5 else "Lyon")
    meta = {"dataset": ("nq", "webqa")[i % 2], "fact_type": ("fast-changing", "slow-changing", "never-changing")[i % 3]}
    done = row(
        f"q{i}",
        closed,
        open_side if opened else None,
        question=f"What is the capital of country number {i}?",
        lang=("en", "zh")[i % 2],
        meta=meta,
        answer_frequency=i % 7,
        passages=passages,
        seconds=0.5,
        tokens=120,
        guarded=int(i % 20 == 0),
        mask=side(False, None, None, ("MASK", "Rome", "The MASK", "Paris")[i % 4]) if masked and opened else None,
    )
    return done if i % 25 != 24 else LabelRow(f"q{i}", done.question, "en", error="the server did not answer in time")
