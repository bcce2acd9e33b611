"""Whether what was calibrated still holds: for this LLM, this wording and this index."""

from __future__ import annotations

from knowgate.errors import ArtefactError
from knowgate.gates import PACKAGED, FittedGate
from knowgate.pipeline import AdaptiveRAG


def stale_because(rag: AdaptiveRAG) -> str:
    """Why the gate's calibration does not hold here; '' where it does, or where there is none.

    A gate that cannot work here at all is an error: nobody should find that out from its decisions.
    """
    try:
        gate = rag.bound
    except ArtefactError as error:
        return f"the gate's calibration does not hold here. {error}"
    if not isinstance(gate, FittedGate) or gate.artefact.path.is_relative_to(PACKAGED):
        return ""  # a gate that comes with knowgate never promised anything about anybody's documents
    proven = gate.artefact.manifest.get("guarantee")
    if not proven or rag.retriever is None:
        return ""
    made, here = proven["retriever"]["fingerprint"], rag.retriever.fingerprint
    return "" if made == here else f"the gate was calibrated on another index ({made}, not {here})"
