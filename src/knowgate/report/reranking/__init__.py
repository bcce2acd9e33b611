"""The report of a comparison of rerankers."""
