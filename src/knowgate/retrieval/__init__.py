"""Retrievers by name. Importing this table loads none of them: no torch, no bm25s."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from knowgate.errors import BadSetting, BrokenIndex
from knowgate.lazy import hand_on
from knowgate.registry import Entry, resolve, split_spec
from knowgate.types import Retriever

if TYPE_CHECKING:
    from knowgate.retrieval.counting import count_holding, texts_holding
    from knowgate.retrieval.html import read_html
    from knowgate.retrieval.in_turn import Placed, passages_in_turn
    from knowgate.retrieval.index import IndexReport, build_index
    from knowgate.retrieval.ranking import check_k
    from knowgate.retrieval.rounds import MOST_ROUNDS, follow_up, has_new, merged
else:
    __getattr__, __dir__ = hand_on(__name__)
__all__ = [
    "GROUP",
    "IndexReport",
    "MOST_ROUNDS",
    "Placed",
    "RETRIEVERS",
    "as_retriever",
    "build_index",
    "check_k",
    "count_holding",
    "follow_up",
    "has_new",
    "load_retriever",
    "merged",
    "passages_in_turn",
    "read_html",
    "texts_holding",
]

GROUP = "knowgate.retrievers"

# Each target takes what stands after "name:" in a spec, an index folder or a URL, and gives a Retriever.
RETRIEVERS: dict[str, Entry] = {
    "bm25": Entry("knowgate.retrieval.opening:open_bm25", "shared words", paper="Robertson and Zaragoza 2009"),
    "dense": Entry("knowgate.retrieval.opening:open_dense", "nearest meaning", extra="local"),
    "hybrid": Entry(
        "knowgate.retrieval.opening:open_hybrid",
        "bm25 and dense, fused by rank",
        extra="local",
        paper="Cormack, Clarke and Büttcher 2009",
    ),
    "pgvector": Entry(
        "knowgate.retrieval.pgvector:PgvectorRetriever", "your own table in PostgreSQL (pgvector)", extra="postgres"
    ),
    "http": Entry("knowgate.retrieval.http:HttpRetriever", "your own search endpoint"),
    "qdrant": Entry(
        "knowgate.integrations.qdrant:open_qdrant", "qdrant:URL_OR_FOLDER/COLLECTION, nearest meaning", extra="qdrant"
    ),
    "chroma": Entry(
        "knowgate.integrations.chroma:open_chroma", "chroma:URL_OR_FOLDER/COLLECTION, nearest meaning", extra="chroma"
    ),
    "lancedb": Entry(
        "knowgate.integrations.lancedb:open_lancedb", "lancedb:FOLDER/TABLE, nearest meaning", extra="lancedb"
    ),
    "elastic": Entry("knowgate.integrations.elastic:open_elastic", "elastic:URL/INDEX, Elasticsearch: BM25 or kNN"),
    "opensearch": Entry("knowgate.integrations.elastic:open_opensearch", "opensearch:URL/INDEX, BM25 or kNN"),
    "web": Entry("knowgate.integrations.web:open_web", "web:searxng@URL, web:tavily, web:brave: a search engine"),
}


def as_retriever(index: str | Path | Retriever) -> Retriever:
    """The retriever itself, or the one a spec or an index folder names."""
    return load_retriever(str(index)) if isinstance(index, str | Path) else index


def load_retriever(spec_or_dir: str, kind: str | None = None) -> Retriever:
    """An index folder (opened as it was built, unless `kind` says otherwise), `http:URL`, or `KIND:REST`."""
    if spec_or_dir.startswith(("http://", "https://")):
        return _open("http", spec_or_dir, kind)
    if Path(spec_or_dir).exists():
        from knowgate.retrieval.manifest import read_manifest

        name = kind or read_manifest(Path(spec_or_dir)).kind
        return _open(name, spec_or_dir, None)
    name, rest = split_spec(spec_or_dir)
    if not rest:
        raise BrokenIndex(f"there is no index at '{spec_or_dir}'. Build it: knowgate index SOURCE --out {spec_or_dir}")
    return _open(name, rest, kind)


def _open(name: str, rest: str, kind: str | None) -> Retriever:
    if kind not in (None, name):
        raise BadSetting(f"'{name}:{rest}' cannot be opened as '{kind}'.")
    retriever: Retriever = resolve(RETRIEVERS, "retriever", name, GROUP)(rest)
    return retriever
