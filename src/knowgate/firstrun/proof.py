"""What so many questions can prove, in numbers and words. The arithmetic of Learn-then-Test, before any is labelled."""

from __future__ import annotations

from knowgate.thresholds import rows_needed

CONFIDENCE = 0.95
ALSO = (0.02, 0.01)  # losses people ask for


def smallest_loss(n: int, delta: float = 1 - CONFIDENCE) -> float:
    """The smallest loss that n questions can prove, if none of them is harmed: (1 - loss)^n = delta."""
    return 1.0 - delta ** (1 / n) if n else 1.0


def enough(n: int, loss: float, delta: float = 1 - CONFIDENCE) -> bool:
    return n >= rows_needed(loss, delta)


def what_they_can_prove(n: int, wanted: float | None = None, delta: float = 1 - CONFIDENCE) -> str:
    """An honest sentence. wanted: a loss to be spoken of, beside those people ask for."""
    asked = {*ALSO, *([wanted] if wanted else [])}
    beyond = sorted((loss for loss in asked if not enough(n, loss, delta)), reverse=True)
    takes = ", ".join(f"{100 * loss:g} % takes {rows_needed(loss, delta)}" for loss in beyond)
    sure = f"with {100 * (1 - delta):.3g} % confidence"
    if not n:
        return f"Questions it takes to prove, {sure}, that skipping loses at most so much: {takes}."
    least = f"at most {100 * smallest_loss(n, delta):.1f} % of the answers, if none of them is harmed"
    return f"{n} questions can prove, {sure}, that skipping loses {least}{'; ' if takes else ''}{takes}."
