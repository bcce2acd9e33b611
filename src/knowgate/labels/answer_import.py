"""Label runs from answers that were recorded elsewhere, for LLMs that cannot be run here.

The answers are texts in the `meta` of each question, or in other fields of its record. Grades, passages,
log-probabilities and costs may be recorded beside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from knowgate.core.files import sha256_text
from knowgate.core.options import Options, option
from knowgate.core.validation import format_value
from knowgate.data.questions.files import ExtraFields
from knowgate.data.questions.records import extract_text, find_field, get_first_field
from knowgate.data.runs.folder import RECORDED_PREFIX, RunFolder, hash_settings
from knowgate.data.runs.rows import RECORDED_GRADER, GradedAnswer, LabelRow
from knowgate.data.signals.samples import retrieval_benefit
from knowgate.errors import BadInput, ModelError
from knowgate.labels.grading import Grader, make_empty_row
from knowgate.labels.run import build_synthetic_setting, describe_environment, fingerprint_questions
from knowgate.models.openai.responses import parse_logprobs
from knowgate.models.prompts.templates import detect_question_language
from knowgate.types import Passage, Question, Token

RIGHT_WORDS = frozenset({"true", "yes", "1", "right", "correct", "pass", "passed", "thumbs_up", "up", "positive", "👍"})
WRONG_WORDS = frozenset(
    {"false", "no", "0", "-1", "wrong", "incorrect", "fail", "failed", "thumbs_down", "down", "negative", "👎"}
)
PROMPT_TOKEN_FIELDS = ("prompt_tokens", "input_tokens", "promptTokens", "input")
ANSWER_TOKEN_FIELDS = ("completion_tokens", "output_tokens", "completionTokens", "output")
PASSAGE_TEXT_FIELDS = ("text", "content", "page_content", "document.content", "body", "snippet")
PASSAGE_TITLE_FIELDS = ("title", "metadata.title", "name")


def parse_grade(value: Any, where: str, pass_score: float | None) -> bool | None:
    """Return whether a recorded grade means right. None means not graded.

    Args:
        value: A boolean, 0 or 1, a word such as 'correct' or 'thumbs_down', or a score. None means not graded.
        where: The field and the question, for errors.
        pass_score: Scores of at least this value are right; None if the grades are not scores.

    Raises:
        BadInput: The value is not a grade, or it is a score and `pass_score` is not given.
    """
    if value is None or isinstance(value, bool):
        return value
    word = value.strip().lower() if isinstance(value, str) else None
    if word == "":
        return None
    if pass_score is None and word in RIGHT_WORDS | WRONG_WORDS:  # with `pass_score`, '1' is a score
        return word in RIGHT_WORDS
    score = _parse_number(value)
    if math.isnan(score):
        raise BadInput(f"{where} is {format_value(value)}, which is not a grade. Write true, false, 0, 1 or a score.")
    if pass_score is not None:
        return score >= pass_score
    if score not in (-1, 0, 1):  # some tools write -1 for a thumb down
        raise BadInput(f"{where} is {score:g}, not true or false. Set `pass_score` to the lowest right score.")
    return score == 1


def _parse_number(value: Any) -> float:
    """Convert a number, or a text with a number, to a float. Other values become NaN."""
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return math.nan


def parse_tokens(value: Any, where: str) -> tuple[Token, ...] | None:
    """Parse recorded log-probabilities of an answer.

    Args:
        value: The field `logprobs` of an OpenAI response, a list of objects with `token`, `logprob` and the most
            probable tokens (`top_logprobs` or `top`), or a list of log-probabilities. None means not recorded.
        where: The field and the question, for errors.

    Raises:
        BadInput: The value has another format.
    """
    if value is None:
        return None
    try:
        # A list is converted to OpenAI's field. Other values should already be in this format.
        field = {"content": [_make_chat_token(item) for item in value]} if isinstance(value, list) else value
        tokens = parse_logprobs(field)
    except (ModelError, KeyError, TypeError, ValueError):
        tokens = None
    if tokens is None:
        raise BadInput(
            f"{where} is {format_value(value)}, not a list of log-probabilities. Write one object per token: "
            '{"token": "Paris", "logprob": -0.1}'
        )
    return tuple(item.as_token() for item in tokens) or None


def _make_chat_token(item: Any) -> dict[str, Any]:
    """Convert a recorded token to the format of OpenAI's chat responses.

    Args:
        item: A log-probability, or an object with `logprob`, `token` and perhaps the most probable tokens as
            `top_logprobs` or `top`: a mapping from token to log-probability, a list of pairs, or a list of objects.
    """
    if not isinstance(item, Mapping):
        return {"token": "", "logprob": item}
    top = item.get("top_logprobs") or item.get("top") or ()
    # Each entry is an object, or a pair of a token and its log-probability.
    entries = top.items() if isinstance(top, Mapping) else top
    top_tokens = [
        entry if isinstance(entry, Mapping) else {"token": entry[0], "logprob": entry[1]} for entry in entries
    ]
    return {"token": item.get("token", ""), "logprob": item["logprob"], "top_logprobs": top_tokens}


def parse_passages(value: Any) -> tuple[Passage, ...]:
    """Parse recorded passages: a text, or a list of texts or objects. Entries without a text are left out."""
    if value is None:
        return ()
    items = value if isinstance(value, list) else [value]
    passages = [_parse_passage(item, number) for number, item in enumerate(items)]
    return tuple(passage for passage in passages if passage.text.strip())


def _parse_passage(item: Any, number: int) -> Passage:
    """Parse a recorded passage, which is a text or an object.

    Args:
        item: The passage. Tools name the fields of text and title differently, so all usual names are tried.
        number: Used as the id of a passage that has none.
    """
    if not isinstance(item, Mapping):
        return Passage(str(number), item if isinstance(item, str) else "")
    text = extract_text(get_first_field(item, PASSAGE_TEXT_FIELDS))
    title = extract_text(get_first_field(item, PASSAGE_TITLE_FIELDS))
    return Passage(str(item.get("id", number)), text, title)


def parse_token_counts(value: Any, where: str) -> tuple[int | None, int | None]:
    """Return the number of prompt tokens and the number of generated tokens of a recorded answer.

    Args:
        value: The number of generated tokens, or an object such as OpenAI's `usage`. None means not recorded.
        where: The field and the question, for errors.

    Returns:
        The number of prompt tokens and of generated tokens; None where unknown.
    """
    if not isinstance(value, Mapping):
        return None, _parse_count(value, where)
    prompt = get_first_field(value, PROMPT_TOKEN_FIELDS)
    answer = get_first_field(value, ANSWER_TOKEN_FIELDS)
    return _parse_count(prompt, where), _parse_count(answer, where)


def _parse_count(value: Any, where: str) -> int | None:
    """Parse a number of at least 0 and round it. None means not recorded."""
    number = parse_amount(value, where)
    return None if number is None else round(number)


def parse_amount(value: Any, where: str) -> float | None:
    """Parse a number of at least 0. None means not recorded."""
    if value is None or value == "":
        return None
    number = _parse_number(value)
    if not (math.isfinite(number) and number >= 0):
        raise BadInput(f"{where} must be a number of at least 0, not {format_value(value)}. Correct or remove it.")
    return number


IMPORT_BATCH = 1000  # questions graded and written at a time
META_PREFIX = "meta."


def _key_option(description: str, default: Any = "") -> Any:
    """Declare an option that names a field of the recorded data."""
    return option(default, description, metavar="KEY")


class ImportOptions(Options):
    """Names of the fields with the recorded answers, grades and costs.

    A name may be a dotted path, such as `correct.nor`. Empty names mean not recorded.
    """

    closed: str = _key_option(
        "Field that holds the answer without passages (closed-book). A key may be a dotted path. Fields are searched "
        "in the `meta` of each question, then at the top level of its record.",
        default=...,
    )
    open: str = _key_option("Field of the answer with passages (open-book). Default: none recorded.")
    iterative: str = _key_option("Field of the answer after several rounds of retrieval. Default: none recorded.")
    closed_correct: str = _key_option(
        "Field of the grade of the closed-book answer: true or false, 0 or 1, a thumb, or a score with `pass_score`. "
        "Scores of Langfuse, LangSmith and Phoenix are `scores.NAME`. Default: graded by `grade`."
    )
    open_correct: str = _key_option("Field of the grade of the open-book answer.")
    iterative_correct: str = _key_option("Field of the grade of the answer after several rounds.")
    pass_score: float | None = option(
        None, "Recorded scores of at least this value count as right.", allow_inf_nan=False
    )
    logprobs: str = _key_option(
        "Field of the token log-probabilities of the closed-book answer, in OpenAI's format or as a list of objects "
        "with `token` and `logprob`. Log-probability gates need them."
    )
    passages: str = _key_option(
        "Field of the passages of the open-book answer: a list of texts, or of objects with `text`. Default: the "
        "`contexts` of the question."
    )
    closed_tokens: str = _key_option("Field of the number of tokens of the closed-book answer, or of a `usage` object.")
    open_tokens: str = _key_option("Field of the number of tokens of the open-book answer.")
    closed_seconds: str = _key_option("Field of the seconds that the closed-book answer took.")
    open_seconds: str = _key_option("Field of the seconds that the open-book answer took.")

    def get_key(self, answer: str, suffix: str = "") -> str:
        """Return the field name of an answer, its grade or its cost. '' if the user named none.

        Args:
            answer: Which answer: 'closed', 'open' or 'iterative'.
            suffix: '' for the answer itself, '_correct' for its grade, '_tokens' or '_seconds' for its cost.
        """
        return str(getattr(self, answer + suffix, ""))


@dataclass(frozen=True)
class RecordedQuestion:
    """A question with answers recorded by another program.

    Attributes:
        question: The question.
        extra: The other fields of its record, such as the recorded answers and their grades.
    """

    question: Question
    extra: ExtraFields

    def get(self, key: str) -> Any:
        """Return the field with this name or dotted path, or None. The `meta` of the question is searched first."""
        meta = self.question.meta
        value = find_field(meta, key)
        return find_field({**self.extra, "meta": meta}, key) if value is None else value

    def parse(self, key: str, parser: Callable[[Any, str], Any]) -> Any:
        """Parse a field. The parser gets its value, and a name of the field for error messages."""
        return parser(self.get(key), f"'{key}' of the question '{self.question.id}'")

    def list_fields(self) -> str:
        """List the names of the fields, for an error message."""
        return ", ".join(sorted({**self.extra, **self.question.meta})) or "none"


def import_answers(
    folder: RunFolder,
    questions: Sequence[Question],
    grader: Grader,
    *,
    llm: str,
    data: str,
    options: ImportOptions,
    extra_fields: Mapping[str, ExtraFields] | None = None,
) -> int:
    """Write answers recorded elsewhere as a label run. Recorded grades count, or else the verdicts of `grader`.

    Args:
        folder: Run folder; an interrupted import continues.
        questions: Questions, with gold answers if the answers are not graded yet.
        grader: Grades the answers by comparing them with the gold answers.
        llm: Name of the LLM that gave the answers.
        data: Name of the data, recorded in the run.
        options: Names of the fields that hold the answers, grades, passages, log-probabilities and costs.
        extra_fields: Further fields of each imported record, by question id. A field that `options` names is taken from
            the question's `meta`, or else from here.

    Returns:
        The number of questions imported by this call. Questions that already have a row are skipped.

    Raises:
        BadInput: A question has no text under one of the answer keys, or a field has an invalid value.
    """
    extra_fields = extra_fields or {}
    records = [RecordedQuestion(question, extra_fields.get(question.id, {})) for question in questions]
    for key in (options.closed, options.open, options.iterative):
        _check_all_have_text(records, key)
    for key in (options.closed_correct, options.open_correct, options.iterative_correct):
        _check_any_has(records, key)
    rows = [_make_row(record, grader, options) for record in records]  # reports invalid fields before writing anything
    with folder.exclusive():
        folder.start(_describe_import(questions, grader, llm, data, options), describe_environment())
        done = folder.done()
        remaining = [row for row in rows if row.id not in done]
        for start in range(0, len(remaining), IMPORT_BATCH):
            folder.append(remaining[start : start + IMPORT_BATCH], {})
    return len(remaining)


def _make_row(record: RecordedQuestion, grader: Grader, options: ImportOptions) -> LabelRow:
    """Make the label row of a question from its recorded answers."""
    question = record.question
    closed_book = _make_answer(record, "closed", grader, options)
    open_book = _make_answer(record, "open", grader, options)
    row = make_empty_row(question, detect_question_language(question), grader)
    row = replace(
        row,
        grader=RECORDED_GRADER if options.closed_correct else row.grader,
        meta=_drop_field(question.meta, options.logprobs),  # they are stored with the answer
        closed=closed_book,
        open=open_book,
        iterative=_make_answer(record, "iterative", grader, options),
        tokens=_count_tokens(closed_book) + _count_tokens(open_book),
    )
    if closed_book is None or open_book is None:  # passages and benefit are stored only with both answers
        return row
    passages = parse_passages(record.get(options.passages)) if options.passages else question.contexts
    return replace(row, passages=passages, benefit=retrieval_benefit(closed_book.correct, open_book.correct))


def _count_tokens(answer: GradedAnswer | None) -> int:
    """Return the recorded number of tokens, or else count those with log-probabilities."""
    return answer.n_tokens or len(answer.tokens or ()) if answer else 0


def _make_answer(record: RecordedQuestion, name: str, grader: Grader, options: ImportOptions) -> GradedAnswer | None:
    """Make an answer with its grade and cost from the recorded fields, or None.

    Args:
        record: The question with its recorded fields.
        name: Which answer it is: 'closed', 'open' or 'iterative'.
        grader: Compares the answer with the gold answer. Its verdict counts unless a grade was recorded.
        options: Names of the recorded fields.
    """
    if not options.get_key(name):
        return None
    answer = _make_ungraded_answer(record, name, options)
    [grade] = grader.grade([answer.text], [record.question])
    grade_key = options.get_key(name, "_correct")
    if not grade_key:
        return replace(answer, correct=grade.correct)
    recorded_grade = record.parse(grade_key, partial(parse_grade, pass_score=options.pass_score))
    other_grades = {} if grade.correct is None else {grader.name: grade.correct}  # stored, but they do not count
    return replace(answer, correct=recorded_grade, other_grades=other_grades)


def _make_ungraded_answer(record: RecordedQuestion, name: str, options: ImportOptions) -> GradedAnswer:
    """Make an answer with its tokens and seconds from the recorded fields, without a grade."""
    text = str(record.get(options.get_key(name)))
    tokens = record.parse(options.logprobs, parse_tokens) if name == "closed" else None
    prompt_tokens, n_tokens = record.parse(options.get_key(name, "_tokens"), parse_token_counts)
    seconds = record.parse(options.get_key(name, "_seconds"), parse_amount)
    return GradedAnswer(text, tokens, n_tokens=n_tokens, prompt_tokens=prompt_tokens, seconds=seconds)


def _drop_field(meta: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return `meta` without the field `key` ('logprobs' or 'meta.logprobs')."""
    name = key.removeprefix(META_PREFIX)
    return {field: value for field, value in meta.items() if field != name}


