"""What search engines share: a spec, field names, filters, a fingerprint that changes when the collection does.

    ENGINE:WHERE/COLLECTION?text=body&title=headline&embedder=minilm&filter.team=hr

| option | meaning | default |
|---|---|---|
| text, title, id | fields of a record; dots go inside | text, title, the engine's own id |
| vector | field of the vectors | the engine's own |
| embedder | what the collection was embedded with | minilm |
| filter.FIELD | only records whose field has this value, or one of several (a,b) | all records |
| version | yours to change when the documents do and the engine cannot tell | none |

Knows no engine. One idea of a filter for all of them: `{"team": "hr", "year": [2023, 2024]}`.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qsl, unquote

from knowgate.core.files import sha256_text
from knowgate.core.frameworks import wrap_errors
from knowgate.core.redaction import redact_message, redact_urls
from knowgate.errors import AdapterError, BadSetting
from knowgate.retrieval.embeddings import check_vectors, load_embedder
from knowgate.retrieval.passages import check_k
from knowgate.types import Embedder, Passage, Vector

Scalar = str | int | float | bool
RecordFilter = Mapping[str, Scalar | Sequence[Scalar]]
COLLECTION_OPTIONS = ("text", "title", "id", "vector", "embedder", "version")
FINGERPRINT_RECORDS = 64  # records whose content is part of a fingerprint where an engine has no version of its own
FIELD_NAME = re.compile(r"[A-Za-z_][\w.-]*")


@dataclass(frozen=True)
class FieldNames:
    """Where in a record things are. id '': the engine's own; vector '': the engine's only one."""

    text: str = "text"
    title: str = "title"
    id: str = ""
    vector: str = ""

    @property
    def shown(self) -> list[str]:
        return [name for name in (self.text, self.title, self.id) if name]


@dataclass(frozen=True)
class CollectionSpec:
    """A spec, taken apart. others: options of one engine only."""

    at: str
    collection: str
    fields: FieldNames
    embedder: str = "minilm"
    version: str = ""
    where: dict[str, Any] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)


class SearchHit(NamedTuple):
    """A record that was found. score: higher is better."""

    id: str
    record: Mapping[str, Any]
    score: float | None


def parse_collection_spec(engine: str, value: str, others: Sequence[str] = ()) -> CollectionSpec:
    """`WHERE/COLLECTION?options`."""
    place, _, query = value.partition("?")
    at, _, collection = place.rstrip("/").rpartition("/")
    if not at or not collection or at.endswith((":/", ":")):
        raise BadSetting(
            f"'{engine}:{redact_message(redact_urls(value))}' names no collection: write {engine}:WHERE/COLLECTION, such "
            f"as {engine}:http://127.0.0.1:6333/handbook?text=body."
        )
    pairs = parse_qsl(query, keep_blank_values=True)
    where = {key.removeprefix("filter."): _values(text) for key, text in pairs if key.startswith("filter.")}
    options = {key: text for key, text in pairs if not key.startswith("filter.")}
    unknown = [key for key in options if key not in (*COLLECTION_OPTIONS, *others)]
    if unknown:
        known = ", ".join([*COLLECTION_OPTIONS, *others, "filter.FIELD"])
        raise BadSetting(f"'{engine}:' has no option '{redact_message(unknown[0])}'. Known options: {known}.")
    named = {key: options[key] for key in ("text", "title", "id", "vector") if key in options}
    return CollectionSpec(
        at,
        unquote(collection),
        FieldNames(**named),
        options.get("embedder", "minilm"),
        options.get("version", ""),
        where,
        {key: options[key] for key in others if key in options},
    )


class EngineRetriever(ABC):
    """A retriever in front of an engine. A subclass searches and tells the state of its collection."""

    name: str

    def __init__(
        self,
        collection: str,
        *,
        fields: FieldNames | None = None,
        embedder: Embedder | str = "minilm",
        where: RecordFilter | None = None,
        version: str = "",
    ):
        self.collection = collection
        self.fields = fields or FieldNames()
        self.where = check_filter(where or {})
        self.version = version
        self._embedder_given = embedder

    @abstractmethod
    def _search(self, queries: Sequence[str], k: int) -> list[list[SearchHit]]:
        """Up to k hits for each query, best first."""

    @abstractmethod
    def _state(self) -> Sequence[object]:
        """What changes when the collection does: a count, a version, a stamp; JSON."""

    @property
    def is_dense(self) -> bool:
        """Whether queries are embedded."""
        return True

    @property
    def fingerprint(self) -> str:
        """Asked of the engine each time: whoever was promised something about a collection learns that it changed."""
        with wrap_errors(self._what):
            state = json.dumps(self._state(), sort_keys=True, default=str)
        about = json.dumps([self.fields.text, self.fields.title, self.fields.vector, sorted(self.where.items())])
        made = self.embedder.fingerprint if self.is_dense else ""
        return sha256_text(self.name, self.collection, about, made, self.version, state)

    @functools.cached_property
    def embedder(self) -> Embedder:
        given = self._embedder_given
        return load_embedder(given) if isinstance(given, str) else given

    def filtered(self, where: RecordFilter) -> Self:
        """The same engine, for records that also fit `where`: for one question, `rag.replace(retriever=...)`. A filter
        only narrows: a field that is filtered already must fit both."""
        other, more = copy.copy(self), check_filter(where)
        both = {name: [one for one in self.where[name] if one in more[name]] for name in self.where if name in more}
        other.where = {**self.where, **more, **both}
        return other

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        check_k(k)
        if not queries or not all(self.where.values()):  # no value fits both filters: no record can
            return [[] for _ in queries]
        with wrap_errors(self._what):
            found = self._search(queries, k)
        return [[self._passage(hit) for hit in row[:k]] for row in found]

    def _vectors(self, queries: Sequence[str]) -> Vector:
        return check_vectors(self.embedder.embed(queries), len(queries))

    def _passage(self, hit: SearchHit) -> Passage:
        text = get_field(hit.record, self.fields.text)
        if not isinstance(text, str) or not text.strip():
            raise AdapterError(
                f"{self._what} gave record '{redact_message(str(hit.id))}' without a text under '{self.fields.text}', which "
                f"has: {', '.join(sorted(map(str, hit.record))) or 'nothing'}. Name the field: ?text=FIELD"
            )
        title = get_field(hit.record, self.fields.title)
        own = get_field(hit.record, self.fields.id) if self.fields.id else None
        return Passage(str(hit.id if own is None else own), text, str(title or ""), hit.score)

    @property
    def _what(self) -> str:
        return f"the {self.name} collection '{self.collection}'"


def get_field(record: Mapping[str, Any], name: str) -> Any:
    """A field, or one inside another: 'meta.title'."""
    if name in record:
        return record[name]
    first, dot, rest = name.partition(".")
    inner = record.get(first) if dot else None
    return get_field(inner, rest) if isinstance(inner, Mapping) else None


def check_filter(where: RecordFilter) -> dict[str, list[Scalar]]:
    """Every field with the values one of which it must have; names that could be more than a name are refused."""
    checked: dict[str, list[Scalar]] = {}
    for name, given in where.items():
        several = isinstance(given, Sequence) and not isinstance(given, str)
        values: list[Any] = list(given) if several else [given]  # type: ignore[arg-type]
        if (
            not FIELD_NAME.fullmatch(name)
            or not values
            or not all(isinstance(one, str | int | float) for one in values)
        ):
            raise BadSetting(
                f"the filter {name!r}: {given!r} cannot be used: the name must be a field, the value a text, a number, "
                "true or false, or a list of them."
            )
        checked[name] = values
    return checked


def _values(text: str) -> list[Scalar]:
    return [_value(part) for part in text.split(",")]


def _value(text: str) -> Scalar:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if re.fullmatch(r"-?[0-9]{1,15}", text) else text
