"""Rules above the score: what is looked up, or never looked up, whatever a gate says. The first that fits decides."""

from __future__ import annotations
