"""A label run at a glance. Counts rows; knows nothing of how they came about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from knowgate.display import Sheet, with_interval
from knowgate.runs.rows import GradedAnswer, LabelRow
from knowgate.statistics import share


def run_line(manifest: Mapping[str, Any]) -> str:
    """What was asked of which model and how far it came, by the manifest alone: rows can be many."""
    settings, totals = manifest.get("settings") or {}, manifest.get("totals") or {}
    about = f"{settings.get('model', 'a model not recorded')} on {settings.get('data', 'data not recorded')}"
    asked = totals.get("questions", settings.get("questions"))
    counts = [f"{asked} questions"] if asked is not None else []
    counts += [f"{totals['failed']} failed"] if totals.get("failed") else []
    return ", ".join([about, *counts])


def run_sheet(name: str, manifest: Mapping[str, Any], rows: Iterable[LabelRow]) -> Sheet:
    """The same with what came out: shares of right answers with 95 % intervals (Wilson)."""
    settings = manifest.get("settings") or {}
    verdicts = [(row.error is not None, _right(row.closed), _right(row.open)) for row in rows]
    facts = (
        ("model", str(settings.get("model", "not recorded"))),
        ("data", str(settings.get("data", "not recorded"))),
        ("passages from", str(settings.get("retriever", "not recorded"))),
        ("rows", str(len(verdicts))),
        ("failed", str(sum(failed for failed, _, _ in verdicts))),
        ("closed-book right", with_interval(share(closed for _, closed, _ in verdicts))),
        ("open-book right", with_interval(share(opened for _, _, opened in verdicts))),
    )
    return Sheet(f"Label run {name}", ("", ""), facts)


def _right(side: GradedAnswer | None) -> bool | None:
    return side.correct if side is not None else None
