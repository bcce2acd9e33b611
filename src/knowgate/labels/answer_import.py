"""Label runs from answers that were recorded elsewhere, for LLMs that cannot be run here.

The answers are texts in the `meta` of each question, or in other fields of its JSON line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from knowgate.core.files import sha256_text
from knowgate.data.runs.folder import RECORDED_PREFIX, RunFolder, hash_settings
from knowgate.data.runs.rows import GradedAnswer, LabelRow
from knowgate.data.signals.samples import retrieval_benefit
from knowgate.errors import BadInput
from knowgate.labels.grading import Grader
from knowgate.labels.labeler import make_empty_row
from knowgate.labels.run import build_synthetic_setting, describe_environment, fingerprint_questions
from knowgate.models.prompts.templates import detect_question_language
from knowgate.types import Question

IMPORT_BATCH = 1000  # questions graded and written at a time
TextsByKey = Mapping[str, str]


@dataclass(frozen=True)
class AnswerKeys:
    """Names of the data fields that hold the recorded answers; "" for an answer that was not recorded.

    Attributes:
        closed: Key of the closed-book answer.
        open: Key of the open-book answer.
        iterative: Key of the answer after several rounds of retrieval.
    """

    closed: str
    open: str = ""
    iterative: str = ""


def import_answers(
    folder: RunFolder,
    questions: Sequence[Question],
    grader: Grader,
    *,
    llm: str,
    data: str,
    keys: AnswerKeys,
    extra_fields: Mapping[str, TextsByKey] | None = None,
) -> int:
    """Grade recorded answers and write them as a label run.

    Args:
        folder: Run folder; an interrupted import continues.
        questions: Questions with gold answers.
        grader: Grades the answers.
        llm: Name of the LLM that gave the answers.
        data: Name of the data, recorded in the run.
        keys: Where the answers are.
        extra_fields: Texts by question id and field name. They are used for keys that the question's meta lacks.

    Returns:
        The number of questions imported by this call. Questions that already have a row are skipped.

    Raises:
        BadInput: A question has no text under one of the keys.
    """
    texts = [_collect_texts(question, extra_fields or {}) for question in questions]
    for key in (keys.closed, keys.open, keys.iterative):
        _check_all_have(questions, texts, key)
    with folder.exclusive():
        folder.start(_describe_import(questions, grader, llm, data), describe_environment())
        done = folder.done()
        remaining = [pair for pair in zip(questions, texts, strict=True) if pair[0].id not in done]
        for start in range(0, len(remaining), IMPORT_BATCH):
            folder.append(_make_rows(remaining[start : start + IMPORT_BATCH], grader, keys), {})
    return len(remaining)


def _make_rows(pairs: Sequence[tuple[Question, TextsByKey]], grader: Grader, keys: AnswerKeys) -> list[LabelRow]:
    """Grade the recorded answers of a batch and make its label rows."""
    questions = [question for question, _ in pairs]

    def grade(key: str) -> list[GradedAnswer | None]:
        if not key:
            return [None] * len(pairs)
        answers = [texts[key] for _, texts in pairs]
        grades = grader.grade(answers, questions)
        return [GradedAnswer(text, correct=grade.correct) for text, grade in zip(answers, grades, strict=True)]

    answers = zip(grade(keys.closed), grade(keys.open), grade(keys.iterative), strict=True)
    rows = [make_empty_row(question, detect_question_language(question), grader) for question in questions]
    return [
        replace(row, closed=closed, open=opened, iterative=iterative, benefit=_get_benefit(closed, opened))
        for row, (closed, opened, iterative) in zip(rows, answers, strict=True)
    ]


def _get_benefit(closed: GradedAnswer | None, opened: GradedAnswer | None) -> int | None:
    return retrieval_benefit(closed.correct, opened.correct) if closed and opened else None


def _collect_texts(question: Question, extra_fields: Mapping[str, TextsByKey]) -> TextsByKey:
    """Collect all texts recorded with a question by field name; if both have a name, `meta` wins."""
    meta = {key: text for key, text in question.meta.items() if isinstance(text, str)}
    return {**extra_fields.get(question.id, {}), **meta}


def _check_all_have(questions: Sequence[Question], texts: Sequence[TextsByKey], key: str) -> None:
    """Raise BadInput if a question has no text under the key.

    An empty text is accepted and graded as a wrong answer. An empty key means that the answer was not recorded.
    """
    missing = [number for number, available in enumerate(texts) if key and key not in available]
    if not missing:
        return
    first = missing[0]
    advice = "Give the name of the field that holds the answer."
    if len(missing) < len(questions):
        advice = "Leave them out of the data. If the LLM gave no answer, write an empty text; it counts as wrong."
    raise BadInput(
        f"{len(missing)} of {len(questions)} questions have no text under '{key}', neither in 'meta' nor at the top "
        f"level of their JSON line; the first is '{questions[first].id}', whose text fields are: "
        f"{', '.join(sorted(texts[first])) or 'none'}. {advice}"
    )


def _describe_import(questions: Sequence[Question], grader: Grader, llm: str, data: str) -> dict[str, Any]:
    """Return the settings that identify the imported run, in the form that `knowgate label` records them."""
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
