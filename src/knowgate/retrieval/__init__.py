"""Retrievers by name. Importing this table loads none of them: no torch, no bm25s."""

from __future__ import annotations

from pathlib import Path

from knowgate.core.registry import RegistryEntry, load_entry, split_spec
from knowgate.errors import BadSetting, BrokenIndex
from knowgate.types import Retriever

RETRIEVER_GROUP = "knowgate.retrievers"

# Each target takes what stands after "name:" in a spec, an index folder or a URL, and gives a Retriever.
RETRIEVERS: dict[str, RegistryEntry] = {
    "bm25": RegistryEntry(
        "knowgate.retrieval.index_folder:open_bm25", "shared words", paper="Robertson and Zaragoza 2009"
    ),
    "dense": RegistryEntry("knowgate.retrieval.index_folder:open_dense", "nearest meaning", extra="local"),
    "hybrid": RegistryEntry(
        "knowgate.retrieval.index_folder:open_hybrid",
        "bm25 and dense, fused by rank",
        extra="local",
        paper="Cormack, Clarke and Büttcher 2009",
    ),
    "pgvector": RegistryEntry(
        "knowgate.retrieval.engines.pgvector:PgvectorRetriever",
        "your own table in PostgreSQL (pgvector)",
        extra="postgres",
    ),
    "http": RegistryEntry("knowgate.retrieval.engines.http:HttpRetriever", "your own search endpoint"),
    "qdrant": RegistryEntry(
        "knowgate.retrieval.engines.qdrant:open_qdrant",
        "qdrant:URL_OR_FOLDER/COLLECTION, nearest meaning",
        extra="qdrant",
    ),
    "chroma": RegistryEntry(
        "knowgate.retrieval.engines.chroma:open_chroma",
        "chroma:URL_OR_FOLDER/COLLECTION, nearest meaning",
        extra="chroma",
    ),
    "lancedb": RegistryEntry(
        "knowgate.retrieval.engines.lancedb:open_lancedb", "lancedb:FOLDER/TABLE, nearest meaning", extra="lancedb"
    ),
    "elastic": RegistryEntry(
        "knowgate.retrieval.engines.elastic:open_elastic", "elastic:URL/INDEX, Elasticsearch: BM25 or kNN"
    ),
    "opensearch": RegistryEntry(
        "knowgate.retrieval.engines.elastic:open_opensearch", "opensearch:URL/INDEX, BM25 or kNN"
    ),
    "web": RegistryEntry(
        "knowgate.retrieval.engines.web:open_web", "web:searxng@URL, web:tavily, web:brave: a search engine"
    ),
}


def as_retriever(index: str | Path | Retriever) -> Retriever:
    """The retriever itself, or the one a spec or an index folder names."""
    return load_retriever(str(index)) if isinstance(index, str | Path) else index


def load_retriever(spec_or_dir: str, kind: str | None = None) -> Retriever:
    """An index folder (opened as it was built, unless `kind` says otherwise), `http:URL`, or `KIND:REST`."""
    if spec_or_dir.startswith(("http://", "https://")):
        return _open("http", spec_or_dir, kind)
    if Path(spec_or_dir).exists():
        from knowgate.retrieval.index_folder import read_index_manifest

        name = kind or read_index_manifest(Path(spec_or_dir)).kind
        return _open(name, spec_or_dir, None)
    name, rest = split_spec(spec_or_dir)
    if not rest:
        raise BrokenIndex(f"there is no index at '{spec_or_dir}'. Build it: knowgate index SOURCE --out {spec_or_dir}")
    return _open(name, rest, kind)


def _open(name: str, rest: str, kind: str | None) -> Retriever:
    if kind not in (None, name):
        raise BadSetting(f"'{name}:{rest}' cannot be opened as '{kind}'.")
    retriever: Retriever = load_entry(RETRIEVERS, "retriever", name, RETRIEVER_GROUP)(rest)
    return retriever
