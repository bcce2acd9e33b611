"""Converts JSON records to questions, in knowgate's own format or with a mapping of another tool's fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qsl

from knowgate.core.files import read_jsonl
from knowgate.core.schema import read_record
from knowgate.core.text import CHOICE_LETTERS
from knowgate.core.validation import format_value, parse_json
from knowgate.errors import BadInput, BadSetting
from knowgate.types import Passage, Question

Scalar = str | int | float | bool
MAX_ID_CHARS = 1_000  # ids are shown in tables and messages
ANSWER_KEY = "answer"  # key of `meta` that holds a recorded answer
TEXT_FIELDS = (
    "question", "query", "input", "text", "content", "output", "answer", "output_text", "response", "result",
    "messages", "message", "choices", "generations", "kwargs",
)  # fmt: skip
MAX_DEPTH = 12  # maximum depth of nested records; deeper texts are ignored


# --- knowgate's format ----------------------------------------------------------------------------


def read_question_file(path: Path) -> Iterator[Question]:
    """Read a JSONL file of questions. A question without an id gets its line number."""
    for number, record in read_jsonl(path):
        yield parse_question(record, f"{path} line {number}", default_id=str(number))


@dataclass(frozen=True)
class PassageRecord:
    """A passage of a question in a JSON record."""

    ignore_unknown: ClassVar[bool] = True
    text: str
    id: Scalar | None = None  # if None, the position in the list is the id
    title: str | None = None


@dataclass(frozen=True)
class QuestionRecord:
    """A question as a JSON record."""

    question: str
    id: Scalar | None = None  # None for a default
    answers: tuple[Scalar, ...] | None = None  # gold answers
    lang: str | None = None  # such as "en"
    choices: tuple[Scalar, ...] | None = None  # of a multiple-choice question
    contexts: tuple[PassageRecord, ...] | None = None  # passages given with the question
    meta: dict[str, Any] | None = None  # any further fields


def parse_question(record: dict[str, Any], where: str, default_id: str) -> Question:
    """Parse the record of a question.

    Args:
        record: JSON object.
        where: Location of the record, for errors.
        default_id: Id of a question without one.

    Raises:
        BadInput: A field is missing or has the wrong type.
    """
    parsed = read_record(QuestionRecord, record, where, ignore_unknown=True)
    if not parsed.question.strip():
        raise BadInput(f"{where}: 'question' is empty. Write its text.")
    choices = tuple(map(str, parsed.choices or ()))
    meta = parsed.meta or {}
    _check_choices(choices, meta, where)
    return Question(
        text=parsed.question,
        id=_format_id(parsed.id, default_id, where),
        answers=tuple(map(str, parsed.answers or ())),
        lang=parsed.lang,
        choices=choices,
        contexts=_parse_contexts(parsed.contexts or (), where),
        meta=meta,
    )


def _parse_contexts(contexts: Sequence[PassageRecord], where: str) -> tuple[Passage, ...]:
    """Convert the passages of a question. A passage without an id gets its number, from 0."""
    ids = [_format_id(record.id, str(number), where) for number, record in enumerate(contexts)]
    return tuple(Passage(key, record.text, record.title or "") for key, record in zip(ids, contexts, strict=True))


def _format_id(value: Scalar | None, default: str, where: str) -> str:
    """Convert an id to text; None means the default."""
    text = default if value is None else str(value)
    if not text.strip() or len(text) > MAX_ID_CHARS:
        raise BadInput(f"{where}: 'id' is empty or too long. Use at most {MAX_ID_CHARS:,} characters, or leave it out.")
    return text


def _check_choices(choices: tuple[str, ...], meta: Mapping[str, Any], where: str) -> None:
    """Raise BadInput if a choice or the gold choice has no letter."""
    if len(choices) > len(CHOICE_LETTERS):
        raise BadInput(
            f"{where}: the question has {len(choices)} choices. Use at most {len(CHOICE_LETTERS)}, one per letter."
        )
    gold = meta.get("gold_letter")
    letters = CHOICE_LETTERS[: len(choices)]
    if choices and gold and str(gold).strip().upper() not in tuple(letters):
        raise BadInput(
            f"{where}: 'gold_letter' is {format_value(gold)}, but no choice has this letter. Use one of "
            f"{', '.join(letters)}."
        )


# --- records of other tools -----------------------------------------------------------------------


@dataclass(frozen=True)
class FieldMapping:
    """Names of the fields to try for each part of a question. The first present field is used.

    Attributes:
        question: Fields of the question.
        answers: Fields of the gold answers.
        id: Fields of the id.
        answer: Fields of the recorded answer.
        split: Separator of several gold answers in one text; "" for none.
    """

    question: tuple[str, ...]
    answers: tuple[str, ...] = ()
    id: tuple[str, ...] = ()
    answer: tuple[str, ...] = ()
    split: str = ""


def parse_query_options(query: str, known: Sequence[str], source: str) -> dict[str, str]:
    """Parse the options of a data spec, such as 'a=b&c=d'."""
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = [name for name in options if name not in known]
    if unknown:
        raise BadSetting(f"'{source}:' has no option {format_value(unknown[0])}. Known options: {', '.join(known)}.")
    return options


def override_fields(mapping: FieldMapping, options: Mapping[str, str]) -> FieldMapping:
    """Replace the field names of a mapping by those that a data spec gives, as in 'csv:FILE?question=q'."""
    # Only the named field is tried, so the tuple of names has one item.
    fields = {name: (options[name],) for name in ("question", "answers", "id", "answer") if options.get(name)}
    return replace(mapping, split=options.get("split", mapping.split), **fields)


def convert_records(records: Iterator[tuple[str, dict[str, Any]]], mapping: FieldMapping) -> Iterator[Question]:
    """Convert records of other tools to questions. Other text fields go into `meta`.

    Args:
        records: Pairs of a location, for error messages, and a record.
        mapping: Which fields to use.
    """
    for number, (where, record) in enumerate(records, start=1):
        text = extract_text(get_first_field(record, mapping.question))
        texts = flatten_texts(record)
        if not text.strip():
            raise _make_missing_question_error(where, mapping, texts)
        meta = {name: value for name, value in texts.items() if name not in mapping.question}
        answer = get_first_field(record, mapping.answer)
        if answer is not None:
            meta[ANSWER_KEY] = extract_text(answer)
        golds = _split_answers(get_first_field(record, mapping.answers), mapping.split)
        question = {"question": text, "answers": golds, "meta": meta, "id": get_first_field(record, mapping.id)}
        yield parse_question(question, where, default_id=str(number))


def _make_missing_question_error(where: str, mapping: FieldMapping, texts: Mapping[str, str]) -> BadInput:
    """Make the error for a record without a question. It lists the fields of the record."""
    names = ", ".join(sorted(texts)[:30]) or "nothing"
    return BadInput(
        f"{where} has no field named {' or '.join(mapping.question)}. Its fields are: {names}. Name the field "
        "that contains the question: ?question=FIELD"
    )


def find_field(record: Any, name: str) -> Any:
    """Return a field of a record by its name or dotted path, such as 'outputs.answer'. None if missing."""
    if isinstance(record, Mapping) and name in record:
        return record[name]
    first, dot, rest = name.partition(".")
    if not dot or not isinstance(record, Mapping):
        return None
    inner = record.get(first)
    return find_field(parse_nested_json(inner), rest) if inner is not None else None


def flatten_texts(record: Mapping[str, Any], prefix: str = "", depth: int = 0) -> dict[str, str]:
    """Collect all texts of a record by name. A nested text is named by its path, as in 'a.b'."""
    texts: dict[str, str] = {}
    for name, value in record.items():
        if isinstance(value, str):
            texts[prefix + str(name)] = value
        elif isinstance(value, Mapping) and depth < MAX_DEPTH:
            texts |= flatten_texts(value, f"{prefix}{name}.", depth + 1)
    return texts


def extract_text(value: Any, depth: int = 0) -> str:
    """Extract the text of a recorded value, or "".

    Of a list of chat messages, the last one counts that is not from the system or a tool.
    """
    value = parse_nested_json(value)
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if depth > MAX_DEPTH:
        return ""
    if isinstance(value, list):
        for item in reversed(value):
            is_skipped = isinstance(item, Mapping) and item.get("role") in ("system", "tool")
            if not is_skipped:
                return extract_text(item, depth + 1)
    return _extract_field_text(value, depth + 1) if isinstance(value, Mapping) else ""


def _extract_field_text(record: Mapping[str, Any], depth: int) -> str:
    """Extract the first text among the usual fields of a record, or its only field."""
    texts = (extract_text(record[name], depth) for name in TEXT_FIELDS if record.get(name) is not None)
    first_text = next(filter(None, texts), "")
    if not first_text and len(record) == 1:  # the only field holds the text, whatever its name
        [only_value] = record.values()
        return extract_text(only_value, depth)
    return first_text


def parse_nested_json(value: Any) -> Any:
    """Parse a text of JSON. Other values are returned unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    try:
        return parse_json(value, where="nested value")
    except BadInput:
        return value


def get_first_field(record: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the value of the first field that is present and not empty, or None."""
    values = (find_field(record, name) for name in names)
    return next((value for value in values if value is not None and value != ""), None)


def _split_answers(value: Any, separator: str) -> list[str]:
    """Convert a recorded value to a list of gold answers.

    Args:
        value: A list of answers, or a text with one answer or several.
        separator: Separates the answers in a text; "" if the text is one answer.
    """
    value = parse_nested_json(value)
    if isinstance(value, list):
        return [text for text in map(extract_text, value) if text]
    text = extract_text(value)
    parts = text.split(separator) if separator else [text]
    return [part.strip() for part in parts if part.strip()]
