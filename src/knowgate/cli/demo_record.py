"""What the demo tells of an 8B LLM behind an API: a few numbers made from recorded predictions, and a chart of them.

The numbers lie in `demo_data/judge.json`, which `make results` writes; none is written down here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from knowgate.cli.demo_traffic import demo_folder
from knowgate.doors import read_json
from knowgate.evaluation import PER
from knowgate.typed import read_record

WIDEST = 54  # characters of a bar
SHOWN = 2  # every so many of the points


@dataclass(frozen=True)
class Recorded:
    """The gate at one threshold. gain, low, high: right answers against always searching, with the 95 % interval."""

    searched: float
    right: float
    gain: float
    low: float
    high: float


@dataclass(frozen=True)
class Record:
    """Shares of right answers. weighed: always searching, and an arbiter gives the better answer; oracle: of somebody
    who always knew which of both to give.
    """

    predictions: str
    questions: int
    never: float
    always: float
    weighed: float
    oracle: float
    points: tuple[Recorded, ...]


def read_demo_record() -> Record:
    file = demo_folder() / "judge.json"
    return read_record(Record, read_json(file), str(file))


def chart(record: Record, block: str) -> Iterator[str]:
    """A bar for each way, all from 0. block: the character bars are made of."""
    bars = [
        ("never", 0.0, record.never),
        *(("gated", point.searched, point.right) for point in record.points[::SHOWN]),
        ("always", 1.0, record.always),
        ("arbiter", 1.0, record.weighed),
    ]
    yield f"{'':8}{'searches':>8}  right answers"
    for name, searched, right in bars:
        bar = block * round(WIDEST * right / record.oracle)
        yield f"{name:8}{searched:8.0%}  {bar} {right:.1%}"


def conclusion(record: Record) -> str:
    """What the gate does at its fewest searches, and at the fewest where it is surely better than always searching."""
    few, surely = record.points[0], [point for point in record.points if point.low > 0]
    said = [_against(point) for point in dict.fromkeys((few, *surely[:1]))]
    saved = round((1 - few.searched) * PER, -3)
    return (
        f"Against always searching, in points of right answers: {'; '.join(said)} (95 % intervals). The first saves "
        f"about {saved:,.0f} of {PER:,} searches."
    )


def _against(point: Recorded) -> str:
    gain, low, high = (f"{100 * value:+.1f}" for value in (point.gain, point.low, point.high))
    return f"{gain} [{low}, {high}] with {point.searched:.0%} of the searches"
