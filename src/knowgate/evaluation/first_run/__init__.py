"""A guided first run: documents, an LLM and perhaps questions in; index, labels, gate, proof, report, settings out."""

from __future__ import annotations
