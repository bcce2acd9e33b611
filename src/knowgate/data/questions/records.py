"""What a line of a JSONL file says beside its question: texts under keys that are none of the format's own.

Only for answers that were recorded elsewhere, whose lines are often flat. A question knows nothing of this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from knowgate.core.files import read_jsonl
from knowgate.core.registry import split_spec
from knowgate.core.text import CHOICE_LETTERS
from knowgate.core.validation import expand_path, format_value, parse_json
from knowgate.errors import BadInput, BadSetting
from knowgate.types import Passage, Question

FieldValue = TypeVar("FieldValue")
TYPE_NAMES: dict[type, str] = {str: "a text", list: "a list", dict: "an object"}
MAX_ID_CHARS = 1_000  # characters: ids stand in tables and in sentences


def read_question_file(path: Path) -> Iterator[Question]:
    """The questions of a JSONL file, no two with one id."""
    lines: dict[str, int] = {}
    for number, record in read_jsonl(path):
        question = parse_question(record, f"{path} line {number}", default_id=str(number))
        before = lines.setdefault(question.id, number)
        if before != number:
            own = format_value(question.id)
            raise BadInput(f"{path} line {number} has the id {own} of line {before}; ids must be unique.")
        yield question


def parse_question(record: dict[str, Any], where: str, default_id: str) -> Question:
    """A record as a question; what is missing or of the wrong kind is named."""
    text = record.get("question")
    if not isinstance(text, str) or not text.strip():
        raise BadInput(f"{where}: 'question' is missing or empty. Write it as a text.")
    choices = _strings(record, "choices", where)
    return Question(
        text=text,
        id=default_id if record.get("id") is None else _id(record["id"], where),
        answers=_strings(record, "answers", where),
        lang=_checked(record, "lang", str, where),
        choices=choices,
        contexts=_contexts(record, where),
        meta=_meta(record, choices, where),
    )


def _id(value: object, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        raise BadInput(
            f"{where}: 'id' must be a text or a number, not {format_value(value)}; leave it out for the line's."
        )
    text = str(value)
    if len(text) > MAX_ID_CHARS:
        raise BadInput(f"{where}: 'id' has {len(text):,} characters; at most {MAX_ID_CHARS:,} are read.")
    return text


def _checked(record: dict[str, Any], key: str, kind: type[FieldValue], where: str) -> FieldValue | None:
    value = record.get(key)
    if value is not None and not isinstance(value, kind):
        raise BadInput(f"{where}: '{key}' must be {TYPE_NAMES[kind]}, not {format_value(value)}.")
    return value


def _strings(record: dict[str, Any], key: str, where: str) -> tuple[str, ...]:
    items = _checked(record, key, list, where) or []
    wrong = [item for item in items if not isinstance(item, str | int | float)]
    if wrong:
        raise BadInput(f"{where}: '{key}' must hold texts, not {format_value(wrong[0])}.")
    return tuple(str(item) for item in items)


def _meta(record: dict[str, Any], choices: tuple[str, ...], where: str) -> dict[str, Any]:
    """The rest of a record. Choices need a letter each, and so does the right one."""
    if len(choices) > len(CHOICE_LETTERS):
        raise BadInput(f"{where}: there are {len(choices)} choices; at most {len(CHOICE_LETTERS)} have a letter.")
    meta = _checked(record, "meta", dict, where) or {}
    letter = meta.get("gold_letter")
    letters = CHOICE_LETTERS[: len(choices)]
    if choices and letter and str(letter).strip().upper() not in tuple(letters):
        raise BadInput(f"{where}: 'gold_letter' is {format_value(letter)}; the choices have {', '.join(letters)}.")
    return meta


def _contexts(record: dict[str, Any], where: str) -> tuple[Passage, ...]:
    passages = []
    for number, item in enumerate(_checked(record, "contexts", list, where) or []):
        if not isinstance(item, dict) or not isinstance(item.get("text"), str):
            raise BadInput(f"{where}: each of 'contexts' must be an object with a 'text'.")
        name = number if item.get("id") is None else _id(item["id"], f"{where}, context {number + 1}")
        title = _checked(item, "title", str, f"{where}, context {number + 1}")
        passages.append(Passage(str(name), item["text"], title or ""))
    return tuple(passages)


QUESTION_FIELDS = frozenset({"question", "id", "answers", "lang", "choices", "contexts", "meta"})


def read_extra_fields(spec: str) -> dict[str, Mapping[str, str]]:
    """The texts at the top of each line, by the question's id; nothing for sources that are no JSONL file."""
    kind, file = split_spec(spec)
    if kind != "jsonl":
        return {}
    found: dict[str, Mapping[str, str]] = {}
    for number, record in read_jsonl(expand_path(file)):
        own = parse_question(record, f"{file} line {number}", default_id=str(number)).id
        found[own] = {key: text for key, text in record.items() if key not in QUESTION_FIELDS and isinstance(text, str)}
    return found


