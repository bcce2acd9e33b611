"""Rerankers by name, and the one thing done with their scores. Importing this loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from knowgate.lazy import hand_on
from knowgate.registry import Entry, resolve, split_spec
from knowgate.rerank.order import rerank
from knowgate.types import Reranker

if TYPE_CHECKING:
    from knowgate.rerank.cross_encoder import CrossEncoderReranker, shown
    from knowgate.rerank.manifest import (
        BASE,
        CARD,
        KEPT,
        MANIFEST,
        VERSION,
        WEIGHTS,
        check_files,
        is_aligned,
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
    "VERSION",
    "WEIGHTS",
    "check_files",
    "is_aligned",
    "is_sure",
    "load_reranker",
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
}


def load_reranker(spec: str) -> Reranker:
    """`cross-encoder:NAME_OR_DIR`; a folder or a hub name such as `owner/model` does by itself."""
    name, rest = split_spec(spec)
    if Path(spec).is_dir() or (not rest and "/" in spec):
        name, rest = "cross-encoder", spec
    reranker: Reranker = resolve(RERANKERS, "reranker", name, GROUP)(rest)
    return reranker
