"""What an LLM knows, in a sentence."""

from __future__ import annotations

from knowgate.display import percent
from knowgate.evaluation import RunReport
from knowgate.statistics import Share

ADVICE = 'Give the questions gold answers, "answers": [...], and label again: knowgate label'


def boundary_words(run: RunReport) -> list[str]:
    """One sentence on what it knows, then how sure that is and what passages do to it."""
    accuracy, counts = run.boundary.accuracy, run.boundary.counts
    if not accuracy.closed.n:
        nothing = f"What {run.name} knows cannot be said: none of its {counts.rows:,} answers is graded."
        return [nothing, _ungraded(run), ADVICE]
    known = f"{run.name} knows {percent(accuracy.closed.value)} of these questions by itself."
    sure = f"Of {accuracy.closed.n:,} questions{_interval(accuracy.closed)}."
    return [known, sure, _passages(run), *([_ungraded(run)] if counts.rows > counts.failed + accuracy.closed.n else [])]


def _ungraded(run: RunReport) -> str:
    counts = run.boundary.counts
    missing = counts.rows - counts.failed - run.boundary.accuracy.closed.n
    why = ": they have no gold answers" if counts.without_gold >= missing > 0 else ""
    return f"{missing:,} questions are not graded{why}, {counts.failed:,} failed."


def _passages(run: RunReport) -> str:
    accuracy, benefit = run.boundary.accuracy, run.boundary.benefit
    if not accuracy.open.n:
        return "No question was answered with passages, so what retrieval does is not known."
    n = benefit.helps + benefit.neutral + benefit.hurts
    helps, hurts, neutral = (percent(count / n) for count in (benefit.helps, benefit.hurts, benefit.neutral))
    some = accuracy.open.n < accuracy.closed.n
    same = f"{accuracy.open.n:,} questions that found passages" if some else "same questions"
    return (
        f"With passages it is right on {percent(accuracy.open.value)}{_interval(accuracy.open)} of the {same}, without "
        f"them on {percent(accuracy.matched.value)}: they turn {helps} of "
        f"the answers right, spoil {hurts}, and change nothing about {neutral}, where a search is paid for in vain."
    )


def _interval(share: Share) -> str:
    if share.low is None or share.high is None:
        return ""
    return f" (95 % interval {100 * share.low:.1f} to {100 * share.high:.1f})"
