"""Thresholds: by guarantee, by budget or by accuracy, each with the evidence for it. Runs no LLM."""

from __future__ import annotations
