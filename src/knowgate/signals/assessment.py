"""Self-assessment: what a model says when it is asked whether it can answer, as one number."""

from __future__ import annotations

from knowgate.types import Vector

SELF_ASSESSMENT = "self_assessment"  # its name on record
ASSESSMENT_LABELS = ("true", "false")  # the words it is read between when a run is labelled


def self_assessment_logit(logits: Vector) -> float:
    """z(known) - z(unknown) at the last marked position: above 0 where it says that it can answer."""
    known, unknown = map(float, logits[-1])
    return known - unknown


def tells_apart(logits: Vector) -> bool:
    """Whether anything is known of the labels: a server that lists none of them gives all of them the same bound."""
    last = logits[-1]
    return bool((last != last[0]).any())
