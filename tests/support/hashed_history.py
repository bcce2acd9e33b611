"""Imported by a process of a test: texts are embedded by hash there, so that no model is loaded."""

from knowgate.retrieval.embeddings import SentenceEmbedder
from tests.support.hash_embedder import HashEmbedder

SentenceEmbedder.fingerprint = "hash"
SentenceEmbedder.embed = lambda self, texts: HashEmbedder().embed(texts)
