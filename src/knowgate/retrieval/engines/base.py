"""What the adapters of vector databases and search servers share: specs, field names, filters and fingerprints.

    ENGINE:ADDRESS/COLLECTION?text=body&title=headline&embedder=minilm&filter.team=hr

| option | meaning | default |
|---|---|---|
| text, title, id | fields of a record; a dot selects a nested field | text, title, the engine's own id |
| vector | field of the vectors | the engine's own |
| embedder | the embedding model of the collection | minilm |
| filter.FIELD | only records whose field has this value, or one of several (a,b) | all records |
| version | change it yourself when the documents change and the engine cannot tell | none |

In Python a filter is a mapping: `{"team": "hr", "year": [2023, 2024]}`.
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
from knowgate.retrieval.embeddings import DEFAULT_EMBEDDER, check_vectors, load_embedder
from knowgate.retrieval.passages import check_k
from knowgate.types import Embedder, Passage, Vector

Scalar = str | int | float | bool
RecordFilter = Mapping[str, Scalar | Sequence[Scalar]]
FIELD_OPTIONS = ("text", "title", "id", "vector")
COLLECTION_OPTIONS = (*FIELD_OPTIONS, "embedder", "version")
FILTER_PREFIX = "filter."
FINGERPRINT_RECORDS = 64  # records that the fingerprint covers if an engine has no version of its own
FIELD_NAME = re.compile(r"[A-Za-z_][\w.-]*")


@dataclass(frozen=True)
class FieldNames:
    """The fields of a record; `id` '' means the engine's own id, `vector` '' its only vector."""

    text: str = "text"
    title: str = "title"
    id: str = ""
    vector: str = ""

    def get_source_fields(self) -> list[str]:
        """Return the fields that a search must return."""
        return [name for name in (self.text, self.title, self.id) if name]


@dataclass(frozen=True)
class CollectionSpec:
    """A parsed spec.

    Args:
        address: The URL or folder of the engine.
        collection: The name of the collection, table or index.
        extra: Options that only one engine has.
        options: Keyword arguments of `EngineRetriever`.
    """

    address: str
    collection: str
    extra: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_url(self) -> bool:
        return self.address.startswith(("http://", "https://"))


def parse_collection_spec(engine: str, value: str, extra_options: Sequence[str] = ()) -> CollectionSpec:
    """Parse `ADDRESS/COLLECTION?options`, the part of a spec after `ENGINE:`."""
    path, _, query = value.partition("?")
    address, _, collection = path.rstrip("/").rpartition("/")
    if not address or not collection or address.endswith((":/", ":")):
        raise BadSetting(
            f"'{engine}:{redact_message(redact_urls(value))}' names no collection. Write {engine}:ADDRESS/COLLECTION, "
            f"such as {engine}:http://127.0.0.1:6333/handbook?text=body."
        )
    given = dict(parse_qsl(query, keep_blank_values=True))
    where = {key.removeprefix(FILTER_PREFIX): given.pop(key) for key in list(given) if key.startswith(FILTER_PREFIX)}
    known = (*COLLECTION_OPTIONS, *extra_options)
    for key in given:
        if key not in known:
            names = ", ".join([*known, f"{FILTER_PREFIX}FIELD"])
            raise BadSetting(f"'{engine}:' has no option '{redact_message(key)}'. Known options: {names}.")
    options = {
        "fields": FieldNames(**{key: given[key] for key in FIELD_OPTIONS if key in given}),
        "embedder": given.get("embedder", DEFAULT_EMBEDDER),
        "where": {name: [_parse_scalar(part) for part in text.split(",")] for name, text in where.items()},
        "version": given.get("version", ""),
    }
    extra = {key: given[key] for key in extra_options if key in given}
    return CollectionSpec(address, unquote(collection), extra, options)


def _parse_scalar(text: str) -> Scalar:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if re.fullmatch(r"-?[0-9]{1,15}", text) else text


class SearchHit(NamedTuple):
    """A record that a search returned; a higher score is better."""

    id: str
    record: Mapping[str, Any]
    score: float | None


