"""Two evaluations side by side, as tables and in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from knowgate.display import NOTHING, Sheet, percent, points, points_with_interval, share_with_interval
from knowgate.evaluation import Change, Contrast, GateContrast
from knowgate.statistics import Estimate

SHOWN = {"accuracy": "accuracy", "rate": "searches", "auroc": "AUROC"}
MANY = 12  # gates on a terminal; the page has all


def short(found: Contrast) -> Sheet:
    """For a terminal: the gates that count and those that changed most."""
    kind = "accuracy" if any("accuracy" in one.changes for one in found.gates) else "auroc"
    rows = tuple((one.gate, *_plain(one, kind), _moved(one)) for one in picked(found))
    return Sheet("B less A, in points", ("gate", f"{SHOWN[kind]}, A", "B", "B - A", "searches"), rows)


def _moved(one: GateContrast) -> str:
    value = one.changes["rate"].difference.value if "rate" in one.changes else None
    return NOTHING if value is None else points(value)


def _plain(one: GateContrast, kind: str) -> tuple[str, str, str]:
    if kind not in one.changes:
        return NOTHING, NOTHING, NOTHING
    change = one.changes[kind]
    return percent(change.first.value), percent(change.second.value), points_with_interval(change.difference)


def differences(found: Contrast) -> Sheet:
    """A is the first side, B the second; differences are B less A, in points."""
    kinds = [kind for kind in SHOWN if any(kind in one.changes for one in found.gates)]
    columns = ["gate"]
    for kind in kinds:
        columns += [f"{SHOWN[kind]}, A", "B", "B - A"]
    rows = tuple((one.gate, *(cell for kind in kinds for cell in _cells(one, kind))) for one in found.gates)
    return Sheet("Differences with 95 % intervals, in points", tuple(columns), rows)


def picked(found: Contrast) -> list[GateContrast]:
    """The gates that count first, then those whose accuracy changed most."""
    watched = [one for one in found.gates if one.gate in found.watched]
    others = sorted((one for one in found.gates if one not in watched), key=_size, reverse=True)
    return (watched + others)[: max(MANY, len(watched))]


def _size(one: GateContrast) -> float:
    change = one.changes.get("accuracy") or one.changes.get("auroc")
    return abs(change.difference.value or 0.0) if change else 0.0


def _cells(one: GateContrast, kind: str) -> tuple[str, str, str]:
    change = one.changes.get(kind)
    if change is None:
        return NOTHING, NOTHING, NOTHING
    show = _auroc if kind == "auroc" else share_with_interval
    return show(change.first), show(change.second), points_with_interval(change.difference)


def _auroc(found: Estimate) -> str:
    return NOTHING if found.value is None else found.shown()


def sides(found: Contrast) -> Sheet:
    behind = [("arbiter", found.first.arbiter or "none", found.second.arbiter or "none")]
    rows = [
        ("folder", found.first.name, found.second.name),
        ("model", found.first.model, found.second.model),
        ("questions", f"{found.first.n:,}", f"{found.second.n:,}"),
        ("recommended", found.first.recommended, found.second.recommended),
        *(behind if found.first.arbiter or found.second.arbiter else []),
        ("gates only there", ", ".join(found.only_first) or "none", ", ".join(found.only_second) or "none"),
    ]
    return Sheet("What is compared", ("", "A", "B"), tuple(rows))


def basis(found: Contrast) -> str:
    """What the intervals rest on."""
    if found.paired:
        return f"Differences are paired, over the {found.paired:,} questions that A and B share."
    shared = f"share {found.shared:,} questions" if found.shared else "share no question (or one keeps no decisions)"
    takes = f"to pair them takes {found.needed:,}"
    return f"A and B {shared}; {takes}. So differences are those of independent samples."


def left_out(found: Contrast) -> str:
    """Gates that one side alone has, so that nothing can be said of them; '' where there are none."""
    named = [
        f"only {side} has {', '.join(gates)}"
        for side, gates in (("A", found.only_first), ("B", found.only_second))
        if gates
    ]
    return f"Not compared: {'; '.join(named)}." if named else ""


@dataclass(frozen=True)
class Headline:
    """light: as on every report. said: better, worse or neither. told: by how much."""

    light: Literal["use", "leave", "unknown"]
    said: str
    told: str = ""


def headline(found: Contrast) -> Headline:
    """By the accuracy of the gates that count: one that fell for certain is enough for 'worse'."""
    changes = {
        one.gate: one.changes["accuracy"].difference
        for one in found.gates
        if one.gate in found.watched and "accuracy" in one.changes
    }
    down = {gate: one for gate, one in changes.items() if one.high is not None and one.high < 0}
    up = {gate: one for gate, one in changes.items() if one.low is not None and one.low > 0}
    if down:
        return Headline("leave", "B is worse than A.", _told(down))
    if up:
        return Headline("use", "B is better than A.", _told(up))
    if not changes:
        return Headline("unknown", "B and A cannot be told apart by their answers.", "See how needs rank.")
    return Headline("unknown", "No difference between A and B is shown.", _told(changes))


def _told(changes: dict[str, Estimate]) -> str:
    told = (f"'{gate}' {points_with_interval(one)}" for gate, one in changes.items())
    return f"Points of accuracy, with 95 % intervals: {'; '.join(told)}."


def is_shown(change: Change) -> bool:
    """Whether a difference can be drawn."""
    return change.difference.value is not None
