"""How a question is labelled: answered both ways, sampled, graded; runs that go on where they stopped."""

from __future__ import annotations
