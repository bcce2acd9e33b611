"""LanceDB: `lancedb:FOLDER/TABLE?...` (extra `lancedb`). See `base.py` for the options.

LanceDB increases the version of a table with every write. The fingerprint covers it, so it changes with every write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from knowgate.core.frameworks import check_framework_version, wrap_errors
from knowgate.retrieval.engines.base import EngineRetriever, Scalar, SearchHit, parse_collection_spec

ROW_ID = "_rowid"  # the column in which LanceDB returns its own id of a row


def open_lancedb(value: str) -> LanceDBRetriever:
    """Open a table, given as `FOLDER/TABLE`.

    The folder may be an address such as s3://bucket/path.
    """
    spec = parse_collection_spec("lancedb", value)
    check_framework_version("lancedb", "lancedb", majors=("0",))
    import lancedb

    with wrap_errors("LanceDB"):
        table = lancedb.connect(spec.address).open_table(spec.collection)
    return LanceDBRetriever(table, **spec.options)


class LanceDBRetriever(EngineRetriever):
    """Searches the vectors of a LanceDB table by cosine similarity.

    Args:
        table: A table of a LanceDB connection.
        options: Keyword arguments of `EngineRetriever`, such as `fields`, `embedder` and `where` (a filter).
    """

    name = "lancedb"

    def __init__(self, table: Any, **options: Any):
        check_framework_version("lancedb", "lancedb", majors=("0",))
        super().__init__(str(table.name), **options)
        self._table = table

    def _find_hits(self, queries: Sequence[str], k: int) -> list[list[SearchHit]]:
        return [self._find_nearest(vector, k) for vector in self._embed(queries)]

    def _find_nearest(self, vector: Any, k: int) -> list[SearchHit]:
        """Return the k rows nearest to a vector that match the filter."""
        column = {"vector_column_name": self.fields.vector} if self.fields.vector else {}
        query = self._table.search(vector, query_type="vector", **column).distance_type("cosine").with_row_id(True)
        if self.where:
            conditions = [f"{name} IN ({', '.join(map(_quote, values))})" for name, values in self.where.items()]
            query = query.where(" AND ".join(conditions), prefilter=True)
        return [SearchHit(str(row[ROW_ID]), row, 1.0 - float(row["_distance"])) for row in query.limit(k).to_list()]

    def _get_state(self) -> Sequence[object]:
        self._table.checkout_latest()
        return [self._table.version, self._table.count_rows()]


def _quote(value: Scalar) -> str:
    """Return a filter value as a SQL literal, with quotes escaped."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else "'" + value.replace("'", "''") + "'"
