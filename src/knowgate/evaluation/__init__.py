"""Evaluation: compare gates, rerankers and thresholds; knowledge boundary, costs, and replay of logged traffic."""
