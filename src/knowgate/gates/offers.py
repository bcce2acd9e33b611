"""Whether an LLM gives what a gate reads. Knows the table of gates; asks no LLM anything."""

from __future__ import annotations

from knowgate.errors import NotOffered
from knowgate.gates import GATES
from knowgate.registry import Entry
from knowgate.types import Gate, ListingModel, Model, Signal


def check_offers(gate: Gate, model: Model) -> None:
    """Refuse a gate that needs what this backend cannot give, and name those that would work."""
    missing = gate.needs - model.offers
    if not missing:
        return
    works = [name for name, entry in GATES.items() if _signals(entry) <= model.offers]
    raise NotOffered(
        f"gate '{gate.name}' needs {', '.join(sorted(missing))}, which {model.name} does not give. "
        f"Give one that works with it to --gate: {', '.join(works)}."
    )


def check_want(gate: Gate, model: Model) -> None:
    """Refuse a gate, once it is bound, that reads what a server gives of other layers, places or tokens only."""
    if not isinstance(model, ListingModel):
        return
    try:
        model.check_want(gate.want)
    except NotOffered as error:
        raise NotOffered(f"gate '{gate.name}' cannot work with {model.name}: {error}") from None


def _signals(entry: Entry) -> set[Signal]:
    return {Signal(word.strip()) for word in entry.needs.split(",") if word.strip()}
