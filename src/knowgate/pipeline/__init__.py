"""The way of a question, and how settings become one: `AdaptiveRAG`, settings, presets, assembly, answers as JSON."""

from __future__ import annotations
