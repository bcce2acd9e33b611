"""Imported by a process of a test: logs embed by hash there, so that no model is loaded."""

from knowgate.history import sqlite
from tests.support.hash_embedder import HashEmbedder

sqlite.SentenceEmbedder = HashEmbedder
