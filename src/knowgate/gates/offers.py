"""Whether an LLM gives what a gate reads. Knows the table of gates; asks no LLM anything."""

from __future__ import annotations

from knowgate.errors import NotOffered
from knowgate.gates import GATES
from knowgate.registry import Entry
from knowgate.types import Gate, ListingModel, Model, Signal


def check_offers(gate: Gate, model: Model) -> None:
    """Refuse a gate that needs what this backend cannot give, and name those that would work."""
    missing = gate.needs - model.offers
    if not missing and gate.want.entropies and isinstance(model, ListingModel) and not model.has_entropies:
        raise NotOffered(
            f"gate '{gate.name}' reads token entropies, but {model.name} lists too few tokens for them. Use another "
            "statistic: logprob:first, logprob:mean, logprob:min or logprob:margin."
        )
    if not missing:
        return
    works = [name for name, entry in GATES.items() if _signals(entry) <= model.offers]
    raise NotOffered(
        f"gate '{gate.name}' needs {', '.join(sorted(missing))}, which {model.name} does not give. "
        f"Give one that works with it to --gate: {', '.join(works)}."
    )


def _signals(entry: Entry) -> set[Signal]:
    return {Signal(word.strip()) for word in entry.needs.split(",") if word.strip()}