def _check_all_have_text(records: Sequence[RecordedQuestion], key: str) -> None:
    """Raise BadInput if a question has no text in the field `key`. An empty text is accepted as a wrong answer."""
    missing = [record for record in records if not isinstance(record.get(key), str)]
    if key and missing:
        raise BadInput(
            f"{len(missing)} of {len(records)} questions have no text in the field '{key}'. Question '{missing[0].question.id}' "
            f"has these fields: {missing[0].list_fields()}. Name the field with the answer, or write an empty text for a "
            "missing answer."
        )


def _check_any_has(records: Sequence[RecordedQuestion], key: str) -> None:
    """Raise BadInput if no question has a grade in the field `key`. The name must be wrong then."""
    if key and records and all(record.get(key) is None for record in records):
        raise BadInput(
            f"no question has a grade in the field '{key}'. The first question has these fields: {records[0].list_fields()}. "
            "Name the field with the grade, such as scores.correct if it is nested."
        )


def _describe_import(
    questions: Sequence[Question], grader: Grader, llm: str, data: str, options: ImportOptions
) -> dict[str, Any]:
    """Return the settings that identify the imported run, as `knowgate label` records them."""
    has_recorded_grades = bool(options.closed_correct)  # then the verdicts of `grader` are stored, but do not count
    settings: dict[str, Any] = {
        "data": data,
        "data_fingerprint": fingerprint_questions(questions),
        "questions": len(questions),
        "model": f"{RECORDED_PREFIX}{llm}",
        "model_fingerprint": sha256_text("recorded", llm)[:16],
        "prompts_fingerprint": "recorded",
        "retriever": "recorded",
        "retriever_fingerprint": None,
        "grader": RECORDED_GRADER if has_recorded_grades else grader.name,
        "samples": 0,
        "temperature": None,
        **build_synthetic_setting(questions),
    }
    if has_recorded_grades:
        settings["second_grader"] = grader.name
    return {**settings, "hash": hash_settings(settings)}
