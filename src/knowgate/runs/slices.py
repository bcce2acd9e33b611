"""The parts of a run a question belongs to: data set, language, freshness, hops, form, answer frequency."""

from __future__ import annotations

from knowgate.runs.rows import LabelRow


def slice_values(row: LabelRow) -> dict[str, str]:
    """The slices a question belongs to, by dimension; what its data set does not say is left out."""
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
