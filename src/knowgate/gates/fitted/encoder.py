"""The sentence embeddings a gate was fitted with."""

from __future__ import annotations

from dataclasses import dataclass

from knowgate.embedding import SentenceEmbedder
from knowgate.errors import ArtefactError
from knowgate.gates.fitted.artefact import Artefact
from knowgate.types import Embedder


@dataclass(frozen=True)
class EncoderOptions:
    """The embedding model of a gate, and its identity."""

    embedder: str
    embedder_fingerprint: str


def fitted_encoder(artefact: Artefact, given: Embedder | None = None) -> Embedder:
    """The embedding model a gate was fitted with; another one is refused."""
    options = artefact.options
    encoder = given or SentenceEmbedder(options["embedder"])
    if encoder.fingerprint != options["embedder_fingerprint"]:
        raise ArtefactError(
            f"the gate '{artefact.path.name}' was fitted with the embedding model {options['embedder']} "
            f"({options['embedder_fingerprint'][:12]}), not this one ({encoder.fingerprint[:12]}). "
            "Fit it again, or give that model back."
        )
    return encoder
