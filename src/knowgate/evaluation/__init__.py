"""What gates, rerankers and thresholds are worth on given questions: comparison, boundary, traffic, reranking."""

from __future__ import annotations
