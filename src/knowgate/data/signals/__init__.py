"""Numbers read off a pass over a question: token confidence, samples, hidden states, sentences; all as features."""

from __future__ import annotations
