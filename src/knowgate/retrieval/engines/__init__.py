"""knowgate.retrieval.engines."""
