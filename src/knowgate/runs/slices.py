"""The parts of a run a question belongs to: data set, language, freshness, hops, answer frequency, form."""

from __future__ import annotations

import math
from collections.abc import Sequence

from knowgate.runs.rows import LabelRow

FREQUENCY = "answer frequency"
DIMENSIONS = ("data set", "language", "freshness", "hops", FREQUENCY, "form")
THIRDS = ("rare", "middle", "frequent")


def slice_values(row: LabelRow) -> dict[str, str]:
    """The slices a question belongs to, by dimension; what its data set does not say is left out.

    Answer frequency is not among them: which third a question is in depends on the others (`frequency_thirds`).
    """
    meta = row.meta
    is_hotpot = str(meta.get("dataset", "")).startswith("hotpotqa")  # elsewhere `type` means something else
    hops = meta.get("num_hops") or meta.get("hops") or (meta.get("type") if is_hotpot else None)
    values = {
        "data set": meta.get("dataset"),
        "language": row.lang,
        "freshness": meta.get("fact_type"),
        "hops": hops,
        "form": "multiple choice" if row.choices else "open question",
    }
    return {name: str(value) for name, value in values.items() if value not in (None, "")}


def frequency_thirds(counts: Sequence[int | None]) -> list[str | None]:
    """Thirds by how many passages of the corpus hold the answer: what is rare there is long-tail knowledge.

    The rule: a third ends with the last count that a third (two thirds) of the known counts, rounded up, reach. Equal
    counts stay together, so a third can be empty. None: the count is not known, or all known ones are equal.
    """
    known = sorted(count for count in counts if count is not None)
    if len(set(known)) < 2:
        return [None] * len(counts)
    low, high = (known[math.ceil(part * len(known) / 3) - 1] for part in (1, 2))
    return [None if count is None else THIRDS[(count > low) + (count > high)] for count in counts]