ANSWER_KEY = "answer"  # the key of `meta` under which a recorded answer is found
TEXT_FIELDS = (
    "question", "query", "input", "text", "content", "output", "answer", "output_text", "response", "result",
    "messages", "message", "choices", "generations", "kwargs",
)  # fmt: skip
MAX_DEPTH = 12


@dataclass(frozen=True)
class FieldMapping:
    """Where things are in a record; several names: the first that is there. split: what parts several gold answers."""

    question: tuple[str, ...]
    answers: tuple[str, ...] = ()
    id: tuple[str, ...] = ()
    answer: tuple[str, ...] = ()
    split: str = ""


def parse_query_options(query: str, known: Sequence[str], what: str) -> dict[str, str]:
    """`a=b&c=d`, every name known."""
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = [name for name in options if name not in known]
    if unknown:
        raise BadSetting(f"'{what}:' has no option {format_value(unknown[0])}. Known options: {', '.join(known)}.")
    return options


def override_fields(columns: FieldMapping, options: Mapping[str, str]) -> FieldMapping:
    """The user's names before all others."""
    named = {name: (options[name],) for name in ("question", "answers", "id", "answer") if options.get(name)}
    return FieldMapping(
        named.get("question", columns.question),
        named.get("answers", columns.answers),
        named.get("id", columns.id),
        named.get("answer", columns.answer),
        options.get("split", columns.split),
    )


def convert_records(records: Iterator[tuple[str, dict[str, Any]]], columns: FieldMapping) -> Iterator[Question]:
    """Each record with its place, as a question; all other texts of the record are its meta."""
    for number, (where, record) in enumerate(records, start=1):
        asked = extract_text(_first(record, columns.question))
        if not asked.strip():
            known = ", ".join(sorted(flatten_texts(record))[:30]) or "nothing"
            raise BadInput(
                f"{where} has no question under {' or '.join(columns.question)}; it has: {known}. "
                "Name it: ?question=FIELD"
            )
        meta = {name: text for name, text in flatten_texts(record).items() if name not in columns.question}
        recorded = _first(record, columns.answer)
        meta |= {ANSWER_KEY: extract_text(recorded)} if recorded is not None else {}
        own = _first(record, columns.id)
        made = {"question": asked, "answers": _golds(_first(record, columns.answers), columns.split), "meta": meta}
        yield parse_question(made if own is None else {**made, "id": own}, where, default_id=str(number))


def find_field(record: Any, name: str) -> Any:
    """A field, or one inside another: 'outputs.answer'; None where there is none."""
    if isinstance(record, Mapping) and name in record:
        return record[name]
    first, dot, rest = name.partition(".")
    if not dot or not isinstance(record, Mapping):
        return None
    inner = record.get(first)
    return find_field(_opened(inner), rest) if inner is not None else None


def flatten_texts(record: Mapping[str, Any], before: str = "", depth: int = 0) -> dict[str, str]:
    """Every text of a record by its name, those inside others as 'a.b'."""
    texts: dict[str, str] = {}
    for name, value in record.items():
        if isinstance(value, str):
            texts[before + str(name)] = value
        elif isinstance(value, Mapping) and depth < MAX_DEPTH:
            texts |= flatten_texts(value, f"{before}{name}.", depth + 1)
    return texts


def extract_text(value: Any, depth: int = 0) -> str:
    """The words in what a tool kept: a text, messages, a reply; '' where there are none."""
    value = _opened(value)
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if depth > MAX_DEPTH:
        return ""
    if isinstance(value, list):
        said = [one for one in value if not isinstance(one, Mapping) or one.get("role") not in ("system", "tool")]
        return extract_text(said[-1], depth + 1) if said else ""
    if isinstance(value, Mapping):
        named = (extract_text(value[name], depth + 1) for name in TEXT_FIELDS if value.get(name) is not None)
        return next((text for text in named if text), "") or _only(value, depth)
    return ""


def _only(value: Mapping[str, Any], depth: int) -> str:
    """The one field of an object that has one."""
    return extract_text(next(iter(value.values())), depth + 1) if len(value) == 1 else ""


def _opened(value: Any) -> Any:
    """JSON inside a text, as spans keep it."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    try:
        return parse_json(value, "it")
    except BadInput:
        return value


def _first(record: Mapping[str, Any], names: Sequence[str]) -> Any:
    found = (find_field(record, name) for name in names)
    return next((value for value in found if value is not None and value != ""), None)


def _golds(value: Any, split: str) -> list[str]:
    value = _opened(value)
    if isinstance(value, list):
        return [text for text in map(extract_text, value) if text]
    text = extract_text(value)
    parts = text.split(split) if split else [text]
    return [part.strip() for part in parts if part.strip()]
