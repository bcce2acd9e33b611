"""LanceDB: `lancedb:FOLDER/TABLE?...` (extra `lancedb`). Options: see `engine.py`. Its tables have versions: the
fingerprint changes with every write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from knowgate.core.frameworks import check_framework_version, wrap_errors
from knowgate.retrieval.engines.base import EngineRetriever, Scalar, SearchHit, parse_collection_spec

ROW_ID = "_rowid"


def open_lancedb(value: str) -> LanceDBRetriever:
    """A folder, or an address such as s3://bucket/path, and the table."""
    spec = parse_collection_spec("lancedb", value)
    check_framework_version("lancedb", "lancedb", majors=("0",))
    import lancedb

    with wrap_errors("LanceDB"):
        table = lancedb.connect(spec.at).open_table(spec.collection)
    return LanceDBRetriever(table, fields=spec.fields, embedder=spec.embedder, where=spec.where, version=spec.version)


class LanceDBRetriever(EngineRetriever):
    """Any table of LanceDB's with a column of vectors; nearest by cosine."""

    name = "lancedb"

    def __init__(self, table: Any, **options: Any):
        check_framework_version("lancedb", "lancedb", majors=("0",))
        super().__init__(str(table.name), **options)
        self._table = table

    def _search(self, queries: Sequence[str], k: int) -> list[list[SearchHit]]:
        return [self._nearest(vector, k) for vector in self._vectors(queries)]

    def _nearest(self, vector: Any, k: int) -> list[SearchHit]:
        column = {"vector_column_name": self.fields.vector} if self.fields.vector else {}
        asked = self._table.search(vector, query_type="vector", **column).distance_type("cosine").with_row_id(True)
        if self.where:
            asked = asked.where(self._filter(), prefilter=True)
        return [SearchHit(str(row[ROW_ID]), row, 1.0 - float(row["_distance"])) for row in asked.limit(k).to_list()]

    def _filter(self) -> str:
        parts = [f"{name} IN ({', '.join(map(_literal, values))})" for name, values in self.where.items()]
        return " AND ".join(parts)

    def _state(self) -> Sequence[object]:
        self._table.checkout_latest()
        return [self._table.version, self._table.count_rows()]


def _literal(value: Scalar) -> str:
    """A value as SQL. Names were checked before; a quote in a text is doubled."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else "'" + value.replace("'", "''") + "'"
