"""The parts that all retrievers for vector databases and search servers share.

A collection is named by a spec, a text of this form:

    ENGINE:ADDRESS/COLLECTION?text=body&title=headline&embedder=minilm&filter.team=hr

| option | meaning | default |
|---|---|---|
| text, title, id | names of the fields of a record; a dot selects a nested field | text, title, the engine's own id |
| vector | name of the field with the vectors | the engine's own |
| embedder | embedding model that made the vectors of the collection | minilm |
| filter.FIELD | search only records whose field has this value, or one of several (a,b) | all records |
| version | any text; change it when the documents change, if the engine cannot detect that itself | none |

In Python a filter is a mapping: `{"team": "hr", "year": [2023, 2024]}`.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qsl, unquote

from knowgate.core.files import sha256_text
from knowgate.core.frameworks import wrap_errors
from knowgate.core.redaction import redact_message, redact_urls
from knowgate.errors import AdapterError, BadSetting
from knowgate.retrieval.embeddings import DEFAULT_EMBEDDER, check_vectors, load_embedder
from knowgate.retrieval.passages import check_k, cut_query
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
    """The names of the fields of a record.

    Args:
        text: The field with the text.
        title: The field with the title.
        id: The field with the id. '' means the engine's own id.
        vector: The field with the vector. '' means the only vector of a record.
    """

    text: str = "text"
    title: str = "title"
    id: str = ""
    vector: str = ""

    def get_source_fields(self) -> list[str]:
        """Return the names of the fields that a search must return: text, title and id, without empty names."""
        return [name for name in (self.text, self.title, self.id) if name]


@dataclass(frozen=True)
class CollectionSpec:
    """A parsed spec `ADDRESS/COLLECTION?options` of a search engine.

    Args:
        address: The URL or the folder of the engine.
        collection: The name of the collection, table or index.
        options: The options, as keyword arguments for the retriever.
    """

    address: str
    collection: str
    options: dict[str, Any]

    @property
    def is_url(self) -> bool:
        return self.address.startswith(("http://", "https://"))


def parse_collection_spec(engine: str, value: str, extra_options: Sequence[str] = ()) -> CollectionSpec:
    """Parse the part of a spec after `ENGINE:`, which has the form `ADDRESS/COLLECTION?options`.

    Args:
        engine: The name of the engine, for error messages.
        value: The part of the spec.
        extra_options: The names of options that only this engine has.

    Raises:
        BadSetting: The collection is missing, or an option is unknown.
    """
    path, _, query = value.partition("?")
    address, _, collection = path.rstrip("/").rpartition("/")
    has_host = not address.endswith((":/", ":"))  # `http://host` without a collection gives the address `http:/`
    if not address or not collection or not has_host:
        raise BadSetting(
            f"'{engine}:{redact_message(redact_urls(value))}' does not name a collection. Write "
            f"{engine}:ADDRESS/COLLECTION, such as {engine}:http://127.0.0.1:6333/handbook?text=body."
        )
    parameters = dict(parse_qsl(query, keep_blank_values=True))
    _check_option_names(engine, parameters, known=(*COLLECTION_OPTIONS, *extra_options))
    options = _convert_parameters(parameters)
    options |= {name: parameters[name] for name in extra_options if name in parameters}
    return CollectionSpec(address, unquote(collection), options)


def _check_option_names(engine: str, parameters: Mapping[str, str], known: Sequence[str]) -> None:
    """Raise BadSetting unless all parameters of a spec are known options or filters."""
    for name in parameters:
        if name not in known and not name.startswith(FILTER_PREFIX):
            names = ", ".join([*known, f"{FILTER_PREFIX}FIELD"])
            raise BadSetting(f"'{engine}:' has no option '{redact_message(name)}'. Known options: {names}.")


def _convert_parameters(parameters: Mapping[str, str]) -> dict[str, Any]:
    """Convert the parameters of a spec to keyword arguments for a retriever."""
    field_names = {name: parameters[name] for name in FIELD_OPTIONS if name in parameters}
    filters: dict[str, list[Scalar]] = {}
    for name, value in parameters.items():
        if name.startswith(FILTER_PREFIX):
            filters[name.removeprefix(FILTER_PREFIX)] = [_parse_scalar(part) for part in value.split(",")]
    return {
        "fields": FieldNames(**field_names),
        "embedder": parameters.get("embedder", DEFAULT_EMBEDDER),
        "where": filters,
        "version": parameters.get("version", ""),
    }


def _parse_scalar(text: str) -> Scalar:
    """Convert a filter value to a bool, an int or a string.

    Example: "true" becomes True.
    """
    if text in ("true", "false"):
        return text == "true"
    return int(text) if re.fullmatch(r"-?[0-9]{1,15}", text) else text


class SearchHit(NamedTuple):
    """A record that a search engine returned.

    Args:
        id: The engine's own id of the record.
        record: The fields of the record.
        score: How well it matches; higher is better. None if the engine returns no scores.
    """

    id: str
    record: Mapping[str, Any]
    score: float | None


class EngineRetriever(ABC):
    """Base class of retrievers that search a vector database or a search server.

    Subclasses implement `_find_hits` and `_get_state`.

    Args:
        collection: The name of the collection.
        fields: The names of the fields with the text, title, id and vector of a record.
        embedder: The embedding model that made the vectors of the collection, or its spec.
        where: A filter, such as `{"team": "hr"}`. Only records that match it are found.
        version: Any text that becomes part of the fingerprint. Change it when the documents change, if the engine
            cannot detect that itself.
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
        """Return JSON values that change when the collection changes, such as its size or its version."""

    @property
    def is_dense(self) -> bool:
        """Whether the engine searches by vector, so that queries must be embedded."""
        return True

    @property
    def fingerprint(self) -> str:
        """A hash of the settings and of the state of the collection; each access asks the engine."""
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
        """Return a copy of this retriever with a further filter.

        Records must match the existing filter and the new one.

        Args:
            where: The new filter.

        Example:
            >>> rag.replace(retriever=retriever.filtered({"team": "hr"}))  # doctest: +SKIP
        """
        narrowed = copy.copy(self)
        narrowed.where = dict(self.where)
        for name, values in check_filter(where).items():
            allowed = self.where.get(name, values)
            narrowed.where[name] = [value for value in allowed if value in values]
        return narrowed

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return up to k passages for each query, best first."""
        check_k(k)
        # If two filters exclude each other, a field has no allowed values, so no record matches.
        if not queries or any(not allowed_values for allowed_values in self.where.values()):
            return [[] for _ in queries]
        with wrap_errors(self._description):
            results = self._find_hits([cut_query(query) for query in queries], k)
        return [self._make_passages(hits[:k]) for hits in results]

    def _embed(self, queries: Sequence[str]) -> Vector:
        """Return one checked vector per query."""
        return check_vectors(self.embedder.embed(queries), len(queries))

    def _make_passages(self, hits: Sequence[SearchHit]) -> list[Passage]:
        """Convert hits to passages. Records without a text are skipped.

        Raises:
            AdapterError: No record has a text, so the name of the text field must be wrong.
        """
        converted = [self._make_passage(hit) for hit in hits]
        passages = [passage for passage in converted if passage is not None]
        if hits and not passages:
            hit = hits[0]
            brief = f"{self._description} returned no record with a text in the field '{self.fields.text}'"
            raise AdapterError(
                f"{self._description} returned record '{redact_message(str(hit.id))}' without a text in the field "
                f"'{self.fields.text}'. Its fields are: {', '.join(sorted(map(str, hit.record))) or 'none'}. Add the name of "
                "the text field to the address: ?text=FIELD",
                brief=brief,
            )
        return passages

    def _make_passage(self, hit: SearchHit) -> Passage | None:
        """Convert a hit to a passage; return None if the record has no text."""
        text = get_field(hit.record, self.fields.text)
        if not isinstance(text, str) or not text.strip():
            return None
        title = get_field(hit.record, self.fields.title)
        own_id = get_field(hit.record, self.fields.id) if self.fields.id else None
        passage_id = hit.id if own_id is None else own_id
        has_score = hit.score is not None and math.isfinite(hit.score)  # NaN means unknown
        return Passage(str(passage_id), text, str(title or ""), hit.score if has_score else None)

    @property
    def _description(self) -> str:
        return f"the {self.name} collection '{self.collection}'"


def get_field(record: Mapping[str, Any], name: str) -> Any:
    """Return the value of a field, or None. `meta.title` names a nested field."""
    if name in record:
        return record[name]
    first, dot, rest = name.partition(".")
    nested = record.get(first) if dot else None
    return get_field(nested, rest) if isinstance(nested, Mapping) else None


def check_filter(where: RecordFilter) -> dict[str, list[Scalar]]:
    """Return a filter as lists of allowed values, one list per field.

    Raises:
        BadSetting: A name is not a valid field name, or a value is not a text, a number or a bool.
    """
    checked: dict[str, list[Scalar]] = {}
    for name, value in where.items():
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        values: list[Any] = list(value) if is_list else [value]  # type: ignore[arg-type]
        if not FIELD_NAME.fullmatch(name) or not values or not all(isinstance(item, Scalar) for item in values):
            raise BadSetting(
                f"the filter {name!r}: {value!r} cannot be used. Its key must be the name of a field. The value must be a text, "
                "a number, true or false, or a non-empty list of these."
            )
        checked[name] = values
    return checked
