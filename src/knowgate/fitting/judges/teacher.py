"""Soft labels: a fitted judge, a large one as a rule, says how probably an answer is right; a small one learns that.

Knows gates and their readings; not how anything is trained.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from knowgate.errors import BadSetting
from knowgate.fitting.examples import Examples
from knowgate.gates import FittedGate, load_fitted, seen_by
from knowgate.statistics import Floats
from knowgate.types import Signal

GOLD = 0.5  # how much the graded answer counts beside the teacher's word


@dataclass(frozen=True)
class SoftLabels:
    """P(right) to be learnt for each row, and what the card says of them."""

    shares: Floats
    notes: list[str]


def plain_labels(examples: Examples) -> SoftLabels:
    """What was graded, and nothing else."""
    return SoftLabels((~examples.needed).astype(np.float64), [])


def soft_labels(examples: Examples, teacher: str, places: Iterable[int]) -> SoftLabels:
    """Grades and the teacher's word, half and half, at these rows; the others, by which training stops, stay graded."""
    gate, shares = load_fitted(teacher), plain_labels(examples).shares
    _check(teacher, gate)
    taught = sorted(places)
    needs = gate.score([examples.questions[i] for i in taught], [examples.readings[i] for i in taught])
    shares[taught] = GOLD * shares[taught] + (1 - GOLD) * (1 - np.array(needs))
    seen = sum(seen_by(examples.trial.subset(taught), teacher))
    heard = f"taught by the gate '{gate.artefact.path.name}': its word counts half, the grade half"
    known = f"; it had learnt from {seen} of the {len(taught)} rows itself, where its word adds less" if seen else ""
    return SoftLabels(shares, [heard + known])


def _check(folder: str, gate: FittedGate) -> None:
    target = gate.artefact.manifest.get("target")
    if target == "benefit":
        raise BadSetting(
            f"the teacher '{folder}' was fitted on 'benefit': it says whether retrieval helps, not whether an answer "
            "is right. Take a gate that was fitted on 'known'."
        )
    if missing := gate.needs - {Signal.DRAFT}:
        raise BadSetting(
            f"the teacher '{folder}' needs {', '.join(sorted(missing))}, and a judge is taught by text alone. Take "
            "a judge, or ik."
        )
