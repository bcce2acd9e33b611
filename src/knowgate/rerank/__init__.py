"""Rerankers by name, and the one thing done with their scores. Importing this loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from knowgate.lazy import hand_on
from knowgate.registry import Entry, resolve, split_spec
from knowgate.rerank.order import rerank
from knowgate.types import Reranker

if TYPE_CHECKING:
    from knowgate.rerank.cross_encoder import UNREAD, CrossEncoderReranker, shown
    from knowgate.rerank.manifest import (
        BASE,
        CARD,
        KEPT,
        MANIFEST,
        VERSION,
        WEIGHTS,
        check_files,
        is_aligned,
        other_llm,
        read_manifest,
    )
    from knowgate.rerank.margin import is_sure
else:
    __getattr__, __dir__ = hand_on(__name__)
__all__ = [
    "BASE",
    "CARD",
    "CrossEncoderReranker",
    "GROUP",
    "KEPT",
    "MANIFEST",
    "RERANKERS",
    "UNREAD",
    "VERSION",
    "WEIGHTS",
    "as_reranker",
    "check_files",
    "is_aligned",
    "is_sure",
    "load_reranker",
    "other_llm",
    "read_manifest",
    "rerank",
    "shown",
]


GROUP = "knowgate.rerankers"

# Each target takes what stands after "name:" in a spec and gives a Reranker.
RERANKERS: dict[str, Entry] = {
    "cross-encoder": Entry(
        "knowgate.rerank.cross_encoder:CrossEncoderReranker",
        "reads question and passage together",
        extra="local",
        paper="Nogueira and Cho 2019",
    ),
    "api": Entry("knowgate.rerank.remote:RemoteReranker", "api:MODEL@URL, a server that reranks as Cohere and Jina do"),
    "tei": Entry("knowgate.rerank.remote:TeiReranker", "tei:URL, a server of text-embeddings-inference"),
}


def as_reranker(reranker: str | Path | Reranker) -> Reranker:
    """The reranker itself, or the one a spec or folder names."""
    return load_reranker(str(reranker)) if isinstance(reranker, str | Path) else reranker


def load_reranker(spec: str) -> Reranker:
    """`cross-encoder:NAME_OR_DIR`, `api:MODEL@URL`, `tei:URL`; a folder or hub name (`owner/model`) does by itself."""
    name, rest = split_spec(spec)
    if Path(spec).is_dir() or (not rest and "/" in spec):
        name, rest = "cross-encoder", spec
    reranker: Reranker = resolve(RERANKERS, "reranker", name, GROUP)(rest)
    return reranker