class EngineRetriever(ABC):
    """A retriever in front of a search engine. A subclass searches and reports the state of its collection.

    Args:
        collection: The name of the collection.
        fields: Where a record holds its text, title, id and vector.
        embedder: The embedding model of the collection, or its spec.
        where: Only records that match this filter are found.
        version: Change it when the documents change and the engine cannot tell.
    """

    name: str

    def __init__(
        self,
        collection: str,
        *,
        fields: FieldNames | None = None,
        embedder: Embedder | str = DEFAULT_EMBEDDER,
        where: RecordFilter | None = None,
        version: str = "",
    ):
        self.collection = collection
        self.fields = fields or FieldNames()
        self.where = check_filter(where or {})
        self.version = version
        self._embedder = embedder

    @abstractmethod
    def _find_hits(self, queries: Sequence[str], k: int) -> list[list[SearchHit]]:
        """Return up to k hits for each query, best first."""

    @abstractmethod
    def _get_state(self) -> Sequence[object]:
        """Return JSON values that change when the collection does, such as a count or a version."""

    @property
    def is_dense(self) -> bool:
        """Whether queries are embedded."""
        return True

    @property
    def fingerprint(self) -> str:
        """Hash of the settings and the state of the collection, requested from the engine each time."""
        with wrap_errors(self._description):
            state = json.dumps(self._get_state(), sort_keys=True, default=str)
        fields = self.fields
        settings = json.dumps([fields.text, fields.title, fields.vector, sorted(self.where.items())])
        embedder = self.embedder.fingerprint if self.is_dense else ""
        return sha256_text(self.name, self.collection, settings, embedder, self.version, state)

    @functools.cached_property
    def embedder(self) -> Embedder:
        return load_embedder(self._embedder) if isinstance(self._embedder, str) else self._embedder

    def filtered(self, where: RecordFilter) -> Self:
        """Return a copy that finds only records that also match `where`.

        A filter only narrows: a field that is filtered already must match both filters.

        Example:
            >>> rag.replace(retriever=retriever.filtered({"team": "hr"}))  # doctest: +SKIP
        """
        narrowed, added = copy.copy(self), check_filter(where)
        both = {
            name: [value for value in self.where[name] if value in added[name]] for name in self.where.keys() & added
        }
        narrowed.where = {**self.where, **added, **both}
        return narrowed

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        check_k(k)
        if not queries or not all(self.where.values()):  # an empty list: no value matches both filters
            return [[] for _ in queries]
        with wrap_errors(self._description):
            results = self._find_hits(queries, k)
        return [[self._make_passage(hit) for hit in hits[:k]] for hits in results]

    def _embed(self, queries: Sequence[str]) -> Vector:
        return check_vectors(self.embedder.embed(queries), len(queries))

    def _make_passage(self, hit: SearchHit) -> Passage:
        text = get_field(hit.record, self.fields.text)
        if not isinstance(text, str) or not text.strip():
            raise AdapterError(
                f"{self._description} returned record '{redact_message(str(hit.id))}' without a text in the field "
                f"'{self.fields.text}'; it has: {', '.join(sorted(map(str, hit.record))) or 'nothing'}. "
                "Name the field: ?text=FIELD"
            )
        title = get_field(hit.record, self.fields.title)
        record_id = get_field(hit.record, self.fields.id) if self.fields.id else None
        return Passage(str(hit.id if record_id is None else record_id), text, str(title or ""), hit.score)

    @property
    def _description(self) -> str:
        return f"the {self.name} collection '{self.collection}'"


def get_field(record: Mapping[str, Any], name: str) -> Any:
    """Return a field of a record, or a nested one such as 'meta.title'; None if there is none."""
    if name in record:
        return record[name]
    first, dot, rest = name.partition(".")
    nested = record.get(first) if dot else None
    return get_field(nested, rest) if isinstance(nested, Mapping) else None


def check_filter(where: RecordFilter) -> dict[str, list[Scalar]]:
    """Return the allowed values of each field; raise BadSetting for names and values that engines cannot take."""
    checked: dict[str, list[Scalar]] = {}
    for name, value in where.items():
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        values: list[Any] = list(value) if is_list else [value]  # type: ignore[arg-type]
        if not FIELD_NAME.fullmatch(name) or not values or not all(isinstance(item, Scalar) for item in values):
            raise BadSetting(
                f"the filter {name!r}: {value!r} cannot be used. The name must be a field; the value must be a text, a "
                "number, true or false, or a list of them."
            )
        checked[name] = values
    return checked
