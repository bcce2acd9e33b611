"""Label runs from answers somebody else recorded: for LLMs whose weights nobody has. No model is run.

A question's `meta`, or what its line says beside it, holds the closed-book and, if there is one, the open-book answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from knowgate.core.files import sha256_text
from knowgate.data.runs.folder import RECORDED_PREFIX, RunFolder, hash_settings
from knowgate.data.runs.rows import GradedAnswer, LabelRow
from knowgate.data.signals.samples import retrieval_benefit
from knowgate.errors import BadInput
from knowgate.labels.grading import Grade, Grader, list_gold_answers
from knowgate.labels.run import build_synthetic_setting, describe_environment, fingerprint_questions
from knowgate.models.prompts.templates import detect_question_language
from knowgate.types import Question

IMPORT_BATCH = 1000
TextsByKey = Mapping[str, str]  # by key


def import_answers(
    folder: RunFolder,
    questions: Sequence[Question],
    grader: Grader,
    *,
    llm: str,
    data: str,
    closed: str,
    opened: str = "",
    iterative: str = "",
    beside: Mapping[str, TextsByKey] | None = None,
) -> int:
    """Write a run of recorded answers; `closed`, `opened` and `iterative` are keys of the questions' meta.

    iterative: of the answer after several rounds of retrieval. beside: texts by a question's id, for keys that its meta
    lacks.
    """
    texts = [_texts(question, beside or {}) for question in questions]
    for key in (closed, opened, iterative):
        _check_all_have(questions, texts, key)
    settings = _settings(questions, grader, llm, data)
    with folder.exclusive():
        folder.start(settings, describe_environment())
        done = folder.done()
        waiting = [pair for pair in zip(questions, texts, strict=True) if pair[0].id not in done]
        for place in range(0, len(waiting), IMPORT_BATCH):
            part = waiting[place : place + IMPORT_BATCH]
            folder.append(_rows(part, grader, closed, opened, iterative), {})
    return len(waiting)


def _rows(
    asked: Sequence[tuple[Question, TextsByKey]], grader: Grader, closed: str, opened: str, iterative: str
) -> list[LabelRow]:
    questions = [question for question, _ in asked]
    first = [texts[closed] for _, texts in asked]
    rows = [_blank(question, grader) for question in questions]
    verdicts = grader.grade(first, questions)
    rows = [
        replace(row, closed=GradedAnswer(a, correct=g.correct)) for row, a, g in zip(rows, first, verdicts, strict=True)
    ]
    if opened:
        second = [texts[opened] for _, texts in asked]
        judged = grader.grade(second, questions)
        rows = [_opened(row, text, grade) for row, text, grade in zip(rows, second, judged, strict=True)]
    if iterative:
        third = [texts[iterative] for _, texts in asked]
        last = [
            GradedAnswer(text, correct=grade.correct)
            for text, grade in zip(third, grader.grade(third, questions), strict=True)
        ]
        rows = [replace(row, iterative=answer) for row, answer in zip(rows, last, strict=True)]
    return rows


def _opened(row: LabelRow, text: str, grade: Grade) -> LabelRow:
    known = row.closed.correct if row.closed else None
    return replace(row, open=GradedAnswer(text, correct=grade.correct), benefit=retrieval_benefit(known, grade.correct))


def _texts(question: Question, beside: Mapping[str, TextsByKey]) -> TextsByKey:
    """Every text recorded with a question; its meta goes first."""
    within = {key: text for key, text in question.meta.items() if isinstance(text, str)}
    return {**beside.get(question.id, {}), **within}


def _check_all_have(questions: Sequence[Question], texts: Sequence[TextsByKey], key: str) -> None:
    """Before anything is written: an answer that is missing is not the same as an empty one, which is wrong."""
    without = [place for place, found in enumerate(texts) if key and key not in found]
    if not without:
        return
    first = without[0]
    advice = "Give the name of the key that holds it."
    if len(without) < len(questions):
        advice = "Leave them out of the data, or give them an empty text if the LLM said nothing: that counts as wrong."
    raise BadInput(
        f"{len(without)} of {len(questions)} questions have no text under '{key}', neither at the top of their line "
        f"(jsonl:) nor in its meta; first '{questions[first].id}', which has: "
        f"{', '.join(sorted(texts[first])) or 'none'}. {advice}"
    )


def _blank(question: Question, grader: Grader) -> LabelRow:
    return LabelRow(
        id=question.id,
        question=question.text,
        lang=detect_question_language(question),
        answers=tuple(list_gold_answers(question)),
        choices=question.choices,
        meta=question.meta,
        grader="choice" if question.choices else grader.name,
    )


def _settings(questions: Sequence[Question], grader: Grader, llm: str, data: str) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "data": data,
        "data_fingerprint": fingerprint_questions(questions),
        "questions": len(questions),
        "model": f"{RECORDED_PREFIX}{llm}",
        "model_fingerprint": sha256_text("recorded", llm)[:16],
        "prompts_fingerprint": "recorded",
        "retriever": "recorded",
        "retriever_fingerprint": None,
        "grader": grader.name,
        "samples": 0,
        "temperature": None,
        **build_synthetic_setting(questions),
    }
    return {**settings, "hash": hash_settings(settings)}
