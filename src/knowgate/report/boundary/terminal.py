"""The boundary report on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from knowgate.display import Sheet
from knowgate.evaluation import INDICATORS, RunReport, change
from knowgate.report.boundary import sheets
from knowgate.report.terminal import render
from knowgate.runs import LabelRow

SHOWN = 5  # extreme questions; the page has them all
WIDTH = 60


def tables(runs: Sequence[RunReport]) -> Group:
    """Everything but the curves and the passages."""
    parts: list[RenderableType] = []
    for sheet in every_sheet(runs):
        parts += [Text(sheet.title, style="bold"), render(sheet), Text()]
    return Group(*parts)


def every_sheet(runs: Sequence[RunReport]) -> Iterator[Sheet]:
    yield sheets.about(runs)
    yield sheets.accuracy(runs)
    yield sheets.correlation(runs)
    for side in ("closed", *sheets.sampled_sides(runs)):
        yield from (sheets.effects(runs, indicator, side) for indicator in INDICATORS)
    yield from (sheets.savings(runs, indicator) for indicator in INDICATORS)
    yield sheets.copying(runs)
    yield from sheets.slices(runs)
    yield sheets.agreements(runs)
    for run in runs:
        yield from (_extremes(run, name) for name in ("harmed", "helped"))


def _extremes(run: RunReport, name: str) -> Sheet:
    rows = [_extreme(row) for row in getattr(run.boundary, name)[:SHOWN]]
    columns = ("mastery", "benefit", "question", "closed", "open")
    return Sheet(f"Most {name} questions of {run.name}", columns, tuple(rows) or (("", "", "none"),))


def _extreme(row: LabelRow) -> tuple[str, ...]:
    rise, benefit = change(row)
    texts = (row.question, row.closed.text if row.closed else "", row.open.text if row.open else "")
    return f"{rise:+.2f}", f"{benefit:+d}", *map(_short, texts)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"
