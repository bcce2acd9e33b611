"""`python -m tests.support.hashed_knowgate` is the command `knowgate`, whose logs embed by hash: no model is loaded."""

import sys

from knowgate.cli.main import main
from knowgate.retrieval.embeddings import SentenceEmbedder
from tests.support.hash_embedder import HashEmbedder

SentenceEmbedder.embed = lambda self, texts: HashEmbedder().embed(texts)  # type: ignore[method-assign]
SentenceEmbedder.fingerprint = "hash"  # type: ignore[assignment]

if __name__ == "__main__":
    sys.exit(main())
