"""What a judge learns from: a tokenised prompt, and how probable the first label should be at each marked place.

Knows token ids; not what is asked, nor which model reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from knowgate.models import MarkedTokens


@dataclass(frozen=True)
class Lesson:
    """shares: of the first label against the second, at each mark: 1 or 0, or between where a teacher is unsure."""

    cut: MarkedTokens
    shares: tuple[float, ...]


@dataclass(frozen=True)
class KeptLessons:
    kept: list[Lesson]
    dropped: int


def within(lessons: Sequence[Lesson], limit: int) -> KeptLessons:
    """Examples of at most so many tokens: longer ones would decide how much memory training takes."""
    kept = [lesson for lesson in lessons if len(lesson.cut.ids) <= limit]
    return KeptLessons(kept, len(lessons) - len(kept))
