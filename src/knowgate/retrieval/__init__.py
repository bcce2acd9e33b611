"""Retrievers: find passages in your own documents, from an index folder or a search engine.

Importing this package loads no retriever: neither torch nor bm25s.
"""

from __future__ import annotations

from pathlib import Path

from knowgate.core.registry import RegistryEntry as Entry
from knowgate.core.registry import load_entry, split_spec
from knowgate.errors import BadSetting, BrokenIndex
from knowgate.types import Retriever

RETRIEVER_GROUP = "knowgate.retrievers"
_ENGINES = "knowgate.retrieval.engines"

# Each target is called with the part of a spec after "name:" (an index folder or a URL) and returns a Retriever.
RETRIEVERS: dict[str, Entry] = {
    "bm25": Entry("knowgate.retrieval.index_folder:open_bm25", "shared words", paper="Robertson and Zaragoza 2009"),
    "dense": Entry("knowgate.retrieval.index_folder:open_dense", "nearest meaning", extra="local"),
    "hybrid": Entry("knowgate.retrieval.index_folder:open_hybrid",
        "bm25 and dense, fused by rank", extra="local", paper="Cormack, Clarke and Büttcher 2009"),
    "pgvector": Entry(f"{_ENGINES}.pgvector:PgvectorRetriever", "your own table in PostgreSQL (pgvector)", extra="postgres"),
    "http": Entry(f"{_ENGINES}.http:HttpRetriever", "your own search endpoint"),
    "qdrant": Entry(f"{_ENGINES}.qdrant:open_qdrant", "qdrant:URL_OR_FOLDER/COLLECTION, nearest meaning", extra="qdrant"),
    "chroma": Entry(f"{_ENGINES}.chroma:open_chroma", "chroma:URL_OR_FOLDER/COLLECTION, nearest meaning", extra="chroma"),
    "lancedb": Entry(f"{_ENGINES}.lancedb:open_lancedb", "lancedb:FOLDER/TABLE, nearest meaning", extra="lancedb"),
    "elastic": Entry(f"{_ENGINES}.elastic:open_elastic", "elastic:URL/INDEX, Elasticsearch: BM25 or kNN"),
    "opensearch": Entry(f"{_ENGINES}.elastic:open_opensearch", "opensearch:URL/INDEX, BM25 or kNN"),
    "web": Entry(f"{_ENGINES}.web:open_web", "web:searxng@URL, web:tavily, web:brave: a web search engine"),
}  # fmt: skip


def as_retriever(index: str | Path | Retriever) -> Retriever:
    """Return a retriever object as it is, or load one from a spec or an index folder.

    Args:
        index: A retriever, an index folder, or a spec such as `bm25:FOLDER` (see `load_retriever`).
    """
    return load_retriever(str(index)) if isinstance(index, str | Path) else index


def load_retriever(spec_or_dir: str, kind: str | None = None) -> Retriever:
    """Load a retriever from an index folder, a URL or a spec such as `bm25:FOLDER`.

    Args:
        spec_or_dir: An index folder, the URL of a search endpoint, or `NAME:REST`, where NAME is a key of `RETRIEVERS`
            or an entry point of the group `knowgate.retrievers`.
        kind: How to search an index folder: by shared words (`bm25`), by meaning (`dense`) or both (`hybrid`).
            Default: the kind that the index was built for.

    Returns:
        A retriever. Its `search` method takes a list of queries and returns a list of passages for each.

    Raises:
        BrokenIndex: The index folder is missing or damaged.
        UnknownName: No retriever has this name.
        BadSetting: `kind` differs from the kind that the spec names.
    """
    name, argument = _split_retriever_spec(spec_or_dir, kind)
    if not argument:
        raise BrokenIndex(
            f"there is no index at '{spec_or_dir}'. Build one with `knowgate index` or build_index, or correct the path."
        )
    if kind not in (None, name):
        raise BadSetting(
            f"'{name}:{argument}' is a {name} retriever and cannot be opened as kind='{kind}'. Leave `kind` out."
        )
    retriever: Retriever = load_entry(RETRIEVERS, "retriever", name, RETRIEVER_GROUP)(argument)
    return retriever


def _split_retriever_spec(spec_or_dir: str, kind: str | None) -> tuple[str, str]:
    """Return the name of the retriever and its argument, such as a folder or a URL."""
    if spec_or_dir.startswith(("http://", "https://")):
        return "http", spec_or_dir
    if Path(spec_or_dir).exists():
        from knowgate.retrieval.index_folder import read_index_manifest

        return kind or read_index_manifest(Path(spec_or_dir)).kind, spec_or_dir
    return split_spec(spec_or_dir)
