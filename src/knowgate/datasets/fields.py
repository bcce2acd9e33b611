"""Records of other tools: options that say where things are, fields inside fields, and the text in what is no text.

Knows no tool and no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from knowgate.datasets.parse import parse_question
from knowgate.doors import parse_json, shown
from knowgate.errors import BadInput, BadSetting
from knowgate.types import Question

ANSWER = "answer"  # the key of `meta` under which a recorded answer is found
INSIDE = (
    "question", "query", "input", "text", "content", "output", "answer", "output_text", "response", "result",
    "messages", "message", "choices", "generations", "kwargs",
)  # fmt: skip
DEEPEST = 12


@dataclass(frozen=True)
class Columns:
    """Where things are in a record; several names: the first that is there. split: what parts several gold answers."""

    question: tuple[str, ...]
    answers: tuple[str, ...] = ()
    id: tuple[str, ...] = ()
    answer: tuple[str, ...] = ()
    split: str = ""


def read_options(query: str, known: Sequence[str], what: str) -> dict[str, str]:
    """`a=b&c=d`, every name known."""
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = [name for name in options if name not in known]
    if unknown:
        raise BadSetting(f"'{what}:' has no option {shown(unknown[0])}. Known options: {', '.join(known)}.")
    return options


def with_options(columns: Columns, options: Mapping[str, str]) -> Columns:
    """The user's names before all others."""
    named = {name: (options[name],) for name in ("question", "answers", "id", "answer") if options.get(name)}
    return Columns(
        named.get("question", columns.question),
        named.get("answers", columns.answers),
        named.get("id", columns.id),
        named.get("answer", columns.answer),
        options.get("split", columns.split),
    )


def questions_of(records: Iterator[tuple[str, dict[str, Any]]], columns: Columns) -> Iterator[Question]:
    """Each record with its place, as a question; all other texts of the record are its meta."""
    for number, (where, record) in enumerate(records, start=1):
        asked = text_of(_first(record, columns.question))
        if not asked.strip():
            known = ", ".join(sorted(flat(record))[:30]) or "nothing"
            raise BadInput(
                f"{where} has no question under {' or '.join(columns.question)}; it has: {known}. "
                "Name it: ?question=FIELD"
            )
        meta = {name: text for name, text in flat(record).items() if name not in columns.question}
        recorded = _first(record, columns.answer)
        meta |= {ANSWER: text_of(recorded)} if recorded is not None else {}
        own = _first(record, columns.id)
        made = {"question": asked, "answers": _golds(_first(record, columns.answers), columns.split), "meta": meta}
        yield parse_question(made if own is None else {**made, "id": own}, where, default_id=str(number))


def find(record: Any, name: str) -> Any:
    """A field, or one inside another: 'outputs.answer'; None where there is none."""
    if isinstance(record, Mapping) and name in record:
        return record[name]
    first, dot, rest = name.partition(".")
    if not dot or not isinstance(record, Mapping):
        return None
    inner = record.get(first)
    return find(_opened(inner), rest) if inner is not None else None


def flat(record: Mapping[str, Any], before: str = "", depth: int = 0) -> dict[str, str]:
    """Every text of a record by its name, those inside others as 'a.b'."""
    texts: dict[str, str] = {}
    for name, value in record.items():
        if isinstance(value, str):
            texts[before + str(name)] = value
        elif isinstance(value, Mapping) and depth < DEEPEST:
            texts |= flat(value, f"{before}{name}.", depth + 1)
    return texts


def text_of(value: Any, depth: int = 0) -> str:
    """The words in what a tool kept: a text, messages, a reply; '' where there are none."""
    value = _opened(value)
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if depth > DEEPEST:
        return ""
    if isinstance(value, list):
        said = [one for one in value if not isinstance(one, Mapping) or one.get("role") not in ("system", "tool")]
        return text_of(said[-1], depth + 1) if said else ""
    if isinstance(value, Mapping):
        named = (text_of(value[name], depth + 1) for name in INSIDE if value.get(name) is not None)
        return next((text for text in named if text), "") or _only(value, depth)
    return ""


def _only(value: Mapping[str, Any], depth: int) -> str:
    """The one field of an object that has one."""
    return text_of(next(iter(value.values())), depth + 1) if len(value) == 1 else ""


def _opened(value: Any) -> Any:
    """JSON inside a text, as spans keep it."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    try:
        return parse_json(value, "it")
    except BadInput:
        return value


def _first(record: Mapping[str, Any], names: Sequence[str]) -> Any:
    found = (find(record, name) for name in names)
    return next((value for value in found if value is not None and value != ""), None)


def _golds(value: Any, split: str) -> list[str]:
    value = _opened(value)
    if isinstance(value, list):
        return [text for text in map(text_of, value) if text]
    text = text_of(value)
    parts = text.split(split) if split else [text]
    return [part.strip() for part in parts if part.strip()]
