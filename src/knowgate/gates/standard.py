"""The gate that is taken where nobody names one, and all of them as a table. Knows the table of gates."""

from __future__ import annotations

from knowgate.gates import FITTED, GATES, PACKAGED, PLAIN, load_fitted, load_gate
from knowgate.gates.fitted.artefact import read_artefact
from knowgate.prompts import packaged
from knowgate.types import Gate, Model


def default_gate(model: Model, prompts: str | None = None) -> Gate:
    """The packaged gate fitted on this LLM and wording, if there is one, else the first token's probability.

    prompts: fingerprint of the answer prompts; the packaged ones by default.
    """
    wording = packaged("answer").fingerprint if prompts is None else prompts
    if model.depth > 0:  # without hidden states no packaged gate can work, and asking a server who it is takes time
        for folder in sorted(path.parent for path in PACKAGED.glob("*/gate.json")):
            made = read_artefact(folder).manifest
            if (made["model"]["fingerprint"], made["prompts"]) == (model.fingerprint, wording):
                return load_fitted(str(folder))
    return load_gate(PLAIN)


def markdown_table() -> str:
    """The gates as the Markdown table of the README."""
    heads = ("gate", "retrieves when", "needs", "extra cost", "reference")
    named = {f"`{name}`": entry for name, entry in GATES.items()}
    named |= {f"`{name}` (fitted)": entry for name, entry in FITTED.items()}
    rows = [(name, one.summary, one.needs or "-", one.cost, one.paper or "-") for name, one in named.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ("---",) * len(heads), *rows))
