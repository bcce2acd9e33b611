"""The pictures of the boundary report."""

from __future__ import annotations

from collections.abc import Sequence

from knowgate.display import Axis, fitting_axis, percent
from knowgate.display import Point as Place
from knowgate.evaluation import Interval, RunReport
from knowgate.report.bars import Bar, Group, bar_chart, key
from knowgate.report.boundary.sheets import SIDE_NAMES as PANEL_NAMES
from knowgate.report.boundary.sheets import compared, interval_name, panel
from knowgate.report.field import Field
from knowgate.report.lines import Line, line_plot, look
from knowgate.statistics import Share

WIDE, HIGH = 560, 360  # of a small picture
SIDES = {"closed": ("closed book", "kgrey"), "open": ("open book", "k0"), "mask": ("MASK", "k4")}
EFFECTS = {"beneficial": "k0", "neutral": "kgrey", "harmful": "k1"}
KNOWLEDGE = {
    "known": ("knows it, and passages do no harm", "k2"),
    "harmed": ("knows it, but passages spoil the answer", "k1"),
    "helped": ("does not know it, passages help", "k0"),
    "hopeless": ("does not know it, passages do not help", "kgrey"),
}


def knowledge(runs: Sequence[RunReport]) -> str:
    """Each run's questions in four parts: known or not, helped by passages or not. The one picture of the report."""
    groups = [Group(run.name, [_part_bar(name, share) for name, share in four_parts(run).items()]) for run in runs]
    about = "; ".join(f"{group.name}: {', '.join(bar.says for bar in group.bars)}" for group in groups)
    field = Field(Axis(""), Axis("share of questions"))
    drawn = bar_chart(field, groups, "What the LLM knows", about, is_stacked=True)
    return drawn + key(list(KNOWLEDGE.values()))


def four_parts(run: RunReport) -> dict[str, float]:
    """Shares of the questions; without open-book answers only known and not known."""
    found, benefit = run.boundary.accuracy, run.boundary.benefit
    n = benefit.helps + benefit.neutral + benefit.hurts
    if not n:
        known = found.closed.value
        return {} if known is None else {"known": known, "hopeless": 1 - known}
    both = max(0, found.open.hits - benefit.helps)  # right with and without passages
    counts = {"known": both, "harmed": benefit.hurts, "helped": benefit.helps, "hopeless": benefit.neutral - both}
    return {name: max(0, count) / n for name, count in counts.items()}


def _part_bar(name: str, share: float) -> Bar:
    words, style = KNOWLEDGE[name]
    return Bar(share, style, f"{words}: {percent(share)}", label=percent(share))


def accuracy(runs: Sequence[RunReport]) -> str:
    """Bars per run with intervals (the paper's Figure 1)."""
    used = [side for side in SIDES if any(getattr(run.boundary.accuracy, side).n for run in runs)]
    groups = [Group(run.name, [_bar(*SIDES[side], _share(run, side)) for side in used]) for run in runs]
    return _grouped(groups, "Accuracy", "accuracy") + key([SIDES[side] for side in used])


def _share(run: RunReport, side: str) -> Share:
    return compared(run) if side == "closed" else getattr(run.boundary.accuracy, side)


def copying(runs: Sequence[RunReport]) -> str:
    """MASK among answers with certainty 1, per run (the paper's Figure 2); nothing when no run has any."""
    masked = [run for run in runs if run.boundary.copying and run.boundary.copying.is_mask.n]
    kinds = {"is_mask": ("answer is MASK", "k4"), "says_mask": ("answer holds MASK", "k1")}
    groups = [
        Group(run.name, [_bar(*kinds[part], getattr(run.boundary.copying, part)) for part in kinds]) for run in masked
    ]
    return _grouped(groups, "Copy rate", "share of answers") + key(list(kinds.values())) if groups else ""


def _grouped(groups: Sequence[Group], title: str, axis: str) -> str:
    about = "; ".join(f"{group.name}, {bar.says}" for group in groups for bar in group.bars)
    return bar_chart(Field(Axis(""), Axis(axis)), groups, title, about)


def _bar(name: str, style: str, share: Share) -> Bar:
    says = f"{name}: {percent(share.value)}, n = {share.n}"
    return Bar(share.value, style, says, share.low, share.high, percent(share.value) if share.n else "")


def effects(run: RunReport, indicator: str, side: str = "closed") -> str:
    """Stacked shares per interval (a panel of the paper's Figure 3)."""
    groups = [
        Group(interval_name(item), [_effect(item, name) for name in EFFECTS], f"n = {item.n}" if item.n else "empty")
        for item in panel(run, indicator, side)
    ]
    field = Field(Axis(f"{PANEL_NAMES[side]} {indicator}"), Axis("share of questions"), width=WIDE, height=HIGH)
    about = "; ".join(f"{group.name}, {bar.says}" for group in groups for bar in group.bars)
    title = f"Effect of retrieval by {PANEL_NAMES[side]} {indicator}"
    return bar_chart(field, groups, title, about, is_stacked=True) + key(list(EFFECTS.items()))


def _effect(item: Interval, name: str) -> Bar:
    count = int(getattr(item, name))
    return Bar(count / item.n if item.n else None, EFFECTS[name], f"{name}: {count}")


def savings(runs: Sequence[RunReport], indicator: str) -> str:
    """Accuracy kept against retrieval saved, a line per run and its matched random; nothing when no run has both."""
    found = [(run, saving) for run in runs if (saving := run.boundary.savings[indicator]) is not None]
    if not found:
        return ""
    lines: list[Line] = []
    for number, (run, saving) in enumerate(found):
        lines.append(Line(run.name, [Place(point.saved, point.accuracy) for point in saving.points], look(number)))
        ends = [Place(0, saving.always), Place(1, saving.never)]
        lines.append(Line(f"{run.name}, at random", ends, f"k{number % 7} d2"))
    heights = [point.y for line in lines for point in line.points]
    field = Field(Axis("searches saved"), fitting_axis("accuracy", heights), width=WIDE, height=HIGH)
    about = "; ".join(
        f"{run.name}: {percent(saving.always)} right with every search, {percent(saving.never)} with none"
        for run, saving in found
    )
    return line_plot(field, lines, f"Skipping by {indicator}", about)
